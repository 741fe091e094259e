"""cuSOLVER without a GPU: the routines of `cupy.cuda.cusolver` that `pdgemm.devices.cusolver` calls, by LAPACK.

They have the signatures of CuPy 14.2, and reject arguments that the manual forbids.  If the manual does not define a
result, it is the worst possible: potrf does not stop at NaN, and getrf returns invalid rows for NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.linalg.blas import get_blas_funcs
from scipy.linalg.lapack import get_lapack_funcs

if TYPE_CHECKING:
    from fake_cupy import Simulated

_INVALID = 3  # CUSOLVER_STATUS_INVALID_VALUE
_INTS = np.dtype(np.int32)


def solve_triangular(how: tuple[str, str, str, str], alpha: Any, A: np.ndarray, X: np.ndarray) -> None:
    """X := alpha op(A)^-1 X, or alpha X op(A)^-1, like BLAS's trsm."""
    side, uplo, trans, diagonal = how
    trsm, options = get_blas_funcs("trsm", dtype=X.dtype), {"side": side == "R", "lower": uplo == "L"}
    if X.size:
        X[...] = trsm(alpha, A, X, trans_a="NTC".index(trans), diag=diagonal == "U", **options)


def lapack_potrf(A: np.ndarray, lower: bool) -> int:
    """Replace one triangle of A by its Cholesky factor and leave the other; return info."""
    factor, info = get_lapack_funcs("potrf", dtype=A.dtype)(A, lower=lower, clean=False)
    A[...] = factor
    return int(info)


def lapack_getrf(A: np.ndarray) -> tuple[int, np.ndarray]:
    """Replace A by L and U; return info, and the pivots, counted from 1."""
    factors, pivots, info = get_lapack_funcs("getrf", dtype=A.dtype)(A)
    A[...] = factors
    return int(info), pivots + 1


def lapack_geqrf(A: np.ndarray) -> np.ndarray:
    """Replace A by R and reflectors; return tau."""
    A[...], tau, _, info = get_lapack_funcs("geqrf", dtype=A.dtype)(A)
    assert info == 0
    return tau


class CUSOLVERError(RuntimeError):
    def __init__(self, status: object) -> None:
        super().__init__(f"cuSOLVER: {status}")
        self.status = status


class Cusolver:
    """The module `cupy.cuda.cusolver`."""

    CUSOLVERError = CUSOLVERError

    def __init__(self, simulated: Simulated) -> None:
        self._simulated, self.streams = simulated, dict[int, int | None]()

    def create(self) -> int:
        self.streams[handle := 1001 + len(self.streams)] = None
        return handle

    def setStream(self, handle: int, stream: int) -> None:
        assert handle in self.streams, "not a handle of cuSOLVER"
        self.streams[handle] = stream

    def _potrf_words(self, dtype: str, handle: int, uplo: int, n: int, A: int, lda: int) -> int:
        self._checked(dtype, handle, n, n, A, lda)
        assert uplo in (0, 1)
        return 8 * n + 3

    def _potrf(
        self, dtype: str, handle: int, uplo: int, n: int, A: int, lda: int, work: int, lwork: int, devInfo: int
    ) -> None:
        words = self._potrf_words(dtype, handle, uplo, n, A, lda)
        self._uses(work, lwork, words, dtype)
        info, x = self._ints(devInfo, 1), self._checked(dtype, handle, n, n, A, lda)
        info[0] = lapack_potrf(x, uplo == 0)
        if info[0] and np.isnan(x[info[0] - 1, info[0] - 1]):
            np.fill_diagonal(x[info[0] - 1 :, info[0] - 1 :], np.nan)
            info[0] = 0
        self._called("potrf")

    def _getrf_words(self, dtype: str, handle: int, m: int, n: int, A: int, lda: int) -> int:
        self._checked(dtype, handle, m, n, A, lda)
        return 2 * n + 7

    def _getrf(
        self, dtype: str, handle: int, m: int, n: int, A: int, lda: int, work: int, devIpiv: int, devInfo: int
    ) -> None:
        words = self._getrf_words(dtype, handle, m, n, A, lda)
        self._uses(work, words, words, dtype)
        info, pivots = self._ints(devInfo, 1), self._ints(devIpiv, min(m, n))
        x = self._checked(dtype, handle, m, n, A, lda)
        finite = np.isfinite(x).all()
        info[0], pivots[...] = lapack_getrf(x)
        if not finite:
            pivots[::2], pivots[1::2] = 0, 1 << 30
        self._called("getrf")

    def _geqrf_words(self, dtype: str, handle: int, m: int, n: int, A: int, lda: int) -> int:
        self._checked(dtype, handle, m, n, A, lda)
        return 32 * n + 1

    def _geqrf(
        self, dtype: str, handle: int, m: int, n: int, A: int, lda: int, tau: int, work: int, lwork: int, devInfo: int
    ) -> None:
        words = self._geqrf_words(dtype, handle, m, n, A, lda)
        self._uses(work, lwork, words, dtype)
        numbers, x = self._vector(tau, min(m, n), np.dtype(dtype)), self._checked(dtype, handle, m, n, A, lda)
        numbers[...] = lapack_geqrf(x)
        self._ints(devInfo, 1)[0] = 0
        self._called("geqrf")

    # ---------------------------------------------------------------- checks of arguments
    def _checked(self, dtype: str, handle: int, m: int, n: int, A: int, lda: int) -> np.ndarray:
        """Check the handle and the sizes; return the matrix."""
        assert all(type(x) is int for x in (handle, m, n, A, lda)), "CuPy takes addresses and sizes"
        assert handle in self.streams, "not a handle of cuSOLVER"
        assert self.streams[handle] == self._simulated.streams[-1].ptr, "the handle has another stream than the caller"
        kind = np.dtype(dtype)
        assert A % kind.itemsize == 0
        if min(m, n) < 0 or not max(1, m) <= lda < 1 << 31:
            raise CUSOLVERError(_INVALID)
        memory = (ctypes.c_byte * (((n - 1) * lda + m) * kind.itemsize)).from_address(A)
        return np.ndarray((m, n), kind, memory, strides=(kind.itemsize, lda * kind.itemsize))

    def _uses(self, work: int, passed: int, words: int, dtype: str) -> None:
        """Overwrite the whole workspace, as the routine may."""
        assert passed >= words, "the workspace is too small"
        self._vector(work, words, np.dtype(dtype)).view(np.uint8).fill(0xFF)

    def _ints(self, ptr: int, number: int) -> np.ndarray:
        return self._vector(ptr, number, _INTS)

    def _vector(self, ptr: int, number: int, dtype: np.dtype) -> np.ndarray:
        """Return the elements of a vector in memory that is in use."""
        assert type(ptr) is int and ptr % dtype.itemsize == 0
        assert self._simulated.pool.holds(ptr, number * dtype.itemsize), "the array is too small"
        return np.ndarray((number,), dtype, (ctypes.c_byte * (number * dtype.itemsize)).from_address(ptr))

    def _called(self, name: str) -> None:
        self._simulated.gpu.calls.append(name)


_ROUTINES: dict[str, tuple[Callable[..., Any], Callable[..., int]]] = {
    "potrf": (Cusolver._potrf, Cusolver._potrf_words),
    "getrf": (Cusolver._getrf, Cusolver._getrf_words),
    "geqrf": (Cusolver._geqrf, Cusolver._geqrf_words),
}
for name, (routine, words) in _ROUTINES.items():
    for letter, dtype in zip("sdcz", ("f4", "f8", "c8", "c16")):
        setattr(Cusolver, letter + name, partialmethod(routine, dtype))
        setattr(Cusolver, f"{letter}{name}_bufferSize", partialmethod(words, dtype))
