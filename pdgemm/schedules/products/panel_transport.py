"""The transport of the panels of a product, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pdgemm.schedules.mover_registry import MOVERS, NCCL, RING, STAGED, reads


@dataclass(frozen=True)
class PanelTransport:
    """How panels travel.   mover, nodes, staged, nccl : as in `Product`."""

    mover: str
    nodes: tuple[int, ...]
    staged: bool
    nccl: bool

    @cached_property
    def name(self) -> str:
        """The name by which reports show the transport."""
        if self.nccl:
            return NCCL.name
        through_host = self.staged and self.mover in (RING.name, "shift", "reduce_scatter")
        return STAGED.name if through_host else self.mover

    @cached_property
    def shared(self) -> bool:
        """Do ranks of a node read each other's memory?"""
        return reads(self.mover)

    @cached_property
    def fetched(self) -> bool:
        """Are panels of other ranks copied before they are multiplied, and not multiplied in place?"""
        return self.mover in MOVERS and MOVERS[self.mover].by == "copying"

    @cached_property
    def in_place(self) -> bool:
        """Are panels read in place, with all ranks on one node?"""
        return self.shared and not self.nodes
