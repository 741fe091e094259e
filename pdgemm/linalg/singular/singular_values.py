"""All singular values of a tall or wide matrix, and the rank and the pseudoinverse that follow from them."""

from __future__ import annotations

from functools import partial

import numpy as np
import scipy  # SciPy loads its packages, which takes long, when they are first used

from pdgemm.algorithms.panels.band_panels import BidiagonalBand
from pdgemm.algorithms.panels.panel_run import run_on_one_rank
from pdgemm.errors import ArgumentError
from pdgemm.linalg.eigen.tridiagonal_form import reduced_to_band
from pdgemm.linalg.factors.householder import householder_qr
from pdgemm.linalg.factors.operands import check_operand
from pdgemm.linalg.factors.tall_qr import svd_on_all, tall_qr
from pdgemm.linalg.ranges import ELEMENTS, in_range, times
from pdgemm.linalg.singular.svd import all_triplets, are_shared, svd
from pdgemm.linalg.work import Work, near_one, on_one_rank, to_one_rank
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_real
from pdgemm.local.blas.band import singular_values_of_band
from pdgemm.matrix.argument_checks import communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.panels.band_schedule import BidiagonalBandSchedule
from pdgemm.support.agreement import together, warn_together
from pdgemm.support.text import counted

SKINNY = 128  # largest number of columns of a tall matrix for which a tree of QR factorisations is the fastest
SMALL = 512  # largest order for which LAPACK on one rank is faster than a reduction to a band


def svdvals(A: DistMatrix) -> np.ndarray:
    """Return all min(m, n) singular values in descending order, as scipy.linalg.svdvals.  Collective over the grid.

    A : DistMatrix (m, n) of type s, d, c or z; A is not changed.  The result is the same on every rank.

    On the host, A is reduced to a band of 64 diagonals by blocks of reflections from both sides, and the band to a
    bidiagonal matrix by LAPACK on one rank.  If m > 5/3 n, first A = Q R is computed, and then R is reduced.  Up to 512
    values are computed by LAPACK on one rank, to which A or R is moved.  More values of a matrix on a device are those
    of `svd`.
    Cost per rank for P ranks, m >= n: (4 m n^2 - 4/3 n^3)/P flops in products, or (2 m n^2 + 2 n^3)/P with A = Q R
    first, and 400 n^2 on one rank; m n + n^2/2 words in, and the words of sums along grid rows and columns.
    Raises DTypeError or DeviceError on all ranks; LinAlgError where an element is NaN or infinite.
    Error: |s^ - s| <= c m n^{1/2} eps s_1 (Higham 2002, 19.3).
    Grosser & Lang, Parallel Comput. 25(8), 1999.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        arguments += ["svdvals", A.distribution, A.dtype]
    return singular_values(A)


@in_range(lambda s, a: times(s, a), A=ELEMENTS)
def singular_values(A: DistMatrix) -> np.ndarray:
    """Return all singular values of A in descending order, the same on every rank.  Collective over the grid of A.

    A : DistMatrix (m, n); unchanged.   Raises LinAlgError on all ranks where an element is NaN or infinite.
    Cost: that of `by_reduction`; for a tall matrix of up to 128 columns, and on a device, that of `svd`.
    """
    if 0 in A.shape:
        return np.zeros(0, np.finfo(A.dtype).dtype)
    near_one("A", A)  # raises where an element is NaN or infinite
    tall, on_host = A if A.shape[0] >= A.shape[1] else A.H, A.device == devices.HOST
    (m, n), work = tall.shape, Work("svdvals")
    if on_host and (n > SKINNY or 3 * m <= 5 * n):
        return by_reduction(work, tall)
    return all_triplets(work, tall)[1] if are_shared(tall) else svd_on_all(tall_qr(tall))[1].copy()


def by_reduction(work: Work, A: DistMatrix) -> np.ndarray:
    """Return all singular values of A in descending order, the same on every rank.  Collective over the grid of A.

    A : DistMatrix (m, n), m >= n, on the host; unchanged.  Up to n = 512, LAPACK reduces A, or R, on one rank; larger
        matrices are reduced through a band.

    Cost: (4 m n^2 - 4/3 n^3)/P flops in products, or 2 m n^2 + 2 n^3 by a QR factorisation first where m > 5/3 n, and
    6 n^2 b flops on one rank, b = 64.  If there are few ranks, each receives about m n words; the words of sums along
    grid rows and columns are added to these.
    """
    m, n = A.shape
    if 3 * m > 5 * n:
        _, A = householder_qr(A, want_q=False)
        work.did(A)
    if n <= SMALL:
        X, ones = to_one_rank(work, A), np.ones(n, np.finfo(A.dtype).dtype)
        values = partial(scipy.linalg.svdvals, X.stored, check_finite=False)
        s, report = run_on_one_rank("svdvals", X, (len(X), n, 4 * n / 3), values, ones, passes=2 * n // 3)
        work.ran(report)
        return s
    band, _ = reduced_to_band(work, A, BidiagonalBandSchedule, BidiagonalBand, below=False)
    return on_one_rank(A, singular_values_of_band, band)


def matrix_rank(A: DistMatrix, tol: float | None = None, *, rtol: float | None = None) -> int:
    """Return the number of singular values above a tolerance, as numpy.linalg.matrix_rank.  Collective.

    A    : DistMatrix (m, n), as for `svdvals`.
    tol  : the tolerance; by default rtol s_1.
    rtol : by default max(m, n) eps.

    Cost: that of `svdvals`.
    Raises ArgumentError on all ranks, also if both tol and rtol are passed, and the exceptions of `svdvals`.
    Error: a singular value that is nearer to the tolerance than the error of `svdvals` may or may not be counted; then
    all ranks warn with scipy.linalg.LinAlgWarning, if the tolerance is above the default.
    Golub & Van Loan, Matrix Computations, 4th ed., 2013, 5.4.1.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        if tol is not None and rtol is not None:
            raise ArgumentError("matrix_rank takes tol or rtol, not both")
        tolerances = _tolerances(A, tol, rtol if tol is None else 0.0)
        arguments += ["matrix_rank", *tolerances]
    near, far = near_one("A", A)
    s = svdvals(A * near * far)
    return rank_above(A, s, _least(s, tolerances[0] * near * far, tolerances[1]))


def pinv(A: DistMatrix, *, atol: float | None = None, rtol: float | None = None) -> DistMatrix:
    """Return the pseudoinverse V diag(1/s) U^H, as scipy.linalg.pinv.  Collective over the grid of A.

    A : DistMatrix (m, n) of type s, d, c or z, tall or wide; A is not changed.
    atol, rtol : singular values up to atol + rtol s_1 are taken for 0; by default atol is 0 and rtol max(m, n) eps.

    Returns a DistMatrix (n, m) on the grid of A.  Cost: that of `svd`, and a product of 2 m n min(m, n) flops.  For up
    to 512 singular values every rank holds min(m, n)^2 words; of more, each rank holds a part of the factors.  For a
    least squares problem, `lstsq` takes less time and is more accurate.
    Raises ArgumentError on all ranks where a tolerance is not a real number, and the errors of `svd`.
    Golub & Van Loan, Matrix Computations, 4th ed., 2013, 5.5.2.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        tolerances = _tolerances(A, atol, rtol)
        arguments += ["pinv", *tolerances]
    work, (near, far) = Work("pinv"), near_one("A", A)  # of A itself, s or 1 / s may overflow
    U, s, Vh = svd(A * near * far)
    work.did(U)
    rank = rank_above(A, s, _least(s, tolerances[0] * near * far, tolerances[1]))
    X = work.product(1, Vh[:rank].H, (U[:, :rank] * (1 / s[:rank])).H)
    with np.errstate(over="ignore"):  # an element may be infinite
        X *= near
        X *= far
    return work.reported(X, 0)


def rank_above(A: DistMatrix, s: np.ndarray, least: float) -> int:
    """Return the number of singular values s of A above a tolerance.  Collective.

    All ranks warn where rounding errors, of about sqrt(max(m, n)) eps s_1, decide whether a value is above the
    tolerance, unless the tolerance is about as small as these errors, because values of 0 are then near it.
    """
    eps, first, rank = dtypes.eps(A.dtype), float(s.max(initial=0)), int(np.count_nonzero(s > least))
    unsure = int(np.count_nonzero(abs(s - least) <= max(A.shape) ** 0.5 * eps * first))
    if A.grid.expected(unsure > 0 and least > 10 * max(A.shape) * eps * first, False):
        warn_together(
            A.grid.comm,
            f"rounding errors decide the rank of A ({shape_of(A)} on a {A.grid} grid), which is {rank}: "
            f"{counted(unsure, 'singular value')} of A cannot be told from the tolerance, {least / first:.3g} s_1; "
            "take a tolerance between singular values",
        )
    return rank


def _tolerances(A: DistMatrix, absolute: float | None, rtol: float | None) -> tuple[float, float]:
    """Return the absolute and the relative tolerance, defaults included.  Raises ArgumentError.  Local."""
    usual = max(A.shape) * dtypes.eps(A.dtype)
    return (
        0.0 if absolute is None else as_real(absolute, "the tolerance"),
        usual if rtol is None else as_real(rtol, "rtol"),
    )


def _least(s: np.ndarray, absolute: float, rtol: float) -> float:
    return absolute + rtol * float(s.max(initial=0))
