"""A study as a sequence of jobs: one for each number of ranks, started by mpiexec or srun.  The module needs no MPI.

A job that fails loses no finished measurement, and the next job starts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from threading import Event, Thread
from typing import IO

from pdgemm.errors import ArgumentError
from pdgemm.support.json_input import Count, variable
from pdgemm.support.launcher import allocated_nodes, cores_per_rank, in_slurm, outside_job
from pdgemm.support.text import echo
from pdgemm.tools.studies import records
from pdgemm.tools.studies.records import AnyCase

ENDED = 128 + signal.SIGTERM
BAD_INPUT = 2
COMMAND = "PDGEMM_COMMAND"  # in the environment of a job: the command line of the user
ENDED_BY = "pdgemm: ended by SIGUSR1"  # printed by a rank; SIGTERM may mean that another rank has crashed
_GRACE = 5  # seconds in which a job must end
_LINES = 8  # the last error lines of a job that are kept


class Ended(Exception):
    """Raised where a signal has ended the study."""


class Launcher:
    """The launcher of jobs.   template : such as 'mpiexec -n {ranks}'; default: PDGEMM_LAUNCH, srun or mpiexec."""

    def __init__(self, template: str | None = None, environment: Mapping[str, str] = os.environ) -> None:
        slurm = in_slurm(environment) and shutil.which("srun")
        self.template = (
            template or environment.get("PDGEMM_LAUNCH") or ("srun --ntasks {ranks}" if slurm else "mpiexec -n {ranks}")
        )
        try:
            words = shlex.split(self.template)
        except ValueError as bad:
            raise ArgumentError(f"not a command: {self.template!r} ({bad})") from None
        if "{ranks}" not in self.template or not words:
            raise ArgumentError(f"a launcher must contain {{ranks}}, the number of ranks; got {self.template!r}")
        if shutil.which(words[0]) is None:
            raise ArgumentError(f"{words[0]}: no such command; name a launcher: --launch 'mpiexec -n {{ranks}}'")

    def command(self, ranks: int, *arguments: str) -> list[str]:
        words = shlex.split(self.template.replace("{ranks}", str(ranks)))
        return [*words, sys.executable, "-m", "pdgemm", *arguments]


def threads_per_rank(ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the threads per rank for all cases: as set by the user or batch system, else a share of the cores."""
    threads = variable("OMP_NUM_THREADS", Count, environment=environment) or cores_per_rank(environment)
    return threads or max(1, len(os.sched_getaffinity(0)) // -(-ranks // allocated_nodes(environment)))


class StudyJobs:
    """The jobs of a study.   arguments : the command line of `pdgemm`, without the cases."""

    def __init__(self, launcher: Launcher, path: Path, arguments: Sequence[str], threads: int) -> None:
        self._launcher, self._path, self._arguments = launcher, path, [*arguments]
        typed = shlex.join(["pdgemm", *arguments])
        self._environment = outside_job() | {"OMP_NUM_THREADS": str(threads), COMMAND: typed}

    def run(self, todo: Sequence[AnyCase], wanted: Sequence[AnyCase]) -> int:
        """Return the exit code: 0 if all cases were measured and are right, 1 if not, 2 if a job reports bad input."""
        good = True
        for ranks, group in groupby(todo, lambda case: case.ranks):
            rest = [*group]
            while rest:
                before = len(records.read_study(self._path).attempts)
                only = ",".join(str(wanted.index(case)) for case in rest)
                code, errors = self.step(ranks, "--only", only)
                tried = records.read_study(self._path).attempts[before:]
                if code == BAD_INPUT and not tried:
                    return BAD_INPUT
                good &= code == 0
                rest = rest[len(tried) :]
                if rest and (code or not tried):
                    said = f"its job ended with exit code {code}: {' | '.join(errors)}"
                    record = records.failed_record(rest[0], said, shlex.split(self._environment[COMMAND]))
                    records.append(self._path, record)
                    echo(f"FAILED {rest[0]}: {record['error']}", err=True)
                    rest, good = rest[1:], False
        return 0 if good else 1

    def step(self, ranks: int, *more: str) -> tuple[int, list[str]]:
        """Run a job; return its exit code and its last error lines.  Raises Ended if a signal has ended the job."""
        process = subprocess.Popen(
            self._launcher.command(ranks, *self._arguments, *more), env=self._environment, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        last, ended = deque[str](maxlen=_LINES), Event()
        reader = Thread(target=_pass_on, args=(process.stderr, last, ended), daemon=True)
        reader.start()
        try:
            code = process.wait()
        except BaseException:
            self._end(process)
            raise
        reader.join(_GRACE)
        if ended.is_set():
            raise Ended
        return (code if code >= 0 else 128 - code), [*last]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End a job, in the last resort by SIGKILL; launchers forward SIGUSR1 to the ranks."""
        for number, grace in ((signal.SIGUSR1, _GRACE), (signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
                return


def _pass_on(errors: IO[bytes], last: deque[str], ended: Event) -> None:
    """Forward a job's errors to standard error; set `ended` when a rank reports that a signal has ended the job."""
    for line in errors:
        with suppress(BrokenPipeError):  # standard error is closed; the job must not block
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
        if text := line.decode(errors="replace").strip():
            last.append(text)
            if ENDED_BY in text:
                ended.set()
