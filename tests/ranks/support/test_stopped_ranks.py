"""The watchdog names a rank that is stopped in a function, whatever call the other ranks wait in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import jobs
import pytest

from pdgemm.support import watchdog
from pdgemm.support.launcher import outside_job

pytestmark = [jobs.needs_mpiexec, pytest.mark.timeout(240)]
LAUNCHER = (watchdog.CODE, -11)  # Open MPI 5's mpiexec sometimes crashes after it has ended the ranks
HEAD = """
import os, signal, sys, time
from contextlib import contextmanager
from pathlib import Path
import numpy as np
from mpi4py import MPI
from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm, redistribute
from pdgemm.io import hdf5
from pdgemm.support import waits, watchdog
watchdog.PATIENCE = 0.3
watchdog._ANSWER_SECONDS = 1.0
rank = MPI.COMM_WORLD.rank
grid = ProcessGrid(MPI.COMM_WORLD)
row = ProcessGrid(MPI.COMM_WORLD, (1, grid.size))
whole = np.random.default_rng(1).random((24, 24)) + 24 * np.eye(24)
A = DistMatrix.from_global(whole, grid=grid, block=2)
enter = waits.Wait.__enter__

def stop(seconds=None):
    if seconds is not None and not os.fork():
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)

def stops_at(number, seconds=None):
    '''Rank 1 stops as it begins its wait of this number that is in no check; the result counts them down.'''
    left = [number]
    def stopping(self):
        left[0] -= not self.check and waits.this_rank.wait is None
        if rank == 1 and left[0] == 0:
            left[0] = -1000000
            stop(seconds)
        enter(self)
    waits.Wait.__enter__ = stopping
    return left
"""


def command_of(folder: Path, source: str, ranks: int) -> list[str]:
    (folder / "program.py").write_text(HEAD + textwrap.dedent(source))
    return jobs.python(ranks, folder / "program.py")


CASES = {  # rank 1 is stopped in the middle of each
    "shared": "pdgemm(1, A, A, algorithm='summa', mover='shared', check=False)",
    "ibcast": "pdgemm(1, A, A, algorithm='summa', mover='ibcast', check=False)",
    "solve": "linalg.solve(A, A[:, 0:2])",
    "redistribute": "redistribute(A, grid=row, block=3)",
    "sum": "A.sum()",
    "allgather": "A.allgather()",
    "save": "hdf5.save('a.h5', 'x', A)",
    "load": "hdf5.load('a.h5', 'x', grid)",
}


def test_a_stopped_rank_is_named_in_every_wait_and_may_continue(tmp_path: Path) -> None:
    """When the watchdog has named the stopped rank, the test continues it, and results are right."""
    source = f"""
        def numbers(x):
            values = [y.allgather() if isinstance(y, DistMatrix) else y for y in (x if isinstance(x, tuple) else [x])]
            return [np.asarray(y) for y in values if isinstance(y, (float, np.ndarray))]
        for name, text in {CASES!r}.items():
            code = compile(text, name, "eval")
            count = stops_at(0)
            first = eval(code)
            waits.Wait.__enter__ = enter
            middle = grid.comm.bcast((1 - count[0]) // 2, root=1)
            expected = numbers(first)
            stops_at(max(1, middle))
            second = eval(code)
            waits.Wait.__enter__ = enter
            right = all(map(np.array_equal, expected, numbers(second)))
            print(f"{{name}}: {{'right' if right else 'wrong'}}\\n", end="", flush=True)
    """
    command = command_of(tmp_path, source, 4)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    program = subprocess.Popen(command, env=outside_job(), cwd=tmp_path, **pipes)
    lines = list[str]()
    try:
        assert program.stdout
        for line in program.stdout:
            lines.append(line)
            if stopped := re.search(r"rank 1 is stopped \(kill -CONT (\d+) lets it go on\)", line):
                os.kill(int(stopped[1]), signal.SIGCONT)
        assert program.wait() == 0
    finally:
        program.kill()
    text = "".join(lines)
    assert [text.count(f"{name}: right\n") for name in CASES] == [4] * len(CASES), text
    for name in CASES:
        assert re.search(rf"has waited \d+ s in {name}:1 \(.*\): rank 1 is stopped", text), f"{name}\n{text}"


def test_a_stopped_rank_may_continue_within_the_limit(tmp_path: Path) -> None:
    """With PDGEMM_WATCHDOG = 2, a rank that stops for 0.4 s continues; a longer stop ends the job."""
    source = """
        stops_at(3, seconds=0.4)
        C = pdgemm(1, A, A, mover="ring", algorithm="summa", check=False)
        if np.allclose(C.allgather(), whole @ whole):
            print("right\\n", end="", flush=True)
        stops_at(3)
        linalg.solve(A, A)
        print("solved")
    """
    program = jobs.run(command_of(tmp_path, source, 2), tmp_path, 200, PDGEMM_WATCHDOG="2")
    text = program.stdout + program.stderr
    assert program.returncode in LAUNCHER and text.count("right\n") == 2 and "solved" not in text, text
    lines = [line for line in text.splitlines() if line.startswith("pdgemm: rank")]
    solve = next(n for n, line in enumerate((HEAD + source).splitlines(), 1) if "linalg.solve(A, A)" in line)
    place = f"has waited 2 s in {tmp_path}/program.py:{solve} (solve): rank 1 is stopped"
    assert lines and all(place in line and line.endswith("; the job is ended") for line in lines), text


PLANTED = """
def phase(self, name):
    if rank == 1 and work and name == "compute":
        work.pop()()
    return recorded(self, name)

def computes():
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass

def computes_alone():
    start = time.monotonic()
    sum(range(10**6))
    sum(range(int(4e6 / (time.monotonic() - start))))  # for 4 s, in which no other thread runs
"""


def test_a_busy_rank_does_not_end_the_job(tmp_path: Path) -> None:
    """A rank that computes in a function of the package is not named, even if it holds the interpreter's lock."""
    (tmp_path / "planted.py").write_text(PLANTED)
    source = """
        import pdgemm as package
        from pdgemm.instrument.recorder import Recorder

        exec(compile(Path("planted.py").read_text(), package.__path__[0] + "/planted.py", "exec"))
        recorded, Recorder.phase, work = Recorder.phase, phase, []
        for some in (computes, computes_alone):
            work[:] = [some]
            C = pdgemm(1, A, A, algorithm="summa", mover="ring")
            assert not work or rank != 1
            if np.allclose(C.allgather(), whole @ whole):
                print("right\\n", end="", flush=True)
    """
    program = jobs.run(command_of(tmp_path, source, 3), tmp_path, 200, PDGEMM_WATCHDOG="1")
    text = program.stdout + program.stderr
    assert (program.returncode, text.count("right\n")) == (0, 6), text
    assert "pdgemm: rank" not in text
