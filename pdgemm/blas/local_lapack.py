"""Triangular solves and factorisations on one rank, in place, by direct calls of BLAS and LAPACK.

Routines take arrays of either memory order: a row-major array is the column-major array of its transpose, so sides and
triangles change places (`_seen`).  `info` is LAPACK's: 0, or the number of the pivot at which the routine stopped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from pdgemm.arrays.device import Array, of, to_host
from pdgemm.arrays.elementwise import set_elements
from pdgemm.blas import library as blas
from pdgemm.blas.local_gemm import leading, number

_BLOCK = 64  # columns that LAPACK may reflect at once, if it has room for them


def solve_triangular(
    A: Array, X: Array, *, side: str = "L", lower: bool = True, trans: str = "N", unit: bool = False,
    alpha: Any = 1,
) -> None:  # fmt: skip
    """Compute X := alpha op(A)^-1 X, or alpha X op(A)^-1 where side is "R".  Local; the other triangle is not read.

    A : (n, n);  X : (n, m) or (m, n), overwritten.  Both are row-major, or both column-major.
    """
    if not X.size:
        return
    uplo = "L" if lower else "U"
    if _seen(A if A.shape[0] > 1 else X)[1]:  # X op(A)^-1 is the transpose of op(A^T)^-1 X^T
        A, X, side, uplo = A.T, X.T, "L" if side == "R" else "R", "U" if lower else "L"
    how = side, uplo, trans, "U" if unit else "N"
    if device := of(X):
        device.solve_triangular(how, alpha, A, X)
        return
    letters = (_letter(x) for x in how)
    _call("trsm", X.dtype, *letters, *X.shape, number(X.dtype.char, alpha), A, X)


def cholesky(A: Array, lower: bool = True) -> int:
    """Overwrite A with its Cholesky factor, where A = L L^H or U^H U, and zeros; return info.  Local.

    Only the triangle of the factor is read.  A block of a device is factored on the host.
    """
    if not A.size:
        return 0
    if of(A):
        return int(_on_host(cholesky, A, lower))
    keep_triangle(A, lower)
    A, flipped = _seen(A)
    info = _call("potrf", A.dtype, _letter("L" if lower != flipped else "U"), A.shape[0], A)
    finite = np.isfinite(A.diagonal())  # not all libraries stop at NaN
    return info or (0 if finite.all() else int(finite.argmin()) + 1)


def keep_triangle(A: Array, lower: bool = True, unit: bool = False) -> None:
    """Set the other triangle of a square A to zero, and a unit diagonal to one.  Local."""
    if of(A):
        _on_host(keep_triangle, A, lower, unit)
        return
    np.copyto(A, 0, where=_other_triangle(len(A), lower))
    if unit:
        np.fill_diagonal(A, 1)


@lru_cache(maxsize=8)
def _other_triangle(n: int, lower: bool) -> np.ndarray:
    """Return which elements of a matrix lie on the other side of the diagonal."""
    return np.tri(n, k=-1, dtype=bool).T if lower else np.tri(n, k=-1, dtype=bool)


def _on_host(function: Callable[..., Any], A: Array, *arguments: Any) -> Any:
    """Call a function that overwrites a block of a device, on a copy of it."""
    block = to_host(A)
    result = function(block, *arguments)
    set_elements(A, block)
    return result


def lu(A: np.ndarray, pivots: np.ndarray) -> int:
    """Overwrite A, column-major (m, n), with its factors, P A = L U, and return info.  Local.

    pivots : min(m, n) numbers of type intc: row i was exchanged with row pivots[i], counted from 1.
    """
    return _call("getrf", A.dtype, A.shape[0], A.shape[1], A, pivots) if A.size else 0


def reflect(A: np.ndarray) -> np.ndarray:
    """Overwrite A, column-major (m, n), with R on and above its diagonal, and reflectors v below it.  Local.

    Returns tau: A = H_1 H_2 ... R, where H_k = I - tau_k v_k v_k^H, and v_k[k] = 1.
    """
    (m, n), tau = A.shape, np.empty(min(A.shape), A.dtype)
    work = np.empty(max(1, n * _BLOCK), A.dtype)
    if A.size:
        _call("geqrf", A.dtype, m, n, A, tau, work, work.size)
    return tau


def multiply_triangular(A: np.ndarray, X: np.ndarray, *, lower: bool = True, trans: str = "N") -> None:
    """Compute X := op(A) X, all column-major, where A (n, n) is triangular.  Local; the other triangle is not read."""
    if X.size:
        letters = (_letter(x) for x in ("L", "L" if lower else "U", trans, "N"))
        _call("trmm", X.dtype, *letters, *X.shape, number(X.dtype.char, 1), A, X)


def _seen(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the array as a column-major one, and whether it was transposed for that."""
    return (x.T, True) if leading(x)[0] == b"T" else (x, False)


def _letter(text: str) -> ctypes.c_char_p:
    return ctypes.c_char_p(text.encode())


def _call(name: str, dtype: np.dtype, *arguments: Any) -> int:
    """Call a routine of Fortran, whose arguments are all pointers, and return its info."""
    given, info, texts = list[Any](), ctypes.c_int(0), 0
    for x in arguments:
        if isinstance(x, np.ndarray):
            given.append(ctypes.c_void_p(x.ctypes.data))
            if x.ndim == 2:
                given.append(ctypes.byref(ctypes.c_int(leading(x)[1])))
        elif isinstance(x, int):
            given.append(ctypes.byref(ctypes.c_int(x)))
        else:
            texts += isinstance(x, ctypes.c_char_p)
            given.append(x if isinstance(x, ctypes.c_char_p) else ctypes.byref(x))
    lengths = [ctypes.c_size_t(1)] * texts  # Fortran's hidden lengths of texts, which C callers may leave out
    last = [] if name in blas.BLAS_ROUTINES else [ctypes.byref(info)]
    blas.routine(name, dtype.char)(*given, *last, *lengths)
    return info.value
