"""The schedule of the reduction of a matrix to an upper band, A = Q B P^H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdgemm.schedules.collectives.collective import Collective, even_parts
from pdgemm.schedules.collectives.vectors import SideBySide
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule
from pdgemm.schedules.rounds import Round, counts_of, grid_of, products
from pdgemm.schedules.schedule import Buffers


@dataclass(frozen=True)
class BidiagonalBandSchedule(PanelSchedule):
    """Panels of columns and of rows are gathered by all ranks in turn, factored, and reflect what lies behind them.

    A panel of columns, from its diagonal block on, is (I - V T V^H) R.  The ranks of a grid column sum V^H A for their
    columns, and subtract V T^H V^H A.  Then the adjoint of the panel's rows, behind its diagonal block, is
    (I - U S U^H) L^H; the ranks of a grid row sum A U for their rows, and subtract A U S U^H.

    A (m, n), m >= n, is in square blocks, of which `width` is the size and the number of diagonals above the main one.
    Words per rank on Pr x Pc: m n - n^2/2 + n^2/2 in panels, and at most 2 (n^2/2)/Pc + 2 (m n - n^2/2)/Pr in sums.
    """

    algorithm = "bidiagonal band"
    lookahead = 0

    @property
    def flops(self) -> int:
        m, n = self.A.distribution.shape
        return (4 if self.A.dtype.kind == "c" else 1) * (4 * m * n * n - 4 * n**3 // 3)

    def rows_from(self, start: int) -> np.ndarray:
        """Return the number of rows from an index on, in each grid row."""
        return counts_of(self.A.distribution.rows.window(start, self.A.distribution.rows.n))

    def cols_from(self, start: int) -> np.ndarray:
        """Return the number of columns from an index on, in each grid column."""
        return counts_of(self.A.distribution.cols.window(start, self.n))

    def column_gathering(self, panel: Panel) -> Collective:
        """Return the all-gather of the columns of a panel, from its first row on, rank by rank."""
        counts = np.zeros(self.grid.shape, int)
        counts[:, panel.col] = self.rows_from(panel.start) * panel.width
        return self._gathering(counts)

    def row_gathering(self, panel: Panel) -> Collective:
        """Return the all-gather of the rows of a panel, behind its last column, rank by rank."""
        counts = np.zeros(self.grid.shape, int)
        counts[panel.row] = self.cols_from(panel.stop) * panel.width
        return self._gathering(counts)

    def _gathering(self, counts: np.ndarray) -> Collective:
        return Collective("all_gather", "bruck", self.A.rank_map, tuple(counts.ravel().tolist()), self.A.dtype)

    def column_sums(self, panel: Panel) -> SideBySide:
        """Return the all-reduce, in each grid column, of V^H A."""
        return self._sums(grid_of(self.A).T, self.cols_from(panel.stop) * panel.width)

    def row_sums(self, panel: Panel) -> SideBySide:
        """Return the all-reduce, in each grid row, of A U."""
        return self._sums(grid_of(self.A), self.rows_from(panel.stop) * self.right_reflectors(panel))

    def _sums(self, lines: np.ndarray, words: np.ndarray) -> SideBySide:
        of_lines = zip(map(tuple, lines.tolist()), words.tolist())
        sums = (
            Collective("all_reduce", "halving", ranks, even_parts(number, len(ranks)), self.A.dtype)
            for ranks, number in of_lines
            if number
        )
        return SideBySide(tuple(sums))

    def right_reflectors(self, panel: Panel) -> int:
        """Return the number of reflectors of the rows of a panel: columns of U."""
        return min(panel.width, self.n - panel.stop)

    def rounds(self) -> Iterator[Round]:
        grid, m = grid_of(self.A), self.A.distribution.rows.n
        for panel in self.steps:
            w, k, right = panel.width, self.right_reflectors(panel), self.cols_from(panel.stop)[None, :]
            yield from self.column_gathering(panel).rounds()
            below = self.rows_from(panel.start)[:, None]
            yield Round([], products(grid, m - panel.start, w, 2 * w) + products(grid, below, right, w))
            yield from self.column_sums(panel).rounds()
            yield Round([], products(grid, below, right, w))
            if k:
                yield from self.row_gathering(panel).rounds()
                below = self.rows_from(panel.stop)[:, None]
                yield Round([], products(grid, self.n - panel.stop, w, 2 * k) + products(grid, below, right, k))
                yield from self.row_sums(panel).rounds()
                yield Round([], products(grid, below, right, k))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), w, longest = self.A.local_shape(rank), self.widest, max(self.A.distribution.shape)
        words = {"panel": longest * w, "reflectors": longest * w, "triangles": 2 * w * w}
        words |= dict.fromkeys(("local reflectors", "sums", "multiplied sums"), max(m_loc, n_loc) * w)
        return {name: (size * (rank is None or rank in self.A.rank_map), self.A.dtype) for name, size in words.items()}
