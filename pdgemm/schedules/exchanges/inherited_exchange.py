"""The messages of an exchange from the local arrays of an earlier grid; a rank may hold the arrays of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pdgemm.grids.index_map import index_maps, overlap_counts
from pdgemm.grids.layout import Layout, Order
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.dtypes import arithmetic
from pdgemm.schedules.exchanges.exchange import PACKED_BYTES, Block, Redistribution, largest_block
from pdgemm.support.remembered import remembered


@dataclass(frozen=True)
class InheritedExchange(Redistribution):
    """An exchange from the local arrays of a first, larger communicator to a second communicator, as a value.

    source  : layout of the matrix on the first communicator, in ranks of the first communicator.
    target  : layout on the second communicator, of `size` ranks, which carries out the exchange.
    holders : for each rank of the first communicator, the rank of the second that holds its local array.
    """

    source: Layout
    target: Layout
    size: int
    holders: tuple[int, ...]
    words: int = 1

    copies_only = True
    conjugates = False

    @property
    def order(self) -> Order:
        return self.target.order

    @property
    def wire(self) -> np.dtype:
        return self.source.dtype

    @property
    def wide(self) -> np.dtype:
        return arithmetic(self.source.dtype)

    @remembered
    def held(self, rank: int) -> list[int]:
        """Return the ranks of the first communicator whose local arrays `rank` holds, in the order of `Block.part`."""
        return [old for old, holder in enumerate(self.holders) if holder == rank]

    def sends(self, rank: int) -> list[Block]:
        blocks = (x for part, old in enumerate(self.held(rank)) for x in self._out_of(old, part) if x.peer != rank)
        packed = [x._replace(rows=x.rows.pack(), cols=x.cols.pack()) for x in blocks]
        return sorted(packed, key=lambda x: ((x.peer - rank) % self.size, x.part))

    def receives(self, rank: int) -> list[Block]:
        packed = [x._replace(rows=x.rows.unpack(), cols=x.cols.unpack()) for x in self._into(rank) if x.peer != rank]
        return sorted(packed, key=lambda x: ((rank - x.peer) % self.size, x.part))

    def staying(self, rank: int) -> list[Block]:
        return [x for x in self._into(rank) if x.peer == rank]

    def _out_of(self, old: int, part: int) -> Iterator[Block]:
        """Yield the blocks that the array of rank `old` of the first communicator shares with arrays of the second."""
        (i, j), a, b = self.source.coords(old), self.source.distribution, self.target.distribution
        if i < 0:
            return
        columns = list(index_maps(a.cols, b.cols, j))
        for to_i, rows in index_maps(a.rows, b.rows, i):
            yield from (Block(self.target.rank(to_i, to_j), rows, cols, part) for to_j, cols in columns)

    def _into(self, rank: int) -> Iterator[Block]:
        """Yield the blocks that the array of `rank` shares with arrays of the first communicator, by their holders."""
        (i, j), a, b = self.target.coords(rank), self.source.distribution, self.target.distribution
        if i < 0:
            return
        columns = list(index_maps(a.cols, b.cols, j, by_target=True))
        for from_i, rows in index_maps(a.rows, b.rows, i, by_target=True):
            for from_j, cols in columns:
                old = self.source.rank(from_i, from_j)
                holder = self.holders[old]
                yield Block(holder, rows, cols, self.held(holder).index(old))

    @remembered
    def traffic(self, rank: int) -> Traffic:
        ways = ([x.shape for x in self.sends(rank)], [x.shape for x in self.receives(rank)])
        sent, received = (self.counted(*np.array(shapes, np.int64).reshape(-1, 2).T) for shapes in ways)
        return Traffic(sent[0], received[0], sent[1], received[1])


def plan_inheritance(source: Layout, target: Layout, size: int, holders: tuple[int, ...]) -> InheritedExchange:
    """Return an exchange whose messages fit in cache."""
    plan = InheritedExchange(source, target, size, holders)
    a, b = source.distribution, target.distribution
    largest = largest_block(overlap_counts(a.rows, b.rows), overlap_counts(a.cols, b.cols))
    return replace(plan, words=max(1, min(PACKED_BYTES // source.dtype.itemsize, largest)))
