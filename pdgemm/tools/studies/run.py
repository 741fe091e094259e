"""Measurement of the cases of a study, one after the other, on the ranks of one job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from mpi4py import MPI

from pdgemm.errors import PdgemmError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io.atomic import on_root
from pdgemm.planning.machines.machine import Machine
from pdgemm.support import signals
from pdgemm.support.text import echo, in_rate, in_seconds
from pdgemm.support.waits import Wait
from pdgemm.tools.studies import records
from pdgemm.tools.studies.measure import command_line, measure, measure_training, setting
from pdgemm.tools.studies.records import AnyCase, Record
from pdgemm.tools.studies.training_cases import TrainingCase

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
