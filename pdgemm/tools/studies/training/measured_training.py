"""Measurement of a case of training on the ranks of a communicator, by a program that trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.parallel.step_report import LARGE, PHASES, StepReport, StepTimes
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.support.agreement import together
from pdgemm.tools.studies.measure import circumstances, confidence
from pdgemm.tools.studies.records import Record
from pdgemm.tools.studies.training.training_cases import TrainingCase


def measure_training(
    grid: ProcessGrid, case: TrainingCase, machine: Machine | None, notify: Callable[[int], object]
) -> Record | None:
    """Return the record of a case on rank 0.  Collective over the grid, which has `case.ranks` ranks.

    The program yields after each step; those before the last `case.steps` warm up, and are not counted.  A step lasts
    from the request for its data to the end of its update, on the slowest rank.
    machine : of the plan; None: an ordinary cluster, no MFU.   notify : is called with the number of steps measured.
    """
    comm = grid.comm
    with together(comm) as arguments:
        program, plan = _loaded(case.path), case.plan(machine or Machine())
        arguments += ["a case of training", case.words(plan.layout)]
    losses, times = list[float](), None
    for times, loss in program.training(case.words(plan.layout), comm):
        losses.append(float(loss))
        if not isinstance(times, StepTimes):
            break
        if len(losses) == case.warmup:
            times.restart()
        notify(max(0, len(losses) - case.warmup))
    with together(comm) as arguments:
        if not isinstance(times, StepTimes) or len(losses) != case.warmup + case.steps:
            raise ArgumentError(
                f"{case.program}: training() yields the StepTimes and the loss of {case.warmup} + {case.steps} steps, "
                f"got {len(losses)} of {type(times).__name__}"
            )
        arguments += ["steps of training", len(losses)]
    report = times.report()
    words, around = _words(comm, report), circumstances(grid)
    if comm.rank:
        return None
    threads = comm.size * max(around["setting"]["threads_per_rank"])
    median = float(np.median(report.of_steps))
    return {
        "case": case.as_dict(),
        "status": "ok" if np.isfinite(losses).all() else "wrong",
        "confidence": confidence(sorted(report.of_steps)),
        "seconds": [*report.of_steps],
        "median_seconds": median,
        "warmup": case.warmup,
        "training": {
            **_figures(case, plan, report, median),
            "words": words,
            "losses": [loss if isfinite(loss) else None for loss in losses],
            **({} if machine is None else _shares(case, plan, machine, median)),
        },
        "cost": {"core_hours": median * threads / 3600, "gpu_hours": 0.0},
        **around,
    }


def _figures(case: TrainingCase, plan: ModelPlan, report: StepReport, median: float) -> dict[str, Any]:
    """Return the layout, the rate, and the seconds of a step by phase, beside those of the plan."""
    mean, waits = report.phases.mean(axis=0), report.waits.mean(axis=0)
    return {
        "layout": str(plan.layout),
        "microbatches": plan.microbatches,
        "parameters": case.shape.parameters,
        "tokens": case.tokens,
        "tokens_per_second": case.tokens / median,
        "phases": dict(zip(PHASES, mean.tolist())),
        "waits": dict(zip(PHASES[1:3], waits.tolist())),
        "hidden_seconds": report.hidden,
        "planned": plan.times.of_parts(),
        "bubble": float(plan.bubble),
    }


def _shares(case: TrainingCase, plan: ModelPlan, machine: Machine, seconds: float) -> dict[str, float]:
    """Return MFU and HFU: the shares of the peak that the model's flops take, and all flops."""
    peak = machine.rate(case.dtype, LARGE)
    whole = seconds * case.ranks * peak
    again = case.shape.hardware_flops(case.tokens, plan.layout.recompute)
    return {"mfu": case.flops / whole, "hfu": again / whole, "peak_gflops": peak / 1e9}


def _words(comm: MPI.Comm, report: StepReport) -> list[dict[str, Any]]:
    """Return the words of a step by kind, on rank 0: counted on the busiest rank, by formula on it, and who differs.

    One gather; formulas are those of the program, and of `JointLayout.step`, not of what was counted.
    """
    everywhere, result = comm.gather(report.words()) or [], list[dict[str, Any]]()
    for kind in dict.fromkeys(kind for words in everywhere for kind in words):
        pairs = [words.get(kind, (0, 0)) for words in everywhere]
        counted, formula = max(pairs, key=lambda pair: pair[0])
        formula = None if any(expected is None for _, expected in pairs) else formula
        if not any(number for pair in pairs for number in pair):
            continue
        result.append({
            "kind": kind,
            "counted": counted / report.steps,
            "formula": None if formula is None else formula / report.steps,
            "all_ranks": sum(pair[0] for pair in pairs) / report.steps,
            "differ": sum(moved != expected for moved, expected in pairs if expected is not None),
        })  # fmt: skip
    return result


@cache
def _loaded(path: Path) -> ModuleType:
    """Return the program of a file, as Python starts it: modules beside it can be imported.  Raises ArgumentError."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = spec_from_file_location("program_of_study", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as bad:
        raise ArgumentError(f"{path} cannot be loaded: {type(bad).__name__}: {bad}") from bad
    return module
