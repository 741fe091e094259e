"""The watchdog names ranks that others wait for; it ends the job if, and only if, the job can never continue."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
from tiers import thorough

from pdgemm.errors import ArgumentError
from pdgemm.support import watchdog

pytestmark = [
    jobs.needs_mpiexec,
    pytest.mark.timeout(60),
]
LAUNCHER = (watchdog.CODE, -11)  # Open MPI 5's mpiexec sometimes crashes after it has ended the ranks
HEAD = """
import time
from mpi4py import MPI
from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.support import watchdog
watchdog.PATIENCE = 0.5
watchdog._ANSWER_SECONDS = 1.0
comm = MPI.COMM_WORLD
rank = comm.rank
grid = ProcessGrid(comm)
A = DistMatrix.eye(9, grid=grid)
"""


def run(folder: Path, source: str, **env: str) -> SimpleNamespace:
    """Run a program on 3 ranks; return exit code, output, errors, and the lines of the watchdog.

    Lines about waits in ProcessGrid are left out: under load, ranks start at different times.
    """
    program = folder / "program.py"
    program.write_text(HEAD + textwrap.dedent(source))
    done = jobs.run(jobs.python(3, program), timeout=40, **env)
    lines = [line for line in done.stderr.splitlines() if line.startswith("pdgemm: rank")]
    lines = [line for line in lines if "(ProcessGrid.__init__)" not in line]
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr, lines=lines)


def line_of(source: str, text: str) -> str:
    """Return the place of a text in the program, as the watchdog prints it."""
    lines = (HEAD + textwrap.dedent(source)).splitlines()
    return f"program.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def test_a_busy_rank_is_named_and_not_killed(tmp_path: Path) -> None:
    source = """
        work = lambda: rank == 1 and time.sleep(1.3)
        work()
        norm = A.norm()
        work()
        B = A @ A
        work()
        norm *= A.max()
        print(f"norm {norm:.6g}\\n", end="", flush=True)
    """
    done = run(tmp_path, source)
    assert (done.code, done.out.count("norm 3\n")) == (0, 3), done.err
    assert done.lines and all("rank 0 of 3 has waited" in line for line in done.lines)  # only one rank prints
    assert f"rank 1 did not join, it is in {tmp_path}/{line_of(source, 'sleep(1.3)')};" in done.lines[0]
    calls = {"A.norm()": "norm", "A @ A": "__array_ufunc__", "A.max()": "max"}  # two methods are inherited
    waits = [f"{line_of(source, text)} (DistMatrix.{name})" for text, name in calls.items()]
    assert all(any(wait in line for wait in waits) for line in done.lines), done.lines
    assert all(any(wait in line for line in done.lines) for wait in waits), done.lines


def test_the_watchdog_limits_waits(tmp_path: Path) -> None:
    source = """
        if rank == 0:
            time.sleep(30)
        A.norm()
    """
    done = run(tmp_path, source, PDGEMM_WATCHDOG="1")
    assert done.code in LAUNCHER
    assert re.search("rank [12] of 3 has waited", done.lines[0]) and done.lines[0].endswith("; the job is ended")
    assert f"rank 0 did not join, it is in {tmp_path}/{line_of(source, 'sleep(30)')}" in done.lines[0]


@pytest.mark.parametrize("leaves", ["raise ValueError('alone')", "MPI.Finalize()"])
def test_a_rank_that_has_left_the_program_ends_the_job(tmp_path: Path, leaves: str) -> None:
    done = run(
        tmp_path,
        f"""
        if rank == 2:
            {leaves}
        A.norm()
    """,
    )
    assert done.code in LAUNCHER
    assert ": rank 2 left the program; the job is ended" in done.lines[0]


@thorough
def test_a_rank_that_left_long_ago_is_not_forgotten(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        if rank == 1:
            raise ValueError("alone")
        time.sleep(7)
        A.norm()
    """,
    )
    assert done.code in LAUNCHER
    assert "rank 1 left the program; the job is ended" in done.lines[-1]


def test_nobody_waits_at_the_end_for_a_rank_that_failed(tmp_path: Path) -> None:
    """If one rank fails before it frees its grid, the others do not wait for it when they free theirs."""
    source = """
        with ProcessGrid(comm.Dup()):
            if rank == 0:
                raise ValueError("alone")
    """
    program = (HEAD + textwrap.dedent(source)).replace("PATIENCE = 0.5", "PATIENCE = 1000")
    (tmp_path / "program.py").write_text(program)
    done = jobs.run(jobs.python(3, tmp_path / "program.py"), timeout=40)
    assert "ValueError: alone" in done.stderr and done.returncode not in (0, watchdog.CODE)


def test_other_threads_may_work_while_the_main_thread_waits(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import threading
        other = ProcessGrid(comm.Dup())
        B = DistMatrix.eye(4, grid=other)

        def later():
            time.sleep(2)
            B.norm()

        if rank:
            B.norm()
            A.norm()
        else:
            thread = threading.Thread(target=later)
            thread.start()
            A.norm()
            thread.join()
        print("done")
    """,
    )
    assert (done.code, done.out.count("done")) == (0, 3), done.err


def test_a_rank_that_never_makes_a_grid_is_reported(tmp_path: Path) -> None:
    source = """
        if rank == 1:
            time.sleep(30)
        Batch.from_local(np.ones((1, 2, 2)), comm)
    """
    program = "import numpy as np\nfrom pdgemm import Batch\n" + HEAD.replace("grid = ProcessGrid(comm)", "")
    (tmp_path / "program.py").write_text(
        program.replace("A = DistMatrix.eye(9, grid=grid)", "") + textwrap.dedent(source)
    )
    done = jobs.run(jobs.python(3, tmp_path / "program.py"), timeout=40, PDGEMM_WATCHDOG="1")
    assert done.returncode in LAUNCHER
    assert "some rank did not join; the job is ended" in done.stderr and "(Batch.from_local)" in done.stderr


def test_ranks_without_the_check_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, "pdgemm(1, A, A, algorithm='cannon', check=rank == 2)")
    assert done.code in LAUNCHER
    waits = [line for line in done.lines if "rank 2 of 3 has waited" in line]
    assert "ranks 0-1 went on with check=False" in waits[0], done.lines


def test_ranks_that_wait_for_each_other_end_the_job(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        other = ProcessGrid(comm.Dup())
        (A if rank else DistMatrix.eye(4, grid=other)).norm()
    """,
    )
    assert done.code in LAUNCHER
    assert "; the job is ended" in done.lines[-1]
    # the line names the ranks of the other communicator
    others = (1, 2) if "rank 0 of 3 has waited" in done.lines[-1] else (0,)
    assert all(f"rank {rank} did not join, it is in {tmp_path}/program.py:" in done.lines[-1] for rank in others)


def test_switched_off_and_after_the_end(tmp_path: Path) -> None:
    source = """
        import threading
        names = [thread.name for thread in threading.enumerate()]
        if rank == 1:
            time.sleep(1)
        A.norm()
        grid.free()
        MPI.Finalize()
        time.sleep(0.3)
        print("watched" if "pdgemm watchdog" in names else "unwatched")
    """
    off = run(tmp_path, source, PDGEMM_WATCHDOG="0")
    assert (off.code, off.out.count("unwatched"), off.lines) == (0, 3, [])
    on = run(tmp_path, source, PDGEMM_WATCHDOG="20")  # the watchdog ends with MPI
    assert (on.code, on.out.split(), on.lines) == (0, ["watched"] * 3, [])


@pytest.mark.parametrize("given", ["-1", "nan", "inf", "soon", "9" * 5000])
def test_seconds(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("PDGEMM_WATCHDOG", given)
    with pytest.raises(ArgumentError, match="PDGEMM_WATCHDOG must be a number of seconds"):
        watchdog.seconds()
