"""Factorisations and solves: p?potrf, p?potrs, p?posv."""

from __future__ import annotations

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.algorithms.store import store
from pdgemm.arrays.elementwise import CONVERT
from pdgemm.linalg.cholesky import cho_solve, cholesky_factor
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.scalapack.arguments import Desc, Dtypes, Sub, at_least_0, check_letter, checked, letter, of_type
from pdgemm.schedules.staircase import Staircase

__all__ = [
    "pcposv", "pcpotrf", "pcpotrs", "pdposv", "pdpotrf", "pdpotrs", "psposv", "pspotrf", "pspotrs", "pzposv",
    "pzpotrf", "pzpotrs",
]  # fmt: skip


def _potrf(routine: str, dtypes: Dtypes, uplo: str, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc) -> int:
    """Factor sub(A) = L L^H, or U^H U, and return INFO.  Collective over the context.

    uplo  : "U" or "L", the triangle of sub(A), n x n, that is read, and overwritten with U or L.
    a, ia, ja, desca : as in p?gemm; the other triangle is neither read nor written.

    Returns 0, or the order of the first leading minor of sub(A) that is not positive definite; sub(A) is then as it
    was.  The factor is made in a copy of sub(A), in square blocks where these share the work more evenly.

    Cost, algorithm and error are those of `pdgemm.linalg.cholesky`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """

    def check() -> None:
        check_letter(routine, 1, "uplo", uplo, "UL")
        at_least_0(routine, n=(2, n))

    sub_a = Sub("a", 3, a, ia, ja, desca, n, n)
    (A,), _ = checked(routine, dtypes, check, [sub_a], same=f", {letter(uplo)}, n={n}")
    return _factored(A, letter(uplo) == "L")[1] if n else 0


def _potrs(
    routine: str, dtypes: Dtypes, uplo: str, n: int, nrhs: int,
    a: np.ndarray, ia: int, ja: int, desca: Desc, b: np.ndarray, ib: int, jb: int, descb: Desc,
) -> int:  # fmt: skip
    """Solve A X = sub(B), where sub(A) has the factor of A that p?potrf left there.  Collective over the context.

    uplo : "U" or "L", the triangle of sub(A), n x n, that holds the factor; the other one is not read.
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

    Arguments, the result and errors are those of p?potrs and p?potrf.  Where INFO is not 0, sub(A) and sub(B) are as
    they were.
    """
    A, B = _positive(
        routine, dtypes, uplo, n, nrhs, Sub("a", 4, a, ia, ja, desca, n, n), Sub("b", 8, b, ib, jb, descb, n, nrhs), 2
    )
    if not n:
        return 0
    lower = letter(uplo) == "L"
    factor, info = _factored(A, lower)
    if nrhs and not info:
        cho_solve(factor, B, lower=lower, overwrite_b=True)
    return info


def _positive(
    routine: str, dtypes: Dtypes, uplo: str, n: int, nrhs: int, sub_a: Sub, sub_b: Sub, updated: int
) -> list[DistMatrix]:
    """Return sub(A) and sub(B), checked.   updated : 2 where both are written to."""

    def check() -> None:
        check_letter(routine, 1, "uplo", uplo, "UL")
        at_least_0(routine, n=(2, n), nrhs=(3, nrhs))

    same = f", {letter(uplo)}, n={n}, nrhs={nrhs}"
    return checked(routine, dtypes, check, [sub_a, sub_b], updated=updated, same=same)[0]


def _factored(A: DistMatrix, lower: bool) -> tuple[DistMatrix, int]:
    """Return the Cholesky factor of A, in a layout of its own, and INFO; the triangle of A is overwritten with it."""
    factor, info = cholesky_factor(A, lower)
    if not info:
        triangle = Staircase.of("L" if lower else "U", *A.indices())
        store(A.stored, redistribute(factor, like=A).stored, CONVERT, within=triangle)
    return factor, info


pspotrf, pdpotrf, pcpotrf, pzpotrf = (of_type(f"p{x}potrf", _potrf) for x in "sdcz")
pspotrs, pdpotrs, pcpotrs, pzpotrs = (of_type(f"p{x}potrs", _potrs) for x in "sdcz")
psposv, pdposv, pcposv, pzposv = (of_type(f"p{x}posv", _posv) for x in "sdcz")
