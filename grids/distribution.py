"""Block-cyclic distributions: which rank owns which elements, computed for any rank, without MPI and without data.

One dimension of a matrix is cut into blocks of `block` indices, which are assigned to `parts` owners cyclically,
the first block to owner `source` (n = 11, block = 2, parts = 3, source = 1):

    global index   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10
    owner           1  |  2  |  0  |  1  |  2  |  0
    local index    0 1 | 0 1 | 0 1 | 2 3 | 2 3 |  2

A window of such a dimension is distributed in the same way, except that its first block may lack its first `skip`
indices; the window of indices 3 to 8 above is n = 6, source = 2, skip = 1:

    global index    0 | 1 2 | 3 4 | 5
    owner           2 |  0  |  1  | 2
    local index     0 | 0 1 | 0 1 | 1

(A first block that is longer than the others, as ScaLAPACK's descriptors allow, has a negative skip.)
So a submatrix does not need a separate class: its distribution is again block-cyclic, and its local arrays are
slices of the local arrays of the matrix.

Every function takes one index or an array of indices.  Part -1 is a rank outside the grid, which holds no elements.
The formulas are ScaLAPACK's NUMROC, INDXG2P, INDXG2L and INDXL2G (Blackford et al., ScaLAPACK Users' Guide,
1997, ch. 4), with indices from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pdgemm.errors import LayoutError
from pdgemm.local.arrays.arguments import as_pair, as_whole

Index = Any  # an int or an integer array; a function returns the kind that it gets
Block = int | tuple[int, int]  # block sizes, mb = nb or (mb, nb)


@dataclass(frozen=True)
class BlockCyclic:
    """The distribution of n indices in blocks of `block`, assigned cyclically to `parts` owners, `source` first.

    skip : number of indices missing in the first block, skip < block; if it is negative, the first block is longer than
           the others by -skip indices.

    >>> from pdgemm import BlockCyclic
    >>> rows = BlockCyclic(10, 2, 3)
    >>> rows.owner(7), rows.to_local(7)
    (0, 3)
    >>> rows.indices(0)
    array([0, 1, 6, 7])
    """

    n: int
    block: int
    parts: int
    source: int = 0
    skip: int = 0

    def __post_init__(self) -> None:
        if self.n < 0:
            raise LayoutError(f"a dimension must be >= 0, got {self.n}")
        if self.block < 1:
            raise LayoutError(f"a block size must be >= 1, got {self.block}")
        if self.parts < 1 or not 0 <= self.source < self.parts:
            raise LayoutError(f"source {self.source} is not one of {self.parts} owners")
        if self.skip >= self.block:
            raise LayoutError(f"the first block of {self.block} cannot lack {self.skip} indices")

    @classmethod
    def even(cls, n: int, parts: int, source: int = 0) -> BlockCyclic:
        """Return the block distribution: one block for each owner."""
        return cls(n, max(1, -(-n // parts)), parts, source)

    @property
    def first(self) -> int:
        """The length of the first block, if n is at least as large."""
        return self.block - self.skip

    def number(self, g: Index) -> Index:
        """Return the number of the block that contains a global index."""
        return self._from_0((g + self.skip) // self.block)

    def owner(self, g: Index) -> Index:
        """Return the owner of a global index."""
        return (self.number(g) + self.source) % self.parts

    def to_local(self, g: Index) -> Index:
        """Return the local index, on its owner, of a global index."""
        block = self.number(g)
        lacking = self.skip * (block % self.parts == 0)  # only the owner of the first block lacks indices
        return g + self.skip - (block - block // self.parts) * self.block - lacking

    def to_global(self, local: Index, part: int) -> Index:
        """Return the global index of a local index of `part`."""
        position = (part - self.source) % self.parts
        local = local if position else local + self.skip
        block = self._from_0(local // self.block)
        return local + (block * (self.parts - 1) + position) * self.block - self.skip

    def count(self, part: int) -> int:
        """Return the number of indices that `part` owns (NUMROC)."""
        return self.below(self.n, part)

    def below(self, end: int, part: int) -> int:
        """Return the number of indices < end that `part` owns; it is also the local index of its first index >= end."""
        if part < 0:
            return 0
        position = (part - self.source) % self.parts
        if end <= self.block - self.skip:  # `end` is in the first block
            return 0 if position else end
        blocks, rest = divmod(end + self.skip, self.block)
        rounds, extra = divmod(blocks, self.parts)
        held = rounds * self.block + (self.block if position < extra else rest if position == extra else 0)
        return held if position else held - self.skip

    @cached_property
    def largest(self) -> int:
        """The largest number of indices of any part: of the first owner or, if the first block is short, the second."""
        return max(self.count(self.source), self.count((self.source + 1) % self.parts))

    def indices(self, part: int) -> np.ndarray:
        """Return all global indices of `part`, ascending: entry l is the global index of local index l."""
        return self.to_global(np.arange(self.count(part)), part)

    @property
    def starts(self) -> np.ndarray:
        """The first global index of each block, ascending."""
        return np.append(0, np.arange(self.first, self.n, self.block))[: self.n]

    def window(self, start: int, stop: int) -> BlockCyclic:
        """Return the distribution of the indices start, ..., stop - 1, renumbered from 0."""
        if not 0 <= start <= stop <= self.n:
            raise LayoutError(f"indices {start} to {stop} are not within 0 to {self.n}")
        blocks = self.number(start)
        skip = start + self.skip - blocks * self.block
        return BlockCyclic(stop - start, self.block, self.parts, (self.source + blocks) % self.parts, skip)

    def local_window(self, start: int, stop: int, part: int) -> slice:
        """Return the slice of the local indices of `part` whose global indices are start, ..., stop - 1."""
        return slice(self.below(start, part), self.below(stop, part))

    def over(self, parts: int) -> BlockCyclic:
        """Return the distribution of the same indices, in blocks of the same size, over `parts` owners.

        With another number of owners the first block is whole, and belongs to owner 0.  A distribution with one block
        for each owner becomes `even`, with another block size.
        """
        return self if parts == self.parts else self._like(self.n, parts)

    def resized(self, n: int) -> BlockCyclic:
        """Return the distribution of n indices in blocks of the same size, with a whole first block of owner 0.

        A distribution with one block for each owner becomes `even`, with another block size.
        """
        return self._like(n, self.parts)

    def _like(self, n: int, parts: int) -> BlockCyclic:
        if self.n + self.skip <= self.block * self.parts:
            return BlockCyclic.even(n, parts)
        return BlockCyclic(n, self.block, parts)

    @cached_property
    def canonical(self) -> BlockCyclic:
        """A normal form: equal for all distributions that give every index the same owner and local index."""
        if self.parts == 1 or self.n == 0:
            return BlockCyclic(self.n, max(1, self.n), self.parts)
        if self.n <= self.first:
            return BlockCyclic(self.n, self.n, self.parts, self.source)
        if self.n <= self.first + min(self.first, self.block):  # two blocks, the second not longer than the first
            return BlockCyclic(self.n, self.first, self.parts, self.source)
        return self

    def _from_0(self, block: Index) -> Index:
        """Return a block number, 0 where it is negative: the extra indices of a long first block belong to block 0."""
        if self.skip >= 0:
            return block
        return np.maximum(block, 0) if isinstance(block, np.ndarray) else max(block, 0)


@dataclass(frozen=True)
class UnevenBlocks(BlockCyclic):
    """The distribution of n indices in one block for each part, of the lengths `counts`, for exchanges of `IndexPairs`.

    Such a dimension has no windows: `number` raises TypeError.
    """

    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, counts: Sequence[int]) -> UnevenBlocks:
        """Return the distribution in blocks of the lengths `counts`."""
        return cls(sum(counts), max(1, *counts), len(counts), counts=tuple(counts))

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def number(self, g: Index) -> Index:
        raise TypeError("the blocks have different lengths")

    def owner(self, g: Index) -> Index:
        return self._ends.searchsorted(g, "right")

    def to_local(self, g: Index) -> Index:
        owner = self.owner(g)
        return g - self._ends[owner] + np.take(self.counts, owner)

    def to_global(self, local: Index, part: int) -> Index:
        return local + self._ends[part] - self.counts[part]

    def count(self, part: int) -> int:
        return self.counts[part] if part >= 0 else 0

    @cached_property
    def largest(self) -> int:
        return max(self.counts)


@dataclass(frozen=True)
class Distribution:
    """The distribution of a matrix over a Pr x Pc grid: rows over grid rows, columns over grid columns.

    Rank (i, j) holds A[rows.indices(i), cols.indices(j)].

    >>> from pdgemm import Distribution
    >>> layout = Distribution.over((2, 3), (10, 12), (2, 2))
    >>> layout.owner(7, 8)
    (1, 1)
    >>> layout.local_shape((1, 1))
    (4, 4)
    """

    rows: BlockCyclic
    cols: BlockCyclic

    @classmethod
    def over(
        cls,
        grid_shape: tuple[int, int],
        shape: tuple[int, int],
        block: Block | None = None,
        source: tuple[int, int] = (0, 0),
    ) -> Distribution:
        """Return the distribution of a matrix over a grid; without `block`, in one block per rank."""
        blocks = block if isinstance(block, (tuple, list)) else (block, block)
        pairs = (
            as_pair(shape, "a matrix has two dimensions, got shape", LayoutError),
            as_pair(blocks, "block sizes are one number or a pair, got", LayoutError),
            as_pair(source, "source is a pair (rsrc, csrc), got", LayoutError),
        )
        dims = []
        for parts, dimension, block_size, first in zip(grid_shape, *pairs, strict=True):
            n, owner = as_whole(dimension, "a dimension"), as_whole(first, "source")
            if block_size is None:
                dims.append(BlockCyclic.even(n, parts, owner))
            else:
                dims.append(BlockCyclic(n, as_whole(block_size, "a block size"), parts, owner))
        return cls(*dims)

    @cached_property
    def shape(self) -> tuple[int, int]:
        return self.rows.n, self.cols.n

    @property
    def block(self) -> tuple[int, int]:
        return self.rows.block, self.cols.block

    @property
    def source(self) -> tuple[int, int]:
        return self.rows.source, self.cols.source

    @cached_property
    def grid_shape(self) -> tuple[int, int]:
        return self.rows.parts, self.cols.parts

    @property
    def transposed(self) -> Distribution:
        """The distribution of the transpose over the transposed grid."""
        return Distribution(self.cols, self.rows)

    @cached_property
    def canonical(self) -> Distribution:
        """A normal form: equal for all distributions that give every element the same owner and local index."""
        return Distribution(self.rows.canonical, self.cols.canonical)

    def window(self, rows: tuple[int, int], cols: tuple[int, int]) -> Distribution:
        """Return the distribution of a submatrix, given by the (start, stop) of its rows and of its columns."""
        return Distribution(self.rows.window(*rows), self.cols.window(*cols))

    def local_window(
        self, rows: tuple[int, int], cols: tuple[int, int], coords: tuple[int, int]
    ) -> tuple[slice, slice]:
        """Return the slices of the local array of rank (i, j) that hold a submatrix, given as for `window`."""
        return self.rows.local_window(*rows, coords[0]), self.cols.local_window(*cols, coords[1])

    def local_shape(self, coords: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of rows and columns that rank (i, j) owns."""
        return self.rows.count(coords[0]), self.cols.count(coords[1])

    def owner(self, i: Index, j: Index) -> tuple[Index, Index]:
        """Return the grid coordinates of the rank that owns element (i, j)."""
        return self.rows.owner(i), self.cols.owner(j)

    def __str__(self) -> str:
        (mb, nb), (rsrc, csrc) = self.block, self.source
        start = f" from ({rsrc}, {csrc})" if (rsrc, csrc) != (0, 0) else ""
        skip = (self.rows.skip, self.cols.skip)
        first = f", first block {self.rows.first} x {self.cols.first}" if skip != (0, 0) else ""
        return f"{self.rows.n} x {self.cols.n} in blocks of {mb} x {nb}{start}{first}"


def even_owners(sizes: Sequence[int], owners: int) -> np.ndarray:
    """Return an owner for each size, ascending, such that the sums of sizes of the owners are about equal."""
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    return np.minimum(middles * owners // max(1, sum(sizes)), owners - 1).astype(int)
