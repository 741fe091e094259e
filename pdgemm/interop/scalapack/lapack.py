"""Factorisations by elimination, solves and inverses.

p?potrf, p?potrs, p?potri, p?posv; p?getrf, p?getrs, p?getri, p?gesv.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.instrument.step_reports import Steps
from pdgemm.interop.scalapack.arguments import (
    Argument,
    Desc,
    Dtypes,
    Sub,
    at_least_0,
    check_letter,
    checked,
    letter,
    of_type,
)
from pdgemm.interop.scalapack.tied_vectors import Pivots
from pdgemm.linalg.factors.cholesky import cho_solve, cholesky_factor
from pdgemm.linalg.factors.lu import LU, lu_factor, lu_solve
from pdgemm.linalg.factors.rank_k import herk
from pdgemm.linalg.factors.solve import inverse_by_lu
from pdgemm.linalg.factors.triangular import inv_triangular
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.staircase import Staircase
from pdgemm.transport.store import store

__all__ = [
    "pcgesv", "pcgetrf", "pcgetri", "pcgetrs", "pcposv", "pcpotrf", "pcpotri", "pcpotrs", "pdgesv", "pdgetrf",
    "pdgetri", "pdgetrs", "pdposv", "pdpotrf", "pdpotri", "pdpotrs", "psgesv", "psgetrf", "psgetri", "psgetrs",
    "psposv", "pspotrf", "pspotri", "pspotrs", "pzgesv", "pzgetrf", "pzgetri", "pzgetrs", "pzposv", "pzpotrf",
    "pzpotri", "pzpotrs",
]  # fmt: skip


def _potrf(routine: str, dtypes: Dtypes, uplo: str, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc) -> int:
    """Factor sub(A) = L L^H, or U^H U, and return INFO.  Collective over the context.

    uplo  : "U" or "L", the triangle of sub(A), n x n, that is read, and overwritten with U or L.
    a, ia, ja, desca : as in p?gemm; the other triangle is neither read nor written.

    Returns 0, or the order of the first leading minor of sub(A) that is not positive definite; then sub(A) is
    unchanged.  The factor is computed in a copy of sub(A), in square blocks where these share the work more evenly.

    Cost, algorithm and error are those of `pdgemm.linalg.cholesky`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """

    def check() -> None:
        check_letter(routine, 1, "uplo", uplo, "UL")
        at_least_0(routine, n=(2, n))

    sub_a = Sub("a", 3, a, ia, ja, desca, n, n)
    (A,), _ = checked(routine, dtypes, check, [sub_a], same=f", {letter(uplo)}, n={n}")
    return store_cholesky(A, letter(uplo) == "L")[1] if n else 0


def _potrs(
    routine: str, dtypes: Dtypes, uplo: str, n: int, nrhs: int,
    a: np.ndarray, ia: int, ja: int, desca: Desc, b: np.ndarray, ib: int, jb: int, descb: Desc,
) -> int:  # fmt: skip
    """Solve A X = sub(B), where sub(A) holds the factor of A that p?potrf stored.  Collective over the context.

    uplo : "U" or "L", the triangle of sub(A), n x n, that holds the factor; the other triangle is not read.
    nrhs : sub(B) is n x nrhs, and overwritten with X.
    Returns INFO, 0.  Other arguments and errors are those of p?potrf; cost and error are those of
    `pdgemm.linalg.cho_solve`.
    """
    A, B = _positive(
        routine, dtypes, uplo, n, nrhs, Sub("a", 4, a, ia, ja, desca, n, n), Sub("b", 8, b, ib, jb, descb, n, nrhs), 1
    )
    if n and nrhs:
        cho_solve(A, B, lower=letter(uplo) == "L", overwrite_b=True)
    return 0


def _posv(
    routine: str, dtypes: Dtypes, uplo: str, n: int, nrhs: int,
    a: np.ndarray, ia: int, ja: int, desca: Desc, b: np.ndarray, ib: int, jb: int, descb: Desc,
) -> int:  # fmt: skip
    """Factor sub(A) as p?potrf does, solve sub(A) X = sub(B) as p?potrs does, and return INFO.  Collective.

    Arguments, the result and errors are those of p?potrs and p?potrf.  Where INFO is not 0, sub(A) and sub(B) are
    unchanged.
    """
    A, B = _positive(
        routine, dtypes, uplo, n, nrhs, Sub("a", 4, a, ia, ja, desca, n, n), Sub("b", 8, b, ib, jb, descb, n, nrhs), 2
    )
    if not n:
        return 0
    lower = letter(uplo) == "L"
    factor, info = store_cholesky(A, lower)
    if nrhs and not info:
        cho_solve(factor, B, lower=lower, overwrite_b=True)
    return info


def _potri(routine: str, dtypes: Dtypes, uplo: str, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc) -> int:
    """Overwrite the factor of A in sub(A), which p?potrf stored, with that triangle of A^-1; return INFO.  Collective.

    Returns 0, or the number of the first element on the diagonal of the factor that is zero; then sub(A) is unchanged.
    Other arguments and errors are those of p?potrf.  Cost: 4 n^3/(3P) flops on P processes, in an inverse of the factor
    and half a product.
    """

    def check() -> None:
        check_letter(routine, 1, "uplo", uplo, "UL")
        at_least_0(routine, n=(2, n))

    sub_a = Sub("a", 3, a, ia, ja, desca, n, n)
    (A,), _ = checked(routine, dtypes, check, [sub_a], same=f", {letter(uplo)}, n={n}")
    if not n:
        return 0
    zero, lower = _first_zero(A), letter(uplo) == "L"
    if not zero:  # (L L^H)^-1 = L^-H L^-1, and (U^H U)^-1 = U^-1 U^-H
        Y = inv_triangular(A, lower=lower)
        herk(1.0, Y, 0.0, A, uplo="L" if lower else "U", trans="C" if lower else "N")
    return zero


def _first_zero(A: DistMatrix) -> int:
    """Return the number, from 1, of the first element on the diagonal that is zero, or 0.  Collective."""
    zeros = np.flatnonzero(A.diagonal() == 0)
    return int(zeros[0]) + 1 if zeros.size else 0


def _positive(
    routine: str, dtypes: Dtypes, uplo: str, n: int, nrhs: int, sub_a: Sub, sub_b: Sub, updated: int
) -> list[DistMatrix]:
    """Return sub(A) and sub(B), checked.   updated : 1 where sub(B) is written to, 2 where both are."""

    def check() -> None:
        check_letter(routine, 1, "uplo", uplo, "UL")
        at_least_0(routine, n=(2, n), nrhs=(3, nrhs))

    same = f", {letter(uplo)}, n={n}, nrhs={nrhs}"
    return checked(routine, dtypes, check, [sub_a, sub_b], updated=updated, same=same)[0]


def store_cholesky(A: DistMatrix, lower: bool) -> tuple[DistMatrix, int]:
    """Return the Cholesky factor of A, in a layout of its own, and INFO; if INFO is 0, store the factor in A."""
    factor, info = cholesky_factor(A, lower)
    if not info:
        triangle = Staircase.of("L" if lower else "U", *A.indices())
        store(A.stored, redistribute(factor, like=A).stored, CONVERT, within=triangle)
    return factor, info


def _getrf(
    routine: str, dtypes: Dtypes, m: int, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc, ipiv: np.ndarray
) -> int:
    """Factor sub(A) = P L U with partial pivoting, and return INFO.  Collective over the context.

    m, n : sub(A) is m x n, and overwritten with U and, below the diagonal, L; the unit diagonal of L is not stored.
    a, ia, ja, desca : as in p?gemm.
    ipiv : local array of integers, of LOCr(M_A) + MB_A entries; entry l is the row of A, from 1, with which local row l
           was exchanged, for rows ia to ia + min(m, n) - 1.

    Returns 0, or the number of the first element on the diagonal of U that is zero; the factors are complete.
    The factors are computed in a copy of sub(A), in square blocks where these share the work more evenly.

    Cost, algorithm and error are those of `pdgemm.linalg.lu_factor`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    sub_a = Sub("a", 3, a, ia, ja, desca, m, n)
    pivots, check = Pivots(7, ipiv, sub_a, written=True), partial(at_least_0, routine, m=(1, m), n=(2, n))
    (A,), _ = checked(routine, dtypes, check, [sub_a, pivots], same=f", m={m}, n={n}")
    return _eliminated(A, pivots).zero_pivot if m and n else 0


def _getrs(
    routine: str, dtypes: Dtypes, trans: str, n: int, nrhs: int, a: np.ndarray, ia: int, ja: int, desca: Desc,
    ipiv: np.ndarray, b: np.ndarray, ib: int, jb: int, descb: Desc,
) -> int:  # fmt: skip
    """Solve op(A) X = sub(B), where sub(A) and ipiv hold the factors that p?getrf stored.  Collective.

    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H; A is n x n.
    nrhs  : sub(B) is n x nrhs, and overwritten with X.
    Returns INFO, 0; X has infinities where U has a zero on its diagonal.  Other arguments and errors are those of
    p?getrf; an ipiv that names no row of sub(A) is illegal.  Cost and error are those of `pdgemm.linalg.lu_solve`.
    """

    def check() -> None:
        check_letter(routine, 1, "trans", trans, "NTC")
        at_least_0(routine, n=(2, n), nrhs=(3, nrhs))

    sub_a = Sub("a", 4, a, ia, ja, desca, n, n)
    pivots = Pivots(8, ipiv, sub_a, written=False)
    arguments: list[Argument] = [sub_a, pivots, Sub("b", 9, b, ib, jb, descb, n, nrhs)]
    same = f", {letter(trans)}, n={n}, nrhs={nrhs}"
    (A, B), _ = checked(routine, dtypes, check, arguments, same=same)
    if n and nrhs:
        op: Any = letter(trans)
        lu_solve(LU(A, pivots.gathered(routine), 0), B, trans=op, overwrite_b=True)
    return 0


def _gesv(
    routine: str, dtypes: Dtypes, n: int, nrhs: int, a: np.ndarray, ia: int, ja: int, desca: Desc,
    ipiv: np.ndarray, b: np.ndarray, ib: int, jb: int, descb: Desc,
) -> int:  # fmt: skip
    """Factor sub(A) as p?getrf does, solve sub(A) X = sub(B) as p?getrs does, and return INFO.  Collective.

    Arguments, the result and errors are those of p?getrs and p?getrf.  Where INFO is not 0, sub(B) is unchanged.
    """
    sub_a = Sub("a", 3, a, ia, ja, desca, n, n)
    pivots = Pivots(7, ipiv, sub_a, written=True)
    arguments: list[Argument] = [sub_a, pivots, Sub("b", 8, b, ib, jb, descb, n, nrhs)]
    check = partial(at_least_0, routine, n=(1, n), nrhs=(2, nrhs))
    (A, B), _ = checked(routine, dtypes, check, arguments, updated=2, same=f", n={n}, nrhs={nrhs}")
    if not n:
        return 0
    factors = _eliminated(A, pivots)
    if nrhs and not factors.zero_pivot:
        lu_solve(factors, B, overwrite_b=True)
    return factors.zero_pivot


def _getri(routine: str, dtypes: Dtypes, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc, ipiv: np.ndarray) -> int:
    """Overwrite the factors of A in sub(A) and ipiv, which p?getrf stored, with A^-1; return INFO.  Collective.

    n : sub(A) is n x n.
    Returns 0, or the number of the first element on the diagonal of U that is zero; then sub(A) is unchanged.
    Other arguments and errors are those of p?getrs.  Cost: 4 n^3/(3P) flops on P processes, in an inverse of L and a
    triangular solve; error: that of `pdgemm.linalg.inv`.
    """
    sub_a = Sub("a", 2, a, ia, ja, desca, n, n)
    pivots, check = Pivots(6, ipiv, sub_a, written=False), partial(at_least_0, routine, n=(1, n))
    (A,), _ = checked(routine, dtypes, check, [sub_a, pivots], same=f", n={n}")
    if not n:
        return 0
    factors = LU(A, pivots.gathered(routine), _first_zero(A))
    if not factors.zero_pivot:
        redistribute(inverse_by_lu(Steps(), factors), A)
    return factors.zero_pivot


def _eliminated(A: DistMatrix, pivots: Pivots) -> LU:
    """Return the LU factors of A, in a layout of their own; store the factors in A, and the pivots in ipiv."""
    factors = lu_factor(A)
    redistribute(factors.LU, A)
    pivots.put(factors.pivots)
    return factors


psgetrf, pdgetrf, pcgetrf, pzgetrf = (of_type(f"p{x}getrf", _getrf) for x in "sdcz")
psgetrs, pdgetrs, pcgetrs, pzgetrs = (of_type(f"p{x}getrs", _getrs) for x in "sdcz")
psgetri, pdgetri, pcgetri, pzgetri = (of_type(f"p{x}getri", _getri) for x in "sdcz")
psgesv, pdgesv, pcgesv, pzgesv = (of_type(f"p{x}gesv", _gesv) for x in "sdcz")
pspotrf, pdpotrf, pcpotrf, pzpotrf = (of_type(f"p{x}potrf", _potrf) for x in "sdcz")
pspotrs, pdpotrs, pcpotrs, pzpotrs = (of_type(f"p{x}potrs", _potrs) for x in "sdcz")
pspotri, pdpotri, pcpotri, pzpotri = (of_type(f"p{x}potri", _potri) for x in "sdcz")
psposv, pdposv, pcposv, pzposv = (of_type(f"p{x}posv", _posv) for x in "sdcz")
