"""Products that are emulated: C := alpha A B + C from products of slices of few bits.

With `ozaki` a slice consists of integers up to 64, BLAS multiplies slices in float32 without rounding, and the
products are added up in float64.  With `bf16x9` a slice consists of bfloat16 numbers, whose products are exact in
float32 and are added up there.  Products X_i Y_j with the same i + j have the same scale: these are one product of
BLAS over a longer inner dimension, because the slices of A are stored side by side, and the slices of B in reverse
order below each other.

Bound for ozaki with S slices.  In a panel, let s_i be the power of two of row i of A, max_l |a_il| < s_i <= 2 max_l
|a_il|, and t_j that of column j of B.  Digits are rounded to nearest: the error of the first h slices of a_il / s_i is
at most 2^-7h, and slice h contributes at most 2^(-7(h-1)).  So the products of slices with i + j <= S + 1 differ from
a_il b_lj / (s_i t_j) by sum_(h=1..S) 2^(-7(h-1)) 2^(-7(S+1-h)) + 2^-7S = (S + 1) 2^-7S at most.  Summed over l, with
s_i t_j <= 4 max_l |a_il| max_l |b_lj|, and with the roundings of Horner's rule (two units at most, because all levels
but the first have weights of 2^-7 and less), of alpha, and of the sum of p panels and partial sums:

    |C - C^| <= |alpha| k (4 (S + 1) 2^-7S + gamma_(p+3)) max_l |a_il| max_l |b_lj|.

Below the least normal number 2^-1022 there is an error of (|alpha| + 1) 2^-1075 for each panel in addition.

Bound for bf16x9.  A is the sum of its slices, also if it is subnormal: second and third slices are multiplied by
2^8 and 2^16 before they are cut.  Slices are truncated, so that |X_2| 2^-8 < 2^-7 |x| and |X_3| 2^-16 < 2^-15 |x|.
All nine products are formed.  Sums of level 1 are rounded as float32 sums are, and sums of level 2, over twice as
many terms, have a weight of 2^-6.  Hence

    |C - C^| <= 1.04 gamma_(k+4) |alpha||A||B| + 9 k (|alpha| + 1) 2^-149,   where k 2^-24 < 0.01.

Both bounds are for real matrices.  A complex product consists of four real ones: times 2 sqrt(2), and each panel
counts four times in p, because the parts of C are sums of so many real products.

T. Ozaki, T. Ogita, S. Oishi & S. M. Rump, Numer. Algorithms 59, 2012.  H. Ootomo, K. Ozaki & R. Yokota, DGEMM on
integer matrix multiplication unit, Int. J. High Perform. Comput. Appl. 38(4), 2024.  Y. Uchino, K. Ozaki & T. Imamura,
Performance enhancement of the Ozaki scheme on integer matrix multiplication unit, Int. J. High Perform. Comput. Appl.
39(3), 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.emulation import Emulation
from pdgemm.local.blas.local_gemm import gemm_accumulate

_BFLOAT16 = np.uint32(0xFFFF0000)  # the bits of a float32 number that a bfloat16 number has


class SliceBuffers(NamedTuple):
    """Workspace of a product, as `Product` plans it.

    left, right : the slices of A and of B, as float32.   products : float32, a tile of C.
    sums : in `Emulation.sums`, a tile of C, of A or of B.   exponents : int32, for the rows of A and columns of B.
    """

    left: np.ndarray
    right: np.ndarray
    products: np.ndarray
    sums: np.ndarray
    exponents: np.ndarray


def finite(x: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether all elements are finite numbers of a type: neither infinity nor NaN.  Local."""
    with np.errstate(over="ignore"):
        return all(np.isfinite(x[slab].astype(dtype, copy=False)).all() for slab in slabs(*x.shape))


def multiply_slices(
    how: Emulation,
    alpha: Any,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    conjugated: tuple[bool, bool],
    buffers: SliceBuffers,
    between: Callable[[], object] | None = None,
) -> None:
    """Compute C := alpha op(A) op(B) + C from slices, where op is the conjugate or nothing.  Local.

    A : (m, k);  B : (k, n), of any types and finite, k <= `how.widest`;  C : (m, n) of `how.sums` or its complex type.
    between : a function to call after each product of BLAS, of up to 0.1 s.

    `how.products` products of BLAS in float32, four times as many if A and B are complex.  The module's docstring has
    the bounds.
    """
    (m, n), k = C.shape, A.shape[1]
    left, right = (_beside(x, how.slices, y) for x, y in ((A, buffers.left), (B.T, buffers.right)))
    of_rows, of_cols = buffers.exponents[:m], buffers.exponents[m : m + n]
    for a, turn_a in _parts(A, conjugated[0]):
        _cut(how, a, left, of_rows, buffers.sums, backwards=False)
        for b, turn_b in _parts(B.T, conjugated[1]):
            _cut(how, b, right, of_cols, buffers.sums, backwards=True)
            factor = alpha * turn_a * turn_b
            for rows, cols in _squares(m, n, len(buffers.products)):
                shape = C[rows, cols].shape
                total, product = (x[: shape[0] * shape[1]].reshape(shape) for x in (buffers.sums, buffers.products))
                _multiply_levels(how, left[rows], right[cols].T, k, total, product, between)
                if how.scaled:
                    exponents = of_rows[rows, None] + (of_cols[cols] - 2 * (how.bits - 1))
                    np.ldexp(total, exponents, out=total)
                for part, number in ((C.real, factor.real), (C.imag, factor.imag)):
                    if number:
                        part[rows, cols] += total if number == 1 else number * total


def _squares(m: int, n: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield m x n in tiles of at most `most` elements that are as square as possible: BLAS is slow on flat ones."""
    wide = min(n, max(isqrt(most), most // m))
    for cols in slabs(n, 1, wide):
        for rows in slabs(m, wide, most):
            yield rows, cols


def _beside(x: np.ndarray, slices: int, buffer: np.ndarray) -> np.ndarray:
    """Return a view of `buffer` for the slices of x, side by side, in the memory order of x."""
    rows, cols = x.shape
    order: Literal["C", "F"] = "F" if x.strides[0] < x.strides[1] else "C"
    return buffer[: slices * rows * cols].reshape((rows, slices * cols), order=order)


def _parts(x: np.ndarray, conjugated: bool) -> Iterator[tuple[np.ndarray, complex]]:
    """Yield the real part of a matrix with the factor 1, and the imaginary part with i, or -i if `conjugated`."""
    yield x.real, 1
    if x.dtype.kind == "c":
        yield x.imag, -1j if conjugated else 1j


def _cut(
    how: Emulation, x: np.ndarray, slices: np.ndarray, exponents: np.ndarray, workspace: np.ndarray, backwards: bool
) -> None:
    """Set `slices` to the slices of a real matrix, side by side, the last one first if `backwards`.

    exponents : are set to the exponents of the rows' scales.
    """
    width, shift = x.shape[1], 2.0**how.bits
    for slab in slabs(x.shape[0], width, len(workspace)):
        rest = workspace[: x[slab].size].reshape(x[slab].shape)
        np.copyto(rest, x[slab], casting="unsafe")
        if how.scaled:
            exponents[slab] = np.frexp(np.abs(rest).max(axis=1))[1]
            np.ldexp(rest, how.bits - 1 - exponents[slab, None], out=rest)
        for number in range(how.slices):
            at = (how.slices - 1 - number if backwards else number) * width
            digits = slices[slab, at : at + width]
            if how.scaled:
                np.rint(rest, out=digits)
            else:
                np.copyto(digits, rest)
                np.bitwise_and(digits.view(np.uint32), _BFLOAT16, out=digits.view(np.uint32))
            rest -= digits
            rest *= shift


def _multiply_levels(
    how: Emulation,
    left: np.ndarray,
    right: np.ndarray,
    k: int,
    total: np.ndarray,
    product: np.ndarray,
    between: Callable[[], object] | None,
) -> None:
    """Set total := sum_(i+j <= levels+1) 2^(-bits (i+j-2)) X_i Y_j, by Horner's rule from the smallest products on."""
    for level in range(how.levels, 0, -1):  # i + j = level + 1
        first, last = max(1, level + 1 - how.slices), min(level, how.slices)  # i, while j falls
        across = slice((first - 1) * k, last * k)
        below = slice((how.slices - level + first - 1) * k, (how.slices - level + last) * k)
        gemm_accumulate(1, left[:, across], right[below], 0, product)
        if level == how.levels:
            np.copyto(total, product)
        else:
            total *= 2.0**-how.bits
            total += product
        if between:
            between()
