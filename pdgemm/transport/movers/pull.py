"""Shifts by pull: each rank copies its next block from the memory of a neighbour on its node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from pdgemm.instrument.recorder import Then
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.transport.movers.arrivals import Arrival
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import BlockPanel, RingShift
from pdgemm.transport.movers.ring import signal, signal_from


class Neighbours(NamedTuple):
    """The memory of the other ranks of a ring.

    block   : returns the initial block of a rank, which is not written to during the product.
    buffers : returns the buffers of a rank, which have the size and the slots of this rank's buffers.
    fence   : `NodeMemory.fence`, to call before a signal is sent and after one has arrived.
    axis    : the axis, 0 or 1, along which the panels of a block are adjacent.
    """

    block: Callable[[int], Array]
    buffers: Callable[[int], Array]
    fence: Callable[[], object]
    axis: int


class PullShift(RingShift):
    """Shifts blocks around a ring of ranks of a node, in device memory, by copies in the transfer stream.

    Initial blocks are read in place.  A later panel is copied after a signal of its owner that the panel is complete,
    and its buffer is rewritten after a signal of its reader that the copy is complete.  With three slots or more,
    neighbours send each signal in an earlier step than the wait for it, so that there is no deadlock around the ring.
    """

    def __init__(self, *args: Any, near: Neighbours, **options: Any) -> None:
        super().__init__(*args, **options)
        assert len(self._buffers) > 2
        self._near = near

    def _pack(self, panel: BlockPanel, at: int) -> None:
        """Do nothing: the neighbour reads the initial block in place, with any strides."""

    def _receive(self, panel: BlockPanel, at: int, source: int, number: int) -> list[Arrival]:
        shape, words = panel.array.shape, panel.array.size
        if not words:
            return []
        self._recorder.traffic.read(words)
        if self._initial:
            axis = self._near.axis
            start = at // shape[1 - axis]
            cut = slice(start, start + shape[axis])
            block = self._near.block(source)
            return [self._copy(panel, block[:, cut] if axis else block[cut])]
        there = self._near.buffers(source).reshape(len(self._buffers), -1)[self._at]  # all ranks use the same slot
        theirs = column_buffer(shape[0], self._order, shape[1], there[at : at + words])
        ready = signal_from(self._comm, source, self._recorder, _ready(number))
        return [Then(_Copied(ready, partial(self._copy, panel, theirs)), partial(self._reply, source, number))]

    def _copy(self, panel: BlockPanel, theirs: Array) -> Arrival:
        """Start copying a panel, and return the request that completes with the copy."""
        recorder: Any = self._recorder
        self._near.fence()
        with recorder.phase("pack"):
            CONVERT(panel.array, theirs)
        copied: Arrival = recorder.copied()
        return copied

    def _send(self, panel: BlockPanel, to: int, number: int) -> None:
        """Signal that a panel is complete; its buffer is in use until the neighbour replies."""
        if panel.array.size and not self._initial:
            self._near.fence()
            ready = signal(self._comm, to, self._recorder, _ready(number))
            self._leaving[self._at] += [ready, signal_from(self._comm, to, self._recorder, _copied(number))]

    def _reply(self, source: int, number: int) -> None:
        """Signal that a panel has been copied."""
        self._near.fence()
        self._leaving[self._at].append(signal(self._comm, source, self._recorder, _copied(number)))


class _Copied:
    """A copy that starts when a signal has arrived."""

    def __init__(self, ready: MPI.Request, copy: Callable[[], Arrival]) -> None:
        self._ready, self._copy = ready, copy
        self._copied: Arrival | None = None

    def Test(self) -> bool:
        if self._copied is None and self._ready.Test():
            self._copied = self._copy()
        return self._copied is not None and self._copied.Test()

    def Wait(self) -> None:
        if self._copied is None:
            self._ready.Wait()
            self._copied = self._copy()
        self._copied.Wait()


def _ready(number: int) -> int:
    """Return the tag of the signal that panel `number` is complete; two ranks may send each other both signals."""
    return 2 * number


def _copied(number: int) -> int:
    """Return the tag of the signal that panel `number` has been copied."""
    return 2 * number + 1
