"""Layout: which ranks own the elements of a matrix and how these are stored, which is all that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from pdgemm.grids.distribution import Distribution

Order = Literal["C", "F"]  # memory order of local arrays


@lru_cache(maxsize=64)
def positions(place: tuple[int, ...]) -> dict[int, int]:
    """Return the position of each rank that has one; the matrices of one grid share the result."""
    return {rank: at for at, rank in enumerate(place)}


@dataclass(frozen=True)
class Layout:
    """A matrix without its elements.

    distribution : which grid position owns which elements.
    place        : the rank at each grid position, row by row.
    dtype        : type of the elements.
    order        : memory order of the local arrays, "C" or "F".
    conjugated   : the matrix is the conjugate of what is stored.
    """

    distribution: Distribution
    place: tuple[int, ...]
    dtype: np.dtype
    order: Order = "C"
    conjugated: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.distribution, self.place, self.dtype, self.order, self.conjugated))

    def __hash__(self) -> int:
        """Return a hash that is computed once: plans are looked up by it in every product."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is cached: strings have other hashes in another process."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    @cached_property
    def _positions(self) -> dict[int, int]:
        return positions(self.place)

    def coords(self, rank: int) -> tuple[int, int]:
        """Return the grid position of a rank; (-1, -1) if it holds nothing."""
        at = self._positions.get(rank)
        return (-1, -1) if at is None else divmod(at, self.distribution.cols.parts)

    def rank(self, i: int, j: int) -> int:
        """Return the rank at a grid position."""
        return self.place[i * self.distribution.cols.parts + j]

    def local_shape(self, rank: int | None) -> tuple[int, int]:
        """Return the numbers of rows and columns that a rank holds; for None, the largest of all ranks."""
        if rank is None:
            return self.distribution.rows.largest, self.distribution.cols.largest
        return self.distribution.local_shape(self.coords(rank))

    def local_bytes(self, rank: int | None) -> int:
        """Return the size of the local array of a rank; for None, the largest of all ranks."""
        rows, cols = self.local_shape(rank)
        return rows * cols * self.dtype.itemsize

    @property
    def grid(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        """The shape of the grid, and the ranks at its positions."""
        return self.distribution.grid_shape, self.place

    def same_place(self, other: Layout) -> bool:
        """Does every rank hold the same elements in both layouts?"""
        return self.grid == other.grid and self.distribution.canonical == other.distribution.canonical

    @property
    def T(self) -> Layout:
        """The layout of the transpose of the matrix, with all elements where they are."""
        pr, pc = self.distribution.grid_shape
        place = tuple(self.place[i * pc + j] for j in range(pc) for i in range(pr))
        order: Order = "C" if self.order == "F" else "F"
        return replace(self, distribution=self.distribution.transposed, place=place, order=order)

    def __str__(self) -> str:
        pr, pc = self.distribution.grid_shape
        return f"{self.distribution}, {self.dtype}, on a {pr} x {pc} grid"
