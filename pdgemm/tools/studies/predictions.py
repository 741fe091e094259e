"""Predictions of a curve on any number of ranks by the planner, without MPI and other ranks.

The planner predicts the plan that a run itself would choose: A, B and C are on a near-square grid, in one block for
each rank; matrices whose layout does not fit the algorithm are redistributed before and after the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan

import numpy as np

from pdgemm.errors import PdgemmError
from pdgemm.planning.machines.machine import Machine, on_nodes
from pdgemm.planning.question import Question, movers
from pdgemm.schedules.formulas import lower_bound
from pdgemm.schedules.mover_registry import AUTO
from pdgemm.support.text import counted
from pdgemm.tools.studies.cases import Case, TrainingCase


@dataclass(frozen=True)
class Prediction:
    """The prediction of a case, of a product or of training.

    words : the words that the busiest rank in a sample of ranks receives; nan where they are not predicted.
    """

    case: Case | TrainingCase
    seconds: float
    words: float = nan

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @property
    def flops(self) -> float:
        return self.case.flops

    @property
    def over_bound(self) -> float:
        """The ratio of the words of a product to their lower bound; nan where no words have to be sent."""
        assert isinstance(self.case, Case)
        return self.words / (lower_bound(*self.case.mnk, self.ranks) or nan)


@dataclass(frozen=True)
class Predicted:
    """The predictions of a curve.

    machine : the machine model, with the assumed nodes.   calibrated : whether this machine was measured.
    guessed : whether links between nodes were assumed.
    """

    predictions: tuple[Prediction, ...]
    machine: Machine
    calibrated: bool
    guessed: bool


def predict(case: Case, measured: Iterable[int], to: int, machine: Machine | None, per_node: int) -> Predicted | None:
    """Predict the curve of a case on the measured numbers of ranks, and on powers of two beyond them, up to `to`.

    machine  : None stands for an ordinary cluster.
    per_node : ranks of a node, where the machine does not say it.
    Returns None for a case on GPUs, and where no number of ranks has a plan.
    """
    if case.device != "host":
        return None
    assumed = machine or Machine()
    if assumed.ranks_per_node is None:
        assumed = on_nodes(assumed, per_node)
    known, planned = sorted(set(measured)), []
    for ranks in known + [2**x for x in range(to.bit_length()) if known[-1] < 2**x]:
        one = case.on(ranks)
        with suppress(PdgemmError):  # no such grid, or too little memory
            plan = question(one, assumed).plan()
            planned.append(Prediction(one, plan.seconds, plan.words))
    if not planned:
        return None
    guessed = (machine is None or machine.ranks_per_node is None) and planned[-1].ranks > per_node
    return Predicted(tuple(planned), assumed, machine is not None, guessed)


def question(case: Case, machine: Machine) -> Question:
    """Return the `Question` to the planner for a case on the host: the product and the machine."""
    mover = case.mover if case.mover in movers() else AUTO
    unlimited = Question(
        *case.mnk, case.ranks, np.dtype(case.dtype), algorithm=case.algorithm, mover=mover, machine=machine
    )
    limit = case.memory_limit  # beyond A, B and C
    return unlimited if limit is None else replace(unlimited, memory=limit + unlimited.given_bytes)


def assumptions(predictions: Sequence[Predicted], gpus: bool) -> list[str]:
    """Return the unmeasured assumptions of predictions, as sentences.   gpus : there are measurements on GPUs."""
    notes = []
    if any(not x.calibrated for x in predictions):
        notes.append("Predictions are not calibrated: an ordinary cluster is assumed (pdgemm calibrate measures one).")
    for size in sorted({x.machine.ranks_per_node or 1 for x in predictions if x.guessed}):
        notes.append(
            f"Predictions for more than {counted(size, 'rank')} assume nodes of {counted(size, 'rank')} each, as many "
            "as a node has cores for; links between nodes were not measured: those of an ordinary cluster are assumed."
        )
    if gpus:
        notes.append("Products on GPUs are not predicted.")
    return notes
