"""Gram matrices, products and quotients with small matrices, and QR factors on one rank, of arrays with many rows.

The host works on blocks of rows that fit in cache, row-major and contiguous, and passes their transposes to BLAS:
SciPy's interface takes column-major arrays, and copies all other arrays.  A device works on all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy  # whose packages, which take long to load, are loaded when they are first used

from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.device import empty as new
from pdgemm.local.arrays.elementwise import CONVERT, scale
from pdgemm.local.blas.local_gemm import gemm_accumulate, prepare_square
from pdgemm.local.blas.local_lapack import trsm

_IN_CACHE = 1 << 17  # elements of a block of rows
_LEAST_ROWS = 256  # least rows of a block: BLAS is slower on fewer rows


def blocks(rows: int, cols: int, times: int = 0) -> Iterator[slice]:
    """Yield the rows in blocks that fit the cache, each with at least `times` times as many rows as columns."""
    step = max(_LEAST_ROWS, _IN_CACHE // max(1, cols), times * cols)
    count = max(1, rows // step)  # nearly equal blocks, none of them short
    for at in range(count if rows else 0):
        yield slice(rows * at // count, rows * (at + 1) // count)


def row_blocks(X: Array) -> Iterator[slice]:
    """Yield the rows of an array in blocks that fit the cache; all rows where it is on a device."""
    return blocks(*X.shape) if of(X) is None else iter([slice(0, len(X))])


def new_gram(X: Array) -> Array:
    """Return a matrix of zeros, (k, k) and column-major, in the memory that X (m, k) is in.  Local."""
    G = new((X.shape[1], X.shape[1]), X.dtype, "F", of(X))
    scale(0, G)
    return G


def add_gram(X: Array, G: Array) -> None:
    """Compute G := conj(X^H X) + G, its upper triangle.  Local.   X : (m, k), row-major;  G : (k, k), column-major.

    A device computes both triangles.
    """
    if of(X):
        gemm_accumulate(1, X.T, X, 1, G, conjugate_b=X.dtype.kind == "c")
        return
    prepare_square(1, X.T, G, lower=False)(1)


def divide(X: Array, R: np.ndarray) -> None:
    """Compute X := X R^-1.  Local; m k^2 flops.

    X : (m, k), row-major, overwritten.   R : (k, k), row-major, upper triangular, on the host.
    Error, row by row: |X^ R - X| <= gamma_k |X^||R| (Higham 2002, 8.5).
    """
    trsm(row_major_like(R, X), X, side="R", lower=False)


def multiply_in_place(X: Array, W: np.ndarray) -> None:
    """Compute X := X W.  Local; 2 m k^2 flops.   X : (m, k), row-major, overwritten.   W : (k, k), on the host."""
    W = row_major_like(np.ascontiguousarray(W), X)
    for rows in blocks(*X.shape):  # also on a device, whose memory may not hold a copy of all rows
        Y = new(X[rows].shape, X.dtype, "C", of(X))
        CONVERT(Y, X[rows])
        gemm_accumulate(1, Y, W, 0, X[rows])


def row_major_like(x: np.ndarray, X: Array) -> Array:
    """Return a row-major array of the host, or its copy on the device of X.  Local."""
    return x if (device := of(X)) is None else device.to_device(x, "C")


def orthonormal_factors(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Q and R of X = Q R by Householder's reflections.  Local; 4mk^2 - 4k^3/3 flops.

    X : (m, k), column-major, overwritten: Q may be in its memory.   Q : (m, h), R : (h, k), h = min(m, k).
    """
    if not X.size:
        h = min(X.shape)
        return np.zeros((X.shape[0], h), X.dtype), np.zeros((h, X.shape[1]), X.dtype)
    Q, R = scipy.linalg.qr(X, overwrite_a=True, mode="economic", check_finite=False)
    return Q, R


def phases(x: np.ndarray) -> np.ndarray:
    """Return x / |x|, and 1 where x is 0, in the type of x.  Local.

    The real and the imaginary part are divided separately: NumPy's quotient of a complex number by a subnormal number
    is infinite.
    """
    size = np.abs(x)
    there = size != 0
    lengths, quotients = np.where(there, size, 1), np.ones_like(x)
    np.divide(x.real, lengths, out=quotients.real, where=there)
    if x.dtype.kind == "c":
        np.divide(x.imag, lengths, out=quotients.imag, where=there)
    return quotients
