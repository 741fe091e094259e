"""cuBLAS without a GPU: the routines that `pdgemm.devices` calls, computed by NumPy (fake_cupy.py)."""

from __future__ import annotations

import ctypes
from functools import partialmethod
from typing import Any

import ml_dtypes
import numpy as np
from fake_cusolver import solve_triangular

# NumPy's types by the numbers of cudaDataType_t
_CUBLAS_TYPES = {2: "f2", 14: ml_dtypes.bfloat16, 0: "f4", 1: "f8", 4: "c8", 5: "c16", 3: "i1", 10: "i4"}
# supported (type of operands, type of results) by the numbers of cublasComputeType_t
_CUBLAS: dict[int, set[tuple[str, str]]] = {
    68: {("f2", "f2"), ("f2", "f4"), ("bf", "bf"), ("bf", "f4"), ("f4", "f4"), ("c8", "c8")},
    77: {("f4", "f4"), ("c8", "c8")},
    70: {("f8", "f8"), ("c16", "c16")},
    72: {("i1", "i4")},
}


class CUBLASError(RuntimeError):
    def __init__(self, status: object) -> None:
        super().__init__(f"cuBLAS: {status}")
        self.status = status


class Cublas:
    def create(self) -> int:
        self.modes[handle := 1 + len(self.modes)] = 0
        return handle

    def setMathMode(self, handle: int, mode: int) -> None:
        self.modes[handle] = mode

    def getVersion(self, handle: int) -> int:
        assert handle in self.modes
        return self.version

    def setStream(self, handle: int, stream: int) -> None:
        self.streams[handle] = stream

    def gemmEx(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, A: int, type_a: int, lda: int,
        B: int, type_b: int, ldb: int, beta: int, C: int, type_c: int, ldc: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        """C := alpha op(A) op(B) + beta C, in column-major order; C is not read if beta is 0."""
        assert algorithm == -1
        assert min(m, n, k) > 0
        if max(m, n, k, lda, ldb, ldc) >= 1 << 31:
            raise OverflowError("value too large to convert to int")  # Cython's message
        types = [np.dtype(_CUBLAS_TYPES[x]) for x in (type_a, type_b, type_c)]
        short = ["bf" if x == ml_dtypes.bfloat16 else x.str[1:] for x in types]
        assert self.modes[handle] == 16, "partial sums may be rounded to the type of C"
        assert short[0] == short[1] and (short[0], short[2]) in _CUBLAS[compute], f"cuBLAS has no {short} by {compute}"
        scalar = "f4" if short[2] in ("f2", "bf") else short[2]
        a, b = _by_columns(A, types[0], lda, m, k, op_a), _by_columns(B, types[1], ldb, k, n, op_b)
        c = _by_columns(C, types[2], ldc, m, n, 0)
        width = ctypes.c_byte * np.dtype(scalar).itemsize
        first, second = (np.frombuffer(width.from_address(x), scalar)[0] for x in (alpha, beta))
        if compute == 72:
            self._check_integers((first, second), (m, n, k), (A, B, C), (lda, ldb, ldc), op_a, op_b)
        product = first * (a.astype(scalar) @ b.astype(scalar))
        with np.errstate(all="ignore"):
            c[...] = product if second == 0 else product + second * c.astype(scalar)
        self.calls.append("gemmEx")

    def _check_integers(self, scalars: Any, extents: Any, places: Any, lds: Any, op_a: int, op_b: int) -> None:
        """Reject the int8 operands that cuBLAS rejects, slow products, and sums too large for 32 bits."""
        if {*map(int, scalars)} - {0, 1} or any(x % 4 for x in (*extents, *places, *lds)):
            raise CUBLASError(15)  # not supported
        assert (op_a, op_b) == (1, 0), "int8 products are fast only where both operands lie along k"
        assert not any(x % 16 for x in (*places, *lds)), "int8 products are fast only at multiples of 16 bytes"
        assert extents[2] < 1 << 17, "sums of int8 products may exceed 32 bits"

    def trsm(
        self, dtype: str, handle: int, side: int, uplo: int, op: int, unit: int, m: int, n: int, alpha: int, A: int,
        lda: int, X: int, ldx: int,
    ) -> None:  # fmt: skip
        """X := alpha op(A)^-1 X, in column-major order."""
        size, known = n if side else m, np.dtype(dtype)
        a, x = _by_columns(A, known, lda, size, size, 0), _by_columns(X, known, ldx, m, n, 0)
        width = ctypes.c_byte * known.itemsize
        first = np.frombuffer(width.from_address(alpha), known)[0]
        with np.errstate(all="ignore"):
            solve_triangular(("LR"[side], "LU"[uplo], "NTC"[op], "NU"[unit]), first, a, x)
        self.calls.append("trsm")

    strsm, dtrsm = partialmethod(trsm, "f4"), partialmethod(trsm, "f8")
    ctrsm, ztrsm = partialmethod(trsm, "c8"), partialmethod(trsm, "c16")

    def gemmStridedBatchedEx(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, A: int, type_a: int, lda: int,
        step_a: int, B: int, type_b: int, ldb: int, step_b: int, beta: int, C: int, type_c: int, ldc: int,
        step_c: int, items: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        sizes = [np.dtype(_CUBLAS_TYPES[x]).itemsize for x in (type_a, type_b, type_c)]
        for item in range(items):
            a, b, c = (x + item * step * size for x, step, size in zip((A, B, C), (step_a, step_b, step_c), sizes))
            self.gemmEx(
                handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, compute, -1
            )

    # cuBLAS, through ctypes
    def cublasGemmGroupedBatchedEx(
        self, handle: Any, op_a: Any, op_b: Any, m: Any, n: Any, k: Any, alpha: Any, A: Any, type_a: Any, lda: Any,
        B: Any, type_b: Any, ldb: Any, beta: Any, C: Any, type_c: Any, ldc: Any, number: Any, sizes: Any, compute: Any,
    ) -> int:  # fmt: skip
        """Compute groups of products; extents and scalars are on the host, arrays of addresses on the GPU."""
        assert self.version >= 120500, "the library has no such function"
        assert self.streams[handle.value] == self.current_stream(), "another stream than the caller's"
        on_host = op_a, op_b, m, n, k, lda, ldb, ldc, sizes
        assert not any(self._on_gpu(x.value) for x in (*on_host, alpha, beta)), "extents and scalars are on the host"
        assert all(self._on_gpu(x.value) for x in (A, B, C)), "addresses are on the GPU"
        kind, compute = type_c.value, compute.value
        if {type_a.value, type_b.value} != {kind} or (kind, compute) not in ((0, 68), (0, 77), (1, 70)):
            return 15  # not supported
        groups = np.transpose([_numbers(x, number.value, np.intc) for x in on_host]).tolist()
        if any(min(group) < 0 or group[7] < group[2] for group in groups):
            return 7  # invalid value
        places = np.transpose([_numbers(x, sum(group[8] for group in groups), np.uint64) for x in (A, B, C)]).tolist()
        assert all(self._on_gpu(x) for place in places for x in place)
        called, itemsize = len(self.calls), np.dtype(_CUBLAS_TYPES[kind]).itemsize
        for group, (*shared, ld_a, ld_b, ld_c, size) in enumerate(groups):
            first, second = (x.value + group * itemsize for x in (alpha, beta))
            for _ in range(size):
                a, b, c = places.pop(0)
                lying = a, kind, ld_a, b, kind, ld_b, second, c, kind, ld_c
                self.gemmEx(handle.value, *shared, first, *lying, compute, -1)
        self.calls[called:] = ["gemmGroupedBatchedEx"]
        return 0

    def _on_gpu(self, ptr: int) -> bool:
        return any((x := made()) is not None and x.ptr <= ptr < x.ptr + len(x) for made in self.allocations)


def _numbers(ptr: Any, number: int, dtype: Any) -> np.ndarray:
    """Return `number` numbers at an address."""
    return np.frombuffer((ctypes.c_byte * (number * np.dtype(dtype).itemsize)).from_address(ptr.value), dtype)


def _by_columns(ptr: int, dtype: np.dtype, ld: int, rows: int, cols: int, op: int) -> np.ndarray:
    """Return op(X), rows x cols; X is column-major with leading dimension ld.  op : 0 for N, 1 for T, 2 for C."""
    high, wide = (rows, cols) if op == 0 else (cols, rows)
    assert ld >= high
    memory = (ctypes.c_byte * (((wide - 1) * ld + high) * dtype.itemsize)).from_address(ptr)
    x: np.ndarray = np.ndarray((high, wide), dtype, memory, strides=(dtype.itemsize, ld * dtype.itemsize))
    return x if op == 0 else x.T if op == 1 else x.conj().T
