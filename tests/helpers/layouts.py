"""Distribute an array in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from problems import DTYPES, grid_shapes, sources

from pdgemm import DistMatrix, ProcessGrid


def matrices(comm: Any, whole: np.ndarray) -> Iterator[Any]:
    """Yield `whole` on every grid, in small blocks, transposed, as a view, and on a grid that leaves ranks idle."""
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for source in sources(shape):
                layout: Any = {"grid": grid, "block": (2, 3), "source": source}
                yield DistMatrix.from_global(whole, **layout)
            yield DistMatrix.from_global(whole.T, **layout).T
            wide = np.pad(whole, ((2, 1), (1, 3)))
            yield DistMatrix.from_global(wide, **layout)[2 : 2 + len(whole), 1 : 1 + whole.shape[1]]
    with ProcessGrid(comm, (1, 1), ranks=[comm.size - 1]) as grid:
        yield DistMatrix.from_global(whole, grid=grid)


def drawn(shape: tuple[int, int], dtype: str, seed: int = 0) -> np.ndarray:
    source = np.random.default_rng(seed)
    x = source.integers(-3, 4, shape) if dtype in ("int8", "int32", "bool") else source.standard_normal(shape)
    if dtype.startswith("complex"):
        x = np.exp(1j * x)  # |x| = 1: products do not overflow
    return x.astype(dtype)


def matrices_in_turn(comm: Any, whole: np.ndarray) -> Generator[Any, None, None]:
    """Yield `whole` on every grid, in several block sizes and both orders, transposed, as a view, with idle ranks."""
    turns = itertools.cycle(itertools.product([(None, None), (3, 2), (100, 100), (1, 1)], "CF"))
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for source, ((mb, nb), order) in zip([*sources(shape)] * 2, turns):
                layout: Any = {"grid": grid, "block": mb if mb is None else (mb, nb), "source": source, "order": order}
                yield DistMatrix.from_global(whole, **layout)
            yield DistMatrix.from_global(np.ascontiguousarray(whole.conj().T), **layout).H
            wide = np.pad(whole, ((2, 1), (1, 3)))
            yield DistMatrix.from_global(wide, **layout)[2 : 2 + len(whole), 1 : 1 + whole.shape[1]]
    with ProcessGrid(comm, (1, 1), ranks=[comm.size - 1]) as grid:
        yield DistMatrix.from_global(whole, grid=grid)


@contextmanager
def laid_out(comm: Any, whole: np.ndarray, turn: int | None = None) -> Iterator[Any]:
    """Yield `whole` in layout number `turn` (default: by its type); check that the test does not change it."""
    turn = DTYPES.index(str(whole.dtype)) if turn is None else turn
    with closing(matrices_in_turn(comm, whole)) as layouts:
        A = next(itertools.islice(layouts, 3 * turn % (5 if comm.size == 1 else 13), None))
        yield A
        assert np.array_equal(A.allgather(), whole, equal_nan=True)  # no function may change its argument
