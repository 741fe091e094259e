"""The algorithms as values: the steps, traffic and buffers of C := alpha A B + beta C on layouts that fit.

Figures are for any rank, without communication; for rank None they are the most that any rank needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from pdgemm import dtypes
from pdgemm.costs import gemm_flops, reduce_scatter_traffic, summa_traffic
from pdgemm.grids.layout import Layout
from pdgemm.local import conjugates
from pdgemm.schedule import PanelStep, summa_steps
from pdgemm.timing import Traffic

MESSAGE_BYTES = 1 << 30  # MPI counts are ints, and some transports fail above 2 GiB
SLAB = 1 << 16  # elements that are rounded or added to C at a time
Buffers = dict[str, tuple[int, np.dtype]]  # name: words, type


@dataclass(frozen=True)
class Product:
    """What all algorithms have in common.

    accumulate : the type in which products are added up.
    width      : no panel is wider.
    """

    A: Layout
    B: Layout
    C: Layout
    accumulate: np.dtype
    width: int
    algorithm: ClassVar[str]

    @property
    def mnk(self) -> tuple[int, int, int]:
        return *self.C.distribution.shape, self.A.distribution.cols.n

    @property
    def flops(self) -> int:
        return gemm_flops(*self.mnk, complex_=self.accumulate.kind == "c")

    @property
    def panel_dtype(self) -> np.dtype:
        """The type in which BLAS sees panels: int8 numbers are multiplied as float32, exactly."""
        return self.accumulate if self.accumulate in dtypes.BLAS else np.dtype(np.float32)

    @property
    def update_dtype(self) -> np.dtype:
        """The type in which sums are added to C."""
        return dtypes.arithmetic(self.accumulate, self.C.dtype)

    def converts(self, operand: Layout, order: str) -> bool:
        """Does each panel need a second buffer: for another type, or for a conjugate that BLAS cannot form?

        order : memory order of what the products are accumulated in.
        """
        stuck = operand.conjugated and not conjugates(operand.order, order)
        return stuck or operand.dtype != self.panel_dtype

    @property
    def total_words(self) -> int:
        """Words that all ranks together send."""
        raise NotImplementedError

    def traffic(self, rank: int) -> Traffic:
        """Words and messages of a rank."""
        raise NotImplementedError

    def buffers(self, rank: int | None) -> Buffers:
        """What a rank allocates beyond A, B and C."""
        raise NotImplementedError

    @property
    def narrowest(self) -> Self:
        """With buffers as small as can be."""
        raise NotImplementedError

    def smaller(self, factor: float) -> Self:
        """With smaller buffers, of about `factor` times the size, unless this is the narrowest."""
        raise NotImplementedError

    def extra_bytes(self, rank: int | None) -> int:
        return sum(words * dtype.itemsize for words, dtype in self.buffers(rank).values())

    def _exact(self, rows: int, cols: int) -> int:
        """32-bit numbers in which int8 products are formed, and made integers, before they are added up."""
        return 0 if self.accumulate in dtypes.BLAS else 2 * min(SLAB, rows * cols)


@dataclass(frozen=True)
class Summa(Product):
    """C stationary; panels of A travel along grid rows, panels of B along grid columns."""

    lookahead: int
    mover: str
    algorithm = "summa"

    @property
    def panels(self) -> int:
        return len(self.steps)

    @cached_property
    def steps(self) -> tuple[PanelStep, ...]:
        longest = max(
            1,
            self.A.distribution.rows.largest * self.A.dtype.itemsize,
            self.B.distribution.cols.largest * self.B.dtype.itemsize,
        )
        width = max(1, min(self.width, MESSAGE_BYTES // longest))
        return summa_steps(self.A.distribution.cols, self.B.distribution.rows, width)

    @cached_property
    def widest(self) -> int:
        return max((step.width for step in self.steps), default=0)

    @property
    def total_words(self) -> int:
        m, n, k = self.mnk
        pr, pc = self.C.distribution.grid_shape
        return m * k * (pc - 1) + k * n * (pr - 1)

    @property
    def narrowest(self) -> Self:
        return replace(self, width=1)

    def smaller(self, factor: float) -> Self:
        width = min(self.width, self.widest)
        return replace(self, width=max(1, min(width - 1, int(width * factor))))

    @property
    def slots(self) -> int:
        """Panels held at once: the one in use and those in flight behind it."""
        return min(self.lookahead + 1, max(1, len(self.steps)))

    def traffic(self, rank: int) -> Traffic:
        return summa_traffic(self.A.distribution, self.B.distribution, self.steps, self.mover, self.C.coords(rank))

    @property
    def sums_in_c(self) -> bool:
        """Are products added up in C itself?"""
        return self.C.dtype == self.accumulate

    def buffers(self, rank: int | None) -> Buffers:
        """A panel that stays in its row (Pc = 1) and is one run of columns is multiplied where it lies."""
        m_loc, n_loc = self.C.local_shape(rank)
        a = self.A.distribution.cols.parts > 1 or any(not step.a.single for step in self.steps)
        b = self.B.distribution.rows.parts > 1 or any(not step.b.single for step in self.steps)
        sums = 0 if self.sums_in_c or not self.steps else m_loc * n_loc
        return {
            "panels of A": (a * self.slots * self.widest * m_loc, self.A.dtype),
            "panels of B": (b * self.slots * self.widest * n_loc, self.B.dtype),
            "converted A": (self.converts(self.A, self.C.order) * self.widest * m_loc, self.panel_dtype),
            "converted B": (self.converts(self.B, self.C.order) * self.widest * n_loc, self.panel_dtype),
            "sums": (sums, self.accumulate),
            "update": (2 * min(sums, SLAB), self.update_dtype),
            "exact": (self._exact(m_loc, n_loc), self.panel_dtype),
        }


@dataclass(frozen=True)
class Inner(Product):
    """Each rank multiplies its inner indices; the partial products are reduced and scattered to C.

    A lies in columns and B in rows, the same inner indices on the same ranks; C anywhere.
    rows : rows of C that are reduced at a time.
    size : ranks of the communicator.
    """

    rows: int
    size: int
    algorithm = "inner"
    mover = "reduce_scatter"
    lookahead = 0

    @property
    def panels(self) -> int:
        return len(self.windows)

    @property
    def widest(self) -> int:
        return self.A.distribution.cols.largest

    @property
    def total_words(self) -> int:
        m, n, k = self.mnk
        return m * n * (self.size - 1) if k else 0

    @property
    def narrowest(self) -> Self:
        return replace(self, width=1, rows=1)

    def smaller(self, factor: float) -> Self:
        if self.rows == 1:
            return replace(self, width=max(1, min(self.width - 1, int(self.width * factor))))
        return replace(self, rows=max(1, min(self.rows - 1, int(self.rows * factor))))

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Rows of C that are reduced together."""
        m, n, k = self.mnk
        high = max(1, min(self.rows, MESSAGE_BYTES // (max(1, n) * self.accumulate.itemsize)))
        return [(lo, min(m, lo + high)) for lo in range(0, m, high)] if n * k else []

    def counts(self, window: tuple[int, int]) -> np.ndarray:
        """Words of each rank among these rows of C."""
        rows, cols = self.C.distribution.rows.window(*window), self.C.distribution.cols
        words = np.multiply.outer(
            [rows.count(i) for i in range(rows.parts)], [cols.count(j) for j in range(cols.parts)]
        )
        counts = np.zeros(self.size, np.int64)
        counts[list(self.C.place)] = words.ravel()
        return counts

    def traffic(self, rank: int) -> Traffic:
        return sum((reduce_scatter_traffic(self.counts(window), rank) for window in self.windows), Traffic())

    def buffers(self, rank: int | None) -> Buffers:
        n = self.mnk[1]
        k_loc = min(self.width, self.A.local_shape(rank)[1])
        high = max((hi - lo for lo, hi in self.windows), default=0)
        at = slice(None) if rank is None else rank
        mine = max((int(self.counts(window)[at].max()) for window in self.windows), default=0)
        sums = high * n
        return {
            "converted A": (self.converts(self.A, "C") * k_loc * high, self.panel_dtype),
            "converted B": (self.converts(self.B, "C") * k_loc * n, self.panel_dtype),
            "sums": (sums, self.accumulate),
            "in the order of ranks": (sums, self.accumulate),
            "mine": (mine, self.accumulate),
            "update": (2 * min(mine, SLAB), self.update_dtype),
            "exact": (self._exact(high, n), self.panel_dtype),
        }
