"""The exchange between two layouts of a tensor, as an exchange of rows and columns of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution, UnevenBlocks
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.index_pairs import IndexProduct, RangePairs
from pdgemm.grids.layout import Layout
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.schedules.exchanges.exchange import Selection, plan_selection

Pairs = Mapping[int, IndexPairs | RangePairs]  # by axis
NO_PAIRS: Pairs = {}


@lru_cache(maxsize=256)
def matrix_to_read(source: TensorLayout, target: TensorLayout, dtype: np.dtype, conjugated: bool = False) -> Layout:
    """Return the layout, with the owners of `source`, of the matrix that enumerates axes as that of `target`.

    Its local arrays are those of the source with their axes in the order of the target's.  A rank has rows times
    columns, since each axis is divided by itself, but not blocks of equal length.
    """
    ranks, order, dims = np.array(source.rank_map).reshape(source.grid_shape), list[int](), list[UnevenBlocks]()
    for axes in (target.rows, target.cols):
        counts = np.ones(1, np.int64)
        for axis in axes:
            dim = source.dim(axis)
            counts = np.kron(counts, [dim.count(part) for part in range(dim.parts)])
            order += [at for at, group in enumerate((source.rows, source.cols)) if group and group[0] == axis]
        dims.append(UnevenBlocks.of(counts.tolist()))
    order += [at for at in (0, 1) if at not in order]
    rows, cols = dims
    return Layout(Distribution(rows, cols), tuple(ranks.transpose(order).ravel().tolist()), dtype, "C", conjugated)


def index_products(
    source: TensorLayout, target: TensorLayout, pairs: Pairs = NO_PAIRS
) -> tuple[IndexProduct, IndexProduct]:
    """Return the pairs of rows, and of columns, of `matrix_to_read` and of the target's matrix."""
    rows, cols = (
        IndexProduct(tuple((source.dim(x), target.dim(x), pairs.get(x)) for x in axes))
        for axes in (target.rows, target.cols)
    )
    return rows, cols


def plan_move(
    source: TensorLayout,
    target: TensorLayout,
    dtypes: tuple[np.dtype, np.dtype],
    size: int,
    pairs: Pairs = NO_PAIRS,
    conjugated: bool = False,
    ways: tuple[bool, str, bool, bool] = (False, "", False, False),
) -> Selection:
    """Return the exchange from one layout of a tensor to another one, among `size` ranks.

    dtypes : the types of the elements before and after.
    pairs  : for an axis of which only some indices are copied, the pairs of an index before and an index after.
    ways   : as of `plan_selection`.
    """
    ends = matrix_to_read(source, target, dtypes[0], conjugated), target.of(dtypes[1])
    return plan_selection(*ends, size, index_products(source, target, pairs), ways)


def spread_layout(source: TensorLayout, target: TensorLayout) -> tuple[TensorLayout, dict[int, IndexPairs]]:
    """Return the layout, and the pairs, by which each rank gets the elements that are broadcast to its part.

    source : the tensor that is broadcast, with extent 1 along some axes where `target` has another extent.
    Along such an axis the result has one index, or if the axis is divided one for each of its parts.
    """
    shape, first, pairs = [*source.shape], [*target.first], dict[int, IndexPairs]()
    for at, axes in enumerate((target.rows, target.cols)):
        if axes and shape[axes[0]] != target.shape[axes[0]]:
            parts = shape[axes[0]] = target.first[at].parts
            first[at] = BlockCyclic(parts, 1, parts)
            pairs[axes[0]] = IndexPairs(np.zeros(parts, np.int64), np.arange(parts))
    return replace(target, shape=tuple(shape), first=(first[0], first[1])), pairs


@lru_cache(maxsize=256)
def stays_in_place(source: TensorLayout, target: TensorLayout) -> bool:
    """Return whether each rank has the same elements in both layouts, perhaps in another order."""
    layout, matrix = matrix_to_read(source, target, np.dtype(bool)), target.matrix
    if layout.distribution.grid_shape != matrix.grid_shape or layout.rank_map != target.rank_map:
        return False
    return all(source.dim(x).canonical == target.dim(x).canonical for x in range(source.ndim))
