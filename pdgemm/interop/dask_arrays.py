"""from_dask() makes a matrix from a dask array; each rank computes a share of the chunks."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import numpy as np

from pdgemm.algorithms.blocks import from_blocks
from pdgemm.errors import DTypeError, LayoutError
from pdgemm.grids.distribution import Block, even_owners
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays.device import HOST
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.names import DeviceName
from pdgemm.support.agreement import together


def from_dask(
    array: Any,
    *,
    grid: ProcessGrid,
    block: Block | None = None,
    source: tuple[int, int] = (0, 0),
    order: Order = "C",
    device: DeviceName = HOST,
) -> DistMatrix:
    """Make a matrix from a dask array (m, n).  Collective over the grid.

    array : the same dask.array.Array on every rank, whose chunks have known sizes.
    block, source, order, device : layout of the result, as in `DistMatrix.empty`.

    Each chunk is computed once, by one rank, with the scheduler of dask on this rank; then all elements are moved in
    one exchange.  A rank computes about 1 / ranks of the elements: consecutive chunks in row-major order.
    Raises DTypeError, LayoutError, ArgumentError or DeviceError, and any exception in a chunk, on every rank.
    """
    comm = communicator_of(grid)
    with together(comm) as arguments:
        chunks = _checked(array)
        arguments += ["interchange.from_dask", array.dtype, *map(str, chunks)]
        starts = [[0, *accumulate(lengths)] for lengths in chunks]
        numbers = [*product(*(range(len(lengths)) for lengths in chunks))]
        owners = even_owners([chunks[0][i] * chunks[1][j] for i, j in numbers], comm.size)
        mine = [numbers[at] for at in np.flatnonzero(owners == comm.rank)]
        rows, cols = ([(starts[axis][x[axis]], starts[axis][x[axis] + 1]) for x in mine] for axis in (0, 1))
    with together(comm):
        from dask import compute

        computed_chunks = compute(*(array.blocks[i, j] for i, j in mine))
        blocks = [x if x.dtype == array.dtype else x.astype(array.dtype) for x in computed_chunks]
    layout: dict[str, Any] = {"block": block, "source": source, "order": order, "device": device}
    return from_blocks(blocks, grid=grid, rows=rows, cols=cols, shape=array.shape, **layout)


def _checked(array: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of the chunks of rows and of the chunks of columns, after checking the array."""
    if not hasattr(array, "dask") or not hasattr(array, "chunks"):
        raise DTypeError(
            f"from_dask takes a dask array, got {type(array).__name__}; other arrays: DistMatrix.from_global"
        )
    if array.ndim != 2:
        raise LayoutError(f"a matrix has two dimensions, got a dask array of shape {array.shape}")
    if any(np.isnan(length) for lengths in array.chunks for length in lengths):
        raise LayoutError("the chunks of this dask array are of unknown sizes: call array.compute_chunk_sizes() first")
    element_type(array.dtype)
    rows, cols = (tuple(map(int, lengths)) for lengths in array.chunks)
    return rows, cols
