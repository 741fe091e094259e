"""Whether processes make progress: this one, and others on the same machine.  No thread at work is asked."""

from __future__ import annotations

import os
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import monotonic, process_time

from pdgemm.support import waits

_WORK = 0.01  # of a second that a process computes in each second in which it is at work


class Stillness:
    """For how many seconds this rank has made no progress, counted while its process runs: it may be stopped."""

    def __init__(self) -> None:
        self.seconds, self.wait = 0.0, waits.current
        self._at, self._used, self._blocks = monotonic(), process_time(), _blocks()

    def look(self, most: float) -> None:
        """Look again.  A wait that goes on is no progress, except where files are read or written in it.

        most : the seconds that are counted for the time since the last look.
        """
        now, used, blocks, wait = monotonic(), process_time(), _blocks(), waits.current
        step = min(now - self._at, most)
        moved = wait is not self.wait
        if wait is None or not wait.check:
            moved = moved or blocks != self._blocks
        if wait is None:
            moved = moved or used - self._used > _WORK * step
        self.seconds = 0.0 if moved else self.seconds + step
        self._at, self._used, self._blocks, self.wait = now, used, blocks, wait


def _blocks() -> int:
    """Return how many blocks this process has read from files and written to them."""
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_inblock + usage.ru_oublock


def namespace() -> str:
    """Return what two processes have in common that see each other by their numbers; "" where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process(where: str, number: int) -> tuple[str, int]:
    """Return the state of a process, "T" where it is stopped, and its ticks of processor time; "" and 0: not known.

    where : its namespace.
    """
    try:
        if where and where == namespace():
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        pass
    return "", 0
