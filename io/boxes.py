"""Transfers between a tensor and a file, box by box; each rank accesses one hyperslab of a box.

A box is a range of indices of each axis of a dataset.  One axis of the box, or two neighbours of which the second is
whole, are divided among the ranks, the later axes are whole, and earlier axes have one index, or the indices of one
chunk.  So the share of a rank in a contiguous dataset is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import bilinear, checksum, text, zero
from pdgemm.errors import LayoutError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.io import pieces
from pdgemm.io.pieces import Progress, Transfer
from pdgemm.io.stored import first_axes
from pdgemm.local.arrays.arguments import as_count
from pdgemm.local.arrays.device import beside, to_host
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.tensors.dist_tensor import DistTensor
from pdgemm.tensors.tensor_base import in_layout


class Box(NamedTuple):
    """A range of indices of each axis of a dataset.   start : the first ones.   layout : the share of each rank."""

    start: tuple[int, ...]
    layout: TensorLayout

    @property
    def key(self) -> tuple[slice, ...]:
        return tuple(slice(i, i + n) for i, n in zip(self.start, self.layout.shape))

    def share(self, rank: int) -> tuple[list[int], tuple[int, ...]]:
        """Return the first indices and the extents of the part of a rank, which may be empty."""
        layout, first = self.layout, [*self.start]
        across = layout.grid_shape[1]
        coords = divmod(rank, across) if rank < len(layout.rank_map) else (-1, -1)
        for dim, axes, part in zip(layout.first, (layout.rows, layout.cols), coords):
            if axes and dim.count(part):
                first[axes[0]] += dim.block * part
        return first, layout.local_shape(coords)


def boxes(extents: Sequence[int], unit: Sequence[int], ranks: int) -> list[Box]:
    """Return the boxes of a dataset, in which a rank has at most `pieces.ELEMENTS` elements, or one unit.

    unit : indices along each axis that are accessed together, as those of a chunk.
    """
    if 0 in extents:
        return []
    ndim, counts = len(extents), [-(-n // u) for n, u in zip(extents, unit)]
    most = max(1, pieces.ELEMENTS // prod(unit))  # units of a rank
    axis = next(x for x in range(ndim) if prod(counts[x + 1 :]) <= most)
    each = min(-(-counts[axis] // ranks), most // prod(counts[axis + 1 :]))
    across = min(ranks, -(-counts[axis] // each))
    down = min(ranks // across, counts[axis - 1]) if axis and across * each >= counts[axis] else 1
    steps = [*unit[:axis], across * each * unit[axis], *extents[axis + 1 :]]
    if axis:
        steps[axis - 1] *= down
    groups = (axis - 1, *range(axis - 1)) if axis else (), tuple(range(axis, ndim))
    chosen = list[Box]()
    for start in product(*(range(0, n, step) for n, step in zip(extents, steps))):
        shape = tuple(min(n - i, step) for n, i, step in zip(extents, start, steps))
        rows = BlockCyclic(shape[axis - 1], unit[axis - 1], down) if axis else BlockCyclic(1, 1, 1)
        cols = BlockCyclic(shape[axis], unit[axis] * -(-shape[axis] // (unit[axis] * across)), across)
        chosen.append(Box(start, TensorLayout(shape, *groups, (rows, cols), tuple(range(down * across)))))
    return chosen


def as_saved(matrix: Any, ndim: int, grid: ProcessGrid | None) -> tuple[Any, int]:
    """Return the matrix or the tensor to save, and the dimensions of its dataset; a vector becomes one column.

    grid : the ranks that hold an array; None: all.  Collective for an array, which the ranks compare.
    """
    if isinstance(matrix, np.ndarray) and matrix.ndim == 1:
        return DistMatrix.from_global(matrix[:, None], grid=grid), 1
    if isinstance(matrix, DistTensor):
        return (matrix.expanded([1]) if matrix.ndim == 1 else matrix), matrix.ndim
    return matrix, ndim


def unfolded(A: Any) -> Any:
    """Return the matrix that has the elements of a tensor; a matrix unchanged."""
    return A.unfolding if isinstance(A, DistTensor) else A


def check_dimensions(what: str, A: DistMatrix | DistTensor, ndim: int) -> None:
    """Raise LayoutError where the dataset of a matrix or of a tensor cannot have so many dimensions."""
    if isinstance(A, DistTensor):
        if not ndim:
            raise LayoutError(f"{what}: a tensor without axes is a number, and cannot be saved")
    elif as_count(ndim, "ndim", 1) > 2 or (ndim == 1 and A.shape[1] != 1):
        raise LayoutError(f"{what}: a matrix of shape {A.shape} cannot be saved with ndim={ndim}")


def write(A: DistMatrix | DistTensor, put: Transfer, unit: tuple[int, ...], progress: Progress | None = None) -> None:
    """Write a matrix or a tensor to a dataset.  Collective over its grid; all ranks call `put` equally often."""
    if isinstance(A, DistMatrix):
        pieces.write_pieces(A, put, unit, progress)
        return
    for box, first, _ in _each(A, unit, progress):
        part = in_layout(A[box.key], box.layout, name="write")
        with together(A.grid.comm):
            put(*first, np.ascontiguousarray(to_host(part.local)))


def read(T: DistTensor, get: Transfer, unit: tuple[int, ...], progress: Progress | None = None) -> None:
    """Read a tensor from a dataset.  Collective over its grid; all ranks call `get` equally often."""
    for box, first, own in _each(T, unit, progress):
        with together(T.grid.comm):
            block = np.empty(own, T.dtype)
            get(*first, block)
        part = T.with_elements(box.layout, T.dtype, lambda: beside(block, T.unfolding.stored))  # noqa: B023
        T[box.key] = part


def _each(
    T: DistTensor, unit: tuple[int, ...], progress: Progress | None
) -> Iterator[tuple[Box, list[int], tuple[int, ...]]]:
    """Yield each box of the dataset of a tensor, and the first indices and the extents of this rank's part."""
    comm, notify = T.grid.comm, GuardedCallback(progress)
    every = boxes(T.shape, unit, comm.size)
    for number, box in enumerate(every, 1):
        yield box, *box.share(comm.rank)
        notify(number, len(every))
    agree(comm, notify.error)


def dataset_checksum(
    extents: tuple[int, ...], dtype: np.dtype, get: Transfer, unit: tuple[int, ...], comm: MPI.Intracomm
) -> str:
    """Return the checksum of the dataset, which equals that of the matrix or tensor.  Collective."""
    if len(extents) == 2:
        return pieces.file_checksum((extents[0], extents[1]), dtype, get, unit, comm)
    total = zero()
    for box in boxes(extents, unit, comm.size):
        first, own = box.share(comm.rank)
        with together(comm):
            block = np.empty(own, dtype)
            get(*first, block)
            total += _sum_of(block, [np.arange(i, i + n) for i, n in zip(first, own)], extents)
    return text(comm, total)


def checksum_of(A: DistMatrix | DistTensor) -> str:
    """Return the checksum of a matrix; of a tensor that of the matrix with `stored.first_axes` as rows.  Collective."""
    if isinstance(A, DistMatrix):
        return checksum(A)
    with together(A.grid.comm) as arguments:
        arguments += ["checksum", A.shape, A.dtype]
        total, local = zero(), A.local
        indices = A.indices() if local.size else []
        for box in boxes(local.shape, (1,) * local.ndim, 1):  # few elements at a time, since each box is copied
            own = [x[key] for x, key in zip(indices, box.key)]
            total += _sum_of(to_host(local[box.key]), own, A.shape)
    return text(A.grid.comm, total)


def _sum_of(block: np.ndarray, indices: Sequence[np.ndarray], extents: tuple[int, ...]) -> np.ndarray:
    """Return the term of a part of a dataset in its checksum.   indices : those of the part along each axis.  Local."""
    if not block.size:
        return zero()
    axes = first_axes(extents)
    rows, cols = (
        np.ravel_multi_index(np.ix_(*indices[group]), extents[group]).ravel()
        for group in (slice(axes), slice(axes, None))
    )
    return bilinear(block.reshape(len(rows), len(cols)), rows, cols)
