"""Parameters that are divided along tp, ep and pp: every mesh gives the numbers of one process."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from divided_model import meshes, own_values, run, window
from tiers import every_grid, everything

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


@every_grid
def test_a_state_goes_on_with_any_mesh(comm: Any, shared_tmp_path: Path) -> None:
    """From each mesh of these ranks to one of fewer: the same bits in the file and on each rank, and the same run."""
    import h5py

    from pdgemm.parallel import Mesh, TrainingState

    numbers = [*dict.fromkeys((comm.size, max(1, comm.size - 1), -(-comm.size // 2)))]
    some = {n: comm.Split(int(comm.rank < n), comm.rank) for n in numbers}
    later = cycle((n, sizes) for n in numbers for sizes in reversed([*meshes(n)]))
    norms, end = one_process(1)

    def same_bits(optimizer: Any, path: Path) -> None:
        """Compare what this rank keeps with its windows of the whole matrices of the file."""
        buckets, mesh = optimizer.buckets, optimizer.buckets.mesh
        with h5py.File(path) as file:
            for kind in optimizer.kinds:
                for name, line in ((name, x) for x in buckets.lines for name in x.layout.places):
                    whole = file[f"{kind}/{name}"][:].reshape(end[name].shape)
                    elements, place = line.layout.overlap(name, line.storage.span(line.layout.bucket_of[name]))
                    flat = whole[window(mesh.shape, mesh.rank, name)].ravel()
                    kept = optimizer.kept(kind, line.layout.bucket_of[name])[place]
                    assert np.array_equal(kept, flat[elements]), (kind, name)

    firsts = [*meshes(comm.size)]
    for at, first in enumerate(firsts if everything() else firsts[:: -(-len(firsts) // 5)]):
        path, stage = shared_tmp_path / f"{at}.h5", at % 4
        mesh = Mesh(comm, **first)
        _, optimizer = run(mesh, 2, stage=stage, bucket_bytes=300)
        TrainingState(path, optimizer).save()
        comm.Barrier()
        same_bits(optimizer, path)
        number, then = next(later)
        if comm.rank < number:
            other = Mesh(some[number], **then)
            states: list[Any] = []

            def load(optimizer: Any, path: Path = path, states: list[Any] = states) -> None:
                states.append(TrainingState(path, optimizer))
                same_bits(optimizer, path)

            here, optimizer = run(other, STEPS, first=2, stage=(stage + 1 + at // 4) % 4, state=load)
            np.testing.assert_allclose(here, norms[2:], rtol=1e-12)
            for name, x in own_values(optimizer.buckets).items():
                whole = end[name][window(other.shape, other.rank, name)]
                np.testing.assert_allclose(x, whole, rtol=1e-12, atol=1e-12, err_msg=f"{name} {first} {then}")
            other.free()
        mesh.free()
    for part in some.values():
        part.Free()
