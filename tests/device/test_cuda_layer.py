"""`pdgemm.devices` itself, on CuPy without a GPU (fake_cupy.py), by the tests for a real one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from cuda_layer import CudaLayer
from factored import positive_definite
from fake_cupy import CUBLASError, CUDADriverError, CUDARuntimeError, Gpu, Nccl, fake_cupy
from fake_cusolver import CUSOLVERError
from tiers import everything, square_grid

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True, params=["one GPU", "a GPU each, and MPI takes pointers"])
def gpu(comm: Any, request: Any) -> Iterator[Gpu]:
    if comm.size > 4:
        pytest.skip("runs on up to 4 ranks: nothing in this layer depends on their number")
    alone = request.param == "one GPU"
    with fake_cupy(1 if alone else comm.size, aware="no" if alone else "yes") as made:
        yield made


class TestCudaLayer(CudaLayer):
    """What is tested on a real GPU."""

    OPS: ClassVar = ["NN", "TC", "CN", "NT"] if everything() else ["TC", "CN"]


def test_what_ranks_find_out(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """How ranks reach each other is what this machine has, and it is how they do."""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm

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
        assert "ipcOpenMemHandle" not in gpu.calls  # what is mapped stays so
        assert gpu.mapped
        pdgemm(1, A, B, mover="staged")
        assert "memcpyAsync" in gpu.calls or grid.shape == (1, 1)


def test_what_reductions_copy_to_the_host(comm: Any, gpu: Gpu) -> None:
    """At most the results of the rows or columns of a rank, and nothing for functions of elements."""
    from pdgemm import DistMatrix, ProcessGrid

    with ProcessGrid(comm) as grid:
        A = DistMatrix.random((90, 70), grid=grid, block=8, device="cuda")
        gpu.downloads.clear()
        for axis in (None, 0, 1):
            A.sum(axis), A.var(axis), A.argmax(axis), A.vector_norm(2, axis)
        A @ np.ones(70), A.trace(), A.norm(2), A.allclose(A), np.where(A > 0.5, A, 0) + A
        assert 0 < max(gpu.downloads) <= 16 * max(A.local.shape)


@pytest.mark.on_ranks(1)
def test_the_trailing_matrix_is_updated_in_few_launches(comm: Any, gpu: Gpu) -> None:
    """Of Cholesky, two products for each panel, and one with its own panel alone."""
    from pdgemm import DistMatrix, ProcessGrid, linalg

    if comm.size > 1:
        pytest.skip("each rank has other tiles")
    with ProcessGrid(comm) as grid:
        A = DistMatrix.random((1300, 1300), grid=grid, device="cuda")
        S = A + A.T + 2000 * DistMatrix.eye(1300, grid=grid, device="cuda")
        gpu.calls.clear()
        linalg.cholesky(S)
        assert gpu.calls.count("gemmEx") <= 2 * gpu.calls.count("potrf") - 3
        gpu.calls.clear()
        linalg.herk(1, A)
        assert gpu.calls.count("gemmEx") == 1


@pytest.mark.on_ranks(1, 2)
def test_benchmark(comm: Any, gpu: Gpu, capsys: Any, monkeypatch: Any) -> None:
    """scripts/gpu/bench_gpu.py as its ranks run it: all movers that there are, and every figure is there."""
    if comm.size > 2:
        pytest.skip("runs on one rank and on two")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "gpu"))
    bench: Any = import_module("bench_gpu")
    monkeypatch.setattr(bench, "PANEL_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "MANY", 100)
    monkeypatch.setattr(bench, "DTYPES", ("int8", "bfloat16", "complex64"))
    bench.worker([40], 1, 3, "cuda")
    if comm.rank:
        return
    found = json.loads(capsys.readouterr().out)
    assert all(x["right"] and x["as_predicted"] for x in found["correct"])
    if comm.size > 1:
        more = [] if gpu.count == 1 else ["mpi", "ring", "ibcast", "nccl"]
        assert {x["mover"] for x in found["products"]} == {"shared", "ipc", "staged", *more}
    assert found["hardware"]["gpu"] == "simulated"
    assert found["memory"]["left_bytes"] == 0
    bench.show([found])
    assert "simulated" in capsys.readouterr().out


def test_no_gpu(comm: Any, gpu: Gpu) -> None:
    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm.errors import DeviceError

    gpu.count = 0
    with ProcessGrid(comm) as grid, pytest.raises(DeviceError, match="no GPU is visible to this process"):
        DistMatrix.zeros((3, 3), grid=grid, device="cuda")


def test_what_fails_is_told(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """A kernel that failed, memory that cannot be exported or pinned, an address that no kernel takes."""
    import cupy

    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.errors import DeviceError, DTypeError, OutOfMemoryError
    from pdgemm.local.arrays.elementwise import CONVERT

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
        (CUBLASError(3), OutOfMemoryError, "lacks memory on the GPU, of which"),  # cuBLAS's ALLOC_FAILED
        (CUDARuntimeError(2), OutOfMemoryError, "lacks memory"),
        (CUDADriverError(2), OutOfMemoryError, "lacks memory"),
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
    tensor = Mock(spec=["__dlpack__", "__dlpack_device__"])  # of another library, which does not export it
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


FACTORED = {"cholesky": "potrf", "lu_factor": "getrf", "householder_qr": "geqrf"}  # by which routines


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_panels_stay_on_the_device(comm: Any, gpu: Gpu, cuda: Any, name: str, dtype: str) -> None:
    """What a factorisation brings to the host is at most pivots, a diagonal and info; it uploads indices alone.

    Before that, it brings the largest and the least number of A there, of both parts of complex ones.  Where MPI takes
    no pointers, the rows that LU exchanges go through the host as well.
    """
    from pdgemm import DistMatrix, ProcessGrid, linalg

    n, width = 300, 192  # of the widest panel
    a = positive_definite(n, dtype)
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(a, grid=grid, block=32, device="cuda")
        reach = cuda.reach(grid)
        if comm.size > 1 and reach.staged and reach.reads != "shared":
            pytest.skip("MPI takes no pointers, and ranks do not share a GPU")
        gpu.calls.clear(), gpu.downloads.clear(), gpu.uploads.clear()
        getattr(linalg, name)(A, **({"want_q": False} if name == "householder_qr" else {}))  # Q begins with an upload
        called, downloads, uploads = gpu.calls.count(FACTORED[name]), [*gpu.downloads], [*gpu.uploads]
        assert comm.allreduce(called) >= n // width
        assert set(gpu.calls) & {*FACTORED.values()} <= {FACTORED[name]}
        exchanged = name == "lu_factor" and comm.size > 1 and reach.staged
        small = 16 + width * np.dtype(dtype).itemsize * (n if exchanged else 1)
        assert max(downloads + uploads, default=0) <= small
        extremes = (4 if dtype == "complex128" else 2) * bool(A.local.size)
        assert exchanged or len(downloads) == extremes + (called if name != "householder_qr" else 0)


def test_cusolver_that_fails(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:
    """A library that one rank lacks raises on all; memory that cuSOLVER, or its workspace, lacks is a MemoryError."""
    import cupy

    from pdgemm import DistMatrix, ProcessGrid, linalg
    from pdgemm.errors import DeviceError, OutOfMemoryError
    from pdgemm.local.blas.local_lapack import getrf, potrf

    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(np.eye(40), grid=grid, block=8, device="cuda")
        if comm.size == 1 or not cuda.reach(grid).staged or cuda.reach(grid).reads == "shared":
            with monkeypatch.context() as patch:
                if comm.rank == comm.size - 1:
                    patch.delattr(cupy.cuda, "cusolver")
                for factored in (linalg.cholesky, linalg.lu_factor, linalg.householder_qr):
                    with pytest.raises(DeviceError, match=r"cuSOLVER, .* cannot be loaded: .*\[ctk\]"):
                        factored(A)
            assert np.array_equal(linalg.cholesky(A).allgather(), np.eye(40))
    x, pivots = np.asfortranarray(np.eye(20)), np.zeros(20, np.intc)
    solver: Any = cupy.cuda.cusolver
    for status, expected in ((2, OutOfMemoryError), (6, CUSOLVERError)):
        for name, act in (("dpotrf", potrf), ("dgetrf", partial(getrf, pivots=pivots))):
            with monkeypatch.context() as patch:
                patch.setattr(type(solver), name, Mock(side_effect=CUSOLVERError(status)))
                with pytest.raises(expected, match="lacks memory on the GPU" if status == 2 else "6"):
                    act(cuda.to_device(x, "F"))
    with monkeypatch.context() as patch:
        patch.setattr(type(solver), "dpotrf_bufferSize", Mock(return_value=1 << 40))
        with pytest.raises(OutOfMemoryError, match="cannot allocate"):
            potrf(cuda.to_device(x, "F"))


def test_wrong_calls_of_cusolver_are_seen(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """By the simulated one."""
    import cupy

    solver: Any = cupy.cuda.cusolver
    x, numbers = cuda.to_device(np.asfortranarray(np.eye(6)), "F"), cuda.empty((7,), "int32")
    work, handle, stream = cuda.empty((500,), "float64"), solver.create(), cupy.cuda.get_current_stream()
    call = lambda ld=6, work=work, words=500: solver.dpotrf(  # noqa: E731
        handle, 0, 6, x.data.ptr, ld, work.data.ptr, words, numbers.data.ptr
    )
    with pytest.raises(AssertionError, match="another stream than the caller"):
        call()
    solver.setStream(handle, stream.ptr)
    call()
    with cuda.product_stream(), pytest.raises(AssertionError, match="another stream"):
        call()
    for wrong, refusal, text in (
        ({"ld": 5}, CUSOLVERError, "3"),
        ({"words": 5}, AssertionError, "workspace is too small"),
        ({"work": cuda.empty((5,), "float64")}, AssertionError, "array is too small"),
        ({"ld": 6.0}, AssertionError, "addresses and sizes"),
    ):
        with pytest.raises(refusal, match=text):
            call(**wrong)
    with pytest.raises(AssertionError, match="array is too small"):
        solver.dgetrf(handle, 6, 6, x.data.ptr, 6, work.data.ptr, numbers[2:].data.ptr, numbers.data.ptr)
    with pytest.raises(AssertionError, match="not a handle of cuSOLVER"):
        solver.dgetrf(1, 6, 6, x.data.ptr, 6, work.data.ptr, numbers.data.ptr, numbers.data.ptr)


def test_whole_numbers_are_one_call_for_each_panel(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """Which cuBLAS takes as it is; the simulated one refuses others."""
    import cupy

    from pdgemm import DistMatrix, ProcessGrid, pdgemm

    with ProcessGrid(comm) as grid:
        A = DistMatrix.random((90, 130), dtype="int8", grid=grid, device="cuda")
        gpu.calls.clear()
        C = pdgemm(1, A, A.T)
        assert gpu.calls.count("gemmEx") == C.report.panels
    cublas, (a, b, c) = cupy.cuda.cublas, (cuda.empty((4096,), dtype) for dtype in ("int8", "int8", "int32"))
    numbers = np.array([0, 1, 2], np.int32)
    zero, one, two = (int(numbers.ctypes.data) + 4 * x for x in range(3))

    def call(op: int = 1, k: int = 32, alpha: int = one, at: int = 0, ld: int = 32) -> None:
        where = a.data.ptr + at, 3, ld, b.data.ptr, 3, 32
        cublas.gemmEx(cuda._cublas, op, 0, 16, 16, k, alpha, *where, zero, c.data.ptr, 10, 16, 72, -1)

    call()
    for wrong in ({"k": 30}, {"alpha": two}, {"at": 2}, {"ld": 33}):
        with pytest.raises(CUBLASError, match="15"):
            call(**wrong)
    with pytest.raises(AssertionError, match="along k"):
        call(op=0)
    with pytest.raises(AssertionError, match="16 bytes"):
        call(at=4)


def test_unequal_matrices_are_one_call(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """Of cuBLAS 12.5 or later, for real numbers; else one call for each.  The simulated one sees wrong arguments."""
    from pdgemm import Batch, matmul_batched
    from pdgemm.devices import grouped_gemm
    from pdgemm.errors import OutOfMemoryError

    def calls(dtype: str) -> list[str]:
        A, B = (
            Batch.from_local([cuda.to_device(np.ones((i + x, i + 1 - x), dtype), "C") for i in range(1, 20)], comm)
            for x in (0, 1)
        )
        gpu.calls.clear()
        matmul_batched(A, B)
        return [*gpu.calls]

    assert calls("float64") == calls("float32") == ["gemmGroupedBatchedEx"]
    assert calls("complex64") == ["gemmEx"] * 19
    gpu.version = 120400
    assert calls("float64") == ["gemmEx"] * 19
    gpu.version = 120500  # a library that is not loaded by its name
    assert calls("float64") == ["gemmEx"] * 19
    gpu.version = 130100
    x, z = (cuda.to_device(np.ones((3, 3), dtype), "C") for dtype in ("float64", "complex128"))
    multiply = partial(grouped_gemm.multiply_grouped, cuda._cublas, 1, beta=0)
    multiply([(x, x, cuda.empty((3, 3), "float64"))])
    with pytest.raises(CUBLASError, match="15"):
        multiply([(z, z, cuda.empty((3, 3), "complex128"))])
    for owner, name, wrong, text in (
        (grouped_gemm.cublas, "setStream", lambda *args: None, "another stream"),
        (grouped_gemm.cupy, "asarray", _left_on_the_host, "addresses are on the GPU"),
    ):
        with pytest.MonkeyPatch.context() as patch, cuda.product_stream():
            patch.setattr(owner, name, wrong)
            with pytest.raises(AssertionError, match=text):
                multiply([(x, x, cuda.empty((3, 3), "float64"))])
    for status, expected in ((3, OutOfMemoryError), (13, CUBLASError)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gpu, "cublasGemmGroupedBatchedEx", Mock(return_value=status))
            with pytest.raises(expected, match="lacks memory on the GPU" if status == 3 else "13"):
                cuda.multiply_each(1, [(x, x, cuda.empty((3, 3), "float64"))], 0)


def _left_on_the_host(x: np.ndarray) -> Any:
    return [Mock(data=Mock(ptr=row.ctypes.data), kept=x) for row in x]


def test_mappings_are_of_the_allocation_that_they_were_made_of(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """Of a handle that is used again, also while arrays in its old allocation live, of many, and of unused ones."""
    from pdgemm import ProcessGrid
    from pdgemm.devices import cuda_ipc
    from pdgemm.transport.movers.node_arrays import NodeArrays

    if comm.size == 1:
        pytest.skip("one rank maps nothing")
    other = (comm.rank + 1) % comm.size
    large = 1 << 18  # words that the pool gets an allocation of their own for

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
                cuda_ipc.cupy.get_default_memory_pool().free_all_blocks()  # its handle is that of the next allocation
        views.clear()
        for _ in range(cuda_ipc._UNUSED + 1):
            seen(grid, kept[0])
        assert len(gpu.mapped) == comm.size - 1


@square_grid
@pytest.mark.parametrize(
    "name", ["product", "plan", "prepared", "moved", "epilogue", "redistribute", "select", "grouped", "cholesky", "ipc"]
)
def test_memory_that_one_rank_cannot_map(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any, name: str) -> None:
    """All ranks notice before anything is written, and repeat the operation with messages, if that is left to them."""
    from pdgemm import Batch, DistMatrix, Epilogue, ProcessGrid, linalg, matmul_grouped, pdgemm
    from pdgemm import plan as planned
    from pdgemm.errors import DeviceError

    if comm.size == 1:
        pytest.skip("one rank maps nothing")
    n = 740  # allocations of their own, which are not mapped yet
    a, order = np.eye(n) + np.arange(n) / n, [*range(1, n), 0]
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(a, grid=grid, device="cuda")
        if name == "cholesky":
            A = DistMatrix.from_global(a @ a.T, grid=grid, block=32, device="cuda")
        C = DistMatrix.zeros((n, n), grid=grid, block=16 if name in ("moved", "redistribute") else None, device="cuda")
        assert cuda.reach(grid).reads
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
            "select": lambda: A.take(order, axis=0),
            "grouped": lambda: matmul_grouped(A, one_each, A.indices()[0] % comm.size),
            "cholesky": lambda: linalg.cholesky(A),
            "ipc": lambda: pdgemm(1, A, A, 1, C, algorithm="summa", mover=cuda.reach(grid).reads),
        }
        refused = name == "ipc" or (name == "cholesky" and cuda.reach(grid).reads == "shared")  # none can send panels
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
        expected = {"redistribute": a, "grouped": a, "select": a[order], "cholesky": np.linalg.cholesky(a @ a.T)}.get(
            name, a @ a
        )
        rtol = 1e-12
        if name == "epilogue":  # 1 is read before and after the ranks know that they cannot map memory
            expected, rtol = a @ a + 2, 1e-6
        assert np.allclose(X.allgather(), expected, rtol=rtol, atol=1e-9)
        report = X.report
        assert report.as_predicted
        assert report.counted.messages_sent or grid.shape == (1, 1)
        if name in ("plan", "prepared"):
            operations[name]()
            assert np.allclose(C.allgather(), 2 * a @ a, rtol=1e-12)


@pytest.mark.parametrize("name", ["zeros", "pdgemm", "execute", "redistribute", "cholesky", "short"])
def test_memory_that_others_have_mapped(comm: Any, gpu: Gpu, cuda: Any, name: str) -> None:
    """It is free when its owner has given it back, at the latest when a rank lacks memory, or memory is short."""
    from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
    from pdgemm import plan as planned
    from pdgemm.devices import cuda_ipc

    if comm.size == 1:
        pytest.skip("one rank maps nothing")
    n, pool = 740, cuda_ipc.cupy.get_default_memory_pool()  # allocations of their own
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
        if (
            comm.rank == 0
        ):  # the allocations that each call makes do not fit beside what lingers, or nine tenths are used
            gpu.total = gpu.used() + {"short": gpu.used() // 10, "execute": 2 << 20}.get(name, 1000)
        calls[name]()
        comm.Barrier()
        gpu.used()
        assert len(gpu.given_back) <= (name == "short")  # without the others memory is not short any more


def test_copies(comm: Any, gpu: Gpu, cuda: Any) -> None:
    """By a copy engine where rows are long enough, in words where elements are small; each is one call."""
    from pdgemm.devices import kernels
    from pdgemm.grids.index_map import identity, packed
    from pdgemm.local.arrays.elementwise import CONVERT

    words = list[np.dtype]()
    make = kernels._kernel

    def noted(X: np.dtype, *args: Any) -> Any:
        words.append(X)
        return make(X, *args)

    def pinned(x: np.ndarray, order: str) -> Any:
        """An array that is not of this GPU: engines copy it."""
        there = cuda.pinned(x.size, x.dtype)
        there.host[:] = x.ravel(order)  # type: ignore[call-overload]
        return there.device.reshape(x.shape) if order == "C" else there.device.reshape(x.shape[::-1]).T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_kernel", noted)
        for dtype, (rows, cols), order, by in (
            ("float64", (20, 64), "C", "memcpy2DAsync"),
            ("float64", (20, 64), "C", "float64"),  # within the GPU kernels are faster
            ("float64", (20, 63), "C", "float64"),
            ("float64", (64, 20), "F", "memcpy2DAsync"),
            ("float16", (9, 24), "C", "int64"),
            ("float16", (9, 22), "F", "float16"),
            ("float32", (9, 22), "C", "int64"),
            ("int8", (9, 20), "C", "int32"),
            ("int8", (9, 21), "C", "int8"),
        ):
            x = np.arange(96 * 96).reshape(96, 96).astype(dtype)
            X = pinned(x, order) if by == "memcpy2DAsync" else cuda.to_device(x, order)
            Y = cuda.to_device(np.zeros((96, 96), dtype), order)
            gpu.calls.clear(), words.clear()
            CONVERT(Y[8 : 8 + rows, 16 : 16 + cols], X[:rows, 8 : 8 + cols])
            assert [*gpu.calls, *map(str, words)] == [by]
            y = np.zeros((96, 96), dtype)
            y[8 : 8 + rows, 16 : 16 + cols] = x[:rows, 8 : 8 + cols]
            assert np.array_equal(cuda.to_host(Y), y)
        for columns, first, pitch in ((97, 0, 2**31 - 1), (96, 1, 2**31 - 1), (96, 0, 767)):
            X, Y = pinned(np.full((20, columns), 3.0), "C"), cuda.to_device(np.zeros((20, columns)), "C")
            with pytest.MonkeyPatch.context() as limit:  # rows that are not aligned, or too far apart
                limit.setattr(kernels, "_MOST_PITCH", pitch)
                limit.setattr(gpu, "most_pitch", pitch)
                gpu.calls.clear(), words.clear()
                CONVERT(Y[:, first : first + 64], X[:, first : first + 64])
            assert [*gpu.calls, *map(str, words)] == ["float64"] and cuda.to_host(Y).sum() == 20 * 64 * 3
        X, Y = cuda.to_device(x, "F"), cuda.empty((96, 48), dtype, "F")
        gpu.calls.clear(), words.clear()
        cuda.combine_blocks(CONVERT, Y, X, identity(96), packed(np.arange(0, 96, 8), np.full(12, 4)))
        assert [*gpu.calls, *map(str, words)] == ["int64"]
        assert np.array_equal(cuda.to_host(Y), x.reshape(96, 12, 8)[:, :, :4].reshape(96, 48))


def test_nccl_is_tried(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:
    """Where it would be chosen; where it fails on one rank, others do."""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm
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
            assert Nccl.aborted - aborted == (fails == sending and comm.size > 1)  # nobody waits for what is stuck


def test_what_fails_on_one_rank_is_used_by_none(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:
    """Memory for the trials, a library that is not there: no rank waits for that one, and messages are staged."""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.devices import cuda_ipc

    if comm.size == 1:
        pytest.skip("one rank tries nothing")
    for place, name, failure in (
        (cuda, "to_device", MemoryError("full")),
        (cuda_ipc, "capable", OSError("libcuda.so.1")),
        (cuda_ipc.IpcMemory, "array", CUDARuntimeError(2)),
    ):
        with monkeypatch.context() as patch, ProcessGrid(comm) as grid, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that messages are staged
            if comm.rank == comm.size - 1:
                patch.setattr(place, name, Mock(side_effect=failure))
            cuda.discover_peers(grid)
            patch.undo()
            reach = cuda.reach(grid)
            assert reach.reads == "" and (name != "to_device" or (reach.staged, reach.nccl) == (True, False)), reach
            A = DistMatrix.from_global(np.eye(40), grid=grid, device="cuda")
            assert np.array_equal(pdgemm(1, A, A).allgather(), np.eye(40))


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8"])
@pytest.mark.parametrize("algorithm", ["summa", "cannon", "2.5d", "stationary_a"])
def test_preparing_does_what_is_done_once(
    comm: Any,
    gpu: Gpu,
    cuda: Any,
    monkeypatch: Any,
    algorithm: str,
    dtype: str,
) -> None:
    """The first run creates no communicator, maps no memory and compiles no kernel that the second one does not."""
    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm import plan as planned
    from pdgemm.devices import kernels

    with ProcessGrid(comm) as grid:
        if algorithm == "2.5d" and comm.size != 4:
            pytest.skip("four ranks are two layers")
        A, B = (
            DistMatrix.from_function(lambda i, j: (i + j) % 3, (12, 12), dtype=dtype, grid=grid, device="cuda")
            for _ in "AB"
        )
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
    """It is tried where panels are not read in place, given up where it waits without end, and not used on request."""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.devices import cuda_nccl
    from pdgemm.errors import ArgumentError

    if gpu.count == 1 or comm.size == 1:
        pytest.skip("the ranks share a GPU, or there is one rank")
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1" if comm.size % 2 else "2")
    if comm.size == 2:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1")
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
    """The arguments of all calls."""
    calls, call = list[Any](), getattr(owner, name)
    patch.setattr(owner, name, lambda *args: (calls.append(args), call(*args))[1])
    return calls


def failing(call: Any) -> Any:
    """What others do with it goes well."""

    def failed(*args: Any) -> None:
        call(*args)
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    return failed
