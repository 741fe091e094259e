"""CUDA devices, through CuPy: memory, cuBLAS, streams.

`kernels` copies and adds elements, `generators` computes them from their indices, `cusolver` factors panels.

This module is imported when the first matrix is created on a GPU.  Each rank uses one GPU, CuPy's current device at
that time (`pdgemm.devices.gpu_binding` chooses it); several ranks may share one GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any

import cupy
import numpy as np
from cupy.cuda import cublas, runtime

from pdgemm.devices import cuda_ipc, cuda_nccl, generators, gpu_binding, grouped_gemm, kernels
from pdgemm.errors import DeviceError, DTypeError, OutOfMemoryError
from pdgemm.local.arrays.device import Array, Pinned, address, on_cuda, register_device
from pdgemm.local.arrays.dtypes import NARROW, TYPE
from pdgemm.local.arrays.workspace import BufferCache
from pdgemm.local.blas.local_gemm import blas_number, leading, seen_by_fortran
from pdgemm.support.waits import Wait, poll_until

_COMPUTE_TF32 = 77
_SUMS_IN_FULL = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums are not rounded to a 16-bit C
_PINNED = 1 << 30  # bytes of pinned memory that are cached for the next product
_NOT_READY = 600  # cudaErrorNotReady
_OP = {b"N": 0, b"T": 1, b"C": 2}
_memory_errors = kernels.memory_errors({cublas.CUBLASError: 3})  # CUBLAS_STATUS_ALLOC_FAILED
_TRSM = {"L": 0, "R": 1, "U": 1, "N": 0}  # cuBLAS's sides; lower is 0 and upper 1; a unit diagonal is 1


class Cuda:
    """The GPU of this process."""

    name = "cuda"

    def __init__(self) -> None:
        number = gpu_binding.choose()
        try:
            count = runtime.getDeviceCount()
            if number is not None:
                runtime.setDevice(number)
        except runtime.CUDARuntimeError as bad:
            raise DeviceError(f"no GPU can be used: {bad}; `pdgemm info` shows what is missing") from None
        if not count:
            raise DeviceError("no GPU is visible to this process (CUDA_VISIBLE_DEVICES?)")
        self.number = runtime.getDevice()
        self.product_stream = cupy.cuda.Stream(non_blocking=True)
        self.transfer_stream, self.upload_stream = (  # copies take precedence over products
            cupy.cuda.Stream(non_blocking=True, priority=-1) for _ in range(2)
        )
        self._cublas = cublas.create()  # users may change the modes of CuPy's handle
        cublas.setMathMode(self._cublas, _SUMS_IN_FULL)
        self._pinned = BufferCache(_pinned, least=0, most=_PINNED)  # pinning a page takes longer than copying it

    def use(self) -> None:
        runtime.setDevice(self.number)

    # ------------------------------------------------------------------ memory
    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> Array:
        try:
            return cupy.empty(tuple(shape), np.dtype(dtype), order)
        except cupy.cuda.memory.OutOfMemoryError:
            need = prod(shape) * np.dtype(dtype).itemsize
            free, total = runtime.memGetInfo()
            raise OutOfMemoryError(
                f"cannot allocate {need} bytes on GPU {self.number}: {free} of {total} bytes are free, and "
                f"{cupy.get_default_memory_pool().free_bytes()} are unused in CuPy's pool"
            ) from None

    def release_memory(self) -> None:
        cuda_ipc.unmap_unused()
        cupy.get_default_memory_pool().free_all_blocks()

    def pinned(self, words: int, dtype: Any) -> Pinned:
        host = self._pinned.empty((words,), dtype)
        seen = cupy.cuda.UnownedMemory(host.ctypes.data, max(1, host.nbytes), host, self.number)
        return Pinned(host, cupy.ndarray((words,), host.dtype, cupy.cuda.MemoryPointer(seen, 0)))

    def to_host(self, x: Array) -> np.ndarray:
        return np.asarray(x.get(order="A"))

    def to_device(self, x: np.ndarray, order: str) -> Array:
        uploaded = self.empty(x.shape, x.dtype, order)
        uploaded.set(np.asarray(x, order=order))  # type: ignore[call-overload]
        cupy.cuda.get_current_stream().synchronize()
        return uploaded

    def check(self, x: Array) -> None:
        if x.data.ptr % x.itemsize:
            raise DeviceError(f"the local array is at {x.data.ptr:#x}, which is not a multiple of {x.itemsize} bytes")
        where = runtime.pointerGetAttributes(x.data.ptr).device if x.size else self.number
        if where != self.number:
            raise DeviceError(f"the local array is on GPU {where}, but this rank works on GPU {self.number}")

    addressable = staticmethod(cuda_ipc.capable)

    def takes(self, x: Any) -> Array | None:
        try:  # DLPack supports more types
            return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
        except (AttributeError, TypeError, ValueError, BufferError, RuntimeError) as bad:
            if on_cuda(x):
                reason = " ".join(str(bad).split())
                raise DTypeError(f"CuPy cannot read this {type(x).__name__} as an array: {reason}") from bad
            return None

    # ------------------------------------------------------------------ work
    combine = staticmethod(_memory_errors(kernels.combine))
    combine_blocks = staticmethod(_memory_errors(kernels.combine_blocks))
    combine_within = staticmethod(_memory_errors(kernels.combine_within))
    keep_triangle = staticmethod(_memory_errors(kernels.clear_triangle))
    finish = staticmethod(_memory_errors(kernels.finish))
    generate = staticmethod(_memory_errors(generators.generate))
    pick = staticmethod(_memory_errors(kernels.pick))

    def copy(self, target: Array, source: Array) -> None:
        stream = cupy.cuda.get_current_stream()
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDefault, stream.ptr)

    def multiply(
        self, alpha: Any, A: Array, B: Array, C: Array, conjugate_a: bool, conjugate_b: bool, tf32: bool
    ) -> Callable[[Any], None]:
        arrays = A, B, C
        char = "f" if C.dtype in NARROW else C.dtype.char
        A, B, C, (trans_a, lda), (trans_b, ldb), ldc = seen_by_fortran(A, B, C, conjugate_a, conjugate_b)
        (m, n), k = C.shape, A.shape[1]
        handle, first = self._cublas, _scalar(char, alpha)
        compute = _COMPUTE_TF32 if tf32 and char in "fF" else TYPE[np.dtype(char)].cublas
        types = [TYPE[x.dtype].cuda for x in (A, B, C)]
        operands = (A.data.ptr, types[0], lda, B.data.ptr, types[1], ldb)
        head = (handle, _OP[trans_a], _OP[trans_b], m, n, k, ctypes.addressof(first), *operands)
        tail = (C.data.ptr, types[2], ldc, compute, -1)

        @_memory_errors
        def form(beta: Any, _kept: Any = (arrays, first)) -> None:
            cublas.gemmEx(*head, ctypes.addressof(_scalar(char, beta)), *tail)

        return form

    @_memory_errors
    def multiply_stack(self, alpha: Any, A: Array, B: Array, beta: Any, C: Array) -> None:
        char, items = C.dtype.char, len(C)
        a, _, c, (trans_a, lda), (trans_b, ldb), ldc = seen_by_fortran(A[0], B[0], C[0], False, False)
        left, right = (A, B) if address(a) == address(A) else (B, A)
        (m, n), k = c.shape, a.shape[1]
        first, second, handle = _scalar(char, alpha), _scalar(char, beta), self._cublas
        words = [x.strides[0] // x.itemsize for x in (left, right, C)]
        types = [TYPE[x.dtype].cuda for x in (left, right, C)]
        cublas.gemmStridedBatchedEx(
            handle, _OP[trans_a], _OP[trans_b], m, n, k, ctypes.addressof(first),
            left.data.ptr, types[0], lda, words[0], right.data.ptr, types[1], ldb, words[1], ctypes.addressof(second),
            C.data.ptr, types[2], ldc, words[2], items, TYPE[C.dtype].cublas, -1,
        )  # fmt: skip

    @_memory_errors
    def multiply_each(self, alpha: Any, products: Sequence[tuple[Array, Array, Array]], beta: Any) -> None:
        if grouped_gemm.takes(self._cublas, products[0][2].dtype):
            grouped_gemm.multiply_grouped(self._cublas, alpha, products, beta)
            return
        for A, B, C in products:
            self.multiply_stack(alpha, A[None], B[None], beta, C[None])

    @_memory_errors
    def solve_triangular(self, how: tuple[str, str, str, str], alpha: Any, A: Array, X: Array) -> None:
        first = _scalar(X.dtype.char, alpha)
        trsm = getattr(cublas, f"{TYPE[X.dtype].blas}trsm")
        numbers = (_TRSM[letter] if at != 2 else _OP[letter.encode()] for at, letter in enumerate(how))
        operands = (A.data.ptr, leading(A)[1], X.data.ptr, leading(X)[1])
        trsm(self._cublas, *numbers, *X.shape, ctypes.addressof(first), *operands)

    @cached_property
    def _factorisations(self) -> Any:  # loaded when a matrix is factored: cuSOLVER is large
        try:
            from pdgemm.devices.cusolver import Factorisations
        except ImportError as bad:
            way = "pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x)"
            reason = " ".join(str(bad).split())
            raise DeviceError(f"cuSOLVER, which factors panels, cannot be loaded: {reason}; {way}") from None
        return Factorisations(self)

    def load_factorisations(self) -> Any:
        return self._factorisations

    broadcast = cuda_nccl.nccl_broadcast
    exchange = cuda_nccl.nccl_exchange
    reduce = cuda_nccl.nccl_reductions

    # ------------------------------------------------------------------ streams
    current_stream = staticmethod(cupy.cuda.get_current_stream)

    def happened(self, event: Any) -> bool:
        status = runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        if status:  # the event may be behind operations of NCCL
            cuda_nccl.check()
        return status == 0

    def wait(self, work: Any) -> None:
        if not cuda_nccl.may_be_waiting():
            work.synchronize()
            return
        event = work if isinstance(work, cupy.cuda.Event) else work.record()
        with Wait():
            poll_until(lambda: self.happened(event))

    abandon_nccl = staticmethod(cuda_nccl.leave_operations)

    def elapsed(self, begin: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    # ------------------------------------------------------------------ other ranks
    discover_peers = cuda_ipc.discover_peers
    reach = staticmethod(cuda_ipc.reach)
    memory = staticmethod(cuda_ipc.ipc_memory)


def _pinned(nbytes: int) -> np.ndarray:
    """Return pinned memory.  CuPy's pool is not used: it rounds sizes up to powers of two, and never frees memory."""
    try:
        memory = cupy.cuda.PinnedMemory(max(1, nbytes))
    except runtime.CUDARuntimeError as bad:
        raise OutOfMemoryError(f"cannot allocate {nbytes} bytes of pinned memory: {bad}") from None
    return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, max(1, nbytes))


@cache
def device() -> Cuda:
    """Return the GPU of this process.  Raises DeviceError if there is none."""
    gpu = Cuda()
    register_device(cupy.ndarray, gpu)
    return gpu


@lru_cache(256)
def _scalar(char: str, value: Any) -> Any:
    """Return alpha or beta in host memory, which cuBLAS reads before it returns."""
    return blas_number(char, value)
