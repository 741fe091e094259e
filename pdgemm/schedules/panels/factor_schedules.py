"""The schedules of the right-looking factorisations of Cholesky and LU, and of triangular solves and products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from pdgemm.grids.index_map import overlap_counts
from pdgemm.grids.layout import Layout
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.panel_schedule import INDEX, Panel, PanelSchedule, carried, diagonal_panels, lower_tiles
from pdgemm.schedules.panels.row_moves import RowMoves, counts_left, moved
from pdgemm.schedules.panels.tsqr_schedule import Tree, broadcast_tree
from pdgemm.schedules.rounds import COLS, ROWS, Round, broadcast, counts_of, grid_of, products, signals
from pdgemm.schedules.schedule import Buffers
from pdgemm.schedules.staircase import SQUARE, Tile

SMALLEST = 128  # columns of the tiles on the diagonal of an update, where they are not square
FEW = 64  # most blocks of columns of an update whose tiles are cached
ON_DEVICE = 2048  # SMALLEST on a device, where a launch for each small tile takes longer than superfluous flops


@dataclass(frozen=True)
class CholeskySchedule(PanelSchedule):
    """A panel of L is formed from its diagonal block, is broadcast to all ranks, and updates the trailing triangle.

    Rank (i, j) receives two sets of rows of the panel: those with the indices of its local rows, along its grid row;
    and, for the transposed panel, those with the indices of its local columns, along its grid column.
    """

    algorithm = "cholesky"
    bound_factor = 1 / 3

    @property
    def flops(self) -> int:
        return self.real_flops * self.n**3 // 3

    def tiles(self, coords: tuple[int, int], start: int, stop: int) -> Iterable[Tile]:
        """Return a rank's tiles in an update of columns start to stop.  Only on the host, some tiles are square."""
        how = (ON_DEVICE, 0) if self.device else (SMALLEST, SQUARE)
        where = self.rows, self.cols, coords, start, stop, *how
        return _few_tiles(*where) if (stop - start) <= FEW * self.cols.block else lower_tiles(*where)

    def rounds(self) -> Iterator[Round]:
        grid, size = grid_of(self.A), self.A.dtype.itemsize
        pr, pc = grid.shape
        lines, roots = np.tile(grid.T, (pr, 1)), np.repeat(np.arange(pr), pc)  # each rank sends along its grid column
        for panel in self.steps:
            w, m_loc, n_loc = panel.width, self.rows_from(panel.stop), self.cols_from(panel.stop)
            common = overlap_counts(*(x.window(panel.stop, self.n) for x in (self.rows, self.cols)))
            here = np.arange(pc) == panel.col
            if panel.stop == self.n:
                yield Round([], products(grid, 0, 0, 0))
                return
            messages = carried(self.mover, grid[:, [panel.col]].T, panel.row, np.array([w * w]), size, COLS)
            yield Round(messages, products(grid, m_loc[:, None] * here, w, (w + 1) // 2))
            messages = carried(self.mover, grid, panel.col, m_loc * w, size, ROWS)
            messages += broadcast(self.mover, lines, roots, common.ravel() * w, size, COLS)
            for r in np.flatnonzero(m_loc * self.shared):
                messages.append(signals(grid[[r], panel.col], np.delete(grid, r, axis=0).reshape(1, -1), size, COLS))
            yield Round(messages, products(grid, m_loc[:, None], (n_loc[None, :] + 1) // 2, w))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), (pr, pc), w = self.A.local_shape(rank), self.grid.shape, self.widest
        sent = not self.shared
        return {
            "panels": (2 * w * m_loc * (sent and pc > 1), self.A.dtype),
            "transposed panels": (2 * w * n_loc, self.A.dtype),
            "arriving": (2 * w * n_loc * (sent and pr > 1), self.A.dtype),
            "diagonals": (2 * w * w * (sent and pr > 1), self.A.dtype),
        }


@lru_cache(maxsize=256)
def _few_tiles(*where: Any) -> tuple[Tile, ...]:
    """Return the tiles of `lower_tiles`, cached, because computing them takes longer than small updates."""
    return tuple(lower_tiles(*where))


@dataclass(frozen=True)
class LUSchedule(PanelSchedule):
    """One rank gathers, factors and scatters a panel; L is broadcast along grid rows, rows of U along grid columns.

    All rows that the pivots of a panel move from one rank to another are in one message.  In the columns to the right
    of the panel, rows are moved in the panel's step.  In the panels to the left of it they are moved only at the end,
    each row of L to its final place.  A column-major matrix on one rank of the host is one panel, factored in place.

    pivots : row t was exchanged with row pivots[t]; None: pivots are not known, and random rows stand for them.
    idle   : ranks without a position in the grid, which receive the pivots at the end.
    """

    idle: tuple[int, ...] = field(default=(), kw_only=True)
    pivots: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)
    algorithm = "lu"
    bound_factor = 2 / 3
    reaches_idle = True
    exposed_buffers = ("gathered", "pivots")

    @property
    def n(self) -> int:
        """The length of the diagonal."""
        return min(self.A.distribution.shape)

    @property
    def flops(self) -> int:
        (m, n), k = self.A.distribution.shape, self.n
        return self.real_flops * (2 * m * n * k - (m + n) * k * k + 2 * k**3 // 3)

    @cached_property
    def exchanged(self) -> np.ndarray:
        """The pivots, or random rows if the pivots are not known."""
        if self.pivots is not None:
            return np.array(self.pivots)
        return np.random.default_rng(0).integers(np.arange(self.n), self.rows.n)

    @cached_property
    def in_place(self) -> bool:
        """Whether the matrix is column-major, on a grid of one rank on the host."""
        return self.A.order == "F" and self.grid.shape == (1, 1) and not self.device

    @cached_property
    def steps(self) -> tuple[Panel, ...]:
        return diagonal_panels(self.rows, self.cols, self.n if self.in_place else self.width)

    @property
    def to_idle(self) -> Tree:
        """The tree that broadcasts the pivots to the idle ranks."""
        return broadcast_tree((self.A.rank(0, 0), *self.idle), self.n, INDEX)

    @property
    def last_rank(self) -> int:
        return max(*self.A.rank_map, *self.idle, 0)

    def rounds(self) -> Iterator[Round]:
        grid, size = grid_of(self.A), self.A.dtype.itemsize
        (m, n), pivots = self.A.distribution.shape, self.exchanged
        pivots_by = RING.name if self.device else self.mover  # the pivots are on the host
        exchanges = [RowMoves.of(pivots[x.start : x.stop], x.start) for x in self.steps]
        for panel, exchange in zip(self.steps, exchanges):
            w = panel.width
            with_diagonal, behind = self.rows_from(panel.start), self.rows_from(panel.stop)
            right = self.cols_from(panel.stop)
            owner = np.zeros(grid.shape, int)
            owner[panel.row, panel.col] = m - panel.start
            yield Round([] if self.in_place else self.gathered(panel), products(grid, owner, w, (w + 1) // 2))
            column, one = grid[:, [panel.col]].T, np.array([w])
            sent = [] if self.in_place else self.gathered(panel, back=True)
            sent += carried(pivots_by, column, panel.row, one, INDEX.itemsize, COLS)
            sent += carried(pivots_by, grid, panel.col, np.full(len(grid), w), INDEX.itemsize, ROWS)
            if panel.stop < n:
                sent += carried(self.mover, grid, panel.col, with_diagonal * w, size, ROWS)
            sent += exchange.sent(self.rows, grid, right, size)
            if panel.stop < m:
                sent += carried(self.mover, grid.T, panel.row, right * w, size, COLS)
            yield Round(sent, products(grid, behind[:, None], right, w))
        for panel, counts in counts_left(self.steps, exchanges, self.rows):
            widths = panel.width * (np.arange(self.cols.parts) == panel.col)
            yield Round(moved(counts, grid, widths, size), hidden=False)
        if self.idle and self.n:
            yield from self.to_idle.rounds()

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), (pr, pc), w, dtype = self.A.local_shape(rank), self.grid.shape, self.widest, self.A.dtype
        sent, moved = not self.shared, max(min(2 * w, m_loc) * n_loc, m_loc * w)
        gathers, others = sent and pr > 1, self.rows.n - (0 if rank is None else m_loc)
        return {
            "gathered": (self.rows.n * w * (not self.in_place), dtype),
            "parts of panels": (max(2 * m_loc, others) * w * gathers, dtype),
            "pivots": (self.n * (not self.device), INDEX),
            "panels": (2 * w * m_loc * (sent and pc > 1), dtype),
            "rows of U": (2 * w * n_loc * (sent and pr > 1), dtype),
            "leaving rows": (moved, dtype),
            "arriving rows": (moved * (pr > 1), dtype),
        }


@dataclass(frozen=True)
class TriangularSchedule(PanelSchedule):
    """Block row k of X (solve) or B (product) is broadcast along grid columns, A's panel k along grid rows.

    B      : layout of the right-hand sides, whose rows are distributed as A's rows.
    lower  : A is lower triangular, and panels are used from the first to the last; otherwise upper, from the last.
    solves : a solve: X overwrites B; otherwise a product: B stays as it is, and C is formed in B's layout.
    inverse : B is the identity; each step leaves out the columns of B that are still zero.
    """

    B: Layout
    lower: bool
    solves: bool = True
    inverse: bool = field(default=False, kw_only=True)

    @property
    def algorithm(self) -> str:  # type: ignore[override]
        return "trsm" if self.solves else "trmm"

    @property
    def orders(self) -> dict[str, str]:
        return {"A": self.A.order, "B": self.B.order}

    @property
    def flops(self) -> int:
        n, m = self.n, self.B.distribution.cols.n
        return self.real_flops * (n**3 // 3 if self.inverse else n * n * m)

    @cached_property
    def steps(self) -> tuple[Panel, ...]:
        panels = diagonal_panels(self.rows, self.cols, self.width)
        return panels if self.lower else panels[::-1]

    def rest(self, panel: Panel) -> tuple[int, int]:
        """Return the range of rows (start, stop) that a panel updates."""
        return (panel.stop, self.n) if self.lower else (0, panel.start)

    def columns(self, panel: Panel) -> tuple[int, int]:
        """Return the range of columns of B that are not zero in the rows of a panel, once these rows are solved for."""
        whole = self.B.distribution.cols.n
        if not self.inverse:
            return 0, whole
        return (0, panel.stop) if self.lower else (panel.start, whole)

    def rounds(self) -> Iterator[Round]:
        grid, a_size, b_size = grid_of(self.A), self.A.dtype.itemsize, self.B.dtype.itemsize
        for panel in self.steps:
            w, m_loc = panel.width, counts_of(self.rows.window(*self.rest(panel)))
            n_loc = counts_of(self.B.distribution.cols.window(*self.columns(panel)))
            here = np.arange(len(grid)) == panel.row
            block = np.array([w * w])
            diagonal = carried(self.mover, grid[[panel.row]], panel.col, block, a_size, ROWS, ready=True)
            yield Round(diagonal, products(grid, here[:, None] * w, n_loc[None, :], (w + 1) // 2))
            messages = carried(self.mover, grid, panel.col, m_loc * w, a_size, ROWS, ready=True)
            if m_loc.any():
                messages += carried(self.mover, grid.T, panel.row, n_loc * w, b_size, COLS, ready=not self.solves)
            yield Round(messages, products(grid, m_loc[:, None], n_loc[None, :], w))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, _), (_, n_loc), (pr, pc), w = (
            self.A.local_shape(rank), self.B.local_shape(rank), self.grid.shape, self.widest,
        )  # fmt: skip
        sent = not self.shared
        return {
            "panels": (2 * w * m_loc * (sent and pc > 1), self.A.dtype),
            "rows": (2 * w * n_loc * (sent and pr > 1), self.B.dtype),
            "diagonals": (2 * w * w * (sent and pc > 1), self.A.dtype),
            "triangle": (w * w, self.B.dtype),
            "conjugate": (w * m_loc * self.A.conjugated, self.A.dtype),
        }
