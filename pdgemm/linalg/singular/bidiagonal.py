"""All singular values of a matrix in two stages: to an upper band by products, and from the band on one rank.

Grosser & Lang, Parallel Comput. 25(8), 1999; Haidar, Kurzak & Luszczek, SC 2013.
"""

from __future__ import annotations

import numpy as np

from pdgemm.algorithms.panels.band_panels import BidiagonalBand
from pdgemm.algorithms.panels.panel_run import run_panels, working_copy
from pdgemm.linalg.factors.householder import householder_qr
from pdgemm.linalg.factors.tall_qr import svd_on_all, tall_qr
from pdgemm.linalg.ranges import ELEMENTS, in_range, times
from pdgemm.linalg.work import Work, near_one, on_one_rank
from pdgemm.local.arrays import device as devices
from pdgemm.local.blas.band import singular_values_of_band
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.band_schedule import BidiagonalBandSchedule

BAND = 64  # diagonals above the main one that the first stage leaves
SMALL = 128  # largest number of values that one rank has from the triangle of a QR factorisation


@in_range(lambda s, a: times(s, a), A=ELEMENTS)
def singular_values(A: DistMatrix) -> np.ndarray:
    """Return all singular values of A in descending order, the same on every rank.  Collective over the grid of A.

    A : DistMatrix (m, n); unchanged.   Raises LinAlgError on all ranks where an element is NaN or infinite.
    Cost: that of `through_band` or, up to 128 values and on a device, of `svd_of_tall` without its products.
    """
    if 0 in A.shape:
        return np.zeros(0, np.finfo(A.dtype).dtype)
    near_one("A", A)  # raises where an element is NaN or infinite
    tall = A if A.shape[0] >= A.shape[1] else A.H
    if tall.shape[1] <= SMALL or A.device != devices.HOST:
        return svd_on_all(tall_qr(tall))[1].copy()
    return through_band(Work("svdvals"), tall)


def through_band(work: Work, A: DistMatrix) -> np.ndarray:
    """Return all singular values of A in descending order, the same on every rank.  Collective over the grid of A.

    A : DistMatrix (m, n), m >= n, on the host; unchanged.

    Cost: (4 m n^2 - 4/3 n^3)/P flops in products, or 2 m n^2 + 2 n^3 by a QR factorisation first where m > 5/3 n, and
    6 n^2 b flops on one rank; about m n words in for each rank of few, and those of sums along grid rows and columns.
    """
    m, n = A.shape
    if 3 * m > 5 * n:
        _, A = householder_qr(A, want_q=False)
        work.did(A)
    b, rows, cols = min(BAND, max(1, n - 1)), A.distribution.rows, A.distribution.cols
    W, moves = working_copy(A, b, A.distribution.block == (b, b) and rows.skip == cols.skip == 0, False)
    schedule, what = BidiagonalBandSchedule(W.layout_in(W.grid), b, RING.name), f"Reduction of {shape_of(A)} to a band"
    _, W.report = run_panels(schedule, BidiagonalBand, {"A": W}, what, moves)
    work.did(W)
    band = np.zeros((b + 1, n), A.dtype)
    for k in range(b + 1):
        band[k, : n - k] = W.diagonal(k)
    return on_one_rank(A, singular_values_of_band, band)
