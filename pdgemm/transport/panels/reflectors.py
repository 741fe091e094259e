"""Reflectors I - V T V^H of panels: gathered to be factored, kept in a grid column, brought to all grid rows.

V and T of a panel lie in one array, V above T: on its owner all rows of V, those of each grid row together, its own
first; on the ranks of the owner's grid column their rows of V, which is also how they travel along grid rows.
"""

from __future__ import annotations

from mpi4py import MPI

from pdgemm.instrument.recorder import Then
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT, scale
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.gathered_panel import GatheredPanels
from pdgemm.transport.panels.task import PANEL, Task


class Reflectors:
    """Has the reflectors of two panels, one in use and one on its way, and keeps those of this rank's grid column.

    One buffer "gathered" is enough: before its owner gathers another panel there, it has added up sums with all who
    read the last one, and they do that when they have read it.
    """

    def __init__(self, task: Task[HouseholderSchedule], stay: bool = False) -> None:
        """stay : rows of V take the place of those of A that were lent, instead of zeros."""
        self._task, self._plan, (self._i, self._j), self._stay = task, task.schedule, task.grid.coords, stay
        self._gathered = GatheredPanels(task)
        rooms = (task.workspace[name].reshape(2, -1) for name in ("panels", "parts"))
        self._slots = [Slot(number, *buffers) for number, buffers in enumerate(zip(*rooms))]
        self._arrived: list[Array] = [None, None]

    def get(self, number: int) -> tuple[Array, Array]:
        """Return this rank's rows of V, and T, of a panel that has arrived."""
        return self._split(self._arrived[number % 2], self._plan.steps[number])

    def free(self, number: int) -> None:
        """Wait until the last panel in the place of this one is not sent any more."""
        self._task.free(self._slots[number % 2])

    def wait(self, number: int) -> None:
        """Wait until a panel has arrived."""
        self._task.wait(self._slots[number % 2])

    def finish(self) -> None:
        for number in (0, 1):
            self.free(number)

    def gather(self, number: int) -> tuple[Array, Array]:
        """Return the rows of a panel of A, in which its owner makes V, and the buffer for T beneath them."""
        panel = self._plan.steps[number]
        X = self._whole(panel)
        self._gathered.gather(panel, X, self._slots[number % 2])
        return self._split(X, panel)

    def give_back(self, number: int) -> None:
        """Let the grid column have V and T."""
        panel = self._plan.steps[number]
        if len(self._plan.members(panel)) > 1:
            self._gathered.spread(panel, self._whole(panel), self._own(panel), self._slots[number % 2])

    def travel(self, number: int, again: bool = False) -> None:
        """Start to bring V and T along grid rows; the first time those of the owner's grid column get them before."""
        panel, slot = self._plan.steps[number], self._slots[number % 2]
        if again:
            self.free(number)
        if self._i not in self._plan.members(panel):
            return
        if self._j == panel.col and self._i != panel.row and not again:
            self._lend(number)
        else:
            self._bring(number, again)
        self._task.transfers.expect(slot.arrivals)

    def _lend(self, number: int) -> None:
        """Let the owner of a panel have this rank's rows, and take those of V; then these travel."""
        panel, task, slot = self._plan.steps[number], self._task, self._slots[number % 2]
        A, own = task.arrays["A"][self._plan.window(panel, self._i)], self._own(panel)
        copies = self._gathered.lend(panel, own, slot)

        def returned() -> None:
            with task.packing():
                for copy in copies:
                    copy()
                if self._stay:
                    CONVERT(A, self._split(own, panel)[0])
                else:
                    scale(0, A)
            task.copied()
            self._bring(number, False)

        slot.arrivals.append(Then(MPI.REQUEST_NULL, returned))

    def _bring(self, number: int, ready: bool) -> None:
        """Start to bring V and T along the grid row; `ready` says that all know that they may be read."""
        panel, slot = self._plan.steps[number], self._slots[number % 2]
        place = self._plan.places[panel][self._i]
        x = self._task.bring("row", panel.col, "reflectors", place, slot.buffer_a, slot, PANEL, ready)
        self._arrived[slot.number] = self._of(panel, x)

    def _own(self, panel: Panel) -> Array:
        return self._of(panel, self._task.workspace["reflectors"][self._plan.places[panel][self._i]])

    def _of(self, panel: Panel, buffer: Array) -> Array:
        """Return the buffer of V and T of a panel in this rank's grid row."""
        return column_buffer(int(self._plan.heights[panel][self._i]) + panel.width, "F", panel.width, buffer)

    def _whole(self, panel: Panel) -> Array:
        """Return the owner's array with all rows of V, and T."""
        if len(self._plan.members(panel)) == 1:
            return self._own(panel)
        return self._gathered.whole(panel, self._task.workspace["gathered"], panel.width)

    def _split(self, x: Array, panel: Panel) -> tuple[Array, Array]:
        return x[: -panel.width], x[-panel.width :]
