"""Contexts: numbered process grids, as in BLACS, and the communicator over which several contexts agree."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from operator import index

import numpy as np
from mpi4py import MPI

from pdgemm.errors import GridError
from pdgemm.grids.grid_shapes import grid_shape
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.support.agreement import together
from pdgemm.support.watchdog import watched

__all__ = ["blacs_gridexit", "blacs_gridinfo", "blacs_gridinit", "context"]
_contexts: dict[int, ProcessGrid] = {}
_numbers = count()


def blacs_gridinit(comm: MPI.Intracomm, nprow: int, npcol: int, order: str = "R") -> int:
    """Create a context of the first nprow x npcol ranks of comm, and return its number.  Collective.

    order : "R": the ranks are numbered along grid rows; "C": along grid columns.
    """
    with together(watched(comm)) as description:
        pr, pc = grid_shape(nprow * npcol, (nprow, npcol))
        description += ["blacs_gridinit", pr, pc, order[:1].upper()]
        if pr * pc > comm.size:
            raise GridError(f"a {pr} x {pc} grid needs {pr * pc} processes, but there are {comm.size}")
        places = np.arange(pr * pc).reshape((pr, pc), order="F" if order[:1].upper() == "C" else "C")
    return context(ProcessGrid(comm, (pr, pc), ranks=places.ravel().tolist()))


def context(grid: ProcessGrid) -> int:
    """Create a context for an existing grid."""
    number = next(_numbers)
    _contexts[number] = grid
    return number


def blacs_gridinfo(ictxt: int) -> tuple[int, int, int, int]:
    """Return (nprow, npcol, myrow, mycol); myrow = mycol = -1 outside the grid, all -1 if the context is invalid."""
    grid = grid_of_context(ictxt)
    return (-1, -1, -1, -1) if grid is None else (*grid.shape, *grid.coords)


def blacs_gridexit(ictxt: int) -> None:
    """Free a context and its communicators.  Collective."""
    if grid_of_context(ictxt) is None:
        raise GridError(f"{ictxt} is not a context")
    _contexts.pop(index(ictxt)).free()


def grid_of_context(ictxt: object) -> ProcessGrid | None:
    """Return the grid of a context; None if there is no such context, or its grid was freed."""
    try:
        grid = _contexts.get(index(ictxt))  # type: ignore[arg-type]
    except TypeError:
        return None
    return grid if grid is not None and grid.comm else None


def meeting(grids: Iterable[ProcessGrid | None]) -> ProcessGrid | None:
    """Return the grid over whose communicator the processes that pass these contexts agree.  Local.

    Contexts of the same processes may have different communicators, and a process that passes a wrong context does not
    know the context of the other processes.  So each process replaces each of `grids` by the oldest context with the
    same processes, and takes the most frequent one.  Without a valid context in `grids`, it takes the oldest context if
    all contexts have the same processes; otherwise None is returned.
    """
    alive = [grid for number in _contexts if (grid := grid_of_context(number)) is not None]

    def first(grid: ProcessGrid) -> ProcessGrid:
        return next(x for x in alive if x.comm is grid.comm or x.rank_map_in(grid) is not None)

    named = [first(grid) for grid in grids if grid is not None]
    if named:
        return max(named, key=named.count)
    everywhere = {first(grid) for grid in alive}
    return everywhere.pop() if len(everywhere) == 1 else None
