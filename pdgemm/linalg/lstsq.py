"""Linear least squares."""

from __future__ import annotations

from typing import Any, overload
from zlib import crc32

import numpy as np

from pdgemm.arrays import device as devices
from pdgemm.arrays import dtypes
from pdgemm.arrays.device import to_host
from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.gemm import pdgemm
from pdgemm.linalg.tall_qr import svd_on_all, tall_qr
from pdgemm.matrix.argument_checks import check_devices, check_dtype, check_matrices, communicator, size
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


@overload
def lstsq(
    A: DistMatrix, B: DistMatrix, *, rcond: float | None = None
) -> tuple[DistMatrix, np.ndarray, int, np.ndarray]: ...
@overload
def lstsq(A: DistMatrix, B: Any, *, rcond: float | None = None) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]: ...
def lstsq(A: DistMatrix, B: Any, *, rcond: float | None = None) -> tuple[Any, np.ndarray, int, np.ndarray]:
    """Return the X that minimises |B - A X|, and |X| among those that do, as numpy.linalg.lstsq.  Collective.

    A : DistMatrix (m, n), float32, float64, complex64 or complex128, of any layout; unchanged.
    B : DistMatrix (m, p) over the same ranks, of any layout, or a vector of m numbers that is the same on every rank.
    rcond : singular values of A up to rcond times the largest one are taken for 0; by default max(m, n) eps.

    Returns X, a DistMatrix (n, p), or a vector on every rank; the sums |b - A x|^2 of the columns of B, an empty array
    where the rank is less than n or m <= n; the rank of A; and its min(m, n) singular values; these are the same on
    every rank.  `X.report` says how A, or A^H where m < n, was factored.

    By A = Q R and the SVD of R, X = V diag(1/s) U^H Q^H B.  The residuals are B - Q Q^H B, which X does not enter, and
    their norms do not overflow.
    Cost per rank for P ranks, with k = min(m, n): that of `qr`, 22k^3 flops, and 4mnp/P flops; k^2 words are on every
    rank, min(m, n) small is what it is for.
    Error: X is that of A + E, |E| <= c(m, n) eps |A|, for each column of B (Higham 2002, 20.3).
    Raises LayoutError, DTypeError, ArgumentError, or LinAlgError where A has NaN or infinity; on all ranks.
    Golub & Van Loan, Matrix Computations, 4th ed., 2013, 5.5.
    """
    comm, given = communicator(A=A), None if isinstance(B, DistMatrix) else B
    with together(comm) as arguments:
        check_matrices(A=A)
        check_dtype("A", A, dtypes.BLAS)
        rcond = None if rcond is None else float(rcond)
        arguments += ["lstsq", f"rcond={rcond}", A.distribution, A.dtype]
        if given is None:
            check_matrices(B=B)
            check_dtype("B", B, dtypes.BLAS)
            check_devices(A, B, None)
            B.layout_in(A.grid)  # raises for a grid over other ranks
            arguments += [B.distribution, B.dtype]
            rows, dtype = B.shape[0], np.result_type(A.dtype, B.dtype)
        else:
            vector = to_host(devices.adopted(given))
            if vector.ndim != 1:
                raise ArgumentError(f"B is a DistMatrix or a vector, got an array of shape {vector.shape}")
            rows, dtype = len(vector), np.result_type(A.dtype, vector.dtype)
            vector = vector.astype(dtype)
            arguments.append(f"a vector of checksum {crc32(vector.tobytes())}")
        if rows != A.shape[0]:
            raise LayoutError(f"A is {size(A)} on a {A.grid} grid, but B has {rows} rows")
    if given is not None:
        B = DistMatrix.from_global(vector[:, None], grid=A.grid.base, device=A.device)
    A, B = (x if x.dtype == dtype else x.astype(dtype) for x in (A, B))
    (m, n), tall = A.shape, A.shape[0] >= A.shape[1]
    made = tall_qr(A if tall else A.H)
    U, s, Vh, report = svd_on_all(made)
    rank = int(np.count_nonzero(s > (max(m, n) * dtypes.eps(dtype) if rcond is None else rcond) * s[:1].max(initial=0)))
    left, right = (U, Vh) if tall else (Vh.conj().T, U.conj().T)  # of R, or of R^H
    left_h, right_h = (
        DistMatrix.from_global(np.ascontiguousarray(x), grid=A.grid.base, device=A.device)
        for x in (left[:, :rank].conj().T, right[:rank])
    )
    Q = made.Q.to_device(A.device)
    C = pdgemm(1, Q.H, B) if tall else B
    Y = pdgemm(1, left_h, C) / s[:rank, None]
    X = pdgemm(1, right_h.H, Y)
    if not tall:
        X = pdgemm(1, Q, X)
    residuals = np.empty(0, s.dtype)
    if rank == n < m:
        residuals = pdgemm(-1, Q, C, 1, B.astype(dtype)).norm(axis=0) ** 2
    if given is not None:
        return X.allgather()[:, 0], residuals, rank, s
    X.report = report
    return X, residuals, rank, s
