"""histogram(): the number of elements in each of several intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.algorithms.statistics.ranked import check_ordered, sum_over_ranks
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.folds import widened
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
        x = widened(to_host(a.local)).ravel()
        x = x.astype(np.uint8) if x.dtype == bool else x
        counts, edges = np.histogram(x, bins, ends)
    counts = sum_over_ranks(counts, a.grid.comm)
    return (counts / np.diff(edges) / counts.sum() if density else counts), edges
