"""Linear least squares."""

from __future__ import annotations

from typing import Any, get_args, overload

import numpy as np

from pdgemm.gemm import pdgemm
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.householder import BLOCK, apply_reflectors, householder_qr, pivoted_factor
from pdgemm.linalg.factors.lu import own_copy, permuted
from pdgemm.linalg.factors.operands import check_operand, check_right_side, column, common_dtype, in_type, to_one
from pdgemm.linalg.factors.tall_qr import svd_on_all, tall_qr
from pdgemm.linalg.factors.triangular import solve_triangular
from pdgemm.linalg.ranges import ELEMENTS, in_range, times
from pdgemm.linalg.singular.singular_values import rank_above
from pdgemm.linalg.singular.svd import all_triplets, are_shared
from pdgemm.linalg.work import Work, near_one, on_one_rank
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import as_name, as_real
from pdgemm.local.blas.local_qr import LeadingTriangle
from pdgemm.matrix.argument_checks import communicator, shape_of
from pdgemm.matrix.array_functions import triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import LstsqDriver
from pdgemm.support.agreement import described_elements, together


@overload
def lstsq(
    A: DistMatrix, B: DistMatrix, *, rcond: float | None = None, lapack_driver: LstsqDriver = "gelsd"
) -> tuple[DistMatrix, np.ndarray, int, Any]: ...
@overload
def lstsq(
    A: DistMatrix, B: np.ndarray, *, rcond: float | None = None, lapack_driver: LstsqDriver = "gelsd"
) -> tuple[np.ndarray, np.ndarray, int, Any]: ...
@in_range(
    lambda X, a, b: (times(X[0], b - a), times(X[1], 2 * b), X[2], None if X[3] is None else times(X[3], a)),
    A=ELEMENTS,
    B=ELEMENTS,
)
def lstsq(
    A: DistMatrix, B: Any, *, rcond: float | None = None, lapack_driver: LstsqDriver = "gelsd"
) -> tuple[Any, np.ndarray, int, Any]:
    """Return X with the least |B - A X| and, of all such X, the least |X|, as numpy.linalg.lstsq.  Collective.

    A : DistMatrix (m, n), float32, float64, complex64 or complex128, of any layout; unchanged.
    B : DistMatrix (m, p) over the same ranks, of any layout, or a 1-D array of m numbers, the same on every rank.
    rcond : singular values of A up to rcond times the largest one are taken for 0; by default max(m, n) eps;
        a negative number stands for eps.  All ranks warn with scipy.linalg.LinAlgWarning where rounding errors decide
        whether a value is above rcond, unless rcond is as small as rounding errors.
    lapack_driver : LAPACK's routine with the same method, as for scipy.linalg.lstsq: "gelsd" uses singular values;
        "gelsy" uses QR factors with column pivoting, and estimates of the singular values of leading triangles of R.

    Returns X, a DistMatrix (n, p), or a vector on every rank; the sums |b - A x|^2 for the columns b of B, or an empty
    array if the rank is less than n or m <= n; the rank of A; and the min(m, n) singular values of A ("gelsy": None).
    The last three are the same on every rank.  `X.report` says how A was factored, and counts all words.

    "gelsd": if m >= n, A = Q R with the SVD R = U diag(s) V^H, and X = V diag(1/s) U^H Q^H B; if m < n, A^H is
    factored.  The residuals are the columns of B - Q Q^H B, which does not depend on X; their norms do not overflow.
    Cost per rank for P ranks, with k = min(m, n): that of `qr`, 4mnp/P flops, and 22k^3 on one rank; every rank holds
    k^2 words.  For k > 512: that of `svd` and 4(m + n)kp/P flops; the ranks share all factors, except on devices whose
    panels they cannot exchange.
    "gelsy": that of `qr` with pivoting, without Q, 4(mk + nr)p/P flops for rank r, and 4nr^2/P more if r < n; the ranks
    share all factors.
    Error: each column of X is the exact solution for A + E, |E| <= c(m, n) eps |A| (Higham 2002, 20.3), with "gelsy"
    c(m, n) (eps + rcond) |A|, except for matrices such as Kahan's, whose rank pivots do not show (as in LAPACK).
    Raises LayoutError, DTypeError, DeviceError, ArgumentError, or LinAlgError where A has NaN or infinite elements; on
    all ranks.
    Golub & Van Loan, Matrix Computations, 4th ed., 2013, 5.5.
    """
    with together(communicator(A=A, B=B)) as arguments:
        check_operand("A", A)
        check_right_side(A, B)
        dtype, vector = common_dtype(A, B), not isinstance(B, DistMatrix)
        rcond = max(A.shape) * dtypes.eps(dtype) if rcond is None else as_real(rcond, "rcond")
        rcond = dtypes.eps(dtype) if rcond < 0 else rcond
        driver = as_name(lapack_driver, "lapack_driver", get_args(LstsqDriver))
        arguments += ["lstsq", driver, f"rcond={rcond}", A.distribution, A.dtype, B.dtype]
        arguments.append(f"a vector, {described_elements(B)}" if vector else B.distribution)
    A, B = in_type(A, dtype), column(B, A, dtype).to_device(A.device) if vector else in_type(B, dtype)
    if driver == "gelsy":
        X, residuals, rank = complete_orthogonal(A, B, rcond)
        return X.allgather()[:, 0] if vector else X, residuals, rank, None
    X, residuals, rank, s = (by_shared_vectors if are_shared(A) else by_triangle)(A, B, rcond)
    return X.allgather()[:, 0] if vector else X, residuals, rank, s


def by_triangle(A: DistMatrix, B: DistMatrix, rcond: float) -> tuple[DistMatrix, np.ndarray, int, np.ndarray]:
    """Return X, squared residuals, rank and singular values, as `lstsq` does, by A = Q R or A^H = Q R.  Collective."""
    (m, n), tall = A.shape, A.shape[0] >= A.shape[1]
    steps = Steps()
    near_one("A", A)  # raises where an element is NaN or infinite
    factors = tall_qr(A if tall else A.H)
    U, s, Vh, report = svd_on_all(factors)
    rank = rank_above(A, s, rcond * s.max(initial=0))
    left, right = (U, Vh) if tall else (Vh.conj().T, U.conj().T)  # singular vectors of R, or of R^H
    left_h, right_h = (
        DistMatrix.from_global(np.ascontiguousarray(x), grid=A.grid.base, device=A.device, check=False)
        for x in (left[:, :rank].conj().T, right[:rank])
    )
    Q = factors.Q
    C = steps.did(pdgemm(1, Q.H, B)) if tall else B
    Y = _divided(steps.did(pdgemm(1, left_h, C)), s[:rank])
    X = steps.did(pdgemm(1, right_h.H, Y))
    if not tall:
        X = steps.did(pdgemm(1, Q, X))
    residuals = np.empty(0, s.dtype)
    if rank == n < m:
        residuals = _squared_lengths(steps.did(pdgemm(-1, Q, C, 1, B.astype(A.dtype))))
    X.report = steps.after(report)
    return X, residuals, rank, s


def by_shared_vectors(A: DistMatrix, B: DistMatrix, rcond: float) -> tuple[DistMatrix, np.ndarray, int, np.ndarray]:
    """Return the result of `by_triangle`, by A = U diag(s) V^H with factors that the ranks share.  Collective."""
    work, (m, n) = Work("lstsq"), A.shape
    near_one("A", A)
    U, s, Vh = all_triplets(work, A)
    rank = rank_above(A, s, rcond * s.max(initial=0))
    C = work.product(1, U.H, B)
    X = work.product(1, Vh[:rank].H, _divided(C[:rank].copy(), s[:rank]))
    residuals = np.empty(0, s.dtype)
    if rank == n < m:
        residuals = _squared_lengths(work.product(-1, U, C, 1, B.astype(A.dtype)))
    return work.reported(X, 0), residuals, rank, s


def _divided(Y: DistMatrix, s: np.ndarray) -> DistMatrix:
    """Return diag(1/s) Y, also where 1/s overflows.  Collective."""
    if not len(s):
        return Y
    near, far = to_one(float(s[0]), Y.dtype)
    return Y * near * far / (s[:, None] * near * far)


def _squared_lengths(R: DistMatrix) -> np.ndarray:
    """Return the sum |r|^2 of each column.  Collective."""
    lengths = R.norm(axis=0)
    with np.errstate(over="ignore"):  # as in NumPy, a sum of squares may be infinite
        return np.asarray(lengths**2)


def complete_orthogonal(A: DistMatrix, B: DistMatrix, rcond: float) -> tuple[DistMatrix, np.ndarray, int]:
    """Return X, the squared residuals and the rank, by the method "gelsy" of `lstsq`.  Collective.

    A, B : A (m, n), B (m, p), of one type.   rcond : the rank r is the order of the largest leading triangle of R
    whose condition is estimated to be at most 1/rcond, where A P = Q R with column pivoting.

    The first r rows of R are L^H Z^H, where Z (n, r) has orthonormal columns, and X = P Z L^-H (Q^H B)[:r].
    Cost per rank for P ranks: that of `qr` with pivoting, without Q; 4 (m min(m, n) + n r) p/P flops and, if r < n,
    4 n r^2/P flops for Z and L; on rank 0, which has BLOCK columns of R at a time, r^2/2 words and 4 r^2 flops.
    Error: each column of X is the exact solution for A + E, |E| <= c(m, n) (eps + rcond) |A|.
    Golub & Van Loan, Matrix Computations, 4th ed., 2013, 5.5.
    """
    (m, n), steps = A.shape, Steps(what=f"Least squares by a complete orthogonal decomposition ({shape_of(A)})")
    near_one("A", A)
    F, tau, p = pivoted_factor("lstsq", A, steps)
    rank = _leading_order(F, len(tau), rcond)
    C = own_copy(B, A, False)
    apply_reflectors(F[:, : len(tau)], tau, C, True, steps.did)  # C := Q^H B
    if rank == n:
        X = steps.did(solve_triangular(F[:n], C[:n]))
    else:
        Z, L = householder_qr(triu(F[:rank]).H)
        assert Z is not None
        Y = steps.did(solve_triangular(steps.did(L), C[:rank], trans="C"))
        X = steps.did(pdgemm(1, Z, Y))
    residuals = C[n:].norm(axis=0) ** 2 if rank == n < m else np.empty(0, np.finfo(A.dtype).dtype)
    return steps.reported(steps.did(permuted(X, np.argsort(p)))), residuals, rank


def _leading_order(F: DistMatrix, most: int, rcond: float) -> int:
    """Return the rank of R, the upper triangle of F, as `LeadingTriangle` estimates it on rank 0.  Collective."""
    triangle, order = LeadingTriangle(F.dtype, most, rcond), 0
    for start in range(0, most, BLOCK):
        end = min(most, start + BLOCK)
        columns = F[:end, start:end].to_global(0)
        order = F.grid.expected(on_one_rank(F, triangle.extended, columns), end)
        if order < end:
            break
    return order
