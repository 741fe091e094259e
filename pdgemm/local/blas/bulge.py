"""The chase of bulges out of a Hermitian band, on one rank: reflections of blocks in band storage, by LAPACK."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.local.blas.library import routine


class Bulges:
    """A Hermitian matrix with b diagonals below its main one, and space for the bulges of a chase.

    Task (s, t) of sweep s reflects the rows and columns from s + 1 + t b on, b of them.  In task 0 the reflection
    clears column s below its subdiagonal element; in each further task it clears the first column of the bulge that the
    task before has made.  After sweep s, column s is that of a tridiagonal matrix.

    A task depends on the task before it in its sweep, and on task t + 1 of the sweep before.

    AB : (3 b + 1, n), column-major; a_ij is in row i - j + b of column j.  Elements above the diagonal are those of
        blocks on the diagonal alone.

    12 b^2 flops a task.  Lang, SIAM J. Sci. Comput. 14(6), 1993.
    """

    def __init__(self, band: np.ndarray) -> None:
        """band : (b + 1, n), b >= 1; row k has the elements a_{j+k,j}."""
        b, n = len(band) - 1, band.shape[1]
        self.b, self.n, self.AB = b, n, np.zeros((3 * b + 1, n), band.dtype, "F")
        for k in range(b + 1):
            self.AB[b - k, k:] = band[k, : n - k].conj()
            self.AB[b + k, : n - k] = band[k, : n - k]
        self._flat, self._work = self.AB.reshape(-1, order="F"), np.empty(b, band.dtype)
        char, self._size = band.dtype.char, band.itemsize
        self._larfg, self._larf = _called("larfg", char, 5), _called("larf", char, 9)
        self._base, self._workspace = self._flat.ctypes.data, self._work.ctypes.data
        self._m, self._one = ctypes.c_int(), ctypes.c_int(1)
        sizes = {name: ctypes.c_int(value) for name, value in (("b", b), ("b - 1", b - 1), ("ld", 3 * b))}
        self._tau = np.zeros(2, band.dtype)  # tau, and its conjugate
        self._kept = sizes, ctypes.c_char(b"L"), ctypes.c_char(b"R")
        self._left, self._right = (ctypes.addressof(x) for x in self._kept[1:])
        self._b, self._b1, self._ld = (ctypes.addressof(sizes[name]) for name in ("b", "b - 1", "ld"))

    def tasks(self, s: int) -> int:
        """Return the number of tasks of a sweep."""
        return max(0, -(-(self.n - 1 - s) // self.b))

    def task(self, s: int, t: int, before: np.ndarray, v: np.ndarray) -> None:
        """Carry out a task.

        before : (b + 1,), the reflection of the task before: v, and then tau; not read in task 0.
        v : (b + 1,), overwritten with the reflection of this task, I - tau v v^H; zeros behind v.
        """
        b, ld, size = self.b, 3 * self.b, self._size
        start = s + 1 + t * b
        m = self._m.value = min(b, self.n - start)
        at_m, one = ctypes.addressof(self._m), ctypes.addressof(self._one)
        v_at, tau = v.ctypes.data, self._tau
        tau_at, tau_conj = tau.ctypes.data, tau.ctypes.data + size
        column = s if t == 0 else start - b
        x = column * ld + start + b  # of the column that is cleared
        x_at = self._base + x * size
        if t:
            before_at = before.ctypes.data
            self._larf(
                self._right, at_m, self._b, before_at, one, before_at + b * size, x_at, self._ld, self._workspace
            )
        self._larfg(at_m, x_at, x_at + size, one, tau_at)
        v[1:m], v[m:b] = self._flat[x + 1 : x + m], 0
        v[0], v[b] = 1, tau[0]
        self._flat[x + 1 : x + m] = 0
        tau[1] = tau[0].conjugate()
        if t and b > 1:
            self._larf(self._left, at_m, self._b1, v_at, one, tau_conj, x_at + ld * size, self._ld, self._workspace)
        D = start * ld + start + b
        last, row = D + (m - 1) * ld, D + m - 1  # the last column and row of the block on the diagonal
        self._flat[last : last + m - 1] = self._flat[row : row + (m - 1) * ld : ld].conj()
        D_at = self._base + D * size
        self._larf(self._left, at_m, at_m, v_at, one, tau_conj, D_at, self._ld, self._workspace)
        self._larf(self._right, at_m, at_m, v_at, one, tau_at, D_at, self._ld, self._workspace)

    def tridiagonal(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the diagonal and the subdiagonal, after all sweeps; both are real."""
        d, e = self.AB[self.b].real.copy(), self.AB[self.b + 1, : self.n - 1].real.copy()
        return d, e


def _called(name: str, char: str, arguments: int) -> Callable[..., None]:
    """Return a routine of LAPACK that takes addresses as integers, without their conversion in each call."""
    called: Any = routine(name, char)
    address = ctypes.cast(called, ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(address or 0)
