"""Sorted elements, percentiles, histograms, cumulative sums, and reductions that leave NaN out, as NumPy names them.

`numpy.median(A, axis=0)` is `pdgemm.statistics.median(A, axis=0)`, and so on.  All are collective over the grid of A.
"""

from pdgemm.statistics.columns import cumsum as cumsum
from pdgemm.statistics.columns import sort as sort
from pdgemm.statistics.histograms import histogram as histogram
from pdgemm.statistics.percentiles import median as median
from pdgemm.statistics.percentiles import nanmedian as nanmedian
from pdgemm.statistics.percentiles import nanpercentile as nanpercentile
from pdgemm.statistics.percentiles import nanquantile as nanquantile
from pdgemm.statistics.percentiles import percentile as percentile
from pdgemm.statistics.percentiles import quantile as quantile
from pdgemm.statistics.without_nan import nanmax as nanmax
from pdgemm.statistics.without_nan import nanmean as nanmean
from pdgemm.statistics.without_nan import nanmin as nanmin
from pdgemm.statistics.without_nan import nanprod as nanprod
from pdgemm.statistics.without_nan import nanstd as nanstd
from pdgemm.statistics.without_nan import nansum as nansum
from pdgemm.statistics.without_nan import nanvar as nanvar
