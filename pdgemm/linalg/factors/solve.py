"""Linear systems and inverses."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import numpy as np

from pdgemm.algorithms.panels.panel_run import device_of, run_panels
from pdgemm.errors import DTypeError, LinAlgError
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.cholesky import cho_solve, cholesky
from pdgemm.linalg.factors.condition import one_norm, reciprocal, reciprocal_condition, regular
from pdgemm.linalg.factors.lu import LU, lu_solve, own_copy, permuted, rcond_by_lu, regular_factors
from pdgemm.linalg.factors.operands import (
    check_operand,
    check_right_side,
    common_dtype,
    in_type,
    operand_description,
    solution,
)
from pdgemm.linalg.factors.rank_k import both_triangles
from pdgemm.linalg.factors.refinement import LOWER, solved_by_lower_factors
from pdgemm.linalg.factors.triangular import inv_triangular, solve_triangular
from pdgemm.linalg.ranges import EQUILIBRATED, RightSide, Scale, in_range, times
from pdgemm.local.arrays.arguments import as_name
from pdgemm.local.blas import local_lapack
from pdgemm.matrix.argument_checks import check_result, communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Refinement
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.row_moves import ScalingSchedule
from pdgemm.support.agreement import together
from pdgemm.transport.panels.row_exchange import divide_rows

STRUCTURES = {
    "gen": "general",
    "pos": "positive definite",
    "sym": "symmetric",
    "her": "hermitian",
    "lower triangular": "lower triangular",
    "upper triangular": "upper triangular",
    "diagonal": "diagonal",
}
SYMMETRIC = ("sym", "her")  # one triangle is read, and LU factors the whole matrix


def solve(
    A: DistMatrix,
    B: Any,
    *,
    lower: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    assume_a: str = "gen",
    transposed: bool = False,
    refine: bool | Refinement = False,
) -> Any:
    """Return X, where A X = B, as scipy.linalg.solve.  Collective over the grid of A.

    A : DistMatrix (n, n) of any layout; float32, float64, complex64 or complex128.
    B : DistMatrix (n, m) of any layout, or an array or list, the same on every rank; X of a vector is an array.
    assume_a : the structure of A: "gen" (or "general"): LU with partial pivoting; "pos" ("positive definite"):
        Cholesky; "sym" ("symmetric") and "her" ("hermitian"), not necessarily definite: LU of the whole matrix, formed
        from one triangle; "lower triangular", "upper triangular", "diagonal".
    lower    : with "pos", "sym" and "her", the lower triangle of A is read, otherwise the upper.
    transposed : solve A^T X = B.
    overwrite_a, overwrite_b : factors may be stored in A, and X in B.
    refine   : True or "auto": factor A, float64 or complex128, in single precision, and refine X in double precision
        until in each column |b - A x| <= sqrt(n) eps |A| |x|, in infinity norms, with eps = 2^-52.  If 30 steps do not
        reach this bound, if a step does not halve the residual, or if A is singular in single precision up to rounding,
        corrections of up to 8 columns are computed by GMRES with these factors as its preconditioner, in up to 5 cycles
        of up to 50 iterations.  If these do not reach the bound, or if A is singular in double precision up to
        rounding, A is factored in double precision.  "gmres": begin with GMRES, for any number of columns.
        `X.report` says which way and how many steps gave X.

    X has the layout of B; `X.report` is the sum of the reports of the factorisation and the solves.
    Cost per rank on P ranks: 2n^3/(3P) flops, with "pos" half as many, and 2 n^2 m/P; with refine these flops are
    in single precision, and each step, or iteration of GMRES, has 4 n^2 m/P flops in double precision.  GMRES needs a
    copy of the factors in double precision, n^2/P words, and n m words on every rank for each iteration of a cycle.  It
    makes a few iterations, and about one more for each singular value of A below 1e-7 |A|.
    "sym" and "her" send n^2/P words for the other triangle.
    Badly scaled rows and columns are scaled by powers of two before A is factored, so that no row is lost because its
    multipliers underflow.  Rows (or columns) are badly scaled if the largest elements of two of them have a ratio below
    a limit, which is 1/10 for a general matrix, as in LAPACK's gesvx, and eps for others.  A and B are not changed, and
    each column of B is scaled by a power of its own.
    `X.report.rcond` is an estimate of 1 / (|A|_1 |A^-1|_1), for the scaled A, by three solves with 4 columns, 24 n^2/P
    flops (see `inverse_norm` in `pdgemm.linalg.factors.condition`), and on one rank by LAPACK.  All ranks warn with
    scipy.linalg.LinAlgWarning if rcond is less than eps.  `lu_factor` and `lu_solve`, or `cholesky` and `cho_solve`,
    solve without this estimate, and without scaled rows and columns.
    Raises LinAlgError on all ranks where A is singular, or with "pos" not positive definite; LayoutError, DTypeError,
    DeviceError, ArgumentError or GridError.
    Error: (A + E) x = b with |E| <= gamma_3n |L||U|, for each column and the scaled A (Higham, Accuracy and Stability
    of Numerical Algorithms, 2002, 9.4); with "pos" |L||L^H| instead of |L||U| (10.4).  Refinement is that of
    LAPACK's dsgesv: Langou et al., Exploiting the performance of 32 bit floating point arithmetic in obtaining 64 bit
    accuracy, SC 2006; with GMRES: Carson & Higham, Accelerating the solution of linear systems by iterative refinement
    in three precisions, SIAM J. Sci. Comput. 40(2), 2018.
    """
    with together(communicator(A=A, B=B)) as arguments:
        check_operand("A", A, square=True, panels=True)
        kind = structure(assume_a)
        method: Any = "auto" * bool(refine)
        if isinstance(refine, str):
            method = as_name(refine, "refine", get_args(Refinement))
        check_right_side(A, B)
        for name, x, wanted in (("A", A, overwrite_a), ("B", B, overwrite_b)):
            if wanted and isinstance(x, DistMatrix):
                other = {"A": A} if name == "B" else {"B": B} if isinstance(B, DistMatrix) else {}
                check_result(name, x, other)
        if method and (kind not in ("gen", *SYMMETRIC) or common_dtype(A, B) not in LOWER or A.dtype not in LOWER):
            raise DTypeError(
                "refine=True is for general matrices of float64 or complex128, "
                f"but A is {A.dtype}, with assume_a {kind!r}"
            )
        how = bool(lower), bool(transposed), method, bool(overwrite_a), bool(overwrite_b)
        arguments += ["solve", kind, how, *operand_description(A, B)]
    steps, dtype = Steps(what=solution(A, B)), common_dtype(A, B)
    if kind in SYMMETRIC:
        A, kind, overwrite_a = _whole(steps, A, kind, lower), "gen", True
    B = in_type(B, dtype) if isinstance(B, DistMatrix) else B.astype(dtype)
    if method:
        return _refined(steps, A, B, method, bool(transposed), overwrite_a, overwrite_b)
    return _solved(steps, A, B, kind, bool(lower), bool(transposed), overwrite_a, overwrite_b)


_scaled_back = in_range(
    lambda X, a, b: times(X, Scale(b.rows - a.rows - a.cols, b.cols)), A=EQUILIBRATED, B=RightSide()
)  # A = 2^a.rows A' 2^a.cols, B = 2^b.rows B' 2^b.cols
_refined = _scaled_back(solved_by_lower_factors)


@_scaled_back
def _solved(
    steps: Steps, A: DistMatrix, B: Any, kind: str, lower: bool, transposed: bool, overwrite_a: bool, overwrite_b: bool
) -> Any:
    """Return X as `solve` does.   kind : the structure of A.   Collective over the grid of A."""
    trans: Any = "T" if transposed else "N"
    by: Any
    norm = one_norm(A, kind, lower)  # before factors are stored in A
    if kind == "pos":
        M, lower = (A.T, not lower) if transposed else (A, lower)
        L = steps.did(cholesky(M, lower=lower, overwrite_a=overwrite_a))
        by = lambda X, _: cho_solve(L, X, lower=lower, overwrite_b=True)  # noqa: E731
        lapack = partial(local_lapack.reciprocal_condition_of, lower=lower)
        rcond = reciprocal_condition(steps, L, norm, by, lapack)
        X = cho_solve(L, B, lower=lower, overwrite_b=overwrite_b)
    elif kind == "gen":
        factors = regular_factors(steps, A, overwrite_a)
        rcond = rcond_by_lu(steps, factors, norm)
        X = lu_solve(factors, B, trans=trans, overwrite_b=overwrite_b)
    else:
        diagonal = _regular_diagonal(A)
        if kind == "diagonal":
            rcond = _rcond_of_diagonal(A, diagonal)
            X = _over(own_copy(B, A, overwrite_b), diagonal)
        else:
            by = partial(solve_triangular, A, lower=kind == "lower triangular")
            rcond = reciprocal_condition(steps, A, norm, lambda X, op: by(X, trans=op, overwrite_b=True))
            X = by(B, trans=trans, overwrite_b=overwrite_b)
    return steps.reported(steps.did(X), rcond=regular(A, rcond))


def inv(A: DistMatrix, *, overwrite_a: bool = False, assume_a: str = "gen", lower: bool = False) -> DistMatrix:
    """Return A^-1 in the layout of A, as scipy.linalg.inv.  Collective over the grid of A.

    A : DistMatrix (n, n) of any layout; float32, float64, complex64 or complex128.
    assume_a, lower, overwrite_a : as for `solve`.

    Cost per rank on P ranks: 2n^3/P flops, with "pos" 5n^3/(3P).
    Badly scaled rows and columns are scaled, as in `solve`.
    `X.report.rcond` is 1 / (|A|_1 |X|_1), where X = A^-1, for the scaled A; all ranks warn if rcond is less than eps,
    as in `solve`.
    Raises LinAlgError on all ranks where A is singular, or with "pos" not positive definite; LayoutError, DTypeError,
    DeviceError, ArgumentError or GridError.
    Error: |A X - I| is about eps |A||X| (Higham 2002, 14.3); to solve a system, `solve` takes a third of the time and
    is more accurate.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square=True, panels=True)
        kind = structure(assume_a)
        if overwrite_a:
            check_result("A", A, {})
        arguments += ["inv", kind, bool(lower), bool(overwrite_a), A.distribution, A.dtype]
    steps = Steps(what=f"Inverse of {shape_of(A)}")
    if kind in SYMMETRIC:
        A, kind, overwrite_a = _whole(steps, A, kind, lower), "gen", True
    return _inverse(steps, A, kind, bool(lower), overwrite_a)


@in_range(lambda X, a: times(X, -a.T), A=EQUILIBRATED)
def _inverse(steps: Steps, A: DistMatrix, kind: str, lower: bool, overwrite_a: bool) -> DistMatrix:
    """Return A^-1 as `inv` does.   kind : the structure of A.   Collective over the grid of A."""
    norm = one_norm(A, kind, lower)
    if kind == "pos":
        L = steps.did(cholesky(A, lower=lower, overwrite_a=overwrite_a))
        L = L if lower else L.H
        Y = steps.did(inv_triangular(L, lower=True))
        X = steps.did(solve_triangular(L, Y, lower=True, trans="C", overwrite_b=True))
    elif kind == "gen":
        X = inverse_by_lu(steps, regular_factors(steps, A, overwrite_a, small="rank"))
    else:
        diagonal = _regular_diagonal(A)
        if kind == "diagonal":
            X = steps.did(_over(DistMatrix.eye(A.shape[0], grid=A.grid, dtype=A.dtype, device=A.device), diagonal))
        else:
            X = steps.did(inv_triangular(A, lower=kind == "lower triangular"))
    X = X if X.same_layout(A) else steps.did(X.redistribute(like=A))
    return steps.reported(X, rcond=regular(A, reciprocal(A, norm, X.norm(1))))


def inverse_by_lu(steps: Steps, factors: LU) -> DistMatrix:
    """Return A^-1 = U^-1 L^-1 P, given the factors of a nonsingular A.  Collective.   steps : records the reports."""
    Y = steps.did(inv_triangular(factors.LU, lower=True, unit_diagonal=True))
    X = steps.did(solve_triangular(factors.LU, Y, overwrite_b=True))
    return steps.did(permuted(X.T, np.argsort(factors.perm))).T


def structure(assume_a: str) -> str:
    """Return the short name of the structure of a matrix, a key of STRUCTURES."""
    short = {long: short for short, long in STRUCTURES.items()}
    assume_a = as_name(assume_a, "assume_a", dict.fromkeys((*STRUCTURES, *short)))
    return short.get(assume_a, assume_a)


def _whole(steps: Steps, A: DistMatrix, kind: str, lower: bool) -> DistMatrix:
    """Return the symmetric or Hermitian matrix, both triangles, that one triangle of A defines.  Collective."""
    return steps.did(both_triangles(A, "L" if lower else "U", kind == "her"))


def _rcond_of_diagonal(A: DistMatrix, diagonal: np.ndarray) -> float:
    sizes = np.abs(diagonal).astype(float)
    return reciprocal(A, sizes.max(initial=0), 1 / sizes.min(initial=np.inf))


def _regular_diagonal(A: DistMatrix) -> np.ndarray:
    """Return the diagonal, on every rank.  Raises LinAlgError on all ranks where an element is zero.  Collective."""
    diagonal = A.diagonal()
    zeros = np.flatnonzero(diagonal == 0)
    if zeros.size:
        where = f"element {zeros[0] + 1} of its diagonal, counted from 1, is zero"
        raise LinAlgError(f"A ({shape_of(A)} on a {A.grid} grid) is singular: {where}")
    return diagonal


def _over(X: Any, diagonal: np.ndarray) -> Any:
    """Return X with each row i divided by diagonal[i]; a DistMatrix is overwritten.  Collective over its grid."""
    if not isinstance(X, DistMatrix):
        return X / diagonal
    what = f"Solution with a diagonal, {shape_of(X)}"
    schedule = ScalingSchedule(X.layout_in(X.grid), 0, RING.name, device=device_of(X))
    _, X.report = run_panels(schedule, lambda task: partial(divide_rows, task, diagonal), {"A": X}, what)
    return X
