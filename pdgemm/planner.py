"""Decide before running: panels, width, lookahead and mover, and what they will cost each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdgemm.costs import gemm_flops, summa_traffic
from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.grids.distribution import Distribution
from pdgemm.schedule import PanelStep, summa_steps
from pdgemm.timing import Traffic

PANEL_WIDTH = 512  # wide enough for BLAS to reach its peak, narrow enough to stay in flight behind it
_MESSAGE_BYTES = 1 << 30  # MPI counts are ints, and some transports fail above 2 GiB


@dataclass(frozen=True)
class Plan:
    """C := alpha A B + beta C by SUMMA with C stationary, on layouts that fit: a value, without data.

    Every figure is for any rank of the grid and needs no communication.
    """

    A: Distribution
    B: Distribution
    dtype: np.dtype
    width: int  # no panel is wider
    lookahead: int
    mover: str
    algorithm: str = "summa"

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.A.shape[0], self.B.shape[1], self.A.shape[1]

    @cached_property
    def steps(self) -> tuple[PanelStep, ...]:
        return summa_steps(self.A.cols, self.B.rows, self.width)

    @property
    def slots(self) -> int:
        """Panels held at once: the one in use and those in flight behind it."""
        return min(self.lookahead + 1, max(1, len(self.steps)))

    @property
    def flops(self) -> int:
        return gemm_flops(*self.mnk, complex_=self.dtype.kind == "c")

    def traffic(self, coords: tuple[int, int]) -> Traffic:
        """Words and messages of rank (i, j)."""
        return summa_traffic(self.A, self.B, self.steps, self.mover, coords)

    def panel_words(self, coords: tuple[int, int]) -> tuple[int, int]:
        """Buffer words of rank (i, j) for one panel of A and one of B.

        A panel that stays in its row (Pc = 1) and is one run of columns is multiplied where it lies.
        """
        widest = max((step.width for step in self.steps), default=0)
        a = self.A.cols.parts > 1 or any(not step.a.single for step in self.steps)
        b = self.B.rows.parts > 1 or any(not step.b.single for step in self.steps)
        return a * widest * self.A.rows.count(coords[0]), b * widest * self.B.cols.count(coords[1])

    def extra_bytes(self, coords: tuple[int, int]) -> int:
        """Memory of rank (i, j) beyond A, B and C."""
        return self.slots * sum(self.panel_words(coords)) * self.dtype.itemsize

    @property
    def largest_extra_bytes(self) -> int:
        """The most extra memory that any rank needs."""
        return self.extra_bytes((self.A.rows.source, self.B.cols.source))


def plan_summa(
    A: Distribution,
    B: Distribution,
    dtype: np.dtype,
    *,
    lookahead: int = 1,
    mover: str = "ibcast",
    panel_width: int | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The widest panels, up to `panel_width`, whose buffers fit `memory_limit` bytes on every rank.

    Raises MemoryLimitError, saying what is needed, where even panels of width 1 do not fit.
    """
    if lookahead < 0:
        raise ArgumentError(f"lookahead must be >= 0, got {lookahead}")
    if panel_width is not None and panel_width < 1:
        raise ArgumentError(f"panel_width must be >= 1, got {panel_width}")
    longest = max(1, A.rows.largest, B.cols.largest) * dtype.itemsize
    width = max(1, min(panel_width or PANEL_WIDTH, _MESSAGE_BYTES // longest))
    plan = Plan(A, B, dtype, width, lookahead, mover)
    if memory_limit is None or plan.largest_extra_bytes <= memory_limit:
        return plan
    # panels of width 1 are single runs: buffered only where they travel
    one = ((A.cols.parts > 1) * A.rows.largest + (B.rows.parts > 1) * B.cols.largest) * dtype.itemsize
    narrowest = min(lookahead + 1, A.shape[1]) * one
    if narrowest > memory_limit:
        raise MemoryLimitError(
            f"memory limit {memory_limit} bytes per rank is too small for the panels of A ({A}) and B ({B}): "
            f"at least {narrowest} bytes are needed with lookahead {lookahead}"
            + (f", {one} with lookahead 0" if lookahead else "")
        )
    while plan.largest_extra_bytes > memory_limit:
        # the bytes grow with the width of the widest panel, which is at most `width`
        width = min(width - 1, width * memory_limit // plan.largest_extra_bytes)
        plan = Plan(A, B, dtype, max(1, width), lookahead, mover)
    return plan
