"""Reflectors I - V T V^H of panels: gathered to be factored, kept in a grid column, brought to all grid rows.

V and T of a panel lie in one array, V above T: on its owner all rows of V, those of each grid row together, its own
first; on the ranks of the owner's grid column their rows of V, which is also how they travel along grid rows.
"""

from __future__ import annotations

from pdgemm.instrument.recorder import Then
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import CONVERT, scale
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.gathered_layout import slabs
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.movers.panel_views import column_room
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import PANEL, Task, Window

_LENT, _RETURNED = 2, 4  # tags in a grid column, for two slots each


class Reflectors:
    """Has the reflectors of two panels, one in use and one on its way, and keeps those of this rank's grid column.

    One buffer "gathered" is enough: before its owner gathers another panel there, it has added up sums with all who
    read the last one, and they do that when they have read it.
    """

    def __init__(self, task: Task[HouseholderSchedule], stay: bool = False) -> None:
        """stay : rows of V take the place of those of A that were lent, instead of zeros."""
        self._task, self._plan, (self._i, self._j), self._stay = task, task.schedule, task.grid.coords, stay
        rooms = (task.workspace[name].reshape(2, -1) for name in ("panels", "parts"))
        self._slots = [Slot(number, *buffers) for number, buffers in enumerate(zip(*rooms))]
        self._found: list[Array] = [None, None]

    def get(self, number: int) -> tuple[Array, Array]:
        """Return this rank's rows of V, and T, of a panel that has arrived."""
        return self._split(self._found[number % 2], self._plan.steps[number])

    def free(self, number: int) -> None:
        """Wait until the last panel in the place of this one is not sent any more."""
        self._task.free(self._slots[number % 2])

    def wait(self, number: int) -> None:
        """Wait until a panel has arrived."""
        self._task.wait(self._slots[number % 2])

    def finish(self) -> None:
        for number in (0, 1):
            self.free(number)

    def window(self, panel: Panel, i: int) -> Window:
        """Return the local indices of a panel, from its start on, in grid row i."""
        rows, cols = self._plan.A.distribution.rows, self._plan.A.distribution.cols
        return slice(rows.below(panel.start, i), None), cols.local_window(panel.start, panel.stop, panel.col)

    def gather(self, number: int) -> tuple[Array, Array]:
        """Return the rows of a panel of A, in which its owner makes V, and the room for T beneath them."""
        panel, task, comm = self._plan.steps[number], self._task, self._task.grid.col
        slot, X, parts = self._slots[number % 2], self._whole(panel), slabs(self._plan.rows, panel)
        room, found = slot.buffer_b, {self._i: task.arrays["A"][self.window(panel, self._i)]}
        for r in self._plan.members(panel)[1:]:
            words = X[parts[r]].size
            if task.peers:
                task.follow(comm, r, slot)
                task.recorder.traffic.read(words)
                found[r] = task.peers("A", task.rank_in("col", r))[self.window(panel, r)]
            else:
                found[r], room = column_room(words // panel.width, "F", panel.width, room), room[words:]
                request = comm.Irecv(wire(found[r]), source=r, tag=_LENT + slot.number)
                slot.arrivals.append(task.recorder.coming(RING.name, found[r], request))
        task.wait(slot)
        with task.packing():
            for r, x in found.items():
                CONVERT(X[parts[r]], x)
        task.copied()
        return self._split(X, panel)

    def give_back(self, number: int) -> None:
        """Let the grid column have V and T."""
        panel, task = self._plan.steps[number], self._task
        slot, X, (_, *others) = self._slots[number % 2], self._whole(panel), self._plan.members(panel)
        room = slot.buffer_b
        if not others:
            return
        if task.peers:
            task.announce(task.grid.col, others, slot)
        for r in others if not task.peers else ():
            x = self._of(panel, r, room)
            room = room[x.size :]
            self._take(panel, r, X, x)
            task.recorder.synchronize_copies()
            task.recorder.traffic.sent(x.size)
            slot.users.append(task.grid.col.Isend(wire(x), dest=r, tag=_RETURNED + slot.number))
        self._take(panel, self._i, X, self._own(panel))
        task.copied()

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
        panel, task, comm, slot = self._plan.steps[number], self._task, self._task.grid.col, self._slots[number % 2]
        A, own = task.arrays["A"][self.window(panel, self._i)], self._own(panel)

        def returned() -> None:
            if task.peers:
                task.peers.memory.fence()
                gathered = task.peers("gathered", task.rank_in("col", panel.row))
                self._take(panel, self._i, self._whole(panel, gathered), own)
                task.recorder.traffic.read(own.size)
            with task.packing():
                if self._stay:
                    CONVERT(A, self._split(own, panel)[0])
                else:
                    scale(0, A)
            task.copied()
            self._bring(number, False)

        if task.peers:
            task.announce(comm, [panel.row], slot)
            task.follow(comm, panel.row, slot, returned)
            return
        part = column_room(A.shape[0], "F", panel.width, slot.buffer_b)
        with task.packing():
            CONVERT(part, A)
        task.recorder.synchronize_copies()
        task.recorder.traffic.sent(part.size)
        slot.users.append(comm.Isend(wire(part), dest=panel.row, tag=_LENT + slot.number))
        request = comm.Irecv(wire(own), source=panel.row, tag=_RETURNED + slot.number)
        slot.arrivals.append(Then(task.recorder.coming(RING.name, own, request), returned))

    def _bring(self, number: int, ready: bool) -> None:
        """Start to bring V and T along the grid row; `ready` says that all know that they may be read."""
        panel, task, slot, row = self._plan.steps[number], self._task, self._slots[number % 2], self._task.grid.row
        here = self._j == panel.col
        if task.peers and here:
            x = self._own(panel)
            if not ready and row.size > 1:
                task.announce(row, [c for c in range(row.size) if c != self._j], slot)
        elif task.peers:
            if not ready:
                task.follow(row, panel.col, slot)
            there = task.peers("reflectors", task.rank_in("row", panel.col))
            x = self._of(panel, self._i, there[self._plan.places[panel][self._i]])
            task.recorder.traffic.read(x.size)
        else:
            x = self._own(panel) if here else self._of(panel, self._i, slot.buffer_a)
            task.send("row", x, panel.col, slot, PANEL)
        self._found[slot.number] = x

    def _own(self, panel: Panel) -> Array:
        return self._of(panel, self._i, self._task.workspace["reflectors"][self._plan.places[panel][self._i]])

    def _of(self, panel: Panel, i: int, room: Array) -> Array:
        """Return room for V and T of a panel in grid row i."""
        return column_room(int(self._plan.heights[panel][i]) + panel.width, "F", panel.width, room)

    def _whole(self, panel: Panel, gathered: Array = None) -> Array:
        """Return the array with all rows of V, and T: on the owner, or elsewhere in its buffer "gathered"."""
        if len(self._plan.members(panel)) == 1:
            return self._own(panel)
        room = self._task.workspace["gathered"] if gathered is None else gathered
        return column_room(self._plan.rows.n - panel.start + panel.width, "F", panel.width, room)

    def _take(self, panel: Panel, i: int, X: Array, x: Array) -> None:
        """Copy the rows of V of a grid row, and T, from all rows."""
        (V, T), (v, t) = self._split(X, panel), self._split(x, panel)
        with self._task.packing():
            CONVERT(v, V[slabs(self._plan.rows, panel)[i]])
            CONVERT(t, T)

    def _split(self, x: Array, panel: Panel) -> tuple[Array, Array]:
        return x[: -panel.width], x[-panel.width :]
