"""Medians and other percentiles with NumPy's linear interpolation, histograms, and reductions without NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.algorithms.statistics import sorting
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count
from pdgemm.local.arrays.device import Array, of, to_host
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.folds import ON_DEVICE, widened
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


def nansum(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the sum of the elements that are not NaN, as `A.sum`; 0 if there are none.  Collective."""
    return _filled(a, 0).sum(axis)


def nanprod(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the product of the elements that are not NaN, as `A.prod`; 1 if there are none.  Collective."""
    return _filled(a, 1).prod(axis)


def nanmin(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the least element that is not NaN, as `A.min`; NaN if there are none.  Collective."""
    return _extreme(a, axis, "min", np.inf)


def nanmax(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the largest element that is not NaN, as `A.max`; NaN if there are none.  Collective."""
    return _extreme(a, axis, "max", -np.inf)


def nanmean(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the mean of the elements that are not NaN; NaN if there are none.  Collective."""
    return a.mean(axis) if _whole(a) else _divided(nansum(a, axis), _count(a, axis))


def nanvar(a: DistMatrix, axis: int | None = None, ddof: int = 0) -> Any:
    """Return the variance sum |a - mean|^2 / (N - ddof) of the N elements that are not NaN.  Collective."""
    if _whole(a):
        return a.var(axis, ddof)
    mean = np.asarray(nanmean(a, axis))
    apart: Any = np.where(np.isnan(a), a.dtype.type(0), a - (mean[:, None] if axis in (1, -1) else mean))
    squares = (abs(apart) ** 2).sum(axis)
    return _divided(squares, np.maximum(_count(a, axis) - as_count(ddof, "ddof", 0), 0))


def nanstd(a: DistMatrix, axis: int | None = None, ddof: int = 0) -> Any:
    """Return the standard deviation of the elements that are not NaN, the root of `nanvar`.  Collective."""
    deviation = np.sqrt(nanvar(a, axis, ddof))
    return deviation if isinstance(deviation, np.ndarray) else deviation[()]


def _whole(a: DistMatrix) -> bool:
    """Are the elements whole numbers, which cannot be NaN?"""
    return a.dtype.kind in "biu"


def _filled(a: DistMatrix, number: float) -> DistMatrix:
    """Return the matrix with a number in place of NaN."""
    filled: Any = a if _whole(a) else np.where(np.isnan(a), a.dtype.type(number), a)
    return filled


def _count(a: DistMatrix, axis: int | None) -> Any:
    """Return the number of elements that are not NaN."""
    present: Any = ~np.isnan(a)
    return present.sum(axis)


def _extreme(a: DistMatrix, axis: int | None, name: str, worst: float) -> Any:
    if _whole(a):
        return getattr(a, name)(axis)
    extreme = getattr(_filled(a, worst), name)(axis)
    return np.where(_count(a, axis) > 0, extreme, extreme.dtype.type(np.nan))[()]


def _divided(sums: Any, counts: Any) -> Any:
    """Return sums divided by counts, of the type of the sums; NaN where a count is 0."""
    with np.errstate(all="ignore"):
        return (sums / np.asarray(counts)).astype(sums.dtype)[()]


def percentile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return percentiles of all elements, or of each column (axis 0) or row (axis 1).  Collective over the grid.

    a    : DistMatrix (m, n) of real numbers.
    q    : percentages from 0 to 100, a number or an array of one dimension; the same on every rank.

    The result is that of NumPy, the same on every rank: a number, or an array of the shape of q followed by the shape
    of the other axis.  Between two elements, the result is interpolated linearly.  A percentile of elements with a NaN
    is NaN; `nanpercentile` leaves NaN out.

    Cost per rank: along an axis, each element that changes its rank is sent once to the rank with its whole column, at
    most mn/P words in.  For axis None no element is sent: a local sort, and one allreduce for each byte of an element
    (8 for float64), of 510 counts for each number in q; the two elements of each interpolation are exact.
    Raises ArgumentError or DTypeError on every rank.
    """
    return _percentiles("percentile", a, q, 100, axis)


def quantile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return quantiles, as `percentile` with q from 0 to 1.  Collective over the grid."""
    return _percentiles("quantile", a, q, 1, axis)


def median(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the median, which is percentile 50: see `percentile`.  Collective."""
    return _percentiles("median", a, 0.5, 1, axis)


def nanpercentile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return percentiles of the elements that are not NaN, as `percentile`.  Collective over the grid."""
    return _percentiles("nanpercentile", a, q, 100, axis)


def nanquantile(a: DistMatrix, q: Any, axis: int | None = None) -> Any:
    """Return quantiles of the elements that are not NaN, as `percentile`.  Collective over the grid."""
    return _percentiles("nanquantile", a, q, 1, axis)


def nanmedian(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the median of the elements that are not NaN, as `median`.  Collective over the grid."""
    return _percentiles("nanmedian", a, 0.5, 1, axis)


def _percentiles(name: str, a: DistMatrix, q: Any, whole: int, axis: Any) -> Any:
    """Return percentiles of all elements, of columns or of rows, by NumPy's function `name`.  Collective."""
    comm = communicator(a=a)
    with together(comm) as arguments:
        check_matrices(a=a)
        sorting.check_ordered(a.dtype, name)
        levels = np.asarray(q, np.float64)
        if levels.ndim > 1 or not ((levels >= 0) & (levels <= whole)).all():
            raise ArgumentError(f"q of numpy.{name} must be a number or a vector of numbers from 0 to {whole}")
        if a.size == 0:
            raise ArgumentError(f"{name} of no elements: the matrix is {a.distribution}")
        arguments += [name, levels.tolist(), axis, a.distribution, a.dtype]
    function: Callable[..., Any] = getattr(np, name)
    median, skip = name.endswith("median"), name.startswith("nan")
    arguments_of = () if median else (q,)
    like = a.dtype if a.dtype.kind == "V" else np.asarray(function(np.ones(2, a.dtype), *arguments_of)).dtype
    if axis is None:
        return _of_all(a, levels / whole, median, skip, like)
    _, columns = sorting.whole_columns(name, a, axis)
    with together(comm):
        x = columns.local
        if not x.shape[1]:
            mine = None
        elif of(x):
            mine = _of_columns(x, levels / whole, median, skip, like)
        else:
            mine = np.asarray(function(widened(x), *arguments_of, axis=0)).astype(like)
    return np.concatenate([x for x in comm.allgather(mine) if x is not None], axis=-1)


def _of_all(a: DistMatrix, q: np.ndarray, median: bool, skip: bool, like: np.dtype) -> Any:
    """Return quantiles of all elements.  Collective."""
    comm = a.grid.comm
    with together(comm):
        keys = sorting.keys_of(a)
        known = len(keys)
        if a.dtype.kind not in "biu":
            known = int(sorting.places_in(keys, np.array([np.iinfo(keys.dtype).max], keys.dtype))[0])
    (count,) = sorting.sum_over_ranks([known], comm)
    if count == 0 or (count < a.size and not skip):
        return np.full(q.shape, np.nan, like)[()]
    at, low, high = _places(q.reshape(-1), count)
    ends = sorting.elements_of(sorting.at_places(keys, np.concatenate([low, high]), comm), a.dtype).reshape(2, -1)
    return _between(widened(ends), at - low, median).astype(like).reshape(q.shape)[()]


def _of_columns(x: Array, q: np.ndarray, median: bool, skip: bool, like: np.dtype) -> np.ndarray:
    """Return quantiles of whole columns on a device, which sorts them.  Local.

    For each column and quantile, two elements are copied to the host.
    """
    (m, n), device = x.shape, of(x)
    assert device is not None
    x = sorting.of_columns(lambda x: np.sort(widened(x), axis=0), x)
    counts = np.full(n, m) if x.dtype.kind in "biu" else to_host(np.sum(x == x, axis=0, dtype=np.int64))
    at, low, high = _places(q.reshape(-1, 1), counts)
    rows = np.concatenate([low.ravel(), high.ravel()])
    ends = to_host(device.pick(x, rows, np.tile(np.arange(n), len(rows) // n))).reshape(2, *at.shape)
    values = _between(ends, at - low, median).astype(like)
    values[:, (counts == 0) | ((counts < m) & (not skip))] = np.nan
    return values.reshape(*q.shape, n)


def _places(q: np.ndarray, count: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the position of each quantile among `count` sorted elements, and the integers below and above it."""
    last = np.maximum(count - 1, 0)
    at = q * last
    low = np.floor(at).astype(np.int64)
    return at, low, np.minimum(low + 1, last)


def _between(ends: np.ndarray, parts: np.ndarray, median: bool) -> np.ndarray:
    """Return NumPy's interpolation from ends[0] to ends[1], at the fractions `parts` of their distance."""
    if median:
        return np.where(parts == 0, ends[0], ends.mean(axis=0))
    values = np.empty(parts.shape, np.result_type(ends.dtype, np.float32 if ends.dtype.kind == "f" else np.float64))
    for part in np.unique(parts):
        here = parts == part
        values[here] = np.quantile(ends[:, here], part, axis=0)
    return values


def histogram(
    a: DistMatrix, bins: Any = 10, range: tuple[float, float] | None = None, density: bool | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts of elements in intervals, and the interval ends, as NumPy does.  Collective over the grid.

    bins    : a number of intervals of equal width from the least to the largest element, or from `range[0]` to
              `range[1]`; or the ends of the intervals, ascending.  The same on every rank.
    density : return the counts divided by their sum and by the widths.

    The result is the same on every rank and in every layout: counts are whole numbers.

    Cost per rank: mn/P elements are read, and one allreduce of one count per interval; for a number of intervals
    without `range`, also the reductions to the least and the largest element.
    Raises ArgumentError or DTypeError, or NumPy's ValueError; on every rank.
    """
    with together(communicator(a=a)) as arguments:
        check_matrices(a=a)
        sorting.check_ordered(a.dtype, "histogram")
        if isinstance(bins, str):
            raise ArgumentError(f"histogram takes a number of intervals or their ends, not {bins!r}")
        bins = np.asarray(bins) if np.ndim(bins) else as_count(bins, "bins", 1)
        ends = None if range is None else (float(range[0]), float(range[1]))
        arguments += ["histogram", np.asarray(bins).tolist(), ends, bool(density), a.distribution, a.dtype]
    if ends is None and not np.ndim(bins) and a.size:
        ends = a.min(), a.max()
    with together(a.grid.comm):
        counts, edges = _counted(a.local, bins, ends)
    counts = sorting.sum_over_ranks(counts, a.grid.comm)
    return (counts / np.diff(edges) / counts.sum() if density else counts), edges


def _counted(x: Array, bins: Any, ends: tuple[float, float] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return numpy.histogram of an array of the host or of a device.  Local.

    A device sorts its elements, some at a time, and counts the elements below the end of each interval.
    """
    if isinstance(x, np.ndarray):
        x = widened(x).ravel()
        return np.histogram(x.astype(np.uint8) if x.dtype == bool else x, bins, ends)
    dtype = np.dtype(np.uint8) if x.dtype == bool else widened(x[:0]).dtype
    counts, edges = np.histogram(np.empty(0, dtype), bins, ends)
    for slab in slabs(x.shape[0], x.shape[1], ON_DEVICE) if x.size else ():
        part = sorting.in_order(widened, x[slab], dtype)
        counts += np.diff(np.append(sorting.places_in(part, edges[:-1]), sorting.places_in(part, edges[-1:], "right")))
    return counts, edges
