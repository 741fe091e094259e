"""The Cholesky factorisation of a matrix."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

from pdgemm.algorithms.panels.cholesky_panels import Cholesky
from pdgemm.algorithms.panels.panel_run import can_read, device_of, run_panels
from pdgemm.errors import LinAlgError
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.operands import (
    check_operand,
    check_right_side,
    has_one_rank,
    operand_description,
    solution,
    solved_on_one_rank,
    to_factor,
)
from pdgemm.linalg.factors.triangular import BLOCK, PANEL, solve_triangular
from pdgemm.linalg.ranges import DIAGONAL, ELEMENTS, Measured, in_range, times
from pdgemm.local.blas import local_lapack
from pdgemm.matrix.argument_checks import check_result, communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.panels.factor_schedules import CholeskySchedule
from pdgemm.support.agreement import together


class _Factor(Measured):
    """An operand that is a Cholesky factor, or the pair that `cho_factor` returns."""

    def array(self, x: Any) -> Any:
        return x[0] if isinstance(x, tuple) and len(x) == 2 else x

    def multiplied(self, x: Any, exponent: int) -> Any:
        return (self.multiplied(x[0], exponent), x[1]) if isinstance(x, tuple) else super().multiplied(x, exponent)


def cholesky(A: DistMatrix, *, lower: bool = True, overwrite_a: bool = False) -> DistMatrix:
    """Return L, where A = L L^H, or U, where A = U^H U, as scipy.linalg.cholesky.  Collective over the grid of A.

    A     : DistMatrix (n, n), Hermitian and positive definite, float32, float64, complex64 or complex128, of any
        layout; only the lower triangle, or for U the upper, is read.
    lower : True: return L; False, SciPy's default: return U.  The other triangle of the factor is zero.
    overwrite_a : the factor may be stored in A, which saves a copy where the layout of A shares the work evenly.

    The factor has the layout of A, or square blocks where this layout does not share the work evenly; `report` has the
    words.  Up to order 512, on the host, A is moved to one rank, where LAPACK factors it, and the factor stays there.
    On a device, everything runs there, blocks on the diagonal by cuSOLVER; only their diagonals are copied to the host.
    DeviceError where cuSOLVER is missing, or where MPI takes no device pointers and ranks cannot read in place.

    Cost per rank on Pr x Pc = P: n^3/(3P) flops; at most n^2/2 (1/Pr + 1/Pc) words in, and n^2/P if A is moved first.
    Raises LinAlgError on all ranks if A is not positive definite; the message has the order of the first leading minor
    that is not.  Then A is unchanged, except with overwrite_a.  Raises LayoutError, DTypeError, DeviceError,
    ArgumentError or GridError on all ranks.
    Error: |A - L L^H| <= gamma_{n+1} |L||L^H| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 10.1).
    """
    factor, minor = cholesky_factor(A, lower, overwrite_a)
    if minor:
        raise LinAlgError(
            f"A ({shape_of(A)} on a {A.grid} grid) is not positive definite: its leading minor of order {minor} is not"
        )
    return factor


@in_range(lambda result, a: (times(result[0], a // 2), result[1]), A=DIAGONAL)
def cholesky_factor(A: DistMatrix, lower: bool, overwrite_a: bool = False) -> tuple[DistMatrix, int]:
    """Return the factor of `cholesky`, and the order of the first leading minor that is not positive definite, or 0.

    If the number is not 0, the factor is not complete.  Collective over the grid of A.
    """
    start = perf_counter()
    options: dict[str, Any] = {"square": True, "transposed": not lower, "small": "rank"}
    W, moves = to_factor("cholesky", A, BLOCK, overwrite_a, f"lower={bool(lower)}", **options)
    what = f"Cholesky factor of a matrix ({shape_of(A)})"
    schedule = CholeskySchedule(W.layout_in(W.grid), PANEL, can_read(W), device=device_of(W))
    minor, report = run_panels(schedule, Cholesky, {"A": W}, what, moves, start)
    factor = W if lower else W.T
    factor.report = report
    return factor, minor


def cho_factor(A: DistMatrix, *, lower: bool = False, overwrite_a: bool = False) -> tuple[DistMatrix, bool]:
    """Return the factor of `cholesky` and `lower`, as scipy.linalg.cho_factor, for `cho_solve`.  Collective.

    The other triangle of the factor is zero.  Arguments, cost and errors are those of `cholesky`.
    """
    return cholesky(A, lower=lower, overwrite_a=overwrite_a), bool(lower)


@in_range(lambda X, l, b: times(X, b - 2 * l), L=_Factor(diagonal=True), B=ELEMENTS)
def cho_solve(L: DistMatrix | tuple[DistMatrix, bool], B: Any, *, lower: bool = True, overwrite_b: bool = False) -> Any:
    """Return X, where A X = B, given the Cholesky factor of A.  Collective over the grid of L.

    L : DistMatrix (n, n), the factor that `cholesky` returns; with lower=False the factor U, where A = U^H U.  Or the
        pair of a factor and `lower` that `cho_factor` returns.
    B : DistMatrix (n, m) of any layout, or an array or list, the same on every rank; X of a vector is an array.
    overwrite_b : X may be stored in B.

    X has the layout of B.  Cost per rank on P ranks: 2 n^2 m/P flops, in two triangular solves.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: (A + E) x = b with |E| <= gamma_{3n+1} |L||L^H|, for each column (Higham 2002, theorem 10.4).
    """
    if isinstance(L, tuple) and len(L) == 2:
        L, lower = L
    with together(communicator(L=L, B=B)) as arguments:
        check_operand("L", L, square=True, panels=True)
        check_right_side(L, B)
        if overwrite_b and isinstance(B, DistMatrix):
            check_result("B", B, {"L": L})
        arguments += ["cho_solve", bool(lower), bool(overwrite_b), *operand_description(L, B)]
    assert isinstance(L, DistMatrix)
    if has_one_rank(L):
        by_lapack = partial(local_lapack.solve_factored, pivots=None, lower=lower)
        return solved_on_one_rank(L, B, overwrite_b, by_lapack)
    steps, (first, second) = Steps(), ("N", "C") if lower else ("C", "N")
    Y = steps.did(solve_triangular(L, B, lower=lower, trans=first, overwrite_b=overwrite_b))  # type: ignore[arg-type]
    X = solve_triangular(L, Y, lower=lower, trans=second, overwrite_b=True)  # type: ignore[arg-type]
    return steps.reported(steps.did(X), what=solution(L, B))
