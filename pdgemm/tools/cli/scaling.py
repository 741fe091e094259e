"""`pdgemm scaling` measures products or training: in a job for each number of ranks, or on the ranks of its own job."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pdgemm.errors import ArgumentError
from pdgemm.planning.algorithm_registry import algorithm_choices
from pdgemm.planning.machines.known_machines import machine_of
from pdgemm.planning.machines.machine import CUDA, Machine, named_by_variable
from pdgemm.support import launcher
from pdgemm.support.files import check_writable
from pdgemm.support.text import counted, echo
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import start_mpi
from pdgemm.tools.cli.options import INTEGERS, MNK
from pdgemm.tools.studies import figures, records
from pdgemm.tools.studies.cases import AUTO, EXAMPLE, KINDS, SIZES, cases, program_file, training_cases
from pdgemm.tools.studies.jobs import BAD_INPUT, ENDED, Ended, Launcher, StudyJobs, threads_per_rank
from pdgemm.tools.studies.plot import finished

if TYPE_CHECKING:
    from mpi4py import MPI

_warn = partial(echo, err=True)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_of_training = options.stacked_options(
    click.option(
        "--train", "program", is_flag=False, flag_value=EXAMPLE,
        help="Measure steps of training by this program; without a path: docs/examples/gpt/train.py.",
    ),
    click.option(
        "--layouts", "layouts", multiple=True, default=(AUTO,), show_default="auto",
        help="Layout of training: auto (the fastest by the plan), dp, tp, pp, or such as dp=2,tp=2.  May be repeated.",
    ),
    click.option(
        "--batch", type=options.COUNT, default=16, show_default=True,
        help="Samples of a step; in a weak study, samples of a step on each rank.",
    ),
    *(click.option(f"--{name}", type=options.COUNT, default=size, show_default=True) for name, size in SIZES.items()),
)  # fmt: skip


@click.command(short_help="Measure products, or training, on ranks.")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.option("--shape", "shapes", type=MNK, multiple=True, help="m,n,k of a product; in a weak study, on one rank.")
@click.option("--ranks", type=INTEGERS, required=True, help="Numbers of ranks, such as 1,2,4.")
@click.option(
    "--out", type=click.Path(dir_okay=False), help="File of results, a line per case; with --train: training.jsonl."
)
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path),
    help="FILE.html, .png or .svg: the report, as by `pdgemm plot`; with --train an HTML page beside the results.",
)  # fmt: skip
@click.option(
    "--algorithm", "algorithms", type=click.Choice(algorithm_choices()), multiple=True, default=("auto",),
    help="Default: auto.  This, --dtype and --shape may be given several times: each combination is measured.",
)  # fmt: skip
@click.option(
    "--dtype", "dtypes", type=click.Choice(options.BLAS_DTYPES), multiple=True,
    help="Default: float64; of training float32.",
)  # fmt: skip
@options.mover
@options.memory_limit
@options.device
@click.option(
    "--repeats", "--steps", "repeats", type=options.COUNT, default=10, show_default=True,
    help="Products, or steps, that are measured: six or more for an interval.",
)  # fmt: skip
@click.option(
    "--warmup", type=options.COUNT, default=1, show_default=True, help="Products, or steps, before the measured ones."
)
@click.option("--launch", help="How jobs are started: 'mpiexec -n {ranks}'; default: PDGEMM_LAUNCH, srun or mpiexec.")
@options.machine
@click.option("--no-calibrate", "ordinary", is_flag=True, help="Plan and predict for an ordinary cluster.")
@click.option("--only", type=INTEGERS, hidden=True)  # in jobs that this command starts: the numbers of the cases
@click.option("--calibrate", is_flag=True, hidden=True)  # in jobs that this command starts: calibrate only
@_of_training
@options.force
@options.debug
def scaling(
    program: str | None, out: str | None, page: Path | None, repeats: int, warmup: int, launch: str | None,
    machine_file: str | None, device: str, ordinary: bool, only: tuple[int, ...] | None, calibrate: bool, force: bool,
    **studied: Any,
) -> int:  # fmt: skip
    """Measure products on growing numbers of ranks: the same shapes (strong), shapes that take the same memory on each
    rank (weak), or several shapes (shapes).  With --train, steps of training: with the same samples in all (strong, the
    default), or with the same number of samples on each rank (weak).

    Without a launcher, it starts a job for each number of ranks; under mpirun or srun it uses the first ranks of that
    job.  Cases that are in the file are not measured again.
    """
    _check_options(training=program is not None)
    if out is None and program is None:
        raise click.MissingParameter(param_hint="--out", param_type="option")
    path = Path(out or "training.jsonl")
    if program is not None:
        wanted = _trained(studied, program=program, steps=repeats, warmup=warmup)
        page = path.with_suffix(".html") if page is None else page
    else:
        wanted = _multiplied(studied, device)
    study = _StudyInFile(path, page, wanted, machine_file, device, ordinary)
    if page is not None and only is None and not calibrate:
        figures.check_output(page, figures.FORMS, force, [path])
    if only is not None or calibrate or launcher.launched_size() > 1:
        start_mpi()
        return _inside(study, only, calibrate, repeats, warmup)
    code = _in_jobs(study, Launcher(launch))
    try:
        return code if code in (BAD_INPUT, ENDED) else max(code, finished(path, page, wanted))
    except Ended:
        return ENDED


def _check_options(training: bool) -> None:
    """Raise UsageError where options of products were typed for training, or the other way round."""
    others = ("shapes", "algorithms", "mover", "memory_limit", "device") if training else ("layouts", "batch", *SIZES)
    for option in options.typed(others):
        belongs = "products: leave out it or --train" if training else "training: it needs --train"
        raise click.UsageError(f"{option} is an option of studies of {belongs}")


def _multiplied(studied: dict[str, Any], device: str) -> list[records.AnyCase]:
    """Return the cases of a study of products, from its options."""
    if studied["kind"] is None:
        raise click.MissingParameter(param_hint=f"one of {', '.join(KINDS)}, or --train", param_type="argument")
    if not studied["shapes"]:
        raise click.MissingParameter(param_hint="--shape", param_type="option")
    names = ("kind", "shapes", "ranks", "algorithms", "mover", "memory_limit")
    dtypes = studied["dtypes"] or ("float64",)
    return [*cases(**{name: studied[name] for name in names}, dtypes=dtypes, device=device)]


def _trained(studied: dict[str, Any], **how: Any) -> list[records.AnyCase]:
    """Return the cases of a study of training, from its options."""
    program_file(how["program"])
    kind, dtypes = studied["kind"] or "strong", studied["dtypes"] or ("float32",)
    sizes, of = {name: studied[name] for name in SIZES}, {name: studied[name] for name in ("ranks", "layouts", "batch")}
    return [*training_cases(kind, sizes=sizes, dtypes=dtypes, **of, **how)]


@dataclass
class _StudyInFile:
    """A study and its file.   wanted : all its cases.   ordinary : plans are for an ordinary cluster."""

    path: Path
    page: Path | None
    wanted: list[records.AnyCase]
    machine_file: str | None
    device: str
    ordinary: bool

    def opened(self) -> tuple[records.Study, Machine | None]:
        """Return the contents of the file, and the machine.

        The machine is that of --machine, else of PDGEMM_MACHINE, else of the study; None if none of these has one.
        Raises FileError if the study cannot be continued.
        """
        path = self.path
        check_writable(path, 0)
        study = records.open_study(path)
        if study.torn:
            echo(f"{path}: its last line was not finished, and is measured again", err=True)
        machine = machine_of(self.machine_file) if self.machine_file else named_by_variable(self.device == CUDA)
        if machine is None and study.machine:
            calibrated = Machine.from_dict(study.machine, f"{path}: its calibration")
            machine = calibrated if calibrated.device == self.device else None
        return study, machine

    def keep(self, study: records.Study, machine: Machine | None) -> None:
        """Add the machine by which cases are planned to the file, unless the file has it already."""
        if machine is not None and (known := json.loads(machine.as_json())) != study.machine:
            records.append(self.path, {"machine": known})

    def headline(self, todo: list[records.AnyCase]) -> str:
        return f"{self.path}: {counted(len(self.wanted), 'case')}, {len(todo)} to run"


def _check_fit(todo: list[records.AnyCase], ranks: int | None, what: str) -> None:
    """Raise ArgumentError where a case needs more ranks than there are.   ranks : None if their number is unknown."""
    large = sorted({case.ranks for case in todo if ranks is not None and case.ranks > ranks})
    if ranks is not None and large:
        raise ArgumentError(f"{what} {counted(ranks, 'rank')}: cases of {', '.join(map(str, large))} ranks do not fit")


# ------------------------------------------------------------------ a job for each number of ranks
def _in_jobs(study: _StudyInFile, launch: Launcher) -> int:
    """Measure the remaining cases, each number of ranks in a job of its own; return the exit code."""
    contents, machine = study.opened()
    todo = records.left(contents, study.wanted)
    _check_fit(todo, launcher.allocated_ranks(), "the allocation has room for")
    echo(study.headline(todo))
    if not todo:
        return 0
    with records.study_lock(study.path):
        study.keep(contents, machine)
        return _measure(study, todo, launch, calibrate=machine is None and not study.ordinary)


def _measure(study: _StudyInFile, todo: list[records.AnyCase], launch: Launcher, calibrate: bool) -> int:
    """Measure the cases in jobs, and return the exit code."""
    threads = threads_per_rank(max(case.ranks for case in study.wanted))
    jobs = StudyJobs(launch, study.path, sys.argv[1:], threads)
    try:
        for number in _SIGNALS:
            signal.signal(number, _end)
        if calibrate:
            sizes = sorted(case.ranks for case in todo)
            # the largest job for which there are cores
            few = max((ranks for ranks in sizes if ranks * threads <= _cores()), default=min(sizes[-1], _cores()))
            echo(f"calibrating on {counted(few, 'rank')}")
            code, _ = jobs.step(few, "--calibrate")
            if code:
                _warn(f"calibration ended with exit code {code}: plans and predictions are for an ordinary cluster")
        return jobs.run(todo, study.wanted)
    except Ended:
        _warn(
            f"pdgemm: ended by a signal: {records.number_done(study.path, study.wanted)} of "
            f"{counted(len(study.wanted), 'case')} are measured and in {study.path}; the one that was running is lost; "
            "the same command goes on"
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


# ------------------------------------------------------------------ on the ranks of one job
def _inside(study: _StudyInFile, only: tuple[int, ...] | None, calibrate: bool, repeats: int, warmup: int) -> int:
    """Measure the remaining cases on the ranks of this job; return the exit code.

    only : numbers of the cases to measure.  None: this job is the whole study; rank 0 also compares losses and writes
        the page.
    """
    from mpi4py import MPI

    from pdgemm.io.atomic import on_root
    from pdgemm.tools.cli.session import check_launcher
    from pdgemm.tools.studies.measure import run_cases

    comm, path, wanted = MPI.COMM_WORLD, study.path, study.wanted
    check_launcher(comm.size)
    contents, machine = on_root(comm, path, study.opened)
    if calibrate:
        return 0 if _calibrated(comm, study) else 1
    todo = records.left(contents, wanted) if only is None else [wanted[number] for number in only]
    _check_fit(todo, comm.size, "this job has")
    if only is None:
        echo(study.headline(todo))
    with ExitStack() as locks:
        if todo and only is None:
            on_root(comm, path, lambda: locks.enter_context(records.study_lock(path)))
            on_root(comm, path, lambda: study.keep(contents, machine))
            if machine is None and not study.ordinary:
                machine = _calibrated(comm, study)
        good = not todo or run_cases(comm, path, wanted, todo, repeats, warmup, machine)
    code = on_root(comm, path, lambda: finished(path, study.page, wanted)) if only is None else 0
    return code if good else max(code, 1)


def _calibrated(comm: MPI.Intracomm, study: _StudyInFile) -> Machine | None:
    """Measure, record and return the machine.

    If the machine was so busy that a figure is impossible, warn and return None.
    """
    from pdgemm.io.atomic import on_root
    from pdgemm.planning.machines.machine import impossible_figures
    from pdgemm.tools.calibrate import calibrate

    machine = calibrate(comm, device=study.device)
    if wrong := impossible_figures(machine):
        if not comm.rank:
            _warn(f"the calibration is not used: {'; '.join(wrong)}")
        return None
    record = {"machine": json.loads(machine.as_json()), "ranks": comm.size}
    on_root(comm, study.path, lambda: records.append(study.path, record))
    return machine
