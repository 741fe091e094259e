"""Add up what the ranks of a row, or of a group, have: by MPI on the host; of a device, message by message.

MPI libraries reduce device memory on the host, if at all, and not while something else is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.arrays.device import Array, Pinned, of
from pdgemm.arrays.elementwise import CONVERT, Combine
from pdgemm.instrument.recorder import Recorder, Then
from pdgemm.movers.staged import to_room

_ADD = Combine(1, 1)


def reduce(
    comm: MPI.Comm,
    panel: Array,
    total: Array,
    root: int,
    slot: Any,
    recorder: Recorder,
    staged: Pinned | None,
    poll: Callable[[], object],
) -> Array:
    """Start adding up the contiguous panels of all ranks on root, and return where: complete when the slot is free.

    total : room for one more on root.   staged : likewise, on all ranks, where MPI cannot read a device's memory.
    Counted as one message from every other rank to root.
    """
    if comm.rank != root:
        recorder.traffic.sent(panel.size)
    else:
        for _ in range(comm.size - 1):
            recorder.traffic.received(panel.size)
    if of(panel) is None:
        over = recorder.moving("reduce", panel.nbytes)
        request = comm.Ireduce(panel, total if comm.rank == root else None, MPI.SUM, root=root)
        slot.users.append(Then(request, over).Wait)
        return total
    slot.users += recorder.multiplied(poll)
    slot.users.append(lambda: _gather(comm, panel, total, root, slot.tag, recorder, staged))
    return panel


def _gather(
    comm: MPI.Comm, panel: Array, total: Array, root: int, tag: int, recorder: Recorder, staged: Pinned | None
) -> None:
    """The panel of each rank to root, which adds it to its own."""
    device = of(panel)
    assert device is not None
    flat = panel.ravel(order="K")
    if comm.rank != root:
        if staged:
            to_room(staged, flat, recorder)
            recorder.settle()
        comm.Isend(staged.host if staged else flat, dest=root, tag=tag).Wait()
        return
    arrived = staged.device if staged else total.ravel(order="K")
    for distance in range(1, comm.size):
        over = recorder.moving("reduce", panel.nbytes)
        comm.Irecv(staged.host if staged else arrived, source=(root + distance) % comm.size, tag=tag).Wait()
        over()
        with recorder.phase("compute"):
            _ADD(flat, arrived)
        for wait in recorder.multiplied(_nothing):
            wait()


def reduce_scatter(
    comm: MPI.Comm,
    packed: Array,
    mine: Array,
    counts: list[int],
    recorder: Recorder,
    another: Array,
    staged: tuple[Pinned, Pinned] | None,
) -> None:
    """mine := the sum of the ranks' parts for this one; `packed` has a part for each, one behind the other.

    another : on a device, room for one more part.   staged : room on the host for `packed`, and for `another`, where
        MPI cannot read a device's memory.
    """
    device = of(packed)
    if device is None:
        over = recorder.moving("reduce", packed.nbytes)
        with recorder.phase("wait"):
            comm.Reduce_scatter(packed, mine, counts, MPI.SUM)
            over()
        return
    starts = np.cumsum([0, *counts])
    leaving, arriving = (packed, another[: mine.size])
    if staged:
        to_room(staged[0].cut(0, packed.size), packed, recorder)
        leaving, arriving = staged[0].host, staged[1].host[: mine.size]
    with recorder.phase("post"):
        recorder.settle()
        sends = [
            comm.Isend(leaving[starts[to] : starts[to + 1]], dest=to)
            for to in ((comm.rank + distance) % comm.size for distance in range(1, comm.size))
            if counts[to]
        ]
    with recorder.phase("compute"):
        CONVERT(mine, packed[starts[comm.rank] : starts[comm.rank + 1]])
    for distance in range(1, comm.size) if mine.size else ():
        over = recorder.moving("reduce", mine.nbytes)
        with recorder.phase("wait"):
            comm.Irecv(arriving, source=(comm.rank - distance) % comm.size).Wait()
            over()
        with recorder.phase("compute"):
            _ADD(mine, staged[1].device[: mine.size] if staged else arriving)
        for wait in recorder.multiplied(_nothing):
            wait()
    with recorder.phase("wait"):
        MPI.Request.Waitall(sends)


def _nothing() -> None:
    """To be done while a product is waited for."""
