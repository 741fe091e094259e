"""Eigenvalues and singular values of band matrices, and of tridiagonal ones, on one rank."""

from __future__ import annotations

import numpy as np
import scipy  # whose packages, which take long to load, are loaded when they are first used

from pdgemm.errors import LinAlgError
from pdgemm.local.blas.local_lapack import call_lapack, fortran_letter


def eigenvalues_of_band(band: np.ndarray) -> np.ndarray:
    """Return all eigenvalues of a Hermitian band matrix in ascending order.  Local.

    band : (b + 1, n), b < n; row k has the elements a_{j+k,j}.

    6 n^2 b flops by LAPACK's sbtrd or hbtrd, and O(n^2) by sterf.
    """
    return eigenvalues_of_tridiagonal(*tridiagonal_of_band(band))


def eigenvalues_of_tridiagonal(d: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return all eigenvalues of a symmetric tridiagonal matrix in ascending order, in O(n^2) flops.  Local."""
    return scipy.linalg.eigvalsh_tridiagonal(d, e, check_finite=False, lapack_driver="sterf") if len(d) else d


def tridiagonal_of_band(band: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the diagonal and the subdiagonal of the tridiagonal matrix with a band's eigenvalues.  Local."""
    AB, n, real = np.array(band, order="F"), band.shape[1], np.finfo(band.dtype).dtype
    d, e = np.zeros(n, real), np.zeros(max(0, n - 1), real)
    if n:
        Q, work = np.zeros((1, 1), band.dtype, "F"), np.zeros(n, band.dtype)
        name = "hbtrd" if band.dtype.kind == "c" else "sbtrd"
        call_lapack(name, band.dtype, fortran_letter("N"), fortran_letter("L"), n, len(band) - 1, AB, d, e, Q, work)
    return d, e


def singular_values_of_band(band: np.ndarray) -> np.ndarray:
    """Return all singular values of an upper band matrix in descending order.  Local.

    band : (b + 1, n), b < n; row k has the elements a_{j,j+k}.

    6 n^2 b flops by LAPACK's gbbrd, and O(n^2) by bdsqr, whose small values have the relative errors of a bidiagonal
    matrix (Fernando & Parlett, Numer. Math. 67, 1994).  Raises LinAlgError where the iteration does not converge.
    """
    b, n, real = len(band) - 1, band.shape[1], np.finfo(band.dtype).dtype
    AB, d, e = np.zeros((b + 1, n), band.dtype, "F"), np.zeros(n, real), np.zeros(max(1, n - 1), real)
    for k in range(b + 1):
        AB[b - k, k:] = band[k, : n - k]
    if not n:
        return d
    none, work = np.zeros((1, 1), band.dtype, "F"), np.zeros(2 * n, band.dtype)
    more = [np.zeros(n, real)] if band.dtype.kind == "c" else []
    call_lapack("gbbrd", band.dtype, fortran_letter("N"), n, n, 0, 0, b, AB, d, e, none, none, none, work, *more)
    empty = np.zeros((1, 1), real, "F")
    if call_lapack("bdsqr", real, fortran_letter("U"), n, 0, 0, 0, d, e, empty, empty, empty, np.zeros(4 * n, real)):
        raise LinAlgError(f"the singular values of a band of {n} columns and {b + 1} diagonals do not converge")
    return d
