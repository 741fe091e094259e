"""The updates of optimizers, on flat parts of parameters: element by element, so that any part may be updated alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_real, shown

_AT_A_TIME = 1 << 14  # elements whose intermediate results stay in cache


@runtime_checkable
class UpdateRule(Protocol):
    """How parameters p are updated from gradients g.

    kept : names of the numbers that are kept for each parameter, 0 at first.
    """

    @property
    def kept(self) -> tuple[str, ...]: ...

    def update(self, p: np.ndarray, g: np.ndarray, state: np.ndarray, step: int, rate: float, decays: bool) -> None:
        """Overwrite p and its state.  Local.

        p, g   : flat arrays of one type, float32 or float64; g may be overwritten.
        state  : (len(kept), len(p)).   step : number of this update, counted from 1.   rate : the learning rate.
        decays : whether the weights are decayed.
        """


def as_rule(value: Any, name: str) -> UpdateRule:
    """Return an update rule.  Raises ArgumentError."""
    if isinstance(value, type) or not isinstance(value, UpdateRule):
        raise ArgumentError(f"{name} is an update rule, such as AdamW(), got {shown(value)}")
    return value


def described(rule: UpdateRule) -> str:
    """Return the name of a rule and its numbers as text, the same in every process."""
    text, others = repr(rule), getattr(rule, "others", None)
    if type(rule).__repr__ is object.__repr__:  # which shows an address alone
        text = f"{type(rule).__qualname__}({getattr(rule, '__dict__', {})})"
    return text if others is None else text.replace(repr(others), described(others))


@dataclass(frozen=True)
class AdamW:
    """Adam with weight decay that is not part of the gradient: p := p - rate (m^ / (sqrt(v^) + eps) + weight_decay p).

    m := beta1 m + (1 - beta1) g and v := beta2 v + (1 - beta2) g^2; m^ = m / (1 - beta1^step), v^ likewise.

    Kingma & Ba, Adam, ICLR 2015; Loshchilov & Hutter, Decoupled weight decay regularization, ICLR 2019.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "eps", "weight_decay"):
            as_real(getattr(self, name), name)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and np.float32(self.eps) > 0 and self.weight_decay >= 0):
            raise ArgumentError(f"{self} has betas in [0, 1), eps > 0, in float32 too, and weight_decay >= 0")

    @property
    def kept(self) -> tuple[str, ...]:
        return "m", "v"

    def update(self, p: np.ndarray, g: np.ndarray, state: np.ndarray, step: int, rate: float, decays: bool) -> None:
        kind, correction = p.dtype.type, (1 - self.beta1**step, 1 - self.beta2**step)
        for part in in_parts(len(p)):
            (m, v), x, y = state[:, part], p[part], g[part]
            m *= kind(self.beta1)
            m += kind(1 - self.beta1) * y
            v *= kind(self.beta2)
            np.square(y, out=y)
            y *= kind(1 - self.beta2)
            v += y
            np.divide(v, kind(correction[1]), out=y)
            np.sqrt(y, out=y)
            y += kind(self.eps)
            np.divide(m, y, out=y)
            y *= kind(rate / correction[0])
            if decays and self.weight_decay:
                x *= kind(1 - rate * self.weight_decay)
            x -= y


@dataclass(frozen=True)
class SGD:
    """Gradient descent: p := p - rate u, with u = g + weight_decay p, or with momentum the sum m := momentum m + u.

    nesterov : the step is u + momentum m.   Sutskever, Martens, Dahl & Hinton, ICML 2013.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay"):
            as_real(getattr(self, name), name)
        if not (0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise ArgumentError(f"{self} has momentum in [0, 1) and weight_decay >= 0")
        if self.nesterov and not self.momentum:
            raise ArgumentError("Nesterov's step takes momentum > 0")

    @property
    def kept(self) -> tuple[str, ...]:
        return ("m",) if self.momentum else ()

    def update(self, p: np.ndarray, g: np.ndarray, state: np.ndarray, step: int, rate: float, decays: bool) -> None:
        kind = p.dtype.type
        for part in in_parts(len(p)):
            x, u = p[part], g[part]
            if decays and self.weight_decay:
                u += kind(self.weight_decay) * x
            if self.momentum:
                m = state[0, part]
                m *= kind(self.momentum)
                m += u
                u = u + kind(self.momentum) * m if self.nesterov else m
            x -= kind(rate) * u


def in_parts(n: int) -> Iterator[slice]:
    """Return n elements in parts whose intermediate results stay in cache."""
    return (slice(start, min(n, start + _AT_A_TIME)) for start in range(0, n, _AT_A_TIME))
