"""Right-looking LU factorisation with partial pivoting and look-ahead: Golub & Van Loan, Matrix Computations, 3.4.

On a block-cyclic layout: Choi, Dongarra, Ostrouchov, Petitet, Walker & Whaley, Scientific Programming 5(3), 1996.
"""

from __future__ import annotations

import numpy as np

from pdgemm.algorithms.panels.panel_run import PanelAlgorithm, cores_of_node, helpers
from pdgemm.local.arrays.device import Array
from pdgemm.local.blas import local_lapack
from pdgemm.schedules.panels.factor_schedules import LUSchedule
from pdgemm.schedules.panels.panel_schedule import INDEX, Panel, gathered_rows
from pdgemm.schedules.panels.row_moves import RowMoves, moves_left
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.gathered_panel import GatheredPanels
from pdgemm.transport.panels.row_exchange import exchange_rows
from pdgemm.transport.panels.task import DIAGONAL, PANEL, Copies, Line, Task
from pdgemm.transport.panels.tree_messages import descend, to_all

_PIVOTS = (1 << 12) + 4  # message tag


class LUPanels(PanelAlgorithm[LUSchedule]):
    """Overwrites A with U and with L below the diagonal, where P A = L U; the unit diagonal of L is not stored.

    exchanged : overwritten, also on idle ranks: for t = 0, 1, ... in turn, row t was exchanged with row exchanged[t].

    Cost per rank on Pr x Pc: 2n^3/(3 Pr Pc) flops; n^2/2 (1/Pr + 1/Pc) words in for L and U.  Summed over all ranks, at
    most n^2 words to gather panels and to return them, and 3 n^2/2 words to exchange rows.
    Error: |P A - L U| <= gamma_n |L||U| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 9.3).
    """

    def __init__(self, task: Task[LUSchedule], exchanged: np.ndarray) -> None:
        super().__init__(task)
        self._gathered, self._exchanged = GatheredPanels(task), exchanged
        self._gathering = Slot(0, None, task.workspace["parts of panels"])
        self._copies = Copies()
        self._pivots = np.zeros(self._plan.n, INDEX) if self._plan.device else task.workspace["pivots"]
        self._slots = task.slots("panels", "rows of U")
        self._panels = list[Array]([None, None])
        self._arriving = list[np.ndarray]([self._pivots[:0]] * 2)
        self._singular = 0

    def __call__(self) -> int:
        """Return the number, from 1 on, of the first zero pivot in the panels that this rank factored; 0 if none."""
        task, steps = self._task, () if self._task.grid.idle else self._plan.steps
        ranks = helpers(task.grid, self._plan.flops) if self._plan.in_place else 1
        with cores_of_node(task.grid, ranks):  # idle ranks lend their cores to the only rank of the grid
            for number, panel in enumerate(steps):
                slot, end = self._slots[number % 2], panel.stop
                if not number:
                    self._factor(panel, slot)
                U = self._receive(panel, slot)
                if number + 1 < len(steps):
                    following = steps[number + 1]
                    end = following.stop
                    self._update(panel, slot, U, following.start, end)
                    self._factor(following, self._slots[(number + 1) % 2])  # sent during the next update
                self._update(panel, slot, U, end, self._cols.n)
        for slot in (*self._slots, self._gathering):
            task.free(slot)
        task.finish()  # all ranks have read L in place, so the rows of L may be exchanged
        for panel, moves in moves_left(steps, self._pivots, self._rows.n) if len(steps) > 1 else ():
            if task.grid.coords[1] == panel.col:
                exchange_rows(task, moves, self._cols.local_window(panel.start, panel.stop, panel.col))
        if self._plan.n and task.grid.comm.rank in (tree := self._plan.to_idle).ranks:
            self._pivots[:] = descend(tree, task.grid.comm, self._pivots, to_all, task.recorder)
        self._exchanged[:] = self._pivots
        return self._singular

    def _factor(self, panel: Panel, slot: Slot) -> None:
        """Gather a panel on the owner of its diagonal block, factor it there, P A = L U, and transfer L and pivots."""
        task, gathered, (i, j) = self._task, self._gathered, self._task.grid.coords
        task.free(slot)
        if j == panel.col:
            own, in_place = self._A[self._plan.window(panel, i)], self._plan.in_place
            task.free(self._gathering)
            if i != panel.row and not in_place:
                self._copies = gathered.lend(panel, own, self._gathering, self._gathering.buffer_b[own.size :])
                return  # `_receive` waits for this rank's rows of L, and transfers them
        if (i, j) == (panel.row, panel.col):
            X = own if in_place else gathered.whole(panel, task.workspace["gathered"])
            pivots, info = np.arange(1, panel.width + 1, dtype=np.intc), 0
            if not in_place:
                gathered.gather(panel, X, self._gathering)
            with task.computing():
                info = local_lapack.getrf(X, pivots)
            self._singular = self._singular or (panel.start + info if info else 0)
            self._pivots[panel.start : panel.stop] = gathered_rows(self._rows, panel)[pivots - 1]
            if not in_place:
                gathered.spread(panel, X, own, self._gathering)
        self._travel(panel, slot)

    def _travel(self, panel: Panel, slot: Slot) -> None:
        """Transfer pivots along the grid column of a panel; start to transfer pivots and L along the grid rows."""
        task, (i, j) = self._task, self._task.grid.coords
        with task.recorder.phase("post"):
            if j == panel.col:
                pivots = self._bring_pivots("col", panel.row, panel, slot)
                task.wait(slot)
                self._pivots[panel.start : panel.stop] = pivots
            self._arriving[slot.number] = self._bring_pivots("row", panel.col, panel, slot)
            if panel.stop < self._cols.n:
                window = self._plan.window(panel, i)
                self._panels[slot.number] = task.bring("row", panel.col, "A", window, slot.buffer_a, slot, PANEL)

    def _receive(self, panel: Panel, slot: Slot) -> Array:
        """Wait for a panel, exchange rows in the columns to its right, and return U_kj = L_kk^-1 A_kj."""
        task, A, (i, j) = self._task, self._A, self._task.grid.coords
        if j == panel.col and i != panel.row and not self._plan.in_place:
            task.wait(self._gathering)
            with task.packing():
                for copy in self._copies:
                    copy()
            task.copied()
            self._travel(panel, slot)
        task.wait(slot)
        self._pivots[panel.start : panel.stop] = self._arriving[slot.number]
        diagonal = self._rows.local_window(panel.start, panel.stop, panel.row)
        right = slice(self._cols.below(panel.stop, j), A.shape[1])
        if panel.stop < self._cols.n:
            exchange_rows(task, RowMoves.of(self._pivots[panel.start : panel.stop], panel.start), right)
        if i == panel.row and panel.stop < self._cols.n:
            with task.computing():
                L = self._panels[slot.number][: panel.width]
                local_lapack.trsm(L, A[diagonal, right], unit=True)
        if panel.stop >= self._rows.n:
            return None
        U = task.bring("col", panel.row, "A", (diagonal, right), slot.buffer_b, slot, DIAGONAL)
        task.wait(slot)
        return U

    def _update(self, panel: Panel, slot: Slot, U: Array, start: int, stop: int) -> None:
        """A_ij := A_ij - L_ik U_kj in columns start to stop."""
        A, (i, j) = self._A, self._task.grid.coords
        first, cols = self._rows.below(panel.stop, i), slice(*(self._cols.below(x, j) for x in (start, stop)))
        if cols.start < cols.stop and first < A.shape[0]:
            L, right = self._panels[slot.number][first - A.shape[0] :], self._cols.below(panel.stop, j)
            self._task.update(L, U[:, cols.start - right : cols.stop - right], A[first:, cols])

    def _bring_pivots(self, line: Line, root: int, panel: Panel, slot: Slot) -> np.ndarray:
        """Start to transfer the pivots of a panel along a grid row or column; return the array that will hold them."""
        part = slice(panel.start, panel.stop)
        pivots = self._pivots[part]
        if not self._plan.device:
            return self._task.bring(line, root, "pivots", part, pivots, slot, _PIVOTS)
        if self._task.comm(line).size > 1:  # pivots are in private host memory, which no other rank reads
            self._task.send(line, pivots, root, slot, _PIVOTS)
        return pivots
