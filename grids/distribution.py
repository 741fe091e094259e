"""Who owns what: block-cyclic index arithmetic for any rank, without MPI and without data.

One dimension of a matrix, cut into blocks of `block` indices dealt to `parts` owners in turn,
the first block to owner `source` (n = 11, block = 2, parts = 3, source = 1):

    global index   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10
    owner           1  |  2  |  0  |  1  |  2  |  0
    local index    0 1 | 0 1 | 0 1 | 2 3 | 2 3 |  2

A window of such a dimension is dealt in the same way, but its first block may lack its first `skip`
indices; indices 3..8 of the above are n = 6, source = 2, skip = 1:

    global index    0 | 1 2 | 3 4 | 5
    owner           2 |  0  |  1  | 2
    local index     0 | 0 1 | 0 1 | 1

(A first block that is longer than the others, as ScaLAPACK's descriptors allow, has a negative skip.)
So a submatrix needs no class of its own: its distribution is again one of these, and its local arrays are
slices of the matrix's.

Every function takes one index or an array of them.  Part -1 stands for a rank outside the grid: it
holds nothing.  The formulas are those of ScaLAPACK's
NUMROC, INDXG2P, INDXG2L and INDXL2G (Blackford et al., ScaLAPACK Users' Guide, 1997, ch. 4),
with indices from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pdgemm.arrays.integers import as_whole, shown
from pdgemm.errors import LayoutError

Index = Any  # an int or an integer array; the functions return the same
Block = int | tuple[int, int]  # block sizes, mb = nb or (mb, nb)


@dataclass(frozen=True)
class Stripe:
    """Equal blocks at equal distances: what one hyperslab of a file can describe."""

    local: int  # first local index
    start: int  # first global index
    count: int  # number of blocks
    stride: int  # distance between the first indices of two blocks
    block: int  # indices in a block

    @property
    def size(self) -> int:
        return self.count * self.block


@dataclass(frozen=True)
class BlockCyclic:
    """n indices in blocks of `block`, dealt in turn to `parts` owners from `source` on.

    skip : indices that the first block lacks, skip < block; negative: that it has beside those of a block.
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
        """One block each: the plain block distribution."""
        return cls(n, max(1, -(-n // parts)), parts, source)

    @property
    def first(self) -> int:
        """Indices of the first block, if there are as many."""
        return self.block - self.skip

    def number(self, g: Index) -> Index:
        """The block that holds a global index."""
        return self._from_0((g + self.skip) // self.block)

    def owner(self, g: Index) -> Index:
        """The part that holds a global index."""
        return (self.number(g) + self.source) % self.parts

    def to_local(self, g: Index) -> Index:
        """The local index, on its owner, of a global index."""
        block = self.number(g)
        lacking = self.skip * (block % self.parts == 0)  # on the owner of the first block
        return g + self.skip - (block - block // self.parts) * self.block - lacking

    def to_global(self, local: Index, part: int) -> Index:
        """The global index of a local index of `part`."""
        local = local + self._lacking(part)
        block = self._from_0(local // self.block)
        return local + (block * (self.parts - 1) + self._position(part)) * self.block - self.skip

    def count(self, part: int) -> int:
        """Number of indices that `part` holds (NUMROC)."""
        if part < 0:
            return 0
        position = self._position(part)
        if self.n <= self.first:
            return 0 if position else self.n
        blocks, rest = divmod(self.n + self.skip, self.block)
        rounds, extra = divmod(blocks, self.parts)
        held = rounds * self.block + (self.block if position < extra else rest if position == extra else 0)
        return held - self._lacking(part)

    @property
    def largest(self) -> int:
        """The most indices that any part holds: of the first owners, the one whose first block is whole."""
        return max(self.count(self.source), self.count((self.source + 1) % self.parts))

    def indices(self, part: int) -> np.ndarray:
        """All global indices of `part`, ascending: index l is local index l."""
        return self.to_global(np.arange(self.count(part)), part)

    @property
    def starts(self) -> np.ndarray:
        """The first global index of each block, ascending."""
        return np.append(0, np.arange(self.first, self.n, self.block))[: self.n]

    def window(self, start: int, stop: int) -> BlockCyclic:
        """Indices start..stop as a dimension of their own."""
        if not 0 <= start <= stop <= self.n:
            raise LayoutError(f"indices {start} to {stop} are not within 0 to {self.n}")
        blocks = self.number(start)
        skip = start + self.skip - blocks * self.block
        return BlockCyclic(stop - start, self.block, self.parts, (self.source + blocks) % self.parts, skip)

    def local_window(self, start: int, stop: int, part: int) -> slice:
        """Where the indices start..stop lie among the local indices of `part`."""
        return slice(*(replace(self, n=end).count(part) for end in (start, stop)))

    def over(self, parts: int) -> BlockCyclic:
        """The same blocks dealt to another number of parts, from the first on; one block each stays one each."""
        if parts == self.parts:
            return self
        if self.n + self.skip <= self.block * self.parts:
            return BlockCyclic.even(self.n, parts)
        return BlockCyclic(self.n, self.block, parts)

    @cached_property
    def canonical(self) -> BlockCyclic:
        """Equal for dimensions that put every index in the same place, however they are described."""
        if self.parts == 1 or self.n == 0:
            return BlockCyclic(self.n, max(1, self.n), self.parts)
        if self.n <= self.first:
            return BlockCyclic(self.n, self.n, self.parts, self.source)
        if self.n <= self.first + min(self.first, self.block):  # two blocks, the second not longer than the first
            return BlockCyclic(self.n, self.first, self.parts, self.source)
        return self

    def stripes(self, part: int, most: int | None = None) -> Iterator[Stripe]:
        """The indices of `part` as stripes, ascending, none longer than `most`.

        Whole blocks form one stripe, a ragged first or last block another; a block longer than `most` is cut.
        """
        held, stride, lacking = self.count(part), self.block * self.parts, self._lacking(part)
        first = self.block - lacking
        most = max(1, most or held)
        local = 0
        while local < held:
            end = first - local if local < first else self.block - (local + lacking) % self.block  # of this block
            block = min(end, held - local, most)
            count = max(1, min(held - local, most) // block) if block == self.block else 1
            yield Stripe(local, self.to_global(local, part), count, stride, block)
            local += count * block

    def _position(self, part: int) -> int:
        return (part - self.source) % self.parts

    def _lacking(self, part: int) -> int:
        """The indices that the first block of `part` lacks."""
        return self.skip if part == self.source else 0

    def _from_0(self, block: Index) -> Index:
        """Number of a block; what a first block has beside those of a block lies in front of them."""
        if self.skip >= 0:
            return block
        return np.maximum(block, 0) if isinstance(block, np.ndarray) else max(block, 0)


@dataclass(frozen=True)
class Distribution:
    """A matrix dealt over a Pr x Pc grid: rows to grid rows, columns to grid columns.

    Rank (i, j) holds A[rows.indices(i), cols.indices(j)].
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
        """Deal `shape` over `grid_shape`; without `block`, one block per rank."""
        blocks = block if isinstance(block, (tuple, list)) else (block, block)
        pairs = (
            _pair(shape, "a matrix has two dimensions, got shape"),
            _pair(blocks, "block sizes are one number or a pair, got"),
            _pair(source, "source is a pair (rsrc, csrc), got"),
        )
        dims = []
        for parts, dimension, block_size, first in zip(grid_shape, *pairs, strict=True):
            n, owner = as_whole(dimension, "a dimension"), as_whole(first, "source")
            if block_size is None:
                dims.append(BlockCyclic.even(n, parts, owner))
            else:
                dims.append(BlockCyclic(n, as_whole(block_size, "a block size"), parts, owner))
        return cls(*dims)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.n, self.cols.n

    @property
    def block(self) -> tuple[int, int]:
        return self.rows.block, self.cols.block

    @property
    def source(self) -> tuple[int, int]:
        return self.rows.source, self.cols.source

    @property
    def grid_shape(self) -> tuple[int, int]:
        return self.rows.parts, self.cols.parts

    @property
    def transposed(self) -> Distribution:
        return Distribution(self.cols, self.rows)

    @property
    def canonical(self) -> Distribution:
        """Equal for distributions that put every element in the same place."""
        return Distribution(self.rows.canonical, self.cols.canonical)

    def window(self, rows: tuple[int, int], cols: tuple[int, int]) -> Distribution:
        """The submatrix of rows start..stop and columns start..stop."""
        return Distribution(self.rows.window(*rows), self.cols.window(*cols))

    def local_window(
        self, rows: tuple[int, int], cols: tuple[int, int], coords: tuple[int, int]
    ) -> tuple[slice, slice]:
        """Where that submatrix lies in the local array of rank (i, j)."""
        return self.rows.local_window(*rows, coords[0]), self.cols.local_window(*cols, coords[1])

    def local_shape(self, coords: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that rank (i, j) holds."""
        return self.rows.count(coords[0]), self.cols.count(coords[1])

    def owner(self, i: Index, j: Index) -> tuple[Index, Index]:
        """Grid coordinates of the rank that holds element (i, j)."""
        return self.rows.owner(i), self.cols.owner(j)

    def __str__(self) -> str:
        (mb, nb), (rsrc, csrc) = self.block, self.source
        start = f" from ({rsrc}, {csrc})" if (rsrc, csrc) != (0, 0) else ""
        skip = (self.rows.skip, self.cols.skip)
        first = f", the first of {self.rows.first} x {self.cols.first}" if skip != (0, 0) else ""
        return f"{self.rows.n} x {self.cols.n} in blocks of {mb} x {nb}{start}{first}"


def _pair(given: Any, rule: str) -> tuple[Any, Any]:
    try:
        rows, cols = given
    except (TypeError, ValueError):
        raise LayoutError(f"{rule} {shown(given)}") from None
    return rows, cols
