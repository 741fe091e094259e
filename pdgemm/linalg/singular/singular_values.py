"""All singular values of a tall or wide matrix, and the rank and the pseudoinverse that follow from them."""

from __future__ import annotations

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.gemm import pdgemm
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.tall_qr import singular_values
from pdgemm.linalg.functions.iterations import check_operand
from pdgemm.linalg.singular.svd import svd
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.argument_checks import as_real, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


def svdvals(A: DistMatrix) -> np.ndarray:
    """Return all min(m, n) singular values in descending order, as scipy.linalg.svdvals.  Collective over the grid.

    A : DistMatrix (m, n) of type s, d, c or z, tall or wide; A is not changed.  The result is the same on every rank.
    Cost, error and exceptions are those of `svd` without k, less its products.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        arguments += ["svdvals", A.distribution, A.dtype]
    if 0 in A.shape:
        return np.zeros(0, np.finfo(A.dtype).dtype)
    return singular_values(A)


def matrix_rank(A: DistMatrix, tol: float | None = None, *, rtol: float | None = None) -> int:
    """Return the number of singular values above a tolerance, as numpy.linalg.matrix_rank.  Collective.

    A    : DistMatrix (m, n), as for `svdvals`.
    tol  : the tolerance; by default rtol s_1.
    rtol : by default max(m, n) eps.

    Cost: that of `svdvals`.
    Raises ArgumentError on all ranks, also if both tol and rtol are passed, and the errors of `svdvals`.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        if tol is not None and rtol is not None:
            raise ArgumentError("matrix_rank takes tol or rtol, not both")
        tolerances = _tolerances(A, tol, rtol if tol is None else 0.0)
        arguments += ["matrix_rank", *tolerances]
    s = svdvals(A)
    return int(np.count_nonzero(s > _least(s, *tolerances)))


def pinv(A: DistMatrix, *, atol: float | None = None, rtol: float | None = None) -> DistMatrix:
    """Return the pseudoinverse V diag(1/s) U^H, as scipy.linalg.pinv.  Collective over the grid of A.

    A : DistMatrix (m, n) of type s, d, c or z, tall or wide; A is not changed.
    atol, rtol : singular values up to atol + rtol s_1 are taken for 0; by default atol is 0 and rtol max(m, n) eps.

    Returns a DistMatrix (n, m) on the grid of A.  Cost: that of `svd`, and a product of 2 m n min(m, n) flops.  For a
    least squares problem, `lstsq` takes less time and is more accurate.
    Raises ArgumentError on all ranks where a tolerance is no real number, and the errors of `svd`.
    Golub & Van Loan, Matrix Computations, 4th ed., 2013, 5.5.2.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        tolerances = _tolerances(A, atol, rtol)
        arguments += ["pinv", *tolerances]
    steps, (U, s, Vh) = Steps(), svd(A)
    rank = int(np.count_nonzero(s > _least(s, *tolerances)))
    X: DistMatrix = steps.did(pdgemm(1, Vh[:rank].H, (U[:, :rank] * (1 / s[:rank])).H))
    if U.report:
        X.report = steps.after(U.report)
    return X


def _tolerances(A: DistMatrix, absolute: float | None, rtol: float | None) -> tuple[float, float]:
    """Return the absolute and the relative tolerance, defaults included.  Raises ArgumentError.  Local."""
    usual = max(A.shape) * dtypes.eps(A.dtype)
    return (
        0.0 if absolute is None else as_real(absolute, "the tolerance"),
        usual if rtol is None else as_real(rtol, "rtol"),
    )


def _least(s: np.ndarray, absolute: float, rtol: float) -> float:
    return absolute + rtol * float(s.max(initial=0))
