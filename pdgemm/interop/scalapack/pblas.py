"""Products, solves and copies: checked on all processes, then passed to `gemm`, `linalg` or `redistribute`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.errors import ArgumentError, GridError
from pdgemm.gemm import pdgemm as gemm
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.interop.scalapack.arguments import (
    Argument,
    Desc,
    Dtypes,
    Scalar,
    Sub,
    at_least_0,
    check_letter,
    check_written,
    checked,
    letter,
    of_type,
)
from pdgemm.interop.scalapack.blacs import grid_of_context, meeting
from pdgemm.interop.scalapack.descriptors import CTXT_, illegal
from pdgemm.linalg.factors.rank_k import herk, syrk
from pdgemm.linalg.factors.triangular import solve_triangular, trmm
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import agree
from pdgemm.support.text import ranks_text

__all__ = [
    "pcgemm", "pcgemr2d", "pcherk", "pcsyrk", "pctranc", "pctranu", "pctrmm", "pctrsm", "pdgemm", "pdgemr2d",
    "pdsyrk", "pdtran", "pdtrmm", "pdtrsm", "pigemr2d", "psgemm", "psgemr2d", "pssyrk", "pstran", "pstrmm",
    "pstrsm", "pzgemm", "pzgemr2d", "pzherk", "pzsyrk", "pztranc", "pztranu", "pztrmm", "pztrsm",
]  # fmt: skip


def _gemm(routine: str, dtypes: Dtypes, transa: str, transb: str, m: int, n: int, k: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Desc,
          b: np.ndarray, ib: int, jb: int, descb: Desc, beta: complex,
          c: np.ndarray, ic: int, jc: int, descc: Desc) -> None:  # fmt: skip
    """Compute sub(C) := alpha op(sub(A)) op(sub(B)) + beta sub(C).  Collective over the context.

    transa, transb : "N", "T" or "C".
    m, n, k : op(sub(A)) is m x k, op(sub(B)) k x n, sub(C) m x n.
    a, b, c : local arrays, column-major with the leading dimension of the descriptor, or one-dimensional.
              The elements of sub(C) are updated in place, and not read where beta is 0; no other elements are written.
    ia, ja  : first row and column of sub(A) in A, from 1, without restrictions.  Likewise ib, jb, ic, jc.
    desca, descb, descc : descriptors, as returned by `descinit` or `descinit2`.  An empty submatrix (m, n or k = 0)
              may begin anywhere, and its matrix may be empty.

    Cost, algorithm and error are those of `pdgemm.pdgemm`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    ops: list[Any] = [letter(transa), letter(transb)]
    sub_a = Sub("a", 7, a, ia, ja, desca, *((m, k) if ops[0] == "N" else (k, m)))
    sub_b = Sub("b", 11, b, ib, jb, descb, *((k, n) if ops[1] == "N" else (n, k)))
    sub_c = Sub("c", 16, c, ic, jc, descc, m, n)

    def check() -> None:
        check_letter(routine, 1, "transa", transa, "NTC")
        check_letter(routine, 2, "transb", transb, "NTC")
        at_least_0(routine, m=(3, m), n=(4, n), k=(5, k))

    arguments: list[Argument] = [Scalar(6, alpha), sub_a, sub_b, Scalar(15, beta), sub_c]
    (A, B, C), (alpha, beta) = checked(routine, dtypes, check, arguments)
    gemm(alpha, A, B, beta, C, transa=ops[0], transb=ops[1])


def _tran(routine: str, dtypes: Dtypes, m: int, n: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Desc, beta: complex,
          c: np.ndarray, ic: int, jc: int, descc: Desc) -> None:  # fmt: skip
    """Compute sub(C) := beta sub(C) + alpha sub(A)^T, or ^H for p?tranc, m x n.  Collective over the context.

    Each element that moves to another process is sent once.  Arguments and errors are those of p?gemm.
    """
    sub_a, sub_c = Sub("a", 4, a, ia, ja, desca, n, m), Sub("c", 9, c, ic, jc, descc, m, n)
    check = partial(at_least_0, routine, m=(1, m), n=(2, n))
    arguments: list[Argument] = [Scalar(3, alpha), sub_a, Scalar(8, beta), sub_c]
    (A, C), (alpha, beta) = checked(routine, dtypes, check, arguments)
    redistribute(A.H if routine.endswith("C") else A.T, C, alpha=alpha, beta=beta)


def _syrk(routine: str, dtypes: Dtypes, uplo: str, trans: str, n: int, k: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Desc, beta: complex,
          c: np.ndarray, ic: int, jc: int, descc: Desc) -> None:  # fmt: skip
    """Compute a triangle of sub(C) := alpha op(sub(A)) op(sub(A))^T + beta sub(C), or ^H for p?herk.  Collective.

    uplo  : "U" or "L", the triangle of sub(C), n x n; the other triangle is neither read nor written.
    trans : "N" op(sub(A)) = sub(A), n x k; "T", or for p?herk "C", op(sub(A)) is the transpose, or the conjugate
            transpose, of sub(A), k x n.  Real types take "T" and "C".
    alpha, beta : real numbers for p?herk, which also makes the diagonal of sub(C) real.
    Other arguments and errors are those of p?gemm; cost and algorithm are those of `pdgemm.linalg.syrk` and `herk`.
    """
    hermitian, flipped = routine.endswith("HERK"), letter(trans) != "N"
    letters = "NC" if hermitian else "NT" if dtypes[0].kind == "c" else "NTC"
    sub_a = Sub("a", 6, a, ia, ja, desca, *((k, n) if flipped else (n, k)))
    sub_c = Sub("c", 11, c, ic, jc, descc, n, n)

    def check() -> None:
        check_letter(routine, 1, "uplo", uplo, "UL")
        check_letter(routine, 2, "trans", trans, letters)
        at_least_0(routine, n=(3, n), k=(4, k))

    arguments: list[Argument] = [Scalar(5, alpha, hermitian), sub_a, Scalar(10, beta, hermitian), sub_c]
    same = f", {letter(uplo)}, {letter(trans)}, n={n}, k={k}, alpha={alpha}, beta={beta}"
    (A, C), (alpha, beta) = checked(routine, dtypes, check, arguments, same=same)
    compute: Any = herk if hermitian else syrk
    if n:
        compute(alpha, A, beta, C, uplo=letter(uplo), trans=("C" if hermitian else "T") if flipped else "N")


def _trsm(routine: str, dtypes: Dtypes, side: str, uplo: str, transa: str, diag: str, m: int, n: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Desc, b: np.ndarray, ib: int, jb: int, descb: Desc,
          ) -> None:  # fmt: skip
    """Compute sub(B) := alpha op(sub(A))^-1 sub(B), or alpha sub(B) op(sub(A))^-1.  Collective over the context.

    side   : "L" op(sub(A)), m x m, is to the left of sub(B), m x n; "R" n x n, to the right.
    uplo   : "U" or "L", the triangle of sub(A) that is read.
    transa : "N", "T" or "C".
    diag   : "U" the diagonal is taken to be 1, and not read; "N" the diagonal is read.
    alpha  : where alpha is 0, sub(A) and sub(B) are not read.
    Other arguments and errors are those of p?gemm; cost and algorithm are those of `pdgemm.linalg.solve_triangular`.
    """
    _triangle(routine, dtypes, side, uplo, transa, diag, m, n, alpha, Sub("b", 12, b, ib, jb, descb, m, n),
              a, ia, ja, desca)  # fmt: skip


def _trmm(routine: str, dtypes: Dtypes, side: str, uplo: str, transa: str, diag: str, m: int, n: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Desc, b: np.ndarray, ib: int, jb: int, descb: Desc,
          ) -> None:  # fmt: skip
    """Compute sub(B) := alpha op(sub(A)) sub(B), or alpha sub(B) op(sub(A)), sub(A) triangular.  Collective.

    Arguments and errors are those of p?trsm; cost and algorithm are those of `pdgemm.linalg.trmm`.
    """
    _triangle(routine, dtypes, side, uplo, transa, diag, m, n, alpha, Sub("b", 12, b, ib, jb, descb, m, n),
              a, ia, ja, desca)  # fmt: skip


def _triangle(routine: str, dtypes: Dtypes, side: str, uplo: str, trans: str, diag: str, m: int, n: int, alpha: complex,
              sub_b: Sub, a: np.ndarray, ia: int, ja: int, desca: Desc) -> None:  # fmt: skip
    """Check the arguments of p?trmm or p?trsm, and store the routine's result in sub(B)."""
    order = m if letter(side) == "L" else n

    def check() -> None:
        for number, name, option, letters in (
            (1, "side", side, "LR"), (2, "uplo", uplo, "UL"), (3, "transa", trans, "NTC"), (4, "diag", diag, "UN"),
        ):  # fmt: skip
            check_letter(routine, number, name, option, letters)
        at_least_0(routine, m=(5, m), n=(6, n))

    arguments: list[Argument] = [Scalar(7, alpha), Sub("a", 8, a, ia, ja, desca, order, order), sub_b]
    same = f", {letter(side)}, {letter(uplo)}, {letter(trans)}, {letter(diag)}, m={m}, n={n}, alpha={alpha}"
    (A, B), (alpha,) = checked(routine, dtypes, check, arguments, same=same)
    if not (m and n):
        return
    if alpha == 0:
        B.stored[...] = 0
        return
    about: Any = {
        "lower": letter(uplo) == "L",
        "trans": letter(trans),
        "unit_diagonal": letter(diag) == "U",
        "side": letter(side),
        "alpha": alpha,
    }
    if routine.endswith("SM"):
        solve_triangular(A, B, overwrite_b=True, **about)
    else:
        redistribute(trmm(A, B, **about), B)


def _gemr2d(routine: str, dtypes: Dtypes, m: int, n: int,
            a: np.ndarray, ia: int, ja: int, desca: Desc,
            b: np.ndarray, ib: int, jb: int, descb: Desc, ictxt: int) -> None:  # fmt: skip
    """Copy sub(A) to sub(B), m x n, from any context to any other.  Collective over the processes of ictxt.

    desca, descb : on processes outside the context of A (of B), CTXT_ is -1, and the other arguments of A (of B) are
              ignored; the processes of the context send their values.
    m, n  : if one is 0, nothing is copied, and all other arguments but ictxt are ignored.
    ictxt : a context that includes all processes of A's and B's contexts.
    Each element that moves to another process is sent once.  Other arguments and errors are those of p?gemm.
    """
    sub_a, sub_b = subs = Sub("a", 3, a, ia, ja, desca, m, n), Sub("b", 7, b, ib, jb, descb, m, n)
    grid, error, known = grid_of_context(ictxt), None, list[_Known | None]()
    common = meeting([grid] if grid else [sub.grid for sub in subs])
    try:
        at_least_0(routine, m=(1, m), n=(2, n))
        here = [sub for sub in subs if m and n and not sub.absent]
        for sub in here:
            sub.check(routine, dtypes)
        if grid is None or common is None:
            raise illegal(routine, 11, 0, f"ictxt is {ictxt!r}, which is not a context")
        if sub_b in here:
            check_written(routine, sub_b, [sub_a] if sub_a in here else [])
        known = [_known(routine, sub, common) if sub in here else None for sub in subs]
    except Exception as bad:
        error = bad
    if common is None:
        raise error or GridError(f"{routine}: no context")
    agree(common.comm, error, f"{routine}, m={m}, n={n}")
    if not (m and n):
        return
    views_a, views_b = zip(*common.comm.allgather(known))
    A, B = _joined(routine, sub_a, views_a, common), _joined(routine, sub_b, views_b, common)
    if A.dtype != B.dtype:
        raise illegal(routine, sub_b.number, 0, f"type mismatch: b is an array of {B.dtype}, a of {A.dtype}")
    redistribute(A, B)


class _Known(NamedTuple):
    """The description of a submatrix that a process of its context sends to the others."""

    shape: tuple[int, int]  # of the grid
    place: tuple[int, ...]  # the ranks of the grid in the common communicator
    layout: Distribution
    dtype: np.dtype


def _known(routine: str, sub: Sub, common: ProcessGrid) -> _Known:
    X = sub.matrix
    place = X.grid.rank_map_in(common, part=True)
    if place is None:
        raise illegal(routine, 11, 0, f"ictxt lacks processes of the context of {sub.name}")
    return _Known(X.grid.shape, place, X.distribution, X.dtype)


def _joined(routine: str, sub: Sub, views: Sequence[_Known | None], common: ProcessGrid) -> DistMatrix:
    """Return sub(A) over the common communicator.  Collective.

    views : the description of sub(A) from each process; None from processes outside its context.
    """
    known = next((view for view in views if view), None)
    silent = [rank for rank in known.place if not views[rank]] if known else range(len(views))
    if known is None or silent:
        text = f"CTXT_ of desc{sub.name} is -1 on {ranks_text(list(silent))}, which must pass the context of the matrix"
        raise illegal(routine, sub.number + 3, CTXT_ + 1, text)
    for rank, view in enumerate(views):
        if view and view != known:
            raise ArgumentError(
                f"{routine}: the ranks were called with different arguments: sub({sub.name}) is {known.layout} on "
                f"{known.shape} processes for rank {views.index(known)}, {view.layout} on {view.shape} for rank {rank}"
            )
    local = np.empty((0, 0), known.dtype) if sub.absent else sub.matrix.stored
    return DistMatrix(local, common.work_grid(known.shape, 1, known.place), known.layout, "F")


psgemm, pdgemm, pcgemm, pzgemm = (of_type(f"p{x}gemm", _gemm) for x in "sdcz")
pigemr2d, psgemr2d, pdgemr2d, pcgemr2d, pzgemr2d = (of_type(f"p{x}gemr2d", _gemr2d) for x in "isdcz")
pssyrk, pdsyrk, pcsyrk, pzsyrk = (of_type(f"p{x}syrk", _syrk) for x in "sdcz")
pcherk, pzherk = of_type("pcherk", _syrk), of_type("pzherk", _syrk)
pstrsm, pdtrsm, pctrsm, pztrsm = (of_type(f"p{x}trsm", _trsm) for x in "sdcz")
pstrmm, pdtrmm, pctrmm, pztrmm = (of_type(f"p{x}trmm", _trmm) for x in "sdcz")
pstran, pdtran = of_type("pstran", _tran), of_type("pdtran", _tran)
pctranu, pztranu = of_type("pctranu", _tran), of_type("pztranu", _tran)
pctranc, pztranc = of_type("pctranc", _tran), of_type("pztranc", _tran)
