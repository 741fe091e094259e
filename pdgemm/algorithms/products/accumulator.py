"""Local products accumulate C := alpha A B + beta C panel by panel, for any types of A, B and C."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np

from pdgemm.algorithms.products.executor import Call
from pdgemm.algorithms.products.strips import Strip, Strips
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT, Combine, scale
from pdgemm.local.arrays.emulation import Emulation
from pdgemm.local.blas.local_gemm import (
    forms_squares,
    integer_accumulate,
    multiply_integers,
    prepare,
    prepare_square,
    product_slabs,
    to_digits,
)
from pdgemm.local.blas.slices import SliceBuffers, finite, multiply_slices
from pdgemm.schedules.products import Product
from pdgemm.schedules.products.reduction import Window
from pdgemm.schedules.staircase import SQUARE, Staircase
from pdgemm.transport.movers.panel_views import held_panel
from pdgemm.transport.store import store_corner

Inner = np.ndarray | None  # inner indices of a panel, numbered as in `Strip.block_of`


class Accumulator:
    """Accumulates panel products in `sums`, which is C itself where C has the type of accumulation.

    call   : the arguments of the product, and its buffers: nothing else is allocated.  Products are split into slabs
             where `call.poll` has to be called every few milliseconds.  If `call.mirrored`, square tiles on the
             diagonal of C are computed from A only, with half of the flops.
    formed : the elements of `sums` that are computed; None: all.  The other elements are neither read nor written.
    scales : the scales of A for the rows of `sums`, and those of B for its columns; None: `call.scales`.  A panel is
             multiplied by its scales when it is converted.
    """

    def __init__(
        self,
        call: Call[Any],
        beta: Any,
        sums: Array,
        formed: Staircase | None = None,
        scales: Strips | None = None,
    ) -> None:
        self.call, self.beta, self.sums, self.formed = call, beta, sums, formed
        self.alpha, self.workspace, self.between = call.alpha, call.workspace, call.poll
        self.scales = call.scales if scales is None else scales
        self.plan: Product = call.product
        self.arithmetic = self.plan.arithmetic
        converted = (self.workspace[name].size for name in ("converted A", "converted B"))
        self.converts = self.arithmetic.integer or any(converted)

    def part(self, rows: slice, sums: Array) -> Accumulator:
        """Return an accumulator of some rows; the array `sums` receives their sums."""
        formed = self.formed and self.formed.window(rows, slice(0, sums.shape[1]))
        left, right = self.scales
        return Accumulator(self.call, self.beta, sums, formed, (left and left.of(rows), right))

    def add(self, A: Array, B: Array, inner: Inner = None) -> None:
        """Add the product of a panel of A with all rows of `sums` and a panel of B with all columns of `sums`.

        inner : the inner indices of the panels, if A or B has scales.
        """
        if self.arithmetic.integers_on_device:
            buffers = self.workspace["converted A"], self.workspace["converted B"], self.workspace["exact"]
            multiply_integers(self.alpha, A, B, self.beta, self.sums, buffers)
            self.beta = 1
            return
        if self.arithmetic.emulation and self._add_slices(self.arithmetic.emulation, A, B):
            return
        A, conjugate_a = self._ready(A, self.plan.A, self.workspace["converted A"])
        B, conjugate_b = self._ready(B, self.plan.B, self.workspace["converted B"], 0)
        for panel, strip in zip((A, B.T), self.scales):
            self._decode(panel, strip, inner)
        if self.arithmetic.integer:
            self._form(starmap(self._integers, self._slabs(A, B, self.sums)))
        else:
            self._form(self._products(A, B, conjugate_a, conjugate_b))

    def _form(self, products: Iterable[Callable[[Any], object]]) -> None:
        """Call the functions `products` one after another, the first with the current beta, the others with 1."""
        between = self.between
        for multiply in products:
            multiply(self.beta)
            if between:
                between()
        self.beta = 1

    def _add_slices(self, how: Emulation, A: Array, B: Array) -> bool:
        """Add a product of emulated precision, by slices.  Return False, and add nothing, if A or B has inf or NaN."""
        if not (finite(A, self.arithmetic.accumulate) and finite(B, self.arithmetic.accumulate)):
            return False
        names = "converted A", "converted B", "exact", "sums of slices", "exponents"
        buffers = SliceBuffers(*map(self.workspace.__getitem__, names))
        conjugated = self.plan.A.conjugated, self.plan.B.conjugated
        scale(self.beta, self.sums)
        if A.shape[1] and self.sums.size:
            with np.errstate(all="ignore"):  # overflows give infinity, as in BLAS
                multiply_slices(how, self.alpha, A, B, self.sums, conjugated, buffers, self.between)
        self.beta = 1
        return True

    def prepared(self, A: Array, B: Array, inner: Inner = None) -> Callable[[], None]:
        """Return a function that, at each call, adds the product of the current elements of these panels."""
        if self.converts:
            return partial(self.add, A, B, inner)
        return partial(self._form, [*self._products(A, B, self.plan.A.conjugated, self.plan.B.conjugated)])

    def add_by_windows(
        self,
        panels: Sequence[tuple[Array, Array, Inner]],
        windows: Sequence[Window],
        completed: Callable[[Window], object],
        recorder: Recorder,
    ) -> None:
        """Add the products of the panels to one window of rows after another; call `completed` after each window."""
        for window in windows:
            with recorder.phase("compute"):
                for rows in starmap(slice, window):
                    part = self.part(rows, self.sums[rows])
                    for A, B, inner in panels:
                        part.add_wide(A[rows], B, inner)
            completed(window)

    def add_wide(self, A: Array, B: Array, inner: Inner = None) -> None:
        """Add a product over many inner indices.  If operands are converted, panels of the plan's width are multiplied.

        inner : the inner indices, if A or B has scales; None: 0, 1, 2, ...
        """
        inner = np.arange(A.shape[1]) if inner is None and any(self.scales) else inner
        width = max(1, min(self.plan.width, A.shape[1]) if self.converts else A.shape[1])
        for start in range(0, max(1, A.shape[1]), width):
            within = slice(start, start + width)
            self.add(A[:, within], B[within], None if inner is None else inner[within])

    def _products(self, A: Array, B: Array, conjugate_a: bool, conjugate_b: bool) -> Iterator[Callable[[Any], object]]:
        """Yield the product in parts that take a few milliseconds each, as functions of beta."""
        options = conjugate_a, conjugate_b, self.arithmetic.compute == "tf32"
        if self.formed is None:
            for a, b, c in self._slabs(A, B, self.sums):
                yield prepare(self.alpha, a, b, c, *options)
            return
        order = "F" if self.sums.strides[0] < self.sums.strides[1] else "C"
        hermitian = self.plan.A.conjugated != self.plan.B.conjugated
        lower, mirrored = not self.formed.flipped, self.call.mirrored and not (hermitian and self.alpha.imag)
        squares = SQUARE if mirrored and forms_squares(A, self.sums, hermitian, conjugate_a) else 0
        for rows, cols, inside, square in self.formed.tiles(self.arithmetic.corner_side, squares):
            part = A[rows], B[:, cols], self.sums[rows, cols]
            if square:
                yield prepare_square(self.alpha, part[0], part[2], lower, hermitian, conjugate_a)
                continue
            for a, b, c in self._slabs(*part) if inside else ():
                yield prepare(self.alpha, a, b, c, *options)
            if not inside:
                a, b, c = part
                corner = self.workspace["corner"][: c.size].reshape(c.shape, order=order)
                multiply = prepare(self.alpha, a, b, corner, *options)
                yield partial(_in_triangle, multiply, corner, c, self.formed.window(rows, cols))

    def _integers(self, A: Array, B: Array, C: Array) -> Callable[[Any], object]:
        def multiply(beta: Any) -> None:
            scale(beta, C)
            integer_accumulate(self.alpha, A, B, C, self.workspace["exact"], self.arithmetic.digits)

        return multiply

    def _slabs(self, A: Array, B: Array, C: Array) -> Iterable[tuple[Array, Array, Array]]:
        return product_slabs(A, B, C) if self.between else [(A, B, C)]

    def _ready(self, panel: Array, layout: Layout, workspace: Array, inner_axis: int = 1) -> tuple[Array, bool]:
        """Return the panel in the type that BLAS multiplies, and whether BLAS has to conjugate the panel."""
        if not workspace.size:
            return panel, layout.conjugated
        if self.arithmetic.emulation:  # the memory of slices is free, as no slices are formed
            workspace = np.ndarray(panel.size, self.arithmetic.accumulate, workspace)
        if (digits := self.arithmetic.digits) > 1:
            rows, cols = (n * digits if axis == inner_axis else n for axis, n in enumerate(panel.shape))
            return to_digits(panel, held_panel(rows, layout.order, cols, workspace), digits, inner_axis), False
        converted = held_panel(panel.shape[0], layout.order, panel.shape[1], workspace)
        Combine(conjugated=layout.conjugated, through=self.arithmetic.rounded)(converted, panel)
        return converted, False

    def _decode(self, panel: Array, strip: Strip | None, inner: Inner) -> None:
        """Multiply a converted panel by its scales, and round it if the plan does.  B's panel is passed transposed."""
        if strip and panel.size:
            assert inner is not None
            strip.apply(panel, inner)
            if self.arithmetic.rounded:
                Combine(through=self.arithmetic.rounded)(panel, panel)


def _in_triangle(multiply: Callable[[Any], object], corner: Array, C: Array, formed: Staircase, beta: Any) -> None:
    """Form a product plus beta C in `corner`; copy the elements of `corner` that are in the triangle to C."""
    if beta != 0:
        CONVERT(corner, C)
    multiply(beta)
    store_corner(C, corner, formed)
