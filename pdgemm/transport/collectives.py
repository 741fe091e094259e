"""Collectives carried out step by step, as their schedules say, by messages that are counted when they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def sums_of_parts(before: Parts, behind: Parts) -> Parts:
    """Return the sums of vectors."""
    return tuple(x + y for x, y in zip(before, behind))


def carry_out(
    collective: Collective | None,
    comm: MPI.Comm,
    vectors: Sequence[Array],
    counted: Traffic,
    join: Join = sums_of_parts,
) -> None:
    """Carry out a collective.  Collective over `collective.ranks`; all other ranks return at once.

    comm    : the communicator in which `collective.ranks` are rank numbers.
    vectors : `collective.arrays` contiguous arrays of one dimension, with space for all parts; overwritten.  On entry
        a rank has its own part, in a reduction its addends, and the root of a broadcast or scatter all parts; on exit
        the parts that the operation assigns to it, and intermediate values in the other parts.  Arrays on a device are
        copied through the host.
    counted : the traffic to which words and messages are added.
    join    : function that returns the joined parts of two ranks; by default their sum.

    The ranks do not compare their arguments: all must pass the same collective, and vectors of its length and of the
    same types.
    """
    if collective is None or comm.rank not in collective.ranks or len(collective.ranks) == 1:
        return
    host = [devices.to_host(x) for x in vectors]
    _carry_out(collective, comm, _Vectors(host, collective.offsets), counted, join)
    for x, y in zip(vectors, host):
        if devices.of(x):
            set_elements(x.reshape(1, -1), y.reshape(1, -1))


def all_to_all(
    collective: Collective, comm: MPI.Comm, parts: Sequence[np.ndarray], counted: Traffic
) -> list[np.ndarray]:
    """Send `parts[r]` to the r-th rank of the collective, and return the parts that the ranks send here.  Collective.

    The ranks do not compare their arguments: all must pass the same collective, and parts as long as its counts.
    """
    p, me = len(collective.ranks), collective.ranks.index(comm.rank)
    mine: dict[int, Parts] = {me * p + to: (np.ascontiguousarray(part),) for to, part in enumerate(parts)}
    pairs, nothing = _Pairs(collective, mine), (np.empty(0, collective.dtype),)
    _carry_out(collective, comm, pairs, counted, sums_of_parts)
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
    """The parts that one rank holds, by pair of source and target rank: its own parts, and parts that it receives."""

    def __init__(self, collective: Collective, parts: dict[int, Parts]) -> None:
        self._counts, self._dtype, self.parts = collective.counts, collective.dtype, parts

    def views(self, first: int, number: int) -> list[Parts]:
        return [self.parts[first]] if self._counts[first] else []

    def receiving(self, first: int, number: int) -> list[Parts]:
        """Allocate the array in which a part arrives, and return it."""
        self.parts[first] = (np.empty(self._counts[first], self._dtype),)
        return self.views(first, number)


def _carry_out(collective: Collective, comm: MPI.Comm, store: _Vectors | _Pairs, counted: Traffic, join: Join) -> None:
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
        requests = [x for source, data in into for x in _started(comm.Irecv, data, collective.ranks[source])]
        received = len(requests)
        requests += [x for to, data in out for x in _started(comm.Isend, data, collective.ranks[to])]
        if requests:
            with Wait(comm):
                MPI.Request.Waitall(requests)
        for source, data in into:
            _arrived(places[source], data, join if step.adds else None, source < me)
        counted.words_sent += _words(leaving)
        counted.words_received += _words(places)
        counted.messages_sent += len(requests) - received
        counted.messages_received += received


def _started(start: Callable[..., Any], data: np.ndarray, rank: int) -> list[Any]:
    """Start to send or receive bytes in messages of LARGEST_MESSAGE_BYTES at most; none for an empty array."""
    pieces = range(0, data.size, LARGEST_MESSAGE_BYTES)
    return [start(data[at : at + LARGEST_MESSAGE_BYTES], rank) for at in pieces]


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
    """Return the receive buffer of a message for views: a single view itself, unless its message is added to it."""
    flat = _flat(places)
    return flat[0] if len(flat) == 1 and not adds else np.empty(sum(x.size for x in flat), np.uint8)


def _arrived(places: list[Parts], data: np.ndarray, join: Join | None, before: bool) -> None:
    """Copy or join a message into the views `places`.   before : the message is from an earlier rank than this one."""
    if join is None and len(_flat(places)) == 1:
        return  # the message was received in place
    at = 0
    for place in places:
        ends = [*accumulate((x.nbytes for x in place), initial=at)]
        parts: Parts = tuple(data[lo:hi].view(x.dtype) for lo, hi, x in zip(ends, ends[1:], place))
        at = ends[-1]
        if join is not None:
            parts = join(parts, place) if before else join(place, parts)
        for x, y in zip(place, parts):
            x[...] = y
