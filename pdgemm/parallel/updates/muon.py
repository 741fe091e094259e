"""Muon: momentum whose matrices become orthogonal before they are added to parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count, as_real
from pdgemm.local.blas.orthogonal_stacks import MUON, STEPS, coefficients_of_steps, orthogonal_factors
from pdgemm.parallel.updates.update_rules import AdamW, UpdateRule, as_rule, in_parts


@dataclass(frozen=True)
class Muon:
    """Momentum whose matrices become orthogonal: p := (1 - rate weight_decay) p - rate rms sqrt(max(n, m)) O(u).

    m := momentum m + g, and u = g + momentum m, or u = m without `nesterov`.  O(u) is nearly the orthogonal factor of
    the n x m matrix u: see `orthogonal_factors`.  So a step of each element is about `rms` times the rate, as one of
    Adam is, and both take the same rate.

    steps, coefficients : of the iteration, as of `pdgemm.linalg.newton_schulz`.
    others : the rule of all other parameters: of vectors, and of matrices that `ShardedOptimizer` leaves.

    The state is m for matrices, and what `others` keeps for others.
    Raises ArgumentError.
    Jordan, Jin, Boza, You, Cesista, Newhouse & Bernstein, Muon: An optimizer for hidden layers in neural networks,
    2024; Liu et al., Muon is scalable for LLM training, arXiv:2502.16982, 2025: weight decay, and rms 0.2.
    """

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    rms: float = 0.2
    steps: int = STEPS
    coefficients: Sequence[float] | Sequence[Sequence[float]] = MUON
    others: UpdateRule = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        for name, above in (("momentum", -inf), ("weight_decay", -inf), ("rms", 0)):
            as_real(getattr(self, name), name, above)
        coefficients_of_steps(self.coefficients, as_count(self.steps, "steps", 1))
        if not (0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise ArgumentError(f"{self} has momentum in [0, 1) and weight_decay >= 0")
        if self.nesterov and not self.momentum:
            raise ArgumentError("Nesterov's step takes momentum > 0: pass nesterov=False")
        if isinstance(as_rule(self.others, "others"), Muon):
            raise ArgumentError(f"others is a rule of single elements, as AdamW, got {self.others!r}")

    @property
    def kept(self) -> tuple[str, ...]:
        return ("m",) if self.momentum else ()

    def add_momentum(self, g: np.ndarray, state: np.ndarray) -> None:
        """Overwrite a part of the gradients, flat, by u, and its state by the new m.  Local."""
        for part in in_parts(len(g)) if self.momentum else ():
            u, m, momentum = g[part], state[0, part], g.dtype.type(self.momentum)
            m *= momentum
            m += u
            u[:] = u + momentum * m if self.nesterov else m

    def whole_updates(self, stack: np.ndarray, work: np.ndarray | None = None) -> None:
        """Overwrite whole matrices u of one shape, (matrices, m, n) with m <= n, by rms sqrt(n) O(u).  Local.

        work : as of `orthogonal_factors`.
        """
        orthogonal_factors(stack, self.steps, self.coefficients, work)
        stack *= stack.dtype.type(self.rms * sqrt(stack.shape[2]))

    def update(self, p: np.ndarray, g: np.ndarray, state: np.ndarray, step: int, rate: float, decays: bool) -> None:
        """Overwrite parameters, as `UpdateRule.update`, where g is a part of what `whole_updates` has computed."""
        kind = p.dtype.type
        if decays and self.weight_decay:
            p *= kind(1 - rate * self.weight_decay)
        g *= kind(rate)
        p -= g
