"""CUDA devices, through CuPy: memory, one kernel that copies and combines arrays, cuBLAS, streams.

This module is imported when the first matrix is made on a GPU.  Each rank uses one GPU, CuPy's current device at that
time (`pdgemm.devices.gpu_binding` chooses it); several ranks may share one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import cublas, runtime
from mpi4py import MPI

from pdgemm.arrays.device import Array, Combination, Pinned, Reach, address, register
from pdgemm.arrays.dtypes import HALVES, TYPE, TYPES, arithmetic
from pdgemm.blas.local_gemm import number, seen_by_fortran
from pdgemm.devices import cuda_ipc, gpu_binding
from pdgemm.errors import DeviceError, DTypeError, OutOfMemoryError
from pdgemm.grids.index_map import IndexMap

_FEW = 4  # launches that are cheaper than one of the kernel that reads the index of every row and column
_COMPUTE_TF32 = 77
_NOT_READY = 600  # cudaErrorNotReady
_OP = {b"N": 0, b"T": 1, b"C": 2}


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
        self._transfer = cupy.cuda.Stream(non_blocking=True, priority=-1)  # it takes precedence over products

    # ------------------------------------------------------------------ memory
    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> Array:
        try:
            return cupy.empty(tuple(shape), np.dtype(dtype), order)
        except cupy.cuda.memory.OutOfMemoryError:
            need = prod(shape) * np.dtype(dtype).itemsize
            free, total = runtime.memGetInfo()
            raise OutOfMemoryError(
                f"cannot allocate {need} bytes on GPU {self.number}: {free} of {total} bytes are free, CuPy's pool has "
                f"{cupy.get_default_memory_pool().free_bytes()}"
            ) from None

    def pinned(self, words: int, dtype: Any) -> Pinned:
        dtype = np.dtype(dtype)
        nbytes = words * dtype.itemsize
        try:
            memory = cupy.cuda.alloc_pinned_memory(max(1, nbytes))  # the pool rounds sizes up to powers of two
        except runtime.CUDARuntimeError as bad:
            raise OutOfMemoryError(f"cannot allocate {nbytes} bytes of pinned memory: {bad}") from None
        host: np.ndarray = np.frombuffer(memory, dtype, words)
        seen = cupy.cuda.UnownedMemory(memory.ptr, max(1, nbytes), memory, self.number)
        return Pinned(host, cupy.ndarray((words,), dtype, cupy.cuda.MemoryPointer(seen, 0)))

    def to_host(self, x: Array) -> np.ndarray:
        return np.asarray(x.get(order="A"))

    def to_device(self, x: np.ndarray, order: str) -> Array:
        made = self.empty(x.shape, x.dtype, order)
        made.set(np.asarray(x, order=order))  # type: ignore[call-overload]
        cupy.cuda.get_current_stream().synchronize()
        return made

    def check(self, x: Array) -> None:
        if x.data.ptr % x.itemsize:
            raise DeviceError(f"the local array is at {x.data.ptr:#x}, which is not a multiple of {x.itemsize} bytes")
        where = runtime.pointerGetAttributes(x.data.ptr).device if x.size else self.number
        if where != self.number:
            raise DeviceError(f"the local array is on GPU {where}, but this rank works on GPU {self.number}")

    def addressable(self, x: Array) -> bool:
        return cuda_ipc.capable(x)

    def takes(self, x: Any) -> Array | None:
        try:  # DLPack supports more types
            return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
        except (AttributeError, TypeError, ValueError, BufferError, runtime.CUDARuntimeError):
            return None

    # ------------------------------------------------------------------ work
    def combine(self, how: Combination, target: Array, source: Array) -> None:
        if target.size:
            _kernel(source.dtype, target.dtype, _form(how))(source, *_numbers(how, source, target), target)

    def combine_blocks(self, how: Combination, target: Array, source: Array, rows: IndexMap, cols: IndexMap) -> None:
        if not 0 < len(rows.strided_runs) * len(cols.strided_runs) <= _FEW:
            self._combine_each(how, target, source, rows, cols)
            return
        for r in rows.strided_runs:
            for c in cols.strided_runs:
                sides = [
                    _view(x, (row, down), (col, right), (r.repeats, r.length, c.repeats, c.length))
                    for x, row, down, col, right in (
                        (target, r.target, r.target_stride, c.target, c.target_stride),
                        (source, r.source, r.source_stride, c.source, c.source_stride),
                    )
                ]
                self.combine(how, *sides)

    def _combine_each(self, how: Combination, target: Array, source: Array, rows: IndexMap, cols: IndexMap) -> None:
        """Combine rows and columns by index in one launch, for index maps of many strided runs."""
        (from_rows, to_rows), (from_cols, to_cols) = rows.indices(), cols.indices()
        where = [cupy.asarray(x.astype(np.int64)) for x in (from_rows, from_cols, to_rows, to_cols)]
        kernel, size = _index_kernel(source.dtype, target.dtype, _form(how)), rows.size * cols.size
        kernel(source, *where, np.int64(cols.size), *_numbers(how, source, target), target, size=size)

    def copy(self, target: Array, source: Array) -> None:
        stream = cupy.cuda.get_current_stream()
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDefault, stream.ptr)

    def multiply(
        self, alpha: Any, A: Array, B: Array, C: Array, conjugate_a: bool, conjugate_b: bool, tf32: bool
    ) -> Callable[[Any], None]:
        arrays = A, B, C
        char = "f" if C.dtype in HALVES else C.dtype.char
        A, B, C, (trans_a, lda), (trans_b, ldb), ldc = seen_by_fortran(A, B, C, conjugate_a, conjugate_b)
        (m, n), k = C.shape, A.shape[1]
        handle, first = cupy.cuda.get_cublas_handle(), _scalar(char, alpha)
        compute = _COMPUTE_TF32 if tf32 and char in "fF" else TYPE[np.dtype(char)].cublas
        types = [TYPE[x.dtype].cuda for x in (A, B, C)]
        operands = (A.data.ptr, types[0], lda, B.data.ptr, types[1], ldb)
        head = (handle, _OP[trans_a], _OP[trans_b], m, n, k, ctypes.addressof(first), *operands)
        tail = (C.data.ptr, types[2], ldc, compute, -1)

        def form(beta: Any, _kept: Any = (arrays, first)) -> None:
            cublas.gemmEx(*head, ctypes.addressof(_scalar(char, beta)), *tail)

        return form

    def multiply_stack(self, alpha: Any, A: Array, B: Array, beta: Any, C: Array) -> None:
        char, items = C.dtype.char, len(C)
        a, _, c, (trans_a, lda), (trans_b, ldb), ldc = seen_by_fortran(A[0], B[0], C[0], False, False)
        left, right = (A, B) if address(a) == address(A) else (B, A)
        (m, n), k = c.shape, a.shape[1]
        first, second, handle = _scalar(char, alpha), _scalar(char, beta), cupy.cuda.get_cublas_handle()
        words = [x.strides[0] // x.itemsize for x in (left, right, C)]
        types = [TYPE[x.dtype].cuda for x in (left, right, C)]
        cublas.gemmStridedBatchedEx(
            handle, _OP[trans_a], _OP[trans_b], m, n, k, ctypes.addressof(first),
            left.data.ptr, types[0], lda, words[0], right.data.ptr, types[1], ldb, words[1], ctypes.addressof(second),
            C.data.ptr, types[2], ldc, words[2], items, TYPE[C.dtype].cublas, -1,
        )  # fmt: skip

    def broadcast(self, comm: MPI.Comm, x: Array, root: int) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        cuda_ipc.nccl(comm).bcast(x.data.ptr, x.nbytes, cuda_ipc.NCCL_BYTES, root, stream)

    # ------------------------------------------------------------------ streams
    def current_stream(self) -> Any:
        return cupy.cuda.get_current_stream()

    def transfer_stream(self) -> Any:
        return self._transfer

    def happened(self, event: Any) -> bool:
        status = runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return status == 0

    def elapsed(self, begin: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    # ------------------------------------------------------------------ other ranks
    def discover_peers(self, grid: Any) -> None:
        cuda_ipc.discover_peers(grid, self)

    def reach(self, grid: Any) -> Reach:
        return cuda_ipc.reach(grid)

    def memory(self, grid: Any) -> Any:
        return cuda_ipc.memory(grid)


@cache
def device() -> Cuda:
    """Return the GPU of this process.  Raises DeviceError if there is none."""
    made = Cuda()
    register(cupy.ndarray, made)
    return made


def _view(x: Array, rows: tuple[int, int], cols: tuple[int, int], shape: tuple[int, int, int, int]) -> Array:
    """Return x as (row runs, rows of a run, column runs, columns of a run), given the start and stride of the runs."""
    (row, down), (col, right), (ds, rs) = rows, cols, x.strides
    return cupy.lib.stride_tricks.as_strided(x[row:, col:], shape, (down * ds, ds, right * rs, rs))


class _Form(NamedTuple):
    """A form says which terms of alpha op(x) + beta y a kernel computes."""

    scales: bool
    copies: bool  # alpha = 1, beta = 0
    reads: bool
    conjugates: bool


def _form(how: Combination) -> _Form:
    return _Form(how.alpha != 0, (how.alpha, how.beta) == (1, 0), how.beta != 0, how.conjugated)


def _numbers(how: Combination, source: Array, target: Array) -> tuple[Any, Any]:
    wide = _wide(source.dtype, target.dtype)
    return wide.type(how.alpha), wide.type(how.beta)


def _wide(X: np.dtype, Y: np.dtype) -> np.dtype:
    """Return the type of the arithmetic; integers are computed in int64."""
    return np.dtype(np.int64) if Y.kind in "iub" else arithmetic(X, Y)


_C_NAMES = {x.name: x.c_name for x in TYPES if x.c_name}


def _operation(X: np.dtype, Y: np.dtype, form: _Form, x: str, y: str) -> str:
    """Return the C statement of y := alpha op(x) + beta y."""
    if X == Y and form.copies and not (form.conjugates and X.kind == "c"):
        return f"{y} = {x}"
    if not {X.name, Y.name} <= set(_C_NAMES):
        raise DTypeError(f"{X} elements cannot be converted to {Y} on a GPU; its kernels support {', '.join(_C_NAMES)}")
    wide = _C_NAMES[_wide(X, Y).name]

    def widened(element: str, dtype: np.dtype) -> str:
        element = f"static_cast<float>({element})" if dtype in HALVES else element
        element = f"{element}.real()" if dtype.kind == "c" and not wide.startswith("complex") else element
        return f"static_cast<{wide}>({element})"

    read = widened(x, X)
    if form.conjugates and X.kind == "c":
        read = f"conj({read})"
    terms = [f"alpha * {read}"] * form.scales + [f"beta * {widened(y, Y)}"] * form.reads
    value = " + ".join(terms) or f"static_cast<{wide}>(0)"
    if Y.kind != "c" and wide.startswith("complex"):
        value = f"({value}).real()"
    return f"{y} = static_cast<{_C_NAMES[Y.name]}>({value})"


@lru_cache(256)
def _kernel(X: np.dtype, Y: np.dtype, form: _Form) -> Any:
    """Return the kernel of y := alpha op(x) + beta y for arrays of any strides."""
    wide, operation = _wide(X, Y).name, _operation(X, Y, form, "x", "y")
    return cupy.ElementwiseKernel(f"T x, {wide} alpha, {wide} beta", "R y", operation, "pdgemm_combine")


@lru_cache(256)
def _index_kernel(X: np.dtype, Y: np.dtype, form: _Form) -> Any:
    """Return the kernel of y := alpha op(x) + beta y for rows and columns that are given by index."""
    wide, operation = _wide(X, Y).name, _operation(X, Y, form, "x[from]", "y[to]")
    return cupy.ElementwiseKernel(
        "raw T x, raw int64 from_rows, raw int64 from_cols, raw int64 to_rows, raw int64 to_cols, int64 cols, "
        f"{wide} alpha, {wide} beta",
        "raw R y",
        "ptrdiff_t row = i / cols, col = i % cols; "
        "ptrdiff_t from[] = {from_rows[row], from_cols[col]}, to[] = {to_rows[row], to_cols[col]}; " + operation,
        "pdgemm_combine_each",
    )


@lru_cache(256)
def _scalar(char: str, value: Any) -> Any:
    """Return alpha or beta in host memory, which cuBLAS reads before it returns."""
    return number(char, value)
