"""What functions of `pdgemm.linalg` will do and cost, before they do it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from pdgemm.arrays import dtypes
from pdgemm.arrays.integers import as_count
from pdgemm.errors import ArgumentError
from pdgemm.factors import lu
from pdgemm.factors.cholesky import cho_solve, cholesky
from pdgemm.factors.condition import COLUMNS, SOLVES
from pdgemm.factors.householder import householder_qr
from pdgemm.factors.lstsq import lstsq
from pdgemm.factors.operands import (
    check_reach,
    check_right_side,
    check_square,
    columns_beside,
    common_dtype,
    described,
)
from pdgemm.factors.qr import qr
from pdgemm.factors.solve import GENERAL, LOWER, inv, scaling_schedule, solve, structure
from pdgemm.factors.stages import Stages, unmade
from pdgemm.factors.tall_qr import rows_of, rows_only
from pdgemm.factors.triangular import inv_triangular, solve_triangular, trmm
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.matrix.argument_checks import check_dtype, check_matrices, communicator, op_letter
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.model.machine import Machine
from pdgemm.panel_schedules.tsqr_schedule import svd_of_triangle
from pdgemm.planning.program import Program
from pdgemm.spectral.golub_kahan import BLOCKS, KEPT
from pdgemm.spectral.polar import polar
from pdgemm.spectral.svd import is_small, svd
from pdgemm.support.agreement import together


def plan(
    function: Callable[..., Any] | str,
    A: Any,
    B: Any = None,
    *,
    machine: Machine | None = None,
    iterations: int | None = None,
    **options: Any,
) -> Program:
    """Return what a function would do with these arguments, without doing it.  Collective over the grid of A.

        print(linalg.plan(linalg.cholesky, A))
        linalg.plan(linalg.solve, A, B, assume_a="pos").seconds

    function : cholesky, cho_solve, solve_triangular, trmm, inv_triangular, lu_factor, lu_solve, solve, inv,
        householder_qr, qr, lstsq, svd or polar, or its name.
    A, B     : its first arguments, matrices or LU factors; B may be a 1-D array where the function takes one.
    options  : its other arguments, such as lower and trans.
    machine  : as for `pdgemm.plan`.
    iterations : where the elements decide how many there are, so many are planned: by default 6 steps of `polar`, of
        which the last one is of products alone, 8 of `svd` with k, and 2 corrections of `solve` with refine.

    The plan is a value: `traffic(rank)` has the words and messages of a rank, which the run counts, too; `flops`,
    `seconds` and `extra_bytes(rank)` what it costs; and `simulate()` walks all its messages.  What the elements decide
    is planned as it is for most matrices: LU exchanges rows that are drawn at random, CholeskyQR makes two passes, no
    rank is lacking, refinement converges.
    Words that all ranks get of a norm, a diagonal or a vector are neither here nor in reports.
    Panels are expected to be read in place where the ranks share memory, and sent elsewhere.
    Raises ArgumentError for another function, or for arguments that it does not take, and its own errors for these.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    with together(communicator(A=A.LU if isinstance(A, lu.LU) else A)) as arguments:
        if name not in _PLANNED:
            raise ArgumentError(f"plans are made for {', '.join(_PLANNED)}; got {name or function!r}")
        planned = _PLANNED[name]
        given = _arguments(planned.function, A, B, options)
        matrix = _checked(planned, given)
        most = planned.iterations if iterations is None else as_count(iterations, "iterations", 1)
        others = [x for x in given.values() if not isinstance(x, (DistMatrix, np.ndarray, lu.LU))]
        vectors = [x for x in given.values() if isinstance(x, (DistMatrix, np.ndarray))]
        arguments += ["linalg.plan", name, others, most, machine, *described(matrix, *vectors)]
    stages = Stages(machine)  # all ranks have the same arguments
    planned.plan(stages, **given | {"iterations": most})
    return stages.plan(matrix)


def _arguments(function: Callable[..., Any], A: Any, B: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name.  Raises ArgumentError that says which there are."""
    parameters = signature(function)
    try:
        bound = parameters.bind(A, *(() if B is None else (B,)), **options)
    except TypeError as wrong:
        names = ", ".join(parameters.parameters)
        raise ArgumentError(f"plan({function.__name__}, ...) takes the arguments of it, {names}: {wrong}") from None
    bound.apply_defaults()
    return bound.arguments


def _checked(planned: Planned, given: dict[str, Any]) -> DistMatrix:
    """Return the first matrix.  Raises what the function would raise for its matrices.  Local."""
    first = next(iter(given.values()))
    if isinstance(first, lu.LU) != (planned.function is lu.lu_solve):
        raise ArgumentError(f"lu_solve takes the LU that lu_factor returns, other functions a matrix: got {first!r}")
    A: DistMatrix = first.LU if isinstance(first, lu.LU) else first
    check_matrices(A=A)
    check_dtype("A", A, dtypes.BLAS)
    if planned.square:
        check_square(A)
    if planned.function in (lu.lu_factor, householder_qr):
        check_reach("A", A)
    if "B" in given:
        check_right_side(A, given["B"], given.get("side", "L"))
    op_letter(given.get("trans", "N"), "trans")
    if "assume_a" in given:
        structure(given["assume_a"])
    if given.get("k") is not None and as_count(given["k"], "k", 1) > min(A.shape):
        raise ArgumentError(f"k = {given['k']} is more than the {min(A.shape)} singular values of A")
    return A


def _new(A: DistMatrix, shape: tuple[int, int], grid: ProcessGrid) -> DistMatrix:
    """Return a new matrix in one block for each rank."""
    return unmade(A, Distribution.over(grid.shape, shape), grid=grid, order="C")


# ---------------------------------------------------------------- what functions do, in the order in which they do it
def _cho_solve(plan: Stages, L: DistMatrix, B: Any, lower: bool, **others: Any) -> Any:
    first, second = ("N", "C") if lower else ("C", "N")
    return plan.triangular(L, plan.triangular(L, B, lower, first), lower, second)


def _lu_solve(plan: Stages, factors: lu.LU, B: Any, trans: str, **others: Any) -> Any:
    return _with_factors(plan, factors.LU, factors.perm, B, op_letter(trans, "trans"))


def _with_factors(plan: Stages, LU: DistMatrix, order: np.ndarray, B: Any, letter: str) -> Any:
    dtype = common_dtype(LU, B)
    X = unmade(B, dtype=dtype) if isinstance(B, DistMatrix) else B.astype(dtype)
    if letter == "N":
        X = plan.permuted(X, order)
    for lower in (True, False) if letter == "N" else (False, True):
        X = plan.triangular(LU, X, lower, letter)
    return X if letter == "N" else plan.permuted(X, np.argsort(order))


def _condition(plan: Stages, A: DistMatrix, solve: Callable[[DistMatrix, str], object]) -> None:
    """Plan the estimate of a condition number, from matrices with the rows of A."""
    columns = columns_beside(A, min(COLUMNS, len(A)))
    for letter in SOLVES if len(A) else "":
        solve(unmade(A, columns, order="F"), letter)


def _solve(
    plan: Stages,
    A: DistMatrix,
    B: Any,
    lower: bool,
    assume_a: str,
    transposed: bool,
    refine: bool,
    iterations: int,
    **others: Any,
) -> None:
    kind, letter = structure(assume_a), "T" if transposed else "N"
    if refine:
        _refined(plan, A, B, letter, iterations)
    elif kind == "pos":
        M, lower = (A.T, not lower) if transposed else (A, lower)
        L = plan.cholesky(M, lower)
        _condition(plan, L, lambda X, _: _cho_solve(plan, L, X, lower))
        _cho_solve(plan, L, B, lower)
    elif kind in GENERAL:
        factors = plan.lu(A)
        _condition(plan, factors[0], lambda X, op: _with_factors(plan, *factors, X, op))
        _with_factors(plan, *factors, B, letter)
    elif kind != "diagonal":
        below = kind == "lower triangular"
        _condition(plan, A, lambda X, op: plan.triangular(A, X, below, op))
        plan.triangular(A, B, below, letter)
    elif isinstance(B, DistMatrix):
        plan.found.append(("X", scaling_schedule(unmade(B, dtype=common_dtype(A, B)))))


def _refined(plan: Stages, A: DistMatrix, B: Any, letter: str, iterations: int) -> None:
    dtype, M = common_dtype(A, B), A.T if letter == "T" else A
    if not isinstance(B, DistMatrix):
        column = Distribution(A.distribution.rows, BlockCyclic.even(1, A.grid.shape[1]))
        B = unmade(A, column, dtype=dtype, order="F")
    factors, single = plan.lu(unmade(A, dtype=LOWER[A.dtype])), unmade(B, dtype=LOWER[dtype])
    _condition(plan, factors[0], lambda X, op: _with_factors(plan, *factors, X, op))
    X = unmade(_with_factors(plan, *factors, single, letter), dtype=dtype)
    plan.product(M, X, unmade(B, dtype=dtype), beta=1)
    for _ in range(iterations):
        _with_factors(plan, *factors, single, letter)
        plan.product(M, X, unmade(B, dtype=dtype), beta=1)


def _inv(plan: Stages, A: DistMatrix, assume_a: str, lower: bool, **others: Any) -> None:
    kind = structure(assume_a)
    if kind == "pos":
        L = plan.cholesky(A, lower)
        L = L if lower else L.H
        X = plan.triangular(L, plan.inv_triangular(L, lower=True), True, "C")
    elif kind in GENERAL:
        LU, order = plan.lu(A)
        X = plan.triangular(LU, plan.inv_triangular(LU, lower=True))
        X = plan.permuted(X.T, np.argsort(order)).T
    elif kind == "diagonal":
        X = _new(A, A.shape, A.grid)
        plan.found.append(("X", scaling_schedule(X)))
    else:
        X = plan.inv_triangular(A, kind == "lower triangular")
    if not X.same_layout(A):
        plan.moved(X, "X", unmade(A))


def _lstsq(plan: Stages, A: DistMatrix, B: Any, **others: Any) -> None:
    dtype, (m, n) = common_dtype(A, B), A.shape
    A = A if A.dtype == dtype else unmade(A, dtype=dtype)
    if not isinstance(B, DistMatrix):
        B = unmade(A, Distribution(A.distribution.rows, BlockCyclic.even(1, A.grid.shape[1])), order="F")
    B = B if B.dtype == dtype else unmade(B, dtype=dtype)
    Q, k = _svd_of_tall(plan, A if m >= n else A.H), min(m, n)
    small = _new(A, (k, k), A.grid.base)
    C = plan.product(Q.H, B) if m >= n else B
    X = plan.product(small.H, unmade(plan.product(small, C)))
    if m < n:
        plan.product(Q, X)
    elif m > n:
        plan.product(Q, C, unmade(B), beta=1)


def _svd(plan: Stages, A: DistMatrix, k: int | None, oversample: int, iterations: int, **others: Any) -> None:
    if 0 in A.shape:
        return
    tall = A if A.shape[0] >= A.shape[1] else A.H
    if k is None:
        plan.placed(_svd_of_tall(plan, tall), tall)
        return
    if is_small(A, k, oversample):
        left, right = plan.placed(_svd_of_tall(plan, tall), tall)
        U, V = (left[:, :k], right[:k].H) if tall is A else (right.H[:, :k], left[:, :k])
    else:
        basis = _leading_space(plan, A, k, k + oversample, iterations)
        W = plan.product(A, basis)
        U, Gh = plan.placed(_svd_of_tall(plan, W), W)
        V = plan.product(basis, Gh.H, _new(A, (A.shape[1], k), A.grid.base))
    R = unmade(U)
    plan.product(A, V, R, beta=1)
    plan.product(A.H, U, unmade(V), beta=1)
    for X, Y in ((U, R), (U, U), (V, V)):
        plan.product(X.H, Y)


def _leading_space(plan: Stages, A: DistMatrix, k: int, width: int, steps: int) -> DistMatrix:
    (m, n), grid, most, blocks = A.shape, rows_only(A), BLOCKS * width, 0
    U, V, W, Y = (_new(A, shape, grid) for shape in ((m, most), (n, most), (m, width), (n, width)))
    new = plan.qr(Y)[0]
    for step in range(1, steps + 1):
        plan.product(A, new, W)
        block = _orthonormal(plan, W, U)
        plan.product(U.H, W)
        plan.product(A.H, block, Y)
        new, blocks = _orthonormal(plan, Y, V), blocks + 1
        if blocks == BLOCKS and step < steps:
            blocks, kept = KEPT, KEPT * width
            for X in (U, V):
                plan.product(X, _new(A, (most, kept), grid), _new(A, (len(X), kept), grid))
    return plan.qr(plan.product(V, _new(A, (most, k), grid), _new(A, (n, k), grid)), passes=1)[0]


def _orthonormal(plan: Stages, R: DistMatrix, V: DistMatrix) -> DistMatrix:
    for passes in (2, 1):
        plan.product(V, plan.product(V.H, R), unmade(R), beta=1)
        R = plan.qr(R, passes=passes)[0]
    return R


def _svd_of_tall(plan: Stages, A: DistMatrix) -> DistMatrix:
    """Plan A = Q R, and the decomposition of R."""
    Q = plan.tall_qr(A)
    if A.shape[1]:
        plan.found.append(("R", svd_of_triangle(*rows_of(Q))))
    return Q


def _polar(plan: Stages, A: DistMatrix, iterations: int, **others: Any) -> None:
    if 0 in A.shape:
        return
    X = unmade(A if A.shape[0] >= A.shape[1] else A.H)
    E = plan.product(X.H, X)
    L, V = plan.cholesky(E), _new(E, (len(E), 2), E.grid)
    for _ in range(3):
        V = _cho_solve(plan, L, V, True)
    for step in range(iterations):
        if step + 1 == iterations:
            plan.product(X, E, X, beta=1)
        else:
            L = plan.cholesky(E)
            for letter in "CN":
                plan.triangular(L, X, True, letter, "R")
        plan.product(X.H, X, E)
    if A.shape[0] < A.shape[1]:
        X = plan.moved(X.H, "U", unmade(A))
    P = plan.product(X.H, A)
    if P.dtype.kind == "c" or not P.H.same_layout(P):
        plan.moved(P.H, "H", unmade(P), adds=True)


class Planned(NamedTuple):
    """A function, the stages of it, whether its matrix is square, and how many iterations it is planned with."""

    function: Callable[..., Any]
    plan: Callable[..., Any]
    square: bool = True
    iterations: int = 0


_PLANNED = {
    planned.function.__name__: planned
    for planned in (
        Planned(cholesky, lambda plan, A, lower, **others: plan.cholesky(A, lower)),
        Planned(cho_solve, _cho_solve),
        Planned(
            solve_triangular,
            lambda plan, A, B, lower, trans, side, **others: plan.triangular(A, B, lower, trans, side),
        ),
        Planned(
            trmm, lambda plan, A, B, lower, trans, side, **others: plan.triangular(A, B, lower, trans, side, False)
        ),
        Planned(inv_triangular, lambda plan, A, lower, **others: plan.inv_triangular(A, lower)),
        Planned(lu.lu_factor, lambda plan, A, **others: plan.lu(A), square=False),
        Planned(lu.lu_solve, _lu_solve),
        Planned(solve, _solve, iterations=2),
        Planned(inv, _inv),
        Planned(householder_qr, lambda plan, A, want_q, **others: plan.householder(A, want_q), square=False),
        Planned(qr, lambda plan, A, method, **others: plan.qr(A, method), square=False),
        Planned(lstsq, _lstsq, square=False),
        Planned(svd, _svd, square=False, iterations=8),
        Planned(polar, _polar, square=False, iterations=6),
    )
}
