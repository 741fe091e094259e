"""Reductions over the ranks of a grid row or a group: each part is sent to its owner, which adds parts in fixed order.

The words sent are the words counted, and parts arrive while ranks multiply.  (An MPI library sends up to 1.6 times as
many words between hosts, and reduces device memory on the host, if at all.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder, Then
from pdgemm.local.arrays.device import Array, Pinned, of
from pdgemm.local.arrays.elementwise import CONVERT, Combine
from pdgemm.transport.movers.staged import to_staging

_ADD = Combine(1, 1)


class Sum:
    """An `Arrival` that receives a part from each of `sources` in turn, adds it to `total`, and then is complete.

    arriving : workspace of the size of `total`.   staged : the same on the host, where MPI is not GPU-aware.
    empty    : `total` is not initialised, and the first part is copied to it; only on the host.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        sources: Iterable[int],
        total: Array,
        arriving: Array,
        staged: Pinned | None,
        tag: int,
        recorder: Recorder,
        empty: bool = False,
    ) -> None:
        self._comm, self._sources, self._tag, self._recorder = comm, iter(sources), tag, recorder
        self._total, self._empty = total, empty
        self._received: Any = staged.host if staged else arriving
        self._part: Array = staged.device if staged else arriving
        self._receive()

    def Test(self) -> bool:
        while self._request is not None and self._request.Test():
            self._add()
        return self._request is None

    def Wait(self) -> None:
        while self._request is not None:
            self._request.Wait()
            self._add()

    def _receive(self) -> None:
        source, self._request = next(self._sources, None), None
        if source is not None:
            self._over = self._recorder.moving("reduce", self._total.nbytes)
            to = self._total if self._empty else self._received
            self._request = self._comm.Irecv(to, source=source, tag=self._tag)

    def _add(self) -> None:
        self._over()
        if self._empty:
            self._empty = False
        elif of(self._total):
            with self._recorder.phase("pack"):  # in the copy stream, not behind a product that was started meanwhile
                _ADD(self._total, self._part)
            self._recorder.synchronize_copies()
        else:  # timed in the phase of the caller, which polls or waits
            self._total += self._part
        self._receive()


def start_reduction(
    comm: MPI.Comm,
    panel: Array,
    arriving: Array,
    root: int,
    slot: Any,
    recorder: Recorder,
    staged: Pinned | None,
    poll: Callable[[], object],
) -> list[Any]:
    """Start adding the contiguous panels of all ranks to root's panel, which is complete when the slot is free.

    arriving : workspace for one more panel on root.   staged : a host buffer on each rank, if MPI is not GPU-aware.
    Returns arrivals to track.
    """
    flat, tag = panel.ravel(order="K"), slot.tag
    if comm.rank != root:
        recorder.traffic.sent(panel.size)
    else:
        for _ in range(comm.size - 1):
            recorder.traffic.received(panel.size)

    def start() -> Any:
        if comm.rank == root:
            others = ((root + distance) % comm.size for distance in range(1, comm.size))
            return Sum(comm, others, flat, arriving.ravel(order="K"), staged, tag, recorder)
        if staged:
            to_staging(staged, flat, recorder)
            recorder.synchronize_copies()
        return comm.Isend(staged.host if staged else flat, dest=root, tag=tag)

    if of(panel):  # the product may still run in its stream
        slot.users += [Then(MPI.REQUEST_NULL, wait) for wait in recorder.record_products(poll)]
        slot.users.append(Then(MPI.REQUEST_NULL, lambda: start().Wait()))
        return []
    started = start()
    slot.users.append(started)
    return [started]


def reduce_scatter(
    comm: MPI.Comm,
    packed: Array,
    mine: Array,
    counts: list[int],
    recorder: Recorder,
    arriving: Array,
    staged: tuple[Pinned, Pinned] | None,
) -> list[Any]:
    """Start mine := the sum of all partial sums for this rank; `packed` has a part for each rank, in rank order.

    arriving : workspace for one more part.   staged : host buffers for `packed` and for `arriving`, where MPI is not
        GPU-aware.
    Returns the arrivals after which `mine` is complete, and the buffers may be rewritten.
    """
    me, starts, leaving = comm.rank, np.cumsum([0, *counts]).tolist(), packed
    if staged:
        to_staging(staged[0].cut(0, packed.size), packed, recorder)
        leaving = staged[0].host
    with recorder.phase("post"):
        recorder.synchronize_copies()
        others = [(me + distance) % comm.size for distance in range(1, comm.size)]
        sends = [comm.Isend(leaving[starts[to] : starts[to + 1]], dest=to) for to in others if counts[to]]
    if mine.size:
        with recorder.phase("pack" if others else "compute"):  # before the sums, for which the host may wait
            CONVERT(mine, packed[starts[me] : starts[me + 1]])
    return [*sums_of_others(comm, mine, recorder, arriving, staged[1] if staged else None), *sends]


def sums_of_others(
    comm: MPI.Comm, mine: Array, recorder: Recorder, arriving: Array, staged: Pinned | None, empty: bool = False
) -> list[Any]:
    """Start adding to `mine` the other ranks' partial sums for this rank; the rank before this one is the first.

    Arguments as in `Sum` and `reduce_scatter`.   Returns arrivals to track; [] if `mine` is empty.
    """
    if not mine.size:
        return []
    sources, host = [(comm.rank - x) % comm.size for x in range(1, comm.size)], staged and staged.cut(0, mine.size)
    return [Sum(comm, sources, mine, arriving[: mine.size], host, 0, recorder, empty)]
