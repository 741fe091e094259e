"""Linear least squares."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from pdgemm.gemm import pdgemm
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.operands import check_right_side, column, common_dtype, in_type, to_one
from pdgemm.linalg.factors.tall_qr import svd_on_all, tall_qr
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.argument_checks import as_real, check_dtype, check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import described_elements, together


@overload
def lstsq(
    A: DistMatrix, B: DistMatrix, *, rcond: float | None = None
) -> tuple[DistMatrix, np.ndarray, int, np.ndarray]: ...
@overload
def lstsq(
    A: DistMatrix, B: np.ndarray, *, rcond: float | None = None
) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]: ...
def lstsq(A: DistMatrix, B: Any, *, rcond: float | None = None) -> tuple[Any, np.ndarray, int, np.ndarray]:
    """Return X with the least |B - A X| and, of all such X, the least |X|, as numpy.linalg.lstsq.  Collective.

    A : DistMatrix (m, n), float32, float64, complex64 or complex128, of any layout; unchanged.
    B : DistMatrix (m, p) over the same ranks, of any layout, or a 1-D array of m numbers, the same on every rank.
    rcond : singular values of A up to rcond times the largest one are taken for 0; by default max(m, n) eps;
        a negative number stands for eps.

    Returns X, a DistMatrix (n, p), or a vector on every rank; the sum |b - A x|^2 of each column b of B, an empty array
    where the rank is less than n or m <= n; the rank of A; and its min(m, n) singular values.  The last three are the
    same on every rank.  `X.report` says how A, or A^H if m < n, was factored, and has all words.

    If m >= n, A = Q R with the SVD R = U diag(s) V^H, and X = V diag(1/s) U^H Q^H B.  The residuals are the columns of
    B - Q Q^H B, which does not depend on X; their norms do not overflow.
    Cost per rank for P ranks, with k = min(m, n): that of `qr`, 22k^3 flops, and 4mnp/P flops; every rank holds k^2
    words, so k should be small.
    Error: each column of X is the exact solution for A + E, |E| <= c(m, n) eps |A| (Higham 2002, 20.3).
    Raises LayoutError, DTypeError, DeviceError, ArgumentError, or LinAlgError where A has NaN or infinite elements; on
    all ranks.
    Golub & Van Loan, Matrix Computations, 4th ed., 2013, 5.5.
    """
    with together(communicator(A=A, B=B)) as arguments:
        check_matrices(A=A)
        check_dtype("A", A, dtypes.BLAS)
        check_right_side(A, B)
        dtype, vector = common_dtype(A, B), not isinstance(B, DistMatrix)
        rcond = max(A.shape) * dtypes.eps(dtype) if rcond is None else as_real(rcond, "rcond")
        rcond = dtypes.eps(dtype) if rcond < 0 else rcond
        arguments += ["lstsq", f"rcond={rcond}", A.distribution, A.dtype, B.dtype]
        arguments.append(f"a vector, {described_elements(B)}" if vector else B.distribution)
    A, B = in_type(A, dtype), column(B, A, dtype).to_device(A.device) if vector else in_type(B, dtype)
    (m, n), tall = A.shape, A.shape[0] >= A.shape[1]
    steps, factors = Steps(), tall_qr(A if tall else A.H)
    U, s, Vh, report = svd_on_all(factors)
    rank = int(np.count_nonzero(s > rcond * s.max(initial=0)))
    left, right = (U, Vh) if tall else (Vh.conj().T, U.conj().T)  # singular vectors of R, or of R^H
    left_h, right_h = (
        DistMatrix.from_global(np.ascontiguousarray(x), grid=A.grid.base, device=A.device, check=False)
        for x in (left[:, :rank].conj().T, right[:rank])
    )
    Q = factors.Q
    C = steps.did(pdgemm(1, Q.H, B)) if tall else B
    Y = steps.did(pdgemm(1, left_h, C))
    if rank:
        near, far = to_one(float(s[0]), dtype)  # 1 / s may be infinite
        Y = Y * near * far / (s[:rank, None] * near * far)
    X = steps.did(pdgemm(1, right_h.H, Y))
    if not tall:
        X = steps.did(pdgemm(1, Q, X))
    residuals = np.empty(0, s.dtype)
    if rank == n < m:
        residuals = steps.did(pdgemm(-1, Q, C, 1, B.astype(dtype))).norm(axis=0) ** 2
    if vector:
        return X.allgather()[:, 0], residuals, rank, s
    X.report = steps.after(report)
    return X, residuals, rank, s
