"""Streams of the simulated device, whose work is delayed, and vector clocks, which find races.

The host, each stream and each message of MPI have a clock of the events that happened before (vector clocks: Lamport
1978, Mattern 1989).  Two accesses to the same elements, at least one a write, are a race unless one happened before
the other by these clocks; races are recorded in `races`.  A signal carries the clock of its sender.  When the ranks of
a node synchronise, they compare their accesses to shared memory since the last synchronisation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from fake_arrays import FakeArray
from mpi4py import MPI

from pdgemm.grids.node_memory import NodeMemory
from pdgemm.local.arrays.device import Reach

Clock = dict[str, int]


class Access(NamedTuple):
    """An access by the host, a stream or a message, at a tick of its clock."""

    x: np.ndarray
    writes: bool
    who: str
    tick: int
    what: str
    request: MPI.Request | None = None


class Shown(NamedTuple):
    """The record of an access to shared memory for other ranks: whose part, its range of bytes, and the clock."""

    part: int
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    access: tuple[bool, str, int, str]  # writes, who, tick, description
    clock: Clock

    def races_with(self, other: Shown, memory: Any) -> bool:
        """Return whether neither access happened before the other, and they have elements in common."""
        (_, who, tick, _), (_, them, then, _) = self.access, other.access
        if self.clock.get(them, 0) >= then or other.clock.get(who, 0) >= tick:
            return False
        return np.shares_memory(memory.shown(self), memory.shown(other))


def _overlapping(some: Sequence[Shown], others: Sequence[Shown]) -> Iterator[tuple[Shown, Shown]]:
    """Yield the pairs of accesses that may conflict: overlapping ranges of bytes, and at least one write."""
    if some and others:
        part, start, stop, writes = _columns(some)[..., None]
        their_part, their_start, their_stop, they_write = _columns(others)
        pairs = (part == their_part) & (start < their_stop) & (their_start < stop) & (writes | they_write > 0)
        yield from ((some[i], others[j]) for i, j in np.argwhere(pairs))


def _columns(shown: Sequence[Shown]) -> np.ndarray:
    return np.array([(x.part, x.start, x.stop, x.access[0]) for x in shown]).T


class FakeEvent:
    def __init__(self, stream: FakeStream, position: int, clock: Clock) -> None:
        self.stream, self.position, self.clock = stream, position, clock
        self._asked = False

    def happened(self) -> bool:
        """Return False at the first call and True later, so that callers have to poll."""
        asked, self._asked = self._asked, True
        if asked:
            self.synchronize()
        return asked

    def synchronize(self) -> None:
        self.stream.run(self.position)
        self.stream.device.host_sees(self.clock)


class FakeStream:
    """A stream: its work is carried out in order, when the host or another stream waits for it."""

    def __init__(self, device: Races, name: str) -> None:
        self.device, self.name, self.who = device, name, f"{name} on rank {MPI.COMM_WORLD.rank}"
        self.clock: Clock = {}
        self.begun = self.finished = 0
        self._waiting: deque[Callable[[], object]] = deque()
        self._before: list[FakeStream] = []

    def launch(self, what: str, reads: Sequence[np.ndarray], writes: Sequence[np.ndarray], act: Any) -> None:
        self.device.join(self.clock, self.device.clock)  # work starts after all that the host has seen
        self.begun += 1
        self.clock[self.who] = self.begun
        for x, writing in (*((x, False) for x in reads), *((x, True) for x in writes)):
            self.device.access(Access(x, writing, self.who, self.begun, what), self.clock)
        self._waiting.append(act)
        if self.name in self.device.eager:
            self.run(self.begun)

    def run(self, position: int) -> None:
        while self.finished < position:
            act = self._waiting.popleft()
            self.finished += 1
            act()

    def record(self) -> FakeEvent:
        self.device.events += 1
        return FakeEvent(self, self.begun, dict(self.clock))

    def wait_event(self, event: FakeEvent) -> None:
        self.launch("wait", (), (), lambda: event.stream.run(event.position))
        self.device.join(self.clock, event.clock)

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> FakeStream:
        self._before.append(self.device.current)
        self.device.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.device.current = self._before.pop()


class Races:
    """The accesses of the host, streams and messages, and their races.   eager : streams that work immediately."""

    def __init__(self, eager: Sequence[str] = (), reach: Reach = Reach("shared", staged=False)) -> None:  # noqa: B008
        self._reach = reach
        self.eager = tuple(eager)
        self.clock: Clock = {}
        self.races: list[str] = []
        self.launches: list[str] = []
        self.copied: list[int] = []  # bytes of each copy to the host
        self.events = 0
        self._live: list[Access] = []
        self._shown: list[tuple[Any, Shown]] = []  # accesses since the ranks of the node last synchronised
        self._many = 64  # completed accesses are dropped beyond this number
        self.messages = 0
        self.callers, self.compute = FakeStream(self, "caller's"), FakeStream(self, "compute")
        self.transfer, self.upload = FakeStream(self, "transfer"), FakeStream(self, "upload")
        self.product_stream, self.transfer_stream, self.upload_stream = self.compute, self.transfer, self.upload
        self.current = self.callers
        self._memory: WeakKeyDictionary[NodeMemory, Any] = WeakKeyDictionary()
        self.held = 0

    @staticmethod
    def join(clock: Clock, other: Clock) -> None:
        for who, tick in other.items():
            clock[who] = max(clock.get(who, 0), tick)

    def host_sees(self, clock: Clock) -> None:
        self.join(self.clock, clock)
        self._live = [x for x in self._live if self._open(x)]

    def _open(self, x: Access) -> bool:
        if x.request is not None:
            return x.request != MPI.REQUEST_NULL
        return self.clock.get(x.who, 0) < x.tick

    def access(self, new: Access, clock: Clock) -> None:
        if len(self._live) > self._many:
            self._live = [x for x in self._live if self._open(x)]
            self._many = 64 + 2 * len(self._live)
        if not new.x.size:
            return
        if new.request is None:
            self._shown += [(at, x) for at in self._memory.values() if (x := at.show(new, clock)) is not None]
        for old in self._live:
            if old.who == new.who or not (old.writes or new.writes) or clock.get(old.who, 0) >= old.tick:
                continue
            if not self._open(old):
                continue
            if np.may_share_memory(old.x, new.x) and np.shares_memory(old.x, new.x):
                self.races.append(f"{told(new)} while {told(old)} may not be done")
        self._live.append(new)

    def met(self, memory: Any) -> None:
        for x in [x for x in self._live if x.request is None and self._open(x)]:
            if memory.show(x, {}):
                self.races.append(f"{told(x)} may not be done when the ranks of the node meet")
        mine = [x for at, x in self._shown if at is memory]
        self._shown = [x for x in self._shown if x[0] is not memory]
        for rank, (clock, theirs) in enumerate(memory.node.allgather((self.clock, mine))):
            for x, y in _overlapping(mine, theirs) if rank != memory.node.rank else ():
                if x.races_with(y, memory):
                    self.races.append(f"{x.access[3]} while {y.access[3]} may not be done")
            self.join(self.clock, clock)

    def message(self, x: Any, writes: bool, what: str, request: MPI.Request | None) -> None:
        """Record that MPI reads or writes x until the request is complete."""
        memory = x.x if isinstance(x, FakeArray) else x
        if getattr(x, "managed", False):
            self.races.append(f"{what}: MPI is given the address of managed memory")
        if isinstance(x, FakeArray) and self._reach.staged:
            self.races.append(f"{what}: MPI takes no memory of this device")
        self.messages += 1
        request = request or MPI.Request(MPI.REQUEST_NULL)
        self.access(Access(memory, writes, f"message {self.messages}", 1, what, request), self.clock)


def told(x: Access) -> str:
    return f"{x.what} of {x.who} {'writes' if x.writes else 'reads'} {x.x.size} elements"
