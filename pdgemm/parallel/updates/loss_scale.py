"""The scale of the loss, which keeps small gradients in the range of 16-bit numbers: Micikevicius et al., Mixed
precision training, ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from pdgemm.errors import ArgumentError


@dataclass(frozen=True)
class LossScale:
    """The number by which the loss is multiplied, and gradients are divided.  A value: `after` returns the next one.

    scale : the number, a power of two, so that it changes no bit of a gradient in range.
    growth_every : steps without an overflow, one after the other, after which it doubles.
    good  : steps without an overflow since it has changed.
    least, most : it stays between these.

    Raises ArgumentError where the scale is not positive and finite, or a step number is out of range.
    """

    scale: float = 2.0**16
    growth_every: int = 2000
    good: int = 0
    least: float = 2.0**-14
    most: float = 2.0**24

    def __post_init__(self) -> None:
        if not (isfinite(self.scale) and self.scale > 0):
            raise ArgumentError(f"the scale of the loss is a positive number, got {self.scale!r}")
        if self.growth_every < 1 or self.good < 0 or not 0 < self.least <= self.most:
            raise ArgumentError(f"{self} has growth_every >= 1, good >= 0 and 0 < least <= most")
        if not self.least <= self.scale <= self.most:  # an overflow would let a smaller one grow
            raise ArgumentError(f"the scale of the loss is {self.least:g} to {self.most:g}, got {self.scale:g}")

    def after(self, overflow: bool) -> LossScale:
        """Return the scale of the next step.   overflow : whether the gradients of this step overflowed on any rank."""
        if overflow:
            return replace(self, scale=max(self.least, self.scale / 2), good=0)
        if self.good + 1 >= self.growth_every:
            return replace(self, scale=min(self.most, self.scale * 2), good=0)
        return replace(self, good=self.good + 1)
