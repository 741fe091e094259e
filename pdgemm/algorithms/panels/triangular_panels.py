"""Triangular solves and products by panels, A stationary: Golub & Van Loan, Matrix Computations, 4th ed., 3.1.4."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.algorithms.panels.panel_run import PanelAlgorithm
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONJUGATE, CONVERT, scale
from pdgemm.local.blas import local_lapack
from pdgemm.schedules.panels.factor_schedules import TriangularSchedule
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import DIAGONAL, PANEL, Task


class _Panels(PanelAlgorithm[TriangularSchedule]):
    """The base of solves and products: panels of A, and block rows of B or X, are sent through two slots."""

    def __init__(self, task: Task[TriangularSchedule], alpha: Any = 1, unit: bool = False) -> None:
        super().__init__(task)
        self._alpha, self._unit, self._B = alpha, unit, task.arrays["B"]
        self._of_B = self._plan.B.distribution.cols
        self._slots = [Slot(x, *([np.empty(0)] * 2)) for x in range(2)]
        self._buffers = {name: task.workspace[name].reshape(2, -1) for name in ("panels", "rows", "diagonals")}
        self._held = list[tuple[Array, Array]]([(None, None)] * 2)

    def _local_rows(self, start: int, stop: int) -> slice:
        return self._rows.local_window(start, stop, self._task.grid.coords[0])

    def _local_cols(self, panel: Panel) -> slice:
        return self._of_B.local_window(*self._plan.columns(panel), self._task.grid.coords[1])

    def _triangle(self, panel: Panel, slot: Slot) -> Array:
        """Return A_kk in the memory order of B, conjugated if A is.  All ranks of the grid row of A_kk call this."""
        window = self._local_rows(panel.start, panel.stop), self._cols.local_window(panel.start, panel.stop, panel.col)
        buffer = self._buffers["diagonals"][slot.number]
        there = self._task.bring("row", panel.col, "A", window, buffer, slot, DIAGONAL, ready=True)
        self._task.wait(slot)
        w = panel.width
        here = column_buffer(w, self._plan.B.order, w, self._task.workspace["triangle"])
        with self._task.packing():
            (CONJUGATE if self._plan.A.conjugated else CONVERT)(here, there)
        self._task.copied()
        return here

    def _post(self, panel: Panel, slot: Slot) -> None:
        """Start to transfer a panel of A along the grid rows, and a block row of B or X along the grid columns."""
        task, plan, (start, stop) = self._task, self._plan, self._plan.rest(panel)
        if start == stop:
            return
        panels, rows = (self._buffers[name][slot.number] for name in ("panels", "rows"))
        with task.recorder.phase("post"):
            window = self._local_rows(start, stop), self._cols.local_window(panel.start, panel.stop, panel.col)
            A = task.bring("row", panel.col, "A", window, panels, slot, PANEL, ready=True)
            window = self._rows.local_window(panel.start, panel.stop, panel.row), self._local_cols(panel)
            B = task.bring("col", panel.row, "B", window, rows, slot, PANEL, ready=not plan.solves)
        self._held[slot.number] = A, B
        task.transfers.expect(slot.arrivals)

    def _receive(self, slot: Slot) -> None:
        """Wait until a panel of A and a block row of B or X have arrived; conjugate the panel where A is conjugated."""
        self._task.wait(slot)
        if self._plan.A.conjugated:
            A, B = self._held[slot.number]
            conjugate = column_buffer(A.shape[0], self._plan.A.order, A.shape[1], self._task.workspace["conjugate"])
            with self._task.packing():
                CONJUGATE(conjugate, A)
            self._task.copied()
            self._held[slot.number] = conjugate, B

    def _update(self, panel: Panel, slot: Slot, start: int, stop: int, C: Array, alpha: Any) -> None:
        """C_i := C_i + alpha A_ik B_k in the rows from start to stop."""
        (A, B), rows = self._held[slot.number], self._local_rows(start, stop)
        first = self._rows.below(self._plan.rest(panel)[0], self._task.grid.coords[0])
        self._task.update(A[rows.start - first : rows.stop - first], B, C[rows, self._local_cols(panel)], alpha)


class TriangularSolve(_Panels):
    """Overwrites B with X, where A X = alpha B, A is (n, n), and B and X are (n, m).

    Cost per rank on Pr x Pc: n^2 m/(Pr Pc) flops; n^2/2 (1 - 1/Pc)/Pr words of A in, and n m (1 - 1/Pr)/Pc of X.
    Error: (A + E) X = alpha B with |E| <= gamma_n |A| for each column (Higham 2002, theorem 8.5).
    """

    def __call__(self) -> None:
        steps = self._plan.steps
        if not steps:
            return
        if self._alpha != 1:
            with self._task.computing():
                scale(self._alpha, self._B)
        self._solve(steps[0], self._slots[0])
        for number, panel in enumerate(steps[:-1]):
            slot, following = self._slots[number % 2], steps[number + 1]
            self._receive(slot)
            self._update(panel, slot, following.start, following.stop, self._B, -1)
            self._solve(following, self._slots[(number + 1) % 2])  # X_k is sent while the other rows are updated
            self._update(panel, slot, *self._plan.rest(following), self._B, -1)
        for slot in self._slots:
            self._task.free(slot)

    def _solve(self, panel: Panel, slot: Slot) -> None:
        """X_k := A_kk^-1 B_k; then start to transfer X_k and the panel of A."""
        self._task.free(slot)
        if self._task.grid.coords[0] == panel.row:
            triangle = self._triangle(panel, slot)
            X = self._B[self._local_rows(panel.start, panel.stop), self._local_cols(panel)]
            with self._task.computing():
                local_lapack.trsm(triangle, X, lower=self._plan.lower, unit=self._unit)
        self._post(panel, slot)


class TriangularProduct(_Panels):
    """C := alpha A B.  Cost as for `TriangularSolve`; error: |C - C^| <= gamma_n |alpha||A||B|."""

    def __call__(self) -> None:
        task, steps, C = self._task, self._plan.steps, self._task.arrays["C"]
        if not steps:
            return
        with task.computing():
            scale(0, C)
        self._post(steps[0], self._slots[0])
        for number, panel in enumerate(steps):
            slot, other = (self._slots[x % 2] for x in (number, number + 1))
            if number + 1 < len(steps):
                task.free(other)
                self._post(steps[number + 1], other)
                self._receive(slot)
                self._update(panel, slot, *self._plan.rest(panel), C, self._alpha)
            if task.grid.coords[0] == panel.row:
                triangle = self._triangle(panel, slot)
                with task.computing():
                    local_lapack.keep_triangle(triangle, self._plan.lower, self._unit)
                rows = self._local_rows(panel.start, panel.stop)
                task.update(triangle, self._B[rows], C[rows], self._alpha)
        for slot in self._slots:
            task.free(slot)
