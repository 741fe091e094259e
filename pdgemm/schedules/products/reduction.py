"""The reduce-scatter of partial sums of C over groups of ranks, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, index_maps
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.products.arithmetic import SLAB
from pdgemm.schedules.rounds import LAYERS, Messages, Round, messages
from pdgemm.schedules.schedule import Buffers, RankMap
from pdgemm.schedules.staircase import Triangle, TriangleName
from pdgemm.support.members import remembered

ALL = slice(None)  # all windows
LEAST_ROWS = 64  # least rows of each owner in a window with rows of every owner: BLAS is slower on fewer rows
Window = tuple[tuple[int, int], ...]  # ranges of rows, ascending


def height(window: Window) -> int:
    """Return the number of rows of a window."""
    return sum(hi - lo for lo, hi in window)


@dataclass(frozen=True)
class Windows:
    """The windows of a block: consecutive rows that are reduced together.

    rows : number of rows of the block.   high : rows of a window; the last window may have fewer.
    """

    rows: int
    high: int

    @property
    def number(self) -> int:
        return -(-self.rows // self.high)

    @property
    def highest(self) -> int:
        """The most rows of a window."""
        return min(self.rows, self.high)

    def ranges(self) -> list[Window]:
        """Return the rows of each window."""
        return [((lo, min(self.rows, lo + self.high)),) for lo in range(0, self.rows, self.high)]

    def rows_before(self, turn: int) -> int:
        """Return the number of rows in the windows before window number `turn`."""
        return min(self.rows, turn * self.high)

    def before(self, rows: IndexMap, turn: int) -> int:
        """Return how many of `rows` are in the windows before window number `turn`."""
        return int(rows.count_below(self.rows_before(turn)))

    def containing(self, rows: IndexMap, first: int, end: int) -> int:
        """Return how many of the windows `first` to `end` contain any of `rows`."""
        lo, hi = self.rows_before(first), self.rows_before(end)
        starts, ends = np.maximum(lo, rows.source), np.minimum(hi, rows.source + rows.lengths)
        there = starts < ends
        first_of_run, last_of_run = starts[there] // self.high, (ends[there] - 1) // self.high
        repeated = np.count_nonzero(first_of_run[1:] == last_of_run[:-1])
        return int((last_of_run - first_of_run + 1).sum()) - int(repeated)

    def most(self, rows: IndexMap) -> int:
        """Return the largest number of `rows` in one window."""
        first, last = rows.source // self.high, (rows.source + rows.lengths - 1) // self.high
        if (last - first > 1).any():  # a run fills a window
            return self.high
        ends = np.union1d(first, last) * self.high
        return int((rows.count_below(ends + self.high) - rows.count_below(ends)).max())


@dataclass(frozen=True)
class Shares(Windows):
    """Windows of a block, each of which has some rows of each owner, so that all links are busy.

    Windows of consecutive rows would belong to few ranks.   owned : the rows of each owner.
    """

    owned: list[IndexMap]

    @property
    def highest(self) -> int:
        return sum(map(self.most, self.owned))  # the last window has the larger share of each owner

    def ranges(self) -> list[Window]:
        return [tuple(sorted(run for x in self.owned for run in self._runs(x, turn))) for turn in range(self.number)]

    def _runs(self, rows: IndexMap, turn: int) -> Iterator[tuple[int, int]]:
        start, stop = self.before(rows, turn), self.before(rows, turn + 1)
        if start < stop:
            share = rows.cut(start, stop)
            yield from zip(share.source.tolist(), (share.source + share.lengths).tolist())

    def rows_before(self, turn: int) -> int:
        return sum(self.before(x, turn) for x in self.owned)

    def before(self, rows: IndexMap, turn: int) -> int:
        return rows.size * turn // self.number

    def containing(self, rows: IndexMap, first: int, end: int) -> int:
        return end - first if rows.size >= self.number else self.before(rows, end) - self.before(rows, first)

    def most(self, rows: IndexMap) -> int:
        return -(-rows.size // self.number)


@dataclass(frozen=True)
class Reduction:
    """The reduction of blocks of C: the ranks of a group add up their partial sums of a block of C.

    Each rank of the group owns a part of the block in C, and receives the sums of this part.

    rows, cols : distributions of the rows and columns of C, whose parts form the blocks.
    rank_map   : the ranks of the grid positions, layer by layer, row by row.  The ranks at one position in all layers
                 are a group: they reduce the block of this position, and own its elements in C.
    high       : approximate number of rows of a block that are reduced at a time.
    reads      : name of the mover by which partial sums are read in place; "": partial sums are sent.
    triangle   : "L" or "U": in each range of rows, only the columns with elements of this triangle are reduced.
    """

    rows: BlockCyclic
    cols: BlockCyclic
    rank_map: tuple[int, ...]
    C: Layout
    dtype: np.dtype
    high: int
    reads: str
    device: str = ""
    triangle: TriangleName = ""

    @cached_property
    def grid(self) -> RankMap:
        return RankMap.of_layers((self.rows.parts, self.cols.parts), self.rank_map, self.layers)

    def rounds(self) -> Iterator[Round]:
        """Yield a round of the windows that are sent during products, then a round of the other windows."""
        yield Round(self.messages(self.hidden))
        yield Round(self.messages(self.exposed), hidden=False)

    @property
    def exposed(self) -> slice:
        """The windows whose transfers do not overlap with products: the last window, or all if sums are read."""
        return slice(0 if self.read else -1, None)

    @property
    def hidden(self) -> slice:
        """The windows whose transfers overlap with a product."""
        return slice(0, self.exposed.start)

    @remembered
    def transfers(self, rank: int) -> list[Transfer]:
        """Return the traffic of the windows that overlap with products, and that of the other windows."""
        stride = self.grid.strides[LAYERS]
        parts = (self.traffic(rank, self.hidden), False), (self.traffic(rank, self.exposed), True)
        return [Transfer("reduce", x, self.dtype.itemsize, stride, self.layers, after) for x, after in parts]

    @property
    def blocks(self) -> int:
        return self.rows.parts * self.cols.parts

    @property
    def layers(self) -> int:
        """The number of ranks of a group."""
        return len(self.rank_map) // self.blocks

    def at(self, rank: int) -> tuple[int, int] | None:
        """Return the position (i, j) of a rank's block, or None for a rank without a block."""
        at = self.grid.coords(rank)
        return None if at[0] < 0 else at

    @property
    def read(self) -> bool:
        """Are partial sums read in place, and nothing sent?"""
        return bool(self.reads)

    def group(self, i: int, j: int) -> tuple[int, ...]:
        """Return the ranks that reduce block (i, j)."""
        return self.rank_map[i * self.cols.parts + j :: self.blocks]

    def shape(self, rank: int | None) -> tuple[int, int]:
        """Return the shape of a rank's block; for rank None, of the largest block."""
        if rank is None:
            return self.rows.largest, self.cols.largest
        at = self.at(rank)
        return (0, 0) if at is None else (self.rows.count(at[0]), self.cols.count(at[1]))

    @remembered
    def divided(self, rank: int | None) -> Windows:
        """Return the windows into which the rows of a rank's block are divided; for rank None, of the largest block."""
        rows, cols = self.shape(rank)
        high = max(1, min(self.high, LARGEST_MESSAGE_BYTES // (max(1, cols) * self.dtype.itemsize)))
        at = None if rank is None else self.at(rank)
        if at is None or self.read or high >= rows or not cols:
            return Windows(rows if cols else 0, high)
        owned = [*self.rows_to(at[0]).values()]
        cycle = rows * len(owned) // sum(len(x.lengths) for x in owned)  # rows in which each part has a run
        apart = cycle > high >= LEAST_ROWS * len(owned) > LEAST_ROWS
        return Shares(rows, high, owned) if apart else Windows(rows, high)

    def windows(self, rank: int) -> list[Window]:
        """Return the windows of a rank's block: rows that are reduced together."""
        return self.divided(rank).ranges()

    def turns(self, rank: int | None) -> int:
        """Return the number of windows of a rank's block; for rank None, of the largest block."""
        return self.divided(rank).number

    def highest(self, rank: int | None) -> int:
        """Return the number of rows of the highest window of a rank's block; for rank None, of any block."""
        windows = self.divided(rank)
        if rank is not None or not windows.rows:
            return windows.highest
        # a share has at most one row more than a part's rows divided by the number of windows
        parts = min(self.C.distribution.rows.parts, windows.high // LEAST_ROWS)
        return min(windows.rows, windows.high + parts * (parts > 1))

    def owners(self, i: int, window: Window) -> list[int] | None:
        """Return the owner of each range, as its place in the group; None where a range may have several owners.

        In a window of several ranges (`Shares`) each range has one owner, if owners have all columns of C.
        """
        cols, group = self.cols_to(0), self.group(i, 0)
        if len(window) < 2 or len(cols) > 1 or self.cols.parts > 1 or self.triangle:
            return None
        owners = self.C.distribution.rows.owner(self.rows.to_global(np.array(window)[:, 0], i))
        return [group.index(self.C.rank(to_i, *cols)) for to_i in owners.tolist()]

    def rows_to(self, i: int) -> dict[int, IndexMap]:
        """Return the rows of block i that belong to each part of C's rows."""
        return _shared(self.rows, self.C.distribution.rows, i)

    def cols_to(self, j: int) -> dict[int, IndexMap]:
        return _shared(self.cols, self.C.distribution.cols, j)

    def part(self, rank: int) -> tuple[IndexMap, IndexMap] | None:
        """Return the rows and the columns of a rank's block that the rank owns in C; None if it does not own any."""
        at, (own_i, own_j) = self.at(rank), self.C.coords(rank)
        rows, cols = (None, None) if at is None else (self.rows_to(at[0]).get(own_i), self.cols_to(at[1]).get(own_j))
        return None if rows is None or cols is None else (rows, cols)

    def counts(self, i: int, j: int, window: Window) -> np.ndarray:
        """Return the words of a window of block (i, j) that belong to each rank of its group."""
        group = {rank: number for number, rank in enumerate(self.group(i, j))}
        counts = np.zeros(len(group), np.int64)
        pieces = [(x,) for x in window] if self.triangle else [window]  # each range of rows has its own columns
        for piece in pieces if window else ():
            lo, hi = self.columns((i, j), *piece[0])
            widths = {to_j: x.count_below(hi) - x.count_below(lo) for to_j, x in self.cols_to(j).items()}
            for to_i, index_map in self.rows_to(i).items():
                rows = sum(index_map.count_below(hi) - index_map.count_below(lo) for lo, hi in piece)
                for to_j, width in widths.items() if rows else ():
                    counts[group[self.C.rank(to_i, to_j)]] += rows * width
        return counts

    @cached_property
    def formed(self) -> Triangle:
        """The elements of the blocks that are in the triangle."""
        return Triangle(self.triangle, self.grid, self.rows, self.cols)

    def columns(self, at: tuple[int, int], lo: int, hi: int) -> tuple[int, int]:
        """Return the range of columns of a block that are reduced in its rows lo to hi."""
        return self.formed.at(at).columns(lo, hi) if self.triangle else (0, self.cols.count(at[1]))

    def traffic(self, rank: int, turns: slice = ALL) -> Traffic:
        """Return the traffic of a rank.   turns : the windows to count, which are consecutive.

        In each window, each rank of a group sends every other rank the partial sums of the other rank's part of C.
        The time of this function depends on the number of runs of C's rows; for a triangle, also on the number of
        windows.
        """
        at, others = self.at(rank), self.layers - 1
        first, end, _ = turns.indices(self.turns(rank))
        if at is None or first >= end:
            return Traffic()
        windows, part = self.divided(rank), self.part(rank)
        if self.triangle:
            counts = self._counts_of_windows(rank)[first:end]
            own = counts[:, self.group(*at).index(rank)]
            words, receivers = int(counts.sum()), int(np.count_nonzero(counts))
            mine, own_windows = int(own.sum()), int(np.count_nonzero(own))
        else:
            words = (windows.rows_before(end) - windows.rows_before(first)) * self.cols.count(at[1])
            owners = self.rows_to(at[0]).values()
            receivers = sum(windows.containing(x, first, end) for x in owners) * len(self.cols_to(at[1]))
            mine = (windows.before(part[0], end) - windows.before(part[0], first)) * part[1].size if part else 0
            own_windows = windows.containing(part[0], first, end) if part else 0
        received = mine * others
        if self.read:
            return Traffic(words_received=received, words_read=received)
        return Traffic(words - mine, received, receivers - own_windows, own_windows * others)

    def _most_own_words(self, rank: int) -> int:
        """Return the most words of one window that are in a rank's local part of C."""
        at, part, windows = self.at(rank), self.part(rank), self.divided(rank)
        if at is None or part is None or not windows.number:
            return 0
        if self.triangle:
            return int(self._counts_of_windows(rank)[:, self.group(*at).index(rank)].max(initial=0))
        return windows.most(part[0]) * part[1].size

    @remembered
    def _counts_of_windows(self, rank: int) -> np.ndarray:
        """Return the words of each window of a triangle that belong to each rank of the group."""
        at = self.at(rank)
        counts = [] if at is None else [self.counts(*at, window) for window in self.windows(rank)]
        return np.array(counts, np.int64).reshape(-1, self.layers)

    def messages(self, turns: slice = ALL) -> list[Messages]:
        """Return the messages, or reads, of the partial sums in the windows `turns` of each block."""
        moves: list[Messages] = []
        for i, j in np.ndindex(self.rows.parts, self.cols.parts):
            group = self.group(i, j)
            members = np.array(group)
            source, target = (x.ravel() for x in np.meshgrid(members, members, indexing="ij"))
            others = source != target
            for window in self.windows(group[0])[turns]:
                words = np.tile(self.counts(i, j, window), len(group))[others]
                kind, itemsize = self.reads or "reduce", self.dtype.itemsize
                moves += messages(kind, source[others], target[others], words, itemsize, LAYERS)
        return moves

    def buffers(self, rank: int | None) -> Buffers:
        packed = self.highest(rank) * self.shape(rank)[1]
        mine = min(packed, prod(self.C.local_shape(None))) if rank is None else self._most_own_words(rank)
        another = mine  # words of another rank's partial sum that are copied before they are added
        if self.read:
            another = 0 if self.device else min(mine, max(SLAB, self.C.local_shape(rank)[1]))
        return {
            "packed C": (0 if self.read else packed, self.dtype),
            "own part of C": (mine, self.dtype),
            "part of C of another rank": (another, self.dtype),
        }


@lru_cache(maxsize=16)
def _shared(blocks: BlockCyclic, C: BlockCyclic, part: int) -> dict[int, IndexMap]:
    return dict(index_maps(blocks, C, part))
