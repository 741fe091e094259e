"""The schedule of the right-looking Cholesky factorisation, A = L L^H."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pdgemm.grids.index_map import overlap_counts
from pdgemm.schedules.panels.panel_schedule import PanelSchedule, carried, lower_tiles
from pdgemm.schedules.rounds import COLS, ROWS, Round, broadcast, grid_of, products, signals
from pdgemm.schedules.schedule import Buffers
from pdgemm.schedules.staircase import SQUARE, Tile

SMALLEST = 128  # columns of the tiles on the diagonal of an update, where they are not square
FEW = 64  # most blocks of columns of an update whose tiles are remembered
ON_DEVICE = 2048  # the same on a device, where each tile is a launch: it takes longer than the flops that are too many


@dataclass(frozen=True)
class CholeskySchedule(PanelSchedule):
    """A panel of L is formed from its diagonal block, is broadcast to all ranks, and updates the trailing triangle.

    Rank (i, j) receives the panel's rows with the indices of its own rows along its grid row and, for the transposed
    panel, the panel's rows with the indices of its own columns along its grid column.
    """

    algorithm = "cholesky"
    bound_factor = 1 / 3

    @property
    def flops(self) -> int:
        return self.real_flops * self.n**3 // 3

    def tiles(self, coords: tuple[int, int], start: int, stop: int) -> Iterable[Tile]:
        """Return the tiles of an update of columns start to stop on a rank; a device forms no squares by herk."""
        how = (ON_DEVICE, 0) if self.device else (SMALLEST, SQUARE)
        where = self.rows, self.cols, coords, start, stop, *how
        return _few_tiles(*where) if (stop - start) <= FEW * self.cols.block else lower_tiles(*where)

    def rounds(self) -> Iterator[Round]:
        grid, size = grid_of(self.A), self.A.dtype.itemsize
        pr, pc = grid.shape
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
            for r in range(pr):
                messages += broadcast(self.mover, grid.T, r, common[r] * w, size, COLS)
                if self.shared and m_loc[r]:
                    messages.append(
                        signals(grid[[r], panel.col], np.delete(grid, r, axis=0).reshape(1, -1), size, COLS)
                    )
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
    """Return the tiles of `lower_tiles`, which take longer to find than small ones to compute."""
    return tuple(lower_tiles(*where))
