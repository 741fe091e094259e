"""The QR factorisation of a matrix of any shape by Householder reflections, also with column pivoting.

Pivots are chosen in a small random projection of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from pdgemm.algorithms.panels.householder_panels import (
    AppliedReflectors,
    ChosenColumns,
    Householder,
    PivotedHouseholder,
)
from pdgemm.algorithms.panels.panel_run import can_read, device_of, run_panels, working_copy
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.gemm import pdgemm
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.lu import permuted
from pdgemm.linalg.factors.operands import identity_like, to_factor
from pdgemm.linalg.factors.rank_k import gram
from pdgemm.linalg.ranges import ELEMENTS, in_range, times, times_upper
from pdgemm.local.arrays import device as devices
from pdgemm.local.blas.local_qr import reflect_in_turn
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.array_functions import tril, triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.gather import to_all_ranks
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule, PivotedSchedule, ReflectorsSchedule
from pdgemm.support.agreement import together

BLOCK, WIDEST = 64, 128  # columns of a panel: one rank factors a panel while the others update the trailing matrix
PANELS = 32  # least number of panels for panels wider than BLOCK
MORE = 10  # rows of a sketch beyond the columns that it chooses: Halko, Martinsson & Tropp, SIAM Review 53(2), 2011
REST = 768  # order of the last part, which LAPACK factors faster on one rank than two ranks by panels


@in_range(lambda factors, a: (factors[0], times(factors[1], a)), A=ELEMENTS)
def householder_qr(
    A: DistMatrix, *, overwrite_a: bool = False, want_q: bool = True
) -> tuple[DistMatrix | None, DistMatrix]:
    """Return Q and R, where A = Q R, as scipy.linalg.qr(A, mode="economic").  Collective over the grid of A.

    A      : DistMatrix (m, n) of any shape, float32, float64, complex64 or complex128, of any layout.
    overwrite_a : A may be overwritten, which saves a copy where the layout of A shares the work evenly.
    want_q : False leaves Q out, and returns None in its place.

    Q (m, k) has orthonormal columns, k = min(m, n), for A of any rank;  R (k, n) is upper triangular, with LAPACK's
    signs: its diagonal is real, and may be negative.  Both have the layout of A, or are in square blocks where this
    layout does not share the work evenly; `report` has the words.
    On a device, everything runs there, panels by cuSOLVER, and nothing is copied to the host.  DeviceError where
    cuSOLVER is missing, or where MPI takes no device pointers and ranks cannot read in place.

    Cost per rank on Pr x Pc = P, m >= n: (2 m n^2 - 2/3 n^3)/P flops for R, and as many for Q; about
    n (m - n/2)/Pr + n^2/Pc + n (m - n/2)/P words in for R; extra memory for m n/P words of reflectors.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: columnwise |A - Q R| <= gamma_{mn} |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.4).
    Schreiber & Van Loan, SIAM J. Sci. Stat. Comput. 10(1), 1989.
    """
    start = perf_counter()
    W, moves = to_factor("householder_qr", A, BLOCK, overwrite_a, bool(want_q))
    (m, n), k = A.shape, min(A.shape)
    matrices = {"A": W}
    if want_q:
        matrices["Q"] = identity_like(W[:, :k])
    what = f"QR factors of a matrix ({m} x {n}) by Householder reflections"
    _, report = run_panels(householder_schedule(W, want_q), Householder, matrices, what, moves, start)
    Q, R = matrices.get("Q"), working_copy(W[:k], BLOCK, True, False)[0] if m > n else W
    for factor in (Q, R):
        if factor is not None:
            factor.report = report
    return Q, R


@in_range(lambda factors, a: (times_upper(factors[0], a), factors[1]), A=ELEMENTS)
def householder_factor(A: DistMatrix) -> tuple[DistMatrix, np.ndarray]:
    """Return R with reflectors below its diagonal, and tau, the same on every rank, as LAPACK's geqrf.  Collective.

    A : DistMatrix (m, n) as for `householder_qr`.  A = H_1 H_2 ... H_k R, where H_j = I - tau_j v v^H, and v has zeros
    above row j, 1 in row j, and then the elements of column j below the diagonal.  Up to rounding the result does not
    depend on the number of ranks.  Cost and errors are those of `householder_qr` without Q.
    """
    W, moves = to_factor("householder_factor", A, BLOCK, False)
    tau, what = np.zeros(min(A.shape), A.dtype), f"QR factors of a matrix ({shape_of(A)}) by Householder reflections"
    executor = partial(Householder, tau=tau)
    _, W.report = run_panels(householder_schedule(W, False), executor, {"A": W}, what, moves)
    return W, to_all_ranks(W.grid, "tau", tau, sums=True)  # each number is set on one rank, and 0 on the others


def apply_reflectors(
    F: DistMatrix, tau: np.ndarray, C: DistMatrix, adjoint: bool, did: Callable[[Any], Any] | None = None
) -> None:
    """Compute C := Q C, or C := Q^H C with `adjoint`, where Q = H_1 H_2 ... H_k of `householder_factor`.  Collective.

    F : DistMatrix (m, k), with the reflectors below its diagonal.   tau : k numbers, the same on every rank.
    C : DistMatrix (m, n) of any layout, overwritten.   did : called with each product, to record its report.

    Cost per rank for P ranks: 4 m n k/P flops, only in products, for 128 reflectors at a time.
    """
    starts, did = range(0, len(tau), 2 * BLOCK), did or Steps().did
    for start in starts if adjoint else reversed(starts):
        columns = slice(start, start + 2 * BLOCK)
        V: Any = tril(F[start:, columns], -1)
        V += identity_like(V)
        D, U = np.diag(tau[columns]), np.triu(did(gram(V)).allgather(), 1)  # T^-1 = D^-1 + U: see `blas.local_qr`
        T = np.linalg.solve(np.eye(len(D)) + D @ U, D).astype(F.dtype)
        T = T.conj().T if adjoint else T
        small = DistMatrix.from_global(T, grid=F.grid.base, device=F.device, check=False)
        did(pdgemm(-1, V, did(pdgemm(1, small, did(pdgemm(1, V.H, C[start:])))), 1, C[start:]))


def reflect_columns(F: DistMatrix, tau: np.ndarray, X: DistMatrix, did: Callable[[Any], Any]) -> None:
    """Compute X := H_1 H_2 ... H_k X as `apply_reflectors`, for a host X on a grid of one row.  Collective.

    X : DistMatrix (m, n), overwritten.   did : called with X, to record its report.
    Cost per rank for P ranks: 4 m n k/P flops and m k^2; m k words in.
    """
    if not len(tau):
        return
    schedule = ReflectorsSchedule(X.layout_in(X.grid), 2 * BLOCK, RING.name, F=F.layout_in(F.grid))
    what, executor = f"Reflectors of a matrix ({shape_of(F)})", partial(AppliedReflectors, tau=tau)
    _, X.report = run_panels(schedule, executor, {"A": X, "F": F}, what)
    did(X)


def householder_schedule(W: DistMatrix, want_q: bool) -> HouseholderSchedule:
    """Return the schedule of the QR factorisation of a matrix whose layout suits the algorithm.  Local."""
    width = max(BLOCK, min(WIDEST, min(W.shape) // PANELS))
    return HouseholderSchedule(W.layout_in(W.grid), width, can_read(W), wants_q=bool(want_q), device=device_of(W))


def pivoted_qr(A: DistMatrix, want_q: bool = True) -> tuple[DistMatrix | None, DistMatrix, np.ndarray]:
    """Return Q, R and p, where A[:, p] = Q R, as scipy.linalg.qr(A, mode="economic", pivoting=True).  Collective.

    A : DistMatrix (m, n) of any shape, float32, float64, complex64 or complex128, of any layout; unchanged.
    want_q : False leaves Q out, and returns None in its place.

    Q (m, k) has orthonormal columns, k = min(m, n);  R (k, n) is upper triangular;  p (n,) is the same on every rank.
    Q and R are column-major; `R.report` has the words.  They have the layout of A if it shares the work evenly and its
    blocks begin at multiples of BLOCK rows and columns; otherwise they are in square blocks.
    BLOCK columns at a time are chosen in a sketch of BLOCK + MORE rows, and the rank that factors them orders them by
    LAPACK's geqp3.  So |r_jj| decreases among these columns, and a later |r_jj| is larger by a small factor at most;
    |r_jj| is about as large as the singular value s_j, except for matrices such as Kahan's.  The last m' x n' elements,
    m' n' <= REST^2, are factored by geqp3 on one rank, except on a device.  The random numbers and, up to rounding, the
    pivots do not depend on the layout.

    Cost per rank for P ranks, b = BLOCK, m >= n: the flops of `householder_qr`, and 2 m n b/P for each sketch (most
    matrices take one); on one rank 3 n^2 b to choose columns, and 4/3 REST^3 for the last elements.  Words in: those of
    `householder_qr`, and at most 2 m n/P for columns that change places.  One rank also receives n^2/2 words of rows of
    R, and REST^2 words for the last elements.
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
    """The factors of A[:, p] = Q R: F with R and the reflectors of Q, and tau, as from `householder_factor`; and p."""

    F: DistMatrix
    tau: np.ndarray
    p: np.ndarray


@in_range(lambda factors, a: factors._replace(F=times_upper(factors.F, a)), A=ELEMENTS)
def pivoted_factor(name: str, A: DistMatrix, steps: Steps) -> PivotedFactor:
    """Factor A as `pivoted_qr` does, without forming Q.  Collective.   name : the calling function, for messages."""
    (m, n), k, what = A.shape, min(A.shape), f"QR factors of a matrix ({shape_of(A)}) with column pivoting"
    W, moves = to_factor(f"{name} with column pivoting", A, BLOCK, False, order="F", aligned=True)  # columns are moved
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
    if reduced:  # ranks without a position in the grid did not take part
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
    Q = identity_like(F[:, :k])
    for start in reversed(range(0, k, width)):  # in columns before `start`, Q is still the identity
        part = slice(start, min(k, start + width))
        apply_reflectors(F[start:, part], tau[part], Q[start:, start:], False, steps.did)
    return Q
