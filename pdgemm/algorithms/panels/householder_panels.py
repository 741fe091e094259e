"""QR factorisation by blocked Householder reflections, with look-ahead, or with column pivoting in a random sketch.

Schreiber & Van Loan, A storage-efficient WY representation for products of Householder transformations, SIAM J. Sci.
Stat. Comput. 10(1), 1989.  Pivots: Duersch & Gu, Randomized QR with column pivoting, SIAM J. Sci. Comput. 39(4), 2017;
Martinsson, Quintana-Orti, Heavner & van de Geijn, Householder QR factorization with randomization for column pivoting,
SIAM J. Sci. Comput. 39(2), 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from pdgemm.algorithms.panels.panel_run import PanelAlgorithm
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.device import Array, beside, empty, of, to_host
from pdgemm.local.arrays.element_functions import element_function, fill
from pdgemm.local.arrays.elementwise import CONVERT, scale, set_elements
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_lapack import keep_triangle, multiply_triangular, trsm
from pdgemm.local.blas.local_qr import compact_qr, pivots_of, reflect_rows
from pdgemm.schedules.panels.householder_schedule import (
    HouseholderSchedule,
    PivotedSchedule,
    ReflectorsSchedule,
    beginning_with,
)
from pdgemm.schedules.panels.panel_schedule import INDEX, Panel
from pdgemm.schedules.panels.row_moves import RowMoves
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.panels.gathered_panel import gathered_window
from pdgemm.transport.panels.reflectors import ColumnSum, Reflectors
from pdgemm.transport.panels.row_exchange import exchange_rows
from pdgemm.transport.panels.task import Task


class Householder(PanelAlgorithm[HouseholderSchedule]):
    """Overwrites A (m, n) with R, and Q (m, k) with the orthonormal factor: A = Q R, k = min(m, n).

    On entry Q holds the first k columns of the identity.  Each panel of A is (I - V T V^H) R, where V is unit lower
    trapezoidal and T upper triangular.  V and T are stored; Q is formed from the last panel to the first.

    tau : if not None, V, without its unit diagonal, is stored below the diagonal of A, and the owner of the diagonal
        block of each panel writes the diagonal of T to tau.
    order : if not None, the columns of each panel are exchanged such that |r_jj| descends, and that owner writes their
        order to this array, as indices counted from the panel's first column.

    Cost per rank on Pr x Pc, m >= n: (2 m n^2 - 2/3 n^3)/(Pr Pc) flops for R, and as many for Q.
    Error: columnwise |A - Q R| <= gamma_{mn} |A|, for any A (Higham, Accuracy and Stability, 2002, 19.4).
    """

    def __init__(
        self, task: Task[HouseholderSchedule], tau: np.ndarray | None = None, order: np.ndarray | None = None
    ) -> None:
        super().__init__(task)
        self._order, self._tau = order, tau
        self._reflectors, self._sum = Reflectors(task, stay=tau is not None), ColumnSum(task)

    def __call__(self) -> None:
        steps = self._plan.steps
        if not steps:
            return
        self._factor(0)
        for number in range(len(steps)):
            self._reflectors.wait(number)
            columns = self._plan.updates(number)
            self._reflect(number, self._A, columns[0], "C")
            if len(columns) > 1:
                self._factor(number + 1)  # sent during the next reflection
                self._reflect(number, self._A, columns[1], "C")
        if self._plan.wants_q:
            self._form_q()
        self._sum.finish()
        self._reflectors.finish()

    def _form_q(self) -> None:
        """Q := (I - V_1 T_1 V_1^H) (I - V_2 T_2 V_2^H) ... Q, from the last panel to the first."""
        steps, k = self._plan.steps, min(self._plan.A.distribution.shape)
        self._reflectors.travel(len(steps) - 1, again=True)
        for number in reversed(range(len(steps))):
            if number:
                self._reflectors.travel(number - 1, again=True)
            self._reflectors.wait(number)
            self._reflect(number, self._task.arrays["Q"], (steps[number].start, k), "N")

    def _factor(self, number: int) -> None:
        """Gather a panel on the owner of its diagonal block, factor it there, and start the transfers of V and T."""
        panel, reflectors, i = self._plan.steps[number], self._reflectors, self._task.grid.coords[0]
        reflectors.free(number)
        if self._task.grid.coords == (panel.row, panel.col):
            V, T = reflectors.gather(number)
            A = self._A[self._plan.window(panel, i)]
            with self._task.computing():
                R = empty(T.shape, T.dtype, "F", of(T))
                compact_qr(V, R, T, None if self._order is None else self._order[panel.start : panel.stop])
                CONVERT(A[: panel.width], R)
                scale(0, A[panel.width :])
                if self._tau is not None:
                    self._tau[panel.start : panel.stop] = to_host(T).diagonal()
                    both = np.tril(to_host(V[: len(A)]), -1)
                    both[: panel.width] += to_host(R)
                    set_elements(A, both)
            reflectors.give_back(number)
        reflectors.travel(number)

    def _reflect(self, number: int, C: Array, columns: tuple[int, int], trans: str) -> None:
        """C := (I - V op(T) V^H) C, in columns columns[0] to columns[1], and in rows from the panel's start on."""
        panel, task, (i, j) = self._plan.steps[number], self._task, self._task.grid.coords
        C = C[self._rows.below(panel.start, i) :, self._cols.local_window(*columns, j)]
        if not C.size:
            return
        V, T = self._reflectors.get(number)
        W = self._sum.buffer(panel.width, C.shape[1])
        with task.computing():
            gemm_accumulate(1, V.T, C, 0, W, conjugate_a=C.dtype.kind == "c")
        self._sum(W, self._plan.members(panel), partial(multiply_triangular, T, lower=False, trans=trans))
        task.update(V, W, C)


class AppliedReflectors(PanelAlgorithm[ReflectorsSchedule]):
    """Computes X := H_1 H_2 ... H_k X, with the reflectors below the diagonal of F, and their factors tau.

    X (m, n): each column is on one rank.  F (m, k): in any layout over the same ranks.

    Cost: 2 n k (2 m - k) flops on all ranks together, and m k^2 on each rank; m k - k^2/2 words in for each rank.
    """

    def __init__(self, task: Task[ReflectorsSchedule], tau: np.ndarray) -> None:
        super().__init__(task)
        self._tau = tau

    def __call__(self) -> None:
        task, plan = self._task, self._plan
        for columns in plan.columns:
            V = gathered_window(task, "F", plan.F, plan.gathering(columns), *plan.factor(columns))
            with task.computing():
                keep_triangle(V[: V.shape[1]], unit=True)
                self._reflect(V, self._tau[columns], self._A[columns.start :])

    def _reflect(self, V: Array, tau: np.ndarray, X: Array) -> None:
        """X := (I - V T V^H) X, where T^-1 = diag(tau)^-1 + the strict upper triangle of V^H V."""
        if not X.size:
            return
        G = np.empty((len(tau), len(tau)), V.dtype, "F")
        gemm_accumulate(1, V.T, V, 0, G, conjugate_a=V.dtype.kind == "c")
        T = np.linalg.solve(np.eye(len(tau)) + tau[:, None] * np.triu(G, 1), np.diag(tau)).astype(V.dtype)
        reflect_rows(V, np.asfortranarray(T), X, self._task.workspace["products"])


@dataclass(frozen=True)
class ChosenColumns:
    """The pivots that a factorisation has chosen, and host memory for choosing them.

    tau : as for `Householder`.   p : the column numbers of A, overwritten with their new order on all grid ranks.
    sketch, rows : 1-D buffers for a sketch, and for rows of R.
    chosen, drawn : filled during the run; `PivotedSchedule` has fields of these names for them.
    """

    tau: np.ndarray
    p: np.ndarray
    sketch: np.ndarray
    rows: np.ndarray
    chosen: list[tuple[int, ...]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


class PivotedHouseholder(Householder):
    """Overwrites A (m, n) with R and the reflectors of Q, where A P = Q R, as `Householder` with tau.

    Y = G X is a sketch of the trailing matrix X, where G has normal random numbers.  The columns of Y have about the
    same relative lengths as the columns of X, and the same distances to the span of other columns: LAPACK's geqp3 of Y
    chooses the columns of a panel, and geqp3 of the panel orders them.  If X P = Q [R11 R12; 0 X'] and
    G X P = [Y1 Y2], then Y2 - Y1 R11^-1 R12 is a sketch of X'.  Its rounding errors are about eps |G X_0|, where X_0 is
    the trailing matrix for which a sketch was last drawn.  So a new sketch is drawn if |X'| may be less than
    sqrt(eps) |X_0|.

    Cost per rank on P ranks: that of `Householder`, and 2 m n b/P flops for each sketch of b rows; on the first rank
    also 3 n^2 b flops to choose columns and to update the sketch.
    """

    def __init__(self, task: Task[PivotedSchedule], pivots: ChosenColumns) -> None:
        self._orders = np.zeros(len(pivots.tau), INDEX)  # the order of columns in each panel
        super().__init__(task, pivots.tau, order=self._orders)
        self._schedule, self._pivots = task.schedule, pivots
        self._sketch: np.ndarray | None = None  # Y, only on the first rank; None: it is to be drawn
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
        """Choose the columns of a panel, and exchange them with the columns that are now in the panel."""
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
            pivots[:] = range(panel.width)  # in case the next line runs out of memory
            with self._task.computing():
                pivots[:] = pivots_of(self._sketch.copy(order="F"))[: panel.width]
        return self._tell(panel, self._schedule.ranks[0], pivots)

    def _reorder(self, panel: Panel) -> None:
        """Give the columns of R above a panel the order that the panel's columns got when the panel was factored."""
        part, i = slice(panel.start, panel.stop), self._task.grid.coords[0]
        order = self._tell(panel, self._schedule.A.rank(panel.row, panel.col), self._orders[part])
        moves = RowMoves.to(np.arange(panel.start, panel.stop), panel.start + order)
        self._exchange(moves, slice(self._rows.below(panel.start, i)))

    def _tell(self, panel: Panel, root: int, numbers: np.ndarray) -> np.ndarray:
        """Broadcast the column numbers of rank `root` to all ranks, and return them."""
        self._task.carry_out(self._schedule.telling(panel, root), numbers)
        return numbers

    def _exchange(self, moves: RowMoves, rows: slice = slice(None)) -> None:
        """Exchange columns of A, in these local rows, and the same elements of p."""
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
        """Update the first rank's sketch after a panel: use the panel's rows of R to sketch the new trailing matrix."""
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
