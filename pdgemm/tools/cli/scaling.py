"""`pdgemm scaling` measures in one job for each number of ranks, or on the ranks of the job in which it was started."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pdgemm.errors import ArgumentError, FileError
from pdgemm.planning.algorithm_registry import algorithm_choices
from pdgemm.planning.machines.machine import CUDA, Machine, load_machine, named_by_variable
from pdgemm.support import launcher
from pdgemm.support.text import counted, echo, in_rate, in_seconds
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import start_mpi
from pdgemm.tools.cli.param_types import BYTES, INTEGERS, MNK
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import KINDS, Case, cases
from pdgemm.tools.studies.jobs import ENDED, Ended, Launcher, StudyJobs, threads_per_rank

if TYPE_CHECKING:
    from mpi4py import MPI

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--shape", "shapes", type=MNK, multiple=True, required=True, help="m,n,k; on one rank for a weak study.")
@click.option("--ranks", type=INTEGERS, required=True, help="Numbers of ranks, such as 1,2,4.")
@click.option("--out", type=click.Path(dir_okay=False), required=True, help="File of results, a line per case.")
@click.option(
    "--algorithm",
    "algorithms",
    type=click.Choice(algorithm_choices()),
    multiple=True,
    default=("auto",),
    help="Default: auto.  This, --dtype and --shape may be given several times: each combination is measured.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(options.BLAS_DTYPES),
    multiple=True,
    default=("float64",),
    help="Default: float64.",
)
@options.mover
@click.option("--memory-limit", type=BYTES, help="Per rank, for buffers beyond A, B and C.")
@options.device
@click.option("--repeats", type=options.COUNT, default=10, show_default=True, help="Six or more for an interval.")
@click.option("--warmup", type=options.COUNT, default=1, show_default=True, help="Products before the measured ones.")
@click.option("--launch", help="How jobs are started: 'mpiexec -n {ranks}'; default: PDGEMM_LAUNCH, srun or mpiexec.")
@options.machine
@click.option("--no-calibrate", is_flag=True, help="Plan and predict for an ordinary cluster.")
@click.option("--only", type=INTEGERS, hidden=True)  # in jobs that this command starts: the numbers of the cases
@click.option("--calibrate", is_flag=True, hidden=True)  # in jobs that this command starts: calibrate only
@options.debug
def scaling(
    kind: str,
    shapes: tuple[tuple[int, int, int], ...],
    ranks: tuple[int, ...],
    out: str,
    algorithms: tuple[str, ...],
    dtypes: tuple[str, ...],
    mover: str,
    memory_limit: int | None,
    device: str,
    repeats: int,
    warmup: int,
    launch: str | None,
    machine_file: str | None,
    no_calibrate: bool,
    only: tuple[int, ...] | None,
    calibrate: bool,
) -> int:
    """Measure products on growing numbers of ranks: the same shapes (strong), shapes that take the same memory on each
    rank (weak), or several shapes (shapes).

    Alone it starts a job for each number of ranks; under mpirun or srun it uses the first ranks of that job.  Cases
    that are in the file are not measured again.
    """
    path = Path(out)
    wanted = cases(kind, shapes, ranks, dtypes, algorithms, mover=mover, memory_limit=memory_limit, device=device)
    if only is not None or calibrate or launcher.launched_size() > 1:
        start_mpi()
        return _inside(path, wanted, only, repeats, warmup, machine_file, device, no_calibrate, calibrate)
    return _steps(path, wanted, Launcher(launch), machine_file, device, no_calibrate)


def _opened(path: Path) -> records.Study:
    """Return the study in a file.  Raises FileError if the study cannot be continued."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileError(f"{path}: the folder {folder} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise FileError(f"{path}: no permission to write")
    study = records.open_study(path)
    if study.torn:
        echo(f"{path}: its last line was not finished, and is measured again", err=True)
    return study


def _machine_at_hand(path: Path, machine_file: str | None, study: records.Study, device: str) -> Machine | None:
    """Return the machine of the option, of PDGEMM_MACHINE, or of the study's calibration on this device, if any."""
    machine = load_machine(machine_file) if machine_file else named_by_variable(device == CUDA)
    if machine is None and study.machine:
        calibrated = Machine.from_dict(study.machine, f"{path}: its calibration")
        machine = calibrated if calibrated.device == device else None
    return machine


# ------------------------------------------------------------------ a job for each number of ranks
def _steps(
    path: Path, wanted: list[Case], launch: Launcher, machine_file: str | None, device: str, ordinary: bool
) -> int:
    """Measure the remaining cases, each number of ranks in a job of its own; return the exit code."""
    study = _opened(path)
    machine = _machine_at_hand(path, machine_file, study, device)
    available = launcher.allocated_ranks()
    todo, fits = _fitting(wanted, records.left(study, wanted), available, "the allocation has room for")
    _say(_headline(path, wanted, todo))
    if not todo:
        return 0 if fits else 1
    with records.study_lock(path):
        _keep(path, study, machine)
        code = _measure(path, wanted, todo, launch, calibrate=machine is None and not ordinary)
    return code if fits else max(code, 1)


def _headline(path: Path, wanted: list[Case], todo: list[Case]) -> str:
    return f"{path}: {counted(len(wanted), 'case')}, {len(todo)} to run"


def _keep(path: Path, study: records.Study, machine: Machine | None) -> None:
    """Add the machine of the plans to the file of the study, unless it is the study's machine already."""
    if machine is not None and (known := json.loads(machine.as_json())) != study.machine:
        records.append(path, {"machine": known})


def _measure(path: Path, wanted: list[Case], todo: list[Case], launch: Launcher, calibrate: bool) -> int:
    """Measure the cases in jobs, and return the exit code."""
    most = max(case.ranks for case in todo)
    threads = threads_per_rank(max(case.ranks for case in wanted))
    steps = StudyJobs(launch, path, sys.argv[1:], threads, _warn)
    try:
        for number in _SIGNALS:
            signal.signal(number, _end)
        if calibrate:
            # the largest job for which there are cores
            few = max((r for r in {x.ranks for x in todo} if r * threads <= _cores()), default=min(most, _cores()))
            _say(f"calibrating on {counted(few, 'rank')}")
            code, _ = steps.step(few, "--calibrate")
            if code:
                _warn(f"calibration ended with exit code {code}: plans and predictions are for an ordinary cluster")
        return steps.run(todo, wanted)
    except Ended:
        done = len(records.read_study(path).done & {*wanted})
        _warn(
            f"pdgemm: ended by a signal: {done} of {counted(len(wanted), 'case')} are measured and in {path}; the one "
            "that was running is lost; the same command goes on"
        )
        return ENDED


def _end(number: int, frame: Any) -> NoReturn:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # one signal is enough
    raise Ended


def _cores() -> int:
    """Return the number of cores of the allocation, or of this machine."""
    ranks = launcher.allocated_ranks()
    return len(os.sched_getaffinity(0)) if ranks is None else ranks * (launcher.cores_per_rank() or 1)


def _say(text: str, err: bool = False) -> None:
    """Print a line; the study continues where the output is closed."""
    with suppress(BrokenPipeError):
        echo(text, err=err)


def _warn(text: str) -> None:
    _say(text, err=True)


def _fitting(
    wanted: list[Case], todo: list[Case], ranks: int | None, what: str, loud: bool = True
) -> tuple[list[Case], bool]:
    """Return the cases that fit the available ranks, and whether all do.   loud : print a line on the other cases."""
    large = sorted({case.ranks for case in todo if ranks is not None and case.ranks > ranks})
    if ranks is None or not large:
        return todo, True
    text = f"{what} {counted(ranks, 'rank')}: cases of {', '.join(map(str, large))} ranks do not fit"
    if all(case.ranks > ranks for case in wanted):
        raise ArgumentError(text)
    if loud:
        _warn(f"{text}, and are left out")
    return [case for case in todo if case.ranks <= ranks], False


# ------------------------------------------------------------------ on the ranks of one job
def _inside(
    path: Path,
    wanted: list[Case],
    only: tuple[int, ...] | None,
    repeats: int,
    warmup: int,
    machine_file: str | None,
    device: str,
    ordinary: bool,
    calibrate: bool,
) -> int:
    """Measure the remaining cases on the ranks of this job; return the exit code."""
    from mpi4py import MPI

    from pdgemm.io.atomic import on_root
    from pdgemm.support import signals
    from pdgemm.tools.cli.session import check_launcher
    from pdgemm.tools.studies.run import run_cases

    comm = MPI.COMM_WORLD
    check_launcher(comm.size)
    study = on_root(comm, path, lambda: _opened(path))
    machine = on_root(comm, path, lambda: _machine_at_hand(path, machine_file, study, device))
    if calibrate:
        _calibrated(comm, path, device)
        return 0
    todo = records.left(study, wanted) if only is None else [wanted[number] for number in only]
    todo, fits = _fitting(wanted, todo, comm.size, "this job has", loud=not comm.rank)
    if only is None:
        _say(_headline(path, wanted, todo))
    if not todo:
        return 0 if fits else 1

    def doing(case: Case, done: int) -> None:
        signals.doing(f"measuring {case}, repetition {done + 1} of {repeats}", "it is lost, what was finished is kept")

    def notify(case: Case, record: records.Record) -> None:
        done = len(records.read_study(path).done & {*wanted})
        _say(f"[{done}/{len(wanted)}] {said(case, record)}", err=record["status"] != "ok")

    with ExitStack() as held:
        if only is None:
            on_root(comm, path, lambda: held.enter_context(records.study_lock(path)))
            on_root(comm, path, lambda: _keep(path, study, machine))
            if machine is None and not ordinary:
                machine = _calibrated(comm, path, device)
        good = run_cases(comm, path, todo, repeats, warmup, machine, doing, notify)
    return 0 if good and fits else 1


def _calibrated(comm: MPI.Intracomm, path: Path, device: str) -> Machine:
    from pdgemm.io.atomic import on_root
    from pdgemm.tools.calibrate import calibrate

    machine = calibrate(comm, device=device)
    record = {"machine": json.loads(machine.as_json()), "ranks": comm.size}
    on_root(comm, path, lambda: records.append(path, record))
    return machine


def said(case: Case, record: records.Record) -> str:
    """Return the record of a case as a line of text."""
    if record["status"] == "failed":
        return f"FAILED {case}: {record['error']}"
    product, between = record["product"], record["confidence"]
    spread = f" [{in_seconds(between[0])}, {in_seconds(between[1])}]" if between else ""
    wrong = "" if record["status"] == "ok" else f"; WRONG: residual {record['residual']}"
    return (
        f"{case}: {in_seconds(record['median_seconds'])}{spread}, {in_rate(1e9 * record['gflops'])}, "
        f"{record['fraction_of_peak']:.0%} of peak, by {product['algorithm']} on "
        f"{'x'.join(map(str, product['grid']))}{wrong}"
    )
