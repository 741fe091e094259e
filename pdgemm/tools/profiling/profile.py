"""The profile of a traced run, computed from its timeline: figures that show how the run spent its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Raw, Struct

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import Machine
from pdgemm.support.files import read_file
from pdgemm.support.json_input import Count, Figure, Seconds, Size, decoded
from pdgemm.support.text import counted

PHASES = ("plan", "product", "wait", "sync", "pack", "post")  # phases of a product, on the host or in a stream
# outside products: files, redistributions, batches of small products, epilogues after a product's last sum, checks
OUTSIDE = ("read", "write", "moved", "batch", "epilogue", "verify")
LARGE = 1 << 16  # least bytes of a transfer from which a bandwidth is computed
LARGEST_FILE = 1 << 30  # bytes of a timeline: some millions of spans
ROUNDING = 20.0  # microseconds by which a transfer may seem to end after the wait for it
ORDINARY = ("default", "GPUs")  # machine models that were not calibrated


class _Counted(Struct):
    words_received: Size


class ProfiledReport(Struct):
    """The members of a `pdgemm.instrument.report.Report` from which a profile is computed."""

    algorithm: str
    grid: tuple[Count, Count]
    layers: Count
    mnk: tuple[Size, Size, Size]
    dtype: str
    device: str
    panels: Size
    panel_width: Size
    lookahead: Size
    flops: Figure
    counted: _Counted
    lower_bound_words: Figure
    overlap: Figure | None
    seconds: Seconds
    wait_seconds: Seconds
    sync_seconds: Seconds
    hidden_seconds: Seconds


class About(Struct):
    """The facts of a rank in a trace.   network : bytes per second of its node's network, measured after the run."""

    host: str
    node: Size
    threads: Count
    cores: list[Size]
    clock_error_us: Seconds
    network: Figure | None = None


class _Bytes(Struct):
    bytes: Size = 0


class _Span(Struct):
    """An event of the timeline: a span where `ph` is "X", otherwise metadata, such as the name of a row."""

    ph: str
    pid: Size
    name: str
    cat: str = ""
    ts: Annotated[float, Meta(ge=-1e15, le=1e15)] = nan  # microseconds
    dur: Annotated[float, Meta(ge=-1, le=1e15)] = nan  # may be below 0 by rounding
    args: Raw = Raw(b"{}")


class Spent(NamedTuple):
    """A piece of work of a rank, in seconds of the timeline.   name : its span's name, or "transfer"."""

    name: str
    start: float
    seconds: float


class _Other(Struct):
    ranks: Annotated[list[About], Meta(min_length=1)]
    machine: dict[str, Any]


class _Timeline(Struct):
    traceEvents: list[_Span]
    otherData: _Other


@dataclass
class Rank:
    """The seconds and transfers of one rank of a traced run.

    seconds   : the time of all products, from call to return.
    phases    : the time of each phase, without redistributions.
    reports   : the reports of its products.
    transfers : by kind, the seconds and bytes of each transfer, and whether the rank waited at its middle and its end.
    """

    number: int
    host: str
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moving: float = 0.0
    outside: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reports: list[ProfiledReport] = field(default_factory=list)
    transfers: dict[str, list[tuple[float, int, bool]]] = field(default_factory=lambda: defaultdict(list))
    spans: list[Spent] = field(default_factory=list)  # empty unless `load_profile` has kept them

    @property
    def waiting(self) -> float:
        return self.phases["wait"] + self.phases["sync"]

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of products by phase; `other` is the remaining time.  On a GPU phases overlap each other."""
        covered = {**{name: self.phases[name] for name in PHASES}, "redistribute": self.moving}
        return covered | {"other": max(0.0, self.seconds - sum(covered.values()))}

    @property
    def overlap(self) -> float | None:
        """The share of the time of transfers that was hidden behind products."""
        known = [x for x in self.reports if x.overlap is not None]
        total = sum(x.hidden_seconds + x.wait_seconds - x.sync_seconds for x in known)
        return sum(x.hidden_seconds for x in known) / total if total > 0 else None


@dataclass
class Profile:
    """The figures of all ranks of a traced run."""

    ranks: list[Rank]
    about: list[About]
    machine: Machine

    @property
    def calibrated(self) -> bool:
        return self.machine.name not in ORDINARY

    @property
    def networks(self) -> dict[str, float]:
        """The bytes per second of the network of each node, by name."""
        return {x.host: x.network for x in self.about if x.network}

    @property
    def critical(self) -> Rank:
        """The critical rank (the bottleneck): the rank that waits least."""
        return min(self.ranks, key=lambda x: x.waiting)

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds of products by phase, mean of all ranks."""
        each = [x.parts for x in self.ranks]
        return {name: float(np.mean([parts[name] for parts in each])) for name in each[0]}

    @property
    def mean_seconds(self) -> float:
        """The seconds of all products, mean of all ranks; shares are fractions of this time."""
        return float(np.mean([x.seconds for x in self.ranks]))

    @property
    def imbalance(self) -> float:
        """The longest time for which a rank multiplies, over the mean of all ranks."""
        mean = self.parts["product"]
        return max(x.phases["product"] for x in self.ranks) / mean if mean else 1.0

    @property
    def overlap(self) -> float | None:
        overlaps = [x.overlap for x in self.ranks if x.overlap is not None]
        return float(np.mean(overlaps)) if overlaps else None

    @cached_property
    def longest(self) -> ProfiledReport | None:
        """The report of the longest product, if there was one."""
        return max((report for x in self.ranks for report in x.reports), key=lambda x: x.seconds, default=None)

    @cached_property
    def oversubscribed(self) -> list[str]:
        """The hosts that have more threads than cores, as text."""
        return [
            f"{host}: {sum(x.threads for x in here)} threads on {counted(len(cores), 'core')}"
            for host in sorted({x.host for x in self.about})
            for here in ([x for x in self.about if x.host == host],)
            for cores in (set().union(*(x.cores for x in here)),)
            if sum(x.threads for x in here) > len(cores)
        ]

    @property
    def rate(self) -> float | None:
        """The calibrated seconds of the local products over their measured seconds; None where the ratio is unknown."""
        reports, busy = [report for x in self.ranks for report in x.reports], self.parts["product"] * len(self.ranks)
        if not busy or any(report.device for report in reports) or not self.calibrated:
            return None
        return sum(map(self._calibrated_seconds, reports)) / busy

    def _calibrated_seconds(self, report: ProfiledReport) -> float:
        """Return the seconds that a rank multiplies in a product, by the calibrated rates."""
        (m, n, k), (pr, pc) = report.mnk, report.grid
        at_once = min(m // pr or 1, n // pc or 1, report.panel_width or k)
        flops = report.flops / (pr * pc * report.layers)
        return float(flops / self.machine.rate(report.dtype, max(1, at_once)))

    def transfers(self) -> Iterator[dict[str, Any]]:
        """Yield the transfers of all ranks by kind: count, bytes, percentiles of their seconds, bandwidths in GB/s.

        A transfer lasts from its start until the rank sees its completion.  Bandwidths are those of transfers for which
        the rank waited from their middle or earlier: a transfer that overlaps with a product may have completed long
        before the rank sees it.
        """
        for kind in sorted({kind for x in self.ranks for kind in x.transfers}):
            seconds, sizes, waited = np.array([each for x in self.ranks for each in x.transfers[kind]]).T
            large = (sizes >= LARGE) & (waited > 0) & (seconds > 0)
            near, far = (
                (1e-9 / links[kind].beta if kind in links and self.calibrated else None)
                for links in (self.machine.intra, self.machine.inter)
            )
            yield {
                "kind": kind,
                "count": len(seconds),
                "bytes": int(sizes.sum()),
                "waited_for": int(waited.sum()),
                **{f"p{q}_seconds": float(np.percentile(seconds, q)) for q in (50, 95, 99)},
                "gb_per_second": float(np.median(sizes[large] / seconds[large]) / 1e9) if large.any() else None,
                "calibrated_inside_a_node": near,
                "calibrated_between_nodes": far if len({x.node for x in self.about}) > 1 else None,
            }

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "ranks": [
                {
                    "rank": x.number, "host": x.host, "seconds": x.seconds, **x.parts, "overlap": x.overlap,
                    **{name: x.outside[name] for name in OUTSIDE},
                }
                for x in self.ranks
            ],
            "mean_seconds": {"total": self.mean_seconds, **self.parts},
            "transfers": [*self.transfers()],
            "imbalance": self.imbalance,
            "overlap": self.overlap,
            "critical_rank": self.critical.number,
            "rate_of_calibrated": self.rate,
            "clock_error_us": max(x.clock_error_us for x in self.about),
            "network_bytes_per_second": self.networks,
        }  # fmt: skip


def load_profile(path: Path, machine: Machine | None = None, spans: bool = False) -> Profile:
    """Return the profile of a file that `pdgemm.trace` wrote.   spans : keep the spans of each rank, too.

    Raises FileError or ArgumentError.
    """
    not_one = f"{path} is not a timeline that pdgemm wrote"
    timeline = decoded(read_file(path, LARGEST_FILE), _Timeline, not_one)
    about = timeline.otherData
    machine = machine or Machine.from_dict(about.machine, not_one)
    ranks = [Rank(number, x.host) for number, x in enumerate(about.ranks)]
    of_rank = defaultdict(list)
    for x in timeline.traceEvents:
        if x.ph == "X":
            if isnan(x.ts + x.dur) or not x.cat:
                raise ArgumentError(f"{not_one}: a span of rank {x.pid} has no time, or no row")
            of_rank[x.pid].append(x)
    for rank in ranks:
        _take(rank, of_rank[rank.number], f"{not_one}: its rank {rank.number}")
        for x in of_rank[rank.number] if spans else ():
            rank.spans.append(Spent("transfer" if x.cat == "transfers" else x.name, x.ts / 1e6, max(0.0, x.dur) / 1e6))
    return Profile(ranks, about.ranks, machine)


def _take(rank: Rank, spans: list[_Span], what: str) -> None:
    """Add the spans of a rank to its phases; a phase within a redistribution counts as redistribution."""
    host = [x for x in spans if x.cat == "host"]
    products = _within([x for x in host if x.name == "pdgemm"])
    moves = _within([x for x in host if x.name == "redistribute"])
    waits = _within([x for x in host if x.name == "wait"], ROUNDING)
    for x in spans:
        name, seconds = x.name, x.dur / 1e6
        if x.cat == "transfers":
            size = decoded(x.args, _Bytes, what).bytes
            rank.transfers[name].append((seconds, size, waits(_middle(x)) and waits(x.ts + x.dur)))
        elif name == "pdgemm":
            rank.seconds += seconds
            rank.reports.append(decoded(x.args, ProfiledReport, what))
        elif name == "redistribute":
            if products(_middle(x)):
                rank.moving += seconds
            else:
                rank.outside["moved"] += seconds
        elif name in OUTSIDE:
            rank.outside[name] += seconds
        elif name in PHASES and products(_middle(x)) and not moves(_middle(x)):
            rank.phases[name] += seconds


def _middle(span: _Span) -> float:
    return span.ts + span.dur / 2


def _within(spans: list[_Span], later: float = 0.0) -> Callable[[float], bool]:
    """Return a function that says whether a time is inside one of these spans, which do not overlap.

    later : microseconds after the end of a span that still count as inside.
    """
    starts = np.array([x.ts for x in spans])
    ends = np.array([x.ts + x.dur for x in spans])

    def inside(time: float) -> bool:
        at = int(np.searchsorted(starts, time, side="right")) - 1
        return at >= 0 and bool(time <= ends[at] + later)

    return inside
