"""Sums over a grid column: each of its ranks adds up a slice, finishes it, and all get the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import CONVERT, add_elements
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.householder_schedule import cuts
from pdgemm.transport.movers.panel_views import column_room
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import Task

_ADDENDS, _SUMS = 6, 7  # tags


class ColumnSum:
    """Sums matrices W, which lie in the buffer "sums", over ranks of a grid column: a reduce-scatter, an allgather.

    Cost per rank among q: 2 (q - 1)/q of the words of W, sent or read, in 2 (q - 1) messages.
    """

    def __init__(self, task: Task[Any]) -> None:
        self._task = task
        self._slot, self._read = (Slot(x, task.workspace["sums"], task.workspace["parts of sums"]) for x in range(2))

    def room(self, rows: int, cols: int) -> Array:
        """Return W (rows, cols), column-major, to be written: the last one is not read or sent any more."""
        self.finish()
        return column_room(rows, "F", cols, self._slot.buffer_a)

    def finish(self) -> None:
        """Wait until the last W is not read or sent any more."""
        self._task.wait(self._read)
        self._task.free(self._slot)

    def __call__(self, W: Array, members: Sequence[int], finish: Callable[[Array], object]) -> None:
        """W := f(the sum of W over these ranks), where finish(X) is X := f(X), of any columns of W."""
        task, (w, n), me = self._task, W.shape, self._task.grid.coords[0]
        slices = {r: slice(a, b) for r, a, b in zip(members, *(cuts(n, len(members))[at:] for at in (0, 1)))}
        own, others = W[:, slices[me]], [r for r in members if r != me]
        parts = [own if task.peers else self._slot.buffer_b[at * own.size :] for at in range(len(others))]
        rooms = [x if task.peers else column_room(w, "F", own.shape[1], x) for x in parts]
        pieces = {r: (W[:, slices[r]], slices[me], x) for r, x in zip(others, rooms)}
        addends = self._exchange(pieces, W.shape, _ADDENDS)
        with task.recorder.phase("compute"):
            for x in addends.values():
                add_elements(own, x)
            finish(own)
        task.free(self._slot)  # what was sent of W is overwritten
        sums = self._exchange({r: (own, slices[r], W[:, slices[r]]) for r in others}, W.shape, _SUMS)
        with task.recorder.phase("compute"):
            for r, x in sums.items() if task.peers else ():
                CONVERT(W[:, slices[r]], x)
        if task.peers and others:
            task.announce(task.grid.col, others, self._slot)
            for r in others:
                task.follow(task.grid.col, r, self._read)

    def _exchange(
        self, of: dict[int, tuple[Array, slice, Array]], shape: tuple[int, int], tag: int
    ) -> dict[int, Array]:
        """Send a slice to each of some ranks, and return those that they have for this rank.

        of : by rank, what it gets; which columns of its W this rank gets; and the room for them where they are sent.
        """
        task, slot, comm = self._task, self._slot, self._task.grid.col
        if task.peers:
            task.announce(comm, of, slot)
            for r in of:
                task.follow(comm, r, slot)
            task.wait(slot)
            found = {
                r: column_room(shape[0], "F", shape[1], task.peers("sums", task.rank_in("col", r)))[:, there]
                for r, (_, there, _) in of.items()
            }
            task.recorder.traffic.read(sum(x.size for x in found.values()))
            return found
        task.finish_products()
        for r, (_, _, x) in of.items():
            if x.size:
                slot.arrivals.append(task.recorder.coming(RING.name, x, comm.Irecv(wire(x), source=r, tag=tag)))
        for r, (x, _, _) in of.items():
            if x.size:
                task.recorder.traffic.sent(x.size)
                slot.users.append(comm.Isend(wire(x), dest=r, tag=tag))
        task.wait(slot)
        return {r: x for r, (_, _, x) in of.items()}
