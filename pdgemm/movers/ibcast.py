"""MPI_Ibcast: the library's own broadcast tree."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder


def ibcast(comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Recorder) -> None:
    """Broadcast x from root.  Counted as one message from root to every other rank.

    Which ranks forward it inside the library cannot be seen; the totals do not depend on it.
    """
    if comm.rank == root:
        recorder.settle()
        recorder.traffic.sent(x.size, copies=comm.size - 1)
        # root may go on reading x, but not rewrite it
        slot.users.append(comm.Ibcast(x, root=root).Wait)
    else:
        slot.arrivals.append(recorder.coming("bcast", x, comm.Ibcast(x, root=root)))
