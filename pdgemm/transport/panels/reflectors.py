"""Reflectors I - V T V^H of panels: gathered to be factored, stored in a grid column, broadcast along grid rows.

V and T of a panel are in one array, V above T.  On the owner of the panel this array has all rows of V, grouped by grid
row, its own grid row first; on each rank of the owner's grid column it has the rank's rows of V, and in this form it is
broadcast along the grid row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from pdgemm.instrument.recorder import Then
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT, add_elements, scale
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule, cuts
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.gathered_panel import GatheredPanels
from pdgemm.transport.panels.task import ADDENDS, PANEL, SUMS, Copies, Task


class Reflectors:
    """The reflectors of two panels, one in use and one in flight, and all reflectors of this rank's grid column.

    One buffer "gathered" is enough.  Before a rank gathers another panel in it, the rank takes part in a column sum
    with all readers of the last panel, and these take part only after they have read the last panel.
    """

    def __init__(self, task: Task[HouseholderSchedule], stay: bool = False) -> None:
        """stay : after a panel is factored, its rows in A are overwritten with rows of V, instead of zeros."""
        self._task, self._plan, (self._i, self._j), self._stay = task, task.schedule, task.grid.coords, stay
        self._gathered = GatheredPanels(task)
        self._slots = task.slots("panels", "parts")
        self._arrived: list[Array] = [None, None]

    def get(self, number: int) -> tuple[Array, Array]:
        """Return this rank's rows of V, and T, of a panel that has arrived."""
        return self._split(self._arrived[number % 2], self._plan.steps[number])

    def free(self, number: int) -> None:
        """Wait until the slot of a panel is free: the sends of the panel that used it before are complete."""
        self._task.free(self._slots[number % 2])

    def wait(self, number: int) -> None:
        """Wait until a panel has arrived."""
        self._task.wait(self._slots[number % 2])

    def finish(self) -> None:
        for number in (0, 1):
            self.free(number)

    def gather(self, number: int) -> tuple[Array, Array]:
        """Gather a panel of A; return its rows, which its owner overwrites with V, and the buffer for T below them."""
        panel = self._plan.steps[number]
        X = self._whole(panel)
        self._gathered.gather(panel, X, self._slots[number % 2])
        return self._split(X, panel)

    def give_back(self, number: int) -> None:
        """Publish to each rank of the grid column its rows of V, and T."""
        panel = self._plan.steps[number]
        if len(self._plan.members(panel)) > 1:
            self._gathered.spread(panel, self._whole(panel), self._own(panel), self._slots[number % 2])
        elif self._task.comm("row").size > 1:
            self._task.finish_products()  # V and T are sent from where a device computes them

    def travel(self, number: int, again: bool = False) -> None:
        """Start to broadcast V and T along grid rows; unless `again`, first send them in the owner's grid column."""
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
        """Lend this rank's rows of A to the owner of a panel; broadcast its rows of V when these have arrived."""
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
        """Start to broadcast V and T along the grid row; with `ready`, readers need no signal before they read."""
        panel, slot = self._plan.steps[number], self._slots[number % 2]
        place = self._plan.places[panel][self._i]
        x = self._task.bring("row", panel.col, "reflectors", place, slot.buffer_a, slot, PANEL, ready)
        self._arrived[slot.number] = self._of(panel, x)

    def _own(self, panel: Panel) -> Array:
        return self._of(panel, self._task.workspace["reflectors"][self._plan.places[panel][self._i]])

    def _of(self, panel: Panel, buffer: Array) -> Array:
        """Return a buffer as the array of V and T of a panel in this rank's grid row."""
        return column_buffer(int(self._plan.heights[panel][self._i]) + panel.width, "F", panel.width, buffer)

    def _whole(self, panel: Panel) -> Array:
        """Return the owner's array with all rows of V, and T."""
        if len(self._plan.members(panel)) == 1:
            return self._own(panel)
        return self._gathered.whole(panel, self._task.workspace["gathered"], panel.width)

    def _split(self, x: Array, panel: Panel) -> tuple[Array, Array]:
        return x[: -panel.width], x[-panel.width :]


class ColumnSum:
    """Sums matrices W, in the buffer "sums", over ranks of a grid column, by a reduce-scatter and an all-gather.

    Cost per rank among q: 2 (q - 1)/q of the words of W, sent or read, in 2 (q - 1) messages.
    """

    def __init__(self, task: Task[Any]) -> None:
        self._task, self._slot = task, Slot(0, task.workspace["sums"], task.workspace["parts of sums"])

    def buffer(self, rows: int, cols: int) -> Array:
        """Return a new W (rows, cols), column-major, after waiting until the last W may be rewritten."""
        self.finish()
        return column_buffer(rows, "F", cols, self._slot.buffer_a)

    def finish(self) -> None:
        """Wait until the last W may be rewritten: no other rank reads it, and none of its messages is in flight."""
        self._task.wait(self._slot)
        self._task.free(self._slot)

    def __call__(self, W: Array, members: Sequence[int], finish: Callable[[Array], object]) -> None:
        """Add up W over these ranks, and apply `finish`: finish(X) overwrites columns X of the sum with the result."""
        task, slot, (w, n), me = self._task, self._slot, W.shape, self._task.grid.coords[0]
        slices = {r: slice(a, b) for r, a, b in zip(members, *(cuts(n, len(members))[at:] for at in (0, 1)))}
        own, others = W[:, slices[me]], [r for r in members if r != me]

        def add(_: int, sums: Array, x: Array) -> None:
            add_elements(x, column_buffer(w, "F", n, sums)[:, slices[me]])

        def copy(r: int, sums: Array, x: Array) -> None:
            CONVERT(x, column_buffer(w, "F", n, sums)[:, slices[r]])

        addends = task.fetch("sums", dict.fromkeys(others, own), add, slot, ADDENDS, slot.buffer_b, add_elements)
        self._exchange(addends, {r: W[:, slices[r]] for r in others}, ADDENDS)
        with task.computing():
            finish(own)
        task.free(slot)  # the slices of W that were sent are overwritten next
        sums = task.fetch("sums", {r: W[:, slices[r]] for r in others}, copy, slot, SUMS)
        self._exchange(sums, dict.fromkeys(others, own), SUMS)
        if others:
            task.release(others, slot)

    def _exchange(self, copies: Copies, parts: dict[int, Array], tag: int) -> None:
        """Publish parts of W to the other ranks, wait for the parts of these ranks, and carry out their copies."""
        self._task.finish_products()
        self._task.publish([*parts], lambda r, _: parts[r], self._slot, tag)
        self._task.wait(self._slot)
        with self._task.computing():
            for copy in copies:
                copy()
