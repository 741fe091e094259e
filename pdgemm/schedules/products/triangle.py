"""The elements of blocks of a matrix that lie in one of its triangles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.schedules.schedule import RankMap
from pdgemm.schedules.staircase import Staircase, TriangleName
from pdgemm.support.remembered import remembered


@dataclass(frozen=True)
class Triangle:
    """A triangle of a matrix of which each rank has a block.

    name : "L" or "U"; "": all elements.   grid : its rows and columns are those of the blocks.
    rows, cols : the distributions whose parts form the blocks.
    """

    name: TriangleName
    grid: RankMap
    rows: BlockCyclic
    cols: BlockCyclic

    def of(self, rank: int) -> Staircase | None:
        """Return the elements of a rank's block that lie in the triangle; None: all elements."""
        return self.at(self.grid.coords(rank)) if self.name else None

    @remembered
    def at(self, at: tuple[int, int]) -> Staircase:
        """Return the elements of the block at a grid position that lie in the triangle."""
        return Staircase.of(self.name, self.rows.indices(at[0]), self.cols.indices(at[1]))

    def share(self, rank: int) -> float:
        """Return the fraction of the elements of a rank's block that lie in the triangle."""
        if not self.name:
            return 1.0
        i, j = self.grid.coords(rank)
        words = self.rows.count(i) * self.cols.count(j)
        return self.at((i, j)).area / words if words else 1.0

    @cached_property
    def shares(self) -> np.ndarray | float:
        """The `share` of each rank, for a `WorkPiece`; 1.0 where all ranks compute whole blocks."""
        return np.array([self.share(rank) for rank in range(1 + max(self.grid.ranks))]) if self.name else 1.0
