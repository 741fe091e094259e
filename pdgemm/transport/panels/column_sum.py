"""Sums over a grid column: each rank sums up a slice and applies a function to it; then all gather the slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT, add_elements
from pdgemm.schedules.panels.householder_schedule import cuts
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import ADDENDS, SUMS, Copies, Task


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
        """Compute W := f(the sum of W over these ranks), where finish(X) is X := f(X) for any columns X of W."""
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
