"""The product on one rank: C := alpha A B + beta C straight on the BLAS routine.

Fortran's routines take leading dimensions and beta, so that panels cut out of larger arrays are
multiplied where they lie and C is updated where it lies.  (`scipy.linalg.blas.dgemm` copies
strided arguments without saying so.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from pdgemm.arrays.device import Array, of
from pdgemm.arrays.element_functions import tiles
from pdgemm.arrays.elementwise import Combine, scale
from pdgemm.blas import library as blas

BLAS_INT = 2**31 - 1  # the largest dimension that BLAS takes
EXACT_WIDTH = 1024  # products of int8 numbers, 2**14 at most, that float32 adds without rounding
_REAL: dict[str, Any] = {"f": ctypes.c_float, "d": ctypes.c_double}  # dtype.char -> scalars of BLAS
_PARTS: dict[str, Any] = {"F": ctypes.c_float * 2, "D": ctypes.c_double * 2}
_LETTERS = {trans: ctypes.c_char_p.from_param(trans) for trans in (b"N", b"T", b"C")}


def gemm_accumulate(
    alpha: Any,
    A: Array,
    B: Array,
    beta: Any,
    C: Array,
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
    prepare(alpha, A, B, C, conjugate_a, conjugate_b)(beta)


def prepare(
    alpha: Any,
    A: Array,
    B: Array,
    C: Array,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    tf32: bool = False,
) -> Callable[[Any], None]:
    """The product C := alpha op(A) op(B) + beta C of these arrays, to be called with beta, again and again.  Local.

    Arguments and errors as in `gemm_accumulate`; tf32: a device may round operands in single precision to 11 bits.
    A call multiplies what the arrays then hold, and costs a
    microsecond beside BLAS.  The arrays live as long as the product; their memory must stay where it is.
    """
    if not C.size or not A.shape[1]:
        return partial(scale, C=C)
    if type(C) is not np.ndarray and (device := of(C)):
        return device.multiply(alpha, A, B, C, conjugate_a, conjugate_b, tf32)
    return _Prepared(alpha, A, B, C, conjugate_a, conjugate_b)


class _Prepared:
    """A call of BLAS with all arguments but beta at hand."""

    __slots__ = ("arrays", "gemm", "head", "scalar", "tail")

    def __init__(
        self, alpha: Any, A: np.ndarray, B: np.ndarray, C: np.ndarray, conjugate_a: bool, conjugate_b: bool
    ) -> None:
        self.arrays = A, B, C  # addresses keep nothing alive
        char = C.dtype.char
        A, B, C, (trans_a, lda), (trans_b, ldb), ldc = seen_by_fortran(A, B, C, conjugate_a, conjugate_b)
        (m, n), k = C.shape, A.shape[1]
        self.gemm, self.scalar = blas.gemm(char), partial(_scalar, char)
        self.head = (
            _LETTERS[trans_a], _LETTERS[trans_b], _int(m), _int(n), _int(k),
            _scalar(char, alpha), _address(A), _int(lda), _address(B), _int(ldb),
        )  # fmt: skip
        self.tail = _address(C), _int(ldc)

    def __call__(self, beta: Any) -> None:
        self.gemm(*self.head, self.scalar(beta), *self.tail)


def seen_by_fortran(
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


def integer_accumulate(alpha: int, A: Array, B: Array, C: Array, room: Array) -> None:
    """C := alpha A B + C for int32 C and int8 numbers held as float32, at most EXACT_WIDTH columns of A.  Local.

    room : float32, for twice as many numbers as are formed at a time, exactly; on a device, for all of them.
    """
    if type(C) is not np.ndarray and of(C):
        product = room[: C.size].reshape(C.shape)
        gemm_accumulate(1, A, B, 0, product)
        Combine(alpha, 1)(C, product)
        return
    products, integers = room.reshape(2, -1)
    for rows, cols in tiles(C.shape[0], C.shape[1], len(products)) if C.size else ():
        product = products[: C[rows, cols].size].reshape(C[rows, cols].shape)
        gemm_accumulate(1, A[rows], B[:, cols], 0, product)
        whole = integers.view(np.int32)[: product.size].reshape(product.shape)
        np.copyto(whole, product, casting="unsafe")
        if alpha != 1:
            whole *= alpha
        C[rows, cols] += whole


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
    rows, cols = x.shape
    down, right = x.strides
    if trans == b"T":
        rows, cols, down, right = cols, rows, right, down
    if not (rows and cols):
        return max(1, rows)
    if rows > 1 and down != x.itemsize:
        return 0
    if cols == 1:
        return rows
    ld, ragged = divmod(right, x.itemsize)
    return 0 if ragged or ld < rows else ld


def _address(x: np.ndarray) -> Any:
    return ctypes.c_void_p.from_param(x.ctypes.data)


# BLAS reads these and writes none, so one of each is enough.
@lru_cache(4096)
def _int(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


@lru_cache(256)
def _scalar(char: str, value: Any) -> Any:
    if char in _REAL:
        return ctypes.byref(_REAL[char](value))
    value = complex(value)
    return ctypes.byref(_PARTS[char](value.real, value.imag))
