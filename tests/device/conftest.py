"""Fixtures of tests of devices."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(name="comm")
def own_comm(comm: Any) -> Iterator[Any]:
    """What ranks find out about a device is kept with the grids of a communicator: each test has one of its own."""
    own = comm.Dup()
    yield own
    own.Free()


@pytest.fixture
def cuda() -> Any:
    from pdgemm.local.arrays.device import device_named

    return device_named("cuda")


@pytest.fixture
def movers(comm: Any) -> Any:
    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm.local.arrays.device import device_named

    with ProcessGrid(comm) as grid:
        DistMatrix.zeros((1, 1), grid=grid, device="cuda")
        reach = device_named("cuda").reach(grid)  # type: ignore[union-attr]
    near = ["shared", "ipc"] if reach.reads and comm.size > 1 else []
    return [*near, "staged", *([] if reach.staged else ["mpi", "ring", "ibcast"]), *(["nccl"] if reach.nccl else [])]
