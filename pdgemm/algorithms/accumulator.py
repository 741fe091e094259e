"""C := alpha A B + beta C panel by panel, in the type of accumulation, whatever the types of A, B and C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pdgemm.arrays import dtypes
from pdgemm.arrays.device import Array
from pdgemm.arrays.elementwise import Combine, paired, scale
from pdgemm.blas.local_gemm import integer_accumulate, prepare
from pdgemm.grids.layout import Layout
from pdgemm.model.formulas import gemm_flops
from pdgemm.movers.panel_views import column_room
from pdgemm.schedules import Product

Room = dict[str, Any]  # the buffers of a plan
SLAB_FLOPS = 2.5e8  # a few milliseconds of a core
SLAB_ROWS = 256  # at least: BLAS is slower on fewer


class Accumulator:
    """Adds panel products up in `sums`, which is C itself where C has the type of accumulation.

    room : the buffers of the plan; nothing else is allocated.
    between : to be called every few milliseconds; products are cut into slabs for it.
    """

    def __init__(
        self,
        alpha: Any,
        beta: Any,
        sums: Array,
        plan: Product,
        room: Room,
        between: Callable[[], object] | None = None,
    ) -> None:
        self.alpha, self.beta, self.sums, self.room = alpha, beta, sums, room
        self.plan, self.between = plan, between
        self.tf32 = plan.compute == "tf32"
        self.integer = plan.accumulate not in dtypes.BLAS

    def add(self, A: Array, B: Array) -> None:
        """One panel of A, all rows of `sums` high, times one of B, all columns wide."""
        A, conjugate_a = self._ready(A, self.plan.A, self.room["converted A"])
        B, conjugate_b = self._ready(B, self.plan.B, self.room["converted B"])
        for a, b, c in self._slabs(A, B):
            if self.integer:
                scale(self.beta, c)
                integer_accumulate(self.alpha, a, b, c, self.room["exact"])
            else:
                prepare(self.alpha, a, b, c, conjugate_a, conjugate_b, self.tf32)(self.beta)
            if self.between:
                self.between()
        self.beta = 1

    def prepared(self, A: Array, B: Array) -> Callable[[], None]:
        """`add` of these panels, to be called again and again, whatever they then hold."""
        if self.integer or self.room["converted A"].size or self.room["converted B"].size:
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

    def add_wide(self, A: Array, B: Array) -> None:
        """A wide panel of A times a high one of B: at once, or in panels no wider than the plan's if converted."""
        rooms = (self.room["converted A"], self.room["converted B"])
        width = max(1, min(self.plan.width, A.shape[1]) if self.integer or any(x.size for x in rooms) else A.shape[1])
        for start in range(0, max(1, A.shape[1]), width):
            self.add(A[:, start : start + width], B[start : start + width])

    def _slabs(self, A: Array, B: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Parts of the product that take a few milliseconds each: rows or columns of C, whatever there is more of."""
        C = self.sums
        m, n = C.shape
        by_columns, length = n > m, max(m, n)
        flops = gemm_flops(m, n, A.shape[1], complex_=C.dtype.kind == "c")
        parts = max(1, min(length // SLAB_ROWS, round(flops / SLAB_FLOPS))) if self.between else 1
        step = -(-length // parts) or 1
        for start in range(0, max(1, length), step):
            slab = slice(start, start + step)
            yield (A, B[:, slab], C[:, slab]) if by_columns else (A[slab], B, C[slab])

    def _ready(self, panel: Array, layout: Layout, room: Array) -> tuple[Array, bool]:
        """The panel as BLAS takes it, and whether BLAS is to conjugate it."""
        if not room.size:
            return panel, layout.conjugated
        converted = column_room(panel.shape[0], layout.order, panel.shape[1], room)
        Combine(conjugated=layout.conjugated, through=self.plan.rounded)(converted, panel)
        return converted, False


def add_sums(sums: Array, beta: Any, C: Array, room: Array) -> None:
    """C := sums + beta C, converted in `room` piece by piece."""
    if not C.size:
        return
    if C.strides[0] < C.strides[1]:
        sums, C = sums.T, C.T
    combine = Combine(1, beta, paired(room))
    for piece in combine.pieces(*C.shape):
        combine(C[piece], sums[piece])
