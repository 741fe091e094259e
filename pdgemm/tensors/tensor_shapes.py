"""Shapes and keys of tensors: reshapes as runs of axes that are joined and split, and the indices that a key picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod
from operator import index
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import KeyIndexError, LayoutError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.keys import picked_along

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


class ParsedKey(NamedTuple):
    """What a key of slices, indices, new axes and one list picks from a tensor.

    picks   : by axis, the indices where these are not all: a range of step 1, or an array.
    dropped : the axes that an index removes.   new : the places of new axes in the part.
    first   : the axis of the part that becomes its first one: that of a list, if an index stands apart from the list
              (as in NumPy), else 0.
    """

    picks: dict[int, Any]
    dropped: list[int]
    new: list[int]
    first: int

    def extents(self, shape: tuple[int, ...]) -> list[int]:
        """Return how many indices of each axis are picked from a tensor of this shape."""
        return [len(self.picks.get(axis, range(n))) for axis, n in enumerate(shape)]

    def result(self, shape: tuple[int, ...]) -> list[int]:
        """Return the extents of the part of a tensor of this shape."""
        part = [n for axis, n in enumerate(self.extents(shape)) if axis not in self.dropped]
        for place in self.new:
            part.insert(place, 1)
        return [*part[self.first : self.first + 1], *part[: self.first], *part[self.first + 1 :]]

    def aligned(self, value: Any, ndim: int) -> Any:
        """Return a tensor or an array with the axes of the part as one with the axes of the tensor.  Collective."""
        value = with_axes(value, ndim - len(self.dropped) + len(self.new))
        value = np.moveaxis(value, 0, self.first) if self.first else value
        return np.expand_dims(np.squeeze(value, tuple(self.new)) if self.new else value, tuple(self.dropped))


def with_axes(value: Any, ndim: int) -> Any:
    """Return a tensor or an array with more first axes of extent 1, or fewer.  Collective for a tensor."""
    extra = np.ndim(value) - ndim
    return value.reshape(value.shape[extra:]) if extra > 0 else np.expand_dims(value, tuple(range(-extra)))


def check_broadcast(value: tuple[int, ...], shape: Sequence[int]) -> None:
    """Raise LayoutError where elements of one shape cannot be broadcast to another one."""
    if any(n not in (1, m) for n, m in zip(value[::-1], [*shape[::-1], *[1] * len(value)])):
        raise LayoutError(f"elements of shape {value} cannot be broadcast to {tuple(shape)}")


def whole_key(keys: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return a key with a slice for each axis that it leaves out.  Raises KeyIndexError."""
    keys = list(keys)
    taken = sum(np.ndim(x) if is_mask(x) else 1 for x in keys if x is not None and x is not ...)
    if taken > len(shape) or sum(x is ... for x in keys) > 1:
        raise KeyIndexError(
            f"a tensor of shape {shape} has {len(shape)} axes and takes one `...`, got {shown(tuple(keys))}"
        )
    at = next((at for at, x in enumerate(keys) if x is ...), len(keys))
    keys[at : at + 1] = [slice(None)] * (len(shape) - taken)
    return keys


def is_mask(x: Any) -> bool:
    """Return whether a part of a key is a truth value, or an array or a tensor of them, but no list of one axis."""
    listed = isinstance(x, np.ndarray) and x.ndim == 1
    return isinstance(x, bool) or (getattr(x, "dtype", None) == np.dtype(bool) and not listed)


def check_mask(mask: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise KeyIndexError where a mask of this shape has not the extents of first axes of a tensor, or no elements."""
    if len(mask) > len(shape) or any(m not in (n, 0) for m, n in zip(mask, shape)):
        raise KeyIndexError(f"a mask of shape {mask} for axes of extents {shape}")


def is_whole(keys: Sequence[Any]) -> bool:
    """Return whether a key names all indices of all axes."""
    return all(isinstance(x, slice) and x == slice(None) for x in keys)


def is_list(x: Any) -> bool:
    """Return whether a part of a key has indices one by one: a range, an array or a tensor with axes."""
    return isinstance(x, range) or (hasattr(x, "dtype") and np.ndim(x) > 0)


def parsed_key(keys: Sequence[Any], shape: tuple[int, ...]) -> ParsedKey:
    """Return what a key of slices, indices, new axes and one list picks.  Raises KeyIndexError."""
    keys = whole_key(keys, shape)
    picks, dropped, new, axis, place = dict[int, Any](), list[int](), list[int](), 0, 0
    for x in keys:
        if x is None:
            new.append(place)
            place += 1
            continue
        one = picked_along(axis, x, shape[axis])
        if one.dropped:
            dropped.append(axis)
        place += not one.dropped
        if one.dropped or not isinstance(one.indices, range) or len(one.indices) != shape[axis]:
            picks[axis] = one.indices
        axis += 1
    lists = [at for at, x in enumerate(keys) if is_list(x)]
    if lists and apart(keys):
        return ParsedKey(picks, dropped, new, sum(x is None or isinstance(x, slice) for x in keys[: lists[0]]))
    return ParsedKey(picks, dropped, new, 0)


def apart(keys: Sequence[Any]) -> bool:
    """Return whether slices or new axes stand between indices and lists of a key."""
    both = [at for at, x in enumerate(keys) if not (x is None or isinstance(x, slice))]
    return both[-1] - both[0] >= len(both)
