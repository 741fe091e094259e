"""NCCL that fails after its self-test, on CuPy without a GPU (fake_cupy.py): no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_cupy import Nccl, fake_cupy

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.errors import DeviceError, OutOfMemoryError
from pdgemm.transport.packed_exchange import kept_if_it_fails

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]
WORDS = "NCCL_ERROR_REMOTE_ERROR: a remote process exited"


@pytest.fixture(autouse=True)
def gpus(comm: Any, monkeypatch: Any) -> Iterator[Any]:
    """Simulate a GPU for each rank; ranks cannot read each other's memory."""
    if comm.size > 4:
        pytest.skip("nothing depends on the number of ranks")
    with fake_cupy(comm.size, aware="yes") as simulated:
        from pdgemm.devices import cuda_ipc

        monkeypatch.setattr(cuda_ipc, "_maps", lambda memory, device: False)
        yield simulated


WAITS: dict[str, Callable[[Any], object]] = {  # calls that wait on the host for work queued after operations of NCCL
    "finish": lambda recorder: recorder.finish(),
    "synchronize_copies": lambda recorder: recorder.synchronize_copies(),
    "copied": lambda recorder: recorder.copied().Wait(),
    "record_products": lambda recorder: [wait() for wait in recorder.record_products(lambda: None)],
}


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_ends(comm: Any, cuda: Any, name: str) -> None:
    """If NCCL reports an error on one rank, all ranks raise it, whichever call they wait in."""
    from pdgemm.devices.streams import recorder_of

    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    with ProcessGrid(comm) as grid:
        x = DistMatrix.zeros((8, 8), grid=grid, device="cuda").stored
        assert cuda.reach(grid).nccl
        comm.Barrier()
        recorder = recorder_of(x)
        Nccl.stuck, Nccl.error = True, WORDS if comm.rank == comm.size - 1 else ""
        with recorder.phase("pack"):
            cuda.broadcast(grid.comm, x, 0)
        with recorder.phase("compute"):
            pass
        with pytest.raises(DeviceError, match=rf"NCCL fails on rank {comm.size - 1}, in .* of ranks 0.*: {WORDS}"):
            WAITS[name](recorder)
        assert not Nccl.waiting and Nccl.aborted
        recorder.finish()  # returns: nothing is pending
        assert not cuda.reach(grid).nccl
        with pytest.raises(DeviceError, match=WORDS):
            cuda.broadcast(grid.comm, x, 0)


@pytest.mark.parametrize("algorithm", ["summa", "cannon", "stationary_a", "2.5d"])
def test_products(comm: Any, cuda: Any, monkeypatch: Any, algorithm: str) -> None:
    """If NCCL fails on one rank, all raise its error; later products use another mover, on a new grid NCCL again."""
    from pdgemm.devices import cuda_nccl

    if comm.size == 1 or (algorithm == "2.5d" and comm.size != 4):
        pytest.skip("one rank sends nothing, and two layers have four ranks")
    a = np.arange(144.0).reshape(12, 12)
    last = comm.rank == comm.size - 1
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(a, grid=grid, device="cuda")
        C = pdgemm(1, A, A, algorithm=algorithm, panel_width=2)
        assert C.report.mover == "nccl"
        with monkeypatch.context() as patch:
            if last:
                patch.setattr(cuda_nccl, "_pointer", Mock(side_effect=OutOfMemoryError("a launch lacks memory")))
            patch.setattr(Nccl, "stuck", True)
            with pytest.raises(OutOfMemoryError if last else DeviceError, match="a launch lacks memory") as caught:
                pdgemm(1, A, A, 0, C, algorithm=algorithm, panel_width=2)
        assert last or f"rank {comm.size - 1}" in str(caught.value)
        assert not Nccl.waiting
        comm.Barrier()
        pdgemm(1, A, A, 0, C, algorithm=algorithm)
        assert C.report.mover != "nccl"
        assert np.array_equal(C.allgather(), a @ a)
        with pytest.raises(ValueError, match="nccl"):
            pdgemm(1, A, A, 0, C, mover="nccl")
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(a, grid=grid, device="cuda")
        C = pdgemm(1, A, A, algorithm=algorithm)
        assert C.report.mover == "nccl"
        assert np.array_equal(C.allgather(), a @ a)


def test_a_grid_is_freed_after_any_exception(comm: Any, cuda: Any) -> None:
    """An exception on one rank frees the grid although operations of NCCL wait for that rank."""
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    with ProcessGrid(comm) as grid:
        x = DistMatrix.zeros((8, 8), grid=grid, device="cuda").stored
        Nccl.stuck = True
        with cuda.transfer_stream:
            cuda.broadcast(grid.comm, x, 0)
        comm.Barrier()
        kept_if_it_fails(None, x).__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not Nccl.waiting
