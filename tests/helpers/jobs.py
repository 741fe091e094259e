"""Start commands from a test, in one process or on new ranks, whichever launcher started the tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import in_process
import pytest

from pdgemm.support.launcher import outside_job

MPIEXEC = shutil.which("mpiexec")
needs_mpiexec = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec on PATH")
Finished: TypeAlias = subprocess.CompletedProcess[str]
Words: TypeAlias = str | Path


def python(ranks: int, *words: Words) -> list[str]:
    """Return the command line that starts Python on `ranks` ranks; for 0 ranks, without a launcher."""
    return [*([str(MPIEXEC), "-n", str(ranks)] if ranks else []), sys.executable, *map(str, words)]


# errors of Open MPI's launcher, each in one of thousands of jobs: no rank starts; or the launcher has ended the job, as
# a rank wanted, and then ends by a signal itself
NOT_STARTED = "The PMIx server's listener thread failed to start"
ABORTED = re.compile(r"MPI_ABORT was invoked .*?Errorcode: (\d+)", re.DOTALL)


def run(command: Sequence[Words], cwd: Path | None = None, timeout: float = 100, **environment: str) -> Finished:
    """Run a command to its end; return its exit code, output and errors."""
    env = outside_job() | environment
    for _ in range(3):
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        if NOT_STARTED not in done.stderr:  # otherwise no rank was started: try again
            break
    if done.returncode == -signal.SIGSEGV and (aborted := ABORTED.search(done.stderr)):
        done.returncode = int(aborted[1])
    return done


CHANGED_BY_LIBRARIES = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK"}  # set by pytest, and by threadpoolctl


def _environment() -> dict[str, str]:
    return {name: value for name, value in outside_job().items() if name not in CHANGED_BY_LIBRARIES}


_AT_START = _environment()


def pdgemm(ranks: int, *words: str, cwd: Path | None = None, timeout: float = 100, **environment: str) -> Finished:
    """Run `mpiexec -n RANKS pdgemm WORDS` to its end; on 0 ranks, `pdgemm WORDS` without a launcher.

    On one rank it is a call in this process, unless another environment is given.
    """
    if ranks <= 1 and not environment and _environment() == _AT_START and outside_job() == os.environ:
        return in_process.run([*words], cwd)
    return run(python(ranks, "-m", "pdgemm", *words), cwd, timeout, **environment)


def with_plant(folder: Path, source: str) -> dict[str, str]:
    """Write source code to a folder; return the environment variable with which each Python process runs it first."""
    (folder / "sitecustomize.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
