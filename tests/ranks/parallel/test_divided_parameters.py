"""Parameters that are divided along tp, ep and pp: every mesh gives the numbers of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from divided_model import meshes, own_values, run, window
from tiers import every_grid

pytestmark = pytest.mark.mpi
STEPS = 3


@cache
def one_process(microbatches: int) -> tuple[list[float], dict[str, np.ndarray]]:
    from mpi4py import MPI

    from pdgemm.parallel import Mesh

    norms, optimizer = run(Mesh(MPI.COMM_SELF), STEPS, microbatches=microbatches)
    return norms, own_values(optimizer.buckets)


def traffic(kinds: Any) -> Any:
    from pdgemm.instrument.recorder import Traffic

    return sum(kinds, Traffic())


@every_grid
def test_every_mesh_gives_the_numbers_of_one_process(comm: Any) -> None:
    """Parameters and norms after 3 clipped steps to 1e-12; words, messages and bytes exactly as the layouts say."""
    from pdgemm.parallel import Mesh

    for at, sizes in enumerate(meshes(comm.size)):
        mesh = Mesh(comm, **sizes)
        for stage in range(4):
            microbatches = 1 + (at + stage) % 2
            how = {"reduce_each": stage > 1 and at % 4 < 2, "bucket_bytes": (None, 300)[at % 3 > 0]}
            norms, end = one_process(microbatches)
            mesh.traffic.clear()
            here, optimizer = run(mesh, STEPS, stage=stage, microbatches=microbatches, **how)
            np.testing.assert_allclose(here, norms, rtol=1e-12, err_msg=f"{sizes} {stage}")
            layouts = optimizer.buckets.layouts
            step = layouts.step()
            for kind in ("gradients", "parameters", "decisions"):
                assert mesh.traffic[kind] == traffic([step[kind]] * STEPS), (sizes, stage, kind)
            assert optimizer.bytes == layouts.bytes(2)
            for name, x in own_values(optimizer.buckets).items():
                whole = end[name][window(mesh.shape, mesh.rank, name)]
                np.testing.assert_allclose(x, whole, rtol=1e-12, atol=1e-12, err_msg=f"{name} {sizes} {stage}")
        mesh.free()
