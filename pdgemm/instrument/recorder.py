"""What a run did: seconds by phase, and words and messages counted where they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


@dataclass
class Traffic:
    """Words (elements) and messages that one rank sent and received.

    words_read : of the words received, those that no message brought: they were read in a neighbour's memory.
    """

    words_sent: int = 0
    words_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    words_read: int = 0

    def sent(self, words: int, copies: int = 1) -> None:
        self.words_sent += words * copies
        self.messages_sent += copies

    def received(self, words: int) -> None:
        self.words_received += words
        self.messages_received += 1

    def read(self, words: int) -> None:
        self.words_received += words
        self.words_read += words

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.words_sent + other.words_sent,
            self.words_received + other.words_received,
            self.messages_sent + other.messages_sent,
            self.messages_received + other.messages_received,
            self.words_read + other.words_read,
        )


@dataclass(frozen=True)
class Transfer:
    """What a rank sends and receives along one direction of a grid.

    kind     : how, "ibcast", "ring", "shift", "reduce" or "shared".
    itemsize : bytes of a word.
    stride, length : ranks of that direction are numbered at distance `stride`, there are `length` of them.
    after    : it cannot be hidden behind products.
    """

    kind: str
    traffic: Traffic
    itemsize: int
    stride: int
    length: int
    after: bool = False


class Then:
    """A request, and what is to be done once when it is complete."""

    __slots__ = ("_act", "_request")

    def __init__(self, request: Any, act: Callable[[], object]) -> None:
        self._request, self._act = request, act

    def Test(self) -> bool:
        if arrived := self._request.Test():
            self._act()
        return arrived

    def Wait(self) -> None:
        self._request.Wait()
        self._act()


@dataclass
class Recorder:
    """Seconds spent in each named phase of a run, its traffic, and the memory of its buffers."""

    seconds: dict[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    held_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, nbytes: int) -> None:
        """Buffers were allocated; a negative number: given up."""
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def phase(self, name: str) -> Any:
        """Its seconds are those spent in the `with` block."""
        return _Phase(self.seconds, name)

    def coming(self, kind: str, x: Any, request: Any) -> Any:
        """A message is on its way into the array x, and is counted.  Returns what to wait for."""
        self.traffic.received(x.size)
        return request

    def moving(self, kind: str, nbytes: int) -> Callable[[], object]:
        """A transfer begins; what is returned is to be called when it is seen to be over."""
        return _nothing

    # what the host does is done; `pdgemm.devices.streams` records work of devices, which is not
    def settle(self) -> None:
        """Until everything packed is there: MPI may read it."""

    def packed(self) -> tuple[Any, ...]:
        """Arrivals: of what was packed last."""
        return ()

    def hold_copies(self) -> None:
        """What is packed from now on reads products."""

    def multiplied(self, poll: Callable[[], object]) -> tuple[Callable[[], object], ...]:
        """Waits: for the last product, with `poll` in between."""
        return ()

    def finish(self) -> None:
        """Until all is done."""


def _nothing() -> None:
    """Nobody asked."""


class _Phase:
    """A third of the time of a contextmanager, and panels are many."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + perf_counter() - self._start
