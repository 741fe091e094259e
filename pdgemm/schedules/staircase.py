"""The elements of a local array that lie in one triangle of a matrix, and the rectangles that these fall into.

Blocks of two rows and columns over a 2 x 2 grid; the part of the lower triangle that rank (0, 0) holds, and (0, 1):

    x . . .      . . . .       Both are staircases, the second without any element on the diagonal: there
    x x . .      . . . .       all of it is rectangles.
    x x x .      x x . .
    x x x x      x x . .
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

TriangleName = Literal["", "L", "U"]  # of a matrix: all of it, or its lower or upper triangle with the diagonal
LEAST = 64  # rows and columns of the tiles that cross the diagonal: BLAS is slower on smaller ones
REGISTERS = 16  # columns that BLAS has in registers, at most


class Tile(NamedTuple):
    """A rectangle of an array.   inside : all of it lies in the triangle; otherwise the diagonal crosses it."""

    rows: slice
    cols: slice
    inside: bool


class Staircase(NamedTuple):
    """The first ends[r] elements of each row r of an array lie in the triangle; `ends` ascends.

    flipped : they are the first ones of each column instead, as those of an upper triangle are.
    """

    ends: np.ndarray
    flipped: bool = False

    @classmethod
    def of(cls, triangle: TriangleName, rows: np.ndarray, cols: np.ndarray) -> Staircase:
        """Return the staircase of an array with these rows and columns of a matrix, ascending."""
        if triangle == "U":
            return cls(rows.searchsorted(cols, "right"), True)
        return cls(cols.searchsorted(rows, "right"))

    @property
    def area(self) -> int:
        """The number of elements in the triangle."""
        return int(self.ends.sum())

    def part(self, rows: np.ndarray, cols: np.ndarray) -> Staircase:
        """Return the staircase of the array of some of the rows and columns, ascending."""
        if self.flipped:
            rows, cols = cols, rows
        return self._replace(ends=cols.searchsorted(self.ends[rows], "left"))

    def window(self, rows: slice, cols: slice) -> Staircase:
        """Return the staircase of a rectangle of the array."""
        if self.flipped:
            rows, cols = cols, rows
        return self._replace(ends=(self.ends[rows] - cols.start).clip(0, cols.stop - cols.start))

    def columns(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the range of columns that have elements in rows lo to hi, lo < hi."""
        if self.flipped:
            return int(self.ends.searchsorted(lo, "right")), len(self.ends)
        return 0, int(self.ends[hi - 1])

    def mask(self, cols: int) -> np.ndarray:
        """Return whether each element lies in the triangle.   cols : number of columns, or of rows where flipped."""
        inside = np.arange(cols) < self.ends[:, None]
        return inside.T if self.flipped else inside

    def tiles(self, least: int = LEAST) -> Iterator[Tile]:
        """Yield rectangles that cover the triangle; those that the diagonal crosses have at most least^2 elements.

        With least = 0 it crosses none.  Rows are divided near the middle, where a block ends; columns that all of them
        have are a rectangle of their own if they are many, and a multiple of what BLAS has in registers.
        """
        todo = [(0, len(self.ends), 0)] if len(self.ends) else []
        while todo:
            lo, hi, done = todo.pop()
            first, last = int(self.ends[lo]), int(self.ends[hi - 1])
            if last > first and least:
                first = done + (first - done) // REGISTERS * REGISTERS if first - done >= least else done
            if first > done:
                yield self._tile(slice(lo, hi), slice(done, first), True)
            if last == first:
                continue
            if (hi - lo) * (last - first) <= least**2:
                yield self._tile(slice(lo, hi), slice(first, last), False)
                continue
            quarter = (hi - lo) // 4
            near = np.arange(lo + max(1, quarter), hi - quarter)
            steps = np.minimum(self.ends[near] - self.ends[near - 1], len(self.ends)).astype(np.int64)
            middle = int(near[np.argmax(steps * (hi - lo) - abs(2 * near - lo - hi))])
            todo += [(middle, hi, first), (lo, middle, first)]

    def _tile(self, rows: slice, cols: slice, inside: bool) -> Tile:
        return Tile(cols, rows, inside) if self.flipped else Tile(rows, cols, inside)
