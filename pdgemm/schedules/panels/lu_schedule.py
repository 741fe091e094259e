"""The schedule of the right-looking LU factorisation with partial pivoting, P A = L U."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.panel_schedule import PanelSchedule, carried
from pdgemm.schedules.panels.row_moves import RowMoves, moves_left
from pdgemm.schedules.panels.tsqr_schedule import Tree, broadcast_tree
from pdgemm.schedules.rounds import COLS, ROWS, Round, grid_of, products
from pdgemm.schedules.schedule import Buffers

INDEX = np.dtype(np.int64)


@dataclass(frozen=True)
class LUSchedule(PanelSchedule):
    """One rank gathers, factors and scatters a panel; L is broadcast along grid rows, rows of U along grid columns.

    All rows that the pivots of a panel move from one rank to another are in one message: at once in the columns behind
    the panel, and at the end in the panels before it, where each row of L then moves to its final place.

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
        for panel in self.steps:
            w = panel.width
            with_diagonal, behind = self.rows_from(panel.start), self.rows_from(panel.stop)
            right = self.cols_from(panel.stop)
            owner = np.zeros(grid.shape, int)
            owner[panel.row, panel.col] = m - panel.start
            yield Round(self.gathered(panel), products(grid, owner, w, (w + 1) // 2))
            column, one = grid[:, [panel.col]].T, np.array([w])
            sent = self.gathered(panel, back=True) + carried(pivots_by, column, panel.row, one, INDEX.itemsize, COLS)
            sent += carried(pivots_by, grid, panel.col, np.full(len(grid), w), INDEX.itemsize, ROWS)
            if panel.stop < n:
                sent += carried(self.mover, grid, panel.col, with_diagonal * w, size, ROWS)
            sent += RowMoves.of(pivots[panel.start : panel.stop], panel.start).sent(self.rows, grid, right, size)
            if panel.stop < m:
                sent += carried(self.mover, grid.T, panel.row, right * w, size, COLS)
            yield Round(sent, products(grid, behind[:, None], right, w))
        for panel, moves in moves_left(self.steps, pivots, m):
            widths = panel.width * (np.arange(self.cols.parts) == panel.col)
            yield Round(moves.sent(self.rows, grid, widths, size), hidden=False)
        if self.idle and self.n:
            yield from self.to_idle.rounds()

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), (pr, pc), w, dtype = self.A.local_shape(rank), self.grid.shape, self.widest, self.A.dtype
        sent, moved = not self.shared, max(min(2 * w, m_loc) * n_loc, m_loc * w)
        gathers, others = sent and pr > 1, self.rows.n - (0 if rank is None else m_loc)
        return {
            "gathered": (self.rows.n * w, dtype),
            "parts of panels": (max(2 * m_loc, others) * w * gathers, dtype),
            "pivots": (self.n * (not self.device), INDEX),
            "panels": (2 * w * m_loc * (sent and pc > 1), dtype),
            "rows of U": (2 * w * n_loc * (sent and pr > 1), dtype),
            "leaving rows": (moved, dtype),
            "arriving rows": (moved * (pr > 1), dtype),
        }
