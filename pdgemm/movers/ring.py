"""Pass a panel once around a ring, or along a chain of ranks: point-to-point messages only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder, Then

Wait = Callable[[], object]
_NOTHING = np.empty(0, np.uint8)


def ring(comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Recorder) -> None:
    """Each rank receives x from the one before it and forwards it, until all but root have it."""
    relay(comm, x, [*range(root, comm.size), *range(root)], slot, recorder)


def relay(comm: MPI.Comm, x: Any, chain: Sequence[int], slot: Any, recorder: Recorder) -> None:
    """Pass x along a chain of ranks, of which this is one, from the first to the last.

    A neighbour may start panel t + 1 as its root before it forwards panel t, so the order of arrival
    says nothing: panels in flight have tags.
    """
    tag, at = slot.tag, chain.index(comm.rank)

    def forward() -> None:
        if at + 1 < len(chain):
            recorder.traffic.sent(x.size)
            slot.users.append(comm.Isend(x, dest=chain[at + 1], tag=tag).Wait)

    if at == 0:
        recorder.settle()
        forward()
        return
    request = recorder.coming("ring", x, comm.Irecv(x, source=chain[at - 1], tag=tag))
    slot.arrivals.append(Then(request, forward))


def announce(comm: MPI.Comm, readers: Sequence[int], fence: Wait, slot: Any, recorder: Recorder) -> None:
    """Tell ranks of this node, when a panel is complete, that they may read it here; it is free when all have."""
    tag = slot.tag

    def arrived() -> None:
        fence()
        for reader in readers:
            recorder.traffic.sent(0)
            slot.users.append(comm.Isend(_NOTHING, dest=reader, tag=tag).Wait)

    slot.arrivals.append(Then(MPI.REQUEST_NULL, arrived))
    for reader in readers:
        recorder.traffic.received(0)
        slot.users.append(comm.Irecv(np.empty(0, np.uint8), source=reader, tag=tag).Wait)
    slot.users.append(fence)


def follow(comm: MPI.Comm, receiver: int, fence: Wait, slot: Any, recorder: Recorder) -> None:
    """Read a panel in the memory of the rank that announces it, and tell when it has been read."""
    tag = slot.tag
    request = comm.Irecv(np.empty(0, np.uint8), source=receiver, tag=tag)
    recorder.traffic.received(0)

    def done() -> None:
        fence()
        recorder.traffic.sent(0)
        slot.users.append(comm.Isend(_NOTHING, dest=receiver, tag=tag).Wait)

    slot.arrivals.append(Then(request, fence))
    slot.when_read.append(done)
