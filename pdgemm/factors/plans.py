"""What functions of `pdgemm.linalg` will do and cost, before they do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pdgemm.arrays import dtypes
from pdgemm.errors import ArgumentError
from pdgemm.factors import householder, lu
from pdgemm.factors.cholesky import cho_solve, cholesky
from pdgemm.factors.operands import check_host, check_right_side, check_square, common_dtype
from pdgemm.factors.triangular import BLOCK, solve_triangular, trmm
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.matrix.argument_checks import check_dtype, check_matrices, communicator, op, op_letter
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.model.machine import Machine, machine_at_hand, on_nodes
from pdgemm.panel_algorithms.panel_plan import PanelPlan, laid_out, moved
from pdgemm.panel_algorithms.panel_run import device_of, expected_mover
from pdgemm.panel_schedules.cholesky_schedule import CholeskySchedule
from pdgemm.panel_schedules.householder_schedule import HouseholderSchedule
from pdgemm.panel_schedules.lu_schedule import LUSchedule
from pdgemm.panel_schedules.panel_schedule import PanelSchedule
from pdgemm.panel_schedules.triangular_schedule import TriangularSchedule
from pdgemm.schedules.exchange import Exchange
from pdgemm.support.agreement import together

Stage = tuple[str, Exchange | PanelSchedule]


def plan(
    function: Callable[..., Any], A: DistMatrix, B: Any = None, *, machine: Machine | None = None, **options: Any
) -> PanelPlan:
    """Return what a function would do with these arguments, without doing it.  Collective over the grid of A.

        print(linalg.plan(linalg.cholesky, A))
        linalg.plan(linalg.solve_triangular, A, B, lower=True).seconds

    function : cholesky, cho_solve, solve_triangular, trmm, lu_factor or householder_qr.
    A, B     : its matrices; B may be a 1-D array where the function takes one.
    options  : its other arguments, such as lower and trans; those that change no layout are not looked at.
    machine  : as for `pdgemm.plan`.

    Which rows LU exchanges depends on the elements: they are drawn at random here.
    The plan is a value: `traffic(rank)` has the words and messages of a rank, which the run counts, too,
    `seconds` and `extra_bytes(rank)` what it costs.
    Panels are expected to be read in place where the ranks share memory, and sent elsewhere.
    Raises the errors of the function for these arguments, and ArgumentError for another function.
    """
    with together(communicator(A=A)) as arguments:
        name = getattr(function, "__name__", "")
        if name not in _STAGES:
            raise ArgumentError(f"plans are made for {', '.join(_STAGES)}; got {name or function!r}")
        if name in _OF_ANY_SHAPE:
            check_matrices(A=A)
            check_dtype("A", A, dtypes.BLAS)
            check_host("A", A)
        else:
            check_square(A)
        if B is None and name in (cho_solve.__name__, solve_triangular.__name__, trmm.__name__):
            raise ArgumentError(f"the plan of {name} needs B, the matrix or vector that it is applied to")
        if B is not None:
            check_right_side(A, B, options.get("side", "L"))
        stages = tuple(_STAGES[name](A, B, options))
        arguments += ["linalg.plan", name, repr(stages)]
    here = machine or on_nodes(machine_at_hand(bool(device_of(A))), A.grid.ranks_per_node)
    return PanelPlan(stages, A.grid.size, here)


def _cholesky(A: DistMatrix, B: Any, options: dict[str, Any]) -> Iterable[Stage]:
    X = A if options.get("lower", True) else A.T
    layout = laid_out(X, BLOCK)
    yield from moved(X, "A", layout)
    yield "A", CholeskySchedule(layout, BLOCK, expected_mover(A), device=device_of(A))


def _cho_solve(L: DistMatrix, B: Any, options: dict[str, Any]) -> Iterable[Stage]:
    lower = bool(options.get("lower", True))
    for trans in ("N", "C") if lower else ("C", "N"):
        yield from _triangular(L, B, {"lower": lower, "trans": trans}, True)


def _triangular(A: DistMatrix, B: Any, options: dict[str, Any], solves: bool) -> Iterable[Stage]:
    trans, right = op_letter(options.get("trans", "N"), "trans"), options.get("side", "L") == "R"
    M, lower = op(A, trans, "trans"), bool(options.get("lower", False)) != (trans != "N")
    M, lower, dtype = M.T if right else M, lower != right, common_dtype(A, B)
    given = M.layout_in(M.grid)
    of_A = replace(laid_out(M, BLOCK), dtype=dtype)
    if given.same_owners(of_A):
        of_A = replace(given, dtype=dtype)  # it is not copied, and a conjugate remains one
    yield from moved(M, "A", of_A)
    if not isinstance(B, DistMatrix):
        column = Distribution(of_A.distribution.rows, BlockCyclic.even(1, of_A.distribution.cols.parts))
        of_B = replace(of_A, distribution=column, order="F", conjugated=False)
    else:
        X = B.T if right else B
        of_B = replace(_beside(X, of_A, A), dtype=dtype)
        yield from moved(X, "B", of_B)
    yield "A", TriangularSchedule(of_A, BLOCK, expected_mover(A), of_B, lower, solves, device=device_of(A))


def _lu(A: DistMatrix, B: Any, options: dict[str, Any]) -> Iterable[Stage]:
    layout = laid_out(A, lu.BLOCK, "C")
    yield from moved(A, "A", layout)
    yield "A", LUSchedule(layout, lu.BLOCK, expected_mover(A))


def _householder(A: DistMatrix, B: Any, options: dict[str, Any]) -> Iterable[Stage]:
    layout = laid_out(A, householder.BLOCK)
    yield from moved(A, "A", layout)
    wants_q = bool(options.get("want_q", True))
    yield "A", HouseholderSchedule(layout, householder.BLOCK, expected_mover(A), wants_q=wants_q)


def _beside(X: DistMatrix, of_A: Layout, A: DistMatrix) -> Layout:
    """Return the layout of right-hand sides whose rows lie as those of A: the given one, if they do."""
    given = X.layout_in(A.grid)
    if given.grid == of_A.grid and given.distribution.rows.canonical == of_A.distribution.rows.canonical:
        return replace(given, conjugated=False)
    cols = BlockCyclic.even(X.shape[1], of_A.distribution.cols.parts)
    return Layout(Distribution(of_A.distribution.rows, cols), of_A.rank_map, X.dtype, X.order)


_OF_ANY_SHAPE = (lu.lu_factor.__name__, householder.householder_qr.__name__)
_STAGES: dict[str, Callable[[DistMatrix, Any, dict[str, Any]], Iterable[Stage]]] = {
    cholesky.__name__: _cholesky,
    cho_solve.__name__: _cho_solve,
    solve_triangular.__name__: lambda A, B, options: _triangular(A, B, options, True),
    trmm.__name__: lambda A, B, options: _triangular(A, B, options, False),
    lu.lu_factor.__name__: _lu,
    householder.householder_qr.__name__: _householder,
}
