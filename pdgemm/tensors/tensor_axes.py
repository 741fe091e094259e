"""NumPy's functions along an axis of a tensor: elements that are taken by indices, cumulative sums, differences."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import TensorBase
from pdgemm.tensors.tensor_joins import concatenate
from pdgemm.tensors.tensor_lines import cumulative
from pdgemm.tensors.tensor_moves import spread


def take(a: Any, indices: Any, axis: int | None = None) -> Any:
    """Return the elements with these indices of an axis, or of the tensor as one axis, as numpy.take.  Collective."""
    if not isinstance(a, TensorBase):
        a = type(indices).from_global(a, grid=indices.grid)
    if axis is None:
        return a.ravel()[indices]
    (at,) = a.axes_of(axis)
    return a[(slice(None),) * at + (indices,)]


def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    """Return the elements at one index of an axis for each place of the others, as numpy.take_along_axis.  Collective.

    Of a tensor whose other axes have extent 1, the indices are sent to the elements' owners; another one is moved so
    that each rank has whole lines, and so are the indices.
    """
    if axis is None:
        return take_along_axis(arr.ravel(), indices, 0)
    (at,) = arr.axes_of(axis)
    indices = indices if isinstance(indices, TensorBase) else type(arr).from_global(np.asarray(indices), grid=arr.grid)
    if arr.size == arr.shape[at] and indices.size == indices.shape[at]:
        return arr.ravel()[indices.ravel()].reshape(indices.shape)
    with together(arr.grid.comm) as arguments:
        arguments += ["take_along_axis", at, str(arr.layout), str(indices.layout), indices.dtype]
        if indices.ndim != arr.ndim or indices.dtype.kind not in "iu":
            raise ArgumentError(f"take_along_axis of a tensor of {arr.ndim} axes takes as many axes of whole numbers")
        others = [[n for x, n in enumerate(y.shape) if x != at] for y in (arr, indices)]
        kept = arr.default_layout(np.broadcast_shapes(*others))
    x, i = (spread(y, kept.expanded([at], [y.shape[at]])) for y in (arr, indices))
    there = kept.expanded([at], [indices.shape[at]])
    result = arr.with_elements(there, arr.dtype, lambda: np.take_along_axis(x.local, i.local, at))
    result.unfolding.report = x.later_report
    return result


def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the n-th differences along an axis, as numpy.diff.  Collective; one exchange of the parts' first elements.

    prepend, append : tensors, arrays or numbers that are joined to the tensor before.
    """
    (at,), count = a.axes_of(axis), index(n)
    if count < 0:
        raise ArgumentError(f"differences are taken 0 or more times, got n={n}")
    ends = [
        x if x is None or np.ndim(x) else np.full([*a.shape[:at], 1, *a.shape[at + 1 :]], x) for x in (prepend, append)
    ]
    if count and any(x is not None for x in ends):
        a = concatenate([x for x in (ends[0], a, ends[1]) if x is not None], at)
    for _ in range(count):
        every = (slice(None),) * at
        x, y = a[(*every, slice(1, None))], a[(*every, slice(None, -1))]
        a = x != y if a.dtype.kind == "b" else x - y
    return a


def _cumulative(act: np.ufunc, x: Any, axis: int | None, dtype: Any, include_initial: bool, flat: bool) -> Any:
    if axis is None and (flat or x.ndim == 1):
        x, axis = x.ravel(), 0
    if axis is None:
        raise ArgumentError(f"a tensor of shape {x.shape} has cumulative sums and products along one axis: name it")
    (at,) = x.axes_of(axis)
    result = cumulative(x, act, at, dtype)
    if not include_initial:
        return result
    first = np.full([*x.shape[:at], 1, *x.shape[at + 1 :]], act.identity, result.dtype)
    return concatenate([first, result], at)


def cumsum(a: Any, axis: int | None = None, dtype: Any = None) -> Any:
    """Return sums of the elements up to each one along an axis, by default of all elements.  Collective.

    Each rank adds up its elements; where the axis is divided, one sum for each part and each line is sent.
    """
    return _cumulative(np.add, a, axis, dtype, False, True)


def cumprod(a: Any, axis: int | None = None, dtype: Any = None) -> Any:
    """Return products of the elements up to each one along an axis, as `cumsum`.  Collective."""
    return _cumulative(np.multiply, a, axis, dtype, False, True)


def cumulative_sum(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Any:
    """Return sums of the elements up to each one along an axis, with `include_initial` after a 0.  Collective."""
    return _cumulative(np.add, x, axis, dtype, include_initial, False)


def cumulative_prod(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Any:
    """Return products of the elements up to each one along an axis, with `include_initial` after a 1.  Collective."""
    return _cumulative(np.multiply, x, axis, dtype, include_initial, False)
