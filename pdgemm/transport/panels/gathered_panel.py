"""Panels that one rank factors: their rows come to the owner of the diagonal block, and go back when it is done."""

from __future__ import annotations

from typing import Any

from pdgemm.grids.index_map import identity
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.panels.gathered_layout import slabs
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.panel_views import column_room
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import Task, Window

_GATHER, _SPREAD = 1 << 12, (1 << 12) + 1  # tags in a grid column


class GatheredPanels:
    """Gathers the rows of a panel from its first on, which all ranks of its grid column have, and brings them back.

    All ranks of the grid column call `gather`, its owner then `spread` and the others `receive`, panel by panel, and
    after the last one `finish`.  One buffer on each rank is enough: a rank that says that its next rows may be read has
    read the last ones.
    """

    def __init__(self, task: Task[Any], name: str = "A") -> None:
        self._task, self._name, self._schedule = task, name, task.schedule
        self._room, self._parts = task.workspace["gathered"], task.workspace["parts of panels"]
        self._slot = Slot(0, None, None)
        self._coming: Array = None

    def gather(self, panel: Panel) -> Array | None:
        """Return the panel, column-major, when it has arrived on its owner; start to send it on the other ranks.

        Its rows are in the order of `panel_schedules.gathered_layout.gathered_rows`.
        """
        task, slot, col, (i, _) = self._task, self._slot, self._task.grid.col, self._task.grid.coords
        parts, w = slabs(self._schedule.A.distribution.rows, panel), panel.width
        task.free(slot)
        if i != panel.row:
            self._send_own(panel, parts[i].stop - parts[i].start)
            return None
        X = self._buffer(self._room, panel)
        coming, at = dict[int, Array](), 0
        for r, part in parts.items():
            if r == i:
                continue
            if task.peers:
                task.follow(col, r, slot)
            elif rows := part.stop - part.start:
                coming[r] = column_room(rows, "F", w, self._parts[at : at + rows * w])
                at += rows * w
                task.recorder.traffic.received(rows * w)
                slot.arrivals.append(col.Irecv(wire(coming[r].T), source=r, tag=_GATHER))
        task.wait(slot)  # until others that read the last panel in X have done so
        self._copy(task.arrays[self._name][self._window(panel, i)], X[parts[i]])
        for r, part in parts.items():
            if r != i and part.start < part.stop:
                if task.peers:
                    coming[r] = task.peers(self._name, task.rank_in("col", r))[self._window(panel, r)]
                    task.recorder.traffic.read(coming[r].size)
                self._copy(coming[r], X[part])
        task.copied()
        return X

    def spread(self, panel: Panel) -> None:
        """Start to bring the panel back from its owner's buffer, which stores its own rows."""
        task, slot, col, (i, _) = self._task, self._slot, self._task.grid.col, self._task.grid.coords
        X, parts, at = self._buffer(self._room, panel), slabs(self._schedule.A.distribution.rows, panel), 0
        if task.peers and col.size > 1:
            task.announce(col, [r for r in range(col.size) if r != i], slot)
        for r, part in parts.items() if not task.peers else ():
            rows = part.stop - part.start
            if r == i or not rows:
                continue
            x = column_room(rows, "F", panel.width, self._parts[at : at + rows * panel.width])
            at += x.size
            self._copy(X[part], x)
            task.recorder.synchronize_copies()
            task.recorder.traffic.sent(x.size)
            slot.users.append(col.Isend(wire(x.T), dest=r, tag=_SPREAD))
        self._copy(X[parts[i]], task.arrays[self._name][self._window(panel, i)])
        task.copied()

    def receive(self, panel: Panel) -> None:
        """Wait until this rank's rows have come back from the owner, and store them."""
        task, (i, _) = self._task, self._task.grid.coords
        task.wait(self._slot)
        part = slabs(self._schedule.A.distribution.rows, panel)[i]
        if part.start < part.stop:
            x = self._coming
            if task.peers:
                x = self._buffer(task.peers("gathered", task.rank_in("col", panel.row)), panel)[part]
                task.recorder.traffic.read(x.size)
            self._copy(x, task.arrays[self._name][self._window(panel, i)])
            task.copied()

    def finish(self) -> None:
        """Wait until what was sent has left."""
        self._task.free(self._slot)

    def _send_own(self, panel: Panel, rows: int) -> None:
        """Let the owner have this rank's rows, and expect them back."""
        task, slot, col = self._task, self._slot, self._task.grid.col
        if task.peers:
            task.announce(col, [panel.row], slot)
            task.follow(col, panel.row, slot)
        elif rows:
            x, self._coming = (column_room(rows, "F", panel.width, self._parts[at:]) for at in (0, rows * panel.width))
            self._copy(task.arrays[self._name][self._window(panel, task.grid.coords[0])], x)
            task.recorder.synchronize_copies()
            task.recorder.traffic.sent(x.size)
            slot.users.append(col.Isend(wire(x.T), dest=panel.row, tag=_GATHER))
            task.recorder.traffic.received(x.size)
            slot.arrivals.append(col.Irecv(wire(self._coming.T), source=panel.row, tag=_SPREAD))

    def _window(self, panel: Panel, i: int) -> Window:
        """Return where the rows of a panel are in the local array of a rank of grid row i."""
        rows, cols = self._schedule.A.distribution.rows, self._schedule.A.distribution.cols
        return slice(rows.below(panel.start, i), rows.count(i)), cols.local_window(panel.start, panel.stop, panel.col)

    def _buffer(self, room: Array, panel: Panel) -> Array:
        return column_room(self._schedule.A.distribution.rows.n - panel.start, "F", panel.width, room)

    def _copy(self, source: Array, target: Array) -> None:
        if source.size:
            with self._task.packing():
                copy_blocks(source, target, identity(source.shape[0]), identity(source.shape[1]))
