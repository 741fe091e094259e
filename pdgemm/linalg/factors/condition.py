"""Estimates of the condition number of a matrix in the 1-norm, by a few solves with its factors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import fsum

import numpy as np

from pdgemm.algorithms.panels.panel_run import run_on_one_rank
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.operands import column, has_one_rank
from pdgemm.local.arrays.dtypes import eps
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.local.blas.local_qr import phases
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.array_functions import tril, triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import AnyName
from pdgemm.support.agreement import warn_together

COLUMNS = 4  # number of vectors in one solve
SOLVES = "NCN"  # the three solves: with A, with A^H, and with A again

Solve = Callable[[DistMatrix, str], DistMatrix]  # (X, "N" or "C") -> op(A)^-1 X; X may be overwritten


def reciprocal_condition(
    steps: Steps, A: DistMatrix, norm: float, solve: Solve, lapack: Callable[..., float] | None = None
) -> float:
    """Return an estimate of 1 / (|A|_1 |A^-1|_1), the same on all ranks.  Collective over the grid of A.

    A     : the matrix, or its factors.  The vectors of the solves have the type and the grid of A, and are distributed
        as the rows of A.
    norm  : |A|_1.   solve : solves with A.   steps : records the reports of the solves as one step.
    lapack : estimates the number from A's local array and the norm; used instead of the solves on a grid of one rank.
    """
    if lapack and has_one_rank(A) and len(A):
        estimate = partial(lapack, A.stored, norm)
        rcond, report = run_on_one_rank("rcond", A, (len(A), 12, len(A)), estimate, 1.0)
        steps.ran(report)
        return rcond
    inner = Steps(what=f"Condition of {shape_of(A)}", algorithm=AnyName("rcond"))
    rcond = reciprocal(A, norm, inverse_norm(inner, A, solve) if len(A) else 0.0)
    steps.add(inner)
    return rcond


def reciprocal(A: DistMatrix, norm: float, of_inverse: float) -> float:
    """Return 1 / (|A| |A^-1|), computed on rank 0 and broadcast; 1 for a matrix without elements.  Collective.

    norm : |A|.   of_inverse : |A^-1|.
    """
    product = norm * of_inverse
    rcond = 1.0 if 0 in A.shape else 1 / product if product > 0 else 0.0
    return A.grid.expected(float(A.grid.comm.bcast(rcond, root=0)), 1.0)


def regular(A: DistMatrix, rcond: float) -> float:
    """Return rcond; warn on all ranks if this reciprocal condition number is below eps, or NaN.  Collective."""
    if not rcond >= eps(A.dtype):
        warn_together(
            A.grid.comm,
            f"A ({shape_of(A)} on a {A.grid} grid) is ill-conditioned: its reciprocal condition number, about "
            f"{rcond:.1e}, is less than eps, and possibly all digits of the result are wrong",
        )
    return rcond


def inverse_norm(steps: Steps, A: DistMatrix, solve: Solve) -> float:
    """Return an estimate of |A^-1|_1: a lower bound, exact up to order 4, rarely below |A^-1|_1 / 3.  Collective.

    Three solves with 4 columns each: first A^-1 X, where the columns of X are of equal elements, of alternating and
    growing elements, and of random signs; then A^-H S, where S has the signs, or phases, of A^-1 X; then the columns of
    A^-1 with the indices of the largest rows of A^-H S.  Every rank holds n x 4 words.
    Higham & Tisseur, SIAM J. Matrix Anal. Appl. 21(4), 2000, algorithm 2.4, of which two iterations nearly always
    suffice; Higham, Accuracy and Stability of Numerical Algorithms, 2002, 15.2.
    """
    n, most = len(A), 0.0

    def solved(x: np.ndarray, trans: str) -> np.ndarray:
        return steps.did(solve(column(x, A, A.dtype), trans)).allgather()

    with np.errstate(all="ignore"):
        x = _start(n)
        for trans in SOLVES:
            y = solved(x, trans)
            if trans == "N":
                most = max(
                    [most, *(n * fsum(np.abs(y[:, j]) / n) for j in range(y.shape[1]))], key=_size
                )  # no sum overflows
                x = phases(y)
            else:
                where = np.argsort(-np.abs(y).max(axis=1, initial=0), kind="stable")[:COLUMNS]
                x = np.zeros((n, len(where)))
                x[where, np.arange(len(where))] = 1
    return most if np.isfinite(most) else np.inf


def _size(value: float) -> float:
    return value if value == value else np.inf  # a NaN counts as the largest


def _start(n: int) -> np.ndarray:
    """Return the start vectors, columns of an (n, min(n, COLUMNS)) array: constant, alternating, of random signs.

    Each has the 1-norm 1.
    """
    i, number = np.arange(n), min(COLUMNS, n)
    x = np.sign(element_function("normal", 1, np.dtype(float))(i[:, None], np.arange(number)[None, :]))
    x[:, :1] = 1
    x[:, 1:2] = ((-1.0) ** i * (1 + i / max(1, n - 1)))[:, None]
    return x / np.abs(x).sum(axis=0)


def one_norm(A: DistMatrix, kind: str, lower: bool) -> float:
    """Return the 1-norm of the matrix that `solve` reads, which depends on `kind`.  Collective.

    This matrix is A, a triangle of A, or the Hermitian matrix that a triangle of A defines.

    kind  : the structure of A, as `pdgemm.linalg.factors.solve.structure` returns it.
    lower : with "pos", the lower triangle is read.
    """
    if kind == "pos":
        T = tril(A) if lower else triu(A)
        columns, rows = (T.vector_norm(1, axis=axis) for axis in (0, 1))
        return float((columns + rows - np.abs(A.diagonal())).max(initial=0))
    if "triangular" in kind:
        A = tril(A) if kind == "lower triangular" else triu(A)
    return A.norm(1)
