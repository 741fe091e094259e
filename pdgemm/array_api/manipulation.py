"""Shapes, axes and joins of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdgemm.array_api.array import Array
from pdgemm.errors import ArgumentError


def broadcast_arrays(*arrays: Array) -> tuple[Array, ...]:
    """Return copies of arrays, broadcast to their common shape.  Collective."""
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    return tuple(broadcast_to(x, shape) for x in arrays)


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape of arrays that are broadcast.  Local."""
    return np.broadcast_shapes(*shapes)


def broadcast_to(x: Array, /, shape: tuple[int, ...]) -> Array:
    """Return a copy of x, broadcast to a shape.  Collective."""
    return np.broadcast_to(x, shape)  # type: ignore[return-value]


def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    """Return arrays joined along an axis; None: all elements as one axis.  Collective."""
    return np.concatenate(arrays, axis)  # type: ignore[return-value]


def stack(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    """Return arrays of one shape joined along a new axis.  Collective."""
    return np.stack(arrays, axis)  # type: ignore[return-value]


def unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    """Return the parts of x with each index of an axis.  Collective."""
    return np.unstack(x, axis=axis)  # type: ignore[return-value]


def reshape(x: Array, /, shape: tuple[int, ...], *, copy: bool | None = None) -> Array:
    """Return x in another shape, its elements in the order of their indices.  Collective.

    copy : True: a copy; None: a view where that is possible; False: a view, or ArgumentError where x would have to be
        moved to another layout, on every rank.
    """
    result = x.reshape(shape)
    if copy is False and result.unfolding is not x.unfolding:
        raise ArgumentError(f"a reshape of {x.shape} to {result.shape} moves elements to other ranks: copy=True")
    return result.copy() if copy and result.unfolding is x.unfolding else result


def permute_dims(x: Array, /, axes: tuple[int, ...]) -> Array:
    """Return x with its axes in another order; a view.  Local."""
    return x.transpose(axes)


def matrix_transpose(x: Array, /) -> Array:
    """Return the matrices along the last two axes, transposed; a view.  Local."""
    return x.mT


def moveaxis(x: Array, source: Any, destination: Any, /) -> Array:
    """Return x with axes moved to other places; a view.  Local."""
    return np.moveaxis(x, source, destination)  # type: ignore[type-var]


def expand_dims(x: Array, /, axis: int | tuple[int, ...]) -> Array:
    """Return x with new axes of extent 1 at these places of the result; a view.  Local."""
    return np.expand_dims(x, axis)  # type: ignore[return-value]


def squeeze(x: Array, /, axis: int | tuple[int, ...]) -> Array:
    """Return x without these axes, of extent 1.  Collective."""
    return x.squeeze(axis)


def flip(x: Array, /, *, axis: Any = None) -> Array:
    """Return x with its elements along some axes, all by default, in reversed order.  Collective."""
    return np.flip(x, axis)  # type: ignore[return-value]


def roll(x: Array, /, shift: Any, *, axis: Any = None) -> Array:
    """Return x with its elements along some axes rolled by `shift` places; None: as one axis.  Collective."""
    return np.roll(x, shift, axis)  # type: ignore[return-value]


def tile(x: Array, repetitions: tuple[int, ...], /) -> Array:
    """Return x repeated as a whole along each axis.  Collective."""
    return np.tile(x, repetitions)  # type: ignore[return-value]


def repeat(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Return x with each element along an axis repeated; None: as one axis.  Collective."""
    return np.repeat(x, repeats, axis)  # type: ignore[return-value]
