"""Signals by which batch systems end a job: no file is left half written, and a line says what was lost.

A rank may be inside MPI or BLAS, where Python's handlers do not run: a thread waits for the signal.  SIGUSR1 is one of
them because `mpirun` hands it on and ends with the ranks' code.  At SIGTERM and SIGINT that of Open MPI decides to end
with 1, sends its ranks SIGCONT, SIGTERM and SIGKILL within half a second, and Open MPI 5's tells nothing more.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from threading import Thread
from time import perf_counter, sleep

from pdgemm.support.files import UNFINISHED

CODE = 128 + signal.SIGTERM
CODES = {signal.SIGTERM: CODE, signal.SIGUSR1: CODE, signal.SIGINT: 128 + signal.SIGINT}
WORDS = "pdgemm: ended by "  # the line begins with this
_LATER = 1.0  # seconds in which rank 0 may speak before another rank's end takes it along
_state = ["starting", "nothing was written"]


def doing(what: str, lost: str) -> None:
    """What this job is at, and what is lost if it ends now."""
    _state[:] = what, lost


def watch(rank: int) -> None:
    """From now on a signal ends this process with an exit code of CODES."""
    hears, tells = os.pipe()
    os.set_blocking(tells, False)
    for number in CODES:
        signal.signal(number, lambda number, frame: None)  # so that the signal goes into the pipe
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    Thread(target=_wait, args=(hears, rank, perf_counter()), daemon=True).start()


def _wait(hears: int, rank: int, start: float) -> None:
    while (number := os.read(hears, 1)[0]) not in CODES:
        pass
    if rank:
        sleep(_LATER)
    else:
        for path in [*UNFINISHED]:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        what, lost = _state
        text = f"{WORDS}{signal.Signals(number).name} after {perf_counter() - start:.1f} s, {what}: {lost}\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
    os._exit(CODES[signal.Signals(number)])
