"""The messages of Y := alpha X + beta Y between any two layouts, computed for any rank.

The rank at (i, j) of the source sends the rank at (i', j') of the target a set of rows times a set of columns: the
rows that grid rows i and i' share, and the columns that grid columns j and j' share.  Only elements that change their
owner are sent, once each, in messages of at most `words` elements.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from pdgemm.grids.index_map import IndexMap, IndexPairs, index_maps, overlap_counts
from pdgemm.grids.layout import Layout, Order
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.dtypes import arithmetic
from pdgemm.schedules.mover_registry import SHARED
from pdgemm.schedules.rounds import LINE, Messages, Round, grid_of
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.support.remembered import remembered, remembered_if

PACKED_BYTES = 1 << 20  # bytes of a message, which stays in cache while it is packed, sent and unpacked
DEVICE_BYTES = 1 << 25  # bytes of a message on a device, where each message costs launches and waits
EXCHANGE = "exchange"  # kind of the messages of all exchanges
SLOTS, DEVICE_SLOTS = 2, 4  # messages in flight in each direction
_MOST_RUNS = 1 << 17  # runs in the index maps of a result that is cached, at 32 bytes each


def _worth_keeping(result: object) -> bool:
    return not isinstance(result, list) or sum(len(x.rows.lengths) + len(x.cols.lengths) for x in result) < _MOST_RUNS


class Block(NamedTuple):
    """The rows times columns that a rank and a peer exchange: index maps from the local array to the message, or back.

    part : the number of the array that contains the block, for a rank with several arrays.
    """

    peer: int
    rows: IndexMap
    cols: IndexMap
    part: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.size, self.cols.size


class Redistribution(Schedule):
    """The base of all exchanges: blocks are sent in messages of at most `words` elements, a few messages at a time."""

    size: int
    words: int
    copies_only: bool
    shared: bool = False
    device: str = ""
    staged: bool = False
    nccl: bool = False
    algorithm = "redistribute"
    lookahead = 0

    @property
    def grid(self) -> RankMap:
        return RankMap.of_line(range(self.size))

    @property
    def panel_dtype(self) -> np.dtype:
        return self.wire

    @property
    def events(self) -> int:
        return self.traffic(0).messages_received

    def rounds(self) -> Iterator[Round]:
        """Yield all messages, or reads, in one round."""
        source, target, rows, cols = self.blocks_sent()
        kind, words = SHARED.name, rows * cols
        if not self.shared:
            kind, (block, words) = EXCHANGE, self._message_words(rows, cols)
            source, target = source[block], target[block]
        yield Round([Messages(kind, source, target, words, self.wire.itemsize, LINE)], hidden=False)

    def blocks_sent(self) -> tuple[np.ndarray, ...]:
        """Return the sender, receiver, rows and columns of each block that any rank sends, as four arrays."""
        sent = [(rank, x.peer, *x.shape) for rank in range(self.size) for x in self.sends(rank)]
        return tuple(np.array(sent, np.int64).reshape(-1, 4).T)

    def copied(self, rank: int) -> int:
        """Return the bytes that a rank copies within its own memory."""
        return sum(x.rows.size * x.cols.size for x in self.staying(rank)) * self.wire.itemsize

    @property
    @abstractmethod
    def order(self) -> Order:
        """The memory order of the result, and of the messages."""

    @property
    @abstractmethod
    def wire(self) -> np.dtype:
        """The type of elements in messages."""

    @property
    @abstractmethod
    def wide(self) -> np.dtype:
        """The type in which alpha X + beta Y is computed."""

    @property
    @abstractmethod
    def conjugates(self) -> bool:
        """Does the exchange conjugate the elements?"""

    @abstractmethod
    def blocks(self, rank: int, form: Callable[[IndexMap], IndexMap], by_target: bool) -> Iterable[Block]:
        """Yield a block of X on `rank` for each array of Y, on any rank, that receives elements of this rank's X.

        by_target : yield instead a block of Y on `rank` for each array of X from which this rank's Y gets elements.
        form : is applied to the two index maps of a block, which map rows (columns) of X to rows (columns) of Y.
        """

    @remembered_if(_worth_keeping)
    def sends(self, rank: int) -> list[Block]:
        """Return the blocks that `rank` sends, to the nearest following rank first."""
        blocks = self.blocks(rank, IndexMap.pack, by_target=False)
        return sorted((x for x in blocks if x.peer != rank), key=lambda x: ((x.peer - rank) % self.size, x.part))

    @remembered_if(_worth_keeping)
    def pulls(self, rank: int) -> list[Block]:
        """Return all blocks of Y on `rank`, with maps from X to Y: local ones first, others in `receives` order."""
        return self._received(rank, lambda x: x)

    @remembered_if(_worth_keeping)
    def receives(self, rank: int) -> list[Block]:
        """Return the blocks that `rank` receives, from the nearest preceding rank first."""
        return [x for x in self._received(rank, IndexMap.unpack) if x.peer != rank]

    @remembered_if(_worth_keeping)
    def staying(self, rank: int) -> list[Block]:
        """Return the blocks that `rank` copies within its own memory."""
        return [x for x in self._received(rank, lambda x: x) if x.peer == rank]

    def _received(self, rank: int, form: Callable[[IndexMap], IndexMap]) -> list[Block]:
        return sorted(self.blocks(rank, form, by_target=True), key=lambda x: ((rank - x.peer) % self.size, x.part))

    @remembered
    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages that a rank sends of X and receives for Y."""
        ways = ([x.shape for x in blocks] for blocks in (self.sends(rank), self.receives(rank)))
        sent, received = (self.counted(*np.array(shapes, np.int64).reshape(-1, 2).T) for shapes in ways)
        return Traffic(sent[0], received[0], sent[1], received[1])

    def tiles(self, block: Block, words: int = 0) -> Iterator[tuple[IndexMap, IndexMap]]:
        """Yield the tiles of a block, in the same order on all ranks.

        words : the most elements of a tile; 0: as many as in a message.
        """
        rows, cols = block.shape
        tile_rows, tile_cols = self.tile(rows, cols, words or self.words)
        columns = [block.cols.cut(c, min(cols, c + tile_cols)) for c in range(0, cols, tile_cols)]
        for r in range(0, rows, tile_rows):
            part = block.rows.cut(r, min(rows, r + tile_rows))
            yield from ((part, column) for column in columns)

    def tile(self, rows: int, cols: int, words: int) -> tuple[int, int]:
        """Return the shape of a tile: whole rows, if rows are contiguous in the target, otherwise whole columns."""
        long, short = (cols, rows) if self.order == "C" else (rows, cols)
        long = min(long, words)
        short = max(1, min(short, words // long))
        return (short, long) if self.order == "C" else (long, short)

    def counted(self, rows: np.ndarray, cols: np.ndarray) -> tuple[int, int]:
        """Return the words and the messages of all blocks with these numbers of rows and columns."""
        some = rows * cols > 0
        long, short, length, lines = self._sides(rows[some], cols[some])
        return int((long * short).sum()), int((-(-long // length) * -(-short // lines)).sum())

    def _sides(self, rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the two sides of each block, and those of its tiles, as `tile` returns them for one block."""
        long, short = (cols, rows) if self.order == "C" else (rows, cols)
        length = np.minimum(long, self.words)
        return long, short, length, np.clip(self.words // length, 1, short)

    def _message_words(self, rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the block of each message, and the words of the message, as `tiles` cuts the blocks."""
        long, short, length, lines = self._sides(rows, cols)
        along = -(-long // length)
        tiles = along * -(-short // lines)
        block = np.repeat(np.arange(len(tiles)), tiles)
        down, across = divmod(np.arange(len(block)) - (tiles.cumsum() - tiles)[block], along[block])
        words = np.minimum(length[block], long[block] - across * length[block])
        return block, words * np.minimum(lines[block], short[block] - down * lines[block])

    def slots(self, rank: int | None) -> tuple[int, int]:
        """Return the numbers of messages in flight to and from `rank`; for rank None, the maximum over all ranks."""
        most = 1 if self.nccl else DEVICE_SLOTS if self.device else SLOTS
        if rank is None:
            return most, most
        traffic = self.traffic(rank)
        return min(most, traffic.messages_received), min(most, traffic.messages_sent)

    def buffers(self, rank: int | None) -> Buffers:
        arriving, leaving = self.slots(rank)
        scratch = 0 if self.copies_only or self.device else 2 * self.words
        return {
            "arriving": (arriving * self.words, self.wire),
            "leaving": (leaving * self.words, self.wire),
            "scratch": (scratch, self.wide),
        }


@dataclass(frozen=True)
class Exchange(Redistribution):
    """A redistribution between two layouts as a value: its messages, traffic and memory, for any rank.

    size  : number of ranks of the communicator.
    words : elements of the largest message.
    copies_only : elements are copied, perhaps to another type, and not combined: alpha = 1, beta = 0, no conjugation.
    shared : nothing is sent; ranks read X in each other's memory.
    device, staged, nccl : as in `Product`.
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
        different = (np.unique(x[x > 0], return_counts=True) for x in self._common)
        (rows, many_rows), (cols, many_cols) = different
        blocks = np.outer(many_rows, many_cols)
        if not self.shared:
            long, short, length, lines = self._sides(rows[:, None], cols[None, :])
            blocks *= -(-long // length) * -(-short // lines)
        return int(-(-blocks.sum() // self.size))

    def copied(self, rank: int) -> int:
        """Return the bytes that a rank copies within its own memory, or reads in that of others."""
        (i, j), (to_i, to_j) = self.source.coords(rank), self.target.coords(rank)
        if self.shared:
            return self.target.local_bytes(rank)
        rows, cols = self._common
        return int(rows[i, to_i] * cols[j, to_j]) * self.wire.itemsize if min(i, to_i) >= 0 else 0

    @property
    def largest_block(self) -> int:
        """The most elements that one rank sends to another rank, or copies within its own memory."""
        rows, cols = self._common
        return int(rows.max(initial=0)) * int(cols.max(initial=0))

    @remembered_if(_worth_keeping)
    def traffic(self, rank: int) -> Traffic:
        """Return, by formula, the words and messages that `rank` sends of X and receives for Y."""
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

    rows: IndexPairs = field(kw_only=True)
    cols: IndexPairs = field(kw_only=True)

    def _maps(self, axis: int, part: int, by_target: bool = False) -> Iterator[tuple[int, IndexMap]]:
        a, b = self.source.distribution, self.target.distribution
        if axis:
            return self.cols.maps(a.cols, b.cols, part, by_target)
        return self.rows.maps(a.rows, b.rows, part, by_target)

    @cached_property
    def _common(self) -> tuple[np.ndarray, np.ndarray]:
        a, b = self.source.distribution, self.target.distribution
        return self.rows.counts(a.rows, b.rows), self.cols.counts(a.cols, b.cols)


AnyExchange = TypeVar("AnyExchange", bound=Exchange)


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


def fitted_messages(one: AnyExchange, memory_limit: int | None = None) -> AnyExchange:
    """Return `one`, whose messages have one element, with messages that are as long as in `plan_exchange`."""
    most = (DEVICE_BYTES if one.device else PACKED_BYTES) // one.source.dtype.itemsize
    if memory_limit is not None:
        most = min(most, memory_limit // max(1, one.extra_bytes(None)))
    return replace(one, words=max(1, min(most, one.largest_block)))
