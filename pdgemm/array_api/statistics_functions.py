"""Reductions along axes."""

from __future__ import annotations

from typing import Any

from pdgemm.array_api.array import Array


def sum(x: Array, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Array:
    """Return sums over some axes, all by default, of `dtype`; else of 64 bits for integers.  Collective."""
    return x.sum(axis, keepdims, dtype=dtype)


def prod(x: Array, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Array:
    """Return products over some axes, all by default, of `dtype`; else of 64 bits for integers.  Collective."""
    return x.prod(axis, keepdims, dtype=dtype)


def mean(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return means over some axes, all by default.  Collective."""
    return x.mean(axis, keepdims)


def var(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Return sums of |x - mean|^2 / (n - correction) over some axes, all by default.  Collective."""
    return x.var(axis, correction, keepdims)


def std(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Return the square roots of `var`.  Collective."""
    return x.std(axis, correction, keepdims)


def min(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return least elements over some axes, all by default.  Collective."""
    return x.min(axis, keepdims)


def max(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return largest elements over some axes, all by default.  Collective."""
    return x.max(axis, keepdims)


def all(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return whether all elements over some axes are not 0.  Collective."""
    return x.all(axis, keepdims)


def any(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return whether any element over some axes is not 0.  Collective."""
    return x.any(axis, keepdims)
