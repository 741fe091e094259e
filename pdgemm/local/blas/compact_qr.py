"""The QR factorisation of a panel on one rank, in compact form: all its reflections are applied by products."""

from __future__ import annotations

import numpy as np

from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.device import empty as new
from pdgemm.local.arrays.elementwise import CONVERT, scale
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_lapack import keep_triangle, reflect, trsm
from pdgemm.local.blas.pivots import reflect_in_turn


def compact_qr(A: Array, R: Array, T: Array, order: np.ndarray | None = None) -> None:
    """Factor A = (I - V T V^H) R, or A[:, order] = (I - V T V^H) R, and overwrite A with V.  Local.

    A : (m, n), m >= n;  R, T : (n, n), overwritten with upper triangular matrices.  All are column-major, and all on
        the host or all on one device, where every step runs: the host neither waits nor copies.
    order : if not None, overwritten with an order of columns in which |r_jj| falls: see `pivots.reflect_in_turn`.
    V is unit lower trapezoidal, with its zeros and ones; R has LAPACK's signs: a real diagonal, perhaps negative.

    4 m n^2 flops.  Compact form: Schreiber & Van Loan, SIAM J. Sci. Stat. Comput. 10(1), 1989.  T from
    T^-1 + T^-H = V^H V: Joffrain, Low, Quintana-Orti & van de Geijn, ACM Trans. Math. Softw. 32(2), 2006.
    """
    n = A.shape[1]
    tau, top = reflect(A) if order is None else reflect_in_turn(A, order), A[:n]
    CONVERT(R, top)
    keep_triangle(R, lower=False)
    keep_triangle(top, unit=True)
    U = new(T.shape, T.dtype, "F", of(T))
    gemm_accumulate(1, A.T, A, 0, U, conjugate_a=A.dtype.kind == "c")
    np.multiply(U, tau[:, None], out=U)  # T = (I + D U)^-1 D, where D = diag(tau), and U is V^H V above the diagonal
    scale(0, T)
    keep_triangle(T, unit=True)
    trsm(U, T, lower=False, unit=True)
    np.multiply(T, tau, out=T)


def reflect_rows(V: Array, T: Array, X: Array, workspace: Array, adjoint: bool = False) -> None:
    """Compute X := (I - V T V^H) X, or with the `adjoint` of T.  Local.

    V : (m, k);  T : (k, k), column-major;  X : (m, n).   workspace : at least 2 k n elements.
    """
    k, n, is_complex = V.shape[1], X.shape[1], V.dtype.kind == "c"
    if not X.size:
        return
    W, TW = workspace[: 2 * k * n].reshape(2, n, k).transpose(0, 2, 1)
    gemm_accumulate(1, V.T, X, 0, W, conjugate_a=is_complex)
    gemm_accumulate(1, T.T if adjoint else T, W, 0, TW, conjugate_a=adjoint and is_complex)
    gemm_accumulate(-1, V, TW, 1, X)
