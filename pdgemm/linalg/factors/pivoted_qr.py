"""The QR factorisation with column pivoting, whose pivots are chosen in a small random projection of the matrix."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from pdgemm.algorithms.panels.panel_run import can_read, device_of, run_panels, working_copy
from pdgemm.algorithms.panels.pivoted_panels import ChosenColumns, PivotedHouseholder
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.householder import BLOCK, apply_reflectors
from pdgemm.linalg.factors.lu import permuted
from pdgemm.linalg.factors.operands import to_factor
from pdgemm.linalg.ranges import ELEMENTS, in_range, times_upper
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.local.blas.local_qr import reflect_in_turn
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.array_functions import triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.gather import to_all_ranks
from pdgemm.schedules.panels.pivoted_schedule import PivotedSchedule
from pdgemm.support.agreement import together

MORE = 10  # rows of a sketch beyond the columns that it chooses: Halko, Martinsson & Tropp, SIAM Review 53(2), 2011
REST = 768  # order of the last part, which LAPACK factors faster on one rank than two ranks by panels


def pivoted_qr(A: DistMatrix, want_q: bool = True) -> tuple[DistMatrix | None, DistMatrix, np.ndarray]:
    """Return Q, R and p, where A[:, p] = Q R, as scipy.linalg.qr(A, mode="economic", pivoting=True).  Collective.

    A : DistMatrix (m, n) of any shape, float32, float64, complex64 or complex128, of any layout; unchanged.
    want_q : False leaves Q out, and returns None in its place.

    Q (m, k) has orthonormal columns, k = min(m, n);  R (k, n) is upper triangular;  p (n,) is the same on every rank.
    Q and R are column-major, in the layout of A where this shares the work evenly and each BLOCK columns and rows are
    in one block, else in square blocks; `R.report` has the words.  BLOCK columns at a time are chosen in a sketch of
    BLOCK + MORE rows, and the rank that factors them orders them by LAPACK's geqp3.  So |r_jj| decreases among these
    columns, and later ones exceed it by a small factor at most; it is about as large as the singular value s_j, except
    for matrices such as Kahan's.  The last m' x n' elements, m' n' <= REST^2, are factored by geqp3 on one rank, except
    on a device.  The random numbers do not depend on the layout, nor do the pivots, but for rounding.

    Cost per rank for P ranks, b = BLOCK, m >= n: the flops of `householder_qr`, and 2 m n b/P for each sketch, of which
    most matrices take one; on one rank 3 n^2 b to choose columns, and 4/3 REST^3 for the rest.  Words in: those of
    `householder_qr`, and at most 2 m n/P for columns that change places; n^2/2 for rows of R, and REST^2, on one rank.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: that of `householder_qr`.
    Duersch & Gu, SIAM J. Sci. Comput. 39(4), 2017; Martinsson, Quintana-Orti, Heavner & van de Geijn, SIAM J. Sci.
    Comput. 39(2), 2017.
    """
    steps = Steps(what=f"QR factors of a matrix ({shape_of(A)}) with column pivoting")
    F, tau, p = pivoted_factor("qr", A, steps)
    Q = _formed(F, tau, steps) if want_q else None
    R = triu(F[: len(tau)])
    for factor in (Q, R):
        if factor is not None:
            steps.reported(factor)
    return Q, R, p


class PivotedFactor(NamedTuple):
    """A[:, p] = Q R, where R and the reflectors of Q, with tau, are in F, as `householder_factor` returns them."""

    F: DistMatrix
    tau: np.ndarray
    p: np.ndarray


@in_range(lambda factors, a: factors._replace(F=times_upper(factors.F, a)), A=ELEMENTS)
def pivoted_factor(name: str, A: DistMatrix, steps: Steps) -> PivotedFactor:
    """Factor A as `pivoted_qr` does, without forming Q.  Collective.   name : of the function that factors A."""
    (m, n), k, what = A.shape, min(A.shape), f"QR factors of a matrix ({shape_of(A)}) with column pivoting"
    W, moves = to_factor(f"{name} with column pivoting", A, BLOCK, False, "F", aligned=True)  # whole columns move
    reduced = _reduced(m, n) if W.device == devices.HOST else k
    schedule = PivotedSchedule(
        W.layout_in(W.grid), BLOCK, can_read(W), wants_q=False, device=device_of(W), columns=reduced, more=MORE
    )
    with together(W.grid.comm):  # where one rank lacks memory, all ranks raise
        sketch, rows = (np.zeros(words * n, A.dtype) for words in (BLOCK + MORE, BLOCK))
        pivots = ChosenColumns(np.zeros(k, A.dtype), np.arange(n), sketch, rows)

    def as_run(plan: PivotedSchedule) -> PivotedSchedule:
        return replace(plan, chosen=tuple(pivots.chosen), drawn=tuple(pivots.drawn))

    _, W.report = run_panels(schedule, partial(PivotedHouseholder, pivots=pivots), {"A": W}, what, moves, as_run=as_run)
    steps.did(W)
    tau, p = pivots.tau, W.grid.expected(pivots.p, schedule.order)
    if reduced:  # ranks without a position in the grid have taken no part
        p = to_all_ranks(W.grid, "pivots", p * (W.grid.comm.rank == schedule.ranks[0]), sums=True)
    if reduced < k:
        order = _factor_rest(W[reduced:, reduced:], tau[reduced:], steps)
        p[reduced:] = p[reduced:][order]
        steps.did(permuted(W[:reduced, reduced:].T, order))
    return PivotedFactor(W, to_all_ranks(W.grid, "tau", tau, sums=True), p)


def _reduced(m: int, n: int) -> int:
    """Return the number of columns of an m x n matrix that all ranks eliminate; one rank eliminates the others."""
    starts = range(0, min(m, n), BLOCK)
    return next((start for start in starts if (m - start) * (n - start) <= REST**2), min(m, n))


def _factor_rest(X: DistMatrix, tau: np.ndarray, steps: Steps) -> np.ndarray:
    """Factor X by LAPACK on one rank, which sets tau, and return the order of its columns on all ranks.  Collective."""
    whole = DistMatrix.empty(X.shape, grid=X.grid.base, block=X.shape, dtype=X.dtype, order="F")
    steps.did(redistribute(X, whole))
    order = np.zeros(X.shape[1], np.int64)
    with together(X.grid.comm):
        if whole.stored.size:
            tau[:] = reflect_in_turn(whole.stored, order)
    steps.did(redistribute(whole, X))
    n = len(order)
    return to_all_ranks(X.grid, "pivots", X.grid.expected(order, np.random.default_rng(n).permutation(n)), sums=True)


def _formed(F: DistMatrix, tau: np.ndarray, steps: Steps) -> DistMatrix:
    """Return Q = H_1 H_2 ... H_k, (m, k), in the layout of the reflectors F.  Collective."""
    k, width = len(tau), 2 * BLOCK
    Q = working_copy(F[:, :k], BLOCK, True, False)[0]._filled("eye", element_function("eye", 0, np.dtype("d")))
    for start in reversed(range(0, k, width)):  # in columns before `start`, Q is still the identity
        part = slice(start, min(k, start + width))
        apply_reflectors(F[start:, part], tau[part], Q[start:, start:], False, steps.did)
    return Q
