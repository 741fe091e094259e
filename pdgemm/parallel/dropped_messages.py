"""Messages of a failed operation are received and dropped before their communicator is freed.

Otherwise such a message may arrive after its communicator has been freed.  MPI libraries reuse the number of a freed
communicator, so that a later communicator would receive the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.support.waits import Wait, poll_until
from pdgemm.transport.movers.arrivals import Arrival, abandoned

_EMPTY = np.empty(0, np.uint8)


def drop_messages(comms: Sequence[MPI.Comm], arrivals: Sequence[Arrival]) -> None:
    """Receive and drop all messages that ranks have sent on communicators.  Collective over each of them.

    arrivals : the transfers of this rank in progress, which are cancelled; a later wait for them raises GridError.

    On each communicator a rank sends each other rank an empty last message.  Messages do not overtake one another, so
    all earlier messages of the rank have arrived when the last one arrives.
    """
    requests = [request for arrival in arrivals for request in abandoned(arrival)]
    for request in requests:
        request.Cancel()
    others = [(comm, rank) for comm in comms for rank in range(comm.size) if rank != comm.rank]
    requests += [comm.Isend(_EMPTY, rank, last_tag()) for comm, rank in others]
    with Wait():
        for comm, rank in others:
            poll_until(partial(_last_has_come, comm, rank))
        MPI.Request.Waitall(requests)


def last_tag() -> int:
    """Return the tag of a rank's last message: the largest of all, which no other message has.

    Only MPI.COMM_WORLD is sure to have the attribute (MPI 4.1, section 9.1.2); it holds for all communicators.
    """
    largest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return int(largest)


def _last_has_come(comm: MPI.Comm, rank: int) -> bool:
    """Receive and drop the messages of a rank that have arrived, and return whether its last one was among them."""
    status, last = MPI.Status(), last_tag()
    while message := comm.Improbe(rank, MPI.ANY_TAG, status):
        message.Recv([np.empty(status.Get_count(MPI.BYTE), np.uint8), MPI.BYTE], status)
        if status.tag == last:
            return True
    return False
