"""The elements of a local array that are in one triangle of a matrix, and rectangles that cover these elements.

An 8 x 8 matrix in blocks of 2 x 2 on a 2 x 2 grid; the lower triangle on rank (0, 0), left, and on rank (0, 1), right:

    x . . .      . . . .       Both are staircases.  The second has no element on the diagonal:
    x x . .      . . . .       rectangles cover it exactly.
    x x x .      x x . .
    x x x x      x x . .
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Layout
from pdgemm.schedules.schedule import RankMap
from pdgemm.support.members import remembered

TriangleName = Literal["", "L", "U"]  # all of a matrix, or its lower or upper triangle with the diagonal
LEAST = 64  # rows and columns of the tiles that cross the diagonal: BLAS is slower on smaller tiles
ON_DEVICE = 2048  # the same on a device, where each tile is two launches
REGISTERS = 16  # the most columns that BLAS keeps in registers
SQUARE = 512  # rows of the largest square tiles: messages would wait for BLAS in larger tiles


def in_triangle(triangle: TriangleName, layout: Layout, rank: int) -> Staircase | None:
    """Return the elements of a rank's local array that are in the triangle; None, without a triangle: all elements."""
    (i, j), distribution = layout.coords(rank), layout.distribution
    return Staircase.of(triangle, distribution.rows.indices(i), distribution.cols.indices(j)) if triangle else None


class Tile(NamedTuple):
    """A rectangle of an array.

    inside : the whole tile is in the triangle; otherwise the diagonal crosses it.
    square : the row indices of the tile in the matrix are also its column indices.
    """

    rows: slice
    cols: slice
    inside: bool
    square: bool = False


class Staircase(NamedTuple):
    """The elements of an array in a triangle: the first ends[r] elements of each row r, where `ends` ascends.

    flipped : the first ends[c] elements of each column c instead, as in an upper triangle.
    meets : for each row, or column if flipped, whether its last element is on the diagonal of the matrix.
    """

    ends: np.ndarray
    flipped: bool = False
    meets: np.ndarray | None = None

    @classmethod
    def of(cls, triangle: TriangleName, rows: np.ndarray, cols: np.ndarray) -> Staircase:
        """Return the staircase of an array.   rows, cols : indices of its rows and columns in the matrix, ascending."""
        if triangle == "U":
            rows, cols = cols, rows
        ends = cols.searchsorted(rows, "right")
        meets = cols[ends - 1] == rows if len(cols) else np.zeros(len(rows), bool)  # where `ends` is 0, cols[-1] > row
        return cls(ends, triangle == "U", meets)

    @property
    def area(self) -> int:
        """The number of elements in the triangle."""
        return int(self.ends.sum())

    def part(self, rows: np.ndarray, cols: np.ndarray) -> Staircase:
        """Return the staircase of some rows and columns of this array.   rows, cols : their indices, ascending."""
        if self.flipped:
            rows, cols = cols, rows
        return self._replace(ends=cols.searchsorted(self.ends[rows], "left"), meets=None)

    def window(self, rows: slice, cols: slice) -> Staircase:
        """Return the staircase of a rectangle of the array."""
        if self.flipped:
            rows, cols = cols, rows
        ends, width = self.ends[rows] - cols.start, cols.stop - cols.start
        meets = None if self.meets is None else self.meets[rows] & (ends > 0) & (ends <= width)
        return self._replace(ends=ends.clip(0, width), meets=meets)

    def columns(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the range of columns that have elements in rows lo to hi, lo < hi."""
        if self.flipped:
            return int(self.ends.searchsorted(lo, "right")), len(self.ends)
        return 0, int(self.ends[hi - 1])

    def mask(self, cols: int) -> np.ndarray:
        """Return whether each element is in the triangle.   cols : number of columns, or of rows if flipped."""
        inside = np.arange(cols) < self.ends[:, None]
        return inside.T if self.flipped else inside

    def tiles(self, least: int = LEAST, squares: int = 0) -> Iterator[Tile]:
        """Yield tiles that cover the triangle; a tile that the diagonal crosses has at most least^2 elements.

        squares : such a tile may also be a `Tile.square` of at most `squares` rows.
        With least = 0 the diagonal does not cross any tile.  A range of rows is divided near its middle, where a block
        ends.  If at least `least` columns of the range are wholly in the triangle, they become a tile, whose width is
        rounded down to a multiple of `REGISTERS`.
        """
        todo = [(0, len(self.ends), 0)] if len(self.ends) else []
        while todo:
            lo, hi, done = todo.pop()
            first, last = int(self.ends[lo]), int(self.ends[hi - 1])
            if self._is_square(lo, hi, squares) and first > done:
                if first > done + 1:
                    yield self._tile(slice(lo, hi), slice(done, first - 1), True)
                yield self._tile(slice(lo, hi), slice(first - 1, last), False)._replace(square=True)
                continue
            if last > first and least:
                first -= bool(squares and self.meets is not None and self.meets[lo])  # this column may begin a square
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

    def _is_square(self, lo: int, hi: int, most: int) -> bool:
        """Do rows lo to hi form a square with as many columns, at most `most`, on the diagonal of the matrix?"""
        if hi - lo > most or self.meets is None:
            return False
        return bool(self.ends[hi - 1] - self.ends[lo] == hi - lo - 1 and self.meets[lo:hi].all())

    def _tile(self, rows: slice, cols: slice, inside: bool) -> Tile:
        return Tile(cols, rows, inside) if self.flipped else Tile(rows, cols, inside)


@dataclass(frozen=True)
class Triangle:
    """A triangle of a matrix that is divided into blocks, one for each rank.

    name : "L" or "U"; "": all elements.   grid : the grid of ranks; position (i, j) has block (i, j).
    rows, cols : the distributions whose parts form the blocks.
    """

    name: TriangleName
    grid: RankMap
    rows: BlockCyclic
    cols: BlockCyclic

    def of(self, rank: int) -> Staircase | None:
        """Return the elements of a rank's block that are in the triangle; None: all elements."""
        return self.at(self.grid.coords(rank)) if self.name else None

    @remembered
    def at(self, at: tuple[int, int]) -> Staircase:
        """Return the elements of the block at a grid position that are in the triangle."""
        return Staircase.of(self.name, self.rows.indices(at[0]), self.cols.indices(at[1]))

    def share(self, rank: int) -> float:
        """Return the fraction of the elements of a rank's block that are in the triangle."""
        if not self.name:
            return 1.0
        i, j = self.grid.coords(rank)
        words = self.rows.count(i) * self.cols.count(j)
        return self.at((i, j)).area / words if words else 1.0

    @cached_property
    def shares(self) -> np.ndarray | float:
        """The `share` of each rank, for a `WorkPiece`; 1.0 where all ranks compute whole blocks."""
        return np.array([self.share(rank) for rank in range(1 + max(self.grid.ranks))]) if self.name else 1.0
