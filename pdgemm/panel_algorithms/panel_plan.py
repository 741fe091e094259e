"""The plan of a factorisation or solve: redistributions and panel algorithms, one after another, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from pdgemm.arrays import device as devices
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout, Order
from pdgemm.instrument.recorder import Traffic
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.model.machine import Machine
from pdgemm.panel_schedules.panel_schedule import PanelSchedule, is_balanced
from pdgemm.planning.simulator import simulate
from pdgemm.schedules.exchange import Exchange, plan_exchange
from pdgemm.support.tables import Table
from pdgemm.support.text import in_bytes, in_seconds, in_words


@dataclass(frozen=True)
class PanelPlan:
    """What a function of `pdgemm.linalg` does: a value, which can be printed and compared.

    stages : redistributions, each with the name of its matrix, and panel algorithms, in the order in which they run.
    size   : number of ranks.
    """

    stages: tuple[tuple[str, Exchange | PanelSchedule], ...]
    size: int
    machine: Machine = field(repr=False, compare=False)

    @property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        return sum(stage.flops for _, stage in self.stages if isinstance(stage, PanelSchedule))

    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages of a rank."""
        return sum((stage.traffic(rank) for _, stage in self.stages), Traffic())

    @cached_property
    def words(self) -> int:
        """The words that the busiest rank receives."""
        return max(self.traffic(rank).words_received for rank in range(self.size))

    @cached_property
    def seconds(self) -> float:
        """The predicted time of the slowest rank, stage by stage."""
        return sum(_seconds(stage, self.machine, self.size) for _, stage in self.stages)

    def extra_bytes(self, rank: int | None) -> int:
        """Return the most bytes of buffers that a rank needs at a time, beside copies of matrices."""
        return max((stage.extra_bytes(rank) for _, stage in self.stages), default=0)

    def __str__(self) -> str:
        rows = []
        for name, stage in self.stages:
            what = f"redistribute {name}" if isinstance(stage, Exchange) else stage.algorithm
            where = f"to {stage.target}" if isinstance(stage, Exchange) else f"{stage.A}, {len(stage.steps)} panels"
            most = [stage.traffic(rank) for rank in range(self.size)]
            rows.append(
                (
                    what,
                    where,
                    in_words(max(x.words_received for x in most)),
                    str(max(x.messages_received for x in most)),
                    in_bytes(stage.extra_bytes(None)),
                    in_seconds(_seconds(stage, self.machine, self.size)),
                )
            )
        return str(Table(("stage", "", "words", "messages", "buffers", "time"), rows, words=("stage", "")))


def _seconds(stage: Exchange | PanelSchedule, machine: Machine, size: int) -> float:
    if isinstance(stage, Exchange):
        return max(stage.seconds(machine, rank) for rank in range(size))
    return simulate(stage, machine, size).seconds


def laid_out(A: DistMatrix, block: int, order: Order | None = None) -> Layout:
    """Return the layout that a panel algorithm works in: that of A if it shares the work evenly, else square blocks."""
    given, order = A.layout_in(A.grid), order or A.order
    if is_balanced(given, block):
        return replace(given, conjugated=False, order=order)
    base = A.grid.base
    place = base.rank_map_in(A.grid)
    assert place is not None
    return Layout(Distribution.over(base.shape, A.shape, block), place, A.dtype, order)


def moved(A: DistMatrix, name: str, target: Layout) -> list[tuple[str, Exchange]]:
    """Return the redistribution of A to a layout, if it is one; a copy in the same layout sends nothing."""
    given = A.layout_in(A.grid)
    if given.same_owners(target):
        return []
    device = devices.of(A.stored)
    shared = A.shared and A.grid.ranks_per_node is None
    on = (device.name if device else "", bool(device and device.reach(A.grid).staged), False)
    return [(name, plan_exchange(given, target, A.grid.size, True, None, shared, *on))]
