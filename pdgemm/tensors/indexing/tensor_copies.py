"""NumPy's functions that join tensors, move their axes, or reverse, shift, repeat or pick elements along axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.linalg.work import Work
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.device import beside
from pdgemm.local.arrays.dtypes import common
from pdgemm.matrix.array_functions import check_one_device
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.tensors.tensor_layouts import undivided
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import TensorBase, as_operand, in_layout


def concatenate(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Return tensors, matrices and arrays joined along an axis, as numpy.concatenate.  Collective.

    axis : None: the elements of all operands as one axis.
    """
    first: Any = next(x for x in tensors if isinstance(x, TensorBase))
    tensors = [operand_tensor(x, first) for x in tensors]
    if axis is None:
        return concatenate([x.ravel() for x in tensors])
    with together(first.grid.comm) as arguments:
        arguments += ["concatenate", axis, *(str(x.layout) for x in tensors)]
        at = first.axes_of(index(axis))[0]
        if len({(x.ndim, x.shape[:at], x.shape[at + 1 :]) for x in tensors}) != 1:
            shapes = " and ".join(str(x.shape) for x in tensors)
            raise LayoutError(f"tensors joined along axis {axis} must agree in the other axes, got {shapes}")
        check_one_device("concatenate", tensors)
        dtype = common(*(x.dtype for x in tensors))
    shape = [sum(x.shape[at] for x in tensors) if axis == at else n for axis, n in enumerate(first.shape)]
    result = type(first).empty(shape, grid=first.grid, dtype=dtype, device=first.device)
    work, ends = Work("concatenate"), np.cumsum([x.shape[at] for x in tensors]).tolist()
    for x, end in zip(tensors, ends):
        result[(*(slice(None),) * at, slice(end - x.shape[at], end))] = x
        work.did(result)
    work.reported(result.unfolding, 1)
    return result


def stack(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Return tensors of one shape joined along a new axis, as numpy.stack.  Collective."""
    first: Any = next(x for x in tensors if isinstance(x, TensorBase))
    tensors = [operand_tensor(x, first) for x in tensors]
    with together(first.grid.comm) as arguments:
        arguments += ["stack", axis, *(str(x.layout) for x in tensors)]
        if len({x.shape for x in tensors}) != 1:
            raise LayoutError(f"tensors of one shape are stacked, got {' and '.join(str(x.shape) for x in tensors)}")
        at = first.expanded([0]).axes_of(index(axis))[0]
    return concatenate([x.expanded([at]) for x in tensors], at)


def operand_tensor(x: Any, like: Any) -> Any:
    """Return a tensor, a matrix or an array as a tensor; an array on the grid and the device of `like`.  Collective."""
    if isinstance(x, DistMatrix):
        return x.tensor(x.shape)
    return x if isinstance(x, TensorBase) else type(like).from_global(x, grid=like.grid, device=like.device)


def moveaxis(T: Any, source: Any, destination: Any) -> Any:
    """Return a view with axes moved to other places, as numpy.moveaxis.  Local."""
    here, there = T.axes_of(source), T.axes_of(destination)
    if len(here) != len(there):
        raise ArgumentError(f"moveaxis moves {shown(source)} to as many places, got {shown(destination)}")
    order = [x for x in range(T.ndim) if x not in here]
    for to, axis in sorted(zip(there, here)):
        order.insert(to, axis)
    return T.transpose(order)


def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """Return a view with two axes exchanged, as numpy.swapaxes.  Local."""
    order, (x,), (y,) = list(range(a.ndim)), a.axes_of(axis1), a.axes_of(axis2)
    order[x], order[y] = y, x
    return a.transpose(order)


def expand_dims(T: Any, axis: Any) -> Any:
    axes = np.lib.array_utils.normalize_axis_tuple(axis, T.ndim + np.size(axis))
    return T.expanded(sorted(axes))


def flip(T: Any, axis: Any = None) -> Any:
    """Return T with the elements along some axes, all by default, in reversed order, as numpy.flip.

    Nothing is sent: each rank reverses its elements, and the layout of the result has the ranks in reversed order.
    Collective.
    """
    axes = T.axes_of(axis)
    if any(T.layout.dim(x).skip < 0 for x in axes):  # its last block would be longer than the others
        T = in_layout(T, T.default_layout(T.shape), name="flip")
    layout, key = T.layout, [slice(None, None, -1 if x in axes else None) for x in range(T.ndim)]
    ranks, first = np.array(layout.rank_map).reshape(layout.grid_shape), [*layout.first]
    for at, group in enumerate((layout.rows, layout.cols)):
        if group and group[0] in axes:
            dim, ranks = first[at], np.flip(ranks, at)
            blocks = -(-(dim.n + dim.skip) // dim.block)
            source, skip = (dim.parts - blocks - dim.source) % dim.parts, blocks * dim.block - dim.n - dim.skip
            first[at] = replace(dim, source=source, skip=skip)
    there = replace(layout, first=(first[0], first[1]), rank_map=tuple(ranks.ravel().tolist()))
    return T.with_elements(there, T.dtype, lambda: T.local[tuple(key)])


def roll(T: Any, shift: Any, axis: Any = None) -> Any:
    """Return T with its elements shifted along some axes, the last ones to the front, as numpy.roll.

    axis : None: the elements are shifted as one axis.   Only elements that change ranks are sent.  Collective.
    """
    if axis is None:
        return roll(T.ravel(), shift, 0).reshape(T.shape)
    axes = T.axes_of(axis)
    try:
        shifts = np.broadcast_to(np.asarray(shift, dtype=object), (len(axes),))
        total = {x: sum(index(s) for s, y in zip(shifts, axes) if y == x) for x in axes}
    except (TypeError, ValueError):
        raise ArgumentError(f"roll along axis={shown(axis)} takes as many integers, got {shown(shift)}") from None
    within = {x: s for x, s in total.items() if x not in T.layout.divided}
    if within or not total:
        moved = T
        T = T.with_elements(T.layout, T.dtype, lambda: np.roll(moved.local, [*within.values()], [*within]))
    for x in total.keys() - within.keys():
        n, before = T.shape[x], (slice(None),) * x
        ahead = total[x] % max(n, 1)
        rolled = type(T).empty(T.shape, grid=T.grid, dtype=T.dtype, device=T.device, layout=T.layout)
        for start, part in ((ahead, T[(*before, slice(n - ahead))]), (0, T[(*before, slice(n - ahead, n))])):
            rolled[(*before, slice(start, start + part.shape[x]))] = part
        T = rolled
    return T


def broadcast_to(T: Any, shape: Any) -> Any:
    """Return T broadcast to a shape, as numpy.broadcast_to: a copy, or T itself if it has this shape.  Collective."""
    wanted = tuple(index(x) for x in ((shape,) if isinstance(shape, (int, np.integer)) else shape))
    with together(T.grid.comm) as arguments:
        arguments += ["broadcast_to", str(T.layout), *wanted]
        if T.ndim > len(wanted) or any(n not in (1, to) for n, to in zip(T.shape[::-1], wanted[::-1])):
            raise LayoutError(f"a tensor of shape {T.shape} is not broadcast to {wanted}")
    if wanted == T.shape:
        return T
    layout = T.default_layout(wanted)
    work = Work("broadcast_to")
    return type(T)(work.reported(as_operand(T, layout, T, work), 1), layout)


def tile(T: Any, repetitions: Any) -> Any:
    """Return copies of T side by side, this many along each axis, as numpy.tile.  Collective; one exchange."""
    times = tuple(index(x) for x in np.atleast_1d(np.asarray(repetitions, dtype=object)))
    if min(times, default=0) < 0:
        raise ArgumentError(f"numbers of copies are at least 0, got {shown(repetitions)}")
    ndim = max(T.ndim, len(times))
    shape = (*(1,) * (ndim - T.ndim), *T.shape)
    return _repeated(T, shape, (*(1,) * (ndim - len(times)), *times), before=True)


def repeat(T: Any, repeats: Any, axis: Any = None) -> Any:
    """Return T with each element repeated along an axis, as numpy.repeat.  Collective; one exchange.

    repeats : a number, or numbers for each index of the axis: an array that is the same on every rank, or a tensor;
              for these, each rank has an index for each index of the new axis.
    axis    : None: the elements are repeated as one axis.
    """
    if axis is None:
        return repeat(T.ravel(), repeats, 0)
    (at,) = T.axes_of(index(axis))
    repeats = repeats.allgather() if isinstance(repeats, TensorBase) else np.asarray(repeats)
    n = T.shape[at]
    with together(T.grid.comm) as arguments:
        arguments += ["repeat", at, str(T.layout), repeats.tobytes()]
        whole = repeats.dtype.kind in "iu" or not repeats.size
        if not whole or repeats.shape not in ((), (1,), (n,)) or repeats.min(initial=0) < 0:
            raise ArgumentError(f"repeats are integers from 0 on, one or {n} of them, got {shown(repeats)}")
    if repeats.size == 1:
        return _repeated(T, T.shape, [int(repeats.item()) if x == at else 1 for x in range(T.ndim)], before=False)
    return T[(*(slice(None),) * at, np.repeat(np.arange(n), repeats))]


def _repeated(T: Any, shape: Sequence[int], times: Sequence[int], before: bool) -> Any:
    """Return T in this shape with indices repeated: each axis by a new axis before it, or behind it, and a reshape."""
    one = [x for n in shape for x in ((1, n) if before else (n, 1))]
    wide = [x for n, r in zip(shape, times) for x in ((r, n) if before else (n, r))]
    result = broadcast_to(T.reshape(one), wide).reshape([n * r for n, r in zip(shape, times)])
    return result.copy() if result.unfolding is T.unfolding else result


def unstack(T: Any, axis: int = 0) -> tuple[Any, ...]:
    """Return the parts with each index of an axis, as numpy.unstack.  Collective; one exchange if it is divided."""
    (at,) = T.axes_of(index(axis))
    T = in_layout(T, undivided(T.layout, (at,), T.grid.members), name="unstack")
    return tuple(T.part({at: i})._result() for i in range(T.shape[at]))


def tril(T: Any, k: int = 0) -> Any:
    """Return T with zeros above diagonal k of the matrices along its last two axes, as numpy.tril.  Collective."""
    return _triangle(T, k, np.less_equal)


def triu(T: Any, k: int = 0) -> Any:
    """Return T with zeros below diagonal k of the matrices along its last two axes, as numpy.triu.  Collective."""
    return _triangle(T, k, np.greater_equal)


def _triangle(T: Any, k: int, kept: np.ufunc) -> Any:
    if T.ndim < 2:
        raise ArgumentError(f"a triangle is that of matrices along two axes, not of a tensor of shape {T.shape}")
    *_, rows, cols = T.indices()
    mask = kept.outer(-rows - index(k), -cols)
    return T.with_elements(T.layout, T.dtype, lambda: np.where(beside(mask, T.local), T.local, T.dtype.type(0)))


def diagonal(T: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Return diagonal `offset` of the matrices along two axes as a last axis, as numpy.diagonal.  Collective.

    Only elements of the diagonal are copied; they are sent if one of the two axes is divided.
    """
    down, across = max(-index(offset), 0), max(index(offset), 0)
    T = moveaxis(T, (axis1, axis2), (-2, -1))
    n = max(0, min(T.shape[-2] - down, T.shape[-1] - across))
    square: Any = T[..., down : down + n, across : across + n]
    labels = [*range(T.ndim - 1), T.ndim - 2]
    return pdgemm.einsum(square, labels, labels[:-1])


def trace(T: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    """Return sums of diagonal `offset` of the matrices along two axes, as numpy.trace.  Collective; see `diagonal`."""
    terms = diagonal(T, offset, axis1, axis2)
    return (terms if dtype is None else terms.astype(dtype)).sum(-1)


def vecdot(a: Any, b: Any, axis: int = -1) -> Any:
    """Return sums of conj(a) b over an axis that both have with the same extent, as numpy.vecdot.  Collective."""
    a, b = _vectors(a, b, axis)
    if a.shape[-1] != b.shape[-1]:
        raise LayoutError(f"vecdot sums over axes of equal extents, got {a.shape[-1]} and {b.shape[-1]}")
    return pdgemm.einsum("...i,...i->...", a.conj() if a.dtype.kind == "c" else a, b)


def cross(a: Any, b: Any, axis: int = -1) -> Any:
    """Return cross products of vectors of three elements along an axis, as numpy.linalg.cross.  Collective."""
    a, b = _vectors(a, b, axis)
    if (a.shape[-1], b.shape[-1]) != (3, 3):
        raise LayoutError(f"cross products are those of 3 elements, got {a.shape[-1]} and {b.shape[-1]}")
    second, third = (..., [1, 2, 0]), (..., [2, 0, 1])
    return moveaxis(a[second] * b[third] - a[third] * b[second], -1, axis)


def _vectors(a: Any, b: Any, axis: int) -> tuple[Any, Any]:
    """Return two operands, of which one is a tensor, as tensors with this axis as the last one."""
    like = a if isinstance(a, TensorBase) else b
    return moveaxis(operand_tensor(a, like), axis, -1), moveaxis(operand_tensor(b, like), axis, -1)


FUNCTIONS: tuple[Callable[..., Any], ...] = (concatenate, stack, moveaxis, swapaxes, expand_dims, flip, roll, tile)
FUNCTIONS += (repeat, unstack, broadcast_to, tril, triu, diagonal, trace, cross)
