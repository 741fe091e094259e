"""The Cholesky factorisation of a matrix."""

from __future__ import annotations

from time import perf_counter

from pdgemm.arrays import dtypes
from pdgemm.errors import LayoutError, LinAlgError
from pdgemm.matrix.argument_checks import check_dtype, check_matrices, check_result, communicator, size
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.panel_algorithms.cholesky_panels import Cholesky
from pdgemm.panel_algorithms.panel_run import can_read, run, working_copy
from pdgemm.panel_schedules.cholesky_schedule import CholeskySchedule
from pdgemm.panel_schedules.panel_schedule import is_balanced
from pdgemm.support.agreement import together

BLOCK = 128  # wide enough for BLAS, narrow enough for the ranks to share the last blocks


def cholesky(A: DistMatrix, *, lower: bool = True, overwrite_a: bool = False) -> DistMatrix:
    """Return L, where A = L L^H, or U, where A = U^H U, as scipy.linalg.cholesky.  Collective over the grid of A.

    A     : DistMatrix (n, n), Hermitian and positive definite, float32, float64, complex64 or complex128, of any
        layout; only the triangle that the factor will have is read.
    lower : return L, otherwise U; the other triangle is zero.
    overwrite_a : the factor may be stored in A, which saves a copy where the layout of A shares the work evenly.

    The factor lies as A does, or in square blocks where A does not share the work evenly; `report` has the words.

    Cost per rank on Pr x Pc = P: n^3/(3P) flops; at most n^2/2 (1/Pr + 1/Pc) words in, and n^2/P if A is moved first.
    Raises LinAlgError on all ranks, with the number of the first leading minor, counted from 1, that is not positive
    definite; A is then as it was, except with overwrite_a.  LayoutError or DTypeError for another matrix.
    Error: |A - L L^H| <= gamma_{n+1} |L||L^H| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 10.1).
    """
    start = perf_counter()
    with together(communicator(A=A)) as arguments:
        check_matrices(A=A)
        check_dtype("A", A, dtypes.BLAS)
        if A.shape[0] != A.shape[1]:
            raise LayoutError(f"A must be square, it is {size(A)} on a {A.grid} grid")
        if overwrite_a:
            check_result("A", A, {})
        fits = is_balanced(A.layout_in(A.grid), BLOCK)
        arguments += ["cholesky", f"lower={bool(lower)}", bool(overwrite_a), A.distribution, A.dtype, A.order]
    W, moves = working_copy(A if lower else A.T, BLOCK, fits, overwrite_a)
    schedule = CholeskySchedule(W.layout_in(W.grid), BLOCK, can_read(W))
    n = A.shape[0]
    minor, report = run(schedule, Cholesky, {"A": W}, f"Cholesky factor of a matrix ({n} x {n})", moves, start)
    if minor:
        raise LinAlgError(
            f"A ({size(A)} on a {A.grid} grid) is not positive definite: its leading minor of order {minor} is not"
        )
    factor = W if lower else W.T
    factor.report = report
    return factor
