"""The row, column and depth communicators of all grids of one communicator, and when they are freed."""

from __future__ import annotations

import weakref
from collections import deque

from mpi4py import MPI

from pdgemm.support import failures


class Lines:
    """The row, column and depth communicators of each grid of `comm`, by a grid number that is equal on all ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._created = comm, 0
        self._lines: dict[int, tuple[MPI.Comm, ...]] = {}
        self._dropped, self._gone = deque[int](), set[int]()

    def __len__(self) -> int:
        """Return the number of grids that have not been freed."""
        return len(self._lines)

    def hold(self, *lines: MPI.Comm) -> Held:
        """Record the communicators of a grid, and return the token that the grid and its view `T` refer to.  Local."""
        held, self._created = Held(self._created), self._created + 1
        self._lines[held.number] = lines
        weakref.finalize(held, self._dropped.append, held.number).atexit = False  # runs at any time, in any thread
        return held

    def free(self, number: int) -> None:
        """Free the communicators of the grid of this number.  Collective."""
        free_lines(*self._lines.pop(number))

    def free_dropped(self) -> None:
        """Free the communicators of the grids that no rank refers to any more.  Collective; one allgather."""
        while self._dropped:
            self._gone.add(self._dropped.popleft())
        self._gone &= {*self._lines}
        for number in sorted(set.intersection(*self._comm.allgather(self._gone))):
            self.free(number)


class Held:
    """A token of a grid, which is garbage-collected when nothing refers to the grid or its view `T` any more."""

    def __init__(self, number: int) -> None:
        self.number = number


def free_lines(*lines: MPI.Comm) -> None:
    """Free the communicators of a grid on the ranks that have them.  Collective over each communicator."""
    for comm in lines:
        if comm != MPI.COMM_NULL:
            failures.free_communicator(comm)
