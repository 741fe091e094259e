"""Local products accumulate C := alpha A B + beta C panel by panel, for any types of A, B and C."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any

from pdgemm.algorithms.executor import Room
from pdgemm.arrays import dtypes
from pdgemm.arrays.device import Array
from pdgemm.arrays.elementwise import Combine, scale
from pdgemm.blas.local_gemm import integer_accumulate, prepare
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Recorder
from pdgemm.model.formulas import gemm_flops
from pdgemm.movers.panel_views import column_room
from pdgemm.schedules import Product
from pdgemm.schedules.reduction import Window

SLAB_FLOPS = 5e8  # which one core computes in ten milliseconds
SLAB_ROWS = 512  # the least of a slab: BLAS is slower on fewer


class Accumulator:
    """Accumulates panel products in `sums`, which is C itself where C has the type of accumulation.

    workspace : the buffers of the plan; nothing else is allocated.
    between : a function to call every few milliseconds; products are split into slabs for it.
    """

    def __init__(
        self,
        alpha: Any,
        beta: Any,
        sums: Array,
        plan: Product,
        workspace: Room,
        between: Callable[[], object] | None = None,
    ) -> None:
        self.alpha, self.beta, self.sums, self.workspace = alpha, beta, sums, workspace
        self.plan, self.between = plan, between
        self.tf32 = plan.compute == "tf32"
        self.integer = plan.accumulate not in dtypes.BLAS

    def add(self, A: Array, B: Array) -> None:
        """Add the product of a panel of A and a panel of B, which have all rows and all columns of `sums`."""
        A, conjugate_a = self._ready(A, self.plan.A, self.workspace["converted A"])
        B, conjugate_b = self._ready(B, self.plan.B, self.workspace["converted B"])
        for a, b, c in self._slabs(A, B):
            if self.integer:
                scale(self.beta, c)
                integer_accumulate(self.alpha, a, b, c, self.workspace["exact"])
            else:
                prepare(self.alpha, a, b, c, conjugate_a, conjugate_b, self.tf32)(self.beta)
            if self.between:
                self.between()
        self.beta = 1

    def prepared(self, A: Array, B: Array) -> Callable[[], None]:
        """Return a function that adds the product of what these panels then hold, to be called any number of times."""
        if self.integer or self.workspace["converted A"].size or self.workspace["converted B"].size:
            return partial(self.add, A, B)
        conjugated, between = (self.plan.A.conjugated, self.plan.B.conjugated), self.between
        products = [prepare(self.alpha, a, b, c, *conjugated, self.tf32) for a, b, c in self._slabs(A, B)]

        def add() -> None:
            for multiply in products:
                multiply(self.beta)
                if between:
                    between()
            self.beta = 1

        return add

    def add_by_windows(
        self,
        panels: Sequence[tuple[Array, Array]],
        windows: Sequence[Window],
        completed: Callable[[Window], object],
        recorder: Recorder,
    ) -> None:
        """Add the products of the panels to one window of rows after the other, and call `completed` after each."""
        for window in windows:
            with recorder.phase("compute"):
                for rows in starmap(slice, window):
                    part = Accumulator(self.alpha, self.beta, self.sums[rows], self.plan, self.workspace, self.between)
                    for A, B in panels:
                        part.add_wide(A[rows], B)
            completed(window)

    def add_wide(self, A: Array, B: Array) -> None:
        """Add a product over many inner indices, in panels of the plan's width where A or B is converted."""
        rooms = (self.workspace["converted A"], self.workspace["converted B"])
        width = max(1, min(self.plan.width, A.shape[1]) if self.integer or any(x.size for x in rooms) else A.shape[1])
        for start in range(0, max(1, A.shape[1]), width):
            self.add(A[:, start : start + width], B[start : start + width])

    def _slabs(self, A: Array, B: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Yield parts of the product that take a few milliseconds each: slabs of C along its longer dimension."""
        C = self.sums
        m, n = C.shape
        by_columns, length = n > m, max(m, n)
        flops = gemm_flops(m, n, A.shape[1], complex_=C.dtype.kind == "c")
        parts = max(1, min(length // SLAB_ROWS, round(flops / SLAB_FLOPS))) if self.between else 1
        step = -(-length // parts) or 1
        for start in range(0, max(1, length), step):
            slab = slice(start, start + step)
            yield (A, B[:, slab], C[:, slab]) if by_columns else (A[slab], B, C[slab])

    def _ready(self, panel: Array, layout: Layout, workspace: Array) -> tuple[Array, bool]:
        """Return the panel in the type that BLAS multiplies, and whether BLAS has to conjugate it."""
        if not workspace.size:
            return panel, layout.conjugated
        converted = column_room(panel.shape[0], layout.order, panel.shape[1], workspace)
        Combine(conjugated=layout.conjugated, through=self.plan.rounded)(converted, panel)
        return converted, False
