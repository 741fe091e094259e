"""Movers broadcast a panel from its owner to the ranks of a grid row or column; all movers have one signature.

    broadcast(comm, x, root, slot, recorder)

starts a nonblocking broadcast of root's contiguous array `x` into the `x` of every other rank of `comm`.  It appends to
`slot.arrivals` the requests that must complete before `x` may be read, and to `slot.users` the requests that must
complete before `x` may be rewritten.  Collective over `comm`, which has at least two ranks.  Words and messages are
counted in `recorder.traffic` when they are passed to MPI.

Where ranks read each other's memory no panel is sent: panels and partial sums are read through
`pdgemm.transport.movers.node_arrays`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from pdgemm.errors import ArgumentError
from pdgemm.names import AnyName
from pdgemm.schedules.mover_registry import IBCAST, NCCL, RING, Mover, add_mover, mover_choices
from pdgemm.transport.movers.nccl import nccl
from pdgemm.transport.movers.ring import ibcast, ring

Broadcast = Callable[[MPI.Comm, Any, int, Any, Any], None]

BROADCASTS: dict[str, Broadcast] = {IBCAST.name: ibcast, RING.name: ring, NCCL.name: nccl}


def register_mover(mover: Mover, broadcast: Broadcast) -> AnyName:
    """Register a mover that sends MPI messages, and its broadcast function, on all ranks before its first use.

    Returns its name.
    """
    if mover.name in mover_choices() or mover.by != "messages":
        raise ArgumentError(f"mover {mover.name!r} exists already, or does not send MPI messages")
    add_mover(mover)
    BROADCASTS[mover.name] = broadcast
    return AnyName(mover.name)
