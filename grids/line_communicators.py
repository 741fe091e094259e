"""The communicators of rows, columns and depths of the grids that share one, from their making to their end."""

from __future__ import annotations

import weakref
from collections import deque

from mpi4py import MPI

from pdgemm.support import failures


class Lines:
    """The communicators of each grid of `comm`, by a number that is the same on all its ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._created = comm, 0
        self._lines: dict[int, tuple[MPI.Comm, ...]] = {}
        self._dropped, self._gone = deque[int](), set[int]()

    def __len__(self) -> int:
        """How many grids there are that have not been freed."""
        return len(self._lines)

    def hold(self, *lines: MPI.Comm) -> Held:
        """Return what a grid with these communicators refers to, and so does its transposed view.  Local."""
        held, self._created = Held(self._created), self._created + 1
        self._lines[held.number] = lines
        weakref.finalize(held, self._dropped.append, held.number).atexit = False  # at any time, in any thread
        return held

    def free(self, number: int) -> None:
        """Free the communicators of a grid.  Collective."""
        free_lines(*self._lines.pop(number))

    def free_dropped(self) -> None:
        """Free the communicators of those grids to which nothing refers on any rank.  Collective; one allgather."""
        while self._dropped:
            self._gone.add(self._dropped.popleft())
        self._gone &= {*self._lines}
        for number in sorted(set.intersection(*self._comm.allgather(self._gone))):
            self.free(number)


class Held:
    """Goes when nothing refers to a grid any more."""

    def __init__(self, number: int) -> None:
        self.number = number


def free_lines(*lines: MPI.Comm) -> None:
    """Free the communicators of a grid on the ranks that have them.  Collective over each."""
    for comm in lines:
        if comm != MPI.COMM_NULL:
            failures.free_communicator(comm)
