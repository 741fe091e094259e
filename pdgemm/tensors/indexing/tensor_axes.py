"""NumPy's functions along an axis of a tensor: elements that are taken by indices, cumulative sums, differences."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.tensors.indexing.tensor_copies import concatenate
from pdgemm.tensors.indexing.tensor_lines import cumulative, places_of_nonzero


def take(a: Any, indices: Any, axis: int | None = None) -> Any:
    """Return the elements with these indices of an axis, or of the tensor as one axis, as numpy.take.  Collective."""
    return a.ravel()[indices] if axis is None else a[(slice(None),) * a.axes_of(axis)[0] + (indices,)]


def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    """Return the elements at one index of an axis for each place of the others, as numpy.take_along_axis.  Collective.

    Each index is sent to the rank that has its element, and the element back.
    """
    if axis is None:
        return take_along_axis(arr.ravel(), indices, 0)
    (at,) = arr.axes_of(axis)
    if np.ndim(indices) != arr.ndim:
        raise ArgumentError(f"as many axes as the tensor's {arr.ndim} are needed, got indices of {np.ndim(indices)}")
    places = np.ix_(*map(np.arange, arr.shape))
    return arr[tuple(indices if x == at else place for x, place in enumerate(places))]


def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the n-th differences along an axis, as numpy.diff.  Collective; one exchange of the parts' first elements.

    prepend, append : tensors, arrays or numbers that are joined to the tensor before.
    """
    (at,), count = a.axes_of(axis), index(n)
    if count < 0:
        raise ArgumentError(f"differences are taken 0 or more times, got n={n}")
    one = [1 if x == at else n for x, n in enumerate(a.shape)]
    parts = [x if np.ndim(x) else np.full(one, x) for x in (prepend, a, append) if x is not None]
    a = concatenate(parts, at) if count and len(parts) > 1 else a
    for _ in range(count):
        every = (slice(None),) * at
        x, y = a[(*every, slice(1, None))], a[(*every, slice(None, -1))]
        a = x != y if a.dtype.kind == "b" else x - y
    return a


def _cumulative(act: np.ufunc, x: Any, axis: int | None, dtype: Any, include_initial: bool, flat: bool) -> Any:
    if axis is None and not flat and x.ndim != 1:
        raise ArgumentError(f"a tensor of shape {x.shape} has cumulative sums and products along one axis: name it")
    x, at = (x.ravel(), 0) if axis is None else (x, x.axes_of(axis)[0])
    result = cumulative(x, act, at, dtype)
    first = [1 if axis == at else n for axis, n in enumerate(x.shape)]
    return concatenate([np.full(first, act.identity, result.dtype), result], at) if include_initial else result


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


def nonzero(a: Any) -> tuple[Any, ...]:
    """Return the indices along each axis of the elements that are not 0, in their order, as numpy.nonzero.  Collective.

    Cost: an exchange of the tensor, and one of the indices; each rank has an even share of the result.
    """
    return tuple(x._result() if a.ndim > 1 else x for x in places_of_nonzero(a))


FUNCTIONS = (take, take_along_axis, diff, cumsum, cumprod, cumulative_sum, cumulative_prod, nonzero)
