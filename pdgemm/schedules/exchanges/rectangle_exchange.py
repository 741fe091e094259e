"""The messages of an exchange between a block-cyclic layout and rectangles, any number on each rank and of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, index_maps
from pdgemm.grids.layout import Layout, Order
from pdgemm.grids.rectangles import Rectangle
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.dtypes import arithmetic
from pdgemm.schedules.exchanges.block_messages import DEVICE_BYTES, PACKED_BYTES, Block, Redistribution, WordsOf
from pdgemm.schedules.rounds import grid_of
from pdgemm.support.members import remembered


@dataclass(frozen=True)
class RectangleExchange(Redistribution):
    """The messages, traffic and memory, on any rank, of an exchange between rectangles and a layout.  No MPI, no data.

    rectangles : the rectangles of each rank, each in a separate array.
    inward     : True: from the rectangles, which do not overlap, into the layout; False: from the layout into them.
    combines   : elements are added to those of the result, or only some of them are assigned.
    in_order   : memory order of the arrays that are written.
    device, staged, nodes : as in `Exchange`.
    """

    rectangles: tuple[tuple[Rectangle, ...], ...]
    layout: Layout
    inward: bool
    in_order: Order
    words: int = 1
    device: str = ""
    staged: bool = False
    nodes: tuple[int, ...] = ()
    combines: bool = False

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.rectangles)

    @property
    def copies_only(self) -> bool:  # type: ignore[override]
        return not self.conjugates and not self.combines

    @property
    def order(self) -> Order:
        return self.in_order

    @property
    def wire(self) -> np.dtype:
        return self.layout.dtype

    @property
    def wide(self) -> np.dtype:
        return arithmetic(self.layout.dtype)

    @property
    def conjugates(self) -> bool:
        return self.layout.conjugated

    @cached_property
    def _common(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each rectangle: its rank, and the number of its rows, and columns, in each part of the layout."""
        held = [x for of_rank in self.rectangles for x in of_rank]
        owner = np.repeat(np.arange(self.size), [len(of_rank) for of_rank in self.rectangles])
        down, across = self.layout.distribution.rows, self.layout.distribution.cols
        return owner, common_counts(down, [x.rows for x in held]), common_counts(across, [x.cols for x in held])

    @property
    def words_of(self) -> tuple[WordsOf, WordsOf]:
        return (self._from_rectangles, self._from_layout) if self.inward else (self._from_layout, self._from_rectangles)

    def _from_rectangles(self, ranks: np.ndarray) -> np.ndarray:
        """Return the words that the rectangles of these ranks share with the local array of each other rank."""
        owner, rows, cols = self._common
        words, own = np.zeros(self.size, np.int64), np.isin(owner, ranks)
        words[[*self.layout.rank_map]] = (rows[own].T @ cols[own]).ravel()
        for rank in ranks.tolist():
            words[rank] -= self.staying_words(rank)
        return words

    def _from_layout(self, ranks: np.ndarray) -> np.ndarray:
        """Return the words that the local arrays of these ranks share with the rectangles of each other rank."""
        owner, rows, cols = self._common
        places = [place for x in ranks.tolist() if (place := self.layout.coords(x))[0] >= 0]
        i, j = np.array(places, np.int64).reshape(-1, 2).T
        words = np.bincount(owner, (rows[:, i] * cols[:, j]).sum(axis=1), self.size).astype(np.int64)
        for rank in ranks.tolist():
            words[rank] -= self.staying_words(rank)
        return words

    def staying_words(self, rank: int) -> int:
        (owner, rows, cols), (i, j) = self._common, self.layout.coords(rank)
        own = owner == rank
        return int((rows[own, i] * cols[own, j]).sum()) if i >= 0 else 0

    def blocks_sent(self) -> tuple[np.ndarray, ...]:
        owner, rows, cols = self._common
        x, i, j = np.nonzero((rows[:, :, None] > 0) & (cols[:, None, :] > 0))
        ends = owner[x], grid_of(self.layout)[i, j]
        sent = ends[0] != ends[1]
        return tuple(y[sent] for y in (*ends[:: 1 if self.inward else -1], rows[x, i], cols[x, j]))

    @remembered
    def traffic(self, rank: int) -> Traffic:
        """Return, by formula, the words and messages that `rank` sends and receives."""
        if self.by_nodes:
            return self.by_nodes.traffic(rank)
        (owner, rows, cols), (i, j) = self._common, self.layout.coords(rank)
        held = np.stack(np.broadcast_arrays(rows[owner == rank][:, :, None], cols[owner == rank][:, None, :]))
        held[:, :, i, j] *= i < 0  # what stays on the rank
        ways = self.counted(*held), self.counted(rows[:, i] * ((owner != rank) & (i >= 0)), cols[:, j])
        sent, received = ways if self.inward else ways[::-1]
        return Traffic(sent[0], received[0], sent[1], received[1])

    def blocks(self, rank: int, form: Callable[[IndexMap], IndexMap], by_target: bool) -> Iterator[Block]:
        blocks = self._of_layout(rank) if self.inward == by_target else self._of_rectangles(rank)
        return (x._replace(rows=form(x.rows), cols=form(x.cols)) for x in blocks)

    def _of_rectangles(self, rank: int) -> Iterator[Block]:
        """Yield the blocks that the rectangles of `rank` share with the local array of each rank."""
        rows, cols = self.layout.distribution.rows, self.layout.distribution.cols
        for part, (down, across) in enumerate(self.rectangles[rank]):
            columns = list(self._maps(cols, across))
            for i, row_map in self._maps(rows, down):
                yield from (Block(self.layout.rank(i, j), row_map, col_map, part) for j, col_map in columns)

    def _of_layout(self, rank: int) -> Iterator[Block]:
        """Yield the blocks that the local array of `rank` shares with each rectangle."""
        i, j = self.layout.coords(rank)
        if i < 0:
            return
        distribution = self.layout.distribution
        rows, cols = (
            cache(lambda ends, dim=dim, part=part: next((x for _, x in self._maps(dim, ends, part)), None))
            for dim, part in ((distribution.rows, i), (distribution.cols, j))
        )
        for peer, held in enumerate(self.rectangles):
            for part, (down, across) in enumerate(held):
                if (row_map := rows(down)) and (col_map := cols(across)):
                    yield Block(peer, row_map, col_map, part)

    def _maps(self, dim: BlockCyclic, ends: tuple[int, int], part: int | None = None) -> Iterator[tuple[int, IndexMap]]:
        """Yield each part that owns indices of the range `ends`, and their map from source to target.

        part : the only part to yield; None: all parts.
        """
        length = ends[1] - ends[0]
        if not length:
            return
        whole, window = BlockCyclic(length, length, 1), dim.window(*ends)
        maps = index_maps(whole, window, 0) if part is None else index_maps(whole, window, part, by_target=True)
        for other, indices in maps:
            owner = other if part is None else part
            moved = indices.shifted(0, -dim.local_window(*ends, owner).start)
            yield owner, moved if self.inward else moved.inverse

    @cached_property
    def description(self) -> str:
        """A text that describes the whole exchange."""
        return repr(self)


def common_counts(dim: BlockCyclic, ranges: list[tuple[int, int]]) -> np.ndarray:
    """Return the number of indices of each range (a row) in each part of a dimension (a column)."""
    windows = {ends: dim.window(*ends) for ends in ranges}  # many rectangles may have the same rows
    counts = {ends: [x.count(part) for part in range(dim.parts)] for ends, x in windows.items()}
    return np.array([counts[ends] for ends in ranges], np.int64).reshape(-1, dim.parts)


def plan_rectangles(
    rectangles: tuple[tuple[Rectangle, ...], ...], layout: Layout, inward: bool, order: Order, device: str = "",
    staged: bool = False, combines: bool = False,
) -> RectangleExchange:  # fmt: skip
    """Return an exchange whose messages fit in cache; on a device they are larger, because each one costs launches."""
    rows, cols = layout.distribution.rows.largest, layout.distribution.cols.largest
    shapes = [x.shape for held in rectangles for x in held]
    largest = max((min(rows, r) * min(cols, c) for r, c in shapes), default=0)
    most = (DEVICE_BYTES if device else PACKED_BYTES) // layout.dtype.itemsize
    words = max(1, min(most, largest))
    return RectangleExchange(rectangles, layout, inward, order, words, device, staged, combines=combines)
