"""The schedules of the QR factorisation A = Q R by blocked Householder reflections, and of products with Q.

With column pivoting, one rank chooses the pivots in a sketch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pdgemm.grids.layout import Layout
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.panels.panel_schedule import (
    INDEX,
    Panel,
    PanelSchedule,
    carried,
    diagonal_panels,
    window_gathering,
)
from pdgemm.schedules.panels.row_moves import RowMoves
from pdgemm.schedules.rounds import COLS, ROWS, Messages, Round, counts_of, grid_of, products, signals
from pdgemm.schedules.schedule import Buffers


def cuts(n: int, parts: int) -> list[int]:
    """Return the bounds of `parts` slices of n columns, one slice for each rank that adds partial sums up."""
    return [n * part // parts for part in range(parts + 1)]


@dataclass(frozen=True)
class HouseholderSchedule(PanelSchedule):
    """The owner of a diagonal block factors its panel into (I - V T V^H) R; V and T reflect the trailing columns.

    The owner gathers the panel from its grid column, and returns to each rank the rank's rows of V, with T below them.
    The rank stores both in the buffer "reflectors", and broadcasts them along its grid row.  The ranks of a grid column
    that have rows from the panel's start on all-reduce W = V^H A: each adds up a slice of W, and multiplies it by T.

    wants_q : Q (m, min(m, n)), in the layout of these columns of A, is formed by the reflections in reverse order.
    columns : number of columns to eliminate; the others are reflected.  None: all min(m, n), which `wants_q` requires.
    """

    wants_q: bool = field(default=True, kw_only=True)
    columns: int | None = field(default=None, kw_only=True)
    algorithm = "householder"
    exposed_buffers = ("gathered", "reflectors", "sums")

    @property
    def flops(self) -> int:
        m, n = self.A.distribution.shape
        k = min(m, n) if self.columns is None else self.columns
        reals = 4 * m * n * k - 2 * (m + n) * k * k - -4 * k**3 // 3
        reals += self.wants_q * (2 * k * k * m - 2 * k**3 // 3)
        return self.real_flops * reals

    @cached_property
    def steps(self) -> tuple[Panel, ...]:
        return diagonal_panels(self.rows, self.cols, self.width, self.columns)

    @cached_property
    def heights(self) -> dict[Panel, np.ndarray]:
        """The number of rows from each panel's start on, in each grid row."""
        return {panel: self.rows_from(panel.start) for panel in self.steps}

    @cached_property
    def places(self) -> dict[Panel, list[slice]]:
        """The slices of "reflectors" with a panel's rows of V, and T, on the ranks of the panel's grid column."""
        ends, slices = np.zeros(self.grid.shape, np.int64), {}
        for panel in self.steps:
            start = ends[:, panel.col].tolist()
            ends[:, panel.col] += self.chunk(panel)
            slices[panel] = [slice(*both) for both in zip(start, ends[:, panel.col].tolist())]
        return slices

    def chunk(self, panel: Panel) -> np.ndarray:
        """Return the words of a panel's V and T on a rank of each grid row."""
        height, w = self.heights[panel], panel.width
        return (height + w) * w * (height > 0)

    def members(self, panel: Panel) -> list[int]:
        """Return the grid rows that hold rows of a panel, the panel's own grid row first."""
        return [r for r in super().members(panel) if self.heights[panel][r]]

    def updates(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of columns that a panel reflects: the columns of the next panel, then the other columns."""
        stop, n = self.steps[number].stop, self.n
        if number + 1 == len(self.steps):
            return [(stop, n)]
        following = self.steps[number + 1].stop
        return [(stop, following), (following, n)]

    def rounds(self) -> Iterator[Round]:
        for number in range(len(self.steps)):
            yield from self._elimination(number)
        if self.wants_q:
            grid, size, k = grid_of(self.A), self.A.dtype.itemsize, min(self.A.distribution.shape)
            for panel in self.steps[::-1]:
                moves = carried(self.mover, grid, panel.col, self.chunk(panel), size, ROWS, ready=True)
                yield from self._reflection(panel, moves, [(panel.start, k)])

    def _elimination(self, number: int) -> Iterator[Round]:
        """Yield the rounds that factor a panel and reflect the columns to the right of it."""
        grid, (pr, pc), panel = grid_of(self.A), self.grid.shape, self.steps[number]
        here = (np.arange(pr)[:, None] == panel.row) & (np.arange(pc) == panel.col)
        height = (self.rows.n - panel.start) * here
        yield Round(self.gathered(panel), products(grid, height, panel.width, 2 * panel.width))
        moves = carried(self.mover, grid, panel.col, self.chunk(panel), self.A.dtype.itemsize, ROWS)
        returned = self.gathered(panel, back=True, beneath=panel.width)
        yield from self._reflection(panel, returned + moves, self.updates(number))

    def _reflection(self, panel: Panel, moves: list[Messages], updates: list[tuple[int, int]]) -> Iterator[Round]:
        """Yield the rounds that reflect ranges of columns; the first round begins with `moves`."""
        grid, height, w = grid_of(self.A), self.heights[panel][:, None], panel.width
        for start, stop in updates:
            n_loc = counts_of(self.cols.window(start, stop))
            yield Round(moves, products(grid, height, n_loc, w))
            yield Round(self._summed(self.members(panel), n_loc, w), products(grid, height, n_loc, w))
            moves = []

    def _summed(self, members: list[int], n_loc: np.ndarray, w: int) -> list[Messages]:
        """Return the messages that all-reduce w rows of n_loc columns over the `members` of each grid column."""
        columns, ranks = np.flatnonzero(n_loc), grid_of(self.A)[members]
        of, adds = np.nonzero(~np.eye(len(members), dtype=bool))
        widths = np.diff([cuts(n, len(members)) for n in n_loc[columns].tolist()], axis=1).T if columns.size else None
        if widths is None or not of.size:
            return []
        source, target, words = (
            ranks[of][:, columns].ravel(),
            ranks[adds][:, columns].ravel(),
            (w * widths[adds]).ravel(),
        )
        moves = self.direct(source, target, words) + self.direct(target, source, words)
        read = signals(source, target[:, None], self.A.dtype.itemsize, COLS)  # signals that the whole sum has been read
        return moves + [read] * self.shared

    @cached_property
    def _buffer_words(self) -> dict[str, np.ndarray]:
        """The words of the panel buffers, by grid position; buffers that others read are equally large on all ranks."""
        reflectors, gathered, parts = np.zeros((3, *self.grid.shape), np.int64)
        for panel, height in self.heights.items():
            (owner, *others), chunk, w, j = self.members(panel), self.chunk(panel), panel.width, panel.col
            reflectors[:, j] += chunk
            if others:
                gathered[owner, j] = max(gathered[owner, j], (height.sum() + w) * w)
                parts[owner, j] = max(parts[owner, j], chunk[others].sum())
                parts[others, j] = np.maximum(parts[others, j], height[others] * w)
        if self.shared:
            reflectors[:], gathered[:] = reflectors.max(), gathered.max()
        return {"reflectors": reflectors, "gathered": gathered, "parts": 2 * (not self.shared) * parts}

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), (pr, pc), w = self.A.local_shape(rank), self.grid.shape, self.widest
        at, sent = (-1, -1) if rank is None else self.A.coords(rank), not self.shared
        words = {name: int(x.max() if rank is None else x[at] * (at[0] >= 0)) for name, x in self._buffer_words.items()}
        words["panels"] = 2 * w * (m_loc + w) * (sent and pc > 1 and m_loc > 0)
        words["sums"] = w * n_loc
        words["parts of sums"] = max((w * (q - 1) * -(-n_loc // q) * sent for q in range(2, pr + 1)), default=0)
        return {name: (size, self.A.dtype) for name, size in words.items()}


@dataclass(frozen=True)
class ReflectorsSchedule(PanelSchedule):
    """The reflectors of F, applied to a matrix X with each column on one rank.

    All ranks gather `width` columns of F, the last ones first, and reflect their local columns of X by products.

    A : the layout of X (m, n), on a grid of one row.   F : the layout of the reflectors (m, k).
    """

    F: Layout = field(kw_only=True)
    algorithm = "reflectors"
    lookahead = 0

    @property
    def flops(self) -> int:
        (m, n), k = self.A.distribution.shape, self.F.distribution.cols.n
        return self.real_flops * 2 * n * k * (2 * m - k)

    @property
    def widest(self) -> int:
        return self.width

    @property
    def columns(self) -> list[slice]:
        """The columns of F that are applied together, in the order in which they are applied."""
        k = self.F.distribution.cols.n
        return [slice(start, min(k, start + self.width)) for start in range(0, k, self.width)][::-1]

    @property
    def events(self) -> int:
        return 2 * len(self.columns)

    def gathering(self, columns: slice) -> Collective:
        """Return the all-gather of columns of F, from the diagonal down, rank by rank."""
        return window_gathering(self.F, *self.factor(columns))

    def factor(self, columns: slice) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the ranges of rows and of columns of F that hold the reflectors of these columns."""
        return (columns.start, self.F.distribution.rows.n), (columns.start, columns.stop)

    def rounds(self) -> Iterator[Round]:
        m, n_loc = self.rows.n, self.cols_from(0)[None]
        for columns in self.columns:
            height, w = m - columns.start, columns.stop - columns.start
            yield from self.gathering(columns).rounds()
            yield Round(
                [], products(grid_of(self.A), height, n_loc + w, w) + products(grid_of(self.A), height, n_loc, w)
            )

    def buffers(self, rank: int | None) -> Buffers:
        m, n_loc, w = self.F.distribution.rows.n, self.A.local_shape(rank)[1], self.width
        return self.on_grid(rank, {"gathered": m * w, "reflectors": m * w, "products": 2 * w * n_loc})


@dataclass(frozen=True)
class PivotedSchedule(HouseholderSchedule):
    """QR with column pivoting: columns of the trailing matrix X are chosen in a sketch G X, exchanged, and eliminated.

    The first rank has the sketch, chooses `width` columns, and broadcasts their numbers; columns are exchanged along
    grid rows.  The owner of the diagonal block orders the chosen columns when it factors their panel, and broadcasts
    their order.  The first rank gathers the panel's rows of R, and updates the sketch by them.  When a sketch is drawn,
    all ranks multiply their parts of X by a random G, and the products are summed up on the first rank.

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
        """The ranks of the grid; the first of them has the sketch."""
        return tuple(grid_of(self.A).ravel().tolist())

    def updates(self, number: int) -> list[tuple[int, int]]:
        return [(self.steps[number].stop, self.n)]

    def chooses(self, number: int) -> bool:
        """Are columns chosen for a panel: is there a panel of this number, and are there more columns than it takes?"""
        return number < len(self.steps) and self.steps[number].stop < self.n

    def moves(self, number: int) -> RowMoves:
        """Return the exchange of columns before a panel."""
        (start, *_), w = self.steps[number], self.steps[number].width
        rest = self.n - start
        chosen = self.chosen[number] if self.chosen else np.random.default_rng(rest).permutation(rest)[:w]
        return RowMoves.to(np.arange(start, self.n), start + beginning_with(np.asarray(chosen, INDEX), rest))

    @property
    def order(self) -> np.ndarray:
        """The order of the columns, without the reordering within each panel by its owner."""
        order = np.arange(self.n)
        for moves in map(self.moves, filter(self.chooses, range(len(self.steps)))):
            order[moves.targets] = order[moves.sources]
        return order

    def summing(self, panel: Panel) -> Collective:
        """Return the reduction of the products of G with parts of X to the first rank; their sum is the sketch."""
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
                yield from telling.rounds()  # the first rank sends that it needs another sketch
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
