"""Shapes of tensors: reshapes as runs of axes that are joined and split."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod
from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import LayoutError
from pdgemm.grids.tensor_layout import TensorLayout

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
