"""Rectangles of a matrix, and the check that the rectangles of all ranks contain each element exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdgemm.errors import LayoutError


class Rectangle(NamedTuple):
    """A range of rows and a range of columns of a matrix, each from the first index to the one after the last."""

    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def __str__(self) -> str:
        return f"rows {self.rows[0]}:{self.rows[1]}, columns {self.cols[0]}:{self.cols[1]}"


Rectangles = Sequence[Sequence[Rectangle]]  # the rectangles of each rank


def bounding(rectangles: Rectangles) -> tuple[int, int]:
    """Return the shape of the smallest matrix that contains all rectangles, empty rectangles included."""
    ends = [(x.rows[1], x.cols[1]) for held in rectangles for x in held]
    return max((m for m, _ in ends), default=0), max((n for _, n in ends), default=0)


def stacked(shapes: Sequence[Sequence[tuple[int, int]]], axis: int) -> list[list[Rectangle]]:
    """Return the rectangles of the blocks of each rank, from the shapes of blocks that are stacked along an axis.

    Raises LayoutError if the extents of blocks along the other axis differ; blocks without elements are ignored.
    """
    widths = dict[int, int]()  # extent along the other axis -> the first rank that has a block of this extent
    for rank, held in enumerate(shapes):
        for shape in held:
            if shape[0] * shape[1]:
                widths.setdefault(shape[1 - axis], rank)
    if len(widths) > 1:
        sizes = " and ".join(f"{width} (rank {rank})" for width, rank in list(widths.items())[:2])
        lines = ("columns", "rows")[axis]
        raise LayoutError(f"blocks along axis {axis} must have the same number of {lines}, got {sizes}")
    width = next(iter(widths), max((shape[1 - axis] for held in shapes for shape in held), default=0))
    start, placed = 0, list[list[Rectangle]]()
    for held in shapes:
        placed.append([])
        for shape in held:
            along, across = (start, start + (shape[axis] if shape[1 - axis] == width else 0)), (0, width)
            start = along[1]
            placed[-1].append(Rectangle(along, across) if axis == 0 else Rectangle(across, along))
    return placed


def check_partition(rectangles: Rectangles, shape: tuple[int, int]) -> None:
    """Raise LayoutError, which names a rectangle, if the rectangles of all ranks do not partition the matrix."""
    owned = [(rank, x) for rank, held in enumerate(rectangles) for x in held if x.size]
    for rank, x in owned:
        if x.rows[1] > shape[0] or x.cols[1] > shape[1]:
            raise LayoutError(f"{x} of rank {rank} are not within the {shape[0]} x {shape[1]} matrix")
    owned.sort(key=lambda each: each[1])
    bounds = np.array([(*x.rows, *x.cols) for _, x in owned], np.int64).reshape(-1, 4)
    top, _, left, right = bounds.T
    for at, (rank, x) in enumerate(owned):
        later = slice(at + 1, top.searchsorted(x.rows[1]))  # later rectangles whose first row is above the end of x
        common = (left[later] < x.cols[1]) & (right[later] > x.cols[0])
        if common.any():
            other, y = owned[at + 1 + int(common.argmax())]
            raise LayoutError(f"two blocks overlap: {x} of rank {rank} and {y} of rank {other}")
    if sum(x.size for _, x in owned) != shape[0] * shape[1]:
        hole = _hole(bounds, shape)
        above = [f"{x} of rank {rank}" for rank, x in owned if x.rows[0] <= hole.rows[0]][-1:]
        hint = f"; the last block before is {above[0]}" if above else ""
        raise LayoutError(f"no rank has {hole} of the {shape[0]} x {shape[1]} matrix{hint}")


def _hole(bounds: np.ndarray, shape: tuple[int, int]) -> Rectangle:
    """Return the first part of the matrix that no rectangle covers; no two rectangles may overlap."""
    top, bottom, left, right = bounds.T
    ends = np.unique(np.concatenate(([0, shape[0]], top, bottom)))
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist()):
        here = (top <= start) & (bottom > start)
        order = left[here].argsort()
        gaps_from, gaps_to = np.append(0, right[here][order]), np.append(left[here][order], shape[1])
        open_at = np.flatnonzero(gaps_from < gaps_to)
        if len(open_at):
            return Rectangle((start, stop), (int(gaps_from[open_at[0]]), int(gaps_to[open_at[0]])))
    raise AssertionError("the rectangles cover the whole matrix")
