"""Sorting, percentiles, histograms, cumulative sums, and reductions that ignore NaN, under NumPy's names.

`numpy.median(A, axis=0)` is `pdgemm.statistics.median(A, axis=0)`, and so on.  All are collective over A.grid.
"""

from pdgemm.algorithms.statistics.percentiles import histogram as histogram
from pdgemm.algorithms.statistics.percentiles import median as median
from pdgemm.algorithms.statistics.percentiles import nanmax as nanmax
from pdgemm.algorithms.statistics.percentiles import nanmean as nanmean
from pdgemm.algorithms.statistics.percentiles import nanmedian as nanmedian
from pdgemm.algorithms.statistics.percentiles import nanmin as nanmin
from pdgemm.algorithms.statistics.percentiles import nanpercentile as nanpercentile
from pdgemm.algorithms.statistics.percentiles import nanprod as nanprod
from pdgemm.algorithms.statistics.percentiles import nanquantile as nanquantile
from pdgemm.algorithms.statistics.percentiles import nanstd as nanstd
from pdgemm.algorithms.statistics.percentiles import nansum as nansum
from pdgemm.algorithms.statistics.percentiles import nanvar as nanvar
from pdgemm.algorithms.statistics.percentiles import percentile as percentile
from pdgemm.algorithms.statistics.percentiles import quantile as quantile
from pdgemm.algorithms.statistics.sorting import cumsum as cumsum
from pdgemm.algorithms.statistics.sorting import sort as sort
