"""The layouts of new tensors, and of tensors of which some axes are reduced, broadcast or indexed.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.planning.search.grid_search import near_root

Groups = tuple[tuple[int, ...], tuple[int, ...]]


def grids_of(ranks: int, m: int, n: int) -> list[tuple[int, int]]:
    """Return a few grids of all ranks for an m x n matrix: with nearly square blocks, nearly square, and lines."""
    root = near_root(ranks)
    divisors = [x for x in range(1, int(ranks**0.5) + 1) if ranks % x == 0]
    sides = {*divisors, *(ranks // x for x in divisors)}
    fitting = min(sides, key=lambda x: abs(np.log((m + 1) / x) - np.log((n + 1) * x / ranks)))
    return [(x, ranks // x) for x in dict.fromkeys((fitting, root, ranks // root, 1, ranks))]


def default_layout(
    shape: tuple[int, ...], ranks: int, groups: Groups | None = None, rank_map: tuple[int, ...] = ()
) -> TensorLayout:
    """Return a layout in which the largest local array is as small as possible, on a grid of all ranks.

    groups : the axes of rows and of columns; by default the two longest axes are divided.
    """
    rank_map = rank_map or tuple(range(ranks))
    if groups is None:
        ndim = len(shape)
        longest = sorted(sorted(range(ndim), key=lambda x: (-shape[x], x))[:2])
        first, second = (*longest, ndim, ndim)[:2]
        down = [x for x in range(ndim) if x < second]
        groups = tuple(sorted(down, key=lambda x: x != first)), tuple(range(second, ndim))
    lines = [(1, 1)] if not any(groups) else [(ranks, 1)] if not groups[1] else [(1, ranks)] if not groups[0] else []
    extents = [shape[axes[0]] if axes else 1 for axes in groups]
    grid = min(
        lines or [(x, ranks // x) for x in range(1, ranks + 1) if ranks % x == 0],
        key=lambda grid: (prod(-(-n // parts) for n, parts in zip(extents, grid)), abs(grid[0] - grid[1]), grid),
    )
    return TensorLayout.even(shape, *groups, grid, rank_map[: prod(grid)])


def partial_layout(layout: TensorLayout, gone: Sequence[int]) -> TensorLayout:
    """Return the layout of the partial results of each rank, where these axes are reduced.

    An axis that is divided has one index for each part, the others of these axes have one index.
    """
    shape, first = [*layout.shape], [*layout.first]
    for axis in gone:
        shape[axis] = 1
    for at, axes in enumerate((layout.rows, layout.cols)):
        if axes and axes[0] in gone:
            parts = shape[axes[0]] = first[at].parts
            first[at] = BlockCyclic(parts, 1, parts)
    return replace(layout, shape=tuple(shape), first=(first[0], first[1]))


def undivided(layout: TensorLayout, axes: Sequence[int], members: tuple[int, ...]) -> TensorLayout:
    """Return the layout itself if none of these axes is divided; otherwise one in which other axes are divided."""
    if not set(layout.divided) & {*axes}:
        return layout
    there = sorted(axes)
    kept = tuple(n for x, n in enumerate(layout.shape) if x not in axes)
    return default_layout(kept, len(members), None, members).expanded(there, [layout.shape[x] for x in there])
