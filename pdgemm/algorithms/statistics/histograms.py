"""histogram(): the number of elements in each of several intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.algorithms.statistics.ranked import check_ordered, in_order, places_in, sum_over_ranks
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.folds import ON_DEVICE, widened
from pdgemm.local.arrays.integers import as_count
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


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
        check_ordered(a.dtype, "histogram")
        if isinstance(bins, str):
            raise ArgumentError(f"histogram takes a number of intervals or their ends, not {bins!r}")
        bins = np.asarray(bins) if np.ndim(bins) else as_count(bins, "bins", 1)
        ends = None if range is None else (float(range[0]), float(range[1]))
        arguments += ["histogram", np.asarray(bins).tolist(), ends, bool(density), a.distribution, a.dtype]
    if ends is None and not np.ndim(bins) and a.size:
        ends = a.min(), a.max()
    with together(a.grid.comm):
        counts, edges = _counted(a.local, bins, ends)
    counts = sum_over_ranks(counts, a.grid.comm)
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
        part = in_order(widened, x[slab], dtype)
        counts += np.diff(np.append(places_in(part, edges[:-1]), places_in(part, edges[-1:], "right")))
    return counts, edges
