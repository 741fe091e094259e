"""The schedule of SUMMA with C stationary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.instrument.recorder import Transfer
from pdgemm.local.arrays.alignment import apart
from pdgemm.schedules.formulas import broadcasts
from pdgemm.schedules.node_relay import NodeLine, Parts, parts_by_number, relayed
from pdgemm.schedules.products.product import PANELS_STAGED, Collective, Product, alike
from pdgemm.schedules.rounds import COLS, ROWS, Round, broadcast, counts_of, grid_of, products, relay
from pdgemm.schedules.schedule import Buffers
from pdgemm.schedules.steps import (
    Bundle,
    PanelStep,
    bundled,
    in_one_run_each,
    one_run,
    panel_counts,
    summa_steps,
    widest_panel,
)
from pdgemm.support.members import remembered

BUNDLE = 128  # least width of a bundle if k and the plan's width allow it: BLAS is slow on thin panels
CACHE_BYTES = 1 << 25  # bytes of C per rank above which bundles are twice as wide: each bundle reads and writes C
_WORTH_COPYING = 1 << 32  # a product of so many multiplications takes a device some 50 us more if rows are not aligned
_BUNDLES = 8  # number of bundles if k is large: later bundles are sent while the first bundle is multiplied


def _most_alike(numbers: np.ndarray) -> int:
    """Return how often a number occurs in one row, at most."""
    rows, numbers = np.arange(len(numbers))[:, None], numbers - numbers.min()
    return int(np.bincount((rows * (numbers.max() + 1) + numbers).ravel()).max())


@dataclass(frozen=True)
class Summa(Product):
    """C is stationary; panels of A are broadcast along grid rows, panels of B along grid columns.

    A, B and C are on one grid; C has the row distribution of A and the column distribution of B.
    """

    algorithm = "summa"
    staged_names = PANELS_STAGED

    @property
    def collective(self) -> Collective:
        return "allgather" if 1 in self.C.distribution.grid_shape else ""

    @cached_property
    def exposed_buffers(self) -> tuple[str, ...]:
        return ("panels of A", "panels of B") if self.nodes else ()

    def fits(self, size: int) -> bool:
        a, b, c = (x.distribution for x in (self.A, self.B, self.C))
        return alike(a.rows, c.rows) and alike(b.cols, c.cols) and self.A.grid == self.B.grid == self.C.grid

    @cached_property
    def nothing_travels(self) -> bool:
        return self.A.distribution.cols.parts == self.B.distribution.rows.parts == 1

    @cached_property
    def sums_in_c(self) -> bool:
        """Are products accumulated in C itself?

        A device's BLAS accumulates 16-bit elements in float32, and rounds once if the product is one call.
        """
        at_once = self.device and self.panel_dtype == self.C.dtype and self.widest_bundle >= self.mnk[2]
        return bool(super().sums_in_c or at_once)

    @cached_property
    def panels(self) -> int:
        return int(self._counts.sum())

    @cached_property
    def steps(self) -> tuple[PanelStep, ...]:
        return summa_steps(self.A.distribution.cols, self.B.distribution.rows, self._width)

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """The groups of panels that are multiplied together."""
        return bundled(self.steps, self.widest_bundle if self.bundled else 1)

    def inner(self, bundle: Bundle) -> np.ndarray:
        """Return the inner indices of a bundle, in the order of its panels."""
        inner = self.A.distribution.cols
        return np.concatenate([inner.to_global(x.a.indices()[0], x.col) for x in bundle.steps])

    def order(self, rank: int) -> tuple[Bundle, ...]:
        """Return the bundles in the order in which a rank multiplies them.

        Where ranks copy panels from their owners, ranks begin at different bundles, in cyclic order, because otherwise
        all ranks would share one owner's link.  The ranks then add up the same products in different orders.
        """
        if not self.transport.fetched or not self.bundles:
            return self.bundles
        (i, j), (down, right) = self.C.coords(rank), self._apart
        first = (i * down + j * right) % len(self.bundles)
        return self.bundles[first:] + self.bundles[:first]

    @cached_property
    def _apart(self) -> tuple[int, int]:
        """The offsets between the first bundles of neighbours in a grid column, and of neighbours in a grid row.

        They are chosen so that few ranks copy from one owner at the same time.
        """
        (pr, pc), owners = self.C.distribution.grid_shape, [(x.steps[0].col, x.steps[0].row) for x in self.bundles]
        pairs = len(set(owners))

        def shared(apart: tuple[int, int]) -> int:
            """Return the most ranks of a grid row, or grid column, that copy from one owner at the same time."""
            down, right = (np.arange(len(owners))[:, None] + np.arange(n) * x for n, x in zip((pr, pc), apart))
            cols, rows = np.array(owners).T
            return max(map(_most_alike, (rows[down % len(owners)], cols[right % len(owners)])))

        return min([(1, 1), (max(1, pairs // pr), max(1, pairs // pc))], key=shared)

    @cached_property
    def bundled(self) -> bool:
        """Are panels so thin that several are multiplied at once?  Then each owner pair has one panel."""
        return 2 * self.widest <= self._bundle and not (self.A.conjugated or self.B.conjugated)

    @cached_property
    def widest_bundle(self) -> int:
        return self._bundle if self.bundled else self.widest

    @cached_property
    def product_width(self) -> int:
        return self.widest_bundle

    @cached_property
    def _width(self) -> int:
        a, b = self.A.distribution.rows.largest, self.B.distribution.cols.largest
        return self._message_width(self.width, (a, self.A.dtype), (b, self.B.dtype))

    @cached_property
    def _bundle(self) -> int:
        """The width of a bundle, in which thin panels are multiplied together."""
        k, C = self.mnk[2], self.C.distribution
        c_bytes = C.rows.largest * C.cols.largest * self.accumulate.itemsize
        return min(k, self._width, max(BUNDLE if c_bytes < CACHE_BYTES else 2 * BUNDLE, k // _BUNDLES))

    @cached_property
    def _counts(self) -> np.ndarray:
        return panel_counts(self.A.distribution.cols, self.B.distribution.rows, self._width)

    @cached_property
    def widest(self) -> int:
        return widest_panel(self.A.distribution.cols, self.B.distribution.rows, self._width)

    @cached_property
    def slots(self) -> int:
        """The number of panels, or bundles, held at once: the panel in use, and later panels in flight."""
        if (self.transport.in_place and not self.transport.fetched) or self.widest_bundle >= self.mnk[2]:
            return 1
        return min(
            self.lookahead + 1 + self.spare, max(1, len(self.bundles) if self.nodes and self.bundled else self.panels)
        )

    def rounds(self) -> Iterator[Round]:
        """Yield for each bundle the broadcasts of its panels along grid rows and columns, then a product."""
        grid, rows, cols = grid_of(self.C), self.A.distribution.rows, self.B.distribution.cols
        size_a, size_b = self.A.dtype.itemsize, self.B.dtype.itemsize
        m_loc, n_loc = counts_of(rows), counts_of(cols)
        along_rows = [self.line("A", rank) for rank in grid[:, 0].tolist()]
        along_cols = [self.line("B", rank) for rank in grid[0].tolist()]
        for turn, bundle in enumerate(self.bundles):
            messages = []
            if self.nodes:
                left, right = [(x.col, x.a) for x in bundle.steps], [(x.row, x.b) for x in bundle.steps]
                messages += relay(along_rows, grid, left, bundle.a, turn, m_loc, size_a)
                messages += relay(along_cols, grid.T, right, bundle.b, turn, n_loc, size_b, COLS)
            for step in () if self.nodes else bundle.steps:
                messages += broadcast(self.mover, grid, step.col, m_loc * step.width, size_a)
                messages += broadcast(self.mover, grid.T, step.row, n_loc * step.width, size_b, COLS)
            yield Round(messages, products(grid, m_loc[:, None], n_loc[None, :], bundle.width, self.formed.shares))

    def transfers(self, rank: int) -> list[Transfer]:
        """Return the traffic of A's panels along the rank's row, and of B's along its column.

        A rank receives m_loc (k - k_loc) words of A and n_loc (k - k_loc) words of B; k_loc is the number of inner
        indices that the rank owns in A, or in B.
        """
        if self.nothing_travels:
            return []
        (i, j), strides = self.C.coords(rank), self.grid.strides
        A, B = self.A.distribution, self.B.distribution
        if self.nodes and i >= 0:
            left, right = self._parts
            along_row = relayed(A.rows.count(i), left, self.line("A", rank), j)
            along_col = relayed(B.cols.count(j), right, self.line("B", rank), i)
        else:
            along_row = broadcasts(A.rows.count(i), A.cols, self._counts.sum(axis=1), self.mover, j)
            along_col = broadcasts(B.cols.count(j), B.rows, self._counts.sum(axis=0), self.mover, i)
        return [
            Transfer(self.mover, along_row, self.A.dtype.itemsize, strides[ROWS], A.cols.parts),
            Transfer(self.mover, along_col, self.B.dtype.itemsize, strides[COLS], B.rows.parts),
        ]

    @cached_property
    def _parts(self) -> tuple[Parts, Parts]:
        """The parts of the panels of A, and of B; if there are many panels, equal parts share an entry."""
        inner_a, inner_b, grid = self.A.distribution.cols, self.B.distribution.rows, grid_of(self.C)
        lines = [self.line("A", rank) for rank in grid[:, 0].tolist()] + [self.line("B", x) for x in grid[0].tolist()]
        period = lcm(*(line.period for line in lines))
        if not self.bundled and self.panels > period * int(np.count_nonzero(self._counts)):
            return parts_by_number(inner_a, inner_b, self._width, period)
        left = (([(x.col, x.a) for x in bundle.steps], bundle.a) for bundle in self.bundles)
        right = (([(x.row, x.b) for x in bundle.steps], bundle.b) for bundle in self.bundles)
        return Parts.of(left), Parts.of(right)

    def line(self, name: str, rank: int) -> NodeLine:
        """Return the nodes along the grid row of a rank (for A), or its grid column (for B)."""
        i, j = self.C.coords(rank)
        pc = self.C.distribution.cols.parts
        ranks = self.C.rank_map[i * pc : (i + 1) * pc] if name == "A" else self.C.rank_map[j::pc]
        return NodeLine(tuple(map(self.nodes.__getitem__, ranks)) if self.nodes else (0,) * len(ranks))

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        return *self.C.local_shape(rank), self.mnk[2]

    def copied(self, rank: int) -> int:
        """Return the bytes that are packed: local panels to be sent or, if read in place, non-contiguous panels."""
        pr, pc = self.C.distribution.grid_shape
        if self.transport.in_place:
            (m, n, k), (a, b) = self.local_shape(rank), self._packs
            return k * (a * m * self.A.dtype.itemsize + b * n * self.B.dtype.itemsize) + super().copied(rank)
        packed = (self.A.local_bytes(rank) if pc > 1 else 0) + (self.B.local_bytes(rank) if pr > 1 else 0)
        return packed + super().copied(rank)

    @cached_property
    def _packs(self) -> tuple[bool, bool]:
        """A pair: are panels of A, and panels of B, packed or received in a buffer?"""
        inner_a, inner_b = self.A.distribution.cols, self.B.distribution.rows
        return not self._lie(inner_a, inner_b, "a"), not self._lie(inner_b, inner_a, "b")

    @property
    def panels_held(self) -> tuple[bool, bool]:
        """A pair: are the buffers of panels of A, and of B, never sent, so that rows need not be contiguous?"""
        if self.nodes or self.transport.shared:
            return not self.nodes, not self.nodes
        return self.A.distribution.cols.parts == 1, self.B.distribution.rows.parts == 1

    def _aligned(self, rank: int | None) -> tuple[bool, bool]:
        """A pair: is each panel of A, and of B, copied so that its rows begin at multiples of 16 bytes?

        A panel that was received is contiguous.  A device copies it if its rows are not aligned and the product is
        large: the copy takes a small part of the time that is gained.
        """
        if not self.arithmetic.wants_alignment:
            return False, False
        (m, n), width, c = self.C.local_shape(rank), self.widest_bundle, self.C.distribution
        if m * n * width < _WORTH_COPYING:
            return False, False
        held_a, held_b = self.panels_held
        rows, cols = (counts_of(x).tolist() if rank is None else [y] for x, y in ((c.rows, m), (c.cols, n)))
        skew_a = self._skew(rows if self.bundled or self.A.order == "F" else [width])
        skew_b = self._skew(cols if self.bundled or self.B.order == "C" else [width])
        return skew_a and not held_a, skew_b and not held_b

    def _skew(self, lengths: list[int]) -> bool:
        """Are contiguous rows of one of these lengths not aligned for a device?"""
        return any(apart(length, self.panel_dtype.itemsize) != length for length in lengths)

    def _lie(self, inner: BlockCyclic, other: BlockCyclic, panel: str) -> bool:
        """Are all panels of one operand multiplied in place?

        A panel that is not sent (of A if Pc = 1), or is read in place, is multiplied in place if it is contiguous.  The
        same holds for a bundle of panels that are not sent: they are adjacent if each owner has one run.
        """
        stay = inner.parts == 1
        if self.nodes and not stay:
            return False
        if not (stay or (self.transport.shared and not self.transport.fetched)) or (stay and one_run(other)):
            return stay
        if one_run(inner) and one_run(other) and not self.bundled:
            return True  # the intersection of two runs is one run
        if not self.bundled:
            return in_one_run_each(inner, other, self._width)
        return all(getattr(x, panel).contiguous and (stay or len(x.steps) == 1) for x in self.bundles)

    @remembered
    def buffers(self, rank: int | None) -> Buffers:
        m_loc, n_loc = self.C.local_shape(rank)
        (held_a, held_b), width = self.panels_held, self.widest_bundle
        shapes = (m_loc, width, self.A, held_a), (width, n_loc, self.B, held_b)
        left, right = (
            (self.arithmetic.held(m, n, x.order, x.dtype) if held else m * n) * self.slots if packed else 0
            for packed, (m, n, x, held) in zip(self._packs, shapes)
        )
        mnk = m_loc, n_loc, width
        return {
            "panels of A": (left, self.A.dtype),
            "panels of B": (right, self.B.dtype),
            **self.arithmetic.buffers(mnk, self.A, self.B, self.C.order, self.triangle, self._aligned(rank)),
            **self._sums_of_block(m_loc, n_loc),
        }
