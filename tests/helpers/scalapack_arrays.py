"""ScaLAPACK's matrices, local arrays with descriptors, and calls of its routines with what they say of arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

GUARD = -77.5


SIZES = [(22, 23, 24), (5, 14, 9), (11, 11, 11), (3, 3, 3)]


STARTS = [1, 5, 7, 11, 12]


class Global:
    """A matrix as ScaLAPACK sees it: a local array with guards and a gap below each column, and a descriptor."""

    def __init__(
        self,
        values: np.ndarray,
        ictxt: int,
        blocks: tuple[int, int],
        sources: tuple[int, int] = (0, 0),
        first: tuple[int, int] | None = None,
    ) -> None:
        """first : the size of the first block, in a descriptor of type 2."""
        from pdgemm import scalapack

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
        """The local array of a matrix of these values; what lies around it is taken from `around`."""
        local = around.copy(order="F")
        local[self.inside] = values[self.here]
        return local


def random(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, shape) + (1j * rng.uniform(-1, 1, shape) if dtype in "FD" else 0)
    return values.astype(dtype)


def info(function: Any, *arguments: Any) -> int:
    """INFO of a call; 0 where nothing is wrong.  All processes have the same."""
    from mpi4py import MPI

    from pdgemm import scalapack

    said, found = "", 0
    try:
        function(*arguments)
    except scalapack.IllegalArgument as error:
        said, found = str(error), error.info
    same = found if function is scalapack.descinit2 else said  # which each process calls for itself
    assert len(set(MPI.COMM_WORLD.allgather(same))) == 1
    return found


def changed(arguments: list[Any], **numbered: Any) -> list[Any]:
    """The arguments but for some, _3 = ... for the third."""
    return [numbered.get(f"_{number}", value) for number, value in enumerate(arguments, 1)]
