"""The reduction of partial sums over groups of ranks, scattered to C, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, index_maps
from pdgemm.grids.layout import Layout, position
from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.model.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.product import SLAB, Buffers
from pdgemm.schedules.rounds import LAYERS, Messages, messages
from pdgemm.schedules.staircase import Staircase, TriangleName
from pdgemm.support.remembered import remembered

ALL = slice(None)  # windows of rows
LEAST_ROWS = 64  # of one owner in a window that takes rows of each: BLAS is slower on fewer
Window = tuple[tuple[int, int], ...]  # ranges of rows, ascending


def height(window: Window) -> int:
    """Return the number of rows of a window."""
    return sum(hi - lo for lo, hi in window)


@dataclass(frozen=True)
class Reduction:
    """Blocks of C of which each rank of a group has a partial sum; these are reduced and scattered to C.

    rows, cols : distributions of the rows and columns of C, whose parts form the blocks.
    rank_map   : the ranks of the grid positions, layer by layer, row by row; those of one block in all layers are its
                 group, which reduces it, and which has its elements in C.
    high       : number of rows of a block that are reduced at a time, about.
    reads      : name of the mover by which partial sums are read in place; "": they are sent.
    triangle   : "L" or "U": of each range of rows only the columns that have elements of this triangle are reduced.
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

    @property
    def exposed(self) -> slice:
        """The windows whose transfers overlap with no product: the last one, or all where they are read."""
        return slice(0 if self.read else -1, None)

    @property
    def hidden(self) -> slice:
        """The other windows."""
        return slice(0, self.exposed.start)

    def transfers(self, rank: int, stride: int) -> list[Transfer]:
        """Return the traffic of the windows that overlap with products, and that of the others."""
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
        """Return the block that a rank works on, or None."""
        at = position(self.rank_map, rank)
        return None if at < 0 else divmod(at % self.blocks, self.cols.parts)

    @property
    def read(self) -> bool:
        """Are partial sums read in place, and nothing sent?"""
        return bool(self.reads)

    def group(self, i: int, j: int) -> tuple[int, ...]:
        """Return the ranks that reduce block (i, j)."""
        return self.rank_map[i * self.cols.parts + j :: self.blocks]

    def shape(self, rank: int | None) -> tuple[int, int]:
        """Return the shape of a rank's block; for rank None, of the largest."""
        if rank is None:
            return self.rows.largest, self.cols.largest
        at = self.at(rank)
        return (0, 0) if at is None else (self.rows.count(at[0]), self.cols.count(at[1]))

    def windows(self, rank: int) -> list[Window]:
        """Return the rows of a block that are reduced together.

        They are consecutive where these belong to all parts of C's rows.  Otherwise a window has a share of each part:
        if it were sent to few ranks, the links to the others would be idle meanwhile.
        """
        (rows, cols), at_once, apart = self.shape(rank), self._at_once(rank), self._apart(rank)
        if not cols:
            return []
        if not apart:
            return [((lo, min(rows, lo + at_once)),) for lo in range(0, rows, at_once)]
        turns = self.turns(rank)
        return [tuple(sorted(run for x in apart for run in _share(x, turn, turns))) for turn in range(turns)]

    def turns(self, rank: int | None) -> int:
        """Return the number of these windows."""
        rows, cols = self.shape(rank)
        return -(-rows // self._at_once(rank)) if cols else 0

    def _at_once(self, rank: int | None) -> int:
        """Return the number of rows of a window."""
        return max(1, min(self.high, LARGEST_MESSAGE_BYTES // (max(1, self.shape(rank)[1]) * self.dtype.itemsize)))

    def highest(self, rank: int | None) -> int:
        """Return the most rows of a window; for rank None, of any rank."""
        if rank is not None and self.triangle:
            return max(map(height, self.windows(rank)), default=0)
        if rank is None:  # a share of the rows of each part is at most one row more than its size over their number
            parts = min(self.C.distribution.rows.parts, self._at_once(None) // LEAST_ROWS)
            return min(self.shape(None)[0], self._at_once(None) + parts * (parts > 1))
        return int(self._shares(rank)[0].max(initial=0)) // max(1, self.shape(rank)[1])

    def _apart(self, rank: int) -> list[IndexMap]:
        """Return the rows of a block in each part of C's rows, if consecutive rows would not belong to all parts."""
        at, rows, at_once = self.at(rank), self.shape(rank)[0], self._at_once(rank)
        if self.read or at is None or at_once >= rows:
            return []
        maps = [*self.rows_to(at[0]).values()]
        cycle = rows * len(maps) // sum(len(x.lengths) for x in maps)  # rows among which each part has a run
        return maps if cycle > at_once >= LEAST_ROWS * len(maps) > LEAST_ROWS else []

    def rows_to(self, i: int) -> dict[int, IndexMap]:
        """Return the rows of block i that belong to each part of C's rows."""
        return _shared(self.rows, self.C.distribution.rows, i)

    def cols_to(self, j: int) -> dict[int, IndexMap]:
        return _shared(self.cols, self.C.distribution.cols, j)

    def counts(self, i: int, j: int, window: Window) -> np.ndarray:
        """Return the words of a window of block (i, j) that belong to each rank of its group."""
        group = {rank: number for number, rank in enumerate(self.group(i, j))}
        counts = np.zeros(len(group), np.int64)
        pieces = [(x,) for x in window] if self.triangle else [window]  # each with columns of its own
        for piece in pieces if window else ():
            lo, hi = self.columns((i, j), *piece[0])
            widths = {to_j: x.count_below(hi) - x.count_below(lo) for to_j, x in self.cols_to(j).items()}
            for to_i, index_map in self.rows_to(i).items():
                rows = sum(index_map.count_below(hi) - index_map.count_below(lo) for lo, hi in piece)
                for to_j, width in widths.items() if rows else ():
                    counts[group[self.C.rank(to_i, to_j)]] += rows * width
        return counts

    @remembered
    def formed(self, at: tuple[int, int]) -> Staircase:
        """Return which elements of a block are in the triangle."""
        return Staircase.of(self.triangle, self.rows.indices(at[0]), self.cols.indices(at[1]))

    def columns(self, at: tuple[int, int], lo: int, hi: int) -> tuple[int, int]:
        """Return the range of columns of a block that are reduced in its rows lo to hi."""
        return self.formed(at).columns(lo, hi) if self.triangle else (0, self.cols.count(at[1]))

    def traffic(self, rank: int, turns: slice = ALL) -> Traffic:
        """Return the traffic: the partial sums of a rank's share on the others of its group, and its own of theirs.

        Each rank sends every other one its part.   turns : the windows that count.
        """
        others = self.layers - 1
        every, mine, receivers = (x[turns] for x in self._shares(rank))
        received = int(mine.sum()) * others
        if self.read:
            return Traffic(words_received=received, words_read=received)
        has = mine > 0
        return Traffic(
            int((every - mine).sum()), received, int((receivers - has).sum()), int(np.count_nonzero(has)) * others
        )

    @remembered
    def _shares(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each window its words, those that the rank has in C, and how many ranks have any in C."""
        at = self.at(rank)
        turns = self.turns(rank)
        if at is None or not turns:
            return (np.zeros(0, np.int64),) * 3
        if self.triangle:
            counts = np.array([self.counts(*at, window) for window in self.windows(rank)])
            mine = counts[:, self.group(*at).index(rank)]
            return counts.sum(axis=1), mine, np.count_nonzero(counts, axis=1)
        (rows, cols), at_once = self.shape(rank), self._at_once(rank)
        (i, j), (own_i, own_j) = at, self.C.coords(rank)
        to_rows, to_cols = self.rows_to(i), self.cols_to(j)
        own = to_rows.get(own_i) if own_j in to_cols else None
        if self._apart(rank):
            turn, sizes = np.arange(turns + 1), np.array([x.size for x in to_rows.values()])
            shares = np.diff(sizes[:, None] * turn // turns)
            every, parts = shares.sum(axis=0), np.count_nonzero(shares, axis=0)
            mine = np.diff(own.size * turn // turns) if own else np.zeros(turns, np.int64)
        else:
            ends = np.minimum(rows, at_once * np.arange(1, turns + 1))
            every, parts = np.diff(ends, prepend=0), _parts_in_windows(to_rows, at_once, turns)
            mine = np.diff(own.count_below(ends), prepend=0) if own else np.zeros(turns, np.int64)
        return every * cols, mine * (to_cols[own_j].size if own else 0), parts * len(to_cols)

    def messages(self, turns: slice = ALL) -> list[Messages]:
        """Return the messages, or reads, of the partial sums in some windows of each block."""
        found: list[Messages] = []
        kind = self.reads or "reduce"
        for at in range(self.blocks):
            i, j = divmod(at, self.cols.parts)
            group = self.group(i, j)
            members = np.array(group)
            source, target = (x.ravel() for x in np.meshgrid(members, members, indexing="ij"))
            others = source != target
            for window in self.windows(group[0])[turns]:
                words = np.tile(self.counts(i, j, window), len(group))
                itemsize = self.dtype.itemsize
                found += messages(kind, source[others], target[others], words[others], itemsize, LAYERS)
        return found

    def buffers(self, rank: int | None) -> Buffers:
        cols, highest = self.shape(rank)[1], self.highest(rank)
        mine = min(highest * cols, prod(self.C.local_shape(None)))
        if rank is not None:
            mine = int(self._shares(rank)[1].max(initial=0))
        return {
            "packed C": (0 if self.read else highest * cols, self.dtype),
            "own part of C": (mine, self.dtype),
            "part of C of another rank": (self._another(mine, rank), self.dtype),
        }

    def staging(self, rank: int | None) -> Buffers:
        buffers = self.buffers(rank)
        return {"staged C": buffers["packed C"], "staged part of C": buffers["own part of C"]}

    def _another(self, mine: int, rank: int | None) -> int:
        """Return the words of another rank's partial sum that are copied before they are added."""
        if not self.read:
            return mine
        return 0 if self.device else min(mine, max(SLAB, self.C.local_shape(rank)[1]))

    @property
    def total_words(self) -> int:
        words = self.rows.n * self.cols.n
        if self.triangle:
            words = sum(int(self._shares(rank)[0].sum()) for rank in self.rank_map[: self.blocks])
        return words * (self.layers - 1)


def _share(rows: IndexMap, turn: int, turns: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of share number `turn` of `turns` equal ones."""
    start, stop = rows.size * turn // turns, rows.size * (turn + 1) // turns
    if start < stop:
        share = rows.cut(start, stop)
        yield from zip(share.source.tolist(), (share.source + share.lengths).tolist())


def _parts_in_windows(maps: dict[int, IndexMap], height: int, windows: int) -> np.ndarray:
    """Return how many parts have rows in each window of `height` rows.   maps : the rows of the block in each part."""
    starts = np.concatenate([x.source for x in maps.values()])
    ends = starts + np.concatenate([x.lengths for x in maps.values()])
    part = np.repeat(np.arange(len(maps)), [len(x.lengths) for x in maps.values()])
    first = starts // height
    several = (ends - 1) // height - first + 1
    turn = np.arange(several.sum()) - np.repeat(several.cumsum() - several, several)
    window = np.repeat(first, several) + turn
    return np.bincount(np.unique(np.repeat(part, several) * windows + window) % windows, minlength=windows)


@lru_cache(maxsize=16)
def _shared(blocks: BlockCyclic, C: BlockCyclic, part: int) -> dict[int, IndexMap]:
    return dict(index_maps(blocks, C, part))
