"""A program as a value: a sequence of redistributions, products and factorisations, and its cost.  No MPI, no data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from pathlib import Path

from pdgemm.instrument.recorder import Traffic
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.replay_files import write_replay
from pdgemm.planning.machines.simulator import Simulation, exchange_seconds, simulate
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.schedules.exchanges.exchange import Exchange
from pdgemm.schedules.file_reads import FileReads
from pdgemm.schedules.schedule import Schedule
from pdgemm.support.text import Table, in_bytes, in_seconds, in_words

Stage = Schedule | ProductPlan


@dataclass(frozen=True)
class Program:
    """The stages of a function of `pdgemm.linalg`: a value, which can be printed and compared.

    stages : pairs (name of a matrix, its redistribution, product or factorisation), in the order in which they run.
    size   : number of ranks.
    """

    stages: tuple[tuple[str, Stage], ...]
    size: int
    machine: Machine = field(repr=False, compare=False)

    @property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        return sum(stage.flops for _, stage in self.stages)

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
        return sum(stage_seconds(stage, self.machine, self.size) for _, stage in self.stages)

    @property
    def bytes_read(self) -> int:
        """The bytes that all ranks together read of matrices in files."""
        return sum(x.bytes_read for x in self.schedules if isinstance(x, FileReads))

    def extra_bytes(self, rank: int | None) -> int:
        """Return the most bytes that a rank needs in any stage for buffers, and for copies in plans of products."""
        return max((stage.extra_bytes(rank) for _, stage in self.stages), default=0)

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules of all stages in the order in which they run, redistributions of products included."""
        return [schedule for _, stage in self.stages for schedule in stage.schedules]

    def simulate(self) -> Simulation:
        """Return the simulation of all stages on all ranks, message by message; the stages run one after the other.

        Raises ArgumentError if there are too many messages.
        """
        runs = (simulate(schedule, self.machine, self.size) for schedule in self.schedules)
        copying = sum(stage.copying_seconds for _, stage in self.stages if isinstance(stage, ProductPlan))
        return reduce(Simulation.then, runs, replace(Simulation.of_nothing(self.size), seconds=copying))

    def export(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the messages and the work of all ranks as a folder that SimGrid replays.  Local: call it on one rank.

        folder, overwrite, cost, errors : as in `write_replay`.
        """
        write_replay(self.schedules, self.machine, self.size, folder, overwrite)

    def __str__(self) -> str:
        rows = []
        for name, stage in self.stages:
            what, where = stage.described(name)
            most = [stage.traffic(rank) for rank in range(self.size)]
            rows.append(
                (
                    what,
                    where,
                    in_words(max(x.words_received for x in most)),
                    str(max(x.messages_received for x in most)),
                    in_bytes(stage.extra_bytes(None)),
                    in_seconds(stage_seconds(stage, self.machine, self.size)),
                )
            )
        return str(Table(("stage", "", "words", "messages", "buffers", "time"), rows, words=("stage", "")))


def stage_seconds(stage: Stage, machine: Machine, size: int) -> float:
    """Return the predicted time of the slowest rank in a stage."""
    if isinstance(stage, ProductPlan):
        return stage.seconds
    if isinstance(stage, Exchange):
        return max(exchange_seconds(stage, machine, rank) for rank in range(size))
    return _simulated_seconds(stage, machine, size)


@lru_cache(maxsize=128)  # `qr` compares plans in each call
def _simulated_seconds(stage: Schedule, machine: Machine, size: int) -> float:
    return simulate(stage, machine, size).seconds
