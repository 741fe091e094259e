"""Panels that one rank factors: their rows come to the owner of the diagonal block, and go back when it is done."""

from __future__ import annotations

from typing import Any

from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.schedules.panels.gathered_layout import panel_slabs
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import Copies, Task

_GATHER, _SPREAD = 1 << 12, (1 << 12) + 6  # tags in a grid column, for two slots each


class GatheredPanels:
    """Gathers the rows of a panel of A from its first on, which are all over its grid column, and brings them back.

    The owner of a panel calls `gather` and then `spread`, the others `lend`.  The whole panel lies on its owner in X,
    column-major, in the order of `gathered_layout.gathered_rows`; what is beneath these rows goes back to all.  One
    buffer X on each rank is enough where a rank that says that its next rows may be read has read the last ones.
    """

    def __init__(self, task: Task[Any]) -> None:
        self._schedule, self._A, self._task = task.schedule, task.arrays["A"], task
        self._rows, self._i = task.schedule.A.distribution.rows, task.grid.coords[0]

    def whole(self, panel: Panel, buffer: Array, beneath: int = 0) -> Array:
        """Return X in a buffer, with some rows more."""
        return column_buffer(self._rows.n - panel.start + beneath, "F", panel.width, buffer)

    def gather(self, panel: Panel, X: Array, slot: Slot) -> None:
        """X := the rows of the panel that all have, when these have arrived."""
        task, parts, others = self._task, panel_slabs(self._rows, panel), self._schedule.members(panel)[1:]

        def read(r: int, A: Array, x: Array) -> None:
            CONVERT(x, A[self._schedule.window(panel, r)])

        copies = task.fetch("A", {r: X[parts[r]] for r in others}, read, slot, _GATHER, slot.buffer_b)
        task.wait(slot)  # until others that read the last panel in X have done so
        with task.packing():
            read(self._i, self._A, X[parts[self._i]])
            for copy in copies:
                copy()
        task.copied()

    def spread(self, panel: Panel, X: Array, own: Array, slot: Slot) -> None:
        """Let the other ranks have their rows of X, and what is beneath all of them; own := this rank's."""
        task, parts, others = self._task, panel_slabs(self._rows, panel), self._schedule.members(panel)[1:]

        def packed(r: int, buffer: Array) -> Array:
            height = parts[r].stop - parts[r].start + X.shape[0] - (self._rows.n - panel.start)
            x = column_buffer(height, "F", panel.width, buffer)
            with task.packing():
                self._take(panel, r, X, x)
            task.recorder.synchronize_copies()
            return x

        if others:
            task.publish(others, packed, slot, _SPREAD)
        with task.packing():
            self._take(panel, self._i, X, own)
        task.copied()

    def lend(self, panel: Panel, own: Array, slot: Slot, buffer: Array = None) -> Copies:
        """Let the owner of a panel have this rank's rows; own := those that come back from X, and what is beneath.

        buffer : where they come to if they are sent; None: to `own` at once.
        """
        task, A = self._task, self._A[self._schedule.window(panel, self._i)]

        def packed(r: int, buffer: Array) -> Array:
            x = column_buffer(A.shape[0], "F", panel.width, buffer)
            with task.packing():
                CONVERT(x, A)
            task.recorder.synchronize_copies()
            return x

        def read(r: int, gathered: Array, own: Array) -> None:
            self._take(panel, self._i, self.whole(panel, gathered, own.shape[0] - A.shape[0]), own)

        task.publish([panel.row], packed, slot, _GATHER)
        return task.fetch("gathered", {panel.row: own}, read, slot, _SPREAD, buffer)

    def _take(self, panel: Panel, i: int, X: Array, x: Array) -> None:
        """x := the rows of X that are of a grid row, and what is beneath all of them."""
        part = panel_slabs(self._rows, panel)[i]
        height = part.stop - part.start
        CONVERT(x[:height], X[part])
        CONVERT(x[height:], X[self._rows.n - panel.start :])
