"""The schedule of triangular solves, A X = B, and of triangular products, C := A B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pdgemm.grids.layout import Layout
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule, carried, diagonal_panels
from pdgemm.schedules.rounds import COLS, ROWS, Round, counts_of, grid_of, products
from pdgemm.schedules.schedule import Buffers


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
