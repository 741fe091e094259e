"""Learning rates as functions of the step, counted from 0."""

from __future__ import annotations

from math import cos, pi

from pdgemm.errors import ArgumentError


def warmup_cosine(step: int, peak: float, warmup: int, steps: int, last: float = 0.0) -> float:
    """Return a rate that grows linearly to `peak` in `warmup` steps, and falls to `last` as a cosine until `steps`.

    Step s < warmup has the rate peak (s + 1) / warmup.  Goyal et al., arXiv:1706.02677, 2017; Loshchilov & Hutter,
    SGDR, ICLR 2017.
    """
    if not 0 <= warmup <= steps:
        raise ArgumentError(f"warm-up takes 0 to {steps} of the steps, got {warmup}")
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return last + (peak - last) * (1 + cos(pi * done)) / 2


def linear_scaling(rate: float, batch: int, base: int) -> float:
    """Return the rate for `batch` samples a step, where `rate` is right for `base` samples: rate batch / base."""
    return rate * batch / base
