"""The base classes of the reports of all runs: counts on one rank, beside the predictions of the schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pdgemm.instrument.ownership import InNotebook
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.support.text import counted, in_rate, in_seconds, in_words

if TYPE_CHECKING:
    from mpi4py import MPI

    from pdgemm.grids.process_grid import ProcessGrid

PHASES = ("compute_seconds", "wait_seconds", "pack_seconds", "sync_seconds", "hidden_seconds")


@dataclass(frozen=True)
class VectorTraffic:
    """The traffic of this rank in reductions and gathers, whose results are numbers and arrays on all ranks."""

    counted: Traffic = field(default_factory=Traffic)
    predicted: Traffic = field(default_factory=Traffic)

    def __add__(self, other: VectorTraffic) -> VectorTraffic:
        return VectorTraffic(self.counted + other.counted, self.predicted + other.predicted)

    def __sub__(self, other: VectorTraffic) -> VectorTraffic:
        return VectorTraffic(self.counted - other.counted, self.predicted - other.predicted)


_of_process = VectorTraffic()


def count_vectors(traffic: VectorTraffic) -> None:
    """Add the traffic of one reduction to the total of this process."""
    global _of_process
    _of_process += traffic


def vectors_so_far() -> VectorTraffic:
    """Return the total over all reductions of this process; a function counts its own as a difference of two totals."""
    return _of_process


@dataclass(frozen=True, kw_only=True)
class RunReport(InNotebook):
    """Measurements on one rank of a run of one schedule, or of several schedules in turn.  Words are elements.

    seconds : wall time.
    counted, predicted : the traffic of this rank, as counted where messages are passed to MPI, and by formula.
    extra_bytes, predicted_extra_bytes : the memory of buffers beyond the matrices; for several steps, the maximum.
    vectors : the part of `counted` and `predicted` that belongs to reductions: norms, diagonals, sums of columns.
    """

    rank: int
    seconds: float
    counted: Traffic
    predicted: Traffic
    extra_bytes: int
    predicted_extra_bytes: int
    vectors: VectorTraffic = field(default_factory=VectorTraffic)

    # the communicator of the run; no field, because a communicator is no measurement, and cannot be sent
    _comm: ClassVar[Any] = None

    @classmethod
    def of_run(
        cls, recorder: Recorder, schedules: Sequence[Any], grid: ProcessGrid, seconds: float, /, **others: Any
    ) -> Self:
        """Return the report of a run: the counts of its recorder, and the predictions of its schedules or its plan.

        others : values of the fields that the subclass adds.
        """
        rank = grid.rank  # not from the communicator of the grid, which may have been freed
        shared: dict[str, Any] = {
            "rank": rank,
            "seconds": seconds,
            "counted": recorder.traffic,
            "predicted": sum((x.traffic(rank) for x in schedules), Traffic()),
            "extra_bytes": recorder.peak_bytes,
            "predicted_extra_bytes": max((x.extra_bytes(rank) for x in schedules), default=0),
        }
        return cls(**shared | others).with_ranks(grid.comm)

    def with_ranks(self, comm: MPI.Intracomm | None) -> Self:
        """Attach the communicator of the run to the report, and return the report."""
        object.__setattr__(self, "_comm", comm)
        return self

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values of some fields and the same communicator."""
        return replace(self, **fields).with_ranks(self._comm)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_comm"}

    @property
    def as_predicted(self) -> bool:
        """Do the words, the messages and the bytes of buffers equal the predictions of the schedules?"""
        return self.counted == self.predicted and self.extra_bytes == self.predicted_extra_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers and strings, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class MoveReport(RunReport):
    """Measurements of one redistribution, or of one reduction, on one rank."""

    name: str  # the name of the matrix, or of the reduction
    source: str  # the layout before
    target: str  # the layout after

    def __str__(self) -> str:
        traffic = self.counted
        return (
            f"{self.name} redistributed from {self.source} to {self.target}: rank {self.rank} received "
            f"{in_words(traffic.words_received)} and sent {in_words(traffic.words_sent)} "
            f"in {counted(traffic.messages_sent, 'message')}, {in_seconds(self.seconds)}"
        )


@dataclass(frozen=True, kw_only=True)
class GroupedReport(RunReport):
    """Measurements of one grouped product on one rank; groups, rows and flops are of all ranks together.

    rows : rows that travelled, counted once for each of their groups.
    compute_seconds : of the products of this rank.   imbalance : flops of the busiest rank / mean flops of the ranks.
    """

    groups: int
    rows: int
    flops: int
    local_flops: int
    compute_seconds: float
    imbalance: float

    def __str__(self) -> str:
        traffic, rate = self.counted, self.local_flops / self.compute_seconds if self.compute_seconds else 0.0
        return (
            f"{counted(self.rows, 'row')} in {counted(self.groups, 'group')}: rank {self.rank} received "
            f"{in_words(traffic.words_received)} and sent {in_words(traffic.words_sent)} "
            f"in {counted(traffic.messages_sent, 'message')}, and multiplied for {in_seconds(self.compute_seconds)} "
            f"of {in_seconds(self.seconds)} at {in_rate(rate)}; the busiest rank had {self.imbalance:.2f} times the "
            "mean work"
        )


@dataclass(frozen=True, kw_only=True)
class WorkReport(RunReport):
    """Measurements of a run that computes, on one rank; the seconds of redistributions are no part of its phases.

    flops        : floating-point operations of all ranks together.
    sync_seconds : the part of wait_seconds in which this rank waits for ranks of its node, without any transfer.
    hidden_seconds : seconds with a transfer in flight and without a wait; a transfer ends when this rank sees its end.
    """

    flops: int
    compute_seconds: float
    wait_seconds: float
    pack_seconds: float
    sync_seconds: float
    hidden_seconds: float

    @classmethod
    def of_run(
        cls, recorder: Recorder, schedules: Sequence[Any], grid: ProcessGrid, seconds: float, /, **others: Any
    ) -> Self:
        phases = {name: recorder.seconds.get(name.removesuffix("_seconds"), 0.0) for name in PHASES}
        phases["wait_seconds"] += phases["sync_seconds"]
        flops = sum(x.flops for x in schedules)
        return super().of_run(recorder, schedules, grid, seconds, flops=flops, **phases, **others)

    @classmethod
    def of_steps(
        cls, reports: Sequence[RunReport], vectors: VectorTraffic, grid: ProcessGrid, seconds: float, /, **others: Any
    ) -> Self:
        """Return the report of a function that ran steps with these reports in `seconds` altogether.

        vectors : the traffic of all reductions of the function, including those of its steps.
        """
        return cls(rank=grid.rank, seconds=seconds, **summed(reports, vectors), **others).with_ranks(grid.comm)

    def after(self, others: Sequence[RunReport], vectors: VectorTraffic | None = None, **fields: Any) -> Self:
        """Return this report with its sums extended by those of others, and with other values of some fields.

        vectors : the traffic of all reductions, including those of these reports; None: there are no other reductions.
        """
        return self.changed(**summed([self, *others], vectors) | fields)


def summed(reports: Sequence[RunReport], vectors: VectorTraffic | None = None) -> dict[str, Any]:
    """Return the sums, and for bytes the maxima, of the fields of the steps' reports; moves have no phases or flops.

    vectors : the traffic of all reductions, including those of the steps; None: there are no other reductions.
    """
    work = [x for x in reports if isinstance(x, WorkReport)]
    sums: dict[str, Any] = {name: sum(getattr(x, name) for x in work) for name in ("flops", *PHASES)}
    of_steps = sum((x.vectors for x in reports), VectorTraffic())
    others = VectorTraffic() if vectors is None else vectors - of_steps
    sums["vectors"] = of_steps + others
    for name in ("counted", "predicted"):
        sums[name] = sum((getattr(x, name) for x in reports), getattr(others, name))
    most = ("extra_bytes", "predicted_extra_bytes")
    return sums | {name: max((getattr(x, name) for x in reports), default=0) for name in most}
