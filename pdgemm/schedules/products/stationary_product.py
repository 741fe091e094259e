"""The schedule of SUMMA with A stationary; SUMMA with B stationary is the same schedule for C^T = B^T A^T."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdgemm.instrument.recorder import Transfer
from pdgemm.schedules.formulas import broadcasts, reductions
from pdgemm.schedules.products.product import Collective, Product, alike, indices_of_parts
from pdgemm.schedules.rounds import COLS, ROWS, Messages, Round, broadcast, counts_of, grid_of, products, reduce
from pdgemm.schedules.schedule import Buffers
from pdgemm.schedules.steps import PanelStep, in_one_run_each, panel_counts, summa_steps, widest_panel

STAGED = {"staged B": "panels of B", "staged C": "sums"}


@dataclass(frozen=True)
class Stationary(Product):
    """A is stationary; panels of B are broadcast along grid columns, panels of C are reduced along grid rows.

    A and C are on one grid, and have the same row distribution.  B is on the transposed grid: the rank at (i, j) holds
    part (j, i) of B.  The rows of B are distributed as the columns of A; the columns of B, and of C, in any way.

    On a P x 1 grid this is an all-gather of B and a product, on a 1 x P grid a product and a reduce-scatter of C.
    """

    algorithm = "stationary_a"
    staged_names = STAGED

    def fits(self, size: int) -> bool:
        a, b, c = (x.distribution for x in (self.A, self.B, self.C))
        alike_on = self.A.grid == self.C.grid and self.B.grid == self.A.T.grid
        return alike(a.rows, c.rows) and alike(a.cols, b.rows) and alike_on

    @property
    def collective(self) -> Collective:
        pr, pc = self.C.distribution.grid_shape
        return "allgather" if pc == 1 else "reduce_scatter" if pr == 1 else ""

    @cached_property
    def in_c(self) -> bool:
        """Are products formed in C itself?  Yes if no sums are sent, and each panel of B is one run of C's columns."""
        b, c = self.B.distribution.cols, self.C.distribution.cols
        return self.sums_in_c and c.parts == 1 and in_one_run_each(c, b, self._width)

    @cached_property
    def _lies(self) -> bool:
        """Is each panel of B multiplied in place, in its owner's memory?"""
        b, c = self.B.distribution.cols, self.C.distribution.cols
        readable = b.parts == 1 or (self.transport.in_place and not self.transport.fetched)
        return readable and in_one_run_each(b, c, self._width)

    @property
    def first_panel_is_local(self) -> bool:
        """Does each rank begin with local panels, or read all panels in place?

        A rank cannot begin with its local panels if sums are sent: then all ranks need the same order.
        """
        return self.transport.in_place or (self.in_c and self.ahead > 1)

    @cached_property
    def panels(self) -> int:
        return int(self._counts.sum())

    @property
    def steps(self) -> tuple[PanelStep, ...]:
        """The panels of columns: the map `a` of a step belongs to the panel of C, and its map `b` to that of B."""
        return summa_steps(self.C.distribution.cols, self.B.distribution.cols, self._width)

    def columns(self, step: PanelStep) -> np.ndarray:
        """Return the columns of B, and of C, in a panel."""
        return self.B.distribution.cols.to_global(step.b.indices()[0], step.row)

    def order(self, rank: int) -> tuple[PanelStep, ...]:
        """Return the panels in the order in which a rank multiplies them; ranks of a grid row have the same order.

        Where ranks copy panels of B from their owners, each grid row begins with its local panels, as in `Summa.order`.
        """
        i = self.C.coords(rank)[0]
        first = next((n for n, step in enumerate(self.steps) if step.row == i), 0) if self.transport.fetched else 0
        return self.steps[first:] + self.steps[:first]

    @cached_property
    def _width(self) -> int:
        m_loc, k_loc = self.A.distribution.rows.largest, self.A.distribution.cols.largest
        return self._message_width(self.width, (m_loc, self.accumulate), (k_loc, self.B.dtype))

    @cached_property
    def _counts(self) -> np.ndarray:
        return panel_counts(self.C.distribution.cols, self.B.distribution.cols, self._width)

    @cached_property
    def widest(self) -> int:
        return widest_panel(self.C.distribution.cols, self.B.distribution.cols, self._width)

    @property
    def slots(self) -> int:
        """The number of panels held at once: panels of C in reduction, the panel in use, panels of B in flight."""
        if self.in_c and self._lies:
            return 1
        held = self.lookahead + 1 if self.in_c else max(2, 2 * self.lookahead + 1)
        return min(held + self.spare, max(1, self.panels))

    @property
    def converted_width(self) -> int:
        """The number of inner indices of A that are converted at a time."""
        return max(1, min(self.width, self.A.distribution.cols.largest))

    def rounds(self) -> Iterator[Round]:
        """Yield for each panel a broadcast of B, a product, and a reduction of C that overlaps the next product."""
        if not self.mnk[2]:
            return
        grid = grid_of(self.C)
        m_loc, k_loc = counts_of(self.A.distribution.rows), counts_of(self.A.distribution.cols)
        reduced: list[Messages] = []
        for step in self.steps:
            messages = broadcast(self.mover, grid.T, step.row, k_loc * step.width, self.B.dtype.itemsize, COLS)
            yield Round(reduced + messages, products(grid, m_loc[:, None], step.width, k_loc[None, :]))
            reduced = reduce(grid, step.col, m_loc * step.width, self.accumulate.itemsize)
        yield Round(reduced)

    def transfers(self, rank: int) -> list[Transfer]:
        """Return the traffic along the grid column and the grid row.

        A rank receives k_loc (n - n_loc) words of B, and m_loc n_loc words of C from each other rank of its grid row.
        """
        (i, j), strides = self.C.coords(rank), self.grid.strides
        if i < 0 or not self.mnk[2]:
            return []
        A, B, C = self.A.distribution, self.B.distribution, self.C.distribution
        along_col = broadcasts(A.cols.count(j), B.cols, self._counts.sum(axis=0), self.mover, i)
        along_row = reductions(A.rows.count(i), C.cols, self._counts.sum(axis=1), j)
        return [
            Transfer(self.mover, along_col, self.B.dtype.itemsize, strides[COLS], B.cols.parts),
            Transfer("reduce", along_row, self.accumulate.itemsize, strides[ROWS], C.cols.parts),
        ]

    def reach(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        rows, cols = indices_of_parts(getattr(self, name))
        return (rows, cols) if name == "A" else (rows, [np.arange(self.mnk[1])] * len(cols))

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        m_loc, k_loc = self.A.local_shape(rank)
        return m_loc, self.mnk[1], k_loc

    def block_mnk(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        return m, min(n, self.widest), k

    def copied(self, rank: int) -> int:
        """Return the bytes of B packed for messages, of partial sums of C, and of reduced sums that are added to C."""
        m_loc = self.A.local_shape(rank)[0]
        packed = self.B.local_bytes(rank) * (not self._lies)
        sums = 0 if self.in_c else m_loc * (self.mnk[1] + self.C.local_shape(rank)[1]) * self.accumulate.itemsize
        return packed + sums

    def staged_buffers(self, rank: int | None) -> Buffers:
        """Return the host buffers of messages: partial sums are sent also where panels of B are read in place."""
        if self.staged and self.transport.shared:
            return {"staged C": self.buffers(rank)["sums"]}
        return super().staged_buffers(rank)

    def buffers(self, rank: int | None) -> Buffers:
        m_loc, k_loc = self.A.local_shape(rank)
        most = self.slots * self.widest * bool(self.mnk[2])
        width = self.widest * bool(self.mnk[2])
        mnk = m_loc, width, self.converted_width
        in_panels = not self.in_c
        return {
            "panels of B": (most * k_loc * (not self._lies), self.B.dtype),
            "panels of C": (most * m_loc * in_panels, self.accumulate),
            "sums": (most * m_loc * (self.C.distribution.cols.parts > 1), self.accumulate),
            **self.arithmetic.buffers(mnk, self.A, self.B, self.C.order),
            "update": self.arithmetic.update(width * m_loc * in_panels),
        }
