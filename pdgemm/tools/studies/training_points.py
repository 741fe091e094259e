"""Measurements of training in files of studies, and whether the losses of all layouts agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
from msgspec import Struct

from pdgemm.errors import ArgumentError
from pdgemm.support.json_input import Figure, Positive, Size
from pdgemm.support.text import counted, in_seconds
from pdgemm.tools.studies.records import Measurement, Record
from pdgemm.tools.studies.training_cases import TrainingCase


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
