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

from pdgemm.timing import Recorder

Wait = Callable[[], object]
Step = TypeVar("Step")


class Slot:
    """Room for one panel of A and one of B, and what to wait for before using them."""

    __slots__ = ("A", "B", "arrivals", "buffer_a", "buffer_b", "number", "users")

    def __init__(self, number: int, buffer_a: np.ndarray, buffer_b: np.ndarray) -> None:
        self.number = number
        self.buffer_a = buffer_a
        self.buffer_b = buffer_b
        self.arrivals: list[Wait] = []
        self.users: list[Wait] = []
        self.A: np.ndarray = self.buffer_a
        self.B: np.ndarray = self.buffer_b


class PanelRing:
    """`slots` slots handed out in turn.  Leaving the `with` block waits until none is in use.

    room_a, room_b : memory for the panels of A and of B, shared out evenly.
    """

    def __init__(self, slots: int, room_a: np.ndarray, room_b: np.ndarray, recorder: Recorder) -> None:
        rooms = zip(room_a.reshape(slots, -1), room_b.reshape(slots, -1), strict=True)
        self._slots = [Slot(number, *buffers) for number, buffers in enumerate(rooms)]
        self._next = 0
        self._recorder = recorder

    def take(self) -> Slot:
        """The next slot, free."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        with self._recorder.phase("wait"):
            drain(slot.users)
        return slot

    def __enter__(self) -> PanelRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error the partners may never come: do not wait for them
            for _ in self._slots:
                self.take()


def drain(waits: list[Wait]) -> None:
    """Wait for everything in the list, in order, and empty it."""
    for wait in waits:
        wait()
    waits.clear()


def prefetch(steps: Iterable[Step], post: Callable[[Step], Slot], lookahead: int, recorder: Recorder) -> Iterator[Slot]:
    """Yield arrived slots in schedule order, with `lookahead` more in flight behind the one in use."""
    in_flight: deque[Slot] = deque()

    def arrived() -> Slot:
        slot = in_flight.popleft()
        with recorder.phase("wait"):
            drain(slot.arrivals)
        return slot

    for step in steps:
        in_flight.append(post(step))
        if len(in_flight) > lookahead:
            yield arrived()
    while in_flight:
        yield arrived()
