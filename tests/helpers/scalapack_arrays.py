"""ScaLAPACK's matrices (local arrays with descriptors), and calls of routines with their INFO."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from tiers import square_grid

from pdgemm import scalapack

GUARD = -77.5
LETTERS = {"s": "f", "d": "d", "c": "F", "z": "D"}
ON_RANKS = [*"scz", pytest.param("d", marks=square_grid)]  # on 2 x 2 ranks only "d"
Window = tuple[slice, slice]


SIZES = [(22, 23, 24), (5, 14, 9), (11, 11, 11), (3, 3, 3)]
STARTS = [1, 5, 7, 11, 12]


class Global:
    """A matrix of ScaLAPACK: a descriptor, and a local array that is larger than needed and filled with GUARD there."""

    def __init__(
        self,
        values: np.ndarray,
        ictxt: int,
        blocks: tuple[int, int],
        sources: tuple[int, int] = (0, 0),
        first: tuple[int, int] | None = None,
    ) -> None:
        """first : the size of the first block, for a descriptor of type 2."""
        pr, pc, i, j = scalapack.blacs_gridinfo(ictxt)
        here = [
            [g for g in range(n) if (max(0, (g - start) // block + 1) + source) % parts == part]
            for n, block, source, start, parts, part in zip(
                values.shape, blocks, sources, first or blocks, (pr, pc), (i, j), strict=True
            )
        ]
        self.here = np.ix_(*(np.array(x, int) for x in here))
        rows, cols = map(len, here)
        self.inside = slice(rows), slice(cols)
        make = scalapack.descinit if first is None else scalapack.descinit2
        self.desc = make(*values.shape, *(first or ()), *blocks, *sources, ictxt, rows + 3)
        self.values = values
        self.local = self.dealt(values, np.full((rows + 3, cols + 1), GUARD, values.dtype, order="F"))
        self.before = self.local.copy(order="F")

    def dealt(self, values: np.ndarray, around: np.ndarray) -> np.ndarray:
        """Return a copy of the local array `around` in which this rank's elements of `values` are set."""
        local = around.copy(order="F")
        local[self.inside] = values[self.here]
        return local


def random(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, shape) + (1j * rng.uniform(-1, 1, shape) if dtype in "FD" else 0)
    return values.astype(dtype)


def info(function: Any, *arguments: Any) -> int:
    """Return the INFO of a call, 0 without an error; check that all processes have the same."""
    said, found = "", 0
    try:
        function(*arguments)
    except scalapack.IllegalArgument as error:
        said, found = str(error), error.info
    # INFO is equal on all ranks, and so is the message, except of descinit2, a local routine
    same = found if function is scalapack.descinit2 else said
    assert len(set(MPI.COMM_WORLD.allgather(same))) == 1
    return found


def changed(arguments: list[Any], **numbered: Any) -> list[Any]:
    """Return the arguments with some replaced: _3 = ... replaces the third."""
    return [numbered.get(f"_{number}", value) for number, value in enumerate(arguments, 1)]


def placed(
    values: np.ndarray, around: float, contexts: list[int], rng: np.random.Generator
) -> tuple[Global, Window, tuple[Any, ...]]:
    """Place `values` in a larger matrix, on one of the contexts, in random blocks.

    Returns the larger matrix, the window of `values`, and ScaLAPACK's arguments (array, i, j, descriptor).
    """
    ictxt = int(rng.choice(contexts))
    pr, pc = scalapack.blacs_gridinfo(ictxt)[:2]
    i, j = rng.integers(0, 12, 2).tolist()
    m, n = values.shape
    whole = np.full((m + i + int(rng.integers(4)), n + j + int(rng.integers(4))), around, values.dtype)
    window = slice(i, i + m), slice(j, j + n)
    whole[window] = values
    blocks = tuple(rng.integers(1, 9, 2).tolist())
    first = None if rng.random() < 0.5 else tuple(rng.integers(1, 15, 2).tolist())
    X = Global(whole, ictxt, blocks, (int(rng.integers(pr)), int(rng.integers(pc))), first)
    return X, window, (X.local, i + 1, j + 1, X.desc)


def assert_unchanged(X: Global, window: Window, inside: Any = True) -> None:
    """Check that no bit outside of the window has changed, guards included.   inside : mask of a part of the window."""
    chosen = np.zeros(X.values.shape, bool)
    chosen[window] = inside
    kept = ~X.dealt(chosen, np.zeros(X.local.shape, bool))
    assert X.local[kept].tobytes() == X.before[kept].tobytes()


def assert_refused(function: Any, good: list[Any], wrong: dict[int, Any], returned: int = 0) -> None:
    """Check that INFO is minus the number of each wrong argument, also if only one process passes it.

    returned : number of ScaLAPACK's arguments, the 13th and following, that pdgemm's function returns, not takes.
    """
    for number, value in wrong.items():
        bad = changed(good, **{f"_{number - returned * (number > 12)}": value})
        assert info(function, *bad) == -number, (function, number)
        if MPI.COMM_WORLD.size > 1:
            assert info(function, *(bad if MPI.COMM_WORLD.rank == 1 else good)) == -number, (function, number)


def triangle(n: int, uplo: str) -> np.ndarray:
    """Return the mask of a triangle, diagonal included."""
    return np.tri(n, dtype=bool) if uplo == "L" else np.tri(n, dtype=bool).T


def gathered(comm: Any, X: Global, window: Window) -> np.ndarray:
    """Return a window, gathered on all processes."""
    whole = np.zeros(X.values.shape, X.values.dtype)
    whole[X.here] = X.local[X.inside]
    return np.asarray(comm.allreduce(whole)[window])


def positive(n: int, char: str, seed: int) -> np.ndarray:
    x = random((n, n), char, seed)
    return (x @ x.conj().T + n * np.eye(n)).astype(char)


def room(X: Global) -> np.ndarray:
    """Return an array for pivots: LOCr(M_A) + MB_A integers."""
    return np.full(len(X.local) + int(X.desc[-5]), -9, "i4")


def fortran(routine: Any, *arguments: Any) -> int:
    """Call a routine as Fortran does, with addresses.  PBLAS is written in C: strings have no hidden lengths."""
    held = [np.frombuffer(x.encode(), np.uint8) if isinstance(x, str) else x for x in arguments]
    held = [np.asarray(x, np.intc if isinstance(x, int) else None) for x in held]
    return routine(*(ctypes.c_void_p(x.ctypes.data) for x in held))


def gridinfo(reference: ctypes.CDLL, ictxt: int) -> tuple[int, ...]:
    found = [ctypes.c_int() for _ in range(4)]
    reference.Cblacs_gridinfo(ictxt, *map(ctypes.byref, found))
    return tuple(x.value for x in found)


def with_context(desc: np.ndarray, ictxt: int) -> np.ndarray:
    """Return a copy of the descriptor with another BLACS context."""
    theirs = desc.astype(np.intc)
    theirs[1] = ictxt
    return theirs
