"""QR factorisations on one rank, compact or with column pivoting; Gram matrices, X W and X R^-1 of many rows.

For arrays with many rows the host works on blocks of rows that fit in cache, row-major and contiguous, and passes their
transposes to BLAS, which takes column-major arrays.  A device works on all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy  # SciPy loads its packages, which takes long, when they are first used

from pdgemm.local.arrays.device import Array, empty, of, to_host
from pdgemm.local.arrays.elementwise import CONVERT, scale
from pdgemm.local.blas.local_gemm import blas_number, gemm_accumulate, prepare_square
from pdgemm.local.blas.local_lapack import call_lapack, keep_triangle, reflect, trsm

_IN_CACHE = 1 << 17  # elements of a block of rows
_BLOCK = 32  # columns that LAPACK may reflect at once with the workspace that is allocated
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
    """Return a matrix of zeros, (k, k) and column-major, on the host or the device of X (m, k).  Local."""
    G = empty((X.shape[1], X.shape[1]), X.dtype, "F", of(X))
    scale(0, G)
    return G


def add_gram(X: Array, G: Array) -> None:
    """Compute the upper triangle of G := conj(X^H X) + G.  Local.   X : (m, k), row-major;  G : (k, k), column-major.

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
        Y = empty(X[rows].shape, X.dtype, "C", of(X))
        CONVERT(Y, X[rows])
        gemm_accumulate(1, Y, W, 0, X[rows])


def row_major_like(x: np.ndarray, X: Array) -> Array:
    """Return x, a row-major array on the host; or, if X is on a device, a copy of x there.  Local."""
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


def compact_qr(A: Array, R: Array, T: Array, order: np.ndarray | None = None) -> None:
    """Factor A = (I - V T V^H) R, or A[:, order] = (I - V T V^H) R, and overwrite A with V.  Local.

    A : (m, n), m >= n;  R, T : (n, n), overwritten with upper triangular matrices.  All are column-major, and all on
        the host or all on one device, where every step runs: the host neither waits nor copies.
    order : if not None, overwritten with an order of columns in which |r_jj| descends: see `reflect_in_turn`.
    V is unit lower trapezoidal, with its zeros and ones; R has LAPACK's signs: a real diagonal, perhaps negative.

    4 m n^2 flops.  Compact form: Schreiber & Van Loan, SIAM J. Sci. Stat. Comput. 10(1), 1989.  T from
    T^-1 + T^-H = V^H V: Joffrain, Low, Quintana-Orti & van de Geijn, ACM Trans. Math. Softw. 32(2), 2006.
    """
    n = A.shape[1]
    tau, top = reflect(A) if order is None else reflect_in_turn(A, order), A[:n]
    CONVERT(R, top)
    keep_triangle(R, lower=False)
    keep_triangle(top, unit=True)
    U = empty(T.shape, T.dtype, "F", of(T))
    gemm_accumulate(1, A.T, A, 0, U, conjugate_a=A.dtype.kind == "c")
    np.multiply(U, tau[:, None], out=U)  # T = (I + D U)^-1 D, where D = diag(tau), and U is V^H V above the diagonal
    scale(0, T)
    keep_triangle(T, unit=True)
    trsm(U, T, lower=False, unit=True)
    np.multiply(T, tau, out=T)


def reflect_in_turn(A: Array, order: np.ndarray) -> Array:
    """Overwrite A with R and reflectors of A[:, order], as `local_lapack.reflect`, and return tau.  Local.

    order : overwritten with the order of LAPACK's geqp3, which takes the column that is farthest from the span of the
        previous ones; 0, 1, 2, ... if A has NaN or infinite elements.
    A device has no such routine: R of its geqrf is ordered on the host, and A[:, order] factored again.
    """
    order[:] = range(A.shape[1])
    if (device := of(A)) is None:
        return _geqp3(A, order) if np.isfinite(A).all() else reflect(A)
    if not A.size:
        return reflect(A)
    X = empty(A.shape, A.dtype, "F", device)
    CONVERT(X, A)
    reflect(X)
    R = np.asfortranarray(to_host(X[: X.shape[1]]))
    keep_triangle(R, lower=False)
    order[:] = pivots_of(R)
    CONVERT(X, A)
    for here, there in enumerate(order.tolist()):
        CONVERT(A[:, here : here + 1], X[:, there : there + 1])
    return reflect(A)


def reflect_rows(V: Array, T: Array, X: Array, workspace: Array) -> None:
    """Compute X := (I - V T V^H) X.  Local.

    V : (m, k);  T : (k, k), column-major;  X : (m, n).   workspace : at least 2 k n elements.
    """
    k, n = V.shape[1], X.shape[1]
    if not X.size:
        return
    W, TW = workspace[: 2 * k * n].reshape(2, n, k).transpose(0, 2, 1)
    gemm_accumulate(1, V.T, X, 0, W, conjugate_a=V.dtype.kind == "c")
    gemm_accumulate(1, T, W, 0, TW)
    gemm_accumulate(-1, V, TW, 1, X)


def pivots_of(X: np.ndarray) -> np.ndarray:
    """Return the column numbers of X in the order of LAPACK's geqp3; 0, 1, ... if X has NaN or infinity.  Local.

    X : (m, n), column-major, overwritten.
    """
    order = np.arange(X.shape[1])
    if np.isfinite(X).all():
        _geqp3(X, order)
    return order


def _geqp3(A: np.ndarray, order: np.ndarray) -> np.ndarray:
    (m, n), dtype = A.shape, A.dtype
    tau, work, pivots = np.zeros(min(m, n), dtype), np.empty(2 * n + (n + 1) * _BLOCK, dtype), np.zeros(n, np.intc)
    if A.size:
        real = [np.empty(2 * n, np.finfo(dtype).dtype)] if dtype.kind == "c" else []
        call_lapack("geqp3", dtype, m, n, A, pivots, tau, work, work.size, *real)
        order[:] = pivots - 1
    return tau


class LeadingTriangle:
    """The largest leading triangle of R whose condition is at most 1/rcond, as estimated in LAPACK's gelsy.

    most : the number of columns of R.   order : the order of the triangle.

    With each column, laic1 updates estimates of the largest and the smallest singular value, and of their left
    singular vectors (Bischof, SIAM J. Matrix Anal. Appl. 11(2), 1990).  The diagonal of R may have no small element
    although a singular value is small.
    """

    def __init__(self, dtype: np.dtype, most: int, rcond: float) -> None:
        self.order, self._rcond, self._values = 0, np.finfo(dtype).dtype.type(rcond), [0.0, 0.0]
        self._vectors = np.zeros((2, most), dtype)

    def extended(self, columns: np.ndarray) -> int:
        """Add the next columns of R, until the condition is too large, and return the order of the triangle.  Local."""
        for column in columns.T:
            k, x = self.order, np.ascontiguousarray(column)
            grown = [_with_column(job, self._vectors[job - 1], self._values[job - 1], x, k) for job in (1, 2)]
            (large, *_), (small, *_) = grown
            if small == 0 or large * self._rcond > small:
                break
            for vector, (_, s, c) in zip(self._vectors, grown):
                vector[:k] *= s
                vector[k] = c
            self._values, self.order = [large, small], k + 1
        return self.order


def _with_column(job: int, vector: np.ndarray, value: float, x: np.ndarray, k: int) -> tuple[Any, Any, Any]:
    """Return an extreme singular value of [[R, x[:k]], [0, x[k]]], and s and c: its vector is (s vector[:k], c)."""
    if k == 0:
        return abs(x[0]), x.dtype.type(0), x.dtype.type(1)
    dtype = x.dtype
    result, s, c = np.zeros(1, np.finfo(dtype).dtype), np.zeros(1, dtype), np.zeros(1, dtype)
    real = blas_number(result.dtype.char, value)
    call_lapack("laic1", dtype, job, k, vector, real, x, blas_number(dtype.char, x[k]), result, s, c)
    return result[0], s[0], c[0]
