"""Pass a panel once around a ring: point-to-point messages only."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pdgemm.timing import Traffic


def ring(comm: MPI.Comm, x: Any, root: int, slot: Any, traffic: Traffic) -> None:
    """Each rank receives x from the one before it and forwards it, until all but root have it.

    A neighbour may start panel t + 1 as its root before it forwards panel t, so the order of arrival
    says nothing: panels in flight have tags.
    """
    tag = slot.tag
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def forward() -> None:
        if after != root:
            traffic.sent(x.size)
            slot.users.append(comm.Isend(x, dest=after, tag=tag).Wait)

    if comm.rank == root:
        forward()
        return
    request = comm.Irecv(x, source=before, tag=tag)
    traffic.received(x.size)

    def arrive() -> None:
        request.Wait()
        forward()

    slot.arrivals.append(arrive)
