"""Commands in the background of a test, running processes, and waits for conditions."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from pdgemm.support.launcher import outside_job

TEXTS: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def folder_of_all(factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of pytest-xdist share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def filled_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder that fill(folder) has filled, in one of the processes of pytest-xdist; tests must not change it.

    Use it for a fixture that takes seconds, because each process has its own fixtures, even those of a session.
    """
    folder = folder_of_all(factory) / name
    folder.mkdir(exist_ok=True)
    with (folder / "filled").open("a") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        if not os.fstat(mark.fileno()).st_size:
            fill(folder)
            mark.write("filled")
    return folder


@contextmanager
def started(folder: Path, command: list[str], **files: Any) -> Iterator[Any]:
    """Start a command in the background; at the end of the block, kill all of its processes that still run."""
    env = outside_job() | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **files)
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def running(wanted: Callable[[list[str], Path], bool]) -> list[int]:
    """Return the ids of processes for which wanted(words of the command, folder) is true."""
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if wanted(words, (place / "cwd").readlink()):
                pids.append(int(place.name))
    return pids


def until(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Wait until a condition holds, or for `seconds`; return whether it holds."""
    end = monotonic() + seconds
    while not (holds := condition()) and monotonic() < end:
        sleep(0.02)
    return bool(holds)
