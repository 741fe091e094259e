"""Householder's QR factorisation with column pivoting, whose pivots are chosen in a random sketch of the matrix.

Duersch & Gu, Randomized QR with column pivoting, SIAM J. Sci. Comput. 39(4), 2017; Martinsson, Quintana-Orti, Heavner &
van de Geijn, Householder QR factorization with randomization for column pivoting, SIAM J. Sci. Comput. 39(2), 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pdgemm.algorithms.panels.householder_panels import Householder
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.device import beside, to_host
from pdgemm.local.arrays.element_functions import element_function, fill
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_lapack import trsm
from pdgemm.local.blas.pivots import pivots_of
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.pivoted_schedule import INDEX, PivotedSchedule, beginning_with
from pdgemm.schedules.panels.row_moves import RowMoves
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.panels.row_exchange import exchange_rows
from pdgemm.transport.panels.task import Task


@dataclass(frozen=True)
class ChosenColumns:
    """What a factorisation with pivots has chosen, and memory of the host for it.

    tau : as for `Householder`.   p : the numbers of the columns of A, overwritten with their order on the grid's ranks.
    sketch, rows : vectors for a sketch, and for rows of R.
    chosen, drawn : what `PivotedSchedule` says of this run.
    """

    tau: np.ndarray
    p: np.ndarray
    sketch: np.ndarray
    rows: np.ndarray
    chosen: list[tuple[int, ...]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


class PivotedHouseholder(Householder):
    """Overwrites A (m, n) with R and the reflectors of Q, where A P = Q R, as `Householder` with tau.

    Y = G X, where X is the trailing matrix and G has normal random numbers.  Columns of Y are about as long as those of
    X, relative to each other, and so are their distances to the space of other columns: LAPACK's geqp3 of Y chooses the
    columns of a panel, and geqp3 of the panel orders them.  If X P = Q [R11 R12; 0 X'] and G X P = [Y1 Y2], then
    Y2 - Y1 R11^-1 R12 is a sketch of X'.  Its rounding errors are about eps times the sketch that was drawn, so another
    one is drawn where X' may be as small as sqrt(eps) times the trailing matrix of that one.

    Cost per rank on P ranks: that of `Householder`, and 2 m n b/P flops for each sketch, with b rows; on the first rank
    3 n^2 b to choose columns, and to update the sketch.
    """

    def __init__(self, task: Task[PivotedSchedule], pivots: ChosenColumns) -> None:
        self._orders = np.zeros(len(pivots.tau), INDEX)  # of each panel
        super().__init__(task, pivots.tau, order=self._orders)
        self._schedule, self._pivots = task.schedule, pivots
        self._sketch: np.ndarray | None = None  # Y, on the first rank alone; None: it is to be drawn
        self._largest = 0.0  # |r_jj| of the first column that this sketch has chosen

    def __call__(self) -> None:
        plan = self._schedule
        for number, panel in enumerate(plan.steps):
            if plan.chooses(number):
                self._choose(number, panel)
            self._factor(number)
            self._reflectors.wait(number)
            self._reflect(number, self._A, (panel.stop, plan.n), "C")
            self._reorder(panel)
            if plan.chooses(number + 1):
                self._follow(panel)
        self._sum.finish()
        self._reflectors.finish()

    def _choose(self, number: int, panel: Panel) -> None:
        """Choose the columns of a panel, and exchange them with those that are in their place."""
        if number == 0:
            self._draw(number, panel)
        pivots = self._best(panel)
        if pivots[0] < 0:
            self._draw(number, panel)
            pivots = self._best(panel)
        self._pivots.chosen.append(tuple(pivots.tolist()))
        order, start, Y = beginning_with(pivots, self._schedule.n - panel.start), panel.start, self._sketch
        moves = RowMoves.to(np.arange(len(order)), order)
        if Y is not None:
            Y.T[moves.targets] = Y.T[moves.sources]
        self._exchange(RowMoves(start + moves.targets, start + moves.sources))

    def _best(self, panel: Panel) -> np.ndarray:
        """Return the columns that the first rank chooses for a panel; negative numbers if it needs another sketch."""
        pivots = np.full(panel.width, -1, INDEX)
        if self._sketch is not None:
            pivots[:] = range(panel.width)  # where memory lacks in the next line
            with self._task.computing():
                pivots[:] = pivots_of(self._sketch.copy(order="F"))[: panel.width]
        return self._tell(panel, self._schedule.ranks[0], pivots)

    def _reorder(self, panel: Panel) -> None:
        """Give the columns of R above a panel the order in which its owner has factored the panel."""
        part, i = slice(panel.start, panel.stop), self._task.grid.coords[0]
        order = self._tell(panel, self._schedule.A.rank(panel.row, panel.col), self._orders[part])
        moves = RowMoves.to(np.arange(panel.start, panel.stop), panel.start + order)
        self._exchange(moves, slice(self._rows.below(panel.start, i)))

    def _tell(self, panel: Panel, root: int, numbers: np.ndarray) -> np.ndarray:
        """Return one rank's numbers of columns on all ranks."""
        self._task.carry_out(self._schedule.telling(panel, root), numbers)
        return numbers

    def _exchange(self, moves: RowMoves, rows: slice = slice(None)) -> None:
        """Exchange columns of A, in these local rows, and their numbers."""
        exchange_rows(self._task, moves, rows, transposed=True)
        self._pivots.p[moves.targets] = self._pivots.p[moves.sources]

    def _draw(self, number: int, panel: Panel) -> None:
        """Draw the sketch of the trailing matrix."""
        plan, task, start, (i, j) = self._schedule, self._task, panel.start, self._task.grid.coords
        top, left, height = self._rows.below(start, i), self._cols.below(start, j), plan.width + plan.more
        X, random = self._A[top:, left:], element_function("normal", start + 1, self._A.dtype)
        part = column_buffer(height, "F", X.shape[1], task.workspace["part of the sketch"])
        with task.computing():
            G = np.empty((height, len(X)), X.dtype)
            fill(G, np.arange(height), self._rows.indices(i)[top:] - start, random)
            G *= 2.0 ** -(3 + (self._rows.n - start).bit_length())  # |g| < 8, so that no sum of products overflows
            gemm_accumulate(1, beside(G, X), X, 0, part)
        task.finish_products()
        Y = column_buffer(height, "F", plan.n - start, self._pivots.sketch)
        Y[:] = 0
        Y.T[self._cols.indices(j)[left:] - start] = to_host(part).T
        task.carry_out(plan.summing(panel), Y.T.reshape(-1))
        self._sketch, self._largest = Y if task.grid.comm.rank == plan.ranks[0] else None, 0.0
        self._pivots.drawn.append(number)

    def _follow(self, panel: Panel) -> None:
        """Make the sketch on the first rank that of the trailing matrix behind a panel, by its rows of R."""
        plan, task, (i, j) = self._schedule, self._task, self._task.grid.coords
        gathering, w = plan.gathering(panel), panel.width
        parts, ends = self._pivots.rows[: gathering.words], gathering.offsets.tolist()
        if i == panel.row:
            task.finish_products()
            own = self._A[self._rows.local_window(panel.start, panel.stop, i), self._cols.below(panel.start, j) :]
            me = plan.ranks.index(task.grid.comm.rank)
            column_buffer(w, "F", own.shape[1], parts[ends[me] : ends[me + 1]])[...] = to_host(own)
        task.carry_out(gathering, parts)
        if self._sketch is None:
            return
        R = np.empty((w, plan.n - panel.start), parts.dtype, "F")
        for rank, (start, stop) in zip(plan.ranks, pairwise(ends)):
            if start < stop:
                cols = self._cols.indices(plan.A.coords(rank)[1])
                here = cols[self._cols.below(panel.start, plan.A.coords(rank)[1]) :] - panel.start
                R.T[here] = column_buffer(w, "F", len(here), parts[start:stop]).T
        sizes = abs(R.diagonal())
        self._largest = self._largest or float(sizes[0])
        if not sizes.min() > np.sqrt(dtypes.eps(R.dtype)) * self._largest:  # also if NaN
            self._sketch = None
            return
        with task.computing():
            order = self._orders[panel.start : panel.stop]
            Y1, Y2 = np.asfortranarray(self._sketch[:, order]), self._sketch[:, w:]
            trsm(R[:, :w], Y1, side="R", lower=False)
            gemm_accumulate(-1, Y1, R[:, w:], 1, Y2)
            self._sketch = Y2
