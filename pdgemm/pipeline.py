"""Keep panels in flight behind the one being multiplied.  All waiting lives here.

A slot of the ring has two moments: its panels have *arrived* (they may be read), and it is *free*
(its buffers may be rewritten).  MPI requests and device events are both just things to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.dtypes import wire
from pdgemm.movers.shift import shift
from pdgemm.timing import Recorder

Wait = Callable[[], object]
Step = TypeVar("Step")


class Slot:
    """Room for one panel of A and one of B, and what to wait for before using them."""

    __slots__ = ("B", "arrivals", "buffer_a", "buffer_b", "number", "tag", "users", "when_read")

    def __init__(self, number: int, buffer_a: np.ndarray, buffer_b: np.ndarray) -> None:
        self.number = number
        self.tag = number  # of the messages of a panel: one that no other panel in flight has
        self.buffer_a = buffer_a
        self.buffer_b = buffer_b
        self.arrivals: list[Wait] = []
        self.users: list[Wait] = []
        self.when_read: list[Wait] = []  # to be called when its panels have been multiplied
        self.B: np.ndarray = self.buffer_b


class PanelRing:
    """`slots` slots handed out in turn.  Leaving the `with` block waits until none is in use.

    room_a, room_b : memory for the panels of A and of B, shared out evenly.
    """

    def __init__(self, slots: int, room_a: np.ndarray, room_b: np.ndarray) -> None:
        rooms = zip(room_a.reshape(slots, -1), room_b.reshape(slots, -1), strict=True)
        self.slots = [Slot(number, *buffers) for number, buffers in enumerate(rooms)]

    def used(self, recorder: Recorder) -> PanelRing:
        """The ring, for a `with` block: the first slot first, and waits recorded."""
        for slot in self.slots:  # what an exception has left behind
            slot.arrivals, slot.users, slot.when_read = [], [], []
        self._next, self._recorder = 0, recorder
        return self

    def take(self) -> Slot:
        """The next slot, free."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        if slot.users:
            with self._recorder.phase("wait"):
                drain(slot.users)
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


def prefetch(
    steps: Iterable[Step], post: Callable[[Step], Slot], lookahead: int, recorder: Recorder
) -> Iterator[tuple[Step, Slot]]:
    """Yield steps with their arrived slots in order, with `lookahead` more in flight behind the one in use."""
    in_flight: deque[tuple[Step, Slot]] = deque()

    def arrived() -> tuple[Step, Slot]:
        step, slot = in_flight.popleft()
        if slot.arrivals:
            with recorder.phase("wait"):
                drain(slot.arrivals)
        return step, slot

    for step in steps:
        in_flight.append((step, post(step)))
        if len(in_flight) > lookahead:
            yield (done := arrived())
            drain(done[1].when_read)
    while in_flight:
        yield (done := arrived())
        drain(done[1].when_read)


class Conveyor:
    """A block that every rank of a ring of ranks holds in turn: the one in use, and the next on its way.

    first : the block to begin with; it is not changed, and copied only where it is not contiguous.
    order : memory order of the blocks.
    room  : memory for two blocks.
    Leaving the `with` block waits until the last block handed on has left.
    """

    def __init__(self, comm: MPI.Comm, first: np.ndarray, order: str, room: np.ndarray, recorder: Recorder) -> None:
        self._comm, self._order, self._recorder = comm, order, recorder
        self._buffers = room.reshape(2, -1)
        self._turn = 0
        self._coming: np.ndarray | None = None
        self._arrival: Wait = _at_once
        self._leaving: Wait = _at_once
        self.held = first
        if comm.size > 1 and not first.flags.forc:
            with recorder.phase("pack"):
                self.held = self._shaped(self._buffers[1], first.shape)
                self.held[...] = first

    def start(self, to: int, source: int, shape: tuple[int, int]) -> None:
        """Hand the block in use on to a rank, while it is read, and start taking the next from another."""
        if self._comm.size == 1:
            return
        with self._recorder.phase("wait"):
            self._leaving()  # the block before the one in use, whose buffer is filled now
        with self._recorder.phase("post"):
            self._coming = self._shaped(self._buffers[self._turn], shape)
            self._turn = 1 - self._turn
            self._arrival, self._leaving = shift(
                self._comm, flat(self.held), to, flat(self._coming), source, self._recorder.traffic
            )

    def advance(self) -> None:
        """The next block is the one in use, if one was started."""
        if self._coming is not None:
            with self._recorder.phase("wait"):
                self._arrival()
            self.held, self._coming = self._coming, None

    def _shaped(self, buffer: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        rows, cols = shape
        words = buffer[: rows * cols]
        return words.reshape(cols, rows).T if self._order == "F" else words.reshape(rows, cols)

    def __enter__(self) -> Conveyor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            with self._recorder.phase("wait"):
                self._leaving()


def flat(block: np.ndarray) -> np.ndarray:
    """A contiguous block as MPI sends it: its elements as they lie."""
    return wire(block.ravel(order="K"))


def _at_once() -> None:
    """Nothing to wait for."""
