"""Signals by which batch systems end a job: no file is left half written, and a line says what was lost.

A rank may be inside MPI or BLAS, where Python's handlers do not run: a thread waits for the signal.  SIGUSR1 is one of
them because `mpirun` hands it on and ends with the ranks' code.  At SIGTERM and SIGINT that of Open MPI decides to end
with 1, sends its ranks SIGCONT, SIGTERM and SIGKILL within half a second, and Open MPI 5's tells nothing more.

A program that can save what it has done says how long that may take (`patience`), looks at `signal_received` now and
then, and calls `leave` when it has saved.  A second signal ends it at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from time import perf_counter, sleep
from typing import NoReturn

from pdgemm.support.files import UNFINISHED
from pdgemm.support.text import printable

CODE = 128 + signal.SIGTERM
CODES = {signal.SIGTERM: CODE, signal.SIGUSR1: CODE, signal.SIGINT: 128 + signal.SIGINT}
WORDS = "pdgemm: ended by "  # the line begins with this
_LATER = 1.0  # seconds in which rank 0 may speak before another rank's end takes it along
_state = ["starting", "nothing was written"]
_patience = [0.0]  # seconds
_received: list[int] = []  # the signal
_tells: list[int] = []  # the end of a pipe


def doing(what: str, lost: str) -> None:
    """What this job is at, and what is lost if it ends now."""
    _state[:] = what, lost


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """In the block a signal does not end the program at once: it has so many seconds to save and `leave`."""
    _patience[:] = [seconds]
    try:
        yield
    finally:
        _patience[:] = [0.0]


def signal_received() -> int:
    """Return the signal by which the program was asked to end; 0: it was not."""
    return _received[0] if _received else 0


def leave(number: int) -> NoReturn:
    """End as the signal does."""
    _patience[:] = [0.0]
    os.write(_tells[0], bytes([number]))
    while True:  # until the thread ends the process
        sleep(60)


def watch(rank: int) -> None:
    """From now on a signal ends this process with an exit code of CODES."""
    hears, tells = os.pipe()
    os.set_blocking(tells, False)
    _tells[:] = [tells]
    for number in CODES:
        signal.signal(number, lambda number, frame: None)  # so that the signal goes into the pipe
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    Thread(target=_wait, args=(hears, rank, perf_counter()), daemon=True).start()


def _wait(hears: int, rank: int, start: float) -> None:
    """Wait for a signal in a thread of its own; then leave time to save, remove files that were begun, and end."""
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
        text = f"{WORDS}{signal.Signals(number).name} after {perf_counter() - start:.1f} s, {what}: {lost}\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, printable(text).encode(errors="replace"))
    os._exit(CODES[signal.Signals(number)])
