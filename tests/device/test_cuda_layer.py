"""The tests for a real GPU, on CuPy without a GPU (fake_cupy.py)."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from cuda_layer import CudaLayer
from fake_cublas import CUBLASError
from fake_cuda import Gpu
from fake_cusolver import CUSOLVERError
from mpi4py import MPI
from tiers import everything

from pdgemm import Batch, DistMatrix, ProcessGrid, linalg, matmul_batched, pdgemm
from pdgemm.errors import DeviceError, OutOfMemoryError
from pdgemm.grids.index_map import identity, packed
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_lapack import getrf, potrf

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("gpu")]


class TestCudaLayer(CudaLayer):
    """Inherits all tests for a real GPU."""

    OPS: ClassVar = ["NN", "TC", "CN", "NT"] if everything() else ["TC"]


@pytest.mark.on_ranks(1)
def test_the_trailing_matrix_is_updated_in_few_launches(grid: Any, gpu: Gpu) -> None:
    """Cholesky launches two products per panel; herk with a single panel launches one."""
    if grid.size > 1:
        pytest.skip("each rank has other tiles")
    A = DistMatrix.random((1300, 1300), grid=grid, device="cuda")
    S = A + A.T + 2000 * DistMatrix.eye(1300, grid=grid, device="cuda")
    gpu.calls.clear()
    linalg.cholesky(S)
    assert gpu.calls.count("gemmEx") <= 2 * gpu.calls.count("potrf") - 3
    gpu.calls.clear()
    linalg.herk(1, A)
    assert gpu.calls.count("gemmEx") == 1


@pytest.mark.on_ranks(1, 2)
def test_benchmark(comm: Any, gpu: Gpu, monkeypatch: Any) -> None:
    """scripts/gpu/gpu_products.py reports every figure for all movers that can be used."""
    if comm.size > 2:
        pytest.skip("runs on one rank and on two")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "gpu"))
    bench: Any = import_module("gpu_products")
    monkeypatch.setattr(bench, "PANEL_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "DTYPES", ("int8", "bfloat16", "complex64"))
    with ProcessGrid(comm) as grid:
        movers = [*bench.usable(grid, "cuda")]
        assert all(x["right"] and x["as_predicted"] for mover in movers for x in bench.correct(grid, "cuda", mover))
        times = [x for what in bench.FAST for x in bench.products(grid, "cuda", movers, 40, what, 1)]
        assert all(x["ratio"] > 0 for x in times)
        for mover in (x for x in movers if x not in ("shared", "mpi")):
            assert bench.transfers(grid, "cuda", mover, 3)["p50"] > 0
        if comm.size > 1:
            more = [] if gpu.count == 1 else ["mpi", "ring", "ibcast", "nccl"]
            assert {x["mover"] for x in times} == {"shared", "ipc", "staged", *more}
        assert bench.hardware(grid, "cuda")["gpu"] == "simulated"


def test_no_gpu(grid: Any, gpu: Gpu) -> None:
    gpu.count = 0
    with pytest.raises(DeviceError, match="no GPU is visible to this process"):
        DistMatrix.zeros((3, 3), grid=grid, device="cuda")


def test_failures_of_cusolver(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:
    """A library missing on one rank is an error on all; too little memory for cuSOLVER is a MemoryError."""
    import cupy

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
                with pytest.raises(expected, match="ran out of memory on the GPU" if status == 2 else "6"):
                    act(cuda.to_device(x, "F"))
    with monkeypatch.context() as patch:
        patch.setattr(type(solver), "dpotrf_bufferSize", Mock(return_value=1 << 40))
        with pytest.raises(OutOfMemoryError, match="cannot allocate"):
            potrf(cuda.to_device(x, "F"))


def test_wrong_calls_of_cusolver_are_seen(gpu: Gpu, cuda: Any) -> None:
    """The simulated cuSOLVER rejects wrong calls."""
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
    with cuda.product_stream, pytest.raises(AssertionError, match="another stream"):
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


def test_whole_numbers_are_one_call_for_each_panel(grid: Any, gpu: Gpu, cuda: Any) -> None:
    """Panels of int8 satisfy the conditions of cuBLAS without conversion; the simulated cuBLAS checks them."""
    import cupy

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


def test_unequal_matrices_are_one_call(gpu: Gpu, cuda: Any) -> None:
    """One grouped call from cuBLAS 12.5 on, for real types; else one call for each product.

    The simulated cuBLAS detects wrong arguments.
    """
    from pdgemm.devices import grouped_gemm

    alone = MPI.COMM_SELF

    def calls(dtype: str) -> list[str]:
        A, B = (
            Batch.from_local([cuda.to_device(np.ones((i + x, i + 1 - x), dtype), "C") for i in range(1, 20)], alone)
            for x in (0, 1)
        )
        gpu.calls.clear()
        matmul_batched(A, B)
        return [*gpu.calls]

    assert calls("float64") == calls("float32") == ["gemmGroupedBatchedEx"]
    assert calls("complex64") == ["gemmEx"] * 19
    gpu.version = 120400
    assert calls("float64") == ["gemmEx"] * 19
    gpu.version = 120500  # libcublas cannot be loaded by its name
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
        with pytest.MonkeyPatch.context() as patch, cuda.product_stream:
            patch.setattr(owner, name, wrong)
            with pytest.raises(AssertionError, match=text):
                multiply([(x, x, cuda.empty((3, 3), "float64"))])
    for status, expected in ((3, OutOfMemoryError), (13, CUBLASError)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gpu, "cublasGemmGroupedBatchedEx", Mock(return_value=status))
            with pytest.raises(expected, match="ran out of memory on the GPU" if status == 3 else "13"):
                cuda.multiply_each(1, [(x, x, cuda.empty((3, 3), "float64"))], 0)


def _left_on_the_host(x: np.ndarray) -> Any:
    return [Mock(data=Mock(ptr=row.ctypes.data), kept=x) for row in x]


def test_copies(gpu: Gpu, cuda: Any) -> None:
    """A copy engine copies long rows, and kernels copy small elements in wider words; each copy is one call."""
    from pdgemm.devices import kernels

    words = list[np.dtype]()
    make = kernels._kernel

    def noted(X: np.dtype, *args: Any) -> Any:
        words.append(X)
        return make(X, *args)

    def pinned(x: np.ndarray, order: str) -> Any:
        """Return an array in pinned host memory, which is copied by a copy engine."""
        there = cuda.pinned(x.size, x.dtype)
        there.host[:] = x.ravel(order)  # type: ignore[call-overload]
        return there.device.reshape(x.shape) if order == "C" else there.device.reshape(x.shape[::-1]).T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_kernel", noted)
        for dtype, (rows, cols), order, by in (
            ("float64", (20, 64), "C", "memcpy2DAsync"),
            ("float64", (20, 64), "C", "float64"),  # within a GPU, kernels are faster than copy engines
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
            with pytest.MonkeyPatch.context() as limit:  # unaligned rows, or rows too far apart
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
