"""NumPy's functions that join tensors, or move their axes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.linalg.work import Work
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.dtypes import common
from pdgemm.matrix.array_functions import check_one_device
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import TensorBase


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
