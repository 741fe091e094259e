"""The plan of a factorisation or solve: redistributions, products and factorisations in turn, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from pdgemm.instrument.recorder import Traffic
from pdgemm.model.machine import Machine
from pdgemm.panel_schedules.panel_schedule import PanelSchedule
from pdgemm.panel_schedules.tsqr_schedule import TallSchedule
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.simulator import simulate
from pdgemm.schedules.exchange import Exchange
from pdgemm.support.text import Table, in_bytes, in_seconds, in_words, named, sides

Stage = Exchange | ProductPlan | PanelSchedule | TallSchedule


@dataclass(frozen=True)
class PanelPlan:
    """What a function of `pdgemm.linalg` does: a value, which can be printed and compared.

    stages : redistributions, each with the name of its matrix, products and factorisations, in the order in which they
        run.
    size   : number of ranks.
    """

    stages: tuple[tuple[str, Stage], ...]
    size: int
    machine: Machine = field(repr=False, compare=False)

    @property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        return sum(_flops(stage) for _, stage in self.stages)

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
            what, where = _described(name, stage)
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


def _flops(stage: Stage) -> int:
    return 0 if isinstance(stage, Exchange) else (stage.product if isinstance(stage, ProductPlan) else stage).flops


@lru_cache(maxsize=128)  # `qr` compares plans in each call
def _seconds(stage: Stage, machine: Machine, size: int) -> float:
    if isinstance(stage, Exchange):
        return max(stage.seconds(machine, rank) for rank in range(size))
    return stage.seconds if isinstance(stage, ProductPlan) else simulate(stage, machine, size).seconds


def _described(name: str, stage: Stage) -> tuple[str, str]:
    """Return what is done, and where."""
    if isinstance(stage, Exchange):
        return f"redistribute {name}", f"to {stage.target}"
    if isinstance(stage, ProductPlan):
        return "product", f"{sides(*stage.mnk)}, {named(stage.algorithm, stage.inside)}, {sides(*stage.shape)} grid"
    if isinstance(stage, TallSchedule):
        return stage.algorithm, f"{sum(stage.rows)} x {stage.k}, {stage.dtype}, on {len(stage.rows)} ranks"
    return stage.algorithm, f"{stage.A}, {len(stage.steps)} panels"
