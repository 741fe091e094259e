"""Measurement of a case on the ranks of a communicator."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from math import isfinite, isqrt, prod
from pathlib import Path
from runpy import run_path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, PdgemmError
from pdgemm.gemm import pdgemm as multiply
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.report import Report, Summary
from pdgemm.io.atomic import on_root
from pdgemm.local.arrays.device import of
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.local.blas.local_gemm import prepare
from pdgemm.local.blas.processors import processor_field
from pdgemm.local.blas.threads import oversubscribed
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.residual import verify
from pdgemm.names import AnyName
from pdgemm.planning.machines.machine import Machine
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.support import signals
from pdgemm.support.agreement import together
from pdgemm.support.text import echo, in_rate, in_seconds
from pdgemm.support.waits import Wait
from pdgemm.tools.profiling.environment import VARIABLES, describe
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import Case, TrainingCase, program_file
from pdgemm.tools.studies.jobs import COMMAND
from pdgemm.tools.studies.records import AnyCase, Record

PEAK_SIDE = {"host": 3072, "cuda": 8192}  # the largest side of the local products that show the peak
PEAK_REPEATS = 2
CONFIDENCE = 0.95
LARGE = 1 << 20  # the dimension of a product at the peak of a machine


def measure(
    grid: ProcessGrid, case: Case, repeats: int, warmup: int, machine: Machine | None, notify: Callable[[int], object]
) -> Record | None:
    """Return the record of a case on rank 0.  Collective over the grid, which has `case.ranks` ranks.

    Each repetition is a whole call of `pdgemm` between two barriers, with A, B and C as `DistMatrix` lays them out by
    default; its time is that of the slowest rank.  The peak is the rate of local products on all ranks at once; it is
    measured right before and right after the repetitions, and the higher rate counts.
    notify : is called with the number of repetitions done.
    """
    comm, (m, n, k), dtype = grid.comm, case.mnk, np.dtype(case.dtype)
    A, B = (
        DistMatrix.from_function(
            element_function("uniform", seed, dtype), shape, grid=grid, dtype=dtype, device=AnyName(case.device)
        )
        for seed, shape in enumerate(((m, k), (k, n)))
    )
    form = partial(
        multiply, 1, A, B, 0, algorithm=AnyName(case.algorithm), mover=AnyName(case.mover),
        memory_limit=case.memory_limit, machine=machine,
    )  # fmt: skip
    C = form()
    for _ in range(warmup - 1):
        form(C)
    before = _peak(grid, case)
    seconds, reports = list[float](), list[Report]()
    for done in range(repeats):
        comm.Barrier()
        start = perf_counter()
        form(C)
        seconds.append(comm.allreduce(perf_counter() - start, MPI.MAX))
        reports.append(C.report)
        notify(done + 1)
    after = _peak(grid, case)
    residual = verify(C, 1, A, B)
    ordered = sorted(seconds)
    typical = reports[seconds.index(ordered[(repeats - 1) // 2])]
    all_reports, around = comm.gather(typical), circumstances(grid)
    threads = comm.allreduce(typical.threads)
    if comm.rank:
        return None
    assert all_reports is not None
    peak, rate = max(before, after), case.flops / float(np.median(seconds))
    gpus = comm.size / typical.ranks_per_device if case.device == "cuda" else 0.0
    return {
        **_record(case, residual.passed, seconds, warmup, (threads, gpus)),
        "gflops": rate / 1e9,
        "peak_gflops": peak / 1e9,
        "fraction_of_peak": rate / peak,
        "residual": residual.value if isfinite(residual.value) else None,
        "residual_bound": residual.bound,
        "product": Summary(all_reports).as_dict(),
        **around,
    }


def measure_training(
    grid: ProcessGrid, case: TrainingCase, machine: Machine | None, notify: Callable[[int], object]
) -> Record | None:
    """Return the record of a case of training on rank 0.  Collective over the grid, which has `case.ranks` ranks.

    The program yields its run after each step.  Steps before the last `case.steps` warm up, and are not counted.  The
    time of a step is that of the slowest rank.
    machine : of the plan; None: an ordinary cluster, no MFU.   notify : is called with the number of steps measured.
    """
    comm, reports = grid.comm, list[Any]()
    with together(comm) as arguments:
        training, plan = _program_of(program_file(case.program)), case.plan(machine or Machine())
        words = case.words(plan.layout)
        arguments += ["a case of training", words]
    for run in training(words, comm):
        reports.append(getattr(run, "report", None))
        notify(max(0, len(reports) - case.warmup))
    with together(comm):
        if None in reports or len(reports) != case.warmup + case.steps:
            raise ArgumentError(
                f"{case.program}: training() yields the run after each of {case.warmup} + {case.steps} steps, got "
                f"{len(reports)}, {reports.count(None)} of which have no report"
            )
    measured, losses = reports[case.warmup :], [float(x.loss) for x in reports]
    seconds = np.max(comm.allgather([x.seconds for x in measured]), axis=0).tolist()
    waited = comm.allreduce(sum(x.waited for x in measured)) / (comm.size * case.steps)
    import torch  # which the program has loaded

    tokens = torch.zeros(case.batch // plan.layout.dp, case.sequence, dtype=torch.int64)
    received = _received(comm, [x.traffic for x in measured], run.expected(tokens, tokens))
    around, median = circumstances(grid), float(np.median(seconds))
    if comm.rank:
        return None
    figures = {
        "layout": str(plan.layout),
        "waited": waited,
        "planned": plan.step_seconds,
        "words": received,
        "losses": [loss if isfinite(loss) else None for loss in losses],
    }
    if machine is not None:
        figures["mfu"] = case.flops / (median * case.ranks * machine.rate(case.dtype, LARGE))
    threads = comm.size * max(around["setting"]["threads_per_rank"])
    record = _record(case, bool(np.isfinite(losses).all()), seconds, case.warmup, (threads, 0))
    return {**record, "training": figures, **around}


def _received(
    comm: MPI.Comm, steps: Sequence[dict[str, Traffic]], expected: dict[str, Traffic]
) -> list[dict[str, Any]]:
    """Return the words of a step by kind, on rank 0: counted on the busiest rank, by formula on it, and who differs."""
    counted = sum((Counter({kind: x.words_received for kind, x in step.items()}) for step in steps), Counter[str]())
    formula = Counter({kind: len(steps) * x.words_received for kind, x in expected.items()})
    everywhere, result = comm.gather((counted, formula)) or [], list[dict[str, Any]]()
    for kind in sorted({kind for both in everywhere for words in both for kind in +words}):
        pairs = [(words[kind], expected[kind]) for words, expected in everywhere]
        words, by_formula = (x / len(steps) for x in max(pairs))
        differ = sum(words != expected for words, expected in pairs)
        result.append({"kind": kind, "counted": words, "formula": by_formula, "differ": differ})
    return result


def _record(case: AnyCase, right: bool, seconds: list[float], warmup: int, used: tuple[float, float]) -> Record:
    """Return the part that all records have.   used : threads and GPUs of all ranks."""
    median, (threads, gpus) = float(np.median(seconds)), used
    return {
        "case": case.as_dict(),
        "status": "ok" if right else "wrong",
        "confidence": confidence(sorted(seconds)),
        "seconds": seconds,
        "warmup": warmup,
        "median_seconds": median,
        "cost": {"core_hours": median * threads / 3600, "gpu_hours": median * gpus / 3600},
    }


@cache
def _program_of(path: Path) -> Callable[..., Iterable[Any]]:
    """Return the function `training` of a program, which can import modules beside it.  Raises ArgumentError."""
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return run_path(str(path), run_name="program_of_study")["training"]
    except Exception as bad:
        raise ArgumentError(f"{path} cannot be loaded: {type(bad).__name__}: {bad}") from bad


def _peak(grid: ProcessGrid, case: Case) -> float:
    """Return the flops per second of all ranks together, in local products at the same time; best of PEAK_REPEATS.

    The time is that of the slowest rank, as in a product on all ranks.  The local matrices are square.  A local product
    has as many operations as the whole case, because small products are slower; it has fewer if the matrices would take
    more memory than those of the case on one rank, or more than PEAK_SIDE rows.  They have at least 512 rows.
    """
    (m, n, k), dtype, device = case.mnk, np.dtype(case.dtype), case.device
    fitting_side = isqrt((m * k + k * n + m * n) // (3 * case.ranks))
    side = max(512, min(round(prod(case.mnk) ** (1 / 3)), fitting_side, PEAK_SIDE[device]))
    with ProcessGrid(MPI.COMM_SELF) as alone:
        A, B, C = (
            DistMatrix.from_function(element_function("uniform", seed, dtype), (side, side), grid=alone, dtype=dtype,
                                     device=AnyName(device))
            for seed in range(3)
        )  # fmt: skip
        product, best = prepare(1, A.local, B.local, C.local), 0.0
        for _ in range(PEAK_REPEATS):
            grid.comm.Barrier()
            start = perf_counter()
            product(0)
            if where := of(C.local):
                where.current_stream().synchronize()
            seconds = grid.comm.allreduce(perf_counter() - start, MPI.MAX)
            best = max(best, grid.size * gemm_flops(side, side, side, dtype.kind == "c") / seconds)
    return best


def confidence(ordered: list[float]) -> tuple[float, float] | None:
    """Return a nonparametric confidence interval of the median; None for fewer than six numbers.

    Hoefler & Belli, Scientific benchmarking of parallel computing systems, SC15, section 3.1.3.
    """
    from scipy.stats import quantile_test

    outcome: Any = quantile_test(ordered, p=0.5)
    low, high = map(float, outcome.confidence_interval(CONFIDENCE))
    return (low, high) if np.isfinite([low, high]).all() else None


def circumstances(grid: ProcessGrid) -> dict[str, Any]:
    """Return the circumstances of a measurement for its record: setting, command, date.  Collective over the grid."""
    return {
        "setting": setting(grid),
        "command": command_line(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def setting(grid: ProcessGrid) -> dict[str, Any]:
    """Return the hardware and software of a measurement, as facts for its record."""
    facts, too_many = describe(grid), grid.comm.allreduce(oversubscribed(grid.node), MPI.LOR)
    nodes = facts["nodes"]
    return {
        **{name: facts[name] for name in ("pdgemm", "python", "mpi_library", "mpi4py", "numpy", "multiplies", "cupy")},
        "cpu": processor_field("model name") or platform.machine(),
        "threads_per_rank": sorted({x for node in nodes for x in node["threads_per_rank"]}),
        "cores_per_node": grid.comm.allreduce(len(set().union(*grid.node.allgather(os.sched_getaffinity(0)))), MPI.MAX),
        "ranks_per_node": max((node["ranks"] for node in nodes), default=0),
        "oversubscribed": too_many,  # more ranks than cores
        "nodes": [node["host"] for node in nodes],
        "kernel": platform.release(),
    }


def command_line() -> list[str]:
    """Return the command line of the user, for repetition."""
    with suppress(ValueError):  # another program has set the variable
        if said := os.environ.get(COMMAND):  # this is one job of several
            return shlex.split(said)
    return ["mpirun", "-n", str(MPI.COMM_WORLD.size), "pdgemm", *sys.argv[1:]]


_NAP = 0.01  # seconds between two polls of an idle rank, which yields its core to active ranks


def run_cases(
    comm: MPI.Intracomm,
    path: Path,
    wanted: Sequence[AnyCase],
    todo: Sequence[AnyCase],
    repeats: int,
    warmup: int,
    machine: Machine | None,
) -> bool:
    """Measure cases; return whether all succeeded.  Collective over comm; a case runs on the first ranks of comm.

    Each record is in the file before the next case begins, and rank 0 prints it.
    wanted : all cases of the study.   todo : the cases to be measured now.
    Raises FileError or ArgumentError on all ranks if the file cannot be written, or holds another setting.
    """
    with ProcessGrid(comm) as grid:  # the grid sets the threads of a rank, the same for all cases
        here = setting(grid)
    on_root(comm, path, lambda: records.check_setting(path, records.open_study(path), here))
    good = True

    def doing(case: AnyCase, done: int) -> None:
        signals.doing(f"measuring {case}, repetition {done + 1} of {repeats}", "it is lost, what was finished is kept")

    for case in todo:
        active = comm.rank < case.ranks
        few: Any = comm.Split(0 if active else MPI.UNDEFINED)
        record = None
        if active:
            doing(case, 0)
            try:
                with ProcessGrid(few) as grid:
                    if isinstance(case, TrainingCase):
                        record = measure_training(grid, case, machine, partial(doing, case))
                    else:
                        record = measure(grid, case, repeats, warmup, machine, partial(doing, case))
            except PdgemmError as bad:  # raised on all ranks together; other errors propagate
                record = records.failed_record(case, str(bad), command_line())
            few.Free()
        _gather(comm)
        good &= on_root(comm, path, partial(_kept, path, record))
        if comm.rank == 0 and record:
            done = records.number_done(path, wanted)
            echo(f"[{done}/{len(wanted)}] {said(case, record)}", err=record["status"] != "ok")
    return good


def _kept(path: Path, record: Record | None) -> bool:
    assert record is not None
    records.append(path, record)
    return bool(record["status"] == "ok")


def _gather(comm: MPI.Comm) -> None:
    """Wait for all ranks, in a barrier that does not spin."""
    with Wait(comm):
        request = comm.Ibarrier()
        while not request.Test():
            sleep(_NAP)


def said(case: AnyCase, record: Record) -> str:
    """Return the record of a case as a line of text."""
    if record["status"] == "failed":
        return f"FAILED {case}: {record['error']}"
    if isinstance(case, TrainingCase):
        return _said_of_training(case, record)
    product = record["product"]
    wrong = "" if record["status"] == "ok" else f"; WRONG: residual {record['residual']}"
    return (
        f"{case}: {_median(record)}, {in_rate(1e9 * record['gflops'])}, "
        f"{record['fraction_of_peak']:.0%} of peak, by {product['algorithm']} on "
        f"{'x'.join(map(str, product['grid']))}{wrong}"
    )


def _said_of_training(case: TrainingCase, record: Record) -> str:
    """Return the record of a case of training as a line of text."""
    training, rate = record["training"], case.tokens / record["median_seconds"]
    differ = ", ".join(x["kind"] for x in training["words"] if x["differ"])
    words = f"words of {differ} DIFFER from their formulas" if differ else "words match the formulas"
    mfu = f"; MFU {training['mfu']:.0%}" if "mfu" in training else ""
    wrong = "" if record["status"] == "ok" else "; WRONG: a loss is infinite or not a number"
    return f"{case}: {_median(record)} a step, {rate:,.0f} tokens/s, by {training['layout']}; {words}{mfu}{wrong}"


def _median(record: Record) -> str:
    between = record["confidence"]
    spread = f" [{in_seconds(between[0])}, {in_seconds(between[1])}]" if between else ""
    return in_seconds(record["median_seconds"]) + spread
