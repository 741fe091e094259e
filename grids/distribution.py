"""Who owns what: block-cyclic index arithmetic for any rank, without MPI and without data.

One dimension of a matrix, cut into blocks of `block` indices dealt to `parts` owners in turn,
the first block to owner `source` (n = 11, block = 2, parts = 3, source = 1):

    global index   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10
    owner           1  |  2  |  0  |  1  |  2  |  0
    local index    0 1 | 0 1 | 0 1 | 2 3 | 2 3 |  2

Every function takes one index or an array of them.  The formulas are those of ScaLAPACK's
NUMROC, INDXG2P, INDXG2L and INDXL2G (Blackford et al., ScaLAPACK Users' Guide, 1997, ch. 4),
with indices from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import LayoutError

Index = Any  # an int or an integer array; the functions return the same


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
    """n indices in blocks of `block`, dealt in turn to `parts` owners from `source` on."""

    n: int
    block: int
    parts: int
    source: int = 0

    def __post_init__(self) -> None:
        if self.n < 0:
            raise LayoutError(f"a dimension must be >= 0, got {self.n}")
        if self.block < 1:
            raise LayoutError(f"a block size must be >= 1, got {self.block}")
        if self.parts < 1 or not 0 <= self.source < self.parts:
            raise LayoutError(f"source {self.source} is not one of {self.parts} owners")

    @classmethod
    def even(cls, n: int, parts: int, source: int = 0) -> BlockCyclic:
        """One block each: the plain block distribution."""
        return cls(n, max(1, -(-n // parts)), parts, source)

    def owner(self, g: Index) -> Index:
        """The part that holds a global index."""
        return (g // self.block + self.source) % self.parts

    def to_local(self, g: Index) -> Index:
        """The local index, on its owner, of a global index."""
        block = g // self.block
        return g - (block - block // self.parts) * self.block

    def to_global(self, local: Index, part: int) -> Index:
        """The global index of a local index of `part`."""
        block = local // self.block
        return local + (block * (self.parts - 1) + self._position(part)) * self.block

    def count(self, part: int) -> int:
        """Number of indices that `part` holds (NUMROC)."""
        blocks, rest = divmod(self.n, self.block)
        rounds, extra = divmod(blocks, self.parts)
        position = self._position(part)
        return rounds * self.block + (self.block if position < extra else rest if position == extra else 0)

    @property
    def largest(self) -> int:
        """The most indices that any part holds."""
        return self.count(self.source)

    def indices(self, part: int) -> np.ndarray:
        """All global indices of `part`, ascending: index l is local index l."""
        return self.to_global(np.arange(self.count(part)), part)

    def stripes(self, part: int, most: int | None = None) -> Iterator[Stripe]:
        """The indices of `part` as stripes, ascending, none longer than `most`.

        Whole blocks form one stripe, a ragged last block another; a block longer than `most` is cut.
        """
        held, stride = self.count(part), self.block * self.parts
        most = max(1, most or held)
        local = 0
        while local < held:
            block = min(self.block - local % self.block, held - local, most)  # at most to the end of a block
            count = max(1, min(held - local, most) // block) if block == self.block else 1
            yield Stripe(local, self.to_global(local, part), count, stride, block)
            local += count * block

    def _position(self, part: int) -> int:
        return (part - self.source) % self.parts


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
        block: int | tuple[int, int] | None = None,
        source: tuple[int, int] = (0, 0),
    ) -> Distribution:
        """Deal `shape` over `grid_shape`; without `block`, one block per rank."""
        if len(shape) != 2:
            raise LayoutError(f"a matrix has two dimensions, got shape {tuple(shape)}")
        blocks: tuple[int | None, int | None]
        blocks = tuple(block) if isinstance(block, (tuple, list)) else (block, block)  # type: ignore[assignment]
        if len(blocks) != 2:
            raise LayoutError(f"block sizes are one number or a pair, got {block}")
        if len(source) != 2:
            raise LayoutError(f"source is a pair (rsrc, csrc), got {source}")
        dims = [
            BlockCyclic.even(n, parts, s) if b is None else BlockCyclic(n, index(b), parts, s)
            for n, b, parts, s in zip(map(index, shape), blocks, grid_shape, map(index, source), strict=True)
        ]
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

    def local_shape(self, coords: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that rank (i, j) holds."""
        return self.rows.count(coords[0]), self.cols.count(coords[1])

    def owner(self, i: Index, j: Index) -> tuple[Index, Index]:
        """Grid coordinates of the rank that holds element (i, j)."""
        return self.rows.owner(i), self.cols.owner(j)

    def __str__(self) -> str:
        (mb, nb), (rsrc, csrc) = self.block, self.source
        start = f" from ({rsrc}, {csrc})" if (rsrc, csrc) != (0, 0) else ""
        return f"{self.rows.n} x {self.cols.n} in blocks of {mb} x {nb}{start}"
