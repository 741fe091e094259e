"""Tensors on a line of ranks: pieces of all ranks that are joined, and rows that are read or set by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from pdgemm.algorithms.indexing.selection import copy_pairs
from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic, Distribution, UnevenBlocks
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.index_pairs import DealtPairs
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.linalg.work import Work
from pdgemm.local.arrays.device import Array, beside, of, to_host
from pdgemm.local.arrays.elementwise import set_broadcast
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import is_readable, new_array
from pdgemm.planning.tensors.tensor_layouts import partial_layout, undivided
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import TensorBase, in_layout

Tensor = TypeVar("Tensor", bound=TensorBase)
BATCH = 1 << 21  # elements that each rank fetches at a time


def line_layout(shape: Sequence[int], members: tuple[int, ...]) -> TensorLayout:
    """Return the layout in which only the first axis is divided, evenly, among these ranks in ascending order."""
    return TensorLayout.even(shape, (0,), range(1, len(shape)), (len(members), 1), tuple(sorted(members)))


def in_line(T: Any, work: Work, shape: Sequence[int] | None = None) -> Any:
    """Return a tensor, in this shape, of which only the first axis is divided, evenly, among all ranks.  Collective.

    work : records the moves.   shape : by default one axis.
    """
    flat = recorded(work, T, T.reshape([T.size] if shape is None else shape))
    return recorded(work, flat, in_layout(flat, line_layout(flat.shape, T.grid.members), name=work.name))


def recorded(work: Work, old: TensorBase, new: Any) -> Any:
    """Return a tensor in a new layout or shape, and record the move if it has elements of its own.  Local."""
    return new if new.unfolding is old.unfolding else work.did(new)


def deal(rows: Array, sizes: Sequence[int] | np.ndarray, grid: ProcessGrid, work: Work) -> tuple[Array, np.ndarray]:
    """Send rows of an array to the ranks: the first sizes[0] to the lowest rank of the grid, and so on.  Collective.

    rows  : (sum of sizes, n), of one type and one n on all ranks.
    sizes : one number for each of `grid.members`, in ascending order.
    work  : records the words.

    Returns the rows that this rank received, those of the lowest rank first, and how many are from each rank.
    Cost per rank: an allgather of P^2 integers; each row for another rank is sent once, packed, in one exchange.
    """
    start, comm, members, width = perf_counter(), grid.comm, sorted(grid.members), rows.shape[1]
    every = np.empty((comm.size, len(members)), np.int64)
    comm.Allgather(np.array(sizes, np.int64), every)
    every = every[members]
    there = grid.base.reshaped((len(members), 1), tuple(members))
    cols, indices = BlockCyclic(width, max(1, width), 1), np.arange(width)
    layouts = [Distribution(UnevenBlocks.of(every.sum(axis).tolist()), cols) for axis in (1, 0)]
    with (agreement := together(comm)):
        local = [new_array(x.local_shape(there.coords), rows.dtype, "C", there, of(rows)) for x in layouts]
        if rows.size:
            set_broadcast(local[0], rows)
        agreement.flag = not all(is_readable(x, there) for x in local)
    sent, received = (DistMatrix(x, there, y, "C", shared=not agreement.flag) for x, y in zip(local, layouts))
    pairs = DealtPairs(tuple(map(tuple, every.tolist()))), IndexPairs(indices, indices)
    copy_pairs(work.name, sent, received, pairs, start)
    work.did(received)
    counts = every[:, there.coords[0]] if min(there.coords) >= 0 else 0 * every[:, 0]
    return local[1].reshape(len(local[1]), width), counts  # an idle rank has no columns


def of_pieces(T: Tensor, piece: Array, extents: Sequence[int], work: Work) -> Tensor:
    """Return the tensor of the pieces of all ranks, along their first axis, in the order of the ranks.  Collective.

    piece : (k, *extents), with any k on each rank.   T : gives the grid.   `.report` has the words of the work so far.
    """
    comm, length = T.grid.comm, len(piece)
    start, total = comm.exscan(length) or 0, comm.allreduce(length)
    layout = line_layout((total, *extents), T.grid.members)
    window = layout.first[0].window(start, start + length)
    rows, _ = deal(piece.reshape(length, prod(extents)), [*map(window.count, range(window.parts))], T.grid, work)
    result = of_rows(T, layout, rows)
    work.reported(result.unfolding, 1)
    return result


def of_rows(T: Tensor, layout: TensorLayout, rows: Array, order: np.ndarray | None = None) -> Tensor:
    """Return a tensor of this rank's rows, in this order, in the layout of a line.  Collective."""

    def elements() -> Array:
        ordered = rows if order is None else rows[beside(order, rows)]
        return ordered.reshape(len(rows), *layout.shape[1:])

    return T.with_elements(layout, rows.dtype, elements)


def owners(layout: TensorLayout, axes: Sequence[int], indices: Sequence[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the ranks that have the elements with these indices of some axes, and the local indices there.

    No other axis is divided.
    """
    parts = [np.full(np.shape(indices[0]), dim.owner(0) if dim.n else 0) for dim in layout.first]
    local = list[np.ndarray]()
    for axis, i in zip(axes, indices):
        dim = layout.dim(axis)
        for at, group in enumerate((layout.rows, layout.cols)):
            if group[:1] == (axis,):
                parts[at] = dim.owner(i)
        local.append(dim.to_local(i))
    return np.array(layout.rank_map)[parts[0] * layout.grid_shape[1] + parts[1]], local


def _requested(T: TensorBase, axes: Sequence[int], numbers: Array, work: Work) -> tuple[Any, ...]:
    """Send this rank's numbers of parts, on the host, to the ranks that have the parts.  Collective.

    Returns the order in which this rank's numbers are sent, how many to each rank; this rank's elements, with `axes`
    first, a key for the requested ones, and how many each rank requests.
    """
    turns, members = np.zeros(T.grid.comm.size, np.int64), sorted(T.grid.members)
    turns[members] = np.arange(len(members))
    with together(T.grid.comm):  # memory may be short on one rank
        indices = np.unravel_index(numbers, [T.shape[x] for x in axes])
        ranks, local = owners(T.layout, axes, indices)
        order, sizes = np.argsort(turns[ranks], kind="stable"), np.bincount(turns[ranks], minlength=len(members))
        requested = np.stack(local, axis=1)[order]
    places, requests = deal(requested, sizes, T.grid, work)
    with together(T.grid.comm):
        x = T.local.transpose([*axes, *(x for x in range(T.ndim) if x not in axes)])
        key = tuple(beside(np.ascontiguousarray(i), x) for i in places.T)
    return order, sizes, x, key, requests


def fetched(T: Tensor, axes: Sequence[int], numbers: TensorBase, work: Work) -> Tensor:
    """Return the parts of T with some indices of these axes: (m, other axes of T), on a line of ranks.  Collective.

    numbers : (m) integers on a line of ranks; the row-major numbers of the indices of `axes`.

    If another axis is divided, T is moved first.  Then two exchanges: of indices, and of the elements back.  Of large
    results, each rank fetches some parts at a time, of about BATCH elements, so that temporaries are small.
    """
    rest = [x for x in range(T.ndim) if x not in axes]
    T = recorded(work, T, in_layout(T, undivided(T.layout, rest, T.grid.members), name=work.name))
    shape, own = [T.shape[axis] for axis in rest], to_host(numbers.local).reshape(-1)
    layout, step = line_layout((numbers.size, *shape), T.grid.members), max(1, BATCH // max(1, prod(shape)))
    result: Any = type(T).empty(layout.shape, grid=T.grid, dtype=T.dtype, device=T.device, layout=layout)  # type: ignore[attr-defined]
    for start in range(0, max(1, layout.first[0].block), step):
        order, _, x, key, requests = _requested(T, axes, own[start : start + step], work)
        with together(T.grid.comm):
            picked = x[key].reshape(len(key[0]), prod(shape))
        rows, _ = deal(picked, requests, T.grid, work)
        with together(T.grid.comm):
            if len(rows):
                result.local[start : start + step][(beside(order, rows),)] = rows.reshape(len(rows), *shape)
    work.reported(result.unfolding, 2)
    return result


def stored(T: TensorBase, axes: Sequence[int], numbers: TensorBase, value: Any, work: Work) -> None:
    """Set the parts of T with some indices of these axes; no other axis is divided.  Collective.

    numbers : as for `fetched`.   value : a number, or a tensor (m, other axes of T) on a line of ranks.
    If an index occurs twice, the last value stays.
    """
    order, sizes, x, key, _ = _requested(T, axes, to_host(numbers.local).reshape(-1), work)
    if isinstance(value, TensorBase):
        with together(T.grid.comm):
            own = value.local.reshape(len(order), prod(value.shape[1:]))
            own = own[beside(order, own)]
        value = deal(own, sizes, T.grid, work)[0].reshape(len(key[0]), *value.shape[1:])
    with together(T.grid.comm):
        if len(key[0]):
            x[key] = value


def places_of_nonzero(T: Tensor) -> tuple[Tensor, ...]:
    """Return the indices along each axis of the elements that are not 0, in their order, on a line.  Collective."""
    if not T.ndim:
        raise ArgumentError("nonzero takes a tensor of at least one axis")
    work = Work("nonzero")
    flat = in_line(T, work)
    with together(T.grid.comm):
        start = flat.layout.first[0].to_global(0, max(flat.grid.coords[0], 0))
        piece = np.flatnonzero(to_host(flat.local)) + start
    numbers: Any = of_pieces(T, piece, (), work)
    every = [numbers // max(1, prod(T.shape[axis + 1 :])) % max(1, n) for axis, n in enumerate(T.shape)]
    for places in every:
        work.reported(places.unfolding, 1)
    return tuple(every)


def cumulative(T: Tensor, act: np.ufunc, axis: int, dtype: Any = None) -> Tensor:
    """Return the sums (numpy.add), or products (numpy.multiply), of elements up to each one along an axis.  Collective.

    Each rank computes those of its elements; where the axis is divided, the results of earlier parts are added.
    Cost: one number for each part and each line of elements is sent.  A divided axis that is not in one block for each
    part is moved first.
    """
    name = f"cumulative {act.__name__}"
    up, total = (np.cumsum, np.sum) if act is np.add else (np.cumprod, np.prod)
    dtype = up(np.ones(1, T.dtype), dtype=dtype).dtype
    layout, dim, work = T.layout, T.layout.dim(axis), Work(name)
    if dim.canonical != (even := BlockCyclic.even(dim.n, dim.parts)).canonical:
        rows, cols = (even if x[:1] == (axis,) else y for x, y in zip((layout.rows, layout.cols), layout.first))
        T = work.did(in_layout(T, replace(layout, first=(rows, cols)), name=name))
    result = T.with_elements(T.layout, dtype, lambda: up(T.local, axis, dtype))
    if axis in T.layout.divided:
        totals = lambda: total(T.local, axis, dtype, keepdims=True)  # noqa: E731
        parts = T.with_elements(partial_layout(T.layout, [axis]), dtype, totals)
        lines = work.did(in_layout(parts, undivided(parts.layout, [axis], T.grid.members), name=name))
        with together(T.grid.comm):
            if lines.local.size:
                x, sums, first = lines.local, up(lines.local, axis), (slice(None),) * axis
                x[(*first, slice(1, None))] = sums[(*first, slice(-1))]
                x[(*first, slice(1))] = act.identity
        before = work.did(in_layout(lines, parts.layout, name=name))
        with together(T.grid.comm):
            if result.local.size:
                act(result.local, before.local, out=result.local)
    work.reported(result.unfolding, 1)
    return result
