"""The registry of movers, which transfer panels from their owners to the other ranks of a grid row or column.

The choices of callers and of the command line, traffic counts, simulated messages, modelled seconds and calibrated
links all derive from these entries.  The broadcast functions of the movers are in `pdgemm.transport.movers`, which
also registers further movers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Literal

import numpy as np


@dataclass(frozen=True, eq=False)
class Mover:
    """A mover transfers a panel from its owner to the other ranks of a grid row or column.

    name    : the name by which callers request it and reports show it.
    summary : one line that describes it.
    by      : "messages": MPI messages; "staging": MPI messages through host memory; "nccl": NCCL; "reading": the panel
        is read in place in its owner's memory; "copying": it is copied from its owner's memory, and the copy is read.
    link    : the kind of link whose times are used if a machine was not measured with this mover.
    on_host : the mover works for matrices on the host, and not only for matrices on a device.
    sender  : sender(distances, parts) returns, for each receiver, the rank that sends the panel to it.  All ranks are
        given by their distances, 0 to parts - 1, after the owner of the panel in the row or column of `parts` ranks.
    hops    : hops(parts) returns the number of successive messages until the last rank has the panel.
    relayed : panels are read in place on each node, and relayed from node to node.
    """

    name: str
    summary: str
    by: Literal["messages", "staging", "nccl", "reading", "copying"]
    link: str = "ring"
    on_host: bool = True
    sender: Callable[[np.ndarray, int], np.ndarray] = lambda distances, parts: 0 * distances
    hops: Callable[[int], int] = lambda parts: 1
    relayed: bool = False

    @cached_property
    def reads(self) -> bool:
        """Do ranks read panels in their owners' memory?"""
        return self.by in ("reading", "copying")

    def senders(self, parts: int) -> np.ndarray:
        """Return, for the ranks at distances 1 to parts - 1 after a panel's owner, the distances of their senders."""
        return self.sender(np.arange(1, parts), parts)


SHARED = Mover(
    "shared",
    "panels are read in place in node-shared memory, and relayed once to each other node",
    "reading",
    relayed=True,
)
IBCAST = Mover(
    "ibcast", "`MPI_Ibcast`: a tree of the MPI library's choice", "messages", "ibcast",
    hops=lambda parts: max(1, (parts - 1).bit_length()),
)  # fmt: skip
RING = Mover(
    "ring", "each rank passes panels on to the next, point to point", "messages",
    sender=lambda distances, parts: distances - 1,
    hops=lambda parts: max(1, parts - 1),
)  # fmt: skip
STAGED = Mover("staged", "a ring through pinned host memory", "staging", on_host=False)
IPC = Mover("ipc", "panels are copied from the other GPUs of the node, by CUDA IPC", "copying", on_host=False)
NCCL = Mover("nccl", "NCCL's broadcast, with one GPU per rank", "nccl", on_host=False)
MOVERS = {mover.name: mover for mover in (SHARED, IBCAST, RING, STAGED, IPC, NCCL)}

AUTO, BY_MPI = "auto", "mpi"
POLICIES = {
    AUTO: "the first available one of `shared` or `ipc`, `nccl`, `mpi` and `staged`",
    BY_MPI: "the faster of `ibcast` and `ring` by the model; on GPUs it passes device pointers to MPI",
}


def add_mover(mover: Mover) -> None:
    """Add a mover; `pdgemm.transport.movers.register_mover` adds its broadcast function as well."""
    MOVERS[mover.name] = mover
    by_messages.cache_clear()


def mover_choices() -> tuple[str, ...]:
    """Return the policies and movers that a caller may request."""
    return (*POLICIES, *MOVERS)


@cache
def by_messages() -> tuple[str, ...]:
    """Return the movers from which the cost model chooses; the first one wins ties."""
    return tuple(mover.name for mover in MOVERS.values() if mover.by == "messages")


def host_movers() -> tuple[str, ...]:
    """Return the movers for matrices on the host."""
    return tuple(mover.name for mover in MOVERS.values() if mover.on_host)


def reads(name: str) -> bool:
    """Do ranks read each other's memory with this mover?"""
    mover = MOVERS.get(name)
    return mover is not None and mover.reads


@lru_cache(maxsize=256)
def fan_out(mover: Mover, parts: int) -> tuple[int, list[tuple[int, int]]]:
    """Return how often most ranks send a panel, and, for the other ranks, pairs (distance, additional times).

    distance : the distance of such a rank after the owner of the panel.
    """
    sent = np.bincount(mover.senders(parts), minlength=parts)
    most = int(np.bincount(sent).argmax())
    return most, [(distance, int(sent[distance]) - most) for distance in np.flatnonzero(sent != most).tolist()]
