"""Signals by which batch systems end a job: no file is left half written, and a line says what was lost.

A rank may be inside MPI or BLAS, where Python's handlers do not run: so a thread waits for the signal.  SIGUSR1 is one
of the signals because `mpirun` forwards it and ends with the ranks' exit code.  At SIGTERM or SIGINT Open MPI's mpirun
ends with 1, and sends its ranks SIGCONT, SIGTERM and SIGKILL within half a second; that of Open MPI 5 then prints
nothing more.

A program that can save its work sets how long saving may take (`patience`), looks at `signal_received` from time to
time, and calls `leave` when its work is saved.  A second signal ends the program at once.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from time import perf_counter, sleep
from typing import NoReturn

from pdgemm.support.files import UNFINISHED, write_line

CODE = 128 + signal.SIGTERM
CODES = {signal.SIGTERM: CODE, signal.SIGUSR1: CODE, signal.SIGINT: 128 + signal.SIGINT}
WORDS = "pdgemm: ended by "  # the beginning of the printed line
_LATER = 1.0  # seconds in which rank 0 may print its line before the end of another rank ends rank 0, too
_state = ["starting", "nothing was written"]
_patience = [0.0]  # seconds
_received: list[int] = []  # the signal
_tells: list[int] = []  # the writing end of the pipe to the thread


def doing(what: str, lost: str) -> None:
    """Record the present work of this job, and the loss if the job ends now, for the printed line."""
    _state[:] = what, lost


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Run a block in which a signal does not end the program at once: the program has `seconds` to save and `leave`."""
    _patience[:] = [seconds]
    try:
        yield
    finally:
        _patience[:] = [0.0]


def signal_received() -> int:
    """Return the signal that asked the program to end; 0 where no signal came."""
    return _received[0] if _received else 0


def leave(number: int) -> NoReturn:
    """End the process with the line and the exit code of the signal."""
    _patience[:] = [0.0]
    os.write(_tells[0], bytes([number]))
    while True:  # until the thread ends the process
        sleep(60)


def watch(rank: int) -> None:
    """Start the thread that ends this process at a signal, with an exit code of CODES."""
    hears, tells = os.pipe()
    os.set_blocking(tells, False)
    _tells[:] = [tells]
    for number in CODES:
        signal.signal(number, lambda number, frame: None)  # so that the signal goes into the pipe
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    Thread(target=_wait, args=(hears, rank, perf_counter()), daemon=True).start()


def _wait(hears: int, rank: int, start: float) -> None:
    """Wait for a signal, in a thread; then allow time to save, remove unfinished files, and end the process."""
    while (number := os.read(hears, 1)[0]) not in CODES:
        pass
    if _patience[0]:
        _received.append(number)
        select.select([hears], [], [], _patience[0])
    if rank:
        sleep(_LATER)
    else:
        for path in [*UNFINISHED]:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        what, lost = _state
        write_line(f"{WORDS}{signal.Signals(number).name} after {perf_counter() - start:.1f} s, {what}: {lost}")
    os._exit(CODES[signal.Signals(number)])
