"""Products of many unequal matrices in one call, by cublasGemmGroupedBatchedEx of cuBLAS 12.5 and later.

CuPy does not call this function, so it is taken from the library that CuPy has loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import cublas

from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import TYPE
from pdgemm.local.blas.local_gemm import seen_by_fortran

Operands = tuple[Array, Array, Array]

_LEAST = 120500  # the version of cuBLAS that has the function
_CHARS = "fd"  # only real types
_OP = {b"N": 0, b"T": 1}


def takes(handle: int, dtype: np.dtype) -> bool:
    """Return whether `multiply_grouped` multiplies matrices of this type with the installed library."""
    version = cublas.getVersion(handle)
    return dtype.char in _CHARS and version >= _LEAST and _library(version // 10000) is not None


def multiply_grouped(handle: int, alpha: Any, products: Sequence[Operands], beta: Any) -> None:
    """Start C := alpha A B + beta C for each (A, B, C), in the current stream.

    All matrices have the same type, and none of them is empty.

    Products of the same extents and leading dimensions form a group; all groups are one call.
    """
    groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for operands in products:
        by_columns: Any = seen_by_fortran(*operands, False, False)
        A, B, C, (trans_a, ld_a), (trans_b, ld_b), ld_c = by_columns
        shared = _OP[trans_a], _OP[trans_b], *C.shape, A.shape[1], ld_a, ld_b, ld_c
        groups.setdefault(shared, []).append((A.data.ptr, B.data.ptr, C.data.ptr))
    dtype, number = products[0][2].dtype, len(groups)
    extents = np.array([*groups], np.intc).T.copy()  # cuBLAS reads extents and scalars in host memory
    scalars = np.array([[alpha] * number, [beta] * number], dtype)
    sizes = np.array([len(x) for x in groups.values()], np.intc)
    addresses = np.array([x for group in groups.values() for x in group], np.uint64).T.copy()
    pointers, stream = cupy.asarray(addresses), cupy.cuda.get_current_stream()  # cuBLAS reads addresses in GPU memory
    op_a, op_b, m, n, k, lda, ldb, ldc = (ctypes.c_void_p(x.ctypes.data) for x in extents)
    first, second = (ctypes.c_void_p(x.ctypes.data) for x in scalars)
    a, b, c = (ctypes.c_void_p(pointers[x].data.ptr) for x in range(3))
    kind, compute = (ctypes.c_int(x) for x in (TYPE[dtype].cuda, TYPE[dtype].cublas))  # type: ignore[arg-type]
    cublas.setStream(handle, stream.ptr)
    stream.synchronize()  # some GPUs are said to fail if the addresses are still being copied
    status = _library(cublas.getVersion(handle) // 10000).cublasGemmGroupedBatchedEx(
        ctypes.c_void_p(handle), op_a, op_b, m, n, k, first, a, kind, lda, b, kind, ldb, second, c, kind, ldc,
        ctypes.c_int(number), ctypes.c_void_p(sizes.ctypes.data), compute,
    )  # fmt: skip
    if status:
        raise cublas.CUBLASError(status)


@cache
def _library(major: int) -> Any:
    """Return the cuBLAS of this version that the process has loaded; None if it is not loaded."""
    try:
        return ctypes.CDLL(f"libcublas.so.{major}", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
