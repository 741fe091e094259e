"""Signals by which batch systems end a job: no file is left half written, and a line names the work that was lost.

A rank may be inside MPI or BLAS, where Python's handlers do not run: so a thread waits for the signal.  SIGUSR1 is one
of the signals because `mpirun` forwards it and ends with the ranks' exit code.  At SIGTERM or SIGINT Open MPI's mpirun
ends with 1, and sends its ranks SIGCONT, SIGTERM and SIGKILL within half a second; the mpirun of Open MPI 5
then prints nothing more.

A program that can save its work sets how long saving may take (`patience`), polls `signal_received` from time to
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


class _Ending:
    """How a signal ends this process: the current work, the seconds that saving may take, and the signal."""

    def __init__(self) -> None:
        self._what, self._lost = "starting", "nothing was written"
        self._patience = 0.0  # seconds
        self._received = 0  # the signal
        self._tells = -1  # the writing end of the pipe to the thread

    def doing(self, what: str, lost: str) -> None:
        """Record the present work of this job, and the loss if the job ends now, for the printed line."""
        self._what, self._lost = what, lost

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Run a block in which a signal does not end the program at once: `seconds` are left to save and `leave`."""
        self._patience = seconds
        try:
            yield
        finally:
            self._patience = 0.0

    def signal_received(self) -> int:
        """Return the signal that asked the program to end; 0 if no signal was received."""
        return self._received

    def leave(self, number: int) -> NoReturn:
        """Print the line about the signal `number`, and end the process with the exit code of this signal."""
        self._patience = 0.0
        os.write(self._tells, bytes([number]))
        while True:  # until the thread ends the process
            sleep(60)

    def watch(self, rank: int) -> None:
        """Start the thread that ends this process at a signal, with an exit code of CODES."""
        hears, self._tells = os.pipe()
        os.set_blocking(self._tells, False)
        for number in CODES:
            signal.signal(number, lambda number, frame: None)  # so that the signal goes into the pipe
        signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
        Thread(target=self._wait, args=(hears, rank, perf_counter()), daemon=True).start()

    def _wait(self, hears: int, rank: int, start: float) -> None:
        """Wait for a signal, in a thread; then allow time to save, remove unfinished files, and end the process."""
        while (number := os.read(hears, 1)[0]) not in CODES:
            pass
        if self._patience:
            self._received = number
            select.select([hears], [], [], self._patience)
        if rank:
            sleep(_LATER)
        else:
            for path in [*UNFINISHED]:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            ended = f"{WORDS}{signal.Signals(number).name} after {perf_counter() - start:.1f} s"
            write_line(f"{ended}, {self._what}: {self._lost}")
        os._exit(CODES[signal.Signals(number)])


_ending = _Ending()
doing, patience, signal_received = _ending.doing, _ending.patience, _ending.signal_received
leave, watch = _ending.leave, _ending.watch
