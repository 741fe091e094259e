"""Measurements of training in files of studies: which of them belong together, and whether their losses agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from pdgemm.errors import ArgumentError
from pdgemm.support.json_input import Count, Figure, Size, converted
from pdgemm.support.text import counted, in_words
from pdgemm.tools.studies.predictions import Prediction
from pdgemm.tools.studies.records import Measurement, Record, relative
from pdgemm.tools.studies.training.training_cases import AUTO, TrainingCase

TITLES_OF_TRAINING = {"strong": "Strong scaling of training", "weak": "Weak scaling of training"}
UNCALIBRATED = (
    "Plans of training are not calibrated, so there is no MFU: an ordinary cluster is assumed (pdgemm calibrate "
    "measures a machine)."
)


class Words(Struct):
    """The words of a kind that are received in a step.

    counted, formula : on the rank that receives most.   all_ranks : counted on all ranks together.
    differ : the ranks on which the two are not equal.
    """

    kind: str
    counted: Figure
    formula: Figure | None
    all_ranks: Figure
    differ: Size

    @property
    def verdict(self) -> str:
        """How the counted words compare with their formula, in words."""
        if self.formula is None:
            return "there is no formula"
        return f"differ on {counted(self.differ, 'rank')}" if self.differ else "equal on all ranks"


class _Training(Struct):
    layout: str
    microbatches: Count
    phases: dict[str, Figure]
    waits: dict[str, Figure]
    planned: dict[str, Figure]
    bubble: Figure
    words: list[Words]
    losses: list[float]
    mfu: Figure | None = None
    hfu: Figure | None = None


class TrainingPoint(Measurement, kw_only=True):
    """A measured case of training; `seconds` is the median of its steps."""

    case: TrainingCase
    training: _Training

    @classmethod
    def of(cls, record: Record, source: Path) -> TrainingPoint:
        """Return the point of a record.  Raises ArgumentError where the record is incomplete or invalid."""
        point = converted({**record, "record": record, "source": str(source)}, cls)
        if len(point.training.losses) != point.case.warmup + point.case.steps or not point.planned.seconds:
            raise ArgumentError("a case of training has the loss of each step, and planned seconds")
        return point

    @property
    def flops(self) -> int:
        return self.case.flops

    @property
    def tokens_per_second(self) -> float:
        return self.case.tokens / self.seconds

    @property
    def planned(self) -> Prediction:
        """The planned step."""
        return Prediction(self.case, sum(self.training.planned.values()))

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of a step by part, mean over ranks and steps, as in `StepSeconds.of_parts`; `rest` is Python."""
        phases, waits = self.training.phases, self.training.waits
        return {
            **{name: max(0.0, phases.get(name, 0.0) - waits.get(name, 0.0)) for name in ("forward", "backward")},
            "transfers": sum(waits.values()) + phases.get("reduce", 0.0),
            "wait": phases.get("pipeline", 0.0) + phases.get("data", 0.0),
            "update": phases.get("optimizer", 0.0),
            "rest": phases.get("other", 0.0),
        }

    @property
    def words(self) -> float:
        """The words that are received in a step on all ranks together, of all kinds."""
        return sum(x.all_ranks for x in self.training.words)

    @property
    def words_verdict(self) -> str:
        """How the words of all kinds compare with their formulas, in a word or two."""
        if any(x.differ for x in self.training.words):
            return "DIFFER"
        return "not all have one" if any(x.formula is None for x in self.training.words) else "equal"

    @property
    def name(self) -> str:
        """The case in a row of a figure or a message."""
        chosen = " (auto)" if self.case.layout == AUTO and self.ranks > 1 else ""
        return f"{counted(self.ranks, 'rank')}{'*' * self.oversubscribed}, {self.training.layout}{chosen}"


@dataclass(frozen=True)
class TrainingSection:
    """The section of a report for one model, on all numbers of ranks and in all layouts, in one setting."""

    points: Sequence[TrainingPoint]

    @property
    def kind(self) -> str:
        return self.points[0].case.kind

    @property
    def title(self) -> str:
        return f"{TITLES_OF_TRAINING[self.kind]}: {self.points[0].case.requested}"

    @property
    def counts(self) -> list[int]:
        """The numbers of ranks that were measured."""
        return sorted({point.ranks for point in self.points})

    @cached_property
    def first(self) -> TrainingPoint:
        """The fastest point on the fewest ranks, to which efficiency is relative."""
        return min(self.points, key=lambda x: (x.ranks, x.seconds))

    def efficiency(self, point: TrainingPoint) -> float:
        """Return the rate of work per rank relative to that of `first`.

        T(p0) p0 / (T(p) p) of strong scaling; T(p0) / T(p) of weak scaling, in which the samples grow with the ranks.
        """
        return relative(self.first, point)

    def planned_efficiency(self, point: TrainingPoint) -> float:
        """Return the efficiency of the plan, relative to that of `first`."""
        return relative(self.first.planned, point.planned)

    @property
    def fastest(self) -> list[TrainingPoint]:
        """The fastest point on each number of ranks."""
        return [min((x for x in self.points if x.ranks == ranks), key=lambda x: x.seconds) for ranks in self.counts]

    @property
    def curves(self) -> dict[str, list[TrainingPoint]]:
        """The points of each layout as it was asked for; one rank has but one, which begins all of them."""
        curves = defaultdict[str, list[TrainingPoint]](list)
        for point in self.points:
            curves[point.case.layout].append(point)
        alone = [point for point in curves.get(AUTO, []) if point.ranks == 1]
        if len(curves) > 1 and len(alone) == len(curves[AUTO]):
            del curves[AUTO]
        return {name: points if points[0].ranks == 1 else alone + points for name, points in curves.items()}


def sections_of_training(points: Iterable[TrainingPoint]) -> list[TrainingSection]:
    """Return the sections of points: one for each model, kind of study and setting."""
    together = defaultdict[tuple[object, ...], list[TrainingPoint]](list)
    for point in sorted(points, key=lambda x: (x.case.kind, x.ranks, x.case.layout)):
        together[point.case.model, *point.settings.values()].append(point)
    return [*map(TrainingSection, together.values())]


class Agreement(NamedTuple):
    """Whether the losses of layouts agree, and what is said of it."""

    agree: bool
    text: str


def agreement(points: Sequence[TrainingPoint]) -> Agreement:
    """Compare the losses of all steps in all layouts, of cases with the same model, samples and steps.

    They differ by rounding, which training amplifies: they agree where half of the digits of their type do,
    |a - b| <= sqrt(eps) |a|.
    """
    alike = defaultdict[tuple[object, ...], list[TrainingPoint]](list)
    for x in points:
        alike[x.case.trained].append(x)
    worst: tuple[float, float, str] | None = None
    layouts = steps = 0
    for mine in (mine for mine in alike.values() if len(mine) > 1):
        losses = np.array([x.training.losses for x in mine], float)
        low, high = losses.argmin(axis=0), losses.argmax(axis=0)
        differences = np.ptp(losses, axis=0) / np.maximum(np.abs(losses).min(axis=0), np.finfo(float).tiny)
        step, bound = int(np.argmax(differences)), float(np.finfo(mine[0].case.dtype).eps ** 0.5)
        layouts, steps = layouts + len(mine), max(steps, len(differences))
        ends = (f"{losses[at[step], step]:.8g} on {mine[at[step]].name}" for at in (low, high))
        entry = float(differences[step]), bound, f"step {step + 1}: {' and '.join(ends)}"
        if worst is None or entry[0] / bound > worst[0] / worst[1]:
            worst = entry
    if worst is None:
        return Agreement(True, "Losses cannot be compared: no two cases have the same samples.")
    largest, bound, where = worst
    if largest <= bound:
        text = f"The losses of {layouts} cases agree: the largest relative difference in {steps} steps is {largest:.1e}"
        return Agreement(True, f"{text} ({where}).")
    return Agreement(
        False,
        f"THE LOSSES DIFFER by {largest:.1e}, more than {bound:.1e}, half of the digits ({where}): the layouts do not "
        "train the same model.",
    )


def notes_of_training(sections: Sequence[TrainingSection]) -> list[str]:
    """Return what a reader must know of all sections, as sentences."""
    points = [point for section in sections for point in section.points]
    if not points:
        return []
    wrong = [f"{x.name}: {y.kind} {y.verdict}" for x in points for y in x.training.words if y.differ]
    unknown = sorted({y.kind for x in points for y in x.training.words if y.formula is None})
    most = max(x.words for x in points)
    words = f"All words that were received, {in_words(most)} a step at most, are equal to their formulas, on each rank."
    if wrong:
        words = f"Words that were received DIFFER from their formulas ({'; '.join(wrong)})."
    elif unknown:
        words = f"There is no formula of {', '.join(unknown)}; all other words that were received are equal to theirs."
    elif not most:
        words = "Nothing was received: there is one rank."
    return [agreement(points).text, words] + [UNCALIBRATED] * any(x.training.mfu is None for x in points)
