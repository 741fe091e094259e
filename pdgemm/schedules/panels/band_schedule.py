"""The schedule of the reduction of a Hermitian matrix to a band, A = Q B Q^H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdgemm.schedules.collectives.collective import Collective, even_parts
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule
from pdgemm.schedules.rounds import Round, counts_of, grid_of, products
from pdgemm.schedules.schedule import Buffers

SMALLEST = 128  # columns of the tiles on the diagonal


@dataclass(frozen=True)
class BandSchedule(PanelSchedule):
    """All ranks gather the rows of a panel below its diagonal block, and factor them into (I - V T V^H) R.

    Each rank multiplies its elements on and below the diagonal, and those mirrored above it, by its rows of V; the sums
    of these products over all ranks, A V, are all-reduced.  Then each rank has W, and updates its elements on and below
    the diagonal, A - V W^H - W V^H, without a message.

    A is in square blocks, of which `width` is the size and the number of diagonals below the main one that remain.
    Words per rank: n^2/2 in the panels and n^2 in the sums, on any number of ranks.
    """

    algorithm = "band"
    lookahead = 0

    @property
    def flops(self) -> int:
        n = self.n
        return (4 if self.A.dtype.kind == "c" else 1) * 4 * n**3 // 3

    @cached_property
    def reduced(self) -> tuple[Panel, ...]:
        """The panels that have rows below their diagonal block."""
        return tuple(panel for panel in self.steps if panel.stop < self.n)

    def reflectors(self, panel: Panel) -> int:
        """Return the number of reflectors of a panel: columns of V."""
        return min(panel.width, self.n - panel.stop)

    def behind(self, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of rows in each grid row, and of columns in each grid column, behind a panel."""
        rows, cols = (x.window(panel.stop, self.n) for x in (self.A.distribution.rows, self.A.distribution.cols))
        return counts_of(rows), counts_of(cols)

    def gathering(self, panel: Panel) -> Collective:
        """Return the all-gather of the rows of a panel, in the order of the ranks and their rows."""
        counts = np.zeros(self.grid.shape, int)
        counts[:, panel.col] = self.behind(panel)[0] * panel.width
        return Collective("all_gather", "bruck", self.A.rank_map, tuple(counts.ravel().tolist()), self.A.dtype)

    def summing(self, panel: Panel) -> Collective:
        """Return the all-reduce of A V."""
        counts = even_parts((self.n - panel.stop) * self.reflectors(panel), len(self.A.rank_map))
        return Collective("all_reduce", "halving", self.A.rank_map, counts, self.A.dtype)

    def rounds(self) -> Iterator[Round]:
        grid = grid_of(self.A)
        for panel in self.reduced:
            (m_loc, n_loc), m, k = self.behind(panel), self.n - panel.stop, self.reflectors(panel)
            triangle = m_loc[:, None], (n_loc[None, :] + 1) // 2
            yield from self.gathering(panel).rounds()
            yield Round([], products(grid, m, panel.width, 2 * k) + products(grid, *triangle, 2 * k))
            yield from self.summing(panel).rounds()
            yield Round([], products(grid, m, k, 3 * k) + products(grid, *triangle, 2 * k))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), w, n = self.A.local_shape(rank), self.widest, self.n
        words = {
            "panel": n * w,
            "reflectors": n * w,
            "triangles": 2 * w * w,
            "sums": n * w,
            "W": n * w,
            "of rows": 2 * m_loc * w,
            "of columns": 2 * n_loc * w,
            "tile": SMALLEST**2 * 4,
        }
        return {name: (size * (rank is None or rank in self.A.rank_map), self.A.dtype) for name, size in words.items()}
