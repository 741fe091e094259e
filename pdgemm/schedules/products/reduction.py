"""The reduce-scatter of partial sums of C over groups of ranks, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, index_maps
from pdgemm.grids.layout import Layout, position
from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.products.product import SLAB
from pdgemm.schedules.rounds import LAYERS, Messages, Round, messages
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.schedules.staircase import Staircase, TriangleName
from pdgemm.support.remembered import remembered

ALL = slice(None)  # all windows
LEAST_ROWS = 64  # of each owner, in a window that takes rows of every owner: BLAS is slower on fewer rows
Window = tuple[tuple[int, int], ...]  # ranges of rows, ascending


def height(window: Window) -> int:
    """Return the number of rows of a window."""
    return sum(hi - lo for lo, hi in window)


class Share(NamedTuple):
    """The words of some windows that belong to a rank, and to all ranks of its group."""

    words: int  # words of all ranks of the group
    mine: int  # words in the rank's own part of C
    windows: int  # number of windows with words in the rank's own part of C
    receivers: int  # number of ranks with words of a window in their part of C, summed over the windows


@dataclass(frozen=True)
class Reduction(Schedule):
    """The reduction of blocks of C: each rank of a group has a partial sum of its block, and a part of the block in C.

    rows, cols : distributions of the rows and columns of C, whose parts form the blocks.
    rank_map   : the ranks of the grid positions, layer by layer, row by row; the ranks of one block in all layers are
                 the group of the block, which reduces the block and owns its elements in C.
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
    algorithm = "reduction"
    lookahead = 1

    @property
    def grid(self) -> RankMap:
        return RankMap.of_layers((self.rows.parts, self.cols.parts), self.rank_map, self.layers)

    @property
    def panel_dtype(self) -> np.dtype:
        return self.dtype

    @property
    def events(self) -> int:
        return self.layers * self.turns(None)

    def rounds(self) -> Iterator[Round]:
        """Yield a round of the windows that overlap with products, then a round of the other windows."""
        yield Round(self.messages(self.hidden))
        yield Round(self.messages(self.exposed), hidden=False)

    @property
    def exposed(self) -> slice:
        """The windows whose transfers overlap with no product: the last window, or all windows if sums are read."""
        return slice(0 if self.read else -1, None)

    @property
    def hidden(self) -> slice:
        """The windows whose transfers overlap with a product."""
        return slice(0, self.exposed.start)

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
        """Return the shape of a rank's block; for rank None, of the largest block."""
        if rank is None:
            return self.rows.largest, self.cols.largest
        at = self.at(rank)
        return (0, 0) if at is None else (self.rows.count(at[0]), self.cols.count(at[1]))

    def windows(self, rank: int) -> list[Window]:
        """Return the windows of a rank's block: rows that are reduced together.

        A window has consecutive rows if these belong to all parts of C's rows.  Otherwise it has a share of each part:
        if all its rows belonged to few ranks, the links to the other ranks would be idle.
        """
        (rows, cols), at_once, apart = self.shape(rank), self._at_once(rank), self._apart(rank)
        if not cols:
            return []
        if not apart:
            return [((lo, min(rows, lo + at_once)),) for lo in range(0, rows, at_once)]
        turns = self.turns(rank)
        return [tuple(sorted(run for x in apart for run in _share(x, turn, turns))) for turn in range(turns)]

    def turns(self, rank: int | None) -> int:
        """Return the number of windows of a rank's block; for rank None, of the largest block."""
        rows, cols = self.shape(rank)
        return -(-rows // self._at_once(rank)) if cols else 0

    def _at_once(self, rank: int | None) -> int:
        """Return the number of rows that a window should have."""
        return max(1, min(self.high, LARGEST_MESSAGE_BYTES // (max(1, self.shape(rank)[1]) * self.dtype.itemsize)))

    def highest(self, rank: int | None) -> int:
        """Return the most rows of a window; for rank None, of any rank."""
        if rank is not None and self.triangle:
            return max(map(height, self.windows(rank)), default=0)
        if rank is None:  # a share has at most one row more than a part's rows divided by the number of windows
            parts = min(self.C.distribution.rows.parts, self._at_once(None) // LEAST_ROWS)
            return min(self.shape(None)[0], self._at_once(None) + parts * (parts > 1))
        turns = self.turns(rank)
        if turns and (apart := self._apart(rank)):
            return sum(-(-x.size // turns) for x in apart)  # the last window has the larger share of each part
        return min(self.shape(rank)[0], self._at_once(rank)) if turns else 0

    def _apart(self, rank: int) -> list[IndexMap]:
        """Return the rows of a block in each part of C's rows, if windows take a share of each part; otherwise []."""
        at, rows, at_once = self.at(rank), self.shape(rank)[0], self._at_once(rank)
        if self.read or at is None or at_once >= rows:
            return []
        maps = [*self.rows_to(at[0]).values()]
        cycle = rows * len(maps) // sum(len(x.lengths) for x in maps)  # consecutive rows in which each part has a run
        return maps if cycle > at_once >= LEAST_ROWS * len(maps) > LEAST_ROWS else []

    def owners(self, i: int, window: Window) -> list[int] | None:
        """Return the place in its group of the one owner of each range of a window; None: a range has several owners.

        Only for windows that take a share of each part of C's rows, of all columns.
        """
        rows, cols = self.rows_to(i), self.cols_to(0)
        if len(window) < 2 or len(cols) > 1 or self.cols.parts > 1 or self.triangle:
            return None
        (j,), group, owners = cols, self.group(i, 0), list[int]()
        for lo, hi in window:
            whole = [to_i for to_i, x in rows.items() if x.count_below(hi) - x.count_below(lo) == hi - lo]
            owners += [group.index(self.C.rank(to_i, j)) for to_i in whole]
        return owners if len(owners) == len(window) else None

    def rows_to(self, i: int) -> dict[int, IndexMap]:
        """Return the rows of block i that belong to each part of C's rows."""
        return _shared(self.rows, self.C.distribution.rows, i)

    def cols_to(self, j: int) -> dict[int, IndexMap]:
        return _shared(self.cols, self.C.distribution.cols, j)

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

    @remembered
    def formed(self, at: tuple[int, int]) -> Staircase:
        """Return the elements of a block that lie in the triangle."""
        return Staircase.of(self.triangle, self.rows.indices(at[0]), self.cols.indices(at[1]))

    def columns(self, at: tuple[int, int], lo: int, hi: int) -> tuple[int, int]:
        """Return the range of columns of a block that are reduced in its rows lo to hi."""
        return self.formed(at).columns(lo, hi) if self.triangle else (0, self.cols.count(at[1]))

    def traffic(self, rank: int, turns: slice = ALL) -> Traffic:
        """Return the traffic of a rank.   turns : the windows to count, which are consecutive.

        In each window, each rank of a group sends every other rank the partial sums of the other rank's part of C.
        """
        share, others = self._share((rank, *turns.indices(self.turns(rank))[:2])), self.layers - 1
        received = share.mine * others
        if self.read:
            return Traffic(words_received=received, words_read=received)
        return Traffic(share.words - share.mine, received, share.receivers - share.windows, share.windows * others)

    @remembered
    def _share(self, which: tuple[int, int, int]) -> Share:
        """Return the share of a rank and its group in windows number `first` to `end`.   which : (rank, first, end).

        The cost depends on the number of runs of C's rows and, only for a triangle, on the number of windows.
        """
        rank, first, end = which
        at = self.at(rank)
        if at is None or first >= end:
            return Share(0, 0, 0, 0)
        if self.triangle:
            counts = self._counts_of_windows(rank)[first:end]
            here = counts[:, self.group(*at).index(rank)]
            any_here, anywhere = (int(np.count_nonzero(x)) for x in (here, counts))
            return Share(int(counts.sum()), int(here.sum()), any_here, anywhere)
        (rows, cols), at_once = self.shape(rank), self._at_once(rank)
        to_rows, to_cols, own = self.rows_to(at[0]), self.cols_to(at[1]), self._own_rows(rank)
        wide = to_cols[self.C.coords(rank)[1]].size if own else 0
        if self._apart(rank):
            turns = self.turns(rank)

            def below(x: IndexMap, turn: int) -> int:
                return x.size * turn // turns

            def windows(x: IndexMap) -> int:
                return end - first if x.size >= turns else below(x, end) - below(x, first)

            high = sum(below(x, end) - below(x, first) for x in to_rows.values())
        else:
            lo, hi = first * at_once, min(rows, end * at_once)

            def below(x: IndexMap, turn: int) -> int:
                return int(x.count_below(min(rows, turn * at_once)))

            def windows(x: IndexMap) -> int:
                return _windows_with(x, at_once, lo, hi)

            high = hi - lo
        mine = (below(own, end) - below(own, first)) * wide if own else 0
        receivers = sum(map(windows, to_rows.values())) * len(to_cols)
        return Share(high * cols, mine, windows(own) if own else 0, receivers)

    def _most_own_words(self, rank: int) -> int:
        """Return the most words of one window that lie in a rank's own part of C."""
        if self.triangle:
            counts, at = self._counts_of_windows(rank), self.at(rank)
            return 0 if at is None else int(counts[:, self.group(*at).index(rank)].max(initial=0))
        own, turns, at_once = self._own_rows(rank), self.turns(rank), self._at_once(rank)
        if not own or not turns:
            return 0
        rows = -(-own.size // turns) if self._apart(rank) else _most_in_a_window(own, at_once)
        at = self.at(rank)
        assert at is not None
        return rows * self.cols_to(at[1])[self.C.coords(rank)[1]].size

    def _own_rows(self, rank: int) -> IndexMap | None:
        """Return the rows of a rank's block that the rank owns in C; None: the rank owns no element of the block."""
        at, (own_i, own_j) = self.at(rank), self.C.coords(rank)
        return None if at is None or own_j not in self.cols_to(at[1]) else self.rows_to(at[0]).get(own_i)

    @remembered
    def _counts_of_windows(self, rank: int) -> np.ndarray:
        """Return the words of each window of a triangle that belong to each rank of the group."""
        at = self.at(rank)
        counts = [] if at is None else [self.counts(*at, window) for window in self.windows(rank)]
        return np.array(counts, np.int64).reshape(-1, self.layers)

    def messages(self, turns: slice = ALL) -> list[Messages]:
        """Return the messages, or reads, of the partial sums in the windows `turns` of each block."""
        moves: list[Messages] = []
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
                moves += messages(kind, source[others], target[others], words[others], itemsize, LAYERS)
        return moves

    def buffers(self, rank: int | None) -> Buffers:
        cols, highest = self.shape(rank)[1], self.highest(rank)
        mine = min(highest * cols, prod(self.C.local_shape(None)))
        if rank is not None:
            mine = self._most_own_words(rank)
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


def _share(rows: IndexMap, turn: int, turns: int) -> Iterator[tuple[int, int]]:
    """Yield the runs (start, stop) of share number `turn` of the rows, in `turns` equal shares."""
    start, stop = rows.size * turn // turns, rows.size * (turn + 1) // turns
    if start < stop:
        share = rows.cut(start, stop)
        yield from zip(share.source.tolist(), (share.source + share.lengths).tolist())


def _windows_with(rows: IndexMap, height: int, lo: int, hi: int) -> int:
    """Return how many windows of `height` rows, from row lo to row hi, contain any of `rows`."""
    starts, ends = np.maximum(lo, rows.source), np.minimum(hi, rows.source + rows.lengths)
    there = starts < ends
    first, last = starts[there] // height, (ends[there] - 1) // height
    return int((last - first + 1).sum()) - int(np.count_nonzero(first[1:] == last[:-1]))


def _most_in_a_window(rows: IndexMap, height: int) -> int:
    """Return the most of `rows` in one window of `height` rows."""
    first, last = rows.source // height, (rows.source + rows.lengths - 1) // height
    if (last - first > 1).any():  # a run fills a window
        return height
    ends = np.union1d(first, last) * height
    return int((rows.count_below(ends + height) - rows.count_below(ends)).max())


@lru_cache(maxsize=16)
def _shared(blocks: BlockCyclic, C: BlockCyclic, part: int) -> dict[int, IndexMap]:
    return dict(index_maps(blocks, C, part))
