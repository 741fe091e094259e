"""The mover `ibcast` broadcasts panels by MPI_Ibcast, in a tree of the MPI library's choice."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.schedules.mover_registry import IBCAST


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
