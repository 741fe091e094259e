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
    method : "cholesky"  CholeskyQR2, by products and triangular solves, with a shift and a third pass where A is
                         ill-conditioned; LinAlgError where Q would not be accurate, above a condition number of about
                         1e10 (1e4 in single precision) of the columns scaled to one length;
             "tsqr"      a tree of Householder's factorisations, for any A, of any rank;
             "householder"  blocked reflections on any grid, for A of any shape and rank; made for matrices that are
                         not tall, in square blocks; `Q.report` is then a PanelReport;
             "auto"      "householder" where its plan takes less time than the plan of "cholesky".  Otherwise the
                         method is "cholesky" where it is accurate, else "tsqr".  Accurate means |Q^H Q - I| <= 1/2,
                         measured before the last pass, and no pivot of Cholesky's factorisation that is as small as a
                         rounding error.

    The diagonal of R is real and >= 0 with each method, so that Q and R of full rank are the same on any number of
    ranks (the diagonal of LAPACK and NumPy may have any sign).  Q has the layout of A; R is on the same grid, with its
    columns distributed as those of A.  `Q.report` has the method, the measured departure |Q^H Q - I|, and the words.
    On a device, "auto" leaves "householder" out; CholeskyQR2 runs on the device, except for the factors of n x n
    matrices; TSQR runs in copies on the host.

    Cost per rank for P ranks, m >= n: CholeskyQR2 4mn^2/P flops, and n^2 words in for each of two passes; TSQR 6mn^2/P
    flops, and 2n^2 words in for each of log2(P) levels of its tree.  Memory: twice the rank's share of A, and 4n^2
    words, because every rank holds all of R.  If A is not distributed by rows (ProcessGrid(comm, (P, 1))), 2mn/P more
    words in.  If A is wide, Q and the first m columns of R are the factors of the first m columns of A, and the other
    columns of R are Q^H times the other columns of A.
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
    """Return Q and R as `qr` does.

    passes : number of passes of CholeskyQR to plan.   start : the time from which the report counts seconds.
    """
    start = perf_counter() if start is None else start
    if (fastest_method(A) if method == "auto" else method) == "householder":
        return _by_reflections(A)
    (m, n), steps = A.shape, Steps()
    Q, R = placed(tall_qr(A[:, : min(m, n)], method, passes), A[:, : min(m, n)], start)
    if m < n:
        first, R = R, empty_like(A, distribution=Distribution(R.distribution.rows, A.distribution.cols))
        steps.did(pdgemm(1, Q.H, A, 0, R))
        steps.did(first.redistribute(R[:, :m]))  # exact zeros below the diagonal; each rank copies its own elements
        Q.report = R.report = steps.after(Q.report)
    return Q, R


def _by_reflections(A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Return Q in the layout of A, and R: in the layout that `householder_qr` gives R or, if A moved, in `beneath`."""
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
    """Return the distribution of R, (h, n), h = min(m, n): columns as those of A, rows as the first h columns of A."""
    cols = A.distribution.cols
    return Distribution(cols.window(0, min(A.shape)).over(A.grid.shape[0]), cols)


def fastest_method(A: DistMatrix) -> str:
    """Return "householder" or "auto", the method whose program takes less time; "auto" on a device.  Local.

    If all columns fit in one panel of reflections, one rank would factor them all: then "auto", too.
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
    """Make the real diagonal of R >= 0 by changing the signs of rows of R and of columns of Q.  Collective."""
    signs = np.where(R.diagonal().real < 0, -1, 1).astype(R.dtype)
    R *= signs[:, None]
    Q *= signs
