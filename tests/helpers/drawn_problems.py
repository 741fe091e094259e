"""Strategies of hypothesis: distributions of inner indices, and views of matrices with their NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pdgemm import DistMatrix
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.local.arrays.dtypes import kind_rank


@st.composite
def inner_pairs(draw: st.DrawFn) -> tuple[BlockCyclic, BlockCyclic]:
    """Draw distributions of A's columns and of B's rows: of the same length, otherwise independent."""
    n = draw(st.integers(0, 60))

    def one() -> BlockCyclic:
        parts = draw(st.integers(1, 5))
        block = draw(st.integers(1, 12))
        return BlockCyclic(n, block, parts, draw(st.integers(0, parts - 1)), block - draw(st.integers(1, 2 * block)))

    return one(), one()


widths = st.integers(1, 30)


@dataclass
class Side:
    """A view of a matrix, and the equal view of a NumPy array."""

    parent: Any
    view: Any
    before: np.ndarray  # the whole parent matrix
    window: tuple[slice, slice]
    op: str

    def values(self, whole: np.ndarray | None = None) -> np.ndarray:
        part = (self.before if whole is None else whole)[self.window]
        return {"N": part, "T": part.T, "C": part.conj().T}[self.op]


def draw_side(draw: Any, grids: list[Any], shape: tuple[int, int], dtypes: list[str], ops: str, seed: int) -> Side:
    op = draw(st.sampled_from(ops))
    stored = shape if op == "N" else shape[::-1]
    before, after = [(draw(st.integers(0, 4)), draw(st.integers(0, 4))) for _ in "ij"]
    whole = tuple(lo + n + hi for n, (lo, hi) in zip(stored, (before, after)))
    grid = draw(st.sampled_from(grids))
    dtype: Any = np.dtype(draw(st.sampled_from(dtypes)))
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 128, whole) if kind_rank(dtype) == 0 else rng.standard_normal(whole)
    if kind_rank(dtype) == 2:
        values = values + 1j * rng.standard_normal(whole)
    values = values.astype(dtype)
    block = draw(st.none() | st.tuples(st.integers(1, 7), st.integers(1, 7)))
    source = tuple(draw(st.integers(0, parts - 1)) for parts in grid.shape)
    order = draw(st.sampled_from("CF"))
    parent = DistMatrix.empty(whole, grid=grid, block=block, dtype=dtype, source=source, order=order)
    if draw(st.booleans()):  # in memory that other ranks cannot read
        parent = parent.copy()
    parent.local[...] = values[np.ix_(*parent.indices())]
    window = tuple(slice(lo, lo + n) for n, (lo, _) in zip(stored, (before, after)))
    view = parent[window]
    return Side(parent, {"N": view, "T": view.T, "C": view.H}[op], values, window, op)


def check_outside(side: Side) -> None:
    """Check that the elements around the window are unchanged."""
    mask = np.ones(side.before.shape, bool)
    mask[side.window] = False
    here = np.ix_(*side.parent.indices())
    assert np.array_equal(side.parent.local[mask[here]], side.before[here][mask[here]], equal_nan=True)
