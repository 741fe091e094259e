"""The factor of the loss that keeps gradients of 16 bits from underflow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """A factor of the loss, which changes as that of torch.amp.GradScaler; powers of 2 cause no rounding.

    value : the factor.   growth, backoff : what it is multiplied by after `interval` steps with finite gradients, and
        after a step in which the gradient of any rank was not finite: all ranks skip the update of this step.
    steps : since the value has changed.   `vars(scale)` is its state.
    """

    value: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    steps: int = 0

    def update(self, is_finite: bool) -> None:
        """Change the factor after a step.   is_finite : whether the gradients of all ranks were finite."""
        self.steps += 1
        if not is_finite:
            self.value, self.steps = self.value * self.backoff, 0
        elif self.steps == self.interval:
            self.value, self.steps = min(self.value * self.growth, 2.0**127), 0
