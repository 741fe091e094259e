"""TensorLayout: which rank owns which elements of a tensor, as a matrix and a reading of it.  No MPI, no data.

The axes of a tensor are in two groups.  The rows of a matrix enumerate the indices of one group, its columns those of
the other, the first axis of a group slowest.  Only the first axis of a group is divided among ranks, so a local array
of the matrix is a local array of the tensor in another shape.  Take a tensor T of shape (4, 3, 2, 5), whose rows are
the axes (0, 1) and whose columns are the axes (3, 2), on a 2 x 1 grid:

    row of the matrix      0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    first index of T         0   |   1   |   2   |    3
    grid row                 0       0       1        1

A transposition of the tensor changes the numbers of its axes, and moves no element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from pdgemm.errors import LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout, transposed_rank_map

Axes = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class TensorLayout:
    """The owners of the elements of a tensor.

    shape : the extents of the axes.
    rows, cols : the axes that the rows, and the columns, of the matrix enumerate; together each axis once.
    first : the distribution of the first axis of `rows` over grid rows, and of that of `cols` over grid columns; one
            index on one part for a group without axes.
    rank_map : the rank at each grid position, row by row.

    >>> from pdgemm.grids.tensor_layout import TensorLayout
    >>> T = TensorLayout.even((4, 3, 2, 5), (0, 1), (3, 2), (2, 1))
    >>> T.matrix.shape, T.matrix.block
    ((12, 10), (6, 10))
    >>> T.local_shape((1, 0))
    (2, 3, 2, 5)
    """

    shape: tuple[int, ...]
    rows: Axes
    cols: Axes
    first: tuple[BlockCyclic, BlockCyclic]
    rank_map: tuple[int, ...]

    @classmethod
    def even(
        cls, shape: Sequence[int], rows: Sequence[int], cols: Sequence[int], grid: tuple[int, int],
        rank_map: tuple[int, ...] = (),
    ) -> TensorLayout:  # fmt: skip
        """Return a layout with one block of the first axis of each group on each grid row, or grid column.

        A group without axes is on one grid row, or column.   rank_map : by default the ranks in order.
        """
        groups = tuple(rows), tuple(cols)
        first = [BlockCyclic.even(shape[axes[0]], parts) if axes else BlockCyclic(1, 1, parts)
                 for axes, parts in zip(groups, grid)]  # fmt: skip
        return cls(tuple(shape), *groups, (first[0], first[1]), rank_map or tuple(range(prod(grid))))

    @classmethod
    def of_matrix(cls, layout: Layout, shape: Sequence[int], rows: Sequence[int], cols: Sequence[int]) -> TensorLayout:
        """Return the layout of a tensor whose matrix has this layout.

        Of a matrix in order "F" it is the layout of the transpose.
        Raises LayoutError where a block of the matrix ends within an index of the first axis of a group.
        """
        if layout.order == "F":
            return cls.of_matrix(layout.T, shape, cols, rows)
        first, dims = [], (layout.distribution.rows, layout.distribution.cols)
        for name, axes, dim in zip(("rows", "columns"), (rows, cols), dims):
            each = prod(shape[x] for x in axes[1:])
            extent = shape[axes[0]] if axes else 1
            if not axes and dim.parts > 1:
                raise LayoutError(f"a group without axes is on one grid row or column, not on {dim.parts}")
            if extent * each != dim.n:
                raise LayoutError(f"{dim.n} {name} are not the axes of extents {[shape[x] for x in axes]}")
            first.append(_divided(dim, extent, each, name))
        return cls(tuple(shape), tuple(rows), tuple(cols), (first[0], first[1]), layout.rank_map)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def grid_shape(self) -> tuple[int, int]:
        return self.first[0].parts, self.first[1].parts

    @cached_property
    def matrix(self) -> Distribution:
        """The distribution of the matrix."""
        dims = (_multiplied(dim, prod(self.shape[x] for x in axes[1:])) for dim, axes in self._groups)
        return Distribution(*dims)

    @property
    def _groups(self) -> tuple[tuple[BlockCyclic, Axes], tuple[BlockCyclic, Axes]]:
        return (self.first[0], self.rows), (self.first[1], self.cols)

    def of(self, dtype: np.dtype, conjugated: bool = False) -> Layout:
        """Return the layout of the matrix, whose local arrays have contiguous rows."""
        return Layout(self.matrix, self.rank_map, dtype, "C", conjugated)

    @property
    def divided(self) -> Axes:
        """The axes that are divided among several grid rows, or columns."""
        return tuple(axes[0] for dim, axes in self._groups if axes and dim.parts > 1)

    def divided_among(self, axes: Sequence[int]) -> bool:
        """Return whether any of these axes is divided."""
        return not {*self.divided}.isdisjoint(axes)

    def dim(self, axis: int) -> BlockCyclic:
        """Return the distribution of an axis; of an axis that is not divided, over one part."""
        for dim, axes in self._groups:
            if axes and axes[0] == axis:
                return dim
        return _whole(self.shape[axis])

    def local_shape(self, coords: tuple[int, int]) -> tuple[int, ...]:
        """Return the extents of the local array of the tensor at a grid position."""
        extents = [*self.shape]
        for (dim, axes), part in zip(self._groups, coords):
            if axes:
                extents[axes[0]] = dim.count(part)
        if min(coords) < 0:
            return (0,) * len(extents)
        return tuple(extents)

    def indices(self, axis: int, coords: tuple[int, int]) -> np.ndarray:
        """Return the indices of an axis that the rank at a grid position holds, ascending."""
        for (dim, axes), part in zip(self._groups, coords):
            if axes and axes[0] == axis:
                return dim.indices(part)
        return np.arange(self.shape[axis])

    def transposed(self, axes: Sequence[int]) -> TensorLayout:
        """Return the layout of the tensor whose axis k is axis `axes[k]` of this one.  No element moves."""
        place = {axis: at for at, axis in enumerate(axes)}
        rows, cols = (tuple(place[x] for x in group) for group in (self.rows, self.cols))
        return replace(self, shape=tuple(self.shape[x] for x in axes), rows=rows, cols=cols)

    @property
    def swapped(self) -> TensorLayout:
        """The layout of the same tensor whose matrix is the transpose.  No element moves."""
        ranks = transposed_rank_map(self.rank_map, self.grid_shape)
        return replace(self, rows=self.cols, cols=self.rows, first=self.first[::-1], rank_map=ranks)

    def expanded(self, axes: Sequence[int], extents: Sequence[int] = ()) -> TensorLayout:
        """Return the layout of a tensor with new axes, which are not divided, at these places of the result, ascending.

        extents : of the new axes; by default 1.
        """
        extents = extents or (1,) * len(axes)
        shape, old, first = [*self.shape], [*range(self.ndim)], [*self.first]
        for axis, n in zip(axes, extents):
            shape.insert(axis, n)
            old.insert(axis, -1)
        rows, cols = (tuple(old.index(x) for x in group) for group in (self.rows, self.cols))
        if not cols and axes:
            first[1] = _whole(extents[0])
        return replace(self, shape=tuple(shape), rows=rows, cols=(*cols, *axes), first=(first[0], first[1]))

    def without(self, axes: Sequence[int]) -> TensorLayout:
        """Return the layout of a part of the tensor with one index of each of these axes, none of which is divided."""
        kept, first = [x for x in range(self.ndim) if x not in axes], []
        for dim, group in self._groups:
            left = [x for x in group if x in kept]
            first.append(dim if left[:1] == [*group[:1]] else _whole(self.shape[left[0]] if left else 1))
        rows, cols = (tuple(kept.index(x) for x in group if x in kept) for group in (self.rows, self.cols))
        return replace(self, shape=tuple(self.shape[x] for x in kept), rows=rows, cols=cols, first=(first[0], first[1]))

    def same_owners(self, other: TensorLayout) -> bool:
        """Return whether the local arrays of both tensors have the same elements in the same order on all ranks."""
        return (self.shape, self.rows, self.cols, self.grid_shape, self.rank_map) == (
            other.shape, other.rows, other.cols, other.grid_shape, other.rank_map
        ) and all(a.canonical == b.canonical for a, b in zip(self.first, other.first))  # fmt: skip

    def __repr__(self) -> str:
        ranks = "" if self.rank_map == tuple(range(len(self.rank_map))) else f" of ranks {self.rank_map}"
        return f"TensorLayout({self}{ranks})"

    def __str__(self) -> str:
        groups = (f"({', '.join(map(str, axes))})" for axes in (self.rows, self.cols))
        extents = " x ".join(map(str, self.shape)) or "one number"
        blocks = " x ".join(str(dim.block) for dim in self.first)
        pr, pc = self.grid_shape
        return f"{extents}, axes {' by '.join(groups)} in blocks of {blocks} on a {pr} x {pc} grid"


def _whole(n: int) -> BlockCyclic:
    """Return the distribution of an axis that is not divided."""
    return BlockCyclic(n, max(1, n), 1)


def _multiplied(dim: BlockCyclic, times: int) -> BlockCyclic:
    """Return the distribution of rows, of which each index of an axis has `times`."""
    return BlockCyclic(dim.n * times, max(1, dim.block * times), dim.parts, dim.source, dim.skip * times)


def _divided(dim: BlockCyclic, extent: int, each: int, name: str) -> BlockCyclic:
    """Return the distribution of an axis, of which each index has `each` rows, or columns."""
    if not each or not extent:
        return BlockCyclic.even(extent, dim.parts)
    if dim.parts == 1:
        return BlockCyclic(extent, extent, 1)
    dim = dim.canonical
    if dim.block % each or dim.skip % each:
        raise LayoutError(f"a block of {dim.block} {name} ends within an index of the first axis, of {each} {name}")
    return BlockCyclic(extent, dim.block // each, dim.parts, dim.source, dim.skip // each)
