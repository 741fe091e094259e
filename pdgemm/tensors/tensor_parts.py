"""Tensors in other shapes, and parts of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Self

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays.device import Array, beside
from pdgemm.local.arrays.elementwise import set_broadcast
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import Axis, TensorBase
from pdgemm.tensors.tensor_moves import in_layout
from pdgemm.tensors.tensor_shapes import new_shape, parsed_key, pieces_of, readable, reread


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

    def __getitem__(self, key: Any) -> Any:
        """Return a part, as NumPy's basic indexing: slices of any step, indices, `...`, None; a list for an axis.

        A number or an array of one axis is on every rank, any other part a new tensor.  Nothing is sent, unless an
        axis that is divided is indexed by a number, a list or a slice whose step is not 1.  Collective.
        """
        with together(self.grid.comm) as arguments:
            picks, dropped, new, first = parsed_key(key, self.shape)
            arguments += ["T[...]", str(self.layout), dropped, new, *picks.values()]
            apart = [x for x in self.layout.divided if x in dropped or not isinstance(picks.get(x, range(0)), range)]
        shape = [len(picks.get(axis, range(n))) for axis, n in enumerate(self.shape)]
        if apart:
            kept = [x for x in range(self.ndim) if x not in dropped]
            target = self.default_layout([shape[x] for x in kept]).expanded(dropped)
            pairs = {x: IndexPairs(np.asarray(indices), np.arange(len(indices))) for x, indices in picks.items()}
            part = in_layout(self, target, pairs, name="T[...]")
        else:
            part = self._windowed(picks)
        part = type(self)(part.unfolding, part.layout.without(dropped))
        part = part.expanded(new)
        if first:
            part = part.transpose([first, *range(first), *range(first + 1, part.ndim)])
        return part._result() if self.ndim > 1 else part

    def put(self, start: Sequence[int], part: Self) -> Self:
        """Set the box of the shape of `part` whose first indices are `start` to the elements of `part`.  Collective.

        part : a tensor on the ranks of this one, of its type, in any layout.

        Returns `part` in the layout of this box, whose report has the words that were sent.
        """
        layout, key = self._window({axis: range(i, i + n) for axis, (i, n) in enumerate(zip(start, part.shape))})
        part = in_layout(part, layout, name="put")
        if part.local.size:
            set_broadcast(self.local[key], part.local)
        return part

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
            key[axis] = slice(indices.start, indices.stop) if isinstance(indices, range) else indices
        for at, axes in enumerate((layout.rows, layout.cols)):
            if axes and isinstance(window := picks.get(axes[0]), range):
                ends = window.start, window.stop
                key[axes[0]] = first[at].local_window(*ends, self.grid.coords[at])
                first[at] = first[at].window(*ends)
            elif axes and axes[0] in picks:
                first[at] = BlockCyclic(shape[axes[0]], max(1, shape[axes[0]]), 1)
        return replace(layout, shape=tuple(shape), first=(first[0], first[1])), tuple(key)


def _taken(x: Array, axis: int, key: slice | np.ndarray) -> Array:
    """Return a slice of an array along an axis, or a copy of the elements with these indices."""
    return x[(*[slice(None)] * axis, key)] if isinstance(key, slice) else np.take(x, beside(key, x), axis=axis)
