"""Shapes and keys of tensors: reshapes as runs of axes that are joined and split, and the indices that a key picks."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod
from operator import index
from typing import Any

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


def parsed_key(key: Any, shape: tuple[int, ...]) -> tuple[dict[int, Any], list[int], list[int], int]:
    """Return the indices by axis, the axes that are dropped, the places of new axes in the result, and an axis of it.

    The indices are a range of step 1, or an array.  The axis of the result becomes its first one: that of a list, if an
    index stands apart from the list (as in NumPy), or axis 0.  Raises KeyIndexError.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(x is not None and x is not ... for x in keys)
    if taken > len(shape) or sum(x is ... for x in keys) > 1:
        raise KeyIndexError(f"a tensor of shape {shape} has {len(shape)} axes and takes one `...`, got {shown(key)}")
    if not any(x is ... for x in keys):
        keys.append(...)
    at = next(at for at, x in enumerate(keys) if x is ...)
    keys[at : at + 1] = [slice(None)] * (len(shape) - taken)
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
    lists = [at for at, x in enumerate(keys) if isinstance(x, (list, range, np.ndarray)) and np.ndim(x) > 0]
    if len(lists) > 1:
        raise KeyIndexError("one axis of a tensor may be indexed by a list: T[rows][:, cols] for a second one")
    both = [at for at, x in enumerate(keys) if at in lists or not (x is None or isinstance(x, slice))]
    if lists and both[-1] - both[0] >= len(both):
        return picks, dropped, new, sum(x is None or isinstance(x, slice) for x in keys[: lists[0]])
    return picks, dropped, new, 0
