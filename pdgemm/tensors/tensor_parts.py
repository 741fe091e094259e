"""Tensors in other shapes, and parts of tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, Self, TypeGuard

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays.device import Array, beside
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import Axis, TensorBase
from pdgemm.tensors.tensor_moves import in_layout
from pdgemm.tensors.tensor_shapes import new_shape, pieces_of, readable, reread


class TensorParts(TensorBase):
    """The methods that change the shape of a tensor, or pick a part of it."""

    def reshape(self, *shape: Any) -> Self:
        """Return the tensor in another shape, its elements in the order of their indices (NumPy's "C").  Collective.

        This is a view if the layout is one of the new tensor, too; otherwise one exchange moves the tensor first.
        """
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        with together(self.grid.comm) as arguments:
            extents = new_shape(wanted, self.shape)
            arguments += ["reshape", *extents, str(self.layout)]
            pieces = pieces_of(self.shape, extents)
            layout = reread(self.layout, extents, pieces)
        source = self
        if layout is None:
            source = in_layout(self, readable(self, extents, pieces), name="reshape")
            layout = reread(source.layout, extents, pieces)
            assert layout is not None
        return type(self)(source.unfolding, layout)

    def ravel(self) -> Self:
        """Return the tensor as one axis; see `reshape`.  Collective."""
        return self.reshape(-1)

    def squeeze(self, axis: Axis = None) -> Self:
        """Return the tensor without axes of extent 1, as numpy.squeeze.  Collective."""
        gone = [x for x, n in enumerate(self.shape) if n == 1] if axis is None else self.axes_of(axis)
        if any(self.shape[x] != 1 for x in gone):
            raise ArgumentError(f"only axes of extent 1 are dropped; axis={axis} of a tensor of shape {self.shape}")
        return self.reshape([n for x, n in enumerate(self.shape) if x not in gone])

    def _windowed(self, picks: dict[int, Any]) -> Self:
        """Return a copy of some indices of each axis; those of an axis that is divided follow each other.  Local."""
        there, key = self._window(picks)
        return self.with_elements(
            there, self.dtype, lambda: reduce(lambda x, axis: _taken(x, axis, key[axis]), picks, self.local)
        )

    def _window(self, picks: dict[int, Any]) -> tuple[TensorLayout, tuple[Any, ...]]:
        """Return the layout of a part, as for `_windowed`, and the key of this rank's elements of the part.  Local."""
        layout, shape, first, key = self.layout, [*self.shape], [*self.layout.first], [slice(None)] * self.ndim
        for axis, indices in picks.items():
            shape[axis] = len(indices)
            key[axis] = as_slice(indices) if isinstance(indices, range) else indices
        for at, axes in enumerate((layout.rows, layout.cols)):
            if axes and is_window(window := picks.get(axes[0])):
                ends = window.start, window.stop
                key[axes[0]] = first[at].local_window(*ends, self.grid.coords[at])
                first[at] = first[at].window(*ends)
            elif axes and axes[0] in picks:
                first[at] = BlockCyclic(shape[axes[0]], max(1, shape[axes[0]]), 1)
        return replace(layout, shape=tuple(shape), first=(first[0], first[1])), tuple(key)


def is_window(indices: Any) -> TypeGuard[range]:
    """Return whether indices are a range of step 1."""
    return isinstance(indices, range) and indices.step == 1


def as_slice(run: range) -> slice:
    """Return a range of indices as a slice."""
    return slice(run.start, None if run.stop < 0 else run.stop, run.step) if run else slice(0, 0)


def _taken(x: Array, axis: int, key: slice | np.ndarray) -> Array:
    """Return a slice of an array along an axis, or a copy of the elements with these indices."""
    return x[(*[slice(None)] * axis, key)] if isinstance(key, slice) else np.take(x, beside(key, x), axis=axis)
