"""Keep panels in flight behind the one being multiplied.  All waiting lives here.

A slot of the ring has two moments: its panels have *arrived* (they may be read), and it is *free*
(its buffers may be rewritten).  MPI requests and device events are both just things to test and to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from types import TracebackType
from typing import Protocol, TypeVar

from mpi4py import MPI

from pdgemm.arrays.device import Array, Pinned
from pdgemm.arrays.elementwise import CONVERT
from pdgemm.instrument.recorder import Recorder
from pdgemm.movers.shift import shift
from pdgemm.movers.staged import staged_shift, to_room

Wait = Callable[[], object]
Step = TypeVar("Step")


class Arrival(Protocol):
    """Of a part of a panel: a request of MPI, or one that something follows on."""

    def Test(self) -> bool: ...
    def Wait(self) -> object: ...


class Transfers:
    """What is on its way to this rank, in groups that arrive in order.

    MPI moves messages on when it is called, and forwards are sent when what they forward is seen to have arrived;
    `poll` gives both a chance in the middle of a product.  Recorded as "hidden": the time in which something was on
    its way and this rank did not wait for it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._coming = recorder, list[list[Arrival]]()

    def expect(self, group: list[Arrival]) -> None:
        """These were started; what has arrived is taken out of the list."""
        if group:
            if not self._coming:
                self._since, self._waited = perf_counter(), self._recorder.seconds.get("wait", 0.0)
            self._coming.append(group)

    def poll(self) -> None:
        """See what has arrived, and let MPI go on with what has not, and with what leaves."""
        MPI.COMM_SELF.Iprobe()
        if self._coming:
            for group in self._coming:
                while group and group[0].Test():
                    del group[0]
            self._forget()

    def wait(self, group: list[Arrival]) -> None:
        """Until all of a group have arrived."""
        if group:
            with self._recorder.phase("wait"):
                for arrival in group:
                    arrival.Wait()
            group.clear()
            self._forget()

    def _forget(self) -> None:
        self._coming = [group for group in self._coming if group]
        if not self._coming:
            seconds = self._recorder.seconds
            waited = seconds.get("wait", 0.0) - self._waited
            seconds["hidden"] = seconds.get("hidden", 0.0) + perf_counter() - self._since - waited


class Slot:
    """Room for one panel of A and one of B, and what to wait for before using them."""

    __slots__ = ("B", "arrivals", "buffer_a", "buffer_b", "number", "tag", "users", "when_free", "when_read")

    def __init__(self, number: int, buffer_a: Array, buffer_b: Array) -> None:
        self.number = number
        self.tag = number  # of the messages of a panel: one that no other panel in flight has
        self.buffer_a = buffer_a
        self.buffer_b = buffer_b
        self.arrivals: list[Arrival] = []
        self.users: list[Wait] = []
        self.when_read: list[Wait] = []  # to be called when its panels have been multiplied
        self.when_free: list[Wait] = []  # and when nothing is waited for any more, before they are rewritten
        self.B: Array = self.buffer_b


class PanelRing:
    """`slots` slots handed out in turn.  Leaving the `with` block waits until none is in use.

    room_a, room_b : memory for the panels of A and of B, shared out evenly.
    """

    def __init__(self, slots: int, room_a: Array, room_b: Array) -> None:
        rooms = zip(room_a.reshape(slots, -1), room_b.reshape(slots, -1), strict=True)
        self.slots = [Slot(number, *buffers) for number, buffers in enumerate(rooms)]

    def used(self, recorder: Recorder) -> PanelRing:
        """The ring, for a `with` block: the first slot first, and waits recorded."""
        for slot in self.slots:  # what an exception has left behind
            slot.arrivals, slot.users, slot.when_read, slot.when_free = [], [], [], []
        self._next, self._recorder, self._transfers = 0, recorder, Transfers(recorder)
        return self

    def poll(self) -> None:
        """In the middle of a product: see what has arrived."""
        self._transfers.poll()

    def prefetch(
        self, steps: Iterable[Step], post: Callable[[Step], Slot], lookahead: int
    ) -> Iterator[tuple[Step, Slot]]:
        """Yield steps with their arrived slots in order, with `lookahead` more in flight behind the one in use."""
        in_flight: deque[tuple[Step, Slot]] = deque()

        def arrived() -> tuple[Step, Slot]:
            step, slot = in_flight.popleft()
            self._transfers.wait(slot.arrivals)
            return step, slot

        def used(slot: Slot) -> None:
            slot.users += self._recorder.multiplied(self.poll)
            drain(slot.when_read)

        for step in steps:
            slot = post(step)
            slot.arrivals += self._recorder.packed()
            self._transfers.expect(slot.arrivals)
            in_flight.append((step, slot))
            if len(in_flight) > lookahead:
                yield (done := arrived())
                used(done[1])
        while in_flight:
            yield (done := arrived())
            used(done[1])

    def take(self) -> Slot:
        """The next slot, free."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        if slot.users:
            with self._recorder.phase("wait"):
                drain(slot.users)
        if slot.when_free:
            drain(slot.when_free)
        return slot

    def __enter__(self) -> PanelRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error the partners may never come: do not wait for them
            for _ in self.slots:
                self.take()


def drain(waits: list[Wait]) -> None:
    """Wait for everything in the list, in order, and empty it."""
    for wait in waits:
        wait()
    waits.clear()


class Conveyor:
    """A block that every rank of a ring of ranks holds in turn: the one in use, and the next on its way.

    first : the block to begin with; it is not changed, and copied only where it is not contiguous.
    order : memory order of the blocks.
    room  : memory for `slots` blocks, two or more.   transfers : what else is on its way to this rank.
    staged : as much memory of the host, where MPI cannot read that of the blocks.
    Leaving the `with` block waits until the last block handed on has left.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        first: Array,
        order: str,
        room: Array,
        slots: int,
        recorder: Recorder,
        transfers: Transfers,
        staged: Pinned | None = None,
    ) -> None:
        self._comm, self._order, self._recorder, self._transfers = comm, order, recorder, transfers
        self._buffers, self._staged = room.reshape(slots, -1), staged.shared_out(slots) if staged else None
        self._users = [list[Wait]() for _ in range(slots)]  # of each buffer
        self._turn, self._at = 0, slots - 1  # the buffer to be filled next, and that of the block in use
        self._coming: Array | None = None
        self._arriving: list[Arrival] = []
        self._leaving: list[Wait] = []
        self.held = first
        if comm.size > 1 and not first.flags.forc:
            with recorder.phase("pack"):
                self.held = self._shaped(self._buffers[-1], first.shape)
                CONVERT(self.held, first)
        if comm.size > 1 and self._staged and first.size:
            to_room(self._staged[-1].cut(0, first.size), flat(self.held), recorder)

    def start(self, to: int, source: int, shape: tuple[int, int]) -> None:
        """Hand the block in use on to a rank, while it is read, and start taking the next from another."""
        if self._comm.size == 1:
            return
        self._wait_for_leaving()  # the block before the one in use
        with self._recorder.phase("wait"):
            drain(self._users[self._turn])
        with self._recorder.phase("post"):
            self._coming = self._shaped(self._buffers[self._turn], shape)
            held, coming = flat(self.held), flat(self._coming)
            if self._staged:
                lying = self._staged[self._at].cut(0, held.size), self._staged[self._turn].cut(0, coming.size)
                arriving, leaving = staged_shift(self._comm, lying[0], to, lying[1], coming, source, self._recorder)
            else:
                arriving, leaving = shift(self._comm, held, to, coming, source, self._recorder)
            self._arriving, self._leaving = arriving, [request.Wait for request in leaving]
        self._transfers.expect(self._arriving)

    def advance(self) -> None:
        """The next block is the one in use, if one was started; products of the last one have been begun."""
        self._users[self._at] += self._recorder.multiplied(self._transfers.poll)
        if self._coming is not None:
            self._transfers.wait(self._arriving)
            self.held, self._coming = self._coming, None
            self._at, self._turn = self._turn, (self._turn + 1) % len(self._buffers)

    def _shaped(self, buffer: Array, shape: tuple[int, int]) -> Array:
        rows, cols = shape
        words = buffer[: rows * cols]
        return words.reshape(cols, rows).T if self._order == "F" else words.reshape(rows, cols)

    def __enter__(self) -> Conveyor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._wait_for_leaving()

    def _wait_for_leaving(self) -> None:
        with self._recorder.phase("wait"):
            drain(self._leaving)


def flat(block: Array) -> Array:
    """The elements of a contiguous block as they lie."""
    return block.ravel(order="K")
