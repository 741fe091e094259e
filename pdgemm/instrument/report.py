"""Measurements of a product on one rank, beside the predictions of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pdgemm.blas.threads import multiplier
from pdgemm.instrument.recorder import Traffic
from pdgemm.support.text import counted, named, sides


@dataclass(frozen=True)
class MoveReport:
    """Measurements of one redistribution on one rank.  `counted` and `predicted` are as in a Report."""

    name: str  # of the matrix
    source: str  # the layouts
    target: str
    rank: int
    seconds: float
    counted: Traffic
    predicted: Traffic
    extra_bytes: int
    predicted_extra_bytes: int

    def __str__(self) -> str:
        traffic = self.counted
        return (
            f"{self.name} redistributed from {self.source} to {self.target}: "
            f"{traffic.words_received} words received, {traffic.words_sent} sent "
            f"in {counted(traffic.messages_sent, 'message')}, {self.seconds:.4f} s"
        )


@dataclass(frozen=True)
class Report:
    """Measurements of one product on one rank.  Seconds are wall time; on a device they are the times of its streams,
    which overlap each other and the host's waits.  Words are elements.

    `counted` is the traffic as counted where messages are passed to MPI, `predicted` is the plan's formula;
    `extra_bytes` is the memory of the buffers beyond A, B and C.  `moves` are the redistributions to and from the
    algorithm's layouts; their words, bytes and seconds are part of the totals.
    """

    algorithm: str
    inside: str  # the algorithm of each layer
    mover: str
    grid: tuple[int, int]
    layers: int
    mnk: tuple[int, int, int]
    dtype: str
    panels: int
    panel_width: int
    lookahead: int
    threads: int
    rank: int
    coords: tuple[int, int]
    flops: int  # of all ranks together
    seconds: float
    compute_seconds: float
    wait_seconds: float
    pack_seconds: float
    sync_seconds: float  # the part of wait_seconds for ranks of the node, without any transfer
    hidden_seconds: float  # with a transfer in flight, as far as this rank has seen, and without a wait
    counted: Traffic
    predicted: Traffic
    extra_bytes: int
    predicted_extra_bytes: int
    predicted_seconds: float  # of the slowest rank, by the model of the machine
    lower_bound_words: float  # received by the busiest rank, for any algorithm, without redistribution
    moves: tuple[MoveReport, ...] = ()
    blas: str = field(default_factory=multiplier)
    device: str = ""  # empty on the host
    ranks_per_device: int = 1  # the maximum
    compute: str = ""  # the type that operands were rounded to; empty if they were not

    @property
    def move_seconds(self) -> float:
        """The seconds spent on redistributing A, B and C."""
        return sum(move.seconds for move in self.moves)

    @property
    def overlap(self) -> float | None:
        """The fraction of the transfer time that products hid; None if the product sent and received no messages.

        It is an upper bound: a message that arrives during a product counts as in flight until this rank polls it,
        every few milliseconds between nodes, after the product on one node.
        """
        transfer = self.hidden_seconds + self.wait_seconds - self.sync_seconds
        total = self.counted
        messages = total.messages_received + total.messages_sent
        moved = sum(x.counted.messages_received + x.counted.messages_sent for x in self.moves)
        return self.hidden_seconds / transfer if messages > moved and transfer > 0 else None

    @property
    def gflops(self) -> float:
        """The GFLOP/s of all ranks together, by this rank's clock."""
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers and strings, for JSON."""
        return asdict(self) | {"gflops": self.gflops, "overlap": self.overlap}

    def __str__(self) -> str:
        measured, predicted = self.counted, self.predicted
        other = self.seconds - self.compute_seconds - self.wait_seconds - self.pack_seconds - self.move_seconds
        read = f", {measured.words_read} of them read in place" if measured.words_read else ""
        hidden = "" if self.overlap is None else f" ({self.overlap:.0%} of the transfers hidden)"
        moved = f" + redistribute {self.move_seconds:.4f}" if self.moves else ""
        return (
            f"{_title(self)}\n"
            f"  rank {self.rank} at {self.coords}: {self.seconds:.4f} s ({self.gflops:.1f} GFLOP/s on all ranks) "
            f"= compute {self.compute_seconds:.4f} + wait {self.wait_seconds:.4f}{hidden} "
            f"+ pack {self.pack_seconds:.4f}{moved} + other {other:.4f}; predicted {self.predicted_seconds:.4f} s\n"
            f"  received {measured.words_received} words in {measured.messages_received} messages "
            f"(formula {predicted.words_received} in {predicted.messages_received}; "
            f"lower bound {self.lower_bound_words:.0f}){read}\n"
            f"  sent     {measured.words_sent} words in {measured.messages_sent} messages "
            f"(formula {predicted.words_sent} in {predicted.messages_sent})\n"
            f"  extra memory {self.extra_bytes} bytes (formula {self.predicted_extra_bytes})"
            + "".join(f"\n  {move}" for move in self.moves)
        )


# figures of a Report in a summary: the same on all ranks, and those that differ
_ALIKE = (
    "algorithm", "inside", "grid", "layers", "mnk", "dtype", "mover", "panels", "panel_width", "lookahead", "threads",
    "blas", "device", "ranks_per_device", "compute", "predicted_seconds", "lower_bound_words",
)  # fmt: skip
_SECONDS = tuple(f"{name}seconds" for name in ("", "compute_", "wait_", "sync_", "hidden_", "pack_", "move_"))
_COUNTED = ("words_received", "words_read", "words_sent", "messages_received", "messages_sent")


def summary(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the reports of all ranks as one table with the minimum, mean and maximum of each figure."""
    first = reports[0]
    slowest = max(r.seconds for r in reports)
    columns = {name: [getattr(r, name) for r in reports] for name in _SECONDS}
    columns |= {name: [getattr(r.counted, name) for r in reports] for name in _COUNTED}
    columns["extra_bytes"] = [r.extra_bytes for r in reports]
    overlaps = [r.overlap for r in reports if r.overlap is not None]
    return {
        "title": _title(first),
        **{name: getattr(first, name) for name in _ALIKE},
        "redistributed": [move.name for move in first.moves],
        "overlap": sum(overlaps) / len(overlaps) if overlaps else None,  # the mean over ranks
        "gflops": first.flops / slowest / 1e9 if slowest else 0.0,
        "as_predicted": all(r.counted == r.predicted and r.extra_bytes == r.predicted_extra_bytes for r in reports),
        "per_rank": {name: {"min": min(x), "mean": sum(x) / len(x), "max": max(x)} for name, x in columns.items()},
    }


def _title(r: Report) -> str:
    m, n, k = r.mnk
    computed = f" of {r.compute}" if r.compute else ""
    sharing = f", up to {r.ranks_per_device} ranks on one" if r.ranks_per_device > 1 else ""
    multiplier = f"on {r.device}{sharing}" if r.device else f"{counted(r.threads, 'thread')} per rank, {r.blas}"
    return (
        f"C ({m} x {n}) := A ({m} x {k}) B, {r.dtype}{computed}, by {named(r.algorithm, r.inside)} on a "
        f"{sides(*r.grid, r.layers)} grid: {counted(r.panels, 'panel')} of width <= {r.panel_width}, "
        f"lookahead {r.lookahead}, mover {r.mover}, {multiplier}"
    )
