"""Medians and other percentiles, along an axis or of all elements, with NumPy's linear interpolation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.algorithms.statistics.columns import whole_columns
from pdgemm.algorithms.statistics.ranked import at_places, check_ordered, elements_of, keys_of, sum_over_ranks
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.folds import widened
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


def percentile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return percentiles of all elements, or of each column (axis 0) or row (axis 1).  Collective over the grid.

    A    : DistMatrix (m, n) of real numbers.
    q    : percentages from 0 to 100, a number or an array of one dimension; the same on every rank.

    The result is that of NumPy, the same on every rank: a number, or an array of the shape of q followed by the shape
    of the other axis.  Between two elements, the result is interpolated linearly.  A percentile of elements with a NaN
    is NaN; `nanpercentile` leaves NaN out.

    Cost per rank: along an axis, each element that changes its rank is sent once to the rank with its whole column, at
    most mn/P words in.  For axis None no element is sent: a local sort, and one allreduce for each byte of an element
    (8 for float64), of 510 counts for each number of q; the two elements of each interpolation are exact.
    Raises ArgumentError or DTypeError on every rank.
    """
    return _percentiles("percentile", a, q, 100, axis, False)


def quantile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return quantiles, as `percentile` with q from 0 to 1.  Collective over the grid."""
    return _percentiles("quantile", a, q, 1, axis, False)


def median(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the median, for an even number the mean of the two middle elements; as `percentile`.  Collective."""
    return _percentiles("median", a, 0.5, 1, axis, False)


def nanpercentile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return percentiles of the elements that are not NaN, as `percentile`.  Collective over the grid."""
    return _percentiles("nanpercentile", a, q, 100, axis, True)


def nanquantile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return quantiles of the elements that are not NaN, as `percentile`.  Collective over the grid."""
    return _percentiles("nanquantile", a, q, 1, axis, True)


def nanmedian(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the median of the elements that are not NaN, as `median`.  Collective over the grid."""
    return _percentiles("nanmedian", a, 0.5, 1, axis, True)


def _percentiles(name: str, a: DistMatrix, q: Any, whole: int, axis: Any, skip: bool) -> Any:
    """Return percentiles of all elements, of columns or of rows, by NumPy's function `name`.  Collective."""
    comm = communicator(a=a)
    with together(comm) as arguments:
        check_matrices(a=a)
        check_ordered(a.dtype, name)
        levels = np.asarray(q, np.float64)
        if levels.ndim > 1 or not ((levels >= 0) & (levels <= whole)).all():
            raise ArgumentError(f"q of numpy.{name} is a number or a vector of numbers from 0 to {whole}")
        if a.size == 0:
            raise ArgumentError(f"{name} of no element: the matrix is {a.distribution}")
        arguments += [name, levels.tolist(), axis, a.distribution, a.dtype]
    function: Callable[..., Any] = getattr(np, name)
    arguments_of = () if name.endswith("median") else (q,)

    def of(x: np.ndarray, **options: Any) -> Any:
        like = x.dtype if x.dtype.kind == "V" else np.asarray(function(np.ones(2, x.dtype), *arguments_of)).dtype
        return np.asarray(function(widened(x), *arguments_of, **options)).astype(like)[()]

    if axis is not None:
        _, block, _ = whole_columns(name, a, axis)
        of_columns = of(block, axis=0) if block.shape[1] else None
        return np.concatenate([x for x in comm.allgather(of_columns) if x is not None], axis=-1)
    return _of_all(a, levels / whole, name.endswith("median"), skip, of)


def _of_all(a: DistMatrix, q: np.ndarray, median: bool, skip: bool, of: Callable[..., Any]) -> Any:
    """Return quantiles of all elements.  Collective."""
    comm, keys = a.grid.comm, keys_of(a)
    known = len(keys)
    if a.dtype.kind not in "biu":
        known = int(keys.searchsorted(np.iinfo(keys.dtype).max, "left"))
    (count,) = sum_over_ranks([known], comm)
    like = of(np.ones(2, a.dtype))
    if count == 0 or (count < a.size and not skip):
        return np.full_like(like, np.nan)[()]
    at = np.atleast_1d(q) * (count - 1)
    low = np.floor(at).astype(np.int64)
    places = np.concatenate([low, np.minimum(low + 1, count - 1)])
    ends = elements_of(at_places(keys, places, comm), a.dtype).reshape(2, -1)
    if median:
        return of(ends[:, 0] if count % 2 == 0 else ends[:1, 0])
    quantiles = [np.quantile(widened(pair), part) for pair, part in zip(ends.T, at - low)]
    return np.array(quantiles).reshape(q.shape).astype(np.asarray(like).dtype)[()]
