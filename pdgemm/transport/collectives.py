"""Collectives carried out step by step, as their schedules say, by messages that are counted when they are sent.

A collective in progress is a generator, which yields the requests that its next step depends on.  So a rank may test
it while it computes (`CollectiveRun`), or wait for it at once (`carry_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.local.arrays.folds import Parts
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.support.waits import Wait

Join = Callable[[Parts, Parts], Parts]  # joins the parts of an earlier and of a later rank
Stages = Iterator[list[MPI.Request]]


class CollectiveRun:
    """A collective in progress, with the methods of an MPI request; each test starts the steps that can begin.

    A rank tests and waits for the collectives of one communicator in any order, if each has its own tag.
    """

    def __init__(self, comm: MPI.Comm, stages: Stages) -> None:
        self._comm, self._stages = comm, stages
        self._requests = next(stages, None)

    def Test(self) -> bool:
        """Begin all steps whose messages have arrived, and return whether the collective is complete."""
        while self._requests is not None:
            if not MPI.Request.Testall(self._requests):
                return False
            self._requests = next(self._stages, None)
        return True

    def Wait(self) -> None:
        """Wait until the collective is complete."""
        while self._requests is not None:
            if self._requests:
                with Wait(self._comm):
                    MPI.Request.Waitall(self._requests)
            self._requests = next(self._stages, None)


def prepared_collective(
    collective: Collective,
    comm: MPI.Comm,
    vector: np.ndarray,
    tag: int = 0,
    join: Join | None = None,
) -> Callable[[Traffic], CollectiveRun]:
    """Return a function that starts a collective of one vector on the host, and returns without waiting for messages.

    The function's argument is the traffic to which words and messages are added.
    tag : differs from those of all other collectives in progress on `comm`.
    join : as in `carry_out`.
    The function may be called again when the collective is complete; until then the vector must not be touched.
    """
    if comm.rank not in collective.ranks or len(collective.ranks) == 1:
        return lambda counted: CollectiveRun(comm, iter(()))
    sent = _Vectors([vector], collective.offsets)
    return lambda counted: CollectiveRun(comm, _by_messages(collective, comm, sent, counted, join, tag))


def carry_out(
    collective: Collective | None,
    comm: MPI.Comm,
    vectors: Sequence[Array],
    counted: Traffic,
    join: Join | None = None,
) -> None:
    """Carry out a collective.  Collective over `collective.ranks`; all other ranks return at once.

    comm    : the communicator in which `collective.ranks` are rank numbers.
    vectors : `collective.arrays` contiguous arrays of one dimension, with space for all parts; overwritten.
        On entry they hold the rank's addends in a reduction, all parts on the root of a broadcast or scatter, and
        otherwise the rank's part.
        On exit they hold the parts that the operation assigns to the rank; other parts have intermediate values.
        Arrays on a device are copied through the host.
    counted : the traffic to which words and messages are added.
    join    : function that returns the joined parts of two ranks; by default they are added.

    The ranks do not compare their arguments: all must pass the same collective, and vectors of its length and of the
    same types.
    """
    if collective is None or comm.rank not in collective.ranks or len(collective.ranks) == 1:
        return
    host = [devices.to_host(x) for x in vectors]
    stages = _by_messages(collective, comm, _Vectors(host, collective.offsets), counted, join)
    CollectiveRun(comm, stages).Wait()
    for x, y in zip(vectors, host):
        if devices.of(x):
            set_elements(x.reshape(1, -1), y.reshape(1, -1))


def all_to_all(
    collective: Collective,
    comm: MPI.Comm,
    parts: Sequence[np.ndarray],
    counted: Traffic,
    wait: Callable[[list[Any]], object] | None = None,
    into: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Send `parts[r]` to the r-th rank of the collective, and return the parts from all ranks.  Collective.

    wait : function that waits for a list of transfers, and tests other messages meanwhile, such as `Transfers.wait`; it
        is called with the collective.  None: other messages are not tested.
    into : contiguous arrays in which the parts of all ranks are received; None: they are allocated.

    The ranks do not compare their arguments: all must pass the same collective, and parts as long as its counts.
    """
    p, me = len(collective.ranks), collective.ranks.index(comm.rank)
    mine: dict[int, Parts] = {me * p + to: (np.ascontiguousarray(part),) for to, part in enumerate(parts)}
    places = {} if into is None else {source * p + me: (x,) for source, x in enumerate(into)}
    pairs, nothing = _Pairs(collective, mine, places), (np.empty(0, collective.dtype),)
    messages = _by_messages(collective, comm, pairs, counted)
    if wait:
        wait([CollectiveRun(comm, messages)])
    else:
        CollectiveRun(comm, messages).Wait()
    if into is not None:
        into[me][...] = parts[me]
        return [*into]
    return [pairs.parts.get(source * p + me, nothing)[0] for source in range(p)]


class _Vectors:
    """The vectors of one rank, with space for all parts."""

    def __init__(self, arrays: Sequence[np.ndarray], offsets: np.ndarray) -> None:
        self._arrays, self._offsets = arrays, offsets.tolist()

    def views(self, first: int, number: int) -> list[Parts]:
        """Return views of a range of parts: one view, or two where the range wraps around to part 0."""
        parts, ends = len(self._offsets) - 1, first + number
        ranges = [(first, min(ends, parts)), (0, ends - parts)]
        slices = [slice(self._offsets[lo], self._offsets[hi]) for lo, hi in ranges if lo < hi]
        return [tuple(x[part] for x in self._arrays) for part in slices if part.start < part.stop]

    receiving = views


class _Pairs:
    """The parts that one rank holds, by pair of source and target rank: its parts on entry, and received parts."""

    def __init__(self, collective: Collective, parts: dict[int, Parts], places: dict[int, Parts]) -> None:
        self._counts, self._dtype, self.parts, self._places = collective.counts, collective.dtype, parts, places

    def views(self, first: int, number: int) -> list[Parts]:
        return [self.parts[first]] if self._counts[first] else []

    def receiving(self, first: int, number: int) -> list[Parts]:
        """Return the array in which a part is received: its array of `into`, or a new one."""
        self.parts[first] = self._places.get(first) or (np.empty(self._counts[first], self._dtype),)
        return self.views(first, number)


def _by_messages(
    collective: Collective,
    comm: MPI.Comm,
    store: _Vectors | _Pairs,
    counted: Traffic,
    join: Join | None = None,
    tag: int = 0,
) -> Stages:
    """Send and receive the messages of a collective, step by step; join addends with the earlier rank's on the left."""
    me = collective.ranks.index(comm.rank)
    for step in collective.messages_of(me):
        leaving = {to: [x for row in rows for x in store.views(*row)] for to, rows in step.sent.items()}
        out = [(to, _packed(views)) for to, views in leaving.items()]
        places = {
            source: [x for row in rows for x in (store.views if step.adds else store.receiving)(*row)]
            for source, rows in step.received.items()
        }
        into = [(source, _buffer(views, step.adds)) for source, views in places.items()]
        requests = [x for source, data in into for x in byte_requests(comm.Irecv, data, collective.ranks[source], tag)]
        received = len(requests)
        requests += [x for to, data in out for x in byte_requests(comm.Isend, data, collective.ranks[to], tag)]
        counted.words_sent += _words(leaving)
        counted.words_received += _words(places)
        counted.messages_sent += len(requests) - received
        counted.messages_received += received
        yield requests
        for source, data in into:
            _arrived(places[source], data, step.adds, join, source < me)


def byte_requests(start: Callable[..., Any], data: np.ndarray, rank: int, tag: int) -> list[Any]:
    """Start to send or receive bytes in messages of LARGEST_MESSAGE_BYTES at most; none for an empty array."""
    pieces = range(0, data.size, LARGEST_MESSAGE_BYTES)
    return [start(data[at : at + LARGEST_MESSAGE_BYTES], rank, tag) for at in pieces]


def _words(by_rank: dict[int, list[Parts]]) -> int:
    """Return the number of elements of the views that are sent to ranks, or received from ranks."""
    return sum(x.size for views in by_rank.values() for parts in views for x in parts)


def _flat(places: list[Parts]) -> list[np.ndarray]:
    return [x.view(np.uint8) for place in places for x in place]


def _packed(places: list[Parts]) -> np.ndarray:
    """Return the elements of views as contiguous bytes; a single view is not copied."""
    flat = _flat(places)
    return flat[0] if len(flat) == 1 else np.concatenate(flat) if flat else np.empty(0, np.uint8)


def _buffer(places: list[Parts], adds: bool) -> np.ndarray:
    """Return the receive buffer of a message for views: the view itself if it is the only one, and nothing is added."""
    flat = _flat(places)
    return flat[0] if len(flat) == 1 and not adds else np.empty(sum(x.size for x in flat), np.uint8)


@np.errstate(over="ignore", invalid="ignore")  # if warnings are errors, only the rank that adds raises one
def _arrived(places: list[Parts], data: np.ndarray, adds: bool, join: Join | None, before: bool) -> None:
    """Copy, add or join a message into the views `places`.   before : its sender is an earlier rank than this one."""
    if not adds and len(_flat(places)) == 1:
        return  # the message was received in place
    at = 0
    for place in places:
        ends = [*accumulate((x.nbytes for x in place), initial=at)]
        parts: Parts = tuple(data[lo:hi].view(x.dtype) for lo, hi, x in zip(ends, ends[1:], place))
        at = ends[-1]
        if adds and join is None:
            for x, y in zip(place, parts):
                np.add(*((y, x) if before else (x, y)), out=x)
            continue
        if adds and join is not None:
            parts = join(parts, place) if before else join(place, parts)
        for x, y in zip(place, parts):
            x[...] = y
