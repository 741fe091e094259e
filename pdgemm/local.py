"""Arithmetic on one rank: C := alpha A B + beta C straight on the BLAS routine, and Y := alpha X + beta Y.

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

from pdgemm.elements import tiles

LETTER = {"f": "s", "d": "d", "F": "c", "D": "z"}  # dtype.char -> BLAS prefix
BLAS_INT = 2**31 - 1  # the largest dimension that BLAS takes
EXACT_WIDTH = 1024  # products of int8 numbers, 2**14 at most, that float32 adds without rounding


def gemm_accumulate(
    alpha: Any,
    A: np.ndarray,
    B: np.ndarray,
    beta: Any,
    C: np.ndarray,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
) -> None:
    """C := alpha op(A) op(B) + beta C, op the conjugate or nothing.  Local.

    A : (m, k);  B : (k, n);  C : (m, n), overwritten, not read where beta is 0.
        One of float32, float64, complex64, complex128, the same for all.  Rows or columns contiguous
        (slices of C- or Fortran-ordered arrays); anything else raises ValueError.
    conjugate_a, conjugate_b : only where `conjugates` says that BLAS can.

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
    A, B, C, (trans_a, lda), (trans_b, ldb), ldc = _seen_by_fortran(A, B, C, conjugate_a, conjugate_b)
    gemm(
        trans_a, trans_b, _int(C.shape[0]), _int(C.shape[1]), _int(k),
        scalar(alpha), A.ctypes.data, _int(lda), B.ctypes.data, _int(ldb),
        scalar(beta), C.ctypes.data, _int(ldc),
    )  # fmt: skip


def _seen_by_fortran(
    A: np.ndarray, B: np.ndarray, C: np.ndarray, conjugate_a: bool, conjugate_b: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[bytes, int], tuple[bytes, int], int]:
    """Operands and result by columns: a row-major C is C^T in Fortran's order, and C^T = B^T A^T."""
    problem = ValueError()
    for trans in (b"N", b"T"):  # a C of one row or column is both, but BLAS conjugates op(A) and op(B) only in one
        ldc = _stride(C, trans)
        if ldc:
            if trans == b"T":
                A, B, C, conjugate_a, conjugate_b = B.T, A.T, C.T, conjugate_b, conjugate_a
            try:
                return A, B, C, leading(A, conjugate_a), leading(B, conjugate_b), ldc
            except ValueError as bad:
                problem = bad
    leading(C)
    raise problem


def conjugates(order: str, order_of_c: str) -> bool:
    """Can BLAS conjugate an operand of one memory order while it multiplies into a C of another?

    It knows the conjugate transpose, but not the conjugate: only what it reads transposed.
    """
    return order != order_of_c


def integer_accumulate(alpha: int, A: np.ndarray, B: np.ndarray, C: np.ndarray, room: np.ndarray) -> None:
    """C := alpha A B + C for int32 C and int8 numbers held as float32, at most EXACT_WIDTH columns of A.  Local.

    room : float32, for twice as many numbers as are formed at a time, exactly.
    """
    products, integers = room.reshape(2, -1)
    for rows, cols in tiles(C.shape[0], C.shape[1], len(products)) if C.size else ():
        product = products[: C[rows, cols].size].reshape(C[rows, cols].shape)
        gemm_accumulate(1, A[rows], B[:, cols], 0, product)
        whole = integers.view(np.int32)[: product.size].reshape(product.shape)
        np.copyto(whole, product, casting="unsafe")
        if alpha != 1:
            whole *= alpha
        C[rows, cols] += whole


def update(
    alpha: Any, X: np.ndarray, beta: Any, Y: np.ndarray, room: np.ndarray | None = None, conjugated: bool = False
) -> None:
    """Y := alpha op(X) + beta Y, converting between any types; op the conjugate or nothing.  Local.

    room : 2 x (at least as many numbers as X has), of the type of the arithmetic; None: X is only converted.
    """
    if room is None:
        np.copyto(Y, X, casting="unsafe")
        return
    value, old = room[:, : X.size].reshape(2, *X.shape)
    np.copyto(value, X, casting="unsafe")
    if conjugated:
        np.conjugate(value, out=value)
    if alpha != 1:
        value *= alpha
    if beta != 0:
        np.copyto(old, Y, casting="unsafe")
        if beta != 1:
            old *= beta
        value += old
    np.copyto(Y, value, casting="unsafe")


def scale(beta: Any, C: np.ndarray) -> None:
    """C := beta C, in place; C is not read where beta is 0."""
    if beta == 0:
        C[...] = 0
    elif beta != 1:
        C *= beta


def leading(x: np.ndarray, conjugate: bool = False) -> tuple[bytes, int]:
    """(trans, ld) by which Fortran sees the array: b"N" if columns are contiguous, b"T" if rows are.

    conjugate : b"C", for the conjugate of an array whose rows are contiguous.
    """
    for trans in (b"T",) if conjugate else (b"N", b"T"):
        ld = _stride(x, trans)
        if ld:
            return b"C" if conjugate else trans, ld
    kind = "rows" if conjugate else "neither rows nor columns"
    raise ValueError(f"{kind} of an array {x.shape} with strides {x.strides} are {'not ' * conjugate}contiguous")


def _stride(x: np.ndarray, trans: bytes) -> int:
    """The leading dimension of an array whose columns (b"N") or rows (b"T") are contiguous; 0 where they are not."""
    if trans == b"T":
        x = x.T
    rows, cols = x.shape
    if x.size == 0:
        return max(1, rows)
    (down, ragged), (right, uneven) = (divmod(stride, x.itemsize) for stride in x.strides)
    if (rows > 1 and (ragged or down != 1)) or (cols > 1 and (uneven or right < max(1, rows))):
        return 0
    return right if cols > 1 else max(1, rows)


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
