"""Muon: momentum whose matrices become orthogonal before they are added to parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, sqrt

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.integers import as_count
from pdgemm.local.blas.local_gemm import multiply_stack
from pdgemm.matrix.argument_checks import as_real
from pdgemm.parallel.updates.update_rules import AdamW, UpdateRule, in_parts

_CHUNK_BYTES = 1 << 20  # temporaries of this size stay in cache
QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Muon:
    """Momentum whose matrices become orthogonal: p := (1 - rate weight_decay) p - rate rms sqrt(max(n, m)) O(u).

    m := momentum m + g, and u = g + momentum m, or u = m without `nesterov`.  O(u) is nearly the orthogonal factor of
    the n x m matrix u: see `orthogonal_factors`.  So a step of each element is about `rms` times the rate, as one of
    Adam is, and both take the same rate.

    steps, coefficients : of the iteration.
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
    steps: int = 5
    coefficients: tuple[float, float, float] = QUINTIC
    others: UpdateRule = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        as_real(self.rms, "rms", above=0)
        as_count(self.steps, "steps", 1)
        if not (0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise ArgumentError(f"{self} has momentum in [0, 1) and weight_decay >= 0")
        if self.nesterov and not self.momentum:
            raise ArgumentError("Nesterov's step takes momentum > 0: pass nesterov=False")
        if len(self.coefficients) != 3 or not all(isfinite(x) for x in self.coefficients):
            raise ArgumentError(f"the iteration has three coefficients, got {self.coefficients}")
        if isinstance(self.others, Muon) or not hasattr(self.others, "update"):
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

    def whole_updates(self, stack: np.ndarray) -> None:
        """Overwrite whole matrices u of one shape, (matrices, m, n) with m <= n, by rms sqrt(n) O(u).  Local."""
        orthogonal_factors(stack, self.steps, self.coefficients)
        stack *= stack.dtype.type(self.rms * sqrt(stack.shape[2]))

    def update(self, p: np.ndarray, g: np.ndarray, state: np.ndarray, step: int, rate: float, decays: bool) -> None:
        """Overwrite parameters, as `UpdateRule.update`, where g is a part of what `whole_updates` has computed."""
        kind = p.dtype.type
        if decays and self.weight_decay:
            p *= kind(1 - rate * self.weight_decay)
        g *= kind(rate)
        p -= g


@np.errstate(over="ignore", invalid="ignore")  # a warning may be an error, of the home alone
def orthogonal_factors(
    stack: np.ndarray, steps: int = 5, coefficients: tuple[float, float, float] = QUINTIC
) -> np.ndarray:
    """Overwrite matrices X of one shape by nearly their orthogonal factors, and return them.  Local.

    X := a X + (b A + c A^2) X with A = X X^T, so many times, from X / |X|_F: singular values, s := a s + b s^3 + c s^5,
    come to between about 0.7 and 1.2 unless they are very small, and never to 1.  A zero matrix stays zero.

    stack : (matrices, m, n), m <= n, float32 or float64, C-contiguous; (a, b, c) : the coefficients.

    Cost of each matrix: (4 n m^2 + 2 m^3) flops a step.  Each matrix is multiplied by calls of its own, so it has the
    same bits in any stack.
    Jordan et al. 2024, as `Muon`; Newton-Schulz steps: Higham, Functions of Matrices, 2008, 8.3.
    """
    (_, m, n), kind = stack.shape, stack.dtype.type
    a, b, c = map(kind, coefficients)
    for part in slabs(len(stack), (2 * m * m + m * n) * stack.itemsize, _CHUNK_BYTES):
        X = stack[part]
        for x in X:
            _to_norm_one(x)
        for _ in range(steps):
            A = multiply_stack(X, X.swapaxes(1, 2))
            B = multiply_stack(A, A)
            B *= c
            A *= b
            B += A  # b A + c A^2
            Y = multiply_stack(B, X)
            X *= a
            X += Y
    return stack


def _to_norm_one(x: np.ndarray) -> None:
    """Divide a matrix by its Frobenius norm, in two steps so that no square overflows or vanishes; zeros stay.  Local.

    Squares are added up in float64, and in an order that depends on the shape alone.
    """
    largest = np.abs(x).max(initial=0)
    if largest:
        x /= largest
        x /= x.dtype.type(sqrt(np.square(x, dtype=np.float64).sum()))
