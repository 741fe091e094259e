"""Panels that are gathered: on the owner of the diagonal block, which factors and scatters them, or on all ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Layout, Order
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.panels.panel_schedule import Panel, panel_slabs
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import GATHER, SPREAD, Copies, Task


class GatheredPanels:
    """Gathers the rows of a panel of A, from the panel's first row on, from its grid column, and scatters them back.

    The owner of a panel calls `gather` and then `spread`, the other ranks `lend`.  The owner has the whole panel in X,
    column-major, in the row order of `panel_schedule.gathered_rows`; rows beneath the panel in X are sent to all ranks.
    One buffer X per rank is enough if each rank reads its rows of one panel before it signals that its rows of the
    next panel may be read.
    """

    def __init__(self, task: Task[Any]) -> None:
        self._schedule, self._A, self._task = task.schedule, task.arrays["A"], task
        self._rows, self._i = task.schedule.A.distribution.rows, task.grid.coords[0]

    def whole(self, panel: Panel, buffer: Array, beneath: int = 0) -> Array:
        """Return X as a view of a buffer, with `beneath` more rows than the panel."""
        return column_buffer(self._rows.n - panel.start + beneath, "F", panel.width, buffer)

    def gather(self, panel: Panel, X: Array, slot: Slot) -> None:
        """Set X := the rows of the panel on all ranks, after waiting for them."""
        task, parts, others = self._task, panel_slabs(self._rows, panel), self._schedule.members(panel)[1:]

        def read(r: int, A: Array, x: Array) -> None:
            CONVERT(x, A[self._schedule.window(panel, r)])

        copies = task.fetch("A", {r: X[parts[r]] for r in others}, read, slot, GATHER, slot.buffer_b)
        task.wait(slot)  # the messages, or signals, of the others also mean that they have read the last panel in X
        with task.packing():
            read(self._i, self._A, X[parts[self._i]])
            for copy in copies:
                copy()
        task.copied()

    def spread(self, panel: Panel, X: Array, own: Array, slot: Slot) -> None:
        """Publish to each other rank its rows of X and the rows beneath the panel; own := the same for this rank."""
        task, parts, others = self._task, panel_slabs(self._rows, panel), self._schedule.members(panel)[1:]

        def packed(r: int, buffer: Array) -> Array:
            height = parts[r].stop - parts[r].start + X.shape[0] - (self._rows.n - panel.start)
            x = column_buffer(height, "F", panel.width, buffer)
            with task.packing():
                self._take(panel, r, X, x)
            task.recorder.synchronize_copies()
            return x

        if others:
            task.publish(others, packed, slot, SPREAD)
        with task.packing():
            self._take(panel, self._i, X, own)
        task.copied()

    def lend(self, panel: Panel, own: Array, slot: Slot, buffer: Array = None) -> Copies:
        """Publish this rank's rows to the owner of a panel; own := its rows of X, and the rows beneath the panel.

        buffer : rows that are sent back are received here, and then copied to `own`; None: they are received in `own`.
        Returns the copies to `own`, to be carried out when the arrivals of the slot are complete.
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

        task.publish([panel.row], packed, slot, GATHER)
        return task.fetch("gathered", {panel.row: own}, read, slot, SPREAD, buffer)

    def _take(self, panel: Panel, i: int, X: Array, x: Array) -> None:
        """Set x := the rows of X that belong to grid row i, and below them the rows beneath the panel."""
        part = panel_slabs(self._rows, panel)[i]
        height = part.stop - part.start
        CONVERT(x[:height], X[part])
        CONVERT(x[height:], X[self._rows.n - panel.start :])


def gathered_window(
    task: Task[Any],
    name: str,
    layout: Layout,
    gathering: Collective,
    rows: tuple[int, int],
    cols: tuple[int, int],
    order: Order = "F",
) -> np.ndarray:
    """Return a window of a matrix on all ranks, in the buffer "reflectors" on the host.  Collective over the grid.

    name, layout : of the matrix.   gathering : `window_gathering` of the window; it uses the buffer "gathered".
    rows, cols : (start, stop) of the window.   order : the memory order of the result.
    """
    ends, parts = gathering.offsets.tolist(), task.workspace["gathered"][: gathering.words]
    window = column_buffer(rows[1] - rows[0], order, cols[1] - cols[0], task.workspace["reflectors"])
    places = {rank: (layout.coords(rank), slice(*both)) for rank, both in zip(gathering.ranks, pairwise(ends))}
    coords, part = places[task.grid.comm.rank]
    own = task.arrays[name][layout.distribution.local_window(rows, cols, coords)]
    parts[part].reshape(own.shape)[...] = own
    task.carry_out(gathering, parts)
    dimensions = (layout.distribution.rows, *rows), (layout.distribution.cols, *cols)
    with task.computing():
        for coords, part in places.values():
            if part.start < part.stop:
                here = np.ix_(*(indices_between(*both, at) for both, at in zip(dimensions, coords)))
                window[here] = parts[part].reshape(here[0].size, here[1].size)
    return window


def indices_between(dimension: BlockCyclic, start: int, stop: int, part: int) -> np.ndarray:
    """Return the indices of a part of a dimension between `start` and `stop`, counted from `start`."""
    return np.asarray(dimension.indices(part))[dimension.local_window(start, stop, part)] - start
