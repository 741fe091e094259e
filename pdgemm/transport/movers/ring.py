"""Messages of movers: MPI_Ibcast, a shift to a neighbour, and the ring, which forwards a panel along a chain of ranks.

Ranks of a node that read each other's memory send signals: messages without words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder, Then
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.mover_registry import IBCAST, RING


def send(comm: MPI.Comm, panel: Any, to: int, recorder: Recorder, tag: int = 0) -> list[Any]:
    """Start sending a panel; return the requests after which it may be rewritten.

    panel : flat and contiguous; an empty panel is not sent, a large panel in pieces of LARGEST_MESSAGE_BYTES.
    tag : if panels may be sent in any order, the panel's own tag among the panels in flight.
    """
    recorder.synchronize_copies()
    leaving = []
    for piece in pieces(wire(panel)):
        leaving.append(comm.Isend(piece, dest=to, tag=tag))
        recorder.traffic.sent(piece.size)
    return leaving


def receive(comm: MPI.Comm, panel: Any, source: int, recorder: Recorder, tag: int = 0) -> list[Any]:
    """Start receiving a panel that `send` sends; return the requests after which it may be read."""
    coming = pieces(wire(panel))
    return [recorder.coming("shift", piece, comm.Irecv(piece, source=source, tag=tag)) for piece in coming]


def pieces(x: Any) -> Iterator[Any]:
    """Return the pieces of an array that are sent as one message each; an empty array has no piece."""
    words = LARGEST_MESSAGE_BYTES // x.itemsize
    return (x[start : start + words] for start in range(0, x.size, words))


def ibcast(comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Recorder) -> None:
    """Start a broadcast of x from root; the broadcast is counted as one message from root to every other rank.

    The ranks that forward x inside the MPI library are not visible; total words and messages do not depend on them.
    """
    if comm.rank == root:
        recorder.synchronize_copies()
        recorder.traffic.sent(x.size, copies=comm.size - 1)
        # root may read x before the broadcast completes, but not rewrite it
        slot.users.append(comm.Ibcast(x, root=root))
    else:
        slot.arrivals.append(recorder.coming(IBCAST.name, x, comm.Ibcast(x, root=root)))


Wait = Callable[[], object]


def ring(comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Recorder) -> None:
    """Start a ring broadcast: each rank receives x from its predecessor and forwards it to its successor."""
    forward(comm, x, [*range(root, comm.size), *range(root)], slot, recorder)


def forward(comm: MPI.Comm, x: Any, chain: Sequence[int], slot: Any, recorder: Recorder) -> None:
    """Start forwarding x along a chain of ranks, which includes this rank, from the first to the last.

    A neighbour that is the root of panel t + 1 may send this panel before it forwards panel t.  So panels are matched
    by tag, and not by their order of arrival.
    """
    at, forward = chain.index(comm.rank), sender(comm, x, chain, slot, recorder)
    if at == 0:
        recorder.synchronize_copies()
        forward()
        return
    request = recorder.coming(RING.name, x, comm.Irecv(x, source=chain[at - 1], tag=slot.tag))
    slot.arrivals.append(Then(request, forward))


def sender(comm: MPI.Comm, x: Any, chain: Sequence[int], slot: Any, recorder: Recorder) -> Callable[[], None]:
    """Return a function that starts sending x to the rank after this rank in a chain, if there is one."""
    tag, after = slot.tag, chain.index(comm.rank) + 1

    def send() -> None:
        if after < len(chain):
            recorder.traffic.sent(x.size)
            slot.users.append(comm.Isend(x, dest=chain[after], tag=tag))

    return send


def announce(comm: MPI.Comm, readers: Sequence[int], fence: Wait, slot: Any, recorder: Recorder) -> None:
    """Notify readers on this node when a panel is complete; its buffer is free when all readers have read it."""
    tag = slot.tag

    def arrived() -> None:
        fence()
        for reader in readers:
            slot.users.append(signal(comm, reader, recorder, tag))

    slot.arrivals.append(Then(MPI.REQUEST_NULL, arrived))
    for reader in readers:
        slot.users.append(signal_from(comm, reader, recorder, tag))
    slot.users.append(Then(MPI.REQUEST_NULL, fence))


def follow(comm: MPI.Comm, receiver: int, fence: Wait, slot: Any, recorder: Recorder) -> None:
    """Make a slot wait for the signal of the rank that holds its panel; signal that rank after the panel was read."""
    tag = slot.tag

    def done() -> None:
        fence()
        slot.users.append(signal(comm, receiver, recorder, tag))

    slot.arrivals.append(Then(signal_from(comm, receiver, recorder, tag), fence))
    slot.when_read.append(done)


def signal(comm: MPI.Comm, to: int, recorder: Recorder, tag: int) -> MPI.Request:
    """Start sending a signal, which is counted as a message of no words."""
    recorder.traffic.sent(0)
    return comm.Isend(np.empty(0, np.uint8), dest=to, tag=tag)


def signal_from(comm: MPI.Comm, source: int, recorder: Recorder, tag: int) -> MPI.Request:
    """Return the request that completes with a signal from `source`."""
    recorder.traffic.received(0)
    return comm.Irecv(np.empty(0, np.uint8), source=source, tag=tag)
