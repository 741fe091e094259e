"""The QR factorisation of a matrix of any shape by Householder reflections."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from pdgemm.arrays import dtypes
from pdgemm.arrays.element_functions import element_function
from pdgemm.factors.operands import check_host, described
from pdgemm.matrix.argument_checks import check_dtype, check_matrices, check_result, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.panel_algorithms.householder_panels import Householder
from pdgemm.panel_algorithms.panel_run import can_read, run, working_copy
from pdgemm.panel_schedules.householder_schedule import HouseholderSchedule
from pdgemm.panel_schedules.panel_schedule import is_balanced
from pdgemm.support.agreement import together

BLOCK = 64  # one rank factors a panel while the others reflect what is behind the last one


def householder_qr(
    A: DistMatrix, *, overwrite_a: bool = False, want_q: bool = True
) -> tuple[DistMatrix | None, DistMatrix]:
    """Return Q and R, where A = Q R, as scipy.linalg.qr(A, mode="economic").  Collective over the grid of A.

    A      : DistMatrix (m, n) of any shape, float32, float64, complex64 or complex128, of any layout.
    overwrite_a : A may be overwritten, which saves a copy where the layout of A shares the work evenly.
    want_q : False leaves Q out, and returns None in its place.

    Q (m, k) has orthonormal columns, k = min(m, n), whatever the rank of A;  R (k, n) is upper triangular, with
    LAPACK's signs: its diagonal is real, and may be negative.  Both lie as A does, or in square blocks where A does
    not share the work evenly; `report` has the words.

    Cost per rank on Pr x Pc = P, m >= n: (2 m n^2 - 2/3 n^3)/P flops for R, and as many for Q; about
    n (m - n/2)/Pr + n^2/Pc + n (m - n/2)/P words in for R; extra memory for m n/P words of reflectors.
    Raises LayoutError, DTypeError or DeviceError on all ranks.
    Error: columnwise |A - Q R| <= gamma_{mn} |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.4).
    Schreiber & Van Loan, SIAM J. Sci. Stat. Comput. 10(1), 1989.
    """
    start = perf_counter()
    with together(communicator(A=A)) as arguments:
        check_matrices(A=A)
        check_dtype("A", A, dtypes.BLAS)
        check_host("A", A)
        if overwrite_a:
            check_result("A", A, {})
        fits = is_balanced(A.layout_in(A.grid), BLOCK)
        arguments += ["householder_qr", bool(overwrite_a), bool(want_q), *described(A)]
    W, moves = working_copy(A, BLOCK, fits, overwrite_a)
    (m, n), k = A.shape, min(A.shape)
    matrices = {"A": W}
    if want_q:
        like_q, _ = working_copy(W[:, :k], BLOCK, True, False)
        matrices["Q"] = like_q._filled("eye", element_function("eye", 0, np.dtype("d")))
    schedule = HouseholderSchedule(W.layout_in(W.grid), BLOCK, can_read(W), wants_q=bool(want_q))
    what = f"QR factors of a matrix ({m} x {n}) by Householder reflections"
    _, report = run(schedule, Householder, matrices, what, moves, start)
    Q, R = matrices.get("Q"), working_copy(W[:k], BLOCK, True, False)[0] if m > n else W
    for factor in (Q, R):
        if factor is not None:
            factor.report = report
    return Q, R
