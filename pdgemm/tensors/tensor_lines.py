"""Tensors on a line of ranks: pieces of all ranks that are joined, and rows that are read or set by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np

from pdgemm.algorithms.indexing.dealing import deal
from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.linalg.work import Work
from pdgemm.local.arrays.device import Array, beside, to_host
from pdgemm.planning.tensors.tensor_layouts import partial_layout, undivided
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import TensorBase
from pdgemm.tensors.tensor_moves import in_layout

Tensor = TypeVar("Tensor", bound=TensorBase)


def line_layout(shape: Sequence[int], members: tuple[int, ...]) -> TensorLayout:
    """Return the layout in which only the first axis is divided, evenly, among these ranks in ascending order."""
    return TensorLayout.even(shape, (0,), range(1, len(shape)), (len(members), 1), tuple(sorted(members)))


def in_line(T: Any, work: Work, shape: Sequence[int] | None = None) -> Any:
    """Return a tensor, in this shape, of which only the first axis is divided, evenly, among all ranks.  Collective.

    work : records the moves.   shape : by default one axis.
    """
    flat = T.reshape([T.size] if shape is None else shape)
    line = in_layout(flat, line_layout(flat.shape, T.grid.members), name=work.name)
    for old, new in ((T, flat), (flat, line)):
        if new.unfolding is not old.unfolding:
            work.did(new)
    return line


def joined(T: Tensor, piece: Array, work: Work) -> Tensor:
    """Return the tensor of the pieces of all ranks, along their first axis, in the order of the ranks.  Collective.

    piece : (k, ...), with any k on each rank.   T : gives the grid.   `.report` has the words of the work so far.
    """
    members = sorted(T.grid.members)
    counts = np.array(T.grid.comm.allgather(len(piece)))[members]
    layout = line_layout((int(counts.sum()), *piece.shape[1:]), T.grid.members)
    rank = T.grid.comm.rank
    start = int(counts[: members.index(rank)].sum()) if rank in members else 0
    window = layout.first[0].window(start, start + len(piece))
    rows = piece.reshape(len(piece), prod(piece.shape[1:]))
    dealt = deal(rows, [window.count(part) for part in range(len(members))], T.grid, work.name)
    work.did(dealt.matrix)
    result = of_rows(T, layout, dealt.rows)
    work.reported(result.unfolding, 1)
    return result


def of_rows(T: Tensor, layout: TensorLayout, rows: Array) -> Tensor:
    """Return a tensor of this rank's rows in the layout of a line.  Collective."""
    return T.with_elements(layout, rows.dtype, lambda: rows.reshape(len(rows), *layout.shape[1:]))


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


def _requests(T: TensorBase, axes: Sequence[int], numbers: TensorBase) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Return the order in which this rank's numbers are sent, how many to each rank, and the local indices there."""
    indices = np.unravel_index(to_host(numbers.local).reshape(-1), [T.shape[x] for x in axes])
    ranks, local = owners(T.layout, axes, indices)
    turns = np.zeros(T.grid.comm.size, np.int64)
    turns[sorted(T.grid.members)] = np.arange(len(T.grid.members))
    order = np.argsort(turns[ranks], kind="stable")
    sizes = np.bincount(turns[ranks], minlength=len(T.grid.members))
    return order, sizes.tolist(), np.stack(local, axis=1)[order]


def fetched(T: Tensor, axes: Sequence[int], numbers: TensorBase, work: Work) -> Tensor:
    """Return the parts of T with some indices of these axes: (m, other axes of T), on a line of ranks.  Collective.

    numbers : (m) integers on a line of ranks; the row-major numbers of the indices of `axes`.

    If another axis is divided, T is moved first.  Then two exchanges: of indices, and of the elements back.
    """
    name, rest = work.name, [x for x in range(T.ndim) if x not in axes]
    there = in_layout(T, undivided(T.layout, rest, T.grid.members), name=name)
    T = there if there is T else work.did(there)
    with together(T.grid.comm):
        order, sizes, places = _requests(T, axes, numbers)
    wanted = deal(places, sizes, T.grid, name)
    shape = [T.shape[x] for x in rest]
    with together(T.grid.comm):
        x = T.local.transpose(*axes, *rest)
        rows = x[_key(wanted.rows, x)] if len(wanted.rows) else x[(slice(0, 0),) * len(axes)]
    back = deal(rows.reshape(len(wanted.rows), prod(shape)), wanted.sizes, T.grid, name)
    with together(T.grid.comm):
        rows = back.rows[beside(np.argsort(order), back.rows)]
    result = of_rows(T, line_layout((numbers.size, *shape), T.grid.members), rows)
    for dealt in (wanted, back):
        work.did(dealt.matrix)
    work.reported(result.unfolding, 2)
    return result


def stored(T: TensorBase, axes: Sequence[int], numbers: TensorBase, value: Any, work: Work) -> None:
    """Set the parts of T with some indices of these axes; no other axis is divided.  Collective.

    numbers : as for `fetched`.   value : a number, or a tensor (m, other axes of T) on a line of ranks.
    If an index occurs twice, the last value stays.
    """
    rest = [x for x in range(T.ndim) if x not in axes]
    with together(T.grid.comm):
        order, sizes, places = _requests(T, axes, numbers)
    there = deal(places, sizes, T.grid, work.name)
    work.did(there.matrix)
    rows, shape = value, [len(there.rows), *(T.shape[x] for x in rest)]
    if isinstance(value, TensorBase):
        own = value.local.reshape(len(order), prod(shape[1:]))
        values = deal(own[beside(order, own)], sizes, T.grid, work.name)
        work.did(values.matrix)
        rows = values.rows.reshape(shape)
    with together(T.grid.comm):
        x = T.local.transpose(*axes, *rest)
        if len(there.rows):
            x[_key(there.rows, x)] = rows


def _key(places: np.ndarray, x: Array) -> tuple[Array, ...]:
    return tuple(beside(np.ascontiguousarray(i), x) for i in places.T)


def nonzero(T: Tensor) -> tuple[Tensor, ...]:
    """Return the indices along each axis of the elements that are not 0, in their order, on a line.  Collective."""
    with together(T.grid.comm) as arguments:
        arguments += ["nonzero", str(T.layout)]
        if not T.ndim:
            raise ArgumentError("nonzero takes a tensor of at least one axis")
    work = Work("nonzero")
    flat = in_line(T, work)
    with together(T.grid.comm):
        start = flat.layout.first[0].to_global(0, max(flat.grid.coords[0], 0))
        piece = np.flatnonzero(to_host(flat.local)) + start
    numbers = joined(T, piece, work)
    if T.ndim == 1:
        return (numbers,)

    def along(axis: int) -> Tensor:
        index = lambda: np.unravel_index(numbers.local, T.shape)[axis]  # noqa: E731
        result = numbers.with_elements(numbers.layout, np.dtype(np.int64), index)
        result.unfolding.report = numbers.later_report
        return result

    return tuple(map(along, range(T.ndim)))


def cumulative(T: Tensor, act: np.ufunc, axis: int, dtype: Any = None) -> Tensor:
    """Return the sums (numpy.add), or products (numpy.multiply), of elements up to each one along an axis.  Collective.

    Each rank computes those of its elements; where the axis is divided, the results of earlier parts are added.
    Cost: one number for each part and each line of elements is sent.  A divided axis that is not in one block for each
    part is moved first.
    """
    name = f"cumulative {act.__name__}"
    with together(T.grid.comm) as arguments:
        arguments += [name, axis, dtype, str(T.layout), T.dtype]
        dtype = act.accumulate(np.ones(1, T.dtype), dtype=dtype).dtype
    dim, work = T.layout.dim(axis), Work(name)
    if dim.canonical != (even := BlockCyclic.even(dim.n, dim.parts)).canonical:
        first = [
            even if group[:1] == (axis,) else x for x, group in zip(T.layout.first, (T.layout.rows, T.layout.cols))
        ]
        T = work.did(in_layout(T, replace(T.layout, first=(first[0], first[1])), name=name))
    result = T.with_elements(T.layout, dtype, lambda: act.accumulate(T.local, axis, dtype))
    if axis in T.layout.divided:
        parts = T.with_elements(
            partial_layout(T.layout, [axis]), dtype, lambda: act.reduce(T.local, axis, dtype, keepdims=True)
        )
        lines = work.did(in_layout(parts, undivided(parts.layout, [axis], T.grid.members), name=name))
        with together(T.grid.comm):
            if lines.local.size:
                x, sums = np.moveaxis(lines.local, axis, 0), np.moveaxis(act.accumulate(lines.local, axis), axis, 0)
                x[1:], x[:1] = sums[:-1], act.identity
        before = work.did(in_layout(lines, parts.layout, name=name))
        with together(T.grid.comm):
            if result.local.size:
                act(result.local, before.local, out=result.local)
    work.reported(result.unfolding, 1)
    return result
