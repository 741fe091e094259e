"""Band matrices on one rank: their eigenvalues and singular values, and the chase of bulges out of a Hermitian band.

`Bulges` applies reflections to blocks in band storage, by LAPACK.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy  # SciPy loads its packages, which takes long, when they are first used

from pdgemm.errors import LinAlgError
from pdgemm.local.blas.library import routine
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

    6 n^2 b flops by LAPACK's gbbrd, and O(n^2) by bdsqr, which computes all singular values of the bidiagonal matrix
    to high relative accuracy (Fernando & Parlett, Numer. Math. 67, 1994).  Raises LinAlgError where the iteration
    does not converge.
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


class Bulges:
    """A Hermitian matrix with b diagonals below its main one, and space for the bulges of a chase.

    Task t of sweep s, (s, t), reflects b rows and columns, the first of which is s + 1 + t b.  In task 0 the reflection
    clears column s below its subdiagonal element; in each further task it clears the first column of the bulge that the
    previous task has made.  After sweep s, column s is tridiagonal.

    A task depends on the task before it in its sweep, and on task t + 1 of the sweep before.

    AB : (3 b + 1, n), column-major; a_ij is in row i - j + b of column j.  Above the diagonal, only the elements of
        blocks on the diagonal are stored.

    12 b^2 flops a task.  Lang, SIAM J. Sci. Comput. 14(6), 1993.
    """

    def __init__(self, band: np.ndarray) -> None:
        """band : (b + 1, n), b >= 1; row k has the elements a_{j+k,j}."""
        b, n = len(band) - 1, band.shape[1]
        self.b, self.n, self.AB = b, n, np.zeros((3 * b + 1, n), band.dtype, "F")
        for k in range(b + 1):
            self.AB[b - k, k:] = band[k, : n - k].conj()
            self.AB[b + k, : n - k] = band[k, : n - k]
        self._flat, char = self.AB.reshape(-1, order="F"), band.dtype.char
        self._larfg, self._larf = _called("larfg", char, 5), _called("larf", char, 9)
        self._integers, self._sides = np.array([*range(b + 1), 3 * b], np.int32), np.frombuffer(b"LR", np.uint8)
        self._work, self._conjugate_of_tau = np.empty(b, band.dtype), np.empty(1, band.dtype)

    def carry_out(self, s: int, tasks: range, before: np.ndarray, reflections: np.ndarray) -> None:
        """Carry out consecutive tasks of a sweep.

        before : (b + 1,), the reflection of the task before these: v, and then tau; not read in task 0.
        reflections : (number of tasks, b + 1), overwritten: each row has v, filled up with zeros, and then tau of the
            reflection I - tau v v^H.
        """
        b, ld, flat, size = self.b, 3 * self.b, self._flat, self._flat.itemsize
        larfg, larf, real, conjugate = self._larfg, self._larf, flat.dtype.kind == "f", self._conjugate_of_tau
        base, integers, left, work, at_conjugate, v_at, before_at = (
            x.ctypes.data for x in (flat, self._integers, self._sides, self._work, conjugate, reflections, before)
        )
        one, at_b, at_ld, right = integers + 4, integers + 4 * b, integers + 4 * (b + 1), left + 1
        for t, v in zip(tasks, reflections):
            start = s + 1 + t * b
            m = min(b, self.n - start)
            at_m, tau_at = integers + 4 * m, v_at + b * size
            x = (start - b if t else s) * ld + start + b  # offset of the column that is cleared
            x_at = base + x * size
            if t:
                larf(right, at_m, at_b, before_at, one, before_at + b * size, x_at, at_ld, work)
            larfg(at_m, x_at, x_at + size, one, tau_at)
            v[:m], v[m:b], v[0] = flat[x : x + m], 0, 1
            flat[x + 1 : x + m] = 0
            if not real:
                conjugate[0] = v[b].conjugate()
            tau_conj = tau_at if real else at_conjugate
            if t and b > 1:
                larf(left, at_m, at_b - 4, v_at, one, tau_conj, x_at + ld * size, at_ld, work)
            D = start * ld + start + b
            last, end = D + (m - 1) * ld, D + m - 1  # offsets of the last column and row of the block on the diagonal
            mirrored = flat[end : end + (m - 1) * ld : ld]
            flat[last : last + m - 1] = mirrored if real else mirrored.conj()
            D_at = base + D * size
            larf(left, at_m, at_m, v_at, one, tau_conj, D_at, at_ld, work)
            larf(right, at_m, at_m, v_at, one, tau_at, D_at, at_ld, work)
            before_at, v_at = v_at, v_at + (b + 1) * size

    def tridiagonal(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the diagonal and the subdiagonal, after all sweeps; both are real."""
        d, e = self.AB[self.b].real.copy(), self.AB[self.b + 1, : self.n - 1].real.copy()
        return d, e


def _called(name: str, char: str, arguments: int) -> Callable[..., None]:
    """Return a routine of LAPACK that takes addresses as integers, so that a call converts no arguments."""
    called: Any = routine(name, char)
    address = ctypes.cast(called, ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(address or 0)
