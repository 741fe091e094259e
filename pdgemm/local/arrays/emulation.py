"""Emulated arithmetic of wide types: each operand of a product is cut into slices of few bits.

An operand is x = s (X_1 + 2^-b X_2 + 2^-2b X_3 + ...), where slices X_i have b bits and s is a power of two.  Products
of slices have few bits as well: tensor cores, or BLAS in float32, form them without rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

_EXACT = 2**24  # float32 represents all integers up to this one


@dataclass(frozen=True)
class Emulation:
    """How operands are cut into slices, and which products of slices are added up.

    slices : the number of slices of each operand.   bits : the bits of a slice.
    levels : products X_i Y_j with i + j <= levels + 1 are computed, the others are dropped.
    sums   : the type in which products are added up.
    scaled : slices are integers, and each row of A and column of B in a panel has its own scale s (see above), a power
        of two above its largest element.  Otherwise s = 1, and each element of a slice has its own exponent.
    error  : bound of the error relative to |A||B|, without rounding in the sums over k.  If `scaled`, it is relative to
        k times the largest element of the row of A times the largest element of the column of B.
    """

    slices: int
    bits: int
    levels: int
    sums: str
    scaled: bool
    error: float

    @cached_property
    def products(self) -> int:
        """The number of products of slices."""
        return sum(min(level, 2 * self.slices - level) for level in range(1, self.levels + 1))

    @property
    def widest(self) -> int:
        """The largest width of a panel for which float32 adds up the products of one level exactly."""
        return _EXACT // 4 ** (self.bits - 1) // self.slices

    @property
    def sums_dtype(self) -> np.dtype:
        return np.dtype(self.sums)


def _ozaki(slices: int) -> Emulation:
    return Emulation(slices, 7, slices, "float64", True, 4 * (slices + 1) * 2.0 ** (-7 * slices))


EMULATIONS = {
    "bf16x9": Emulation(3, 8, 5, "float32", False, 2.0**-23),
    "ozaki": _ozaki(8),
    **{f"ozaki-{slices}": _ozaki(slices) for slices in range(4, 13)},
}
