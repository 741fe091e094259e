"""QR factorisations of panels on one rank, by LAPACK: in compact form, with column pivoting, and the rank of R.

In compact form all reflections of a panel are applied by products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.local.arrays.device import Array, empty, of, to_host
from pdgemm.local.arrays.elementwise import CONVERT, scale
from pdgemm.local.blas.local_gemm import blas_number, gemm_accumulate
from pdgemm.local.blas.local_lapack import call_lapack, keep_triangle, reflect, trsm


def compact_qr(A: Array, R: Array, T: Array, order: np.ndarray | None = None) -> None:
    """Factor A = (I - V T V^H) R, or A[:, order] = (I - V T V^H) R, and overwrite A with V.  Local.

    A : (m, n), m >= n;  R, T : (n, n), overwritten with upper triangular matrices.  All are column-major, and all on
        the host or all on one device, where every step runs: the host neither waits nor copies.
    order : if not None, overwritten with an order of columns in which |r_jj| falls: see `reflect_in_turn`.
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


_BLOCK = 32  # columns that LAPACK may reflect at once with the workspace that is allocated


def reflect_in_turn(A: Array, order: np.ndarray) -> Array:
    """Overwrite A with R and reflectors of A[:, order], as `local_lapack.reflect`, and return tau.  Local.

    order : overwritten with the order of LAPACK's geqp3, which takes the column that is farthest from the space of
        those before it; as they are if A has NaN or infinite elements.
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


def pivots_of(X: np.ndarray) -> np.ndarray:
    """Return the column numbers of X in the order of LAPACK's geqp3; as they are if X has NaN or infinity.  Local.

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

    most : the number of columns of R.   order : of the triangle.

    With each column, laic1 updates estimates of the largest and the smallest singular value, and of their left
    singular vectors (Bischof, SIAM J. Matrix Anal. Appl. 11(2), 1990).  A diagonal alone may not show a small value.
    """

    def __init__(self, dtype: np.dtype, most: int, rcond: float) -> None:
        self.order, self._rcond, self._values = 0, np.finfo(dtype).dtype.type(rcond), [0.0, 0.0]
        self._vectors = np.zeros((2, most), dtype)

    def extended(self, columns: np.ndarray) -> int:
        """Add columns of R, as long as the condition allows it, and return the order.  Local."""
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
