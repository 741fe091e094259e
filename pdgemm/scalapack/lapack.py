"""Factorisations and solves: p?potrf, p?potrs, p?posv; p?getrf, p?getrs, p?gesv."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.algorithms.store import store
from pdgemm.arrays.elementwise import CONVERT
from pdgemm.factors.cholesky import cho_solve, cholesky_factor
from pdgemm.factors.lu import LU, lu_factor, lu_solve
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.scalapack.arguments import Argument, Desc, Dtypes, Sub, at_least_0, check_letter, checked, letter, of_type
from pdgemm.scalapack.descriptors import Descriptor, illegal
from pdgemm.schedules.staircase import Staircase

__all__ = [
    "pcgesv", "pcgetrf", "pcgetrs", "pcposv", "pcpotrf", "pcpotrs", "pdgesv", "pdgetrf", "pdgetrs", "pdposv",
    "pdpotrf", "pdpotrs", "psgesv", "psgetrf", "psgetrs", "psposv", "pspotrf", "pspotrs", "pzgesv", "pzgetrf",
    "pzgetrs", "pzposv", "pzpotrf", "pzpotrs",
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


@dataclass(eq=False)
class _Pivots:
    """The argument ipiv, which lies as the rows of A do: entry l is the row with which local row l was exchanged.

    sub : sub(A), whose first rows, as many as it has pivots, are meant.   written : the pivots are a result.
    """

    number: int
    array: Any
    sub: Sub
    written: bool

    def check(self, routine: str, dtypes: Dtypes) -> None:
        array = self.array
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind != "i":
            found = f"{array.ndim}-D of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise illegal(routine, self.number, 0, f"ipiv must be a 1-D array of integers, got {found}")
        if len(array) < self._here[0].stop:
            text = f"ipiv has {len(array)} entries, LOCr(M_A) + MB_A are needed"
            raise illegal(routine, self.number, 0, text)
        if self.written and not array.flags.writeable:
            raise illegal(routine, self.number, 0, "ipiv is read-only")

    @property
    def count(self) -> int:
        return min(self.sub.rows, self.sub.cols)

    @cached_property
    def _here(self) -> tuple[slice, np.ndarray]:
        """Entries of this process, and the rows of sub(A) to which they belong, from 0."""
        desc, grid, start = Descriptor.of(self.sub.entries), self.sub.grid, self.sub.i - 1
        assert desc is not None and grid is not None
        if not self.count:  # sub(A) may then begin anywhere
            return slice(0, 0), np.zeros(0, int)
        rows, span, row = desc.layout.rows, (start, start + self.count), grid.coords[0]
        return rows.local_window(*span, row), rows.window(*span).indices(row)

    def put(self, pivots: np.ndarray) -> None:
        """Write this process's part of pivots that are rows of sub(A), from 0."""
        entries, rows = self._here
        self.array[entries] = pivots[rows] + self.sub.i

    def gathered(self, routine: str) -> np.ndarray:
        """Return all pivots, as rows of sub(A) from 0.  Collective over the context."""
        entries, rows = self._here
        found = np.zeros(self.count, np.int64)
        found[rows] = self.array[entries]
        self.sub.matrix.grid.comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        found -= self.sub.i
        if wrong := np.flatnonzero((found < 0) | (found >= self.count)).tolist():  # seen by all processes
            at = wrong[0]
            text = f"ipiv says that row {self.sub.i + at} was exchanged with row {self.sub.i + found[at]}"
            raise illegal(routine, self.number, 0, text)
        return found


def _getrf(
    routine: str, dtypes: Dtypes, m: int, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc, ipiv: np.ndarray
) -> int:
    """Factor sub(A) = P L U with partial pivoting, and return INFO.  Collective over the context.

    m, n : sub(A) is m x n, and overwritten with U, and below its diagonal L, whose diagonal of ones is not stored.
    a, ia, ja, desca : as in p?gemm.
    ipiv : local array of integers, of LOCr(M_A) + MB_A entries; entry l is the row of A, from 1, with which local row l
           was exchanged, for rows ia to ia + min(m, n) - 1.

    Returns 0, or the number of the first element on the diagonal of U that is zero; the factors are complete.
    They are made in a copy of sub(A), in square blocks where these share the work more evenly.

    Cost, algorithm and error are those of `pdgemm.linalg.lu_factor`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    sub_a = Sub("a", 3, a, ia, ja, desca, m, n)
    pivots, check = _Pivots(7, ipiv, sub_a, written=True), partial(at_least_0, routine, m=(1, m), n=(2, n))
    (A,), _ = checked(routine, dtypes, check, [sub_a, pivots], same=f", m={m}, n={n}")
    return _eliminated(A, pivots).zero_pivot if m and n else 0


def _getrs(
    routine: str, dtypes: Dtypes, trans: str, n: int, nrhs: int, a: np.ndarray, ia: int, ja: int, desca: Desc,
    ipiv: np.ndarray, b: np.ndarray, ib: int, jb: int, descb: Desc,
) -> int:  # fmt: skip
    """Solve op(A) X = sub(B), where sub(A) and ipiv have the factors that p?getrf left there.  Collective.

    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H; A is n x n.
    nrhs  : sub(B) is n x nrhs, and overwritten with X.
    Returns INFO, 0; X has infinities where U has a zero on its diagonal.  Other arguments and errors are those of
    p?getrf; an ipiv that names no row of sub(A) is illegal.  Cost and error are those of `pdgemm.linalg.lu_solve`.
    """

    def check() -> None:
        check_letter(routine, 1, "trans", trans, "NTC")
        at_least_0(routine, n=(2, n), nrhs=(3, nrhs))

    sub_a = Sub("a", 4, a, ia, ja, desca, n, n)
    pivots = _Pivots(8, ipiv, sub_a, written=False)
    arguments: list[Argument] = [sub_a, pivots, Sub("b", 9, b, ib, jb, descb, n, nrhs)]
    same = f", {letter(trans)}, n={n}, nrhs={nrhs}"
    (A, B), _ = checked(routine, dtypes, check, arguments, same=same)
    if n and nrhs:
        op: Any = letter(trans)
        unreported: Any = None
        lu_solve(LU(A, pivots.gathered(routine), 0, unreported), B, trans=op, overwrite_b=True)
    return 0


def _gesv(
    routine: str, dtypes: Dtypes, n: int, nrhs: int, a: np.ndarray, ia: int, ja: int, desca: Desc,
    ipiv: np.ndarray, b: np.ndarray, ib: int, jb: int, descb: Desc,
) -> int:  # fmt: skip
    """Factor sub(A) as p?getrf does, solve sub(A) X = sub(B) as p?getrs does, and return INFO.  Collective.

    Arguments, the result and errors are those of p?getrs and p?getrf.  Where INFO is not 0, sub(B) is as it was.
    """
    sub_a = Sub("a", 3, a, ia, ja, desca, n, n)
    pivots = _Pivots(7, ipiv, sub_a, written=True)
    arguments: list[Argument] = [sub_a, pivots, Sub("b", 8, b, ib, jb, descb, n, nrhs)]
    check = partial(at_least_0, routine, n=(1, n), nrhs=(2, nrhs))
    (A, B), _ = checked(routine, dtypes, check, arguments, updated=2, same=f", n={n}, nrhs={nrhs}")
    if not n:
        return 0
    factors = _eliminated(A, pivots)
    if nrhs and not factors.zero_pivot:
        lu_solve(factors, B, overwrite_b=True)
    return factors.zero_pivot


def _eliminated(A: DistMatrix, pivots: _Pivots) -> LU:
    """Return the LU factors of A, in a layout of their own; A and ipiv are overwritten with them."""
    factors = lu_factor(A)
    redistribute(factors.LU, A)
    pivots.put(factors.pivots)
    return factors


psgetrf, pdgetrf, pcgetrf, pzgetrf = (of_type(f"p{x}getrf", _getrf) for x in "sdcz")
psgetrs, pdgetrs, pcgetrs, pzgetrs = (of_type(f"p{x}getrs", _getrs) for x in "sdcz")
psgesv, pdgesv, pcgesv, pzgesv = (of_type(f"p{x}gesv", _gesv) for x in "sdcz")
pspotrf, pdpotrf, pcpotrf, pzpotrf = (of_type(f"p{x}potrf", _potrf) for x in "sdcz")
pspotrs, pdpotrs, pcpotrs, pzpotrs = (of_type(f"p{x}potrs", _potrs) for x in "sdcz")
psposv, pdposv, pcposv, pzposv = (of_type(f"p{x}posv", _posv) for x in "sdcz")
