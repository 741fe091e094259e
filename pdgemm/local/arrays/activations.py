"""The epilogue of a product on the host: scale, bias, activation and residual, applied to tiles that stay in cache.

The activations are those of cuBLASLt's and PyTorch's epilogues: relu; gelu, z Phi(z) with the normal distribution Phi,
and its approximation gelu_tanh (Hendrycks & Gimpel, arXiv:1606.08415, 2016); silu, z / (1 + exp(-z)) (Elfwing, Uchibe &
Doya, Neural Networks 107, 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np
import scipy  # SciPy loads its packages, which takes long, when they are first used

from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.element_functions import tiles

_TILE = 1 << 16  # elements of a tile; it and its temporaries stay in cache
_ROOT_HALF, _ROOT_2_PI, _CUBIC = sqrt(0.5), sqrt(2 * pi), 0.044715
_TANH = 2 / _ROOT_2_PI


@dataclass(frozen=True)
class Activation:
    """A function f of real numbers z.  Where z is NaN, f and f' are NaN.

    value : value(z, out) sets out, which may be z, to f(z).   derivative : returns f'(z).
    in_c, slope_in_c : statements of a GPU kernel, z := f(z) and z := f'(z), in which R is the type of z.
    """

    value: Callable[[np.ndarray, np.ndarray], object]
    derivative: Callable[[np.ndarray], np.ndarray]
    in_c: str
    slope_in_c: str


def _tanh(z: np.ndarray) -> np.ndarray:
    """Return tanh(sqrt(2 / pi) (z + 0.044715 z^3))."""
    t = z * z
    t *= _TANH * _CUBIC
    t += _TANH
    t *= z
    return np.tanh(t, out=t)


def _gelu_tanh(z: np.ndarray, out: np.ndarray) -> None:
    weight = _tanh(z)
    weight += 1
    weight *= 0.5
    np.multiply(z, weight, out=out)


def _tanh_slope(z: np.ndarray) -> np.ndarray:
    t = _tanh(z)
    return (1 + t) / 2 + z / 2 * (1 - t * t) * _TANH * (1 + 3 * _CUBIC * z * z)


def _one_and_exp(z: np.ndarray) -> np.ndarray:
    """Return 1 + exp(-z), infinity where it overflows."""
    t = np.negative(z)
    np.exp(t, out=t)
    t += 1
    return t


def _silu_slope(z: np.ndarray) -> np.ndarray:
    s = np.reciprocal(_one_and_exp(z))
    return s * (1 + z * (1 - s))


ACTIVATIONS = {
    "relu": Activation(
        lambda z, out: np.maximum(z, 0, out=out),
        lambda z: np.heaviside(z, 0),
        "if (z < 0) z = R(0)",
        "if (z > 0) z = R(1); if (z <= 0) z = R(0)",
    ),
    "gelu": Activation(
        lambda z, out: np.multiply(z, scipy.special.ndtr(z), out=out),
        lambda z: scipy.special.ndtr(z) + z * np.exp(z * z / -2) / _ROOT_2_PI,
        f"z = z * erfc(z * R({-_ROOT_HALF!r})) * R(0.5)",
        f"z = erfc(z * R({-_ROOT_HALF!r})) * R(0.5) + z * exp(z * z * R(-0.5)) * R({1 / _ROOT_2_PI!r})",
    ),
    "gelu_tanh": Activation(
        _gelu_tanh,
        _tanh_slope,
        f"z = z * (R(1) + tanh(z * (R(1) + z * z * R({_CUBIC!r})) * R({_TANH!r}))) * R(0.5)",
        f"R t = tanh(z * (R(1) + z * z * R({_CUBIC!r})) * R({_TANH!r})); "
        f"z = (R(1) + t + z * (R(1) - t * t) * (R(1) + z * z * R({3 * _CUBIC!r})) * R({_TANH!r})) * R(0.5)",
    ),
    "silu": Activation(
        lambda z, out: np.divide(z, _one_and_exp(z), out=out),
        _silu_slope,
        "z = z / (R(1) + exp(-z))",
        "R t = R(1) / (R(1) + exp(-z)); z = t * (R(1) + z * (R(1) - t))",
    ),
}


class Finish(NamedTuple):
    """The operation C := f(scale S + bias) + residual, or, for gradients, C := scale S f'(aux) + residual.  Local.

    activation : a name of ACTIVATIONS; "": f is the identity.
    scale, bias, residual : numbers, or arrays that are broadcast to the shape of C; None: left out.
    aux : an array of the shape of C, overwritten with scale S + bias; for gradients, it is read.
    """

    activation: str = ""
    gradient: bool = False
    scale: Any = None
    bias: Any = None
    residual: Array | None = None
    aux: Array | None = None

    @property
    def T(self) -> Finish:
        """The operation on transposed arrays."""
        operands: tuple[Any, ...] = self[2:]
        return Finish(self.activation, self.gradient, *(x.T if np.ndim(x) else x for x in operands))

    def __call__(self, C: Array, sums: Array) -> None:
        """Apply the operation to sums S, in their type, and round the result to the type of C; C may be S."""
        if not C.size:
            return
        if C.strides[0] < C.strides[1]:
            self.T(C.T, sums.T)
        elif device := of(C):
            device.finish(self, C, sums)
        else:
            for rows, cols in tiles(C.shape[0], C.shape[1], _TILE):
                operands = [_part(x, rows, cols) for x in self[2:]]
                self._replace(**dict(zip(self._fields[2:], operands)))._tile(C[rows, cols], sums[rows, cols])

    def _tile(self, C: np.ndarray, sums: np.ndarray) -> None:
        """Apply the operation to one tile, in C itself if C has the type of the sums, else in a temporary array."""
        f, dtype = ACTIVATIONS.get(self.activation), sums.dtype
        z = sums
        out = C if C.dtype == dtype else np.empty(sums.shape, dtype)
        if self.scale is not None:
            z = np.multiply(z, _in(dtype, self.scale), out=out)
        if self.bias is not None:
            z = np.add(z, _in(dtype, self.bias), out=out)
        if self.gradient:
            assert f is not None and self.aux is not None
            z = np.multiply(z, f.derivative(_in(dtype, self.aux)), out=out)
        else:
            if self.aux is not None:
                np.copyto(self.aux, z, casting="unsafe")
            if f:
                f.value(z, out)
                z = out
        if self.residual is not None:
            z = np.add(z, _in(dtype, self.residual), out=out)
        if z is not C:
            np.copyto(C, z, casting="unsafe")


def _part(x: Any, rows: slice, cols: slice) -> Any:
    """Return the part of an operand in a tile; a dimension of length 1 is broadcast."""
    if np.ndim(x) == 0:
        return x
    return x[rows if len(x) > 1 else slice(None), cols if x.shape[1] > 1 else slice(None)]


def _in(dtype: np.dtype, x: Any) -> Any:
    return x.astype(dtype, copy=False) if np.ndim(x) else x
