"""The QR factorisation of a matrix."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Literal, get_args, overload

import numpy as np

from pdgemm.algorithms.planned_program import program_of
from pdgemm.errors import ArgumentError
from pdgemm.gemm import pdgemm
from pdgemm.grids.distribution import Distribution
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.householder import BLOCK, householder_qr, pivoted_qr
from pdgemm.linalg.factors.operands import check_operand
from pdgemm.linalg.factors.tall_qr import PASSES, beneath, placed, tall_qr
from pdgemm.linalg.ranges import Measured, in_range, times
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import as_name
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import QRMethod, QRMode
from pdgemm.support.agreement import together

_fastest: dict[Any, str] = {}  # cached results of `fastest_method`, by layout


class _Columns(Measured):
    """The operand of `qr`, with the range that its elements must have.

    With method "cholesky" the range is narrower, so that sums of squares of elements neither overflow nor underflow.
    """

    def limits(self, kind: np.finfo[Any], values: dict[str, Any]) -> tuple[int, int]:
        low, high = super().limits(kind, values)
        # with room for columns of smaller elements, and for sums over rows
        squares = low // 2 + 2 * int(kind.nmant), high // 2 - 16
        return squares if str(values.get("method")) == "cholesky" else (low, high)


@overload
def qr(
    A: DistMatrix, *, mode: Literal["reduced", "economic"] = "reduced", method: QRMethod = "auto",
    pivoting: Literal[False] = False,
) -> tuple[DistMatrix, DistMatrix]: ...  # fmt: skip
@overload
def qr(
    A: DistMatrix, *, mode: Literal["reduced", "economic"] = "reduced", method: QRMethod = "auto",
    pivoting: Literal[True],
) -> tuple[DistMatrix, DistMatrix, np.ndarray]: ...  # fmt: skip
@overload
def qr(
    A: DistMatrix, *, mode: Literal["r"], method: QRMethod = "auto", pivoting: Literal[False] = False
) -> DistMatrix: ...
@overload
def qr(
    A: DistMatrix, *, mode: Literal["r"], method: QRMethod = "auto", pivoting: Literal[True]
) -> tuple[DistMatrix, np.ndarray]: ...
def qr(A: DistMatrix, *, mode: QRMode = "reduced", method: QRMethod = "auto", pivoting: bool = False) -> Any:
    """Return Q, with orthonormal columns, and R, upper triangular, of A = Q R.  Collective over the grid of A.

    A      : DistMatrix (m, n), float32, float64, complex64 or complex128, of any layout; unchanged.
    mode   : "reduced", or "economic": Q is (m, h) and R is (h, n), h = min(m, n), as numpy.linalg.qr by default;
             "r": only R is returned, which saves half of the work of "householder".
    method : "cholesky"  CholeskyQR2, by products and triangular solves, with a shift and a third pass where A is
                         ill-conditioned; LinAlgError where Q would not be accurate, above a condition number of about
                         1e10 (1e4 in single precision) of the columns scaled to one length;
             "tsqr"      a tree of Householder's factorisations, for any A, of any rank;
             "householder"  blocked reflections on any grid, for A of any shape and rank; made for matrices that are
                         not tall, in square blocks; `Q.report` is the Report of this algorithm;
             "auto"      "householder" where its plan takes less time than the plan of "cholesky".  Otherwise the
                         method is "cholesky" where it is accurate, else "tsqr".  Accurate means |Q^H Q - I| <= 1/2,
                         measured before the last pass, and no pivot of Cholesky's factorisation that is as small as a
                         rounding error.

    pivoting : return also p, an array of n column numbers, the same on every rank, where A[:, p] = Q R, as
             scipy.linalg.qr; the method is "householder".  |r_jj| decreases, up to small factors, and for most
             matrices is about as large as the singular value s_j: see `pdgemm.linalg.factors.householder`.

    The diagonal of R is real and >= 0 with each method, so that Q and R of full rank are the same on any number of
    ranks (the diagonal of LAPACK and NumPy may have any sign).  Q has the layout of A; R is on the same grid, with its
    columns distributed as those of A.  `Q.report` has the method, the measured departure |Q^H Q - I|, and the words.
    On a device, "auto" leaves "householder" out; CholeskyQR2 runs on the device, except for the factors of n x n
    matrices; TSQR runs in copies on the host.

    Cost per rank for P ranks, m >= n: CholeskyQR2 4mn^2/P flops, and n^2 words in for each of two passes; TSQR 6mn^2/P
    flops, and 2n^2 words in for each of log2(P) levels of its tree.  Memory: twice the rank's share of A, and 4n^2
    words, because every rank holds all of R.  If A is not distributed by rows (ProcessGrid(comm, (P, 1))), 2mn/P more
    words in.  If A is wide, Q and the first m columns of R are the factors of the first m columns of A, and the other
    columns of R are Q^H times the other columns of A.  "householder": see `householder_qr`; pivoting, of 64
    columns at a time, takes 148 m n/P more flops, and 192 n^2 on one rank; at most 2 m n/P more words in, and n^2/2 on
    one rank.
    Error: |Q^H Q - I| and |A - Q R| / |A| are O(n eps) (Yamamoto et al., Electron. Trans. Numer. Anal. 44, 2015; Fukaya
    et al., SIAM J. Sci. Comput. 42(1), 2020; Demmel, Grigori, Hoemmen & Langou, SIAM J. Sci. Comput. 34(1), 2012).
    Pivots: Duersch & Gu, SIAM J. Sci. Comput. 39(4), 2017.
    Raises ArgumentError, DTypeError, DeviceError or LinAlgError on all ranks.
    """
    start = perf_counter()
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        arguments += ["qr", mode, method, bool(pivoting), A.distribution]
        as_name(mode, "mode", get_args(QRMode))
        as_name(method, "method", get_args(QRMethod))
        if pivoting and method not in ("auto", "householder"):
            raise ArgumentError(f'pivoting=True takes method="auto" or "householder", got {method!r}')
    Q, R, p = _factors(A, method, mode != "r", bool(pivoting), start)
    results = (*(() if mode == "r" else (Q,)), R, *((p,) if pivoting else ()))
    return results if len(results) > 1 else R


@in_range(lambda factors, a: (factors[0], times(factors[1], a), factors[2]), A=_Columns())
def _factors(A: DistMatrix, method: str, want_q: bool, pivoting: bool, start: float) -> tuple[Any, DistMatrix, Any]:
    """Return Q, R and p as `qr` does; a result that is not wanted may be None.  Collective."""
    if pivoting or (fastest_method(A) if method == "auto" else method) == "householder":
        return _by_reflections(A, want_q, pivoting)
    return *factored(A, method, start=start), None


def factored(
    A: DistMatrix, method: str = "auto", passes: int = PASSES, start: float | None = None
) -> tuple[DistMatrix, DistMatrix]:
    """Return Q and R as `qr` does.

    passes : number of passes of CholeskyQR to plan.   start : the time from which the report counts seconds.
    """
    start = perf_counter() if start is None else start
    if (fastest_method(A) if method == "auto" else method) == "householder":
        return _by_reflections(A)[:2]
    (m, n), steps = A.shape, Steps()
    Q, R = placed(tall_qr(A[:, : min(m, n)], method, passes), A[:, : min(m, n)], start)
    if m < n:
        first, R = R, empty_like(A, distribution=Distribution(R.distribution.rows, A.distribution.cols))
        steps.did(pdgemm(1, Q.H, A, 0, R))
        steps.did(first.redistribute(R[:, :m]))  # exact zeros below the diagonal; each rank copies its own elements
        Q.report = R.report = steps.after(Q.report)
    return Q, R


def _by_reflections(A: DistMatrix, want_q: bool = True, pivoting: bool = False) -> tuple[Any, DistMatrix, np.ndarray]:
    """Return Q in A's layout; R in the layout of `householder_qr`, or of `beneath` if A was redistributed; and p."""
    steps, k, p = Steps(), min(A.shape), np.arange(A.shape[1])
    Q: DistMatrix | None
    if pivoting:
        Q, R, p = pivoted_qr(A, want_q)
    else:
        Q, R = householder_qr(A, want_q=want_q)
    _make_diagonal_positive(Q, R)
    report = R.later_report
    if not (R.same_layout(A[:k]) if Q is None else Q.same_layout(A[:, :k])):
        Q = None if Q is None else steps.did(Q.redistribute(like=A[:, :k]))
        R = steps.did(R.redistribute(empty_like(A, distribution=beneath(A))))
    for factor in (Q, R) if report else ():
        if factor is not None:
            factor.report = steps.after(report)
    return Q, R, p


def fastest_method(A: DistMatrix) -> str:
    """Return "householder", or "auto" for CholeskyQR2 or TSQR: the method whose plan is faster.  Local.

    Returns "auto" in any case on a device, and also if there is only one panel of reflections, because one rank would
    factor this panel.
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


def _make_diagonal_positive(Q: DistMatrix | None, R: DistMatrix) -> None:
    """Make the real diagonal of R >= 0 by the signs of rows of R and, unless Q is None, columns of Q.  Collective."""
    signs = np.where(R.diagonal().real < 0, -1, 1).astype(R.dtype)
    R *= signs[:, None]
    if Q is not None:
        Q *= signs
