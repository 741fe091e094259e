"""Tensors in other shapes, as runs of axes that are joined and split, and parts of tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from math import gcd, prod
from operator import index
from typing import Any, Self, TypeGuard

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays.device import Array, beside
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import Axis, TensorBase, in_layout

Pieces = list[tuple[tuple[int, ...], tuple[int, ...]]]


def new_shape(shape: Any, present: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents of a reshaped tensor, of which one may be -1.  Raises LayoutError."""
    extents, size = [index(x) for x in np.atleast_1d(np.asarray(shape, dtype=object))], prod(present)
    known = prod(x for x in extents if x >= 0)
    if extents.count(-1) == 1 and known and size % known == 0:
        extents[extents.index(-1)] = size // known
    if min(extents, default=0) < 0 or prod(extents) != size:
        raise LayoutError(f"a tensor of shape {present} cannot become one of shape {tuple(extents)}")
    return tuple(extents)


def pieces_of(old: tuple[int, ...], new: tuple[int, ...]) -> Pieces:
    """Return the shortest runs of axes, before and after a reshape, of equal numbers of elements."""
    if not prod(old):
        return [(tuple(range(len(old))), tuple(range(len(new))))]
    pieces, ends = Pieces(), [0, 0]
    while min(ends[0] - len(old), ends[1] - len(new)) < 0:
        begins, sizes = [*ends], [1, 1]
        while True:
            side = int(sizes[0] > sizes[1] or ends[0] == len(old))
            if sizes[0] == sizes[1] and ends != begins and min(e - b for e, b in zip(ends, begins)) > 0:
                break
            if ends[side] == (len(old), len(new))[side]:
                break
            sizes[side] *= (old, new)[side][ends[side]]
            ends[side] += 1
        pieces.append((tuple(range(begins[0], ends[0])), tuple(range(begins[1], ends[1]))))
    return pieces


def reread(layout: TensorLayout, shape: tuple[int, ...], pieces: Pieces) -> TensorLayout | None:
    """Return the layout of the reshaped tensor with the same matrix; None if there is none."""
    groups = []
    for axes in (layout.rows, layout.cols):
        group, left = list[int](), list(axes)
        while left:
            old, new = next(x for x in pieces if left[0] in x[0])
            if tuple(left[: len(old)]) != old:
                return None
            group, left = group + list(new), left[len(old) :]
        groups.append(group)
    groups[1] += [x for old, new in pieces if not old for x in new]
    try:
        return TensorLayout.of_matrix(layout.of(np.dtype(bool)), shape, *groups)
    except LayoutError:
        return None


def readable(T: Any, shape: tuple[int, ...], pieces: Pieces) -> TensorLayout:
    """Return a layout of a tensor whose matrix is also one of the reshaped tensor.

    Axes of extent 1 that only one of the two tensors has are not divided.
    """
    thin, pieces = [x for old, new in pieces if not new for x in old], [x for x in pieces if all(x)]
    sizes = [prod(T.shape[x] for x in old) for old, _ in pieces]
    runs = T.default_layout(sizes)
    rows, cols = (tuple(x for piece in group for x in pieces[piece][0]) for group in (runs.rows, runs.cols))
    layout = TensorLayout.even(T.shape, rows, (*cols, *thin), runs.grid_shape, runs.rank_map)
    first = []
    for dim, group in zip(layout.first, (runs.rows, runs.cols)):
        if group and prod(sizes):
            old, new = (prod(extents[x] for x in axes[1:]) for extents, axes in zip((T.shape, shape), pieces[group[0]]))
            unit = new // gcd(old, new)
            dim = replace(dim, block=-(-dim.block // unit) * unit)
        first.append(dim)
    return replace(layout, first=(first[0], first[1]))


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
