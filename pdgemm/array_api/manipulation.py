"""Shapes and axes of arrays, where NumPy's own functions have other arguments or results than the standard."""

from __future__ import annotations

import numpy as np

from pdgemm.array_api.array import Array
from pdgemm.errors import ArgumentError


def broadcast_arrays(*arrays: Array) -> tuple[Array, ...]:
    """Return copies of arrays, broadcast to their common shape.  Collective."""
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    return tuple(np.broadcast_to(x, shape) for x in arrays)  # type: ignore[misc]


def reshape(x: Array, /, shape: tuple[int, ...], *, copy: bool | None = None) -> Array:
    """Return x in another shape, its elements in the order of their indices.  Collective.

    copy : True: a copy; None: a view where that is possible; False: a view, or ArgumentError where x would have to be
        moved to another layout, on every rank.
    """
    result = x.reshape(shape)
    if copy is False and result.unfolding is not x.unfolding:
        raise ArgumentError(f"a reshape of {x.shape} to {result.shape} moves elements to other ranks: copy=True")
    return result.copy() if copy and result.unfolding is x.unfolding else result
