"""Reads files of studies.  The results are curves (a line of a figure joins the measurements of one curve), and the
cases that cannot be drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import numpy as np
from msgspec import Struct

from pdgemm.errors import ArgumentError, FileError
from pdgemm.planning.machines.machine import Machine
from pdgemm.support.json_input import Count, Figure, Positive, Size, converted
from pdgemm.support.text import counted, in_seconds
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import KINDS, MNK, Case, TrainingCase
from pdgemm.tools.studies.predictions import Predicted
from pdgemm.tools.studies.records import Measurement, Record


class _Words(Struct):
    """The words of a kind that are received in a step.

    counted, formula : on the rank that receives most.   differ : the ranks on which the two are not equal.
    """

    kind: str
    counted: Figure
    formula: Figure
    differ: Size

    def __str__(self) -> str:
        differ = f"; they DIFFER on {counted(self.differ, 'rank')}" if self.differ else ""
        return f"{self.kind} {self.counted:,.0f} (by formula {self.formula:,.0f}{differ})"


class _Training(Struct):
    layout: str
    waited: Figure
    planned: Positive
    words: list[_Words]
    losses: list[float]
    mfu: Figure | None = None


class TrainingPoint(Measurement, kw_only=True):
    """A measured case of training; `seconds` is the median of its steps."""

    case: TrainingCase
    training: _Training
    hidden = 0.0  # seconds of transfers

    @classmethod
    def of(cls, record: Record, source: Path) -> Self:
        point = super().of(record, source)
        if len(point.training.losses) != point.case.warmup + point.case.steps:
            raise ArgumentError("a case of training has the loss of each step")
        return point

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of a step by part, mean over the ranks."""
        return {"compute": max(0.0, self.seconds - self.training.waited), "wait for data": self.training.waited}

    @property
    def remark(self) -> str:
        return f", planned {in_seconds(self.training.planned)}: {self.training.layout}"

    def __str__(self) -> str:
        return f"{counted(self.ranks, 'rank')}{'*' * self.oversubscribed}, {self.training.layout}"


def agreement(points: Sequence[TrainingPoint]) -> tuple[bool, str]:
    """Return whether the losses of all steps agree in all layouts with the same samples, and a sentence about it.

    Losses differ by rounding, which training amplifies.  They agree where half of the digits of their type do:
    |a - b| <= sqrt(eps) |a|.
    """
    alike = defaultdict[TrainingCase, list[TrainingPoint]](list)
    for x in points:
        alike[replace(x.case.on(1), kind="strong", of=0, batch=x.case.batch)].append(x)
    compared = list[tuple[float, float, str]]()
    for case, mine in alike.items():
        losses = np.array([x.training.losses for x in mine])
        differences = np.ptp(losses, axis=0) / np.maximum(np.abs(losses).min(axis=0), np.finfo(float).tiny)
        step = int(differences.argmax())
        ends = (f"{losses[at, step]:.8g} on {mine[at]}" for at in (losses[:, step].argmin(), losses[:, step].argmax()))
        bound = float(np.finfo(case.dtype).eps ** 0.5)
        if len(mine) > 1:
            compared.append((float(differences[step]), bound, f"step {step + 1}: {' and '.join(ends)}"))
    if not compared:
        return True, "Losses cannot be compared: no two cases have the same samples."
    largest, bound, where = max(compared, key=lambda x: x[0] / x[1])
    if largest <= bound:
        return True, f"The losses agree: the largest relative difference is {largest:.1e} ({where})."
    return False, (
        f"THE LOSSES DIFFER by {largest:.1e}, more than {bound:.1e}, half of the digits ({where}): the layouts do not "
        "train the same model."
    )


def notes_of_training(points: Sequence[TrainingPoint]) -> list[str]:
    """Return what a reader of a report must know of training, as sentences."""
    if not points:
        return []
    differ = "; ".join(f"{x}: {y}" for x in points for y in x.training.words if y.differ)
    words = f"Words received DIFFER from formulas ({differ})." if differ else "All words received equal their formulas."
    return [agreement(points)[1], words]


TITLES = {"strong": "Strong scaling", "weak": "Weak scaling", "shapes": "Shapes"}
TITLED = ("shape", "algorithm", "dtype", "mover", "memory", "device")
USUAL = {"mover": "mover auto", "memory": "any memory", "device": "host"}
CALLED = {"mpi_library": "MPI", "multiplies": "BLAS", "cpu": "processor", "threads_per_rank": "threads per rank"}
OVERSUBSCRIBED = (
    "Points that are grey inside, and the mark *, are measurements with more ranks than cores: ranks took turns on a "
    "core, so with a core for each rank the times would differ."
)


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
    sync_seconds: _Spread = _Spread(0.0, 0.0)  # records of the first versions do not have it


class _Product(Struct):
    algorithm: str
    inside: str
    grid: tuple[Count, Count]
    layers: Count
    lower_bound_words: Figure
    per_rank: _PerRank
    overlap: Figure | None = None


class Point(Measurement, kw_only=True):
    """A measured product."""

    case: Case
    product: _Product
    residual: Figure
    fraction: Positive = msgspec.field(name="fraction_of_peak")

    @classmethod
    def of(cls, record: Record, source: Path) -> Self:
        point = super().of(record, source)
        if point.case.kind == "weak":
            mnk, shape = point.case.of, cast("Any", MNK)
            converted(mnk.split(","), shape, f"a weak case is of m,n,k on one rank, got {mnk!r}", strict=False)
        return point

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def words(self) -> float:
        """The words that the busiest rank received or read in place."""
        return self.product.per_rank.words_received.max

    @property
    def over_bound(self) -> float:
        """The ratio of words to the lower bound; nan where no words have to be sent."""
        return self.words / self.product.lower_bound_words if self.product.lower_bound_words else nan

    @property
    def hidden(self) -> float:
        return self.product.per_rank.hidden_seconds.mean

    @property
    def remark(self) -> str:
        return f", {self.product.overlap:.0%} of transfers hidden" if self.product.overlap else ""

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of a typical repetition by part, mean over the ranks; `rest` is the remaining time."""
        ranks = self.product.per_rank
        sync = ranks.sync_seconds.mean
        parts = {
            "compute": ranks.compute_seconds.mean, "wait for data": max(0.0, ranks.wait_seconds.mean - sync),
            "wait for ranks": sync, "pack": ranks.pack_seconds.mean, "redistribution": ranks.move_seconds.mean,
        }  # fmt: skip
        return parts | {"rest": max(0.0, ranks.seconds.mean - sum(parts.values()))}


@dataclass(eq=False)
class Curve:
    """The points of one setting whose cases differ only in the number of ranks, in the order of this number.

    first    : the point to which efficiency is relative, the fastest one on the fewest ranks.
    forecast : the predictions of the planner, where there are any.
    """

    points: Sequence[Measurement]
    first: Measurement
    label: str = ""
    forecast: Predicted | None = None

    @property
    def case(self) -> Any:
        return self.points[0].case

    @property
    def line(self) -> list[Any]:
        """The points that a line joins: `first`, where it is on fewer ranks, and the points of the curve."""
        return [*{x.ranks: x for x in (self.first, *self.points)}.values()]

    def predicted(self, point: Measurement) -> float:
        """Return the predicted seconds of a point; nan where there is no prediction."""
        predictions = self.forecast.predictions if self.forecast else ()
        return next((x.seconds for x in predictions if x.ranks == point.ranks), nan)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The texts that distinguish the curve from other curves; "" stands for the usual value."""
        settings = self.points[0].settings
        threads = settings["threads_per_rank"]
        return {
            **self.case.texts,
            **settings,
            "pdgemm": f"pdgemm {settings['pdgemm']}",
            "threads_per_rank": f"{threads} thread{'' if threads == '1' else 's'} per rank",
        }


@dataclass
class Section:
    """The section of a report for one kind of study.   training : whether it is of training, or of products."""

    kind: str
    curves: list[Curve]
    training: bool

    @property
    def rows(self) -> list[tuple[Curve, Any]]:
        """All points, each with its curve."""
        return [(curve, point) for curve in self.curves for point in curve.points]

    @property
    def points(self) -> list[Any]:
        return [point for _, point in self.rows]

    @property
    def title(self) -> str:
        """The title: the kind of the study, and the properties that all curves share."""
        first, *others = (curve.texts for curve in self.curves)
        common = [first[name] for name in TITLED if first.get(name) and all(x[name] == first[name] for x in others)]
        return ": ".join(filter(None, (TITLES[self.kind] + " of training" * self.training, ", ".join(common))))

    @property
    def counts(self) -> list[int]:
        """The numbers of ranks that were measured."""
        return sorted({point.ranks for point in self.points})

    @property
    def fastest(self) -> list[Measurement]:
        """The fastest point on the fewest ranks for each shape, type and setting."""
        firsts = dict[Any, Measurement]()
        for first in sorted((curve.first for curve in self.curves), key=lambda x: (x.ranks, x.seconds)):
            firsts.setdefault((first.case.requested, first.case.dtype, *first.settings.values()), first)
        return [*firsts.values()]


@dataclass
class Results:
    """The results in the files of studies.

    sections : of products and of training.
    unread   : place and fault of each line, or measurement, that cannot be used.
    notes    : further facts that a reader of the report must know.
    machines : the calibration of each file.
    bad      : the cases that failed or are wrong, with their files.
    """

    sections: list[Section] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    bad: list[tuple[Path, records.AnyCase, Record]] = field(default_factory=list)

    @cached_property
    def points(self) -> list[Any]:
        """All measurements."""
        return [point for section in self.sections for point in section.points]


def read_all(paths: Sequence[Path]) -> Results:
    """Read the files of studies.  Raises FileError where a file is missing, or has no record."""
    results = Results()
    points: dict[tuple[Any, ...], Measurement] = {}
    again = 0
    for path in dict.fromkeys(paths):
        for case, record in _opened(path, results).measured.items():
            if record["status"] != "ok":
                results.bad.append((path, case, record))
                continue
            try:
                point = (TrainingPoint if isinstance(case, TrainingCase) else Point).of(record, path)
            except ArgumentError as fault:
                results.unread.append((f"{path}: {case}", str(fault)))
                continue
            key = case, *point.settings.values()
            again += key in points
            if key not in points or str(record.get("date")) >= str(points[key].record.get("date")):
                points[key] = point
    if again:
        results.notes.append(f"{again} cases were measured in several files: the latest measurement of each is shown.")
    trained = [x for x in points.values() if isinstance(x, TrainingPoint)]
    for kind in KINDS:
        for of_kind in ([x for x in points.values() if isinstance(x, Point)], trained):
            if mine := [x for x in of_kind if x.case.kind == kind]:
                results.sections.append(Section(kind, curves_of(mine), of_kind is trained))
    if not results.sections and not results.bad:
        place, why = results.unread[0]
        raise FileError(f"{place}: {why}; there is no other measurement")
    results.notes += notes_of_training(trained) + _notes(results.points)
    return results


def curves_of(points: Iterable[Measurement]) -> list[Curve]:
    """Return the curves of the points, labelled by the properties in which they differ."""
    together, firsts = defaultdict[Any, list[Measurement]](list), dict[Any, Measurement]()
    for point in sorted(points, key=lambda x: x.ranks):
        model = point.case.on(1), *point.settings.values()
        together[point.case.texts["algorithm"], model].append(point)
        firsts[model] = min(firsts.get(model, point), point, key=lambda x: (x.ranks, x.seconds))
    curves = [Curve(each, firsts[model]) for (_, model), each in together.items()]
    properties = [name for name in curves[0].texts if len({curve.texts[name] for curve in curves}) > 1] or ["algorithm"]
    return [
        Curve(x.points, x.first, ", ".join(x.texts[name] or USUAL.get(name, f"{name} unknown") for name in properties))
        for x in curves
    ]


def per_node(points: Iterable[Point]) -> int:
    """Return the number of ranks for which a node has cores."""
    return max((x.setting.cores_per_node // max(x.setting.threads_per_rank) for x in points), default=1) or 1


def _opened(path: Path, results: Results) -> records.Study:
    """Return a study that has measurements, and add its unreadable lines to the results.  Raises FileError."""
    study = records.read_study(path)
    if not path.exists():
        raise FileError(f"{path}: no such file")
    if not study.measured:
        why = f": line {study.unread[0][0]}: {study.unread[0][1]}" if study.unread else ""
        raise FileError(f"{path}: no measurement in it{why}")
    results.unread += [(f"{path}:{number}", f"not a measurement ({fault})") for number, fault in study.unread]
    if study.torn:
        results.unread.append((f"{path}: last line", "not finished: its writer was stopped"))
    if study.machine is not None:
        try:
            results.machines[str(path)] = Machine.from_dict(study.machine)
        except ArgumentError as fault:
            results.unread.append((f"{path}: calibration", str(fault)))
    return study


def _notes(points: Sequence[Measurement]) -> list[str]:
    values = {name: sorted({point.settings[name] for point in points}) for name in records.SETTING}
    notes = [
        f"The measurements differ in {CALLED.get(name, name)} ({'; '.join(each)}): no line joins them."
        for name, each in values.items()
        if len(each) > 1
    ]
    return notes + [OVERSUBSCRIBED] * any(point.oversubscribed for point in points)
