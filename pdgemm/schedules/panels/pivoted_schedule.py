"""The schedule of Householder's QR factorisation with column pivoting, whose pivots one rank chooses in a sketch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.row_moves import RowMoves
from pdgemm.schedules.rounds import ROWS, Round, grid_of, products
from pdgemm.schedules.schedule import Buffers

INDEX = np.dtype(np.int64)


@dataclass(frozen=True)
class PivotedSchedule(HouseholderSchedule):
    """Columns of the trailing matrix X are chosen in a sketch G X, exchanged along grid rows, and eliminated.

    The first rank has the sketch, chooses `width` columns, and tells all ranks.  The owner of the diagonal block orders
    these columns when it factors their panel, and tells all ranks.  The first rank gathers the rows of R that the panel
    adds, and updates the sketch by them.  Where a sketch is drawn, all ranks multiply their parts of X, and the
    products are summed up on the first rank.

    Each panel has `width` columns, the last one may have fewer; there is no look-ahead.

    more   : rows of a sketch beyond `width`.
    chosen : for each panel the columns that are chosen for it, counted from its first column on; None: not known yet,
        and random columns stand for them.
    drawn  : the numbers of the panels before which a sketch is drawn.
    """

    more: int = field(kw_only=True)
    chosen: tuple[tuple[int, ...], ...] | None = field(default=None, kw_only=True, repr=False)
    drawn: tuple[int, ...] = field(default=(0,), kw_only=True, repr=False)
    algorithm = "pivoted"
    lookahead = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the grid, the one that has the sketch first."""
        return tuple(grid_of(self.A).ravel().tolist())

    def updates(self, number: int) -> list[tuple[int, int]]:
        return [(self.steps[number].stop, self.n)]

    def chooses(self, number: int) -> bool:
        """Return whether there is a panel of this number, and whether columns are left to choose from."""
        return number < len(self.steps) and self.steps[number].stop < self.n

    def moves(self, number: int) -> RowMoves:
        """Return the exchange of columns before a panel."""
        (start, *_), w = self.steps[number], self.steps[number].width
        rest = self.n - start
        chosen = self.chosen[number] if self.chosen else np.random.default_rng(rest).permutation(rest)[:w]
        return RowMoves.to(np.arange(start, self.n), start + beginning_with(np.asarray(chosen, INDEX), rest))

    @property
    def order(self) -> np.ndarray:
        """The numbers of the columns in their order, but for the order that the owners of panels give these."""
        order = np.arange(self.n)
        for moves in map(self.moves, filter(self.chooses, range(len(self.steps)))):
            order[moves.targets] = order[moves.sources]
        return order

    def summing(self, panel: Panel) -> Collective:
        """Return the sum of the products with the trailing matrix, which becomes the sketch, on the first rank."""
        words = (self.width + self.more) * (self.n - panel.start)
        return Collective("reduce", "tree", self.ranks, self._first(words), self.A.dtype)

    def telling(self, panel: Panel, root: int) -> Collective:
        """Return the broadcast of a number for each column of a panel from one rank to all."""
        ranks = root, *(rank for rank in self.ranks if rank != root)
        return Collective("broadcast", "tree", ranks, self._first(panel.width), INDEX)

    def gathering(self, panel: Panel) -> Collective:
        """Return the gather of the panel's rows of R on the first rank, from the panel's first column on."""
        words = np.zeros(self.grid.shape, np.int64)
        words[panel.row] = panel.width * self.cols_from(panel.start)
        return Collective("gather", "flat", self.ranks, tuple(words.ravel().tolist()), self.A.dtype)

    def _first(self, words: int) -> tuple[int, ...]:
        return words, *[0] * (len(self.ranks) - 1)

    def rounds(self) -> Iterator[Round]:
        for number, panel in enumerate(self.steps):
            if self.chooses(number):
                yield from self._choice(number, panel)
            yield from self._elimination(number)
            yield from self.telling(panel, self.A.rank(panel.row, panel.col)).rounds()
            if self.chooses(number + 1):
                yield from self.gathering(panel).rounds()

    def _choice(self, number: int, panel: Panel) -> Iterator[Round]:
        """Yield the rounds that draw a sketch, if one is drawn, choose the columns of a panel, and exchange them."""
        grid, rest, height = grid_of(self.A), self.n - panel.start, self.width + self.more
        telling = self.telling(panel, self.ranks[0])
        if number in self.drawn:
            if number:
                yield from telling.rounds()  # that the first rank needs another sketch
            m_loc, n_loc = self.heights[panel], self.cols_from(panel.start)
            yield Round([], products(grid, height, n_loc, m_loc[:, None]))
            yield from self.summing(panel).rounds()
        first = np.zeros(grid.shape, int)
        first[0, 0] = rest
        yield Round([], products(grid, height, first, 2 * panel.width))
        yield from telling.rounds()
        yield Round(self.moves(number).sent(self.cols, grid.T, self.rows_from(0), self.A.dtype.itemsize, ROWS))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), w = self.A.local_shape(rank), self.widest
        words = {
            "part of the sketch": (self.width + self.more) * n_loc,
            "leaving rows": 2 * w * m_loc,
            "arriving rows": 2 * w * m_loc * (self.grid.shape[1] > 1),
        }
        return super().buffers(rank) | self.on_grid(rank, {x: size * self.chooses(0) for x, size in words.items()})


def beginning_with(pivots: np.ndarray, n: int) -> np.ndarray:
    """Return 0, 1, ..., n - 1 with the pivots first, in their order, and few other numbers moved.  Local."""
    order, first = np.arange(n), len(pivots)
    order[:first] = pivots
    order[np.sort(pivots[pivots >= first])] = np.setdiff1d(np.arange(first), pivots)
    return order
