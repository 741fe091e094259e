"""Moves of tensors: the exchange from one layout to another one, of all elements or of some indices of an axis."""

from __future__ import annotations

from time import perf_counter
from typing import TypeVar

from pdgemm.algorithms.indexing.selection import copy_pairs
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import is_readable, new_array
from pdgemm.schedules.exchanges.tensor_exchange import (
    NO_PAIRS,
    Pairs,
    index_products,
    matrix_to_read,
    spread_layout,
    stays_in_place,
)
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import TensorBase
from pdgemm.transport.block_copy import copy_permuted

Tensor = TypeVar("Tensor", bound=TensorBase)


def in_layout(
    T: Tensor,
    target: TensorLayout,
    pairs: Pairs = NO_PAIRS,
    name: str = "move",
    memory_limit: int | None = None,
    out: DistMatrix | None = None,
) -> Tensor:
    """Return a copy of T in another layout, or T itself if it has this layout.  Collective over the grid of T.

    target : the layout of the result, whose axis k is axis k of T.
    pairs  : for an axis of which only some indices are copied, the pairs of an index of T and an index of the result.
    memory_limit : bytes per rank for the message buffers.
    out    : the matrix of a tensor in the layout `target`, which gets the elements; it shares no memory with T.

    The local arrays of T are copied once, with their axes in the order of the result.  If each rank keeps its elements,
    that is all; otherwise they are packed, sent and unpacked.  `.report` has the words that were sent.
    """
    if out is None and not pairs and T.layout.same_owners(target):
        return T
    start, grid, X = perf_counter(), T.grid.base, T.unfolding
    layout = matrix_to_read(T.layout, target, T.dtype)
    stays = out is None and not pairs and stays_in_place(T.layout, target)
    there = grid.reshaped(target.grid_shape, target.rank_map)
    here = grid.reshaped(layout.distribution.grid_shape, layout.rank_map)
    with (agreement := together(grid.comm)) as arguments:
        arguments += [name, str(T.layout), str(target), T.dtype]
        ordered = T.local.transpose(target.rows + target.cols) if T.ndim else T.local  # (0, 0) where the number is not
        # elements that other ranks of the node cannot read are copied to where they can; conjugates are a private copy
        shares = X.shared and not X.conjugated
        in_place = bool(ordered.flags.c_contiguous) and (shares or not grid.shares_memory)
        shape = layout.distribution.local_shape(here.coords)
        local = read = ordered.reshape(shape) if in_place else _copied(ordered, shape, X, here)
        if out is not None:
            local = out.stored
        elif not stays:
            local = new_array(target.matrix.local_shape(there.coords), T.dtype, "C", there, devices.of(X.stored))
        readable = shares if in_place else is_readable(read, here)
        agreement.flag = not readable or not is_readable(local, there)
    shared = not agreement.flag
    result = DistMatrix(local, there, target.matrix, "C", shared=shared) if out is None else out
    if not stays:
        source = DistMatrix(read, here, layout.distribution, "C", shared=shared)
        copy_pairs(name, source, result, index_products(T.layout, target, pairs), start, memory_limit)
    return type(T)(result, target)


def spread(T: Tensor, target: TensorLayout) -> Tensor:
    """Return the elements of T that are broadcast to each rank's part of a tensor of this layout.  Collective.

    The axes of T are those of `target`, of the same extent or of extent 1.
    """
    return in_layout(T, *spread_layout(T.layout, target), name="broadcast")


def _copied(x: Array, shape: tuple[int, int], like: DistMatrix, grid: ProcessGrid) -> Array:
    """Return a copy of an array with rows contiguous, as a matrix of this shape.  Local."""
    copy = new_array(shape, x.dtype, "C", grid, devices.of(like.stored))
    copy_permuted(x, copy.reshape(x.shape))
    return copy
