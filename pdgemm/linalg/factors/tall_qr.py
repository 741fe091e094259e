"""QR factors and singular values of tall matrices, distributed by rows: CholeskyQR2 and TSQR."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import scipy  # its packages take long to load, so each is loaded when it is first used

from pdgemm.algorithms.panels.tall_panels import Passes, cholesky_qr, factored_rows, tsqr
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import LayoutError, LinAlgError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.run_report import RunReport, sent_and_received
from pdgemm.linalg.factors.operands import check_operand
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.elementwise import CONJUGATE, CONVERT, set_elements
from pdgemm.local.blas.local_qr import multiply_in_place
from pdgemm.matrix.argument_checks import communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.gather import block_index
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.schedules.panels.tsqr_schedule import TallSchedule, cholesky_pass, svd_of_triangle, tsqr_schedule
from pdgemm.support.agreement import together
from pdgemm.transport.panels.tree_messages import descend, to_all

PASSES = 2  # passes of CholeskyQR over a matrix that is not ill-conditioned


def text_of_qr(report: Any) -> str:
    """Return the text of a report on how A = Q R was computed."""
    passes = f"{report.passes} {'pass' if report.passes == 1 else 'passes'} of CholeskyQR"
    shifted = f", the first shifted by {report.shift:.0e} |A|^2" if report.shift else ""
    how = {
        "cholesky": f"{passes}{shifted}, |Q^H Q - I| = {report.departure:.0e} before the last",
        "tsqr": f"TSQR{f' ({passes} failed{shifted})' if report.passes else ''}",
    }[report.method]
    (m, n), moved = report.shape, "; A and Q redistributed" if report.moves else ""
    return f"Q R of A ({m} x {n}), {report.dtype}, by {how}{moved}: {sent_and_received(report)}"


class TallQR(NamedTuple):
    """The factors of A = Q R: Q is row-major, distributed by rows; R is a host array, the same on every rank."""

    Q: DistMatrix
    R: np.ndarray
    report: Any  # a RunReport; None while a program is planned


def tall_qr(A: DistMatrix, method: str = "auto", passes: int = PASSES) -> TallQR:
    """Compute A = Q R, where A is (m, n) with m >= n.  Collective over the grid of A; see `pdgemm.linalg.factors.qr`.

    method : "cholesky", "tsqr", or another name: CholeskyQR and, if its Q is not accurate, TSQR.
    passes : number of passes of CholeskyQR to plan.

    A matrix that is not distributed by rows is redistributed by rows first.  For a matrix on a device, the work on
    its rows runs there, by cuSOLVER in TSQR, and the work on n x n matrices on the host.
    Raises LayoutError if m < n, and LinAlgError where Q of method "cholesky" is not accurate; on all ranks.
    """
    start = perf_counter()
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        if A.shape[0] < A.shape[1]:
            raise LayoutError(f"A must have at least as many rows as columns, but is {shape_of(A)} on a {A.grid} grid")
        arguments += ["QR of a tall matrix", method, A.distribution, A.dtype, A.order, A.device]
    X, moves = A, tuple[RunReport, ...]()
    if (by_rows := rows_only(A)) is not A.grid:
        X = redistribute(A, grid=by_rows)
        moves = (X.report.changed(name="A"),) if X.report else ()
    grid, comm, (m, n), device = X.grid, X.grid.comm, X.shape, devices.of(X.stored)
    Q = empty_like(X, order="C")
    if grid.draft:
        for schedule in ([tsqr_schedule] if method == "tsqr" else [cholesky_pass] * passes) if n else ():
            grid.draft.add("A", schedule(*rows_of(X)))
        return TallQR(Q, np.eye(n, dtype=X.dtype), None)
    copy, recorder, ran = CONJUGATE if X.conjugated else CONVERT, recorder_of(Q.stored), list[TallSchedule]()
    x, q = (y.stored.reshape(0, n) if grid.idle else y.stored for y in (X, Q))
    outcome = Passes(None if n else np.zeros((0, 0), X.dtype), 0, np.nan, 0.0)
    with np.errstate(all="ignore"), spans.timed("qr", X.stored.nbytes):
        if n and method != "tsqr":
            step = cholesky_pass(*rows_of(X))
            outcome = cholesky_qr(x, copy, q, step.tree, m, comm, recorder)
            ran += [step] * outcome.number
        R, done = outcome.R, "cholesky"
        if R is None and method == "cholesky":
            raise LinAlgError(
                f"the columns of A ({shape_of(A)} on a {A.grid} grid) are too nearly dependent for CholeskyQR2, or "
                'their squares overflow or underflow: use method="auto" or "tsqr"'
            )
        if R is None:
            with together(comm):  # a device may lack memory, or cuSOLVER, on one rank
                if device:
                    device.load_factorisations()
                workspace = devices.own_memory(device).empty((Q.stored.size,), Q.dtype)
                leaf = factored_rows(x, copy, q, workspace, recorder)
            recorder.hold(workspace.nbytes)
            step, done = tsqr_schedule(*rows_of(X)), "tsqr"
            R = tsqr(leaf, step.tree, comm, recorder)
            ran.append(step)
        recorder.finish()
    report = RunReport.of_work(
        recorder,
        ran,
        grid,
        perf_counter() - start,
        text=text_of_qr,
        method=done,
        shape=A.shape,
        dtype=str(A.dtype),
        passes=outcome.number,
        departure=outcome.departure,
        shift=outcome.shift,
        moves=moves,
    )
    return TallQR(Q, R, report.after(moves))


def svd_of_tall(A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and V^H of A = U diag(s) V^H with m >= n, by A = Q R and the SVD of R.  Collective over A.grid.

    A : DistMatrix (m, n), of any layout; every rank holds n^2 words.
    Returns U (m, n), in the layout of A; s, n numbers in descending order, the same on every rank; and V^H (n, n).

    Cost per rank for P ranks: that of `qr` and 2mn^2/P flops; 22n^3 flops on one rank.
    Error: singular values within O(n eps) s_1 (Chan, ACM Trans. Math. Software 8(1), 1982).
    Raises LayoutError if m < n, LinAlgError where A has NaN or infinite elements, and DTypeError; on all ranks.
    """
    start = perf_counter()
    factors = tall_qr(A)
    U, s, Vh, report = svd_on_all(factors)
    with np.errstate(all="ignore"):
        multiply_in_place(factors.Q.stored, U)
    left, right = placed(factors._replace(R=Vh, report=report), A, start)
    return left, s, right


def svd_on_all(factors: TallQR) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """Return U, s and V^H of R = U diag(s) V^H, and the report of QR and SVD.  Collective over the grid of Q.

    One rank computes and broadcasts U, s and V^H, so that they are the same to the bit on every rank.
    Raises LinAlgError on all ranks where R has NaN or infinite elements, or the SVD does not converge.
    """
    start, R, grid, k = perf_counter(), factors.R, factors.Q.grid, len(factors.R)
    recorder, step = Recorder(), svd_of_triangle(*rows_of(factors.Q))
    tree = step.tree
    if k and grid.draft:
        grid.draft.add("R", step)
    if grid.draft:
        return np.eye(k, dtype=R.dtype), np.ones(k, R.real.dtype), np.eye(k, dtype=R.dtype), None
    words = np.empty(tree.down[0], R.dtype)
    if grid.comm.rank == tree.ranks[0] and k:
        try:
            words[:] = np.concatenate([x.ravel() for x in scipy.linalg.svd(R)])
        except (ValueError, np.linalg.LinAlgError):  # R has NaN, or the SVD does not converge
            words[:] = np.nan  # the other ranks wait for a message, and NaN makes all ranks raise
    if k:
        words = descend(tree, grid.comm, words, to_all, recorder)
    if np.isnan(words).any():
        raise LinAlgError(
            f"the singular values of A ({shape_of(factors.Q)}) do not converge; does A contain NaN or infinity?"
        )
    U, s, Vh = words[: k * k].reshape(k, k), words[k * k : -k * k or None].real, words[k * k + k :].reshape(k, k)
    return U, s, Vh, factors.report.after([RunReport.of_work(recorder, [step], grid, perf_counter() - start)])


def placed(factors: TallQR, A: DistMatrix, start: float) -> tuple[DistMatrix, DistMatrix]:
    """Return Q in the layout of A, and R on A's grid, with columns distributed as A's.  Collective over A.grid.

    start : the time from which the report counts seconds.
    """
    Q, R, report = factors
    placed_q = not Q.same_layout(A) or Q.order != A.order
    if placed_q:
        Q = redistribute(Q, like=A)
    R_ = empty_like(Q, distribution=beneath(A))
    with together(A.grid.comm):
        set_elements(R_.stored, R[block_index(*R_.indices())])
    if A.grid.draft:
        return Q, R_
    report = report.changed(seconds=perf_counter() - start)
    if placed_q:
        move = Q.report.changed(name="Q")
        report = report.after([move], moves=(*report.moves, move))
    Q.report = R_.report = report
    return Q, R_


def beneath(A: DistMatrix) -> Distribution:
    """Return the distribution of R (h, n), where h = min(m, n).

    Its columns are distributed as those of A, its rows as the first h columns of A.
    """
    cols = A.distribution.cols
    return Distribution(cols.window(0, min(A.shape)).over(A.grid.shape[0]), cols)


def rows_of(X: DistMatrix) -> tuple[tuple[int, ...], tuple[int, ...], int, np.dtype]:
    """Return the ranks in the order of their rows of X, idle ranks last; the row counts; the column count; the type."""
    grid, counts = X.grid, [X.distribution.rows.count(i) for i in range(X.grid.shape[0])]
    idle = sorted({*range(grid.size)} - {*grid.rank_map})
    return (*grid.rank_map, *idle), (*counts, *[0] * len(idle)), X.shape[1], X.dtype


def rows_only(A: DistMatrix) -> ProcessGrid:
    """Return A's grid if it has one column, else a grid of one column with the same ranks, made collectively."""
    ranks = A.grid.rank_map
    return A.grid if A.grid.shape[1] == 1 else A.grid.work_grid((len(ranks), 1), 1, ranks)
