"""Where the time of a traced run went: figures of a timeline, and what to change."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, FileError
from pdgemm.explain import counted, in_bytes
from pdgemm.machine import KINDS, Machine

PHASES = ("plan", "product", "wait", "sync", "pack", "post")  # of a product, on the host or in a stream
OUTSIDE = ("read", "write", "moved", "batch")  # of products: files, redistributions, batches of small ones
LARGE = 1 << 16  # bytes of a message that shows a bandwidth
SHOWN = 16  # ranks, of which each has a line
REPORTED = {"product": "compute_seconds", "pack": "pack_seconds"}  # and waits, which a report adds up
AGREE = 0.01
TOLD = {  # by a report
    "algorithm", "grid", "layers", "mnk", "dtype", "device", "panels", "panel_width", "lookahead", "flops", "counted",
    "lower_bound_words", "moves", "overlap", "seconds", "compute_seconds", "wait_seconds", "sync_seconds",
    "pack_seconds", "hidden_seconds",
}  # fmt: skip
ROUNDING = 20.0  # microseconds between the end of a transfer and that of the wait for it
ORDINARY = ("default", "GPUs")  # machines that nobody measured


@dataclass
class Rank:
    """Seconds and transfers of one rank.

    seconds   : of all products, from call to return.   phases : within them, redistribution left out.
    reports   : what the products said of themselves.
    transfers : by kind, for each its seconds, its bytes, and whether the rank did nothing but wait for it.
    """

    number: int
    host: str
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moving: float = 0.0
    outside: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reports: list[dict[str, Any]] = field(default_factory=list)
    transfers: dict[str, list[tuple[float, int, bool]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def waiting(self) -> float:
        return self.phases["wait"] + self.phases["sync"]

    @property
    def other(self) -> float:
        """Neither in a phase nor in a redistribution: Python between them.  On a GPU, phases are beside each other."""
        return max(0.0, self.seconds - self.moving - sum(self.phases.values()))

    def reported(self, name: str) -> float:
        return float(sum(report[name] for report in self.reports))

    @property
    def overlap(self) -> float | None:
        """Of the time of transfers, what was hidden behind products."""
        told = [x for x in self.reports if x["overlap"] is not None]
        total = sum(x["hidden_seconds"] + x["wait_seconds"] - x["sync_seconds"] for x in told)
        return sum(x["hidden_seconds"] for x in told) / total if total > 0 else None

    @property
    def agrees(self) -> bool:
        """Are the sums of spans what the reports say?"""
        pairs = [(self.phases[name], self.reported(key)) for name, key in REPORTED.items()]
        pairs += [(self.waiting, self.reported("wait_seconds")), (self.seconds, self.reported("seconds"))]
        pairs += [(self.moving, float(sum(move["seconds"] for x in self.reports for move in x["moves"])))]
        return all(abs(a - b) <= AGREE * max(a, b) + 1e-4 for a, b in pairs)


@dataclass
class Profile:
    """The figures of all ranks."""

    ranks: list[Rank]
    about: list[dict[str, Any]]  # of each rank: host, node, threads, cores, clock error
    machine: Machine

    @property
    def several_nodes(self) -> bool:
        return len({x["node"] for x in self.about}) > 1

    @property
    def calibrated(self) -> bool:
        return self.machine.name not in ORDINARY

    @property
    def critical(self) -> Rank:
        """The rank that waits least."""
        return min(self.ranks, key=lambda x: x.waiting)

    @property
    def waited_for(self) -> bool:
        """Do the others wait for the critical rank?"""
        waiting = float(np.mean([x.waiting for x in self.ranks]))
        return waiting - self.critical.waiting > 0.05 * self.seconds

    def mean(self, phase: str) -> float:
        return float(np.mean([x.phases[phase] for x in self.ranks]))

    @property
    def imbalance(self) -> float:
        """Longest over mean time of products."""
        mean = self.mean("product")
        return max(x.phases["product"] for x in self.ranks) / mean if mean else 1.0

    @property
    def overlap(self) -> float | None:
        found = [x.overlap for x in self.ranks if x.overlap is not None]
        return float(np.mean(found)) if found else None

    @property
    def seconds(self) -> float:
        return max(x.seconds for x in self.ranks)

    @cached_property
    def longest(self) -> dict[str, Any]:
        """The report of the longest product."""
        return max((report for x in self.ranks for report in x.reports), key=lambda x: x["seconds"], default={})

    @cached_property
    def crowded(self) -> list[str]:
        """Hosts with more threads than cores."""
        return [
            f"{host}: {sum(x['threads'] for x in here)} threads on {counted(len(cores), 'core')}"
            for host in sorted({x["host"] for x in self.about})
            for here in ([x for x in self.about if x["host"] == host],)
            for cores in (set().union(*(x["cores"] for x in here)),)
            if sum(x["threads"] for x in here) > len(cores)
        ]

    @property
    def rate(self) -> float | None:
        """Seconds that the products of all ranks take by calibration, over those that they took; None: unknown."""
        reports, busy = [report for x in self.ranks for report in x.reports], self.mean("product") * len(self.ranks)
        if not busy or any(report["device"] for report in reports) or not self.calibrated:
            return None
        return sum(map(self._calibrated_seconds, reports)) / busy

    def _calibrated_seconds(self, report: dict[str, Any]) -> float:
        """Of a rank in a product."""
        (m, n, k), (pr, pc) = report["mnk"], report["grid"]
        at_once = min(m // pr or 1, n // pc or 1, report["panel_width"] or k)
        flops = report["flops"] / (pr * pc * report["layers"])
        return float(flops / self.machine.rate(report["dtype"], max(1, at_once)))

    def transfers(self) -> Iterator[dict[str, Any]]:
        """By kind, of all ranks: how many, bytes, seconds that 50, 95 and 99% do not exceed, bandwidths in GB/s.

        A transfer lasts from its start to when it is seen to be over; only of those that the rank waited for, from
        their middle at the latest, does this show a bandwidth: what arrives behind a product may have been there long.
        """
        for kind in sorted({kind for x in self.ranks for kind in x.transfers}):
            seconds, sizes, waited = np.array([each for x in self.ranks for each in x.transfers[kind]]).T
            large = (sizes >= LARGE) & (waited > 0)
            link = "ibcast" if kind == "bcast" else kind
            near, far = (
                (1e-9 / links[link].beta if link in KINDS and self.calibrated else None)
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
                "calibrated_between_nodes": far if self.several_nodes else None,
            }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ranks": [
                {
                    "rank": x.number, "host": x.host, "seconds": x.seconds,
                    **{name: x.phases[name] for name in PHASES},
                    "redistribute": x.moving, "other": x.other, "overlap": x.overlap,
                    **{name: x.outside[name] for name in OUTSIDE}, "as_reported": x.agrees,
                }
                for x in self.ranks
            ],
            "transfers": [*self.transfers()],
            "imbalance": self.imbalance,
            "overlap": self.overlap,
            "critical_rank": self.critical.number,
            "rate_of_calibrated": self.rate,
            "clock_error_us": max(x["clock_error_us"] for x in self.about),
            "advice": advice(self),
        }  # fmt: skip


def load_profile(path: Path, machine: Machine | None = None) -> Profile:
    """The profile of a file that `pdgemm.trace` wrote.  Raises FileError or ArgumentError."""
    try:
        found = json.loads(path.read_bytes())
        about = found["otherData"]
        machine = machine or Machine.from_dict(about["machine"])
        hosts = [x["host"] for x in about["ranks"]]
        ranks = [Rank(number, host) for number, host in enumerate(hosts)]
        of_rank = defaultdict(list)
        for x in found["traceEvents"]:
            if x["ph"] == "X":
                of_rank[x["pid"]].append(x)
        for rank in ranks:
            _take(rank, of_rank[rank.number])
        if not ranks or not all({*report} >= TOLD for rank in ranks for report in rank.reports):
            raise ValueError("no ranks, or products without a report")
    except OSError as bad:
        raise FileError(f"{path}: {bad.strerror}") from bad
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as bad:
        raise ArgumentError(f"{path} is not a timeline that pdgemm wrote ({type(bad).__name__}: {bad})") from bad
    return Profile(ranks, about["ranks"], machine)


def _take(rank: Rank, spans: list[dict[str, Any]]) -> None:
    """The spans of a rank: those within a redistribution, which may be within a product, belong to that."""
    host = [x for x in spans if x["cat"] == "host"]
    products = _within([x for x in host if x["name"] == "pdgemm"])
    moves = _within([x for x in host if x["name"] == "redistribute"])
    waits = _within([x for x in host if x["name"] == "wait"])
    for x in spans:
        name, seconds = x["name"], x["dur"] / 1e6
        if x["cat"] == "transfers":
            size = x["args"]["bytes"] if "args" in x else 0
            rank.transfers[name].append((seconds, size, waits(_middle(x)) and waits(x["ts"] + x["dur"])))
        elif name == "pdgemm":
            rank.seconds += seconds
            rank.reports.append(x["args"])
        elif name == "redistribute":
            if products(_middle(x)):
                rank.moving += seconds
            else:
                rank.outside["moved"] += seconds
        elif name in OUTSIDE:
            rank.outside[name] += seconds
        elif name in PHASES and products(_middle(x)) and not moves(_middle(x)):
            rank.phases[name] += seconds


def _middle(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"] / 2)


def _within(spans: list[dict[str, Any]]) -> Callable[[float], bool]:
    """Is a time inside one of these spans, which do not overlap?"""
    starts = np.array([x["ts"] for x in spans])
    ends = np.array([x["ts"] + x["dur"] for x in spans])

    def inside(time: float) -> bool:
        at = int(np.searchsorted(starts, time, side="right")) - 1
        return at >= 0 and bool(time <= ends[at] + ROUNDING)

    return inside


# ------------------------------------------------------------------ in words
def advice(profile: Profile) -> str:
    """One sentence: what costs most beside the products, and what to change about it."""
    report, total = profile.longest, profile.seconds
    if not report or not total:
        spent = {name: max(x.outside[name] for x in profile.ranks) for name in OUTSIDE}
        told = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in spent.items() if seconds)
        return f"No product was traced{': ' * bool(told)}{told}."
    if profile.crowded:
        return (
            f"More threads than cores ({profile.crowded[0]}): start fewer ranks, or give each fewer threads by "
            "OMP_NUM_THREADS, before anything else."
        )
    found = [
        *_waits(profile, report),
        *_work(profile, report),
        (
            float(np.mean([x.moving for x in profile.ranks])),
            f"redistribution of {', '.join(move['name'] for move in report['moves'])} takes {{share}} of the time: "
            "store or make the matrices in the layout that the plan wants (`pdgemm.plan` names it), or use the "
            "algorithm that takes them as they lie (summa)",
        ),
        (
            profile.mean("pack"),
            "packing takes {share} of the time: larger blocks of the layout leave panels in one piece",
        ),
        (
            profile.mean("plan"),
            "checks, planning and new memory take {share} of the time: for products of the same matrices, "
            "`plan(...).prepare(...)` does that once",
        ),
    ]
    lost, text = max(found)
    if lost < 0.05 * total:
        share = profile.mean("product") / total
        rate = "" if profile.rate is None else f", at {profile.rate:.0%} of the calibrated rate"
        return f"Nothing stands out: products take {share:.0%} of the time{rate}."
    text = text.replace("{share}", f"{lost / total:.0%}")
    return f"{text[0].upper()}{text[1:]}."


def _waits(profile: Profile, report: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Seconds lost by waiting, and what to do."""
    wait = profile.mean("wait")
    slow = [
        x["kind"]
        for x in profile.transfers()
        for best in (x["calibrated_between_nodes"] or x["calibrated_inside_a_node"],)
        if x["gb_per_second"] and best and x["gb_per_second"] < best / 3
    ]
    received, bound = report["counted"]["words_received"], report["lower_bound_words"]
    if not report["lookahead"]:
        yield wait, "waiting for transfers takes {share} of the time and no panel is fetched ahead: --lookahead 1"
    elif report["panels"] < 4 and report["panels"] > 0 and report["algorithm"] in ("summa", "stationary_a"):
        yield (
            wait,
            f"waiting takes {{share}} of the time with {counted(report['panels'], 'panel')}, of which the first "
            "arrives before any product: narrower panels (--panel-width)",
        )
    elif bound and received > 1.5 * bound:
        yield (
            wait,
            f"waiting takes {{share}} of the time, and {received / bound:.1f} times the words of the lower bound "
            "arrive: another algorithm (--algorithm auto), or more memory for layers (--memory-limit)",
        )
    elif slow:
        yield (
            wait,
            f"waiting takes {{share}} of the time, at less than a third of the calibrated bandwidth "
            f"({', '.join(slow)}): try another mover (--mover), and look at imbalance",
        )
    else:
        yield wait, "waiting takes {share} of the time: there is little to multiply per word; fewer ranks, or more work"
    yield (
        profile.mean("sync"),
        "waiting for the ranks of the node takes {share} of the time: they do not get here together, see imbalance",
    )


def _work(profile: Profile, report: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Seconds lost in products and between them, and what to do."""
    longest, mean = max(x.phases["product"] for x in profile.ranks), profile.mean("product")
    yield (
        longest - mean,
        f"rank {profile.critical.number} multiplies longest, {profile.imbalance:.2f} times the mean: smaller blocks, "
        "or a grid whose sides divide the matrices, spread the work more evenly",
    )
    rate = profile.rate
    if rate is not None and rate < 1:
        yield (
            mean * (1 - rate),
            f"products run at {rate:.0%} of the calibrated rate, which costs {{share}} of the time: wider panels "
            "(--panel-width), larger local parts (fewer ranks), or a look at what else runs on these cores",
        )
    between = float(np.mean([x.other + x.phases["post"] for x in profile.ranks]))
    yield between, "steps cost {share} of the time beside transfers and products: wider panels (--panel-width)"


def tables(profile: Profile) -> str:
    """For people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160, color_system=None)
    times = Table(box=None, pad_edge=False, title="seconds of each rank", title_justify="left")
    outside = [name for name in OUTSIDE if any(x.outside[name] for x in profile.ranks)]
    names = ("total", *PHASES, "redistribute", "other", *outside)
    for name in ("rank", *names, "overlap"):
        times.add_column(name, justify="right", no_wrap=True)
    rows = {str(x.number): _row(x, outside) for x in profile.ranks}
    marked = profile.critical.number
    if len(rows) > SHOWN:
        rows = {str(marked): rows[str(marked)]}
    for number, row in rows.items():
        name = f"{number} (critical)" if number == str(marked) and len(profile.ranks) > 1 else number
        times.add_row(name, *(f"{x:.4f}" for x in row), _percent(profile.ranks[int(number)].overlap))
    columns = np.array([_row(x, outside) for x in profile.ranks])
    for name, figures in (("least", columns.min(0)), ("mean", columns.mean(0)), ("most", columns.max(0))):
        overlap = _percent(profile.overlap) if name == "mean" else ""
        times.add_row(name, *(f"{x:.4f}" for x in figures), overlap)
    moves = Table(box=None, pad_edge=False, title="transfers of all ranks", title_justify="left")
    for name in ("kind", "count", "bytes", "p50 ms", "p95 ms", "p99 ms", "waited for", "GB/s of these", "calibrated"):
        moves.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for x in profile.transfers():
        best = x["calibrated_inside_a_node"]
        calibrated = "-" if best is None else f"{best:.2f}"
        if x["calibrated_between_nodes"]:
            calibrated += f" in a node, {x['calibrated_between_nodes']:.2f} between nodes"
        moves.add_row(
            x["kind"], str(x["count"]), in_bytes(x["bytes"]),
            *(f"{1e3 * x[f'p{q}_seconds']:.3f}" for q in (50, 95, 99)), str(x["waited_for"]),
            "-" if x["gb_per_second"] is None else f"{x['gb_per_second']:.2f}", calibrated,
        )  # fmt: skip
    with console.capture() as captured:
        console.print(times)
        if moves.row_count:
            console.print(moves)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + f"\n\n{_summary(profile)}"


def _summary(profile: Profile) -> str:
    """What the tables do not show."""
    name = profile.machine.name if profile.calibrated else "not calibrated when it was traced (--machine FILE)"
    lines = [
        f"load imbalance {profile.imbalance:.2f} (longest over mean time of products); rank {profile.critical.number} "
        f"waits least{', the others wait for it' if profile.waited_for else ''}"
        if len(profile.ranks) > 1
        else "one rank: nobody to wait for",
        f"machine: {name}; clocks of nodes agree to {max(x['clock_error_us'] for x in profile.about):.1f} us",
    ]
    if profile.rate is not None:
        lines.insert(1, f"products at {profile.rate:.0%} of the calibrated rate of such products")
    odd = [str(x.number) for x in profile.ranks if not x.agrees]
    if odd:
        lines.append(f"spans and reports differ by more than {AGREE:.0%} on ranks {', '.join(odd)}")
    return "\n".join([*lines, advice(profile)])


def _row(x: Rank, outside: Sequence[str]) -> list[float]:
    phases = (x.phases[name] for name in PHASES)
    return [x.seconds, *phases, x.moving, x.other, *(x.outside[name] for name in outside)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
