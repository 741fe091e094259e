"""The messages of Y := alpha X + beta Y between any two layouts, computed for any rank.

The rank at (i, j) of the source sends the rank at (i', j') of the target a set of rows times a set of columns: the
rows that grid rows i and i' share, and the columns that grid columns j and j' share.  Only elements that change their
owner are sent, once each, in messages of at most `words` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import TypeVar

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution, UnevenBlocks
from pdgemm.grids.index_map import IndexMap, IndexPairs, index_maps, overlap_counts
from pdgemm.grids.index_pairs import AnyPairs
from pdgemm.grids.layout import Layout, Order
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.dtypes import arithmetic
from pdgemm.schedules.exchanges.block_messages import (
    DEVICE_BYTES,
    PACKED_BYTES,
    Block,
    Redistribution,
    WordsOf,
    worth_keeping,
)
from pdgemm.schedules.rounds import grid_of
from pdgemm.schedules.schedule import Buffers
from pdgemm.support.members import remembered, remembered_if


@dataclass(frozen=True)
class Exchange(Redistribution):
    """A redistribution between two layouts as a value: its messages, traffic and memory, for any rank.

    size  : number of ranks of the communicator.
    words : elements of the largest message.
    copies_only : elements are copied, perhaps to another type, and not combined: alpha = 1, beta = 0, no conjugation.
    shared : nothing is sent; ranks read X in each other's memory.
    device, staged, nccl : as in `Product`.
    nodes : the node of each rank, where two nodes exchange one message (`NodeMessages`); (): ranks send to ranks.
    """

    source: Layout
    target: Layout
    size: int
    words: int
    copies_only: bool
    shared: bool = False
    device: str = ""
    staged: bool = False
    nccl: bool = False
    nodes: tuple[int, ...] = ()

    @property
    def order(self) -> Order:
        return self.target.order

    @property
    def conjugates(self) -> bool:
        return self.source.conjugated != self.target.conjugated

    @property
    def wire(self) -> np.dtype:
        """The type of elements in messages: X's type, or Y's type if it is smaller and elements are only copied."""
        narrower = self.target.dtype.itemsize < self.source.dtype.itemsize
        return self.target.dtype if self.copies_only and narrower else self.source.dtype

    def blocks(self, rank: int, form: Callable[[IndexMap], IndexMap], by_target: bool) -> Iterator[Block]:
        here, there = (self.target, self.source) if by_target else (self.source, self.target)
        i, j = here.coords(rank)
        columns = [(peer_j, form(cols)) for peer_j, cols in self._maps(1, j, by_target)]
        rows = ((peer_i, form(rows)) for peer_i, rows in self._maps(0, i, by_target))
        for peer_i, down in rows:
            yield from (Block(there.rank(peer_i, peer_j), down, across) for peer_j, across in columns)

    @cached_property
    def description(self) -> str:
        """A description of the whole exchange that ranks compare; its first line is readable for users."""
        return f"{self.source.distribution}, to {self.target.distribution}\n{self!r}"

    def _maps(self, axis: int, part: int, by_target: bool = False) -> Iterator[tuple[int, IndexMap]]:
        """Yield each part of Y with the map of the rows (axis 0) or columns (1) that it shares with `part` of X.

        by_target : yield the parts of X that share rows or columns with `part` of Y.
        """
        a, b = self.source.distribution, self.target.distribution
        return index_maps(*((a.cols, b.cols) if axis else (a.rows, b.rows)), part, by_target)

    @cached_property
    def _common(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of rows, and of columns, that each part of X shares with each part of Y."""
        a, b = self.source.distribution, self.target.distribution
        return overlap_counts(a.rows, b.rows), overlap_counts(a.cols, b.cols)

    def blocks_sent(self) -> tuple[np.ndarray, ...]:
        rows, cols = self._common
        (i, to_i), (j, to_j) = rows.nonzero(), cols.nonzero()
        source = grid_of(self.source)[i[:, None], j].ravel()
        target = grid_of(self.target)[to_i[:, None], to_j].ravel()
        extents = np.repeat(rows[i, to_i], len(j)), np.tile(cols[j, to_j], len(i))
        return tuple(x[source != target] for x in (source, target, *extents))

    @property
    def events(self) -> int:
        """The messages or reads of all ranks over the number of ranks, rounded up; copies are counted as messages."""
        if self.by_nodes:
            return self.by_nodes.events
        different = (np.unique(x[x > 0], return_counts=True) for x in self._common)
        (rows, many_rows), (cols, many_cols) = different
        blocks = np.outer(many_rows, many_cols)
        if not self.shared:
            long, short, length, lines = self._sides(rows[:, None], cols[None, :])
            blocks *= -(-long // length) * -(-short // lines)
        return int(-(-blocks.sum() // self.size))

    def copied(self, rank: int) -> int:
        return self.target.local_bytes(rank) if self.shared else super().copied(rank)

    def staying_words(self, rank: int) -> int:
        (i, j), (to_i, to_j) = self.source.coords(rank), self.target.coords(rank)
        rows, cols = self._common
        return int(rows[i, to_i] * cols[j, to_j]) if min(i, to_i) >= 0 else 0

    @property
    def largest_block(self) -> int:
        """The most elements that one rank sends to another rank, or copies within its own memory."""
        rows, cols = self._common
        return int(rows.max(initial=0)) * int(cols.max(initial=0))

    @remembered_if(worth_keeping)
    def traffic(self, rank: int) -> Traffic:
        """Return, by formula, the words and messages that `rank` sends of X and receives for Y."""
        if self.by_nodes:
            return self.by_nodes.traffic(rank)
        (i, j), (to_i, to_j) = self.source.coords(rank), self.target.coords(rank)
        rows, cols = self._common
        total = Traffic()
        if i >= 0 and not self.shared:
            sent = self._counts(rows[i], cols[j], (to_i, to_j))
            total += Traffic(words_sent=sent[0], messages_sent=sent[1])
        if to_i >= 0:
            received = self._counts(rows[:, to_i], cols[:, to_j], (i, j))
            if self.shared:
                total += Traffic(words_received=received[0], words_read=received[0])
            else:
                total += Traffic(words_received=received[0], messages_received=received[1])
        return total

    @cached_property
    def words_of(self) -> tuple[WordsOf, WordsOf]:
        (rows, cols), source, target = self._common, _places(self.source, self.size), _places(self.target, self.size)
        return partial(_words_of, source, target, rows, cols), partial(_words_of, target, source, rows.T, cols.T)

    def _counts(self, rows: np.ndarray, cols: np.ndarray, own: tuple[int, int]) -> tuple[int, int]:
        """Return the words and messages of the blocks rows[p] x cols[q], for all (p, q) but `own`."""
        shapes = np.stack(np.broadcast_arrays(rows[:, None], cols[None, :]))
        if own[0] >= 0:
            shapes[:, own[0], own[1]] = 0
        return self.counted(*shapes)

    def slots(self, rank: int | None) -> tuple[int, int]:
        return (0, 0) if self.shared else super().slots(rank)

    def described(self, name: str) -> tuple[str, str]:
        return f"redistribute {name}", f"to {self.target}"

    @property
    def wide(self) -> np.dtype:
        """The type of the arithmetic."""
        return arithmetic(self.source.dtype, self.target.dtype)


@dataclass(frozen=True)
class Selection(Exchange):
    """The exchange Y[rows.target, cols.target] := X[rows.source, cols.source] as a value, for any rank.

    rows, cols : pairs of a row (column) of X and a row (column) of Y; a row of X may be copied to several rows of Y.
    """

    rows: AnyPairs = field(kw_only=True)
    cols: AnyPairs = field(kw_only=True)

    def _maps(self, axis: int, part: int, by_target: bool = False) -> Iterator[tuple[int, IndexMap]]:
        a, b = self.source.distribution, self.target.distribution
        if axis:
            return self.cols.maps(a.cols, b.cols, part, by_target)
        return self.rows.maps(a.rows, b.rows, part, by_target)

    @cached_property
    def _common(self) -> tuple[np.ndarray, np.ndarray]:
        a, b = self.source.distribution, self.target.distribution
        return self.rows.counts(a.rows, b.rows), self.cols.counts(a.cols, b.cols)


def _places(layout: Layout, size: int) -> np.ndarray:
    """Return the position of each rank on the grid of a layout, counted row by row; -1: the rank is not on the grid."""
    places = np.full(size, -1)
    places[[*layout.rank_map]] = np.arange(len(layout.rank_map))
    return places


def _words_of(here: np.ndarray, there: np.ndarray, rows: np.ndarray, cols: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the words that ranks of one layout together exchange with each rank of the other layout.

    here, there : the `_places` of all ranks in the two layouts.
    rows, cols : the numbers of rows, and of columns, that each part of `here` shares with each part of `there`.
    """
    senders = ranks[here[ranks] >= 0]
    (i, j), own = divmod(here[senders], cols.shape[0]), there[senders]
    to_i, to_j = divmod(own, cols.shape[1])
    words = np.where(there < 0, 0, (rows[i].T @ cols[j]).ravel()[there])
    words[senders] -= np.where(own < 0, 0, rows[i, to_i] * cols[j, to_j])
    return words


OfLayouts = TypeVar("OfLayouts", bound=Exchange)


@lru_cache(maxsize=16)
def plan_exchange(
    source: Layout,
    target: Layout,
    size: int,
    copies_only: bool = True,
    memory_limit: int | None = None,
    shared: bool = False,
    device: str = "",
    staged: bool = False,
    nccl: bool = False,
) -> Exchange:
    """Return an exchange; its messages have as many elements as cache and `memory_limit` allow, and at least one.

    memory_limit : bytes for the buffers of a rank; None: no limit.
    """
    one = Exchange(
        source, target, size, 1, copies_only and source.conjugated == target.conjugated, shared, device, staged, nccl
    )
    return fitted_messages(one, memory_limit)


@lru_cache(maxsize=64)
def plan_selection(
    source: Layout,
    target: Layout,
    size: int,
    pairs: tuple[AnyPairs, AnyPairs],
    ways: tuple[bool, str, bool, bool] = (False, "", False, False),
    memory_limit: int | None = None,
) -> Selection:
    """Return the exchange of some rows and columns, with messages as in `plan_exchange`.

    pairs : of rows, and of columns.   ways : `shared`, `device`, `staged` and `nccl` of the exchange.
    """
    copies_only, (rows, cols) = source.conjugated == target.conjugated, pairs
    return fitted_messages(Selection(source, target, size, 1, copies_only, *ways, rows=rows, cols=cols), memory_limit)


def fitted_messages(one: OfLayouts, memory_limit: int | None = None) -> OfLayouts:
    """Return `one`, whose messages have one element, with messages that are as long as in `plan_exchange`."""
    most = (DEVICE_BYTES if one.device else PACKED_BYTES) // one.source.dtype.itemsize
    if memory_limit is not None:
        most = min(most, memory_limit // max(1, one.extra_bytes(None)))
    return replace(one, words=max(1, min(most, one.largest_block)))


@dataclass(frozen=True)
class RoutedRows(Selection):
    """The exchange of rows between a matrix and buffers of rows on the ranks that own the rows' groups.

    inward : True: from the matrix to the groups; False: from the groups to the matrix.
    """

    inward: bool = field(kw_only=True)

    @property
    def groups(self) -> Layout:
        """The layout of the rows of all groups, one below the other."""
        return self.target if self.inward else self.source

    def buffers(self, rank: int | None) -> Buffers:
        rows, cols = self.groups.local_shape(rank)
        return super().buffers(rank) | {"rows of groups": (rows * cols, self.groups.dtype)}


def plan_routed(
    matrix: Layout,
    rows: IndexPairs,
    counts: tuple[int, ...],
    inward: bool,
    copies_only: bool,
    dtype: np.dtype,
    shared: bool = False,
    device: str = "",
    staged: bool = False,
    nccl: bool = False,
) -> RoutedRows:
    """Return an exchange of whole rows, whose messages fit in cache.

    matrix : layout of the matrix.   inward : as in `RoutedRows`.
    rows   : pairs of a row of the matrix and a row of the groups; if not `inward`, the row of the groups is first.
    counts : the number of rows in all groups of rank 0, of rank 1, and so on.   dtype : the type of these rows.
    """
    size, width = len(counts), matrix.distribution.shape[1]
    there = Distribution(UnevenBlocks.of(counts), BlockCyclic(width, max(1, width), 1))
    ends = [matrix, Layout(there, tuple(range(size)), dtype)]
    source, target = ends if inward else ends[::-1]
    every = np.arange(width)
    copies_only = copies_only and not matrix.conjugated
    one = RoutedRows(
        source, target, size, 1, copies_only, shared, device, staged, nccl,
        rows=rows, cols=IndexPairs(every, every), inward=inward,
    )  # fmt: skip
    return fitted_messages(one)


@dataclass(frozen=True)
class InheritedExchange(Exchange):
    """An exchange from the local arrays of a first, larger communicator to a second communicator, as a value.

    The second communicator has `size` ranks, and carries out the exchange.
    source  : layout of the matrix on the first communicator; it uses the ranks of the first communicator.
    target  : layout of the matrix on the second communicator.
    holders : for each rank of the first communicator, the rank of the second that holds its local array.
    """

    holders: tuple[int, ...] = field(kw_only=True)

    @remembered
    def held(self, rank: int) -> list[int]:
        """Return the ranks of the first communicator whose local arrays `rank` holds, in the order of `Block.part`."""
        return [old for old, holder in enumerate(self.holders) if holder == rank]

    def blocks(self, rank: int, form: Callable[[IndexMap], IndexMap], by_target: bool) -> Iterator[Block]:
        if by_target:
            for block in super().blocks(rank, form, by_target):
                holder = self.holders[block.peer]
                yield block._replace(peer=holder, part=self.held(holder).index(block.peer))
        else:
            for part, old in enumerate(self.held(rank)):
                yield from (x._replace(part=part) for x in super().blocks(old, form, by_target))

    def traffic(self, rank: int) -> Traffic:
        return Redistribution.traffic(self, rank)

    def blocks_sent(self) -> tuple[np.ndarray, ...]:
        return Redistribution.blocks_sent(self)

    @property
    def words_of(self) -> tuple[WordsOf, WordsOf]:
        return partial(self._words_of, self.sends), partial(self._words_of, self.receives)

    def _words_of(self, blocks: Callable[[int], list[Block]], ranks: np.ndarray) -> np.ndarray:
        words = np.zeros(self.size, np.int64)
        for block in chain.from_iterable(map(blocks, ranks.tolist())):
            words[block.peer] += block.rows.size * block.cols.size
        return words

    def staying_words(self, rank: int) -> int:
        return Redistribution.staying_words(self, rank)


def plan_inheritance(source: Layout, target: Layout, size: int, holders: tuple[int, ...]) -> InheritedExchange:
    """Return an exchange whose messages fit in cache."""
    return fitted_messages(InheritedExchange(source, target, size, 1, True, holders=holders))
