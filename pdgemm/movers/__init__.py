"""How a panel travels from its owner to the ranks of a row or column: one signature for all.

    mover(comm, x, root, slot, recorder)

starts bringing root's contiguous array `x` into the `x` of every other rank of `comm`, returns at
once, and leaves in `slot.arrivals` what to test or wait for before `x` may be read, in `slot.users` what to
wait for before it may be rewritten.  Collective over `comm`, which has at least two ranks.  Words
and messages are counted in `recorder.traffic` where they are handed to MPI.

By "shared" nothing travels: ranks of one node read panels, and parts of sums, in each other's memory
(`pdgemm.movers.node_arrays`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from pdgemm.movers.ibcast import ibcast
from pdgemm.movers.nccl import nccl
from pdgemm.movers.ring import ring

Mover = Callable[[MPI.Comm, Any, int, Any, Any], None]

SHARED = "shared"
ON_DEVICES = ("staged", "ipc", "nccl")
BY_MPI: dict[str, Mover] = {"ibcast": ibcast, "ring": ring}
MOVERS: dict[str, Mover] = BY_MPI | {"nccl": nccl}
ASKED = ("auto", SHARED, "mpi", *BY_MPI, *ON_DEVICES)  # by a caller
