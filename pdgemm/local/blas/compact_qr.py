"""The QR factorisation of a panel on one rank, in compact form: all its reflections are applied by products."""

from __future__ import annotations

import numpy as np

from pdgemm.local.arrays.device import Array, of
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_lapack import on_host, reflect, trsm


def compact_qr(A: Array, R: np.ndarray, T: Array) -> None:
    """Factor A = (I - V T V^H) R, and overwrite A with V.  Local.

    A : (m, n), m >= n;  R, T : (n, n), overwritten with upper triangular matrices.  All are column-major; A and T may
        be on a device, and are factored on the host.
    V is unit lower trapezoidal, with its zeros and ones; R has LAPACK's signs: a real diagonal, perhaps negative.

    4 m n^2 flops.  Compact form: Schreiber & Van Loan, SIAM J. Sci. Stat. Comput. 10(1), 1989.  T from
    T^-1 + T^-H = V^H V: Joffrain, Low, Quintana-Orti & van de Geijn, ACM Trans. Math. Softw. 32(2), 2006.
    """
    if of(A):
        on_host(lambda A, T: compact_qr(A, R, T), A, T)
        return
    n = A.shape[1]
    tau, top = reflect(A), A[:n]
    R[:] = np.triu(top)
    top[:] = np.tril(top, -1)
    np.fill_diagonal(top, 1)
    U = np.empty_like(T)
    gemm_accumulate(1, A.T, A, 0, U, conjugate_a=A.dtype.kind == "c")
    U *= tau[:, None]  # T = (I + D U)^-1 D, where D = diag(tau), and U is V^H V above the diagonal
    T[:] = np.diag(tau)
    trsm(U, T, lower=False, unit=True)
