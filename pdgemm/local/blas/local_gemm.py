"""The product on one rank: C := alpha A B + beta C by a direct call of the BLAS routine.

Fortran's routines take leading dimensions and beta, so that panels of larger arrays are multiplied
and C is updated in place.  (`scipy.linalg.blas.dgemm` silently copies strided arguments.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.element_functions import tiles
from pdgemm.local.arrays.elementwise import CONVERT, Combine, scale
from pdgemm.local.blas import library as blas
from pdgemm.local.blas.threads import threads

BLAS_INT = 2**31 - 1  # the largest dimension of the BLAS interface
ONE_THREAD = 1 << 18  # m n k up to which OpenBLAS uses one thread (SMP_THRESHOLD_MIN * GEMM_MULTITHREAD_THRESHOLD)
SLAB_FLOPS = 5e8  # flops that one core computes in ten milliseconds
SLAB_ROWS = 512  # fewest rows or columns of a slab: BLAS is slower on smaller slabs
EXACT_WIDTH = 1024  # products of two int8 numbers, each at most 2**14, that float32 adds up exactly
PADDED = 16  # extents of int8 operands on a device are multiples of this: their rows begin at multiples of 16 bytes
EXACT_WIDTH_ON_DEVICE = (2**31 - 1) // 2**14 // PADDED * PADDED  # such products that int32 adds up
# the C type of the real numbers of a dtype.char
_REAL: dict[str, Any] = {"f": ctypes.c_float, "d": ctypes.c_double, "i": ctypes.c_int32}
_LETTERS = {trans: ctypes.c_char_p.from_param(trans) for trans in (b"N", b"T", b"C")}
_UPLO = {lower: ctypes.c_char_p.from_param(b"L" if lower else b"U") for lower in (True, False)}


def gemm_accumulate(
    alpha: Any,
    A: Array,
    B: Array,
    beta: Any,
    C: Array,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
) -> None:
    """Compute C := alpha op(A) op(B) + beta C, where op is the conjugate or nothing.  Local.

    A : (m, k);  B : (k, n);  C : (m, n), overwritten, not read where beta is 0.
        All have the same type: float32, float64, complex64 or complex128.  Rows or columns are contiguous
        (slices of C- or Fortran-ordered arrays); anything else raises ValueError.
    conjugate_a, conjugate_b : conjugate an operand; only where `conjugates` returns True.

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
    """Return the product C := alpha op(A) op(B) + beta C of these arrays as a function of beta.  Local.

    Arguments and errors as in `gemm_accumulate`; with tf32 a device may round float32 operands to 11 bits.
    The function may be called repeatedly; a call multiplies the current elements and adds a microsecond to the time of
    BLAS.  The function holds references to the arrays, whose memory must not be reallocated.
    """
    if not C.size or not A.shape[1]:
        return partial(scale, C=C)
    if type(C) is not np.ndarray and (device := of(C)):
        return device.multiply(alpha, A, B, C, conjugate_a, conjugate_b, tf32)
    char, arrays = C.dtype.char, (A, B, C)
    A, B, C, (trans_a, lda), (trans_b, ldb), ldc = seen_by_fortran(A, B, C, conjugate_a, conjugate_b)
    (m, n), k = C.shape, A.shape[1]
    head = (
        _LETTERS[trans_a], _LETTERS[trans_b], _int(m), _int(n), _int(k),
        _scalar(char, alpha), _address(A), _int(lda), _address(B), _int(ldb),
    )  # fmt: skip
    return _Prepared(blas.routine("gemm", char), char, head, (_address(C), _int(ldc)), arrays)


def multiply_stack(A: np.ndarray, B: np.ndarray, C: np.ndarray | None = None) -> np.ndarray:
    """Return the stack of the products A_i B_i, in C where it is passed.  Local.

    A : (..., m, k);  B : (..., k, n);  C : (..., m, n), overwritten.  All have the same type, one of BLAS.

    NumPy has its own BLAS, whose threads spin after a product on cores that the threads of `prepare` need next: a step
    of a transformer that used both took twice as long on two threads as on one.  So NumPy is used only for products
    that one thread computes.
    """
    if C is None:
        C = np.empty((*np.broadcast_shapes(A.shape[:-2], B.shape[:-2]), A.shape[-2], B.shape[-1]), A.dtype)
    if prod(A.shape[-2:]) * B.shape[-1] <= ONE_THREAD or threads() == 1:
        return np.matmul(A, B, out=C)
    for at in np.ndindex(C.shape[:-2]):
        gemm_accumulate(1, A[at], B[at], 0, C[at])
    return C


def product_slabs(A: Array, B: Array, C: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield parts of the product C := A B that take a few milliseconds each: C is cut along its longer dimension."""
    m, n = C.shape
    by_columns, length = n > m, max(m, n)
    flops = (8 if C.dtype.kind == "c" else 2) * C.size * A.shape[1]
    step = -(-length // max(1, min(length // SLAB_ROWS, round(flops / SLAB_FLOPS)))) or 1
    for start in range(0, max(1, length), step):
        slab = slice(start, start + step)
        yield (A, B[:, slab], C[:, slab]) if by_columns else (A[slab], B, C[slab])


@dataclass(slots=True, eq=False)
class _Prepared:
    """A prepared call of BLAS, with all arguments but beta, which is a number of type `char`."""

    routine: Callable[..., None]
    char: str
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    arrays: tuple[np.ndarray, ...]  # addresses hold no references

    def __call__(self, beta: Any) -> None:
        self.routine(*self.head, _scalar(self.char, beta), *self.tail)


def prepare_square(
    alpha: Any, A: np.ndarray, C: np.ndarray, lower: bool = True, hermitian: bool = True, conjugate: bool = False
) -> Callable[[Any], None]:
    """Return C := alpha op(A) op(A)^H + beta C, in one triangle of C, as a function of beta, as `prepare`.  Local.

    A : (n, k) and C : (n, n), on the host, for which `forms_squares` returns True.
    lower : the lower triangle with the diagonal is read and written, otherwise the upper.
    hermitian : alpha and beta are real; otherwise the product is alpha A A^T + beta C.
    conjugate : op is the conjugate.

    n^2 k flops, by herk or syrk.
    """
    char, order = C.dtype.char, _square_order(A, C, hermitian, conjugate)
    assert order is not None
    trans, ldc, flipped = order
    name = "herk" if hermitian and C.dtype.kind == "c" else "syrk"
    number = char.lower() if name == "herk" else char
    uplo = _UPLO[lower != flipped]
    letter = _LETTERS[b"C" if trans == b"T" and name == "herk" else trans]
    head = uplo, letter, *map(_int, A.shape), _scalar(number, alpha), _address(A), _int(_stride(A, trans))
    return _Prepared(blas.routine(name, char), number, head, (_address(C), _int(ldc)), (A, C))


def forms_squares(A: Array, C: Array, hermitian: bool = True, conjugate: bool = False) -> bool:
    """Return whether `prepare_square` can form square tiles of C, which depends on the memory orders of A and C."""
    return of(C) is None and _square_order(A, C, hermitian, conjugate) is not None


def _square_order(A: np.ndarray, C: np.ndarray, hermitian: bool, conjugate: bool) -> tuple[bytes, int, bool] | None:
    """Return trans of A, the leading dimension of C, and whether Fortran sees C transposed; None if BLAS cannot form C.

    Fortran sees a row-major C as its transpose, which is the conjugate of a Hermitian C: then A is taken as conjugated.
    BLAS forms A A^H for a column-major A, and conj(A) A^T for a row-major A.
    """
    kind = C.dtype.kind == "c"
    for flipped, of_c in ((False, b"N"), (True, b"T")):
        ldc = _stride(C, of_c)
        for trans in (b"N", b"T") if ldc else ():
            fits = not kind or ((conjugate != flipped) == (trans == b"T") if hermitian else not conjugate)
            if fits and _stride(A, trans):
                return trans, ldc, flipped
    return None


def prepare_gemv(A: np.ndarray, x: np.ndarray, y: np.ndarray, adjoint: bool = False) -> Callable[[], None]:
    """Return the product y := A x + y, or A^H x + y with `adjoint`, of these arrays as a function.  Local.

    A : (m, n), column-major;  x, y : contiguous vectors of the type of A, on the host.
    The function may be called repeatedly, as with `prepare`, but does not hold references to the arrays.
    """
    char, one = A.dtype.char, _scalar(A.dtype.char, 1)
    vectors = _address(x), _int(1), one, _address(y), _int(1)
    head = _LETTERS[b"C" if adjoint else b"N"], *map(_int, A.shape), one
    return partial(blas.routine("gemv", char), *head, _address(A), _int(leading(A)[1]), *vectors)


def prepare_hemv(A: np.ndarray, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """Return the product y := A x + y as `prepare_gemv`, for a Hermitian A.  Only the lower triangle of A is read."""
    char, one = A.dtype.char, _scalar(A.dtype.char, 1)
    vectors = _address(x), _int(1), one, _address(y), _int(1)
    name = "hemv" if A.dtype.kind == "c" else "symv"
    return partial(blas.routine(name, char), _UPLO[True], _int(len(A)), one, _address(A), _int(leading(A)[1]), *vectors)


def seen_by_fortran(
    A: np.ndarray, B: np.ndarray, C: np.ndarray, conjugate_a: bool, conjugate_b: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[bytes, int], tuple[bytes, int], int]:
    """Return column-major operands and result: a row-major C is a column-major C^T = B^T A^T."""
    problem = ValueError()
    for trans in (b"N", b"T"):  # a C of one row or column has both orders, but BLAS can conjugate in one of them only
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
    """Return whether BLAS can conjugate an operand, given the memory orders of the operand and of C.

    BLAS has a conjugate transpose but no plain conjugate, so BLAS must read the operand as a transpose.
    """
    return order != order_of_c


def integer_accumulate(alpha: int, A: Array, B: Array, C: Array, workspace: Array, digits: int = 1) -> None:
    """Compute C := alpha A B + C modulo 2^32 or 2^64, for int32 or int64 C and integers held as floats.  Local.

    A, B : int8 held as float32 (for int32 C), other integers of at most 16 bits as float64, or their `digits` to base
        2^16 as float64, as `to_digits` writes them; k <= EXACT_WIDTH, so that sums are exact.
    workspace : of the type of A, two numbers per element of C that is computed at a time.

    The product of A = sum_i 2^16i A_i and B is sum_e 2^16e sum_(i <= e) A_i B_(e-i), where terms of e >= digits vanish
    modulo 2^32 or 2^64: digits (digits + 1) / 2 products by BLAS, of which those for one e are one call.
    """
    products, integers = workspace.reshape(2, -1)
    kind, k = np.dtype(f"i{workspace.itemsize}"), A.shape[1] // digits
    half = 1 << (8 * kind.itemsize - 1)
    for e in range(digits if C.size else 0):
        a, b = A[:, : (e + 1) * k], B[(digits - 1 - e) * k :]
        factor = ((alpha << 16 * e) + half) % (2 * half) - half
        for rows, cols in tiles(C.shape[0], C.shape[1], len(products)):
            part = C[rows, cols]
            product = products[: part.size].reshape(part.shape)
            gemm_accumulate(1, a[rows], b[:, cols], 0, product)
            whole = integers.view(kind)[: part.size].reshape(part.shape)
            np.copyto(whole, product, casting="unsafe")
            if factor != 1:
                whole *= factor
            np.add(part, whole, out=part, casting="unsafe")


def to_digits(panel: np.ndarray, into: np.ndarray, digits: int, axis: int) -> np.ndarray:
    """Write the digits to base 2^16 of a panel of integers side by side along the inner axis, and return them.  Local.

    axis : 1 for a panel of A, whose least digits are first; 0 for one of B, whose least digits are last.
    Of a negative number, the digit that has the sign is negative.
    """
    size, k = max(1, panel.itemsize // 2), panel.shape[axis]
    for at in range(digits):
        part = np.swapaxes(into, 0, axis)[(at if axis else digits - 1 - at) * k :][:k]
        digit: Any = 0
        if at < size:
            kind = f"{panel.dtype.kind if at == size - 1 else 'u'}2"
            fields = np.dtype([(str(x), kind) for x in range(size)])
            digit = np.swapaxes(panel if panel.itemsize < 4 else panel.view(fields)[str(at)], 0, axis)
        part[...] = digit
    return into


def padded(extent: int) -> int:
    """Return how many rows, columns or inner indices the workspace of `multiply_integers` has for `extent` of them."""
    return -(-extent // PADDED) * PADDED


def multiply_integers(
    alpha: int, A: Array, B: Array, beta: int, C: Array, workspace: tuple[Array, Array, Array]
) -> None:
    """Compute C := alpha A B + beta C on a device, for int8 A and B and int32 C, k <= EXACT_WIDTH_ON_DEVICE.  Local.

    workspace : for A and B, int8, and for their product, int32, of `padded` extents.

    2mnk operations in int32, exact; then alpha, beta and C modulo 2^32.  Both operands are copied, so that each is
    contiguous along k: tensor cores are fast for int8 only in this order, and only at multiples of 4 bytes.
    """
    (m, n), k = C.shape, A.shape[1]
    if not C.size or not k:
        scale(beta, C)
        return
    high, wide, deep = map(padded, (m, n, k))
    left, right = workspace[0][: high * deep].reshape(high, deep), workspace[1][: wide * deep].reshape(wide, deep).T
    order = "F" if C.strides[0] < C.strides[1] else "C"
    product = workspace[2][: high * wide].reshape((high, wide), order=order)
    CONVERT(left[:m, :k], A)
    CONVERT(right[:k, :n], B)
    scale(0, left[:, k:])  # other padding may hold any numbers, because it does not affect C
    gemm_accumulate(1, left, right, 0, product)
    Combine(alpha, beta)(C, product[:m, :n])


def leading(x: np.ndarray, conjugate: bool = False) -> tuple[bytes, int]:
    """Return (trans, ld) for passing the array to Fortran: b"N" if columns are contiguous, b"T" if rows are.

    conjugate : return b"C", for the conjugate of an array whose rows are contiguous.
    """
    for trans in (b"T",) if conjugate else (b"N", b"T"):
        ld = _stride(x, trans)
        if ld:
            return b"C" if conjugate else trans, ld
    kind = "rows" if conjugate else "neither rows nor columns"
    raise ValueError(f"{kind} of an array {x.shape} with strides {x.strides} are {'not ' * conjugate}contiguous")


def largest_extent(x: Array) -> int:
    """Return the largest number that BLAS gets for an array: a dimension, or a distance of rows or columns in elements.

    A number above BLAS_INT would be passed modulo 2^32.
    """
    strides = (abs(stride) // x.itemsize for stride, size in zip(x.strides, x.shape) if size > 1)
    return max(*x.shape, *strides) if x.size else 0


def _stride(x: np.ndarray, trans: bytes) -> int:
    """Return the leading dimension of an array with contiguous columns (b"N") or rows (b"T"); 0 if they are not."""
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


# BLAS only reads these numbers, so calls share them.
@lru_cache(4096)
def _int(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


@lru_cache(256)
def _scalar(char: str, value: Any) -> Any:
    return ctypes.byref(blas_number(char, value))


def blas_number(char: str, value: Any) -> Any:
    """Return a number as a ctypes object in memory, as BLAS reads a scalar of this dtype.char."""
    if char in _REAL:
        return _REAL[char](value.real)
    value = complex(value)
    return (_REAL[char.lower()] * 2)(value.real, value.imag)
