"""Sums over the ranks of a group, added up and scattered to C; as a value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, index_maps
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.model.formulas import MESSAGE_BYTES, reduce_scatter_traffic
from pdgemm.schedules.product import SLAB, Buffers
from pdgemm.schedules.rounds import Messages, messages


@dataclass(frozen=True)
class Reduction:
    """Blocks of C of which each rank of a group has a part of the sum, added up and scattered to C.

    rows, cols : how C is cut into blocks.
    groups     : the ranks that add up block (i, j), row by row; the elements of the block are theirs in C.
    high       : rows of a block that are reduced at a time.
    read       : the parts are read where they lie, nothing is sent.
    """

    rows: BlockCyclic
    cols: BlockCyclic
    groups: tuple[tuple[int, ...], ...]
    C: Layout
    dtype: np.dtype
    high: int
    read: bool
    device: str = ""

    def at(self, rank: int) -> tuple[int, int] | None:
        """The block that a rank works on."""
        return self._blocks.get(rank)

    @cached_property
    def _blocks(self) -> dict[int, tuple[int, int]]:
        return {rank: divmod(at, self.cols.parts) for at, group in enumerate(self.groups) for rank in group}

    def group(self, i: int, j: int) -> tuple[int, ...]:
        return self.groups[i * self.cols.parts + j]

    def shape(self, rank: int | None) -> tuple[int, int]:
        """Rows and columns of a rank's block; rank None: of the largest."""
        if rank is None:
            return self.rows.largest, self.cols.largest
        at = self.at(rank)
        return (0, 0) if at is None else (self.rows.count(at[0]), self.cols.count(at[1]))

    def windows(self, rank: int | None) -> list[tuple[int, int]]:
        """Rows of a block that are reduced together."""
        (rows, cols), high = self.shape(rank), self._at_once(rank)
        return [(lo, min(rows, lo + high)) for lo in range(0, rows, high)] if cols else []

    def turns(self, rank: int | None) -> int:
        """How many windows those are."""
        rows, cols = self.shape(rank)
        return -(-rows // self._at_once(rank)) if cols else 0

    def _at_once(self, rank: int | None) -> int:
        """Rows of a window."""
        return max(1, min(self.high, MESSAGE_BYTES // (max(1, self.shape(rank)[1]) * self.dtype.itemsize)))

    def rows_to(self, i: int) -> dict[int, IndexMap]:
        """The rows of block i that each part of C's rows takes."""
        return _shared(self.rows, self.C.distribution.rows, i)

    def cols_to(self, j: int) -> dict[int, IndexMap]:
        return _shared(self.cols, self.C.distribution.cols, j)

    def counts(self, i: int, j: int, window: tuple[int, int]) -> np.ndarray:
        """Words of the window of block (i, j) that go to each rank of its group."""
        group = {rank: number for number, rank in enumerate(self.group(i, j))}
        counts = np.zeros(len(group), np.int64)
        wide = {to_j: index_map.size for to_j, index_map in self.cols_to(j).items()}
        for to_i, index_map in self.rows_to(i).items():
            high = index_map.count_below(window[1]) - index_map.count_below(window[0])
            for to_j, columns in wide.items() if high else ():
                counts[group[self.C.rank(to_i, to_j)]] += high * columns
        return counts

    def traffic(self, rank: int) -> Traffic:
        at = self.at(rank)
        if at is None:
            return Traffic()
        number, counts = self.group(*at).index(rank), [self.counts(*at, window) for window in self.windows(rank)]
        if not self.read:
            return sum((reduce_scatter_traffic(words, number) for words in counts), Traffic())
        traffic = Traffic()
        traffic.read(sum(int(words[number]) for words in counts) * (len(self.group(*at)) - 1))
        return traffic

    def messages(self) -> list[Messages]:
        """The parts of C on their way to be added up; none where they are read."""
        found: list[Messages] = []
        for at, group in enumerate(self.groups if not self.read else ()):
            i, j = divmod(at, self.cols.parts)
            members = np.array(group)
            source, target = (x.ravel() for x in np.meshgrid(members, members, indexing="ij"))
            others = source != target
            for window in self.windows(group[0]):
                words = np.tile(self.counts(i, j, window), len(group))
                found += messages("reduce", source[others], target[others], words[others], self.dtype.itemsize)
        return found

    def buffers(self, rank: int | None) -> Buffers:
        cols = self.shape(rank)[1]
        high = max((hi - lo for lo, hi in self.windows(rank)), default=0)
        mine = min(high * cols, self._largest_share) if rank is None else self._most(rank)
        return {
            "in the order of ranks": (0 if self.read else high * cols, self.dtype),
            "mine": (mine, self.dtype),
            "another's": (self._another(mine, rank), self.dtype),
        }

    def staging(self, rank: int | None) -> Buffers:
        buffers = self.buffers(rank)
        return {"staged C": buffers["in the order of ranks"], "staged part of C": buffers["mine"]}

    def _another(self, mine: int, rank: int | None) -> int:
        """What of the part of another rank is copied before it is added."""
        if self.device:
            return 0 if self.read else mine
        return min(mine, max(SLAB, self.C.local_shape(rank)[1])) * self.read

    def _most(self, rank: int) -> int:
        at = self.at(rank)
        if at is None:
            return 0
        number = self.group(*at).index(rank)
        return max((int(self.counts(*at, window)[number]) for window in self.windows(rank)), default=0)

    @property
    def _largest_share(self) -> int:
        rows, cols = self.C.local_shape(None)
        return rows * cols

    @property
    def total_words(self) -> int:
        return sum(
            self.rows.count(i) * self.cols.count(j) * (len(self.group(i, j)) - 1)
            for i in range(self.rows.parts)
            for j in range(self.cols.parts)
        )


@lru_cache(maxsize=16)
def _shared(blocks: BlockCyclic, C: BlockCyclic, part: int) -> dict[int, IndexMap]:
    return dict(index_maps(blocks, C, part))
