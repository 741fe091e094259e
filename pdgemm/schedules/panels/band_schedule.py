"""The schedules of the reductions to a band: of a Hermitian matrix, A = Q B Q^H, and of any matrix, A = Q B P^H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pdgemm.schedules.collectives.collective import Collective, even_parts
from pdgemm.schedules.collectives.vectors import SideBySide
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule, window_gathering
from pdgemm.schedules.rounds import Round, grid_of, products
from pdgemm.schedules.schedule import Buffers

SMALLEST = 128  # columns of the tiles on the diagonal


@dataclass(frozen=True)
class BandSchedule(PanelSchedule):
    """The reduction of a Hermitian A to a band: each panel is gathered and factored on all ranks, and updates A.

    The panel below its diagonal block is factored into (I - V T V^H) R.  Each rank multiplies its elements on and below
    the diagonal, and their mirror images above it, by its rows of V; the sum over all ranks, A V, is all-reduced.  Then
    each rank computes W = X - V T^H V^H X/2, X = A V T, and updates its elements on and below the diagonal,
    A - V W^H - W V^H, without a message.

    A is in square blocks of size `width`, which is also the number of diagonals that remain below the main one.
    Words per rank: n^2/2 in the panels and n^2 in the sums, on any number of ranks.
    """

    algorithm = "band"
    lookahead = 0

    @property
    def flops(self) -> int:
        return self.real_flops * 4 * self.n**3 // 3

    @cached_property
    def reduced(self) -> tuple[Panel, ...]:
        """The panels that have rows below their diagonal block."""
        return tuple(panel for panel in self.steps if panel.stop < self.n)

    def reflectors(self, panel: Panel) -> int:
        """Return the number of reflectors of a panel: columns of V."""
        return min(panel.width, self.n - panel.stop)

    def gathering(self, panel: Panel) -> Collective:
        """Return the all-gather of the rows of a panel, in the order of the ranks and their rows."""
        return window_gathering(self.A, (panel.stop, self.n), (panel.start, panel.stop))

    def summing(self, panel: Panel) -> Collective:
        """Return the all-reduce of A V."""
        counts = even_parts((self.n - panel.stop) * self.reflectors(panel), len(self.A.rank_map))
        return Collective("all_reduce", "halving", self.A.rank_map, counts, self.A.dtype)

    def rounds(self) -> Iterator[Round]:
        grid = grid_of(self.A)
        for panel in self.reduced:
            m, k = self.n - panel.stop, self.reflectors(panel)
            triangle = self.rows_from(panel.stop)[:, None], (self.cols_from(panel.stop)[None, :] + 1) // 2
            yield from self.gathering(panel).rounds()
            yield Round([], products(grid, m, panel.width, 2 * k) + products(grid, *triangle, 2 * k))
            yield from self.summing(panel).rounds()
            yield Round([], products(grid, m, k, 3 * k) + products(grid, *triangle, 2 * k))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), w, n = self.A.local_shape(rank), self.widest, self.n
        words = dict.fromkeys(("gathered", "reflectors", "sums", "W"), n * w)
        words |= {"of rows": 2 * m_loc * w, "of columns": 2 * n_loc * w}
        return self.on_grid(rank, words | {"triangles": 2 * w * w, "tile": SMALLEST**2 * 4})


class OneSide(NamedTuple):
    """The reflections of a panel from the left, X = A, or from the right, X = A^T; the panel consists of columns of X.

    start : the first row of X that is factored.   reflectors : the number of reflectors.
    """

    panel: Panel
    transposed: bool
    start: int
    reflectors: int


@dataclass(frozen=True)
class BidiagonalBandSchedule(PanelSchedule):
    """The reduction of A to an upper band: panels of columns and panels of rows are factored in turn.

    The reflections of each panel are applied to the rest of A.

    A panel of columns, from its diagonal block down, is all-gathered and factored into (I - V T V^H) R.  The ranks of a
    grid column sum V^H A for their columns, and subtract V T^H V^H A from A.  Then the panel of rows to the right of
    the diagonal block is transposed, and factored in the same way; the ranks of a grid row sum V^H A^T for their rows,
    and subtract V T^H V^H A^T from A^T.

    A (m, n), m >= n, is in square blocks of size `width`, the number of diagonals that remain above the main one.
    Words per rank on Pr x Pc: m n - n^2/2 in panels of columns, n^2/2 in panels of rows, and at most
    2 (n^2/2)/Pc + 2 (m n - n^2/2)/Pr in sums.
    """

    algorithm = "bidiagonal band"
    lookahead = 0

    @property
    def flops(self) -> int:
        m, n = self.A.distribution.shape
        return self.real_flops * (4 * m * n * n - 4 * n**3 // 3)

    @cached_property
    def sides(self) -> tuple[OneSide, ...]:
        """The reflections of all panels, in their order."""
        both = (
            (OneSide(x, False, x.start, x.width), OneSide(x, True, x.stop, min(x.width, self.n - x.stop)))
            for x in self.steps
        )
        return tuple(side for pair in both for side in pair if side.reflectors)

    def factored(self, side: OneSide) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the ranges of rows and of columns of A that are factored for this side."""
        panel, whole = (side.panel.start, side.panel.stop), self.A.distribution.shape
        return (panel, (side.start, whole[1])) if side.transposed else ((side.start, whole[0]), panel)

    def gathering(self, side: OneSide) -> Collective:
        """Return the all-gather of the panel to factor, rank by rank."""
        return window_gathering(self.A, *self.factored(side))

    def sums(self, side: OneSide) -> SideBySide:
        """Return the all-reduce of V^H X, in each grid column of X."""
        lines, counts = grid_of(self.A), self.rows_from(side.panel.stop)
        if not side.transposed:
            lines, counts = lines.T, self.cols_from(side.panel.stop)
        words, q = (counts * side.reflectors).tolist(), lines.shape[1]
        return SideBySide(
            tuple(
                Collective("all_reduce", "halving", tuple(ranks), even_parts(number, q), self.A.dtype)
                for ranks, number in zip(lines.tolist(), words)
                if number
            )
        )

    def rounds(self) -> Iterator[Round]:
        grid, shape = grid_of(self.A), self.A.distribution.shape
        for side in self.sides:
            k, height, w = side.reflectors, shape[side.transposed] - side.start, side.panel.width
            below, right = self.rows_from(side.start)[:, None], self.cols_from(side.panel.stop)[None, :]
            yield from self.gathering(side).rounds()
            yield Round([], products(grid, height, w, 2 * k) + products(grid, below, right, k))
            yield from self.sums(side).rounds()
            yield Round([], products(grid, below, right, k))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n_loc), w, longest = self.A.local_shape(rank), self.widest, max(self.A.distribution.shape)
        words = {"gathered": longest * w, "reflectors": longest * w, "triangles": 2 * w * w}
        words |= dict.fromkeys(("local reflectors", "sums", "multiplied sums"), max(m_loc, n_loc) * w)
        return self.on_grid(rank, words)
