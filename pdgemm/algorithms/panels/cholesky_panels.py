"""Right-looking Cholesky factorisation with look-ahead: Golub & Van Loan, Matrix Computations, 4th ed., 4.2.9.

On a block-cyclic layout: Choi, Dongarra, Ostrouchov, Petitet, Walker & Whaley, Scientific Programming 5(3), 1996.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pdgemm.algorithms.panels.panel_run import PanelAlgorithm
from pdgemm.local.arrays.device import Array
from pdgemm.local.blas import local_lapack
from pdgemm.schedules.panels.factor_schedules import CholeskySchedule
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import DIAGONAL, PANEL, Task


class Cholesky(PanelAlgorithm[CholeskySchedule]):
    """Overwrites the lower triangle of A with L, where A = L L^H, and the strict upper triangle with zeros.

    Cost per rank on Pr x Pc: n^3/(3 Pr Pc) flops; n^2/2 (1/Pr + 1/Pc) words in, at most.
    Error: |A - L L^H| <= gamma_{n+1} |L||L^H| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 10.1).
    """

    def __init__(self, task: Task[CholeskySchedule]) -> None:
        super().__init__(task)
        self._slots = task.slots("panels", "transposed panels")
        self._arriving, self._diagonals = (task.workspace[x].reshape(2, -1) for x in ("arriving", "diagonals"))
        self._panels = list[tuple[Array, Array]]([(None, None)] * 2)
        self._copies = list[list[Callable[[], object]]]([[], []])
        self._failed = 0

    def __call__(self) -> int:
        """Return the order of the first leading minor that this rank found not to be positive definite; 0 if none."""
        steps = self._plan.steps
        if not steps:
            return 0
        self._factor(steps[0], self._slots[0])
        for number, panel in enumerate(steps[:-1]):
            slot, following = self._slots[number % 2], steps[number + 1]
            self._clear(steps[max(0, number - 1) : number])  # while the panel is sent
            self._receive(slot)
            self._update(panel, slot, following.start, following.stop)
            self._factor(following, self._slots[(number + 1) % 2])  # sent during the next update
            self._update(panel, slot, following.stop, self._plan.n)
        self._clear(steps[-2:])
        for slot in self._slots:
            self._task.free(slot)
        return self._failed

    def _factor(self, panel: Panel, slot: Slot) -> None:
        """Form L_kk, where A_kk = L_kk L_kk^H, and L_ik = A_ik L_kk^-H below; start the transfers of both."""
        task, A, (i, j) = self._task, self._A, self._task.grid.coords
        task.free(slot)
        cols = self._cols.local_window(panel.start, panel.stop, panel.col)
        diagonal = self._rows.local_window(panel.start, panel.stop, panel.row)
        behind = slice(self._rows.below(panel.stop, i), A.shape[0])
        if (i, j) == (panel.row, panel.col):
            with task.computing():
                info = local_lapack.potrf(A[diagonal, cols])
                if info:
                    self._failed = self._failed or panel.start + info
                    A[diagonal, cols] = np.nan  # all ranks continue, with NaN
        if panel.stop == self._plan.n:
            return
        if j == panel.col:
            L = task.bring("col", panel.row, "A", (diagonal, cols), self._diagonals[slot.number], slot, DIAGONAL)
            task.wait(slot)
            with task.computing():
                local_lapack.trsm(L, A[behind, cols], side="R", trans="C")
        with task.recorder.phase("post"):
            P = task.bring("row", panel.col, "A", (behind, cols), slot.buffer_a, slot, PANEL)
            n_loc = A.shape[1] - self._cols.below(panel.stop, j)
            Q = column_buffer(n_loc, self._plan.A.order, panel.width, slot.buffer_b)
            self._copies[slot.number] = task.bring_transposed(panel, P, "A", Q, self._arriving[slot.number], slot)
        self._panels[slot.number] = P, Q
        task.transfers.expect(slot.arrivals)

    def _receive(self, slot: Slot) -> None:
        """Wait until a panel has arrived, and copy the rows of its transpose that this rank needs."""
        self._task.wait(slot)
        with self._task.packing():
            for copy in self._copies[slot.number]:
                copy()
        self._task.copied()

    def _update(self, panel: Panel, slot: Slot, start: int, stop: int) -> None:
        """A_ij := A_ij - L_ik L_jk^H on and below the diagonal, in columns start to stop."""
        A, (P, Q), (i, j) = self._A, self._panels[slot.number], self._task.grid.coords
        down, right = self._rows.below(panel.stop, i), self._cols.below(panel.stop, j)
        for r, c, _, square in self._plan.tiles((i, j), start, stop):
            left = P[r.start - down : r.stop - down]
            if square:
                self._task.update_square(left, A[r, c])
                continue
            of_right = Q[c.start - right : c.stop - right]
            self._task.update(left, of_right.T, A[r, c], conjugate_b=A.dtype.kind == "c")

    def _clear(self, panels: Sequence[Panel]) -> None:
        """Set the elements above the diagonal blocks of complete panels to zero."""
        i, j = self._task.grid.coords
        for panel in panels:
            if j == panel.col:
                with self._task.computing():
                    cols = self._cols.local_window(panel.start, panel.stop, j)
                    self._A[: self._rows.below(panel.start, i), cols] = 0
