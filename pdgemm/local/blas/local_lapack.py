"""Triangular solves and factorisations on one rank, in place, by direct calls of BLAS and LAPACK, or by a device.

Routines take arrays of either memory order: a row-major array is the column-major array of its transpose, so sides and
triangles change places (`_seen`).  `info` is LAPACK's: 0, or the number of the pivot at which the routine stopped.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import scipy  # SciPy loads its packages, which takes long, when they are first used

from pdgemm.local.arrays.device import Array, empty, of
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas import library as blas
from pdgemm.local.blas.local_gemm import blas_number, gemm_accumulate, leading

_BLOCK = 64  # columns that LAPACK may reflect at once with the workspace that `reflect` allocates


def trsm(
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
    letters = (fortran_letter(x) for x in how)
    call_lapack("trsm", X.dtype, *letters, *X.shape, blas_number(X.dtype.char, alpha), A, X)


def potrf(A: Array, lower: bool = True) -> int:
    """Overwrite A with its Cholesky factor L or U (A = L L^H or U^H U), with zeros outside; return info.  Local.

    Only the triangle of the factor is read.  A device factors the block, and copies info and the diagonal of the factor
    to the host, which waits for this small copy.
    """
    if not A.size:
        return 0
    keep_triangle(A, lower)
    A, flipped = _seen(A)
    if device := of(A):
        info, diagonal = device.load_factorisations().potrf(A, lower != flipped)
    else:
        info = call_lapack("potrf", A.dtype, fortran_letter("L" if lower != flipped else "U"), A.shape[0], A)
        diagonal = A.diagonal()
    finite = np.isfinite(diagonal)  # not all libraries stop at NaN
    return info or (0 if finite.all() else int(finite.argmin()) + 1)


def keep_triangle(A: Array, lower: bool = True, unit: bool = False) -> None:
    """Set a triangle of a square A to zero: the upper one if `lower`, else the lower one.  Local.

    unit : the diagonal becomes one.
    """
    if device := of(A):
        if A.size:
            device.keep_triangle(A, lower, unit)
        return
    np.copyto(A, 0, where=_other_triangle(len(A), lower))
    if unit:
        np.fill_diagonal(A, 1)


@lru_cache(maxsize=8)
def _other_triangle(n: int, lower: bool) -> np.ndarray:
    """Return the mask of the elements outside the lower triangle of a matrix, or outside the upper triangle."""
    return np.tri(n, k=-1, dtype=bool).T if lower else np.tri(n, k=-1, dtype=bool)


def getrf(A: Array, pivots: np.ndarray) -> int:
    """Overwrite A, column-major (m, n), with its factors, P A = L U, and return info.  Local.

    pivots : min(m, n) numbers of type intc: row i was exchanged with row pivots[i], counted from 1.
    A device factors the panel, and copies info and the pivots to the host, which waits for this small copy.
    """
    if not A.size:
        return 0
    if device := of(A):
        return device.load_factorisations().getrf(A, pivots)
    return call_lapack("getrf", A.dtype, A.shape[0], A.shape[1], A, pivots)


def solve_factored(
    F: np.ndarray, X: np.ndarray, pivots: np.ndarray | None, trans: str = "N", lower: bool = True
) -> None:
    """Compute X := op(A)^-1 X, where F has the factors of A that `getrf` or `potrf` computed.  Local, on the host.

    F, X : column-major; for Cholesky both may be row-major.   pivots : of LU, from 0 on; None for Cholesky.
    trans : of LU.   lower : F has the Cholesky factor L, not U.
    """
    if not X.size:
        return
    if pivots is not None:
        call_lapack("getrs", X.dtype, fortran_letter(trans), *X.shape, F, pivots.astype(np.intc) + 1, X)
        return
    trsm(F, X, lower=lower, trans="N" if lower else "C")
    trsm(F, X, lower=lower, trans="C" if lower else "N")


def reciprocal_condition_of(F: np.ndarray, norm: float, lower: bool | None = None) -> float:
    """Return LAPACK's estimate of 1 / (|A|_1 |A^-1|_1), by gecon or pocon; 0 where it is NaN.  Local, on the host.

    F : the factors of A: of `getrf`, or of `potrf` with `lower`, in any order.   norm : |A|_1.
    Hager, SIAM J. Sci. Stat. Comput. 5, 1984; Higham, ACM Trans. Math. Softw. 14(4), 1988.
    """
    F, flipped = _seen(F)
    estimate: Any = scipy.linalg.get_lapack_funcs("gecon" if lower is None else "pocon", (F,))
    how = {"norm": "I" if flipped else "1"} if lower is None else {"uplo": "L" if lower != flipped else "U"}
    return max(0.0, float(estimate(F, norm, **how)[0]))


def reflect(A: Array) -> Array:
    """Overwrite A, column-major (m, n), with R on and above its diagonal, and reflectors v below it.  Local.

    Returns tau, on the host or on the device of A: A = H_1 H_2 ... R, where H_k = I - tau_k v_k v_k^H, and v_k[k] = 1.
    """
    m, n = A.shape
    if (device := of(A)) and A.size:
        return device.load_factorisations().geqrf(A)
    tau, work = empty((min(m, n),), A.dtype, device=device), np.empty(max(1, n * _BLOCK), A.dtype)
    if A.size:
        call_lapack("geqrf", A.dtype, m, n, A, tau, work, work.size)
    return tau


def reduce_to_tridiagonal(A: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return d, e and tau of A = Q T Q^H; read the lower triangle of A, and overwrite it with reflectors.  Local.

    A : Hermitian, column-major (n, n), n >= 1, on the host.  T is real, with the diagonal d and the subdiagonal e;  Q =
    H_1 H_2 ..., where H_k = I - tau_k v v^H, and v has 1 in row k + 1 and then the elements of column k below it.
    """
    n, real, name = len(A), np.finfo(A.dtype).dtype, "hetrd" if A.dtype.kind == "c" else "sytrd"
    d, e, tau = np.empty(n, real), np.empty(n - 1, real), np.empty(n - 1, A.dtype)
    work = np.empty(_BLOCK * n, A.dtype)
    call_lapack(name, A.dtype, fortran_letter("L"), n, A, d, e, tau, work, work.size)
    return d, e, tau


def multiply_triangular(A: Array, X: Array, *, lower: bool = True, trans: str = "N") -> None:
    """Compute X := op(A) X, all column-major, where A (n, n) is triangular, with zeros in the other triangle.  Local.

    A device multiplies a copy of X by all of A.
    """
    if (device := of(X)) and X.size:
        Y = device.empty(X.shape, X.dtype, "F")
        CONVERT(Y, X)
        gemm_accumulate(1, A if trans == "N" else A.T, Y, 0, X, conjugate_a=trans == "C" and A.dtype.kind == "c")
    elif X.size:
        letters = (fortran_letter(x) for x in ("L", "L" if lower else "U", trans, "N"))
        call_lapack("trmm", X.dtype, *letters, *X.shape, blas_number(X.dtype.char, 1), A, X)


def subtract_her2k(V: np.ndarray, W: np.ndarray, A: np.ndarray) -> None:
    """Compute A := A - V W^H - W V^H, where A is Hermitian, and its lower triangle is read and written.  Local.

    V, W : (n, k) and A : (n, n), column-major, of the same type, on the host.
    """
    if A.size and V.size:
        char, letters = A.dtype.char, map(fortran_letter, "LN")
        minus, one = blas_number(char, -1), blas_number(char.lower(), 1)
        call_lapack("her2k" if A.dtype.kind == "c" else "syr2k", A.dtype, *letters, *V.shape, minus, V, W, one, A)


def _seen(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the array as a column-major array, and whether it was transposed for that."""
    return (x.T, True) if leading(x)[0] == b"T" else (x, False)


def fortran_letter(text: str) -> ctypes.c_char_p:
    return ctypes.c_char_p(text.encode())


def call_lapack(name: str, dtype: np.dtype, *arguments: Any) -> int:
    """Call a Fortran routine, whose arguments are all pointers, and return its info."""
    pointers, info, texts = list[Any](), ctypes.c_int(0), 0
    for x in arguments:
        if isinstance(x, np.ndarray):
            pointers.append(ctypes.c_void_p(x.ctypes.data))
            if x.ndim == 2:
                pointers.append(ctypes.byref(ctypes.c_int(leading(x)[1])))
        elif isinstance(x, int):
            pointers.append(ctypes.byref(ctypes.c_int(x)))
        else:
            texts += isinstance(x, ctypes.c_char_p)
            pointers.append(x if isinstance(x, ctypes.c_char_p) else ctypes.byref(x))
    lengths = [ctypes.c_size_t(1)] * texts  # hidden Fortran arguments: lengths of texts, which C callers may omit
    last = [] if name in blas.BLAS_ROUTINES or name == "laic1" else [ctypes.byref(info)]
    blas.routine(name, dtype.char)(*pointers, *last, *lengths)
    return info.value
