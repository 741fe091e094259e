"""What the files of studies hold, as the curves of a report: numbers that can be drawn, and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from pdgemm.arrays import dtypes
from pdgemm.errors import ArgumentError, FileError
from pdgemm.model.formulas import gemm_flops
from pdgemm.model.machine import Machine
from pdgemm.studies import records
from pdgemm.studies.cases import KINDS, MNK, Case
from pdgemm.studies.records import Record
from pdgemm.support.json_input import Count, Figure, Positive, Seconds, converted
from pdgemm.support.text import in_bytes, named, sides

TITLES = {"strong": "Strong scaling", "weak": "Weak scaling", "shapes": "Shapes"}
TITLED = ("shape", "algorithm", "dtype", "mover", "memory", "device")
USUAL = {"mover": "mover auto", "memory": "any memory", "device": "host"}
CALLED = {"mpi_library": "MPI", "multiplies": "BLAS", "cpu": "processor", "threads_per_rank": "threads per rank"}
LARGEST = 10**9
PARTS = ("compute", "wait", "sync", "pack", "move")  # of a product's time; the rest is what they leave


class _Spread(Struct, frozen=True):
    mean: Figure
    max: Figure


class _Whole(Struct):
    mean: Positive


class _PerRank(Struct):
    seconds: _Whole
    compute_seconds: _Spread
    wait_seconds: _Spread
    pack_seconds: _Spread
    move_seconds: _Spread
    hidden_seconds: _Spread
    words_received: _Spread
    sync_seconds: _Spread = _Spread(0.0, 0.0)  # not told by the first versions


class _Product(Struct):
    algorithm: str
    inside: str
    grid: tuple[Count, Count]
    layers: Count
    lower_bound_words: Figure
    per_rank: _PerRank
    overlap: Figure | None = None


class _Cost(Struct):
    core_hours: Figure
    gpu_hours: Figure
    joules: Figure | None = None
    energy: str | None = None


class _Setting(Struct):
    nodes: list[str]
    threads_per_rank: Annotated[list[Count], Meta(min_length=1)]
    cores_per_node: Count
    oversubscribed: bool = False


class _Measured(Struct):
    """The part of a record that figures are made of."""

    median_seconds: Positive
    confidence: tuple[Positive, Positive] | None
    seconds: list[Seconds]
    fraction_of_peak: Positive
    residual: Figure
    product: _Product
    cost: _Cost
    setting: _Setting


@dataclass(frozen=True)
class Point:
    """One measured case.

    seconds  : median.   interval : of the median, with 95% confidence; None for few repetitions.
    words    : received by the busiest rank, those read in place too.   bound : of any algorithm.
    whole, parts, hidden : seconds of a typical repetition, those of PARTS and the hidden ones, mean over the ranks.
    ran      : by what, on a `grid`.   energy : in joules, or why it is not known.
    crowded  : there were more ranks than cores.   room : ranks that a node has cores for.
    """

    case: Case
    record: Record = field(repr=False)
    source: Path
    seconds: float
    interval: tuple[float, float] | None
    fraction: float
    words: float
    bound: float
    whole: float
    parts: dict[str, float]
    hidden: float
    residual: float
    core_hours: float
    gpu_hours: float
    ran: str
    grid: str
    overlap: float | None
    energy: str
    crowded: bool
    nodes: tuple[str, ...]
    room: int

    @classmethod
    def of(cls, case: Case, record: Record, source: Path) -> Point:
        """Raises ArgumentError where the record lacks something."""
        _check(case)
        told = converted(record, _Measured)
        product, ranks, cost, setting = told.product, told.product.per_rank, told.cost, told.setting
        waited, sync = ranks.wait_seconds.mean, ranks.sync_seconds.mean
        return cls(
            case, record, source,
            seconds=told.median_seconds,
            interval=told.confidence,
            fraction=told.fraction_of_peak,
            words=ranks.words_received.max,
            bound=product.lower_bound_words,
            whole=ranks.seconds.mean,
            parts={
                "compute": ranks.compute_seconds.mean, "wait": max(0.0, waited - sync), "sync": sync,
                "pack": ranks.pack_seconds.mean, "move": ranks.move_seconds.mean,
            },
            hidden=ranks.hidden_seconds.mean,
            residual=told.residual,
            core_hours=cost.core_hours,
            gpu_hours=cost.gpu_hours,
            ran=named(product.algorithm, product.inside),
            grid=sides(*product.grid, product.layers),
            overlap=product.overlap,
            energy=str(cost.energy) if cost.joules is None else f"{cost.joules:.4g}",
            crowded=setting.oversubscribed,
            nodes=tuple(setting.nodes),
            room=setting.cores_per_node // max(setting.threads_per_rank),
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @property
    def flops(self) -> int:
        return flops(self.case)

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def rest(self) -> float:
        return max(0.0, self.whole - sum(self.parts.values()))

    @property
    def over_bound(self) -> float:
        """Words over the lower bound; nan where nothing has to be sent."""
        return self.words / self.bound if self.bound else nan

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """What must not differ along a curve."""
        return setting_of(self.record)


@dataclass(frozen=True)
class Curve:
    """Cases that differ in the number of ranks only, in the same setting, by growing numbers of ranks."""

    points: tuple[Point, ...]
    label: str = ""

    @property
    def case(self) -> Case:
        return self.points[0].case

    @property
    def first(self) -> Point:
        """On the fewest ranks: what efficiency is relative to."""
        return self.points[0]

    def efficiency(self, point: Point) -> float:
        return relative(self.first, point)

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        return self.first.setting

    @property
    def texts(self) -> dict[str, str]:
        """What tells it from others; "" for what is as usual."""
        case = self.case
        return {
            "shape": shape_of(case),
            "algorithm": case.algorithm,
            "dtype": case.dtype,
            "mover": "" if case.mover == "auto" else f"mover {case.mover}",
            "memory": "" if case.memory_limit is None else f"{in_bytes(case.memory_limit)} of buffers",
            "device": "" if case.device == "host" else case.device,
            **{name: _told(name, value) for name, value in self.settings},
        }


@dataclass
class Section:
    """One kind of study.   bad : cases that failed or are wrong."""

    kind: str
    curves: list[Curve] = field(default_factory=list)
    bad: list[tuple[Path, Case, Record]] = field(default_factory=list)

    @property
    def points(self) -> list[Point]:
        return [point for curve in self.curves for point in curve.points]

    @property
    def title(self) -> str:
        """Its kind, and what all its curves have in common."""
        texts = [curve.texts for curve in self.curves]
        common = [text for name, text in (texts[0] if texts else {}).items() if name in TITLED and text]
        common = [text for text in common if all(text in other.values() for other in texts)]
        return TITLES[self.kind] + (f": {', '.join(common)}" if common else "")

    @property
    def counts(self) -> list[int]:
        """Numbers of ranks."""
        return sorted({point.ranks for point in self.points})


@dataclass
class Findings:
    """What the files hold.

    unread   : place and fault of each line, or measurement, that cannot be used.
    notes    : what a reader must know beside.
    machines : the calibration of each file.
    """

    sections: list[Section]
    unread: list[tuple[str, str]]
    notes: list[str]
    machines: dict[Path, Machine]

    @cached_property
    def points(self) -> list[Point]:
        return [point for section in self.sections for point in section.points]

    @property
    def bad(self) -> list[tuple[Path, Case, Record]]:
        return [each for section in self.sections for each in section.bad]


def read_all(paths: Sequence[Path]) -> Findings:
    """Raises FileError where a file is missing, or has no record in it."""
    found = Findings([], [], [], {})
    points: dict[tuple[Any, ...], Point] = {}
    bad: list[tuple[Path, Case, Record]] = []
    again = 0
    for path in dict.fromkeys(paths):
        for case, record in _opened(path, found).measured.items():
            if record["status"] != "ok":
                bad.append((path, case, record))
                continue
            try:
                point = Point.of(case, record, path)
            except ArgumentError as fault:
                found.unread.append((f"{path}: {case}", str(fault)))
                continue
            key = case, point.setting
            again += key in points
            if key not in points or str(record.get("date")) >= str(points[key].record.get("date")):
                points[key] = point
    if again:
        found.notes.append(f"{again} cases were measured in several files: the latest measurement of each is shown.")
    for kind in KINDS:
        mine = [point for point in points.values() if point.case.kind == kind]
        failed = [each for each in bad if each[1].kind == kind]
        if mine or failed:
            found.sections.append(Section(kind, curves_of(mine), failed))
    if not found.sections:
        place, why = found.unread[0]
        raise FileError(f"{place}: {why}; there is no other measurement")
    found.notes += _notes(found)
    return found


def _check(case: Case) -> None:
    """Raises ArgumentError for what `pdgemm scaling` does not write, and nobody can predict."""
    if max(case.ranks, *case.mnk) > LARGEST:
        raise ArgumentError(f"ranks and dimensions are at most {LARGEST}")
    if case.dtype not in map(str, dtypes.BLAS):
        raise ArgumentError(f"{case.dtype} is none of the types {dtypes.names(dtypes.BLAS)}")
    if case.kind == "weak":
        shape: Any = MNK
        converted(case.of.split(","), shape, f"a weak case is of m,n,k on one rank, got {case.of!r}", strict=False)


def _opened(path: Path, found: Findings) -> records.Study:
    study = records.read(path)
    if not path.exists():
        raise FileError(f"{path}: no such file")
    if not study.measured:
        why = f": line {study.unread[0][0]}: {study.unread[0][1]}" if study.unread else ""
        raise FileError(f"{path}: no measurement in it{why}")
    found.unread += [(f"{path}:{number}", f"not a measurement ({fault})") for number, fault in study.unread]
    if study.torn:
        found.unread.append((f"{path}: last line", "not finished: its writer was stopped"))
    if study.machine is not None:
        try:
            found.machines[path] = Machine.from_dict(study.machine)
        except ArgumentError as fault:
            found.unread.append((f"{path}: calibration", str(fault)))
    return study


def curves_of(points: Iterable[Point]) -> list[Curve]:
    """Labelled by what they differ in."""
    together: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        together.setdefault((point.case.curve, point.setting), []).append(point)
    curves = [Curve(tuple(sorted(each, key=lambda point: point.ranks))) for each in together.values()]
    texts = [curve.texts for curve in curves]
    told = [name for name in (texts[0] if texts else ()) if len({text[name] for text in texts}) > 1] or ["algorithm"]
    return [
        Curve(curve.points, ", ".join(text[x] or USUAL.get(x, f"{x} unknown") for x in told))
        for curve, text in zip(curves, texts)
    ]


def shape_of(case: Case) -> str:
    """What the user asked for."""
    text = case.of or ",".join(map(str, case.mnk))
    shape = text.replace(",", " x ")
    return f"{shape} on one rank" if case.kind == "weak" else shape


def _told(name: str, value: str) -> str:
    """A part of the setting in the name of a curve."""
    if name == "threads_per_rank":
        return f"{value} thread{'' if value == '1' else 's'} per rank"
    return f"pdgemm {value}" if name == "pdgemm" else value


def setting_of(record: Record) -> tuple[tuple[str, str], ...]:
    return tuple((name, _plain(record["setting"].get(name))) for name in records.SETTING)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def flops(case: Case) -> int:
    return gemm_flops(*case.mnk, case.dtype.startswith("complex"))


def relative(first: Any, other: Any) -> float:
    """Rate per rank, relative to that of `first`; of the same work, T(p0) p0 / (T(p) p)."""
    return (other.flops / (other.seconds * other.ranks)) / (first.flops / (first.seconds * first.ranks))


def ideal(first: Any, ranks: int, work: float) -> float:
    """Seconds that so many flops take at the rate per rank of `first`."""
    return first.seconds * (work / first.flops) * (first.ranks / ranks)


def differing(points: Iterable[Point]) -> dict[str, list[str]]:
    """What differs of records.SETTING, and its values."""
    settings = [dict(point.setting) for point in points]
    values = {name: sorted({setting[name] for setting in settings}) for name in records.SETTING}
    return {name: each for name, each in values.items() if len(each) > 1}


def _notes(found: Findings) -> list[str]:
    notes = [
        f"The measurements differ in {CALLED.get(name, name)} ({'; '.join(values)}): no line joins them."
        for name, values in differing(found.points).items()
    ]
    apart = [{*point.nodes} for point in found.points]
    hosts = sorted(set().union(*apart))
    if len(hosts) > 1 and not set.intersection(*apart):
        notes.append(f"Not all were measured on the same nodes ({', '.join(hosts)}).")
    if any(point.crowded for point in found.points):
        notes.append(
            "Points that are grey inside and the mark * are of more ranks than cores: ranks took turns there, and such "
            "times do not say how fast as many cores would be."
        )
    return notes


def per_node(points: Iterable[Point]) -> int:
    """Ranks that a node has cores for."""
    return max((x.room for x in points), default=1) or 1


def in_seconds(seconds: float) -> str:
    """0.0281 -> '28.1 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"


def in_flops(gflops: float) -> str:
    """14380 -> '14.38 TFLOP/s'."""
    return f"{gflops:.4g} GFLOP/s" if gflops < 1e4 else f"{gflops / 1e3:.4g} TFLOP/s"


def columns(get: Callable[[Point], float], curve: Curve) -> tuple[list[int], list[float]]:
    """Numbers of ranks, and a figure of each point."""
    return [point.ranks for point in curve.points], [get(point) for point in curve.points]
