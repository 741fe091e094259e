"""Run many commands of pdgemm in one job, which saves a second for each start of ranks; and read results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import jobs
import numpy as np

JOB = """
import contextlib, io, json, sys
from mpi4py import MPI
from pdgemm.tools.cli.commands import run_command
from pdgemm.tools.cli.job import Job
said_of_all, out = [], sys.stdout
for words in json.loads(sys.argv[1]):
    sys.argv, job = ["pdgemm", *words], Job(words)
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run_command(job, debug=False)
        job.leave(code)
    said_of_all.append(MPI.COMM_WORLD.gather((code, errors.getvalue(), printed.getvalue())))
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps(said_of_all), file=out)
"""


def several(ranks: int, commands: list[list[str]], cwd: Path) -> list[jobs.Finished]:
    """Run commands in one job; return the exit code, equal on all ranks, and the errors and output of all ranks."""
    run = jobs.run(jobs.python(ranks, "-c", JOB, json.dumps(commands)), cwd=cwd, timeout=200)
    assert run.returncode == 0, run.stderr
    done = []
    for words, said in zip(commands, json.loads(run.stdout.splitlines()[-1]), strict=True):
        codes, errors, printed = zip(*said)
        assert len({*codes}) == 1, (words, codes)
        done.append(jobs.Finished(words, codes[0], "".join(printed), "".join(errors)))
    return done


def one_line(run: Any) -> str:
    """Return the error line of a run; check that its exit code is 2, and that one rank printed this line only."""
    assert run.returncode == 2, run.stdout + run.stderr
    lines: list[str] = [line for line in run.stderr.splitlines() if line.startswith("pdgemm: error: ")]
    assert len(lines) == 1, run.stderr
    assert "Traceback" not in run.stderr
    return lines[0]


def read(path: Path, name: str) -> np.ndarray:
    """Read a dataset by plain h5py."""
    with h5py.File(path, "r") as file:
        return np.array(file[name])
