"""Measurements of a run: seconds by phase, and words and messages counted where they are sent and received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add, sub
from time import perf_counter
from typing import Any


@dataclass
class Traffic:
    """Words (elements) and messages that one rank sent and received.

    words_read : the part of words_received that was read in node-shared memory, without a message.
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
        return Traffic(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sub, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Transfer:
    """The traffic of a rank along one dimension of a grid.

    kind     : the name of a mover, "shift" or "reduce".
    itemsize : bytes of a word.
    stride, length : the dimension has `length` ranks; their numbers are `stride` apart.
    after    : the transfer follows the products and cannot overlap with them.
    """

    kind: str
    traffic: Traffic
    itemsize: int
    stride: int
    length: int
    after: bool = False


class Then:
    """A request, and a function that is called once when the request is complete."""

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
        """Count allocated buffers; a negative number of bytes counts freed ones."""
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def phase(self, name: str) -> Any:
        """Return a context manager that adds the seconds of its block to the phase."""
        return _Phase(self.seconds, name)

    def coming(self, kind: str, x: Any, request: Any) -> Any:
        """Count a message that is being received in the array x, and return the request to wait for."""
        self.traffic.received(x.size)
        return request

    def moving(self, kind: str, nbytes: int) -> Callable[[], object]:
        """Record the start of a transfer; the caller calls the returned function when it sees the transfer complete."""
        return nothing

    # work on the host is complete on return; `pdgemm.devices.streams` overrides these methods for work in streams
    def synchronize_copies(self) -> None:
        """Wait until all packing is complete, so that MPI may read the buffers."""

    def record_copies(self) -> tuple[Any, ...]:
        """Return requests that complete when all packing issued so far is complete; none on the host.

        A product that reads the packed buffers waits for them first.
        """
        return ()

    def order_copies_after_products(self) -> None:
        """Make later packing wait for the products issued so far."""

    def record_products(self, poll: Callable[[], object]) -> tuple[Callable[[], object], ...]:
        """Return functions that wait for the last product and call `poll` meanwhile."""
        return ()

    def finish(self) -> None:
        """Wait until all work is complete."""


def nothing() -> None:
    """Do nothing: a callback for the end of a transfer that is not traced, or for a wait without polling."""


class _Phase:
    """The timer of a phase.  It runs for each panel, and takes a third of the time of a contextlib.contextmanager."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + perf_counter() - self._start
