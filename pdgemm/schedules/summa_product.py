"""SUMMA with C stationary, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.instrument.recorder import Transfer
from pdgemm.model.formulas import broadcasts
from pdgemm.schedules.node_relay import Line, relayed
from pdgemm.schedules.product import Buffers, Product
from pdgemm.schedules.rounds import Round, broadcast, counts_of, grid_of, on_grid, relay
from pdgemm.schedules.steps import Bundle, PanelStep, bundled, one_run, panel_counts, summa_steps, widest_panel

BUNDLE = 128  # thinner panels are multiplied together, up to this width at least: BLAS is slow on thin ones
CACHE_BYTES = 1 << 25  # to a block of C so large they are added twice as wide: it is read and written each time
_BUNDLES = 8  # but where there are many, so that later ones travel while the first is multiplied


def bundle_width(k: int, width: int, c_bytes: int) -> int:
    """How many inner indices are multiplied at once where panels are thin, none wider than `width`.

    c_bytes : of the block of C that the products are added to.
    """
    return min(k, width, max(BUNDLE if c_bytes < CACHE_BYTES else 2 * BUNDLE, k // _BUNDLES))


@dataclass(frozen=True)
class Summa(Product):
    """C stationary; panels of A travel along grid rows, panels of B along grid columns.

    A, B and C lie on one grid; C's row map is A's, C's column map is B's.
    """

    nodes: tuple[int, ...] = ()  # of each rank, where panels are read in place but not all ranks are on one node
    algorithm = "summa"

    @property
    def in_place(self) -> bool:
        return self.shared and not self.nodes

    @property
    def lent_buffers(self) -> tuple[str, ...]:
        return ("panels of A", "panels of B") if self.nodes else ()

    @property
    def stays(self) -> bool:
        return self.A.distribution.cols.parts == self.B.distribution.rows.parts == 1

    @property
    def sums_in_c(self) -> bool:
        """A device's BLAS adds up in float32, and rounds once to 16-bit numbers, if it is one product."""
        at_once = self.device and self.panel_dtype == self.C.dtype and self.widest_bundle >= self.mnk[2]
        return bool(super().sums_in_c or at_once)

    @cached_property
    def panels(self) -> int:
        return int(self._counts.sum())

    @property
    def steps(self) -> tuple[PanelStep, ...]:
        return summa_steps(self.A.distribution.cols, self.B.distribution.rows, self._width)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The panels that are multiplied together."""
        return bundled(self.steps, self.widest_bundle if self.bundled else 1)

    @cached_property
    def bundled(self) -> bool:
        """Are panels so thin that several are multiplied at once?"""
        return 2 * self.widest <= self._bundle and not (self.A.conjugated or self.B.conjugated)

    @property
    def widest_bundle(self) -> int:
        return self._bundle if self.bundled else self.widest

    @property
    def product_width(self) -> int:
        return self.widest_bundle

    @cached_property
    def _width(self) -> int:
        a, b = self.A.distribution.rows.largest, self.B.distribution.cols.largest
        return self._message_width(self.width, (a, self.A.dtype), (b, self.B.dtype))

    @cached_property
    def _bundle(self) -> int:
        c_bytes = self.C.distribution.rows.largest * self.C.distribution.cols.largest * self.accumulate.itemsize
        return bundle_width(self.mnk[2], self._width, c_bytes)

    @cached_property
    def _counts(self) -> np.ndarray:
        return panel_counts(self.A.distribution.cols, self.B.distribution.rows, self._width)

    @cached_property
    def widest(self) -> int:
        return widest_panel(self.A.distribution.cols, self.B.distribution.rows, self._width)

    @property
    def total_words(self) -> int:
        m, n, k = self.mnk
        pr, pc = self.C.distribution.grid_shape
        return m * k * (pc - 1) + k * n * (pr - 1)

    @property
    def slots(self) -> int:
        """Panels, or bundles of them, held at once: the one in use and those in flight behind it."""
        if (self.in_place and not self.fetched) or self.widest_bundle >= self.mnk[2]:
            return 1
        return min(self.lookahead + 1 + self.spare, max(1, len(self.bundles) if self.nodes else self.panels))

    def rounds(self) -> Iterator[Round]:
        """For each bundle its panels from their owners to all other ranks of their rows and columns, then a product."""
        grid, rows, cols = grid_of(self.C), self.A.distribution.rows, self.B.distribution.cols
        size_a, size_b = self.A.dtype.itemsize, self.B.dtype.itemsize
        high, wide = counts_of(rows), counts_of(cols)
        along_rows = [self.line("A", rank) for rank in grid[:, 0].tolist()]
        along_cols = [self.line("B", rank) for rank in grid[0].tolist()]
        for turn, bundle in enumerate(self.bundles):
            messages = []
            for step in bundle.steps:
                if self.nodes:
                    messages += relay(along_rows, grid, step.col, turn, high * step.width, size_a)
                    messages += relay(along_cols, grid.T, step.row, turn, wide * step.width, size_b)
                else:
                    messages += broadcast(self.mover, grid, step.col, high * step.width, size_a)
                    messages += broadcast(self.mover, grid.T, step.row, wide * step.width, size_b)
            yield Round(messages, on_grid(grid, high[:, None], wide[None, :], bundle.width))

    def transfers(self, rank: int) -> list[Transfer]:
        """A's panels along the rank's row, B's along its column.

        Words in: m_loc (k - k_loc) of A and n_loc (k - k_loc) of B, where k_loc inner indices are its own.
        """
        (i, j), (row, col, _) = self.C.coords(rank), self.grid.strides
        A, B = self.A.distribution, self.B.distribution
        if self.nodes and i >= 0:
            left = [([(x.col, x.a) for x in bundle.steps], bundle.a) for bundle in self.bundles]
            right = [([(x.row, x.b) for x in bundle.steps], bundle.b) for bundle in self.bundles]
            along_row = relayed(A.rows.count(i), left, self.line("A", rank), j)
            along_col = relayed(B.cols.count(j), right, self.line("B", rank), i)
            return [
                Transfer(self.mover, along_row, self.A.dtype.itemsize, row, A.cols.parts),
                Transfer(self.mover, along_col, self.B.dtype.itemsize, col, B.rows.parts),
            ]
        along_row = broadcasts(A.rows.count(i), A.cols, self._counts.sum(axis=1), self.mover, j)
        along_col = broadcasts(B.cols.count(j), B.rows, self._counts.sum(axis=0), self.mover, i)
        return [
            Transfer(self.mover, along_row, self.A.dtype.itemsize, row, A.cols.parts),
            Transfer(self.mover, along_col, self.B.dtype.itemsize, col, B.rows.parts),
        ]

    def line(self, name: str, rank: int) -> Line:
        """The nodes along the row of a rank (A), or its column (B)."""
        i, j = self.C.coords(rank)
        if name == "A":
            places = [self.A.rank(i, q) for q in range(self.A.distribution.cols.parts)]
        else:
            places = [self.B.rank(q, j) for q in range(self.B.distribution.rows.parts)]
        return Line(tuple(self.nodes[place] if self.nodes else 0 for place in places))

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        return *self.C.local_shape(rank), self.mnk[2]

    def copied(self, rank: int) -> int:
        """Its own panels are packed where they travel; of those that are read in place, what is not one run."""
        pr, pc = self.C.distribution.grid_shape
        if self.in_place:
            (m, n, k), (a, b) = self.local_shape(rank), self._packs
            return k * (a * m * self.A.dtype.itemsize + b * n * self.B.dtype.itemsize) + super().copied(rank)
        packed = (pc > 1) * self.A.local_bytes(rank) + (pr > 1) * self.B.local_bytes(rank)
        return packed + super().copied(rank)

    @cached_property
    def _packs(self) -> tuple[bool, bool]:
        """Are panels of A, and of B, put into a buffer?"""
        inner_a, inner_b = self.A.distribution.cols, self.B.distribution.rows
        return not self._lie(inner_a, inner_b, "a"), not self._lie(inner_b, inner_a, "b")

    def _lie(self, inner: BlockCyclic, other: BlockCyclic, panel: str) -> bool:
        """Are all panels of one operand multiplied where they lie?

        One that stays in its row (A, Pc = 1), or is read in place, is if it is one run of columns.  So is a bundle of
        them that stay: thin panels are whole, one for each owner, and follow each other where each owner has one run.
        """
        stay = inner.parts == 1
        if self.nodes and not stay:
            return False
        if not (stay or (self.shared and not self.fetched)) or (stay and one_run(other)):
            return stay
        return all(getattr(x, panel).contiguous and (stay or len(x.steps) == 1) for x in self.bundles)

    def staging(self, rank: int | None) -> Buffers:
        if self.mover == "nccl":
            return {}
        buffers, (pr, pc) = self.buffers(rank), self.C.distribution.grid_shape
        (words_a, of_a), (words_b, of_b) = buffers["panels of A"], buffers["panels of B"]
        return {"staged A": ((pc > 1) * words_a, of_a), "staged B": ((pr > 1) * words_b, of_b)}

    def buffers(self, rank: int | None) -> Buffers:
        m_loc, n_loc = self.C.local_shape(rank)
        a, b = self._packs
        sums = 0 if self.sums_in_c or not self.mnk[2] else m_loc * n_loc
        return {
            "panels of A": (a * self.slots * self.widest_bundle * m_loc, self.A.dtype),
            "panels of B": (b * self.slots * self.widest_bundle * n_loc, self.B.dtype),
            "converted A": (self.converts(self.A, self.C.order) * self.widest_bundle * m_loc, self.panel_dtype),
            "converted B": (self.converts(self.B, self.C.order) * self.widest_bundle * n_loc, self.panel_dtype),
            "sums": (sums, self.accumulate),
            "update": self._update(sums),
            "exact": (self._exact(m_loc, n_loc), self.panel_dtype),
        }
