"""The scale of the loss, which keeps small gradients in the range of 16-bit numbers: Micikevicius et al., Mixed
precision training, ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count, as_real


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
        for name in ("scale", "least", "most"):
            as_real(getattr(self, name), name, above=0)
        as_count(self.growth_every, "growth_every", 1)
        as_count(self.good, "good", 0)
        if not self.least <= self.scale <= self.most:  # an overflow would let a smaller one grow
            raise ArgumentError(f"the scale of the loss is {self.least:g} to {self.most:g}, got {self.scale:g}")

    def after(self, overflow: bool) -> LossScale:
        """Return the scale of the next step.   overflow : whether the gradients of this step overflowed on any rank."""
        if overflow:
            return replace(self, scale=max(self.least, self.scale / 2), good=0)
        if self.good + 1 >= self.growth_every:
            return replace(self, scale=min(self.most, self.scale * 2), good=0)
        return replace(self, good=self.good + 1)
