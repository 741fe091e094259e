"""Sorting, percentiles, histograms, cumulative sums, and reductions that ignore NaN, under NumPy's names.

`numpy.median(A, axis=0)` is `pdgemm.statistics.median(A, axis=0)`, and so on.  All are collective over A.grid.
"""

from pdgemm.algorithms.statistics.percentiles import (
    histogram as histogram,
    median as median,
    nanmax as nanmax,
    nanmean as nanmean,
    nanmedian as nanmedian,
    nanmin as nanmin,
    nanpercentile as nanpercentile,
    nanprod as nanprod,
    nanquantile as nanquantile,
    nanstd as nanstd,
    nansum as nansum,
    nanvar as nanvar,
    percentile as percentile,
    quantile as quantile,
)
from pdgemm.algorithms.statistics.sorting import cumsum as cumsum, sort as sort
