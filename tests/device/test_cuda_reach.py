"""How ranks access each other's GPU memory, and errors if they cannot: on CuPy without a GPU (fake_cupy.py)."""

from __future__ import annotations

import warnings
from functools import partial
from threading import Event
from time import sleep
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_cublas import CUBLASError
from fake_cuda import CUDADriverError, CUDARuntimeError, Gpu
from fake_nccl import Nccl
from tiers import in_turn

from pdgemm import Batch, DistMatrix, Epilogue, ProcessGrid, linalg, matmul_grouped, pdgemm, plan as planned
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, OutOfMemoryError
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.transport.movers.node_arrays import NodeArrays

pytestmark = pytest.mark.mpi


def test_discovered_ways_of_access_are_used(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """Ranks find the access that this machine offers, and use it."""
    alone = gpu.count == 1
    with ProcessGrid(comm) as grid:
        A, B = (DistMatrix.random((40, 40), grid=grid, seed=s, device="cuda") for s in (1, 2))
        reach = cuda.reach(grid)
        assert reach.sharing == (comm.size if alone else 1)
        if comm.size == 1:
            return
        assert (reach.reads, reach.staged, reach.nccl) == ("shared" if alone else "ipc", alone, not alone)
        assert reach.why == ("the MPI library reports no support for GPUs" if alone else "its self-test passed")
        assert "ipcOpenMemHandle" in gpu.calls
        gpu.calls.clear()
        C = pdgemm(1, A, B)
        assert C.report.mover == reach.reads
        assert C.report.ranks_per_device == reach.sharing
        assert not C.report.counted.messages_sent
        assert "gemmEx" in gpu.calls
        gpu.calls.clear()
        for _ in range(5):
            pdgemm(1, A, B)
        assert "ipcOpenMemHandle" not in gpu.calls  # mapped memory stays mapped
        assert gpu.mapped
        pdgemm(1, A, B, mover="staged")
        assert "memcpyAsync" in gpu.calls or grid.shape == (1, 1)


def test_failures_are_errors(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """A failed kernel, memory that cannot be exported or pinned, and an address that no kernel accepts raise errors."""
    import cupy

    event = cuda.current_stream().record()
    gpu.failed = 600
    assert not cuda.happened(event)
    gpu.failed = 700
    with pytest.raises(CUDARuntimeError, match="700"):
        cuda.happened(event)
    gpu.failed = 0
    assert cuda.happened(event)

    A = cuda.to_device(np.ones((3, 3)), "C")
    product: Any = cuda.multiply(1, A, A, cuda.empty((3, 3), "float64"), False, False, False)
    for error, expected, text in (
        (CUBLASError(3), OutOfMemoryError, "ran out of memory on the GPU"),  # cuBLAS's ALLOC_FAILED
        (CUDARuntimeError(2), OutOfMemoryError, "ran out of memory"),
        (CUDADriverError(2), OutOfMemoryError, "ran out of memory"),
        (CUDARuntimeError(3), CUDARuntimeError, "3"),
        (CUBLASError(2), CUBLASError, "2"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gpu, "memcpy2DAsync", Mock(side_effect=error))
            pinned = cuda.pinned(9 * 96, "float64").device.reshape(9, 96)
            with pytest.raises(expected, match=text):
                cuda.combine(CONVERT, cuda.empty((9, 96), "float64")[:, :64], pinned[:, :64])
            patch.setattr(gpu, "gemmEx", Mock(side_effect=error))
            with pytest.raises(expected, match=text):
                cuda.multiply(1, A, A, cuda.empty((3, 3), "float64"), False, False, False)(0)
    product(0)

    with pytest.raises(OutOfMemoryError, match="bytes of pinned memory"):
        cuda.pinned(1 << 40, "float64")
    tensor = Mock(spec=["__dlpack__", "__dlpack_device__"])  # an array of another library, which refuses to export it
    tensor.__dlpack_device__ = Mock(return_value=(2, 0))
    tensor.__dlpack__ = Mock(side_effect=BufferError("Can't export tensors that require gradient"))
    with ProcessGrid(comm) as grid:
        with pytest.raises(DTypeError, match="CuPy cannot read this Mock as an array: Can't export tensors that req"):
            DistMatrix.from_local(tensor, (40, 40), grid=grid)
        A, B, C = (DistMatrix.random((40, 40), grid=grid, seed=s, device="cuda") for s in (1, 2, 3))
        allocator = cupy.cuda.malloc_managed if comm.rank == comm.size - 1 else None  # on one rank only
        with cupy.cuda.using_allocator(allocator):
            for check in (True, False) if comm.size > 1 else ():
                with pytest.raises(DeviceError, match="CuPy's allocator now returns managed memory"):
                    pdgemm(1, A, B, 0, C, algorithm="inner", check=check)
        bytes_ = cuda.to_device(np.zeros(8 * 40 * 40 + 8, np.int8), "C")
        shape = A.local.shape
        askew = bytes_[4 : 4 + 8 * shape[0] * shape[1]].view("float64").reshape(shape)
        with pytest.raises(DeviceError, match="which is not a multiple of 8 bytes"):
            DistMatrix.from_local(askew, (40, 40), grid=grid)


def test_mappings_of_reused_handles(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """A reused IPC handle is mapped anew, even if arrays in the old allocation exist; old mappings are closed."""
    from pdgemm.devices import cuda_ipc

    if comm.size == 1:
        pytest.skip("one rank maps nothing")
    other = (comm.rank + 1) % comm.size
    large = 1 << 18  # words for which the pool makes a separate allocation

    def seen(grid: Any, x: Any) -> float:
        peers = NodeArrays(grid, x=(x, None))
        views.append(peers("x", other))
        found = float(cuda.to_host(views[-1])[0])
        peers.sync()
        return found

    with ProcessGrid(comm) as grid:
        cuda.discover_peers(grid)
        kept, views = list[Any](), list[Any]()
        for turn in range(40):
            if turn % 3 == 0:
                views.clear()
            x = cuda.to_device(np.full(large, 10.0 * turn + comm.rank), "C")
            assert seen(grid, x) == 10.0 * turn + other
            assert len(gpu.mapped) <= cuda_ipc._MAPPINGS + len(views) * (comm.size - 1)
            if turn % 2:
                kept.append(x)
            else:
                del x
                cuda_ipc.cupy.get_default_memory_pool().free_all_blocks()  # the next allocation has the same handle
        views.clear()
        for _ in range(cuda_ipc._UNUSED + 1):
            seen(grid, kept[0])
        assert len(gpu.mapped) == comm.size - 1


@pytest.mark.parametrize(
    "name", ["product", "plan", "prepared", "moved", "epilogue", "redistribute", "select", "grouped", "cholesky", "ipc"]
)
def test_memory_that_one_rank_cannot_map(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any, name: str) -> None:
    """All ranks notice it before anything is written, and repeat the operation with messages, or raise an error."""
    if comm.size == 1:
        pytest.skip("one rank maps nothing")
    n = round(370 * comm.size**0.5)  # large enough for separate allocations, which are not mapped yet
    a, order = np.eye(n) + np.arange(n) / n, [*range(1, n), 0]
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(a, grid=grid, device="cuda")
        if name == "cholesky":
            A = DistMatrix.from_global(a @ a.T, grid=grid, block=32, device="cuda")
        C = DistMatrix.zeros((n, n), grid=grid, block=16 if name in ("moved", "redistribute") else None, device="cuda")
        assert cuda.reach(grid).reads
        across = int(grid.shape[0] == 1)  # an axis along which rows, or columns, are sent
        narrow, bias = (DistMatrix.ones((x, n), grid=grid, dtype="float32", device="cuda") for x in (n, 1))
        one_each = Batch.from_local(cuda.to_device(np.eye(n)[None], "C"), comm)
        plan = planned(A, A, C, beta=1, algorithm="cannon" if name == "moved" else "summa")
        operations: dict[str, Any] = {
            "product": lambda: pdgemm(1, A, A, 1, C, algorithm="summa"),
            "plan": lambda: plan.execute(A, A, C, beta=1),
            "prepared": lambda: plan.prepare(A, A, C)(beta=1),
            "moved": lambda: plan.execute(A, A, C, beta=1),
            "epilogue": lambda: pdgemm(1, A, A, 1, narrow, algorithm="summa", epilogue=Epilogue(bias=bias)),
            "redistribute": lambda: A.redistribute(out=C),
            "select": lambda: A.take(order, axis=across),
            "grouped": lambda: matmul_grouped(A, one_each, A.indices()[0] % comm.size),
            "cholesky": lambda: linalg.cholesky(A),
            "ipc": lambda: pdgemm(1, A, A, 1, C, algorithm="summa", mover=cuda.reach(grid).reads),
        }
        # these cannot send panels instead
        refused = name == "ipc" or (name == "cholesky" and cuda.reach(grid).reads == "shared")
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(gpu, "ipcOpenMemHandle", Mock(side_effect=CUDARuntimeError(2)))
            if refused:
                text = rf"rank {comm.size - 1} of the node cannot map the .* ranks send|factor it on the host"
                with pytest.raises(DeviceError, match=text):
                    operations[name]()
                return
            X = operations[name]()
        assert not cuda.reach(grid).reads
        expected = {
            "redistribute": a,
            "grouped": a,
            "select": a.take(order, across),
            "cholesky": np.linalg.cholesky(a @ a.T),
        }
        expected |= {"epilogue": a @ a + 2}  # C = 1 and bias = 1
        rtol = 1e-6 if name == "epilogue" else 1e-12
        assert np.allclose(X.allgather(), expected.get(name, a @ a), rtol=rtol, atol=1e-9)
        report = X.report
        assert report.as_predicted
        assert report.counted.messages_sent or grid.shape == (1, 1)
        if name in ("plan", "prepared"):
            operations[name]()
            assert np.allclose(C.allgather(), 2 * a @ a, rtol=1e-12)


@pytest.mark.parametrize("name", ["zeros", "pdgemm", "execute", "redistribute", "cholesky", "short"])
def test_memory_mapped_by_other_ranks_is_freed(comm: Any, gpu: Gpu, cuda: Any, name: str, monkeypatch: Any) -> None:
    """Ranks unmap memory that its owner has released, at the latest when a rank runs out of memory or nearly so."""
    from pdgemm.devices import cuda_ipc

    if comm.size == 1:
        pytest.skip("one rank maps nothing")
    pool = cuda_ipc.cupy.get_default_memory_pool()
    n = round(370 * comm.size**0.5)  # large enough for separate allocations
    with ProcessGrid(comm) as grid:
        A = DistMatrix.eye(n, grid=grid, device="cuda")
        reach, small, C = cuda.reach(grid), DistMatrix.eye(4, grid=grid, device="cuda"), A.copy()
        if name == "cholesky" and reach.staged and reach.reads != "shared":
            pytest.skip("factorisations send their panels")
        plan = planned(A, A, C, algorithm="inner")
        many = [DistMatrix.eye(n, grid=grid, device="cuda") for _ in range(8)]
        for B in many:
            pdgemm(1, B, B, 0, C, algorithm="summa")
        del B, many
        pool.free_all_blocks()
        lingering = gpu.used() - sum(len(x) for ref in gpu.allocations if (x := ref()))
        assert comm.allreduce(lingering) > 0
        calls: dict[str, Any] = {
            "zeros": lambda: DistMatrix.zeros((n, n), grid=grid, device="cuda"),
            "pdgemm": lambda: pdgemm(1, A, A),
            "execute": lambda: plan.execute(A, A, C),
            "redistribute": lambda: A.redistribute(block=16),
            "cholesky": lambda: linalg.cholesky(A),
            "short": lambda: [pdgemm(1, small, small) for _ in range(2)],
        }
        comm.Barrier()
        if comm.rank == 0:  # allocations of the call do not fit beside the mapped memory, or nine tenths are used
            gpu.total = gpu.used() + {"short": gpu.used() // 10, "execute": 2 << 20}.get(name, 1000)
        else:
            late, unmap = [0.05], gpu.ipcCloseMemHandle  # slow: if rank 0 does not wait, it runs out of memory again
            monkeypatch.setattr(gpu, "ipcCloseMemHandle", lambda ptr: (sleep(late.pop() if late else 0), unmap(ptr)))
        calls[name]()
        comm.Barrier()
        gpu.used()
        assert len(gpu.given_back) <= (name == "short")  # no freed memory is still mapped


def test_nccl_is_tried(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:
    """NCCL is tested before its first use; if it fails on one rank, all ranks use other movers."""
    from pdgemm.devices import cuda_ipc

    if gpu.count == 1:
        pytest.skip("the ranks share a GPU")
    monkeypatch.setattr(cuda_ipc, "_maps", lambda memory, device: False)
    making, sending = (Nccl, "NcclCommunicator"), (Nccl.NcclCommunicator, "bcast")
    for fails in (None, making, sending):
        aborted = Nccl.aborted
        with monkeypatch.context() as patch, ProcessGrid(comm) as grid:
            if fails and comm.rank == comm.size - 1:
                patch.setattr(*fails, failing(getattr(*fails)))
            A = DistMatrix.random((40, 40), grid=grid, device="cuda")
            reach = cuda.reach(grid)
            assert reach.nccl == (not fails or comm.size == 1)
            moved = pdgemm(1, A, A, algorithm="summa").report.mover
            assert comm.size == 1 or (moved == "nccl") == (not fails)
            assert Nccl.aborted - aborted == (fails == sending and comm.size > 1)  # pending operations are aborted


def test_features_that_fail_on_one_rank_are_not_used(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:
    """If one rank lacks memory or a library for the self-tests, no rank hangs, and messages are staged."""
    from pdgemm.devices import cuda_ipc

    if comm.size == 1:
        pytest.skip("one rank tries nothing")
    for place, name, failure in (
        (cuda, "to_device", MemoryError("full")),
        (cuda_ipc, "capable", OSError("libcuda.so.1")),
        (cuda_ipc.IpcMemory, "array", CUDARuntimeError(2)),
    ):
        with monkeypatch.context() as patch, ProcessGrid(comm) as grid, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that messages are staged
            if comm.rank == comm.size - 1:
                patch.setattr(place, name, Mock(side_effect=failure))
            cuda.discover_peers(grid)
            patch.undo()
            reach = cuda.reach(grid)
            assert reach.reads == "" and (name != "to_device" or (reach.staged, reach.nccl) == (True, False)), reach
            A = DistMatrix.from_global(np.eye(40), grid=grid, device="cuda")
            assert np.array_equal(pdgemm(1, A, A).allgather(), np.eye(40))


PREPARED = in_turn(["summa", "cannon", "2.5d", "stationary_a"], ["float64", "float16", "int8"])


@pytest.mark.parametrize(("algorithm", "dtype"), PREPARED)
def test_preparing_does_all_one_time_work(
    comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any, algorithm: str, dtype: str
) -> None:
    """The second run of a prepared plan creates no communicator, maps no memory and compiles no kernel."""
    from pdgemm.devices import kernels

    with ProcessGrid(comm) as grid:
        if algorithm == "2.5d" and comm.size != 4:
            pytest.skip("four ranks are two layers")
        made: dict[str, Any] = {"dtype": dtype, "grid": grid, "device": "cuda"}
        A, B = (DistMatrix.from_function(lambda i, j: (i + j) % 3, (12, 12), **made) for _ in "AB")
        C = DistMatrix.zeros((12, 12), dtype="int32" if dtype == "int8" else dtype, grid=grid, device="cuda")
        mover = "auto" if gpu.count == 1 or comm.size == 1 else "nccl"
        plan = planned(A, B, C, algorithm=algorithm, mover=mover)
        made, compiled = patched(monkeypatch, Nccl, "NcclCommunicator"), kernels._kernel.cache_clear
        compiled()
        product = plan.prepare(A, B, C)
        created, known = len(made), kernels._kernel.cache_info().misses
        assert not created or mover == "nccl"
        gpu.calls.clear()
        product()
        assert len(made) == created
        assert "ipcOpenMemHandle" not in gpu.calls
        if not plan.moves:
            assert kernels._kernel.cache_info().misses == known
        x = np.add.outer(np.arange(12), np.arange(12)) % 3
        found = C.to_global()
        assert comm.rank or np.array_equal(found.astype(int), x @ x)


def test_nccl_between_nodes(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:
    """NCCL is tested if panels are not read in place; it is not used if it hangs or if PDGEMM_NCCL=no."""
    from pdgemm.devices import cuda_nccl

    if gpu.count == 1 or comm.size == 1:
        pytest.skip("the ranks share a GPU, or there is one rank")
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1" if comm.size % 2 or comm.size == 2 else "2")
    moved = []
    for case in ("works", "waits", "unwanted"):
        own, released = comm.Dup(), Event()
        with monkeypatch.context() as patch, ProcessGrid(own) as grid, warnings.catch_warnings(record=True) as warned:
            tries = patched(patch, Nccl, "NcclCommunicator")
            if case == "waits":
                patch.setattr(cuda_nccl, "_PATIENCE", 0.5)
                patch.setattr(Nccl, "NcclCommunicator", partial(_waits, released))
            patch.setenv("PDGEMM_NCCL", "no" if case == "unwanted" else "")
            A = DistMatrix.random((40, 40), grid=grid, device="cuda")
            moved.append(pdgemm(1, A, A, algorithm="summa").report.mover)
            assert bool(tries) == (case == "works")
            assert comm.rank or (case == "waits") == any("NCCL did not start" in str(x.message) for x in warned)
            released.set()
        own.Free()
    assert moved[0] == "nccl"
    assert "nccl" not in moved[1:]
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("PDGEMM_NCCL", "perhaps")
    with ProcessGrid(comm) as grid, pytest.raises(ArgumentError, match="PDGEMM_NCCL must be yes or no, got 'perhaps'"):
        DistMatrix.zeros((3, 3), grid=grid, device="cuda")


def _waits(released: Event, *args: Any) -> None:
    released.wait()
    raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")


def patched(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Record the arguments of all calls of a function."""
    calls, call = list[Any](), getattr(owner, name)
    patch.setattr(owner, name, lambda *args: (calls.append(args), call(*args))[1])
    return calls


def failing(call: Any) -> Any:
    """Return a function that makes the call and then raises an error of NCCL."""

    def failed(*args: Any) -> None:
        call(*args)
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    return failed
