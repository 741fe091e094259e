"""The product on one rank: C := alpha A B + beta C in place, straight on the BLAS routine.

SciPy exports the Fortran routines of the BLAS it is linked to; they take leading dimensions and
beta, so that panels cut out of larger arrays are multiplied where they lie and C is updated where
it lies.  (`scipy.linalg.blas.dgemm` copies strided arguments without saying so.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

LETTER = {"f": "s", "d": "d", "F": "c", "D": "z"}  # dtype.char -> BLAS prefix


def gemm_accumulate(alpha: Any, A: np.ndarray, B: np.ndarray, beta: Any, C: np.ndarray) -> None:
    """C := alpha A B + beta C.  Local.

    A : (m, k);  B : (k, n);  C : (m, n), overwritten, not read where beta is 0.
        One of float32, float64, complex64, complex128, the same for all.  Rows or columns contiguous
        (slices of C- or Fortran-ordered arrays); anything else raises ValueError.

    2mnk flops, no temporaries.  Error: |C - C^| <= gamma_k |A||B| (Higham 2002, 3.5).
    """
    m, n = C.shape
    k = A.shape[1]
    if m == 0 or n == 0:
        return
    if k == 0:
        scale(beta, C)
        return
    gemm, scalar = _gemm(C.dtype.char)
    across, ldc = leading(C)
    if across == b"T":  # C is row-major: its memory is C^T in Fortran's order, and C^T := alpha B^T A^T + ...
        A, B, C, m, n = B.T, A.T, C.T, n, m
    trans_a, lda = leading(A)
    trans_b, ldb = leading(B)
    gemm(
        trans_a, trans_b, _int(m), _int(n), _int(k),
        scalar(alpha), A.ctypes.data, _int(lda), B.ctypes.data, _int(ldb),
        scalar(beta), C.ctypes.data, _int(ldc),
    )  # fmt: skip


def scale(beta: Any, C: np.ndarray) -> None:
    """C := beta C, in place; C is not read where beta is 0."""
    if beta == 0:
        C[...] = 0
    elif beta != 1:
        C *= beta


def leading(x: np.ndarray) -> tuple[bytes, int]:
    """(trans, ld) by which Fortran sees the array: b"N" if columns are contiguous, b"T" if rows are."""
    rows, cols = x.shape
    if x.size == 0:
        return b"N", max(1, rows)
    (down, ragged), (right, uneven) = (divmod(stride, x.itemsize) for stride in x.strides)
    if (ragged and rows > 1) or (uneven and cols > 1):
        raise ValueError(f"the elements of an array {x.shape} with strides {x.strides} are not a multiple apart")
    if (down == 1 or rows == 1) and (right >= max(1, rows) or cols == 1):
        return b"N", right if cols > 1 else max(1, rows)
    if (right == 1 or cols == 1) and (down >= max(1, cols) or rows == 1):
        return b"T", down if rows > 1 else max(1, cols)
    raise ValueError(f"neither rows nor columns of an array {x.shape} with strides {x.strides} are contiguous")


def _int(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


@cache
def _gemm(char: str) -> tuple[Callable[..., None], Callable[[Any], Any]]:
    """The BLAS routine for a dtype, and how to hand it a scalar.  Releases the GIL while it runs."""
    from scipy.linalg import cython_blas

    capsule = dict(cython_blas.__pyx_capi__)[f"{LETTER[char]}gemm"]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ref, address = ctypes.c_void_p, ctypes.c_void_p
    text = ctypes.c_char_p
    prototype = ctypes.CFUNCTYPE(None, text, text, ref, ref, ref, ref, address, ref, address, ref, ref, address, ref)
    real = {"f": ctypes.c_float, "d": ctypes.c_double}.get(char)

    def scalar(value: Any) -> Any:
        if real is not None:
            return ctypes.byref(real(value))
        part = ctypes.c_float if char == "F" else ctypes.c_double
        return ctypes.byref((part * 2)(complex(value).real, complex(value).imag))

    return prototype(pointer(capsule, name(capsule))), scalar
