"""Ranks of an earlier job that still run after the job was killed: the next job waits for these ranks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from mpi4py import MPI

from pdgemm.errors import FileError
from pdgemm.io.atomic import on_root
from pdgemm.support import files
from pdgemm.support.agreement import together


@contextmanager
def after_earlier_ranks(comm: MPI.Intracomm, path: Path, lock: Path) -> Iterator[None]:
    """Wait until no rank of an earlier job runs; hold a lock, for which later jobs wait.  Collective."""
    end, waited = monotonic() + files.file_patience(), False
    while not on_root(comm, path, lambda: _is_free(lock)):
        late = on_root(comm, path, lambda: monotonic() > end)
        if late:
            raise FileError(f"{path}: ranks of an earlier job still write to it; end them, or set {files.WAIT}")
        if comm.rank == 0 and not waited:
            files.say(f"{path}: waiting for ranks of an earlier job, which still run")
        waited = True
    with together(comm), files.naming(lock):  # a rank that cannot open the lock file does not raise alone
        descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT)
    try:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _is_free(lock: Path) -> bool:
    held = files.lock(lock)
    if held is None:
        sleep(0.2)
        return False
    os.close(held)
    return True
