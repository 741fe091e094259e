"""Fixtures of tests of devices."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cupy import fake_cupy


@pytest.fixture(name="comm")
def own_comm(comm: Any) -> Iterator[Any]:
    """A duplicate communicator for each test: facts about a device are cached with the grids of a communicator."""
    own = comm.Dup()
    yield own
    own.Free()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `gpu`: one GPU for all ranks; if ranks communicate, also one GPU each with CUDA-aware MPI."""
    if "gpu" in metafunc.fixturenames:
        both = {"comm", "movers"} & {*inspect.signature(metafunc.function).parameters}
        metafunc.parametrize("gpu", ["one GPU", "a GPU each"] if both else ["one GPU"], indirect=True)


@pytest.fixture
def gpu(comm: Any, request: Any) -> Iterator[Any]:
    if comm.size > 4:
        pytest.skip("runs on up to 4 ranks: nothing in this layer depends on their number")
    alone = request.param == "one GPU"
    with fake_cupy(1 if alone else comm.size, aware="no" if alone else "yes") as made:
        yield made


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
