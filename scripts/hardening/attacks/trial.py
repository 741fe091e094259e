"""One trial of hostile.py: its folder, its /dev/shm, its jobs, and the detectors that judge them.

This process is the first in new namespaces, which hostile.py creates.  All other processes there, and /dev/shm, belong
to the trial, and are cleared when it ends.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from problems import TOLERANCE, gemm_error

KINDS = ("hang", "wrong", "lost", "signal", "traceback", "code", "litter")
WATCHDOG = 8  # seconds after which the library ends a job in which a rank does not make a collective call
TOLD = "; the job is ended"  # the end of the watchdog's message
SHARED = Path("/dev/shm")
ERROR = "pdgemm: error: "
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

Attack = Callable[["Trial"], None]


class Finding(Exception):
    """Something that must not happen: its kind, one of KINDS, and a description."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Run:
    """A command that has ended."""

    command: str
    code: int  # negative: the signal that ended it
    out: str
    err: str


class Job:
    """A command that runs in the trial's folder."""

    def __init__(self, trial: Trial, words: Sequence[str], environment: dict[str, str]) -> None:
        self.trial, self.command = trial, shlex.join(words)
        number = len(trial.commands)
        trial.commands.append(self.command)
        self._files = trial.folder / f"{number}.out", trial.folder / f"{number}.err"
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                words,
                cwd=trial.work,
                env=trial.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def finish(self, bound: float | None = None, alive: bool = False) -> Run:
        """Wait until the job ends, and return its output.   alive : the time limit starts again whenever it prints."""
        bound, start, size = bound or self.trial.bound, time.monotonic(), -1
        while self.process.poll() is None:
            if alive and (now := self._files[0].stat().st_size) != size:
                start, size = time.monotonic(), now
            if time.monotonic() > start + bound:
                self.stop()
                where = stacks(self.said(0).err)
                raise Finding("hang", f"no end within {bound:.0f} s; {where}")
            time.sleep(0.02)
        return self.said(self.process.returncode)

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Wait until a condition holds or the job has ended, but not longer than some seconds."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end and not condition():
            time.sleep(0.002)

    def kill(self, whom: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the launcher, to one rank, to some ranks or to all processes."""
        there, rng = ranks(), self.trial.rng
        victims = {
            "launcher": [self.process.pid],
            "rank": rng.sample(there, min(1, len(there))),
            "ranks": rng.sample(there, rng.randint(0, len(there))),
            "all": [self.process.pid, *there],
        }[whom]
        self.trial.commands.append(f"# kill -{number.name} {whom}")
        for pid in victims or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End the job, after its ranks have printed their stacks."""
        for pid in ranks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        end_all()
        self.process.wait()

    def said(self, code: int) -> Run:
        out, err = (x.read_text(errors="replace") for x in self._files)
        return Run(self.command, code, out, err)


class Trial:
    """The argument of an attack: random numbers, a folder, functions that run commands, and a record of outcomes.

    size : the most ranks of a job.   bound : the time limit of a command in seconds.
    only : the number of the only case to run, in an attack with many cases.
    """

    def __init__(
        self, name: str, seed: int, folder: Path, size: int, bound: float, plant: str, only: int | None
    ) -> None:
        self.name, self.seed, self.folder, self.bound, self.only = name, seed, folder, bound, only
        self.rng, self.size = random.Random(f"{name}:{seed}"), size
        self.work, self._temporary = folder / "work", folder / "tmp"
        for path in (self.work, self._temporary):
            path.mkdir(parents=True)
        self.commands: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.findings: list[tuple[str, str, str]] = []  # kind, value of --trial that repeats it, text
        self.mounts: list[Path] = []
        self.shared_memory(256 << 20)
        found = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if plant:
            (folder / "plant").mkdir()
            (folder / "plant" / "sitecustomize.py").write_text(plant)
            found.insert(0, str(folder / "plant"))
        as_root = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
        self.environment = os.environ | {y: "1" for x in as_root for y in (x, f"{x}_CONFIRM")} | {
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, found)),
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            "PDGEMM_WATCHDOG": str(WATCHDOG),
        }  # fmt: skip

    # ------------------------------------------------------------------ file systems
    def mount(self, where: Path, size: int, *more: str) -> None:
        """Mount a file system of `size` bytes."""
        options = ",".join((f"size={max(size, 4096)}", *more))
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], check=True)
        self.mounts.append(where)

    def shared_memory(self, size: int) -> None:
        """Mount a /dev/shm of `size` bytes."""
        self.mount(SHARED, size)

    def close(self) -> None:
        """Report processes and shared memory that the trial left; then end these processes and unmount the folders."""
        end = time.monotonic() + 10
        while (left := others()) and time.monotonic() < end:
            time.sleep(0.05)
        if left:
            self.found("litter", f"processes are left: {left}")
        end_all()
        # a kill leaves some segments of Open MPI, which are recognised by their names
        if segments := [x.name for x in SHARED.iterdir() if not x.name.startswith(("sm_segment", "vader_segment"))]:
            self.found("litter", f"/dev/shm holds {segments}")
        while self.mounts:
            subprocess.run(["umount", "-l", str(self.mounts.pop())], check=True)
        if not self.findings:
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------------ outcomes
    def count(self, outcome: str) -> None:
        """Count a case that ended well: right, refused or ended."""
        self.outcomes[outcome] += 1

    def found(self, kind: str, text: str, case: int | None = None) -> None:
        repeat = f"{self.name}:{self.seed}" + ("" if case is None else f":{case}")
        self.findings.append((kind, repeat, text))

    # ------------------------------------------------------------------ running
    def start(self, ranks: int, *arguments: str, prefix: Sequence[str] = (), **environment: str) -> Job:
        """Start `pdgemm ARGUMENTS` on `ranks` ranks (0: without a launcher), and return without waiting."""
        launcher = ["mpiexec", "-n", str(ranks)] if ranks else []
        return Job(self, [*launcher, *prefix, sys.executable, "-m", "pdgemm", *arguments], environment)

    def pdgemm(self, ranks: int, *arguments: str, **environment: str) -> Run:
        return self.start(ranks, *arguments, **environment).finish()

    def program(self, ranks: int, name: str, *arguments: str, launcher: Sequence[str] = (), **environment: str) -> Job:
        """Start a function of attacks/programs.py on `ranks` ranks, and return without waiting."""
        aborts = (
            ["-m", "mpi4py"] if name in ("stepping", "training") else []
        )  # the other programs handle failures themselves
        words = ["mpiexec", *launcher, "-n", str(ranks), sys.executable, *aborts, str(HERE / "programs.py")]
        return Job(self, [*words, name, *arguments], environment)

    def cases(self, family: str, count: int, seconds: float = 8) -> None:
        """Run many cases in one job of attacks/ranks.py; if a case ends the job, run the rest in a new one."""
        end = time.monotonic() + seconds
        number = self.only or 0
        count = count if self.only is None else number + 1
        size = self.rng.randint(2, self.size) if self.size > 1 else 1
        words = ["mpiexec", "-n", str(size), sys.executable, "-m", "mpi4py", str(HERE / "ranks.py")]
        while number < count and time.monotonic() < end:
            job = Job(self, [*words, family, *map(str, (self.seed, number, count, end - time.monotonic()))], {})
            stuck: Finding | None = None
            try:
                run = job.finish(min(self.bound, WATCHDOG + 15), alive=True)
            except Finding as bad:
                run, stuck = job.said(-signal.SIGABRT), bad
            lines = [line.split(" ", 3)[1:] for line in run.out.splitlines() if line.startswith("case ")]
            number = max([int(line[0]) + 1 for line in lines], default=count)
            for case, word, text in {line[0]: line for line in lines}.values():  # the last line of each case
                if word in KINDS:
                    self.found(word, text, int(case))
                elif word != "begins":
                    self.count(word)
            if not lines:
                self.found("code", f"the job did not begin: {tail(run)}")
            elif lines[-1][1] == "begins":  # the job ended during this case
                case, _, text = lines[-1]
                try:
                    if stuck:
                        raise stuck
                    judge(run)
                    raise Finding("code", f"the job ended with exit code {run.code}: {tail(run)}")
                except Told:
                    self.count("ended")
                except Finding as bad:
                    self.found(bad.kind, f"{text}: {bad}", int(case))

    # ------------------------------------------------------------------ data
    def matrix(self, shape: tuple[int, int], dtype: str = "float64") -> np.ndarray:
        rng = np.random.default_rng(self.rng.getrandbits(32))
        values = rng.standard_normal(shape)
        if dtype.startswith("complex"):
            return (values + 1j * rng.standard_normal(shape)).astype(dtype)
        return (values * (20 if dtype == "int8" else 1)).astype(dtype)

    def store(self, where: str, matrix: np.ndarray) -> None:
        """Write a matrix to FILE:/DATASET by plain h5py."""
        path, name = where.split(":")
        with h5py.File(self.work / path, "a") as file:
            file[name] = matrix

    def read(self, where: str) -> np.ndarray:
        """Read FILE:/DATASET by plain h5py; a dataset that cannot be read is a finding of kind "lost"."""
        path, _, name = where.rpartition(":")
        try:
            with h5py.File(self.work / path, "r") as file:
                return np.array(file[name])
        except (OSError, KeyError) as bad:
            raise Finding("lost", f"{where} cannot be read: {bad}") from bad

    def operands(self, m: int, n: int, k: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
        """Store random A and B in a.h5:/x and b.h5:/x, and return them."""
        a, b = self.matrix((m, k), dtype), self.matrix((k, n), dtype)
        self.store("a.h5:/x", a)
        self.store("b.h5:/x", b)
        return a, b

    def unchanged(self, where: str, was: np.ndarray) -> None:
        """Check that a dataset has not changed."""
        if not np.array_equal(self.read(where), was):
            raise Finding("lost", f"{where} has changed")

    def is_product(self, where: str, alpha: float, a: Any, b: Any, beta: float = 0, c: Any = None) -> np.ndarray:
        """Check that a dataset is alpha A B + beta C, and return it."""
        found = self.read(where)
        if not gemm_error(found, alpha, a, b, beta, c) <= TOLERANCE:
            raise Finding("wrong", f"{where} is not the product")
        return found


class Told(Exception):
    """The library's watchdog ended the job, and said so."""


def judge(run: Run, codes: Sequence[int] = (0, 2)) -> str:
    """Return "right" for exit code 0 (the caller checks results), "refused" for 2 and one error; else raise Finding."""
    if TOLD in run.err:
        raise Told
    text = run.out + run.err
    if run.code < 0 or run.code in (132, 134, 135, 136, 139) or re.search(r"Fatal Python error|on signal \d", text):
        raise Finding("signal", f"exit code {run.code}: {tail(run)}")
    if "Traceback (most recent call last)" in text:
        raise Finding("traceback", f"exit code {run.code}: {tail(run)}")
    if run.code not in codes:
        raise Finding("code", f"exit code {run.code}: {tail(run)}")
    lines = [line for line in run.err.splitlines() if line.lstrip("\0 ").startswith(ERROR)]  # MPI may add leading NULs
    if run.code == 2 and len(lines) != 1:
        raise Finding("code", f"exit code 2 with {len(lines)} lines of errors: {tail(run)}")
    return "refused" if run.code == 2 else "right"


def tail(run: Run, lines: int = 6) -> str:
    """Return the last errors that a command printed, or else its last lines."""
    said = [line for line in (run.out + run.err).splitlines() if line.strip("- ")]
    errors = [x for x in said if re.match(r"\w*(Error|Exception|pdgemm)\b.*", x)]
    return " | ".join(x.strip()[:200] for x in (errors[-2:] or said[-lines:]))


def stacks(errors: str) -> str:
    """Return where in the package each rank was, from the stacks that it printed."""
    found = Counter[str]()
    for stack in re.split(r"(?m)^(?:Current thread|Thread) .*$", errors)[1:]:
        inside = re.findall(r'File ".*?/((?:pdgemm|io|grids|scripts)/[^"]*)", line (\d+) in (\w+)', stack)
        if inside and inside[0][0] != "pdgemm/support/signals.py":  # this thread only waits for signals
            found[" < ".join(f"{function} ({path}:{line})" for path, line, function in inside[:3])] += 1
    return "; ".join(f"{n} in {where}" for where, n in found.items())


def processes() -> list[tuple[int, bytes, bytes]]:
    """Return the number, command line and environment of each other process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes()
            if path.name != str(os.getpid()) and words.split(b"\0")[0]:
                found.append((int(path.name), words, b"\0" + (path / "environ").read_bytes()))
    return sorted(found)


def others() -> list[str]:
    """Return the other processes, after zombies are reaped."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [f"{pid} {words.replace(bytes(1), b' ')[:90].decode(errors='replace')}" for pid, words, _ in processes()]


def ranks() -> list[int]:
    """Return the numbers of the processes that are ranks, of all jobs."""
    rank = re.compile(rb"\0(OMPI_COMM_WORLD_RANK|PMI_RANK)=")
    return [pid for pid, words, environment in processes() if b"python" in words and rank.search(environment)]


def end_all() -> None:
    """Kill all other processes of this namespace; this process must be its first."""
    if os.getpid() != 1:
        raise RuntimeError("end_all() must run in the first process of a namespace")
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    end = time.monotonic() + 10
    while others() and time.monotonic() < end:
        time.sleep(0.02)
