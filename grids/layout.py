"""Layout: the owners of the elements of a matrix, and the type and order of local arrays, for planning."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from pdgemm.grids.distribution import Distribution

Order = Literal["C", "F"]  # memory order of local arrays


_MANY = 4096  # ranks: in longer lists a search takes less time than building a dictionary


def position(rank_map: tuple[int, ...], rank: int) -> int:
    """Return the position of a rank in a list of distinct ranks; -1 if the rank is not in the list."""
    if 0 <= rank < len(rank_map) and rank_map[rank] == rank:
        return rank
    if len(rank_map) < _MANY:
        return positions(rank_map).get(rank, -1)
    return rank_map.index(rank) if rank in rank_map else -1


@lru_cache(maxsize=64)
def positions(rank_map: tuple[int, ...]) -> dict[int, int]:
    """Return the position of each rank of the list; the matrices of one grid share the cached result."""
    return {rank: at for at, rank in enumerate(rank_map)}


def listed(ranks: np.ndarray) -> tuple[int, ...]:
    """Return an array of ranks as a flat tuple, the last index varying fastest."""
    return tuple(ranks.ravel().tolist())


def transposed_rank_map(rank_map: tuple[int, ...], shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the ranks at the positions of the transposed grid; `shape` is the shape of the grid of `rank_map`."""
    return rank_map if 1 in shape else tuple(chain.from_iterable(rank_map[j :: shape[1]] for j in range(shape[1])))


@dataclass(frozen=True)
class Layout:
    """The description of a distributed matrix without its elements.

    distribution : which grid position owns which elements.
    rank_map     : the rank at each grid position, row by row.
    dtype        : type of the elements.
    order        : memory order of the local arrays, "C" or "F".
    conjugated   : the matrix is the conjugate of the stored elements.
    """

    distribution: Distribution
    rank_map: tuple[int, ...]
    dtype: np.dtype
    order: Order = "C"
    conjugated: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.distribution, self.rank_map, self.dtype, self.order, self.conjugated))

    def __hash__(self) -> int:
        """Return a hash that is computed once, because every product looks up its plan by this hash."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without the cached values: in another process strings have other hashes."""
        return {x.name: self.__dict__[x.name] for x in fields(self)}

    def coords(self, rank: int) -> tuple[int, int]:
        """Return the grid position of a rank; (-1, -1) if the rank has no position."""
        ranks = self.rank_map
        at = rank if 0 <= rank < len(ranks) and ranks[rank] == rank else position(ranks, rank)
        return (-1, -1) if at < 0 else divmod(at, self.distribution.cols.parts)

    def rank(self, i: int, j: int) -> int:
        """Return the rank at a grid position."""
        return self.rank_map[i * self.distribution.cols.parts + j]

    def local_shape(self, rank: int | None) -> tuple[int, int]:
        """Return the numbers of rows and columns that a rank holds; for None, the maxima over all ranks."""
        last, shape = self.__dict__.get("_last_shape", (-1, (0, 0)))
        if rank is None:
            shape = self.distribution.rows.largest, self.distribution.cols.largest
        elif rank != last:  # the last result is cached, because a rank often needs its own shape
            shape = self.distribution.local_shape(self.coords(rank))
            self.__dict__["_last_shape"] = rank, shape
        return shape

    def local_bytes(self, rank: int | None) -> int:
        """Return the size of the local array of a rank; for None, the size of the largest local array."""
        rows, cols = self.local_shape(rank)
        return rows * cols * self.dtype.itemsize

    @cached_property
    def grid(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        """The shape of the process grid, and the ranks at its positions."""
        return self.distribution.grid_shape, self.rank_map

    def same_owners(self, other: Layout) -> bool:
        """Return whether every rank holds the same elements in both layouts."""
        return (self.rank_map, self.distribution) == (other.rank_map, other.distribution) or (
            self.grid == other.grid and self.distribution.canonical == other.distribution.canonical
        )

    @property
    def T(self) -> Layout:
        """The layout of the transposed matrix; no element is moved."""
        rank_map = transposed_rank_map(self.rank_map, self.distribution.grid_shape)
        order: Order = "C" if self.order == "F" else "F"
        return replace(self, distribution=self.distribution.transposed, rank_map=rank_map, order=order)

    def unlike(self, other: Layout) -> str:
        """Return how two layouts with the same `str` differ, as a text that begins with ";"; "" if `str` differs."""
        if str(self) != str(other):
            return ""
        apart = [at for at, (a, b) in enumerate(zip(self.rank_map, other.rank_map)) if a != b]
        if apart:
            at, mine, its = apart[0], self.rank_map[apart[0]], other.rank_map[apart[0]]
            i, j = divmod(at, self.distribution.cols.parts)
            return f"; position ({i}, {j}) of the grid is rank {mine} in one, {its} in the other"
        if self.order != other.order:
            return f"; the order of the local arrays is {self.order!r} in one, {other.order!r} in the other"
        return "; one is the conjugate of another matrix" if self.conjugated != other.conjugated else ""

    def __str__(self) -> str:
        pr, pc = self.distribution.grid_shape
        return f"{self.distribution}, {self.dtype}, on a {pr} x {pc} grid"
