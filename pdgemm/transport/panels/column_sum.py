"""Sums over a grid column: each of its ranks adds up a slice, finishes it, and all get the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT, add_elements
from pdgemm.schedules.panels.householder_schedule import cuts
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import Copies, Task

_ADDENDS, _SUMS = 6, 7  # tags


class ColumnSum:
    """Sums matrices W, which lie in the buffer "sums", over ranks of a grid column: a reduce-scatter, an allgather.

    Cost per rank among q: 2 (q - 1)/q of the words of W, sent or read, in 2 (q - 1) messages.
    """

    def __init__(self, task: Task[Any]) -> None:
        self._task, self._slot = task, Slot(0, task.workspace["sums"], task.workspace["parts of sums"])

    def buffer(self, rows: int, cols: int) -> Array:
        """Return W (rows, cols), column-major, to be written: the last one is not read or sent any more."""
        self.finish()
        return column_buffer(rows, "F", cols, self._slot.buffer_a)

    def finish(self) -> None:
        """Wait until the last W is not read or sent any more."""
        self._task.wait(self._slot)
        self._task.free(self._slot)

    def __call__(self, W: Array, members: Sequence[int], finish: Callable[[Array], object]) -> None:
        """W := f(the sum of W over these ranks), where finish(X) is X := f(X), of any columns of W."""
        task, slot, (w, n), me = self._task, self._slot, W.shape, self._task.grid.coords[0]
        slices = {r: slice(a, b) for r, a, b in zip(members, *(cuts(n, len(members))[at:] for at in (0, 1)))}
        own, others = W[:, slices[me]], [r for r in members if r != me]

        def add(_: int, sums: Array, x: Array) -> None:
            add_elements(x, column_buffer(w, "F", n, sums)[:, slices[me]])

        def copy(r: int, sums: Array, x: Array) -> None:
            CONVERT(x, column_buffer(w, "F", n, sums)[:, slices[r]])

        addends = task.fetch("sums", dict.fromkeys(others, own), add, slot, _ADDENDS, slot.buffer_b, add_elements)
        self._exchange(addends, {r: W[:, slices[r]] for r in others}, _ADDENDS)
        with task.recorder.phase("compute"):
            finish(own)
        task.free(slot)  # what was sent of W is overwritten
        sums = task.fetch("sums", {r: W[:, slices[r]] for r in others}, copy, slot, _SUMS)
        self._exchange(sums, dict.fromkeys(others, own), _SUMS)
        if others:
            task.release(others, slot)

    def _exchange(self, copies: Copies, parts: dict[int, Array], tag: int) -> None:
        """Let others have parts of W, and carry out what was waiting for theirs."""
        self._task.finish_products()
        self._task.publish([*parts], lambda r, _: parts[r], self._slot, tag)
        self._task.wait(self._slot)
        with self._task.recorder.phase("compute"):
            for copy in copies:
                copy()
