"""Pipelines that transfer panels while an earlier panel is multiplied, and wait for panels before products.

A slot of the ring has two events: its panels have *arrived* (they may be read), and it is *free* (its buffers may be
rewritten).  MPI requests and device events are tested and waited for through the same interface.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder, Then
from pdgemm.local.arrays.device import Array, Pinned
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.transport.movers.arrivals import Arrival, Transfers
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.ring import receive, send, signal, signal_from
from pdgemm.transport.movers.staged import staged_receive, to_staging

Wait = Callable[[], object]
Step = TypeVar("Step")


class Slot:
    """The buffers for one panel of A and one of B, and the waits before they are read and before they are rewritten."""

    __slots__ = ("B", "arrivals", "buffer_a", "buffer_b", "number", "tag", "users", "when_free", "when_read")

    def __init__(self, number: int, buffer_a: Array, buffer_b: Array) -> None:
        self.number = number
        self.tag = number  # message tag of its panels; no other panel in flight has this tag
        self.buffer_a = buffer_a
        self.buffer_b = buffer_b
        self.arrivals: list[Arrival] = []
        self.users: list[Arrival] = []
        self.when_read: list[Wait] = []  # called when its panels have been multiplied
        self.when_free: list[Wait] = []  # called after all waits, before its buffers are rewritten
        self.B: Array = self.buffer_b


class PanelRing:
    """Cycles through `slots` slots.  Leaving the `with` block waits until no slot is in use.

    buffers_a, buffers_b : workspace for the panels of A and of B, divided evenly among the slots.
    transfers : tracks all messages in flight to this rank.
    """

    def __init__(self, slots: int, buffers_a: Array, buffers_b: Array, transfers: Transfers) -> None:
        parts = zip(buffers_a.reshape(slots, -1), buffers_b.reshape(slots, -1), strict=True)
        self.slots, self._transfers = [Slot(number, *buffers) for number, buffers in enumerate(parts)], transfers

    def used(self, recorder: Recorder) -> PanelRing:
        """Return the ring for a `with` block, starting at the first slot, with its waits recorded by `recorder`."""
        for slot in self.slots:  # an exception may have left slots in use
            slot.arrivals, slot.users, slot.when_read, slot.when_free = [], [], [], []
        self._next, self._recorder = 0, recorder
        self._transfers.used(recorder)
        return self

    def prefetch(
        self,
        steps: Iterable[Step],
        post: Callable[[Step], Slot],
        lookahead: int,
        local: Callable[[Step], bool] = lambda step: False,
    ) -> Iterator[tuple[Step, Slot]]:
        """Yield each step with its slot when its panels have arrived, with `lookahead` later steps in flight.

        local : does this rank own all panels of a step?  With lookahead >= 2, a local step is yielded before each step
            with panels of other ranks, which arrive meanwhile; the order depends only on the schedule.
        """
        in_flight: deque[tuple[int, Step, Slot]] = deque()
        before = False  # was the last step multiplied before its turn?

        def first() -> tuple[Step, Slot]:
            """Remove the next step to multiply, and wait for its panels."""
            nonlocal before
            stays = before or lookahead < 2
            at = 0 if stays else next((number for number, (_, step, _) in enumerate(in_flight) if local(step)), 0)
            before = at > 0
            _, step, slot = in_flight[at]
            del in_flight[at]
            self._transfers.wait(slot.arrivals)
            return step, slot

        def used(slot: Slot) -> None:
            slot.users += as_arrivals(self._recorder.record_products(self._transfers.poll))
            drain(slot.when_read)

        for turn, step in enumerate(steps):
            while in_flight and turn - in_flight[0][0] > lookahead:  # its slot is needed for this step
                yield (done := first())
                used(done[1])
            slot = post(step)
            slot.arrivals += self._recorder.record_copies()
            self._transfers.expect(slot.arrivals)
            in_flight.append((turn, step, slot))
        while in_flight:
            yield (done := first())
            used(done[1])

    def take(self) -> Slot:
        """Return the next slot, after waiting until it is free."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        self._transfers.wait(slot.users)
        if slot.when_free:
            drain(slot.when_free)
        return slot

    def __enter__(self) -> PanelRing:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:  # after an error the other ranks may never send: do not wait for them
            for _ in self.slots:
                self.take()


def drain(waits: list[Wait]) -> None:
    """Call all waits of the list in order, and empty it."""
    for wait in waits:
        wait()
    waits.clear()


def as_arrivals(waits: Iterable[Wait]) -> list[Arrival]:
    """Return arrivals that complete when these functions have returned."""
    return [Then(MPI.REQUEST_NULL, wait) for wait in waits]


class RingShift:
    """Shifts blocks around a ring of ranks: each rank holds the block in use while it receives the next one.

    A block is a list of panels.  Each panel is forwarded when it arrives, in any order: its number is its message tag.

    first : the panels of the initial block, which are not changed, and are copied only where they are not contiguous.
    order : memory order of the panels.
    buffers  : workspace for `slots` blocks, two or more.   transfers : tracks all messages in flight to this rank.
    staged : a host buffer of the same size, where MPI cannot read the memory of the blocks.
    Leaving the `with` block waits until all sends are complete.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        first: Sequence[Array],
        order: str,
        buffers: Array,
        slots: int,
        recorder: Recorder,
        transfers: Transfers,
        staged: Pinned | None = None,
    ) -> None:
        self._comm, self._order, self._recorder, self._transfers = comm, order, recorder, transfers
        self._buffers, self._staged = buffers.reshape(slots, -1), staged.shared_out(slots) if staged else None
        self._users = [list[Arrival]() for _ in range(slots)]  # for each buffer: the products that read it
        self._turn, self._at = 0, slots - 1  # the buffer of the next block, and of the block in use
        self._held = [BlockPanel(x) for x in first]
        self._coming: list[BlockPanel] | None = None
        self._leaving = [list[Arrival]() for _ in range(slots)]  # for each buffer: the requests that send its block
        self._initial = comm.size > 1

    def start(self, to: int, source: int, shapes: Sequence[tuple[int, int]]) -> None:
        """Start sending the block in use, which may still be read, and receiving panels of these shapes."""
        if self._comm.size == 1:
            return
        self._transfers.wait(self._leaving[self._turn])
        self._transfers.wait(self._users[self._turn])
        with self._recorder.phase("post"):
            self._coming = []
            for number, (panel, at) in enumerate(self._next_panels(shapes)):
                panel.arriving = self._receive(panel, at, source, number)
                self._transfers.expect(panel.arriving)
                self._coming.append(panel)
        at = 0
        for number, panel in enumerate(self._held):
            if self._initial:
                self._pack(panel, at)
                at += panel.array.size
            if panel.arriving:  # the test or wait that sees the panel arrive also forwards it
                panel.arriving[-1] = Then(panel.arriving[-1], partial(self._send, panel, to, number))
            else:
                with self._recorder.phase("post"):
                    self._send(panel, to, number)
        self._initial = False

    def panel(self, number: int) -> Array:
        """Return a panel of the block in use, after waiting until it has arrived."""
        panel = self._held[number]
        self._transfers.wait(panel.arriving)
        return panel.array

    def advance(self) -> None:
        """Make the next block, if any, the block in use; all products of the present block must have been started."""
        self._users[self._at] += as_arrivals(self._recorder.record_products(self._transfers.poll))
        if self._coming is not None:
            self._held, self._coming = self._coming, None
            self._at, self._turn = self._turn, (self._turn + 1) % len(self._buffers)

    def __enter__(self) -> RingShift:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            for leaving in self._leaving:
                self._transfers.wait(leaving)

    def _next_panels(self, shapes: Sequence[tuple[int, int]]) -> Iterator[tuple[BlockPanel, int]]:
        """Yield the panels of the next block, in the buffer that is free, and the number of words before each."""
        buffer, at = self._buffers[self._turn], 0
        for rows, cols in shapes:
            yield BlockPanel(column_buffer(rows, self._order, cols, buffer[at:])), at
            at += rows * cols

    def _pack(self, panel: BlockPanel, at: int) -> None:
        """Make a panel of the initial block contiguous, and copy it to the host if it is staged."""
        x = panel.array
        if not x.flags.forc:
            panel.array = column_buffer(x.shape[0], self._order, x.shape[1], self._buffers[-1][at : at + x.size])
            with self._recorder.phase("pack"):
                CONVERT(panel.array, x)
        if self._staged and x.size:
            panel.host = self._staged[-1].cut(at, at + x.size)
            to_staging(panel.host, flat(panel.array), self._recorder)

    def _receive(self, panel: BlockPanel, at: int, source: int, number: int) -> list[Arrival]:
        """Start receiving a panel, `at` words after the start of the next block; return the requests to wait for."""
        if not self._staged:
            return receive(self._comm, flat(panel.array), source, self._recorder, number)
        panel.host = self._staged[self._turn].cut(at, at + panel.array.size)
        return staged_receive(self._comm, panel.host, flat(panel.array), source, self._recorder, number)

    def _send(self, panel: BlockPanel, to: int, number: int) -> None:
        """Start sending a panel of the block in use; the panel has arrived."""
        x = panel.host.host if panel.host else flat(panel.array)
        self._leaving[self._at] += send(self._comm, x, to, self._recorder, number)


class BlockPanel:
    """A panel of a block: its array, its host buffer where it is staged, and the requests to wait for before a read."""

    __slots__ = ("array", "arriving", "host")

    def __init__(self, array: Array) -> None:
        self.array, self.arriving = array, list[Arrival]()
        self.host: Pinned | None = None


def flat(block: Array) -> Array:
    """Return the elements of a contiguous block in memory order."""
    return block.ravel(order="K")


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
