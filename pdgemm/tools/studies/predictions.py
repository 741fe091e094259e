"""Predictions of a curve on any number of ranks by the planner and the simulator, without MPI and other ranks.

The planner predicts the plan that a run itself would choose: A, B and C on a near-square grid, in one block for each
rank, and matrices whose layout does not fit the algorithm redistributed before and after the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from pdgemm.errors import PdgemmError
from pdgemm.planning.machines.machine import Machine, on_nodes
from pdgemm.planning.machines.simulator import simulate
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.question import Question, movers
from pdgemm.schedules.mover_registry import AUTO, BY_MPI, SHARED
from pdgemm.support.text import counted
from pdgemm.tools.studies.cases import Case

ENOUGH = 0.3  # seconds of a simulation after which no larger simulation is begun


@dataclass(frozen=True)
class Prediction:
    """The prediction of one case.   words : words that the busiest rank receives, of a sample of ranks."""

    case: Case
    seconds: float
    words: float

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @property
    def flops(self) -> int:
        return self.case.flops


@dataclass(frozen=True)
class Predicted:
    """The predictions of a curve: by formula on all numbers of ranks, by simulation on the smallest numbers of ranks.

    machine : the machine model, with the assumed nodes.   calibrated : whether this machine was measured.
    guessed : whether links between nodes were assumed.
    """

    formula: tuple[Prediction, ...]
    simulation: tuple[Prediction, ...]
    machine: Machine
    calibrated: bool
    guessed: bool


def predict(case: Case, measured: Iterable[int], to: int, machine: Machine | None, per_node: int) -> Predicted | None:
    """Predict the curve of a case on the measured numbers of ranks, and on powers of two beyond them, up to `to`.

    machine  : None stands for an ordinary cluster.
    per_node : ranks of a node, where the machine does not say it.
    Returns None for a case on GPUs.
    """
    if case.device != "host":
        return None
    assumed = machine or Machine()
    if assumed.ranks_per_node is None:
        assumed = on_nodes(assumed, per_node)
    counts, planned, walked, enough = counts_to(measured, to), [], [], False
    for ranks in counts:
        one = case.on(ranks)
        try:
            plan = question(one, assumed).plan()
        except PdgemmError:  # no such grid, or too little memory
            continue
        planned.append(_prediction(one, plan, plan.seconds))
        if not enough:
            start = perf_counter()
            try:
                walked.append(_prediction(one, plan, simulated(one, plan)))
            except PdgemmError:  # too many messages
                enough = True
            enough = enough or perf_counter() - start > ENOUGH
    guessed = (machine is None or machine.ranks_per_node is None) and any(x.ranks > per_node for x in planned)
    return Predicted(tuple(planned), tuple(walked), assumed, machine is not None, guessed)


def counts_to(measured: Iterable[int], to: int) -> list[int]:
    """Return the measured numbers of ranks, and larger powers of two up to `to`."""
    known = sorted(set(measured))
    beyond = [2**x for x in range(to.bit_length() + 1) if known[-1] < 2**x <= to]
    return known + beyond


def question(case: Case, machine: Machine, messages: bool = False) -> Question:
    """Return the planner's question for a case on the host.   messages : ranks do not read each other's memory."""
    mover = case.mover if case.mover in movers() else AUTO
    if messages and mover in (AUTO, SHARED.name):
        mover = BY_MPI
    unlimited = Question(
        *case.mnk, case.ranks, np.dtype(case.dtype), algorithm=case.algorithm, mover=mover, machine=machine
    )
    limit = case.memory_limit  # beyond A, B and C
    return unlimited if limit is None else replace(unlimited, memory=limit + unlimited.given_bytes)


def simulated(case: Case, plan: ProductPlan) -> float:
    """Return the seconds of a plan by simulation, in which panels travel as messages; redistribution is by formula.

    Raises PdgemmError where there are too many messages.
    """
    machine = plan.problem.machine
    *shape, layers = plan.shape
    request = question(case, machine, messages=True)
    sent = replace(request, algorithm=plan.algorithm, shape=(shape[0], shape[1]), layers=layers).plan()
    return simulate(sent.product, machine, case.ranks).seconds + sent.moving_seconds


def _prediction(case: Case, plan: ProductPlan, seconds: float) -> Prediction:
    return Prediction(case, seconds, plan.words)


def assumptions(predictions: Sequence[Predicted], gpus: bool) -> list[str]:
    """Return the unmeasured assumptions of predictions, as sentences.   gpus : there are measurements on GPUs."""
    notes = []
    if any(not x.calibrated for x in predictions):
        notes.append("Predictions are not calibrated: an ordinary cluster is assumed (pdgemm calibrate measures one).")
    for size in sorted({x.machine.ranks_per_node or 1 for x in predictions if x.guessed}):
        notes.append(
            f"Predictions for more than {counted(size, 'rank')} assume nodes of {counted(size, 'rank')} each, as many "
            "as one has cores for; links between nodes were not measured, those of an ordinary cluster are assumed."
        )
    if gpus:
        notes.append("There are no predictions for GPUs: a calibration is of processors.")
    return notes
