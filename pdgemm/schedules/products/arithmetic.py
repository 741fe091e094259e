"""The arithmetic of a product: the types of its panels and sums, and the buffers of local products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdgemm.grids.layout import Layout
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.alignment import aligned_words
from pdgemm.local.arrays.emulation import EMULATIONS, Emulation
from pdgemm.local.blas.local_gemm import conjugates, padded
from pdgemm.schedules.schedule import Buffers
from pdgemm.schedules.staircase import LEAST, ON_DEVICE, TriangleName

SLAB = 1 << 16  # elements that are rounded or added to C at a time
TILE = 1 << 18  # elements of C that are formed from slices at a time: BLAS is slower on smaller tiles


@dataclass(frozen=True)
class Arithmetic:
    """The types in which panels are multiplied and their products accumulated.

    types      : the types of A, B and C.
    accumulate : the type in which products are accumulated.
    compute    : as in `Product`.   device : the device that multiplies; "": the host.
    """

    types: tuple[np.dtype, np.dtype, np.dtype]
    accumulate: np.dtype
    compute: str
    device: str

    @cached_property
    def panel_dtype(self) -> np.dtype:
        """The type of panels that are passed to BLAS.

        On the host integers are multiplied as floats, exactly: int8 elements as float32, all others by `digits`.
        The BLAS of a device multiplies 16-bit elements with sums in float32, and int8 elements with sums in int32.
        """
        a, b, _ = self.types
        if self.integers_on_device:
            return np.dtype(np.int8)
        if self.emulation:
            return np.dtype(np.float32)
        if self.device and self.compute in dtypes.HALF_NAMES:
            return np.dtype(self.compute)
        if self.device and self.accumulate == np.float32 and a == b in dtypes.NARROW:
            return a
        if not self.integer:
            return self.accumulate
        return np.dtype(np.float32 if {a, b} == {np.dtype("i1")} and self.accumulate == "i4" else np.float64)

    @cached_property
    def integer(self) -> bool:
        """Are products accumulated in an integer type, for which BLAS has no product?"""
        return self.accumulate not in dtypes.BLAS

    @cached_property
    def digits(self) -> int:
        """How many digits to base 2^16 of each integer are multiplied: see `local_gemm.integer_accumulate`."""
        short = max(x.itemsize for x in self.types[:2]) <= 2
        return 1 if not self.integer or short else self.accumulate.itemsize // 2

    @cached_property
    def integers_on_device(self) -> bool:
        """Are int8 panels multiplied by a device, from padded copies?  See `local_gemm.multiply_integers`."""
        return bool(self.device) and self.integer

    @cached_property
    def rounded(self) -> np.dtype | None:
        """The type to which operands are rounded on the host, where BLAS does not take this type; None: no rounding."""
        return np.dtype(self.compute) if self.compute in dtypes.HALF_NAMES and not self.device else None

    @cached_property
    def emulation(self) -> Emulation | None:
        """How operands are cut into slices that BLAS multiplies exactly; None: operands are not cut."""
        return EMULATIONS.get(self.compute)

    @cached_property
    def wants_alignment(self) -> bool:
        """Does a device multiply panels faster where rows begin at multiples of 16 bytes?  See docs/gpu-measured.md."""
        fast = (*dtypes.NARROW, np.dtype(np.float64))
        return bool(self.device) and (self.panel_dtype in fast or self.compute == "tf32")

    @cached_property
    def _update_dtype(self) -> np.dtype:
        return dtypes.arithmetic(self.accumulate, self.types[2])

    @property
    def corner_side(self) -> int:
        """Rows and columns of the largest tile of C that the diagonal crosses."""
        return ON_DEVICE if self.device else LEAST

    def converts(self, operand: Layout, order: str) -> bool:
        """Does each panel need a second buffer: for another type, or for a conjugate that BLAS cannot form?

        order : memory order of the array in which products are accumulated.
        """
        changed = self.rounded is not None or self.emulation is not None or operand.dtype != self.panel_dtype
        return changed or (operand.conjugated and not conjugates(operand.order, order))

    def held(self, rows: int, cols: int, order: str, dtype: np.dtype) -> int:
        """Return the words of memory of an array that is not sent; on a device its rows are aligned."""
        return aligned_words(rows, cols, order, dtype.itemsize) if self.device else rows * cols

    def update(self, words: int) -> tuple[int, np.dtype]:
        """Return size and type of the workspace in which `words` sums are rounded, or added to C."""
        return 0 if self.device else 2 * min(words, SLAB), self._update_dtype

    def buffers(
        self,
        mnk: tuple[int, int, int],
        A: Layout,
        B: Layout,
        order: str,
        triangle: TriangleName = "",
        copied: tuple[bool, bool] = (False, False),
    ) -> Buffers:
        """Return the buffers of local products: converted panels of A and B, and integers before they are added to C.

        mnk    : extents of the largest product.   order : memory order of the array of its sums.
        copied : is each panel of A, and of B, copied although BLAS takes its type?
        For a triangle there is also a buffer for the tile on the diagonal, only a part of which is written to C.
        """
        m, n, k = mnk
        corner = {"corner": (min(m * n, self.corner_side**2), self.accumulate)} if triangle else {}
        if self.emulation:
            return self._slice_buffers(self.emulation, m, n, k) | corner
        exact = 2 * min(SLAB, m * n) if self.integer else 0  # products as floats, and the same as integers
        convert_a, convert_b = (x or self.converts(operand, order) for x, operand in zip(copied, (A, B)))
        if self.integers_on_device:
            m, n, k = map(padded, mnk)
            exact, convert_a, convert_b = m * n, True, True
        wide = self.digits * k
        return {
            "converted A": (self.held(m, wide, A.order, self.panel_dtype) if convert_a else 0, self.panel_dtype),
            "converted B": (self.held(wide, n, B.order, self.panel_dtype) if convert_b else 0, self.panel_dtype),
            "exact": (exact, np.dtype(np.int32) if self.integers_on_device else self.panel_dtype),
        } | corner

    def _slice_buffers(self, how: Emulation, m: int, n: int, k: int) -> Buffers:
        """Return the buffers of `slices.SliceBuffers`."""
        tile, most = min(TILE, m * n), min(TILE, max(m * n, m * k, k * n))
        return {
            "converted A": (how.slices * m * k, self.panel_dtype),
            "converted B": (how.slices * k * n, self.panel_dtype),
            "exact": (tile, self.panel_dtype),
            "sums of slices": (most, how.sums_dtype),
            "exponents": (how.scaled * (m + n), np.dtype(np.int32)),
        }
