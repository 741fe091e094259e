"""The QR factorisation of a matrix."""

from __future__ import annotations

from time import perf_counter
from typing import Any, get_args

import numpy as np

from pdgemm.algorithms.planned_program import program_of
from pdgemm.gemm import pdgemm
from pdgemm.grids.distribution import Distribution
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.householder import BLOCK, householder_qr
from pdgemm.linalg.factors.operands import empty_like
from pdgemm.linalg.factors.tall_qr import PASSES, placed, tall_qr
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.integers import as_name
from pdgemm.matrix.argument_checks import check_dtype, check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import QRMethod
from pdgemm.support.agreement import together

_fastest: dict[Any, str] = {}  # the results of `fastest_method` for the last layouts


def qr(A: DistMatrix, *, mode: str = "reduced", method: QRMethod = "auto") -> tuple[DistMatrix, DistMatrix]:
    """Return Q, with orthonormal columns, and R, upper triangular, of A = Q R.  Collective over the grid of A.

    A      : DistMatrix (m, n), float32, float64, complex64 or complex128, of any layout; unchanged.
    mode   : "reduced": Q is (m, h) and R is (h, n), h = min(m, n), as numpy.linalg.qr by default.
    method : "cholesky"  CholeskyQR2, which is products and triangular solves, with a shift and a third pass where A is
                         ill-conditioned; LinAlgError where that is not accurate, beyond a condition number of about
                         1e10 of the columns scaled to one length (1e4 in single precision);
             "tsqr"      a tree of Householder's factorisations, for any A, of any rank;
             "householder"  blocked reflections on any grid, for any A, of any shape and rank: for matrices that are
                         not tall, which lie in square blocks; `report` is then a PanelReport;
             "auto"      the third where its plan takes less time than that of the first.  Else the first where it is
                         accurate, and the second where not, as measured: |Q^H Q - I| <= 1/2 before the last pass, and
                         no pivot of Cholesky's factorisation is a rounding error.

    The diagonal of R is real and >= 0 with each method, so that Q and R of full rank are the same on any number of
    ranks (LAPACK's, and NumPy's, has numbers of any sign).  Q lies as A does, R on the same grid with the columns of Q.
    `Q.report` says which method ran, what was measured, and the words.  On a device "auto" leaves "householder" out,
    CholeskyQR2 computes there, but for the factors of n x n matrices, and TSQR in copies on the host.

    Cost per rank for P ranks, m >= n: CholeskyQR2 4mn^2/P flops and n^2 words in, twice; TSQR 6mn^2/P flops and 2n^2
    words in, log2(P) times.  Memory: twice the rank's share of A, and 4n^2 words, because all of R is on every rank.
    2mn/P words in, where A is not distributed by rows (ProcessGrid(comm, (P, 1))).  A wide matrix: Q and the first m
    columns of R are those of the first m columns of A, and the others Q^H times these.
    Error: |Q^H Q - I| and |A - Q R| / |A| are O(n eps) (Yamamoto et al., Electron. Trans. Numer. Anal. 44, 2015; Fukaya
    et al., SIAM J. Sci. Comput. 42(1), 2020; Demmel, Grigori, Hoemmen & Langou, SIAM J. Sci. Comput. 34(1), 2012).
    Raises ArgumentError, DTypeError, DeviceError or LinAlgError on all ranks.
    """
    start = perf_counter()
    with together(communicator(A=A)) as arguments:
        check_matrices(A=A)
        arguments += ["qr", mode, method, A.distribution]
        as_name(mode, "mode", ("reduced",))
        as_name(method, "method", get_args(QRMethod))
        check_dtype("A", A, dtypes.BLAS)
    return factored(A, method, start=start)


def factored(
    A: DistMatrix, method: str = "auto", passes: int = PASSES, start: float | None = None
) -> tuple[DistMatrix, DistMatrix]:
    """Return Q and R as `qr` does.   passes : of CholeskyQR that are expected, where a program is planned."""
    start = perf_counter() if start is None else start
    if (fastest_method(A) if method == "auto" else method) == "householder":
        return _by_reflections(A)
    (m, n), steps = A.shape, Steps()
    Q, R = placed(tall_qr(A[:, : min(m, n)], method, passes), A[:, : min(m, n)], start)
    if m < n:
        first, R = R, empty_like(A, distribution=Distribution(R.distribution.rows, A.distribution.cols))
        steps.did(pdgemm(1, Q.H, A, 0, R))
        steps.did(first.redistribute(R[:, :m]))  # without the rounding errors below the diagonal, from rank to itself
        Q.report = R.report = steps.after(Q.report)
    return Q, R


def _by_reflections(A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Return Q and R of any matrix: Q lies as A does, and so does R, or beneath A where A had to be moved."""
    steps, lying = Steps(), A[:, : min(A.shape)]
    Q, R = householder_qr(A)
    assert Q is not None
    _make_diagonal_positive(Q, R)
    report = R.later_report
    if not Q.same_layout(lying):
        Q = steps.did(Q.redistribute(like=lying))
        R = steps.did(R.redistribute(empty_like(A, distribution=beneath(A))))
    if report:
        Q.report = R.report = steps.after(report)
    return Q, R


def beneath(A: DistMatrix) -> Distribution:
    """Return the distribution of R: the columns of A, and as many of these as A has rows, at most, for rows."""
    cols = A.distribution.cols
    return Distribution(cols.window(0, min(A.shape)).over(A.grid.shape[0]), cols)


def fastest_method(A: DistMatrix) -> str:
    """Return how `qr` factors a matrix: by reflections, or by rows, whichever program takes less time.  Local.

    Where all columns are one panel of reflections, a single rank would do all the work.
    """
    if min(A.shape) <= BLOCK or A.device != devices.HOST:
        return "auto"
    grid = A.grid
    key = A.layout_in(grid), A.shared, grid.size, grid.shares_memory, grid.ranks_per_node
    if key not in _fastest:
        if len(_fastest) == 64:
            _fastest.clear()
        by_reflections, by_rows = (program_of(factored, A, method).seconds for method in ("householder", "tall"))
        _fastest[key] = "householder" if by_reflections < by_rows else "auto"
    return _fastest[key]


def _make_diagonal_positive(Q: DistMatrix, R: DistMatrix) -> None:
    """Change signs of columns of Q, and of rows of R, whose diagonal is real.  Collective."""
    signs = np.where(R.diagonal().real < 0, -1, 1).astype(R.dtype)
    R *= signs[:, None]
    Q *= signs
