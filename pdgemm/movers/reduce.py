"""Reductions over the ranks of a row or of a group: by MPI on the host, message by message on a device.

MPI libraries reduce device memory on the host, if at all, and without overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.arrays.device import Array, Pinned, of
from pdgemm.arrays.elementwise import CONVERT, Combine
from pdgemm.instrument.recorder import Recorder, Then, nothing
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
    """Start reducing the contiguous panels of all ranks to root, and return the result, complete when the slot is free.

    total : workspace for one more panel on root.   staged : the same on all ranks' hosts, if MPI is not GPU-aware.
    The reduction is counted as one message from every other rank to root.
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
    slot.users += recorder.record_products(poll)
    slot.users.append(lambda: _gather(comm, panel, total, root, slot.tag, recorder, staged))
    return panel


def _gather(
    comm: MPI.Comm, panel: Array, total: Array, root: int, tag: int, recorder: Recorder, staged: Pinned | None
) -> None:
    """Send the panel of each rank to root, which adds it to its own."""
    device = of(panel)
    assert device is not None
    flat = panel.ravel(order="K")
    if comm.rank != root:
        if staged:
            to_room(staged, flat, recorder)
            recorder.synchronize_copies()
        comm.Isend(staged.host if staged else flat, dest=root, tag=tag).Wait()
        return
    arrived = staged.device if staged else total.ravel(order="K")
    for distance in range(1, comm.size):
        over = recorder.moving("reduce", panel.nbytes)
        comm.Irecv(staged.host if staged else arrived, source=(root + distance) % comm.size, tag=tag).Wait()
        over()
        with recorder.phase("compute"):
            _ADD(flat, arrived)
        for wait in recorder.record_products(nothing):
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
    """Assign mine := the sum of all partial sums for this rank; `packed` has a part for each, in their order.

    another : on a device, workspace for one more part.   staged : host buffers for `packed` and for `another`, where
        MPI is not GPU-aware.
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
        recorder.synchronize_copies()
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
        for wait in recorder.record_products(nothing):
            wait()
    with recorder.phase("wait"):
        MPI.Request.Waitall(sends)
