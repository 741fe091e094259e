"""Triangular solves, products and inverses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pdgemm.algorithms.panels.panel_run import can_read, device_of, run_panels, working_copy
from pdgemm.algorithms.panels.triangular_panels import TriangularProduct, TriangularSolve
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.instrument.run_report import RunReport
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.operands import (
    check_operand,
    check_right_side,
    column,
    common_dtype,
    in_joined_blocks,
    in_type,
    operand_description,
)
from pdgemm.linalg.ranges import ELEMENTS, Measured, in_range, times
from pdgemm.local.arrays.arguments import as_name, op_letter
from pdgemm.matrix.argument_checks import as_scalar, check_result, communicator, op, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import Transpose
from pdgemm.schedules.panels.factor_schedules import TriangularSchedule
from pdgemm.schedules.panels.panel_schedule import is_balanced
from pdgemm.support.agreement import together

BLOCK = 128  # block size of working copies: large enough for BLAS, small enough for the ranks to share the last blocks
PANEL = 256  # width of the widest panel, if blocks are as wide: one update is faster than two by panels half as wide


_TRIANGLE = Measured(diagonal=True, unless="unit_diagonal")


@in_range(lambda X, a, b: times(X, b - a), A=_TRIANGLE, B=ELEMENTS)
def solve_triangular(
    A: DistMatrix,
    B: Any,
    *,
    lower: bool = False,
    trans: Transpose = "N",
    unit_diagonal: bool = False,
    side: str = "L",
    alpha: complex = 1,
    overwrite_b: bool = False,
) -> Any:
    """Return X, where op(A) X = alpha B, or X op(A) = alpha B with side "R".  Collective over the grid of A.

    A     : DistMatrix (n, n), triangular, of any layout; the other triangle is not read, nor is a unit diagonal.
    B     : DistMatrix (n, m), or (m, n) with side "R", of any layout, or an array or list, the same on every rank; X of
        a vector is an array.  float32, float64, complex64, complex128; X has the common type of A and B.
    lower : A is lower triangular, otherwise upper.
    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H.
    unit_diagonal : the diagonal of A is taken to be 1.
    overwrite_b   : X may be stored in B, which saves a copy where the rows of B are distributed as those of A.

    X has the layout of B.  A is redistributed to square blocks where its layout does not share the work evenly, and B
    where its rows are not distributed as those of A; `X.report` lists these moves.  A singular A gives infinities or
    NaN, as in BLAS; `solve` raises LinAlgError instead.

    Cost per rank on Pr x Pc = P: n^2 m/P flops; n^2/2 (1 - 1/Pc)/Pr words of A in, and n m (1 - 1/Pr)/Pc of X.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: (op(A) + E) x = alpha b with |E| <= gamma_n |op(A)|, for each column (Higham 2002, theorem 8.5).
    """
    return _triangular("solve_triangular", A, B, lower, trans, unit_diagonal, side, alpha, overwrite_b)


def trmm(
    A: DistMatrix,
    B: Any,
    *,
    lower: bool = False,
    trans: Transpose = "N",
    unit_diagonal: bool = False,
    side: str = "L",
    alpha: complex = 1,
) -> Any:
    """Return C := alpha op(A) B, or alpha B op(A) with side "R", where A is triangular.  Collective over the grid of A.

    Arguments, costs and exceptions are those of `solve_triangular`; a full product has twice as many flops.
    C has the layout of B.
    Error: |C - C^| <= gamma_n |alpha| |op(A)| |B| (Higham 2002, 3.5).
    """
    return _triangular("trmm", A, B, lower, trans, unit_diagonal, side, alpha, False)


@in_range(lambda X, a: times(X, -a), A=_TRIANGLE)
def inv_triangular(A: DistMatrix, *, lower: bool = False, unit_diagonal: bool = False) -> DistMatrix:
    """Return A^-1 of a triangular matrix, in the layout of A, with zeros in the other triangle.  Collective.

    A, lower and unit_diagonal are as for `solve_triangular`.
    Cost per rank on P ranks: n^3/(3P) flops.  A singular A gives infinities or NaN.
    Raises LayoutError, DTypeError, DeviceError or GridError on all ranks.
    Error: |A X - I| <= gamma_n |A||X| (Higham 2002, 14.2).
    """
    steps = Steps()
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square=True, panels=True)
        arguments += ["inv_triangular", A.distribution, A.dtype]
    base = A.grid.base
    identity = DistMatrix.eye(A.shape[0], grid=base, block=BLOCK, dtype=A.dtype, order=A.order, device=A.device)
    X = _triangular("inv_triangular", A, identity, lower, "N", unit_diagonal, "L", 1, True)
    inverse = steps.did(X).redistribute(empty_like(A, A.dtype))
    return steps.reported(steps.did(inverse), what=f"Inverse of a triangle ({shape_of(A)})")


def _triangular(
    name: str, A: DistMatrix, B: Any, lower: bool, trans: str, unit: bool, side: str, alpha: Any, overwrite_b: bool
) -> Any:
    """Return the result of `solve_triangular`, or of `trmm` if `name` is "trmm".  Collective over the grid of A."""
    steps, solves = Steps(), name != "trmm"
    with together(communicator(A=A, B=B)) as arguments:
        check_operand("A", A, square=True, panels=True)
        # side "R" is solved with op(A) on the left: X op(A) = alpha B is op(A)^T X^T = alpha B^T
        letter = op_letter(trans, "trans")
        M, lower = op(A, letter), bool(lower) != (letter != "N")
        check_right_side(A, B, as_name(side, "side", ("L", "R")))
        M, lower, right_side = (M.T, not lower, B.T) if side == "R" else (M, lower, B)
        dtype = common_dtype(A, B)
        if overwrite_b and isinstance(B, DistMatrix):
            check_result("B", B, {"A": A})
        alpha = as_scalar(alpha, dtype, "alpha")
        arguments += [name, lower, unit, side, alpha, bool(overwrite_b), *operand_description(A, B)]
    M, vector, moves = in_joined_blocks(in_type(M, dtype)), not isinstance(B, DistMatrix), list[RunReport]()
    if not is_balanced(M.layout_in(M.grid), BLOCK):
        M, moves = working_copy(M, BLOCK, False, False)
    right_side = column(right_side, M, dtype) if vector else right_side
    X, more = _right_side(right_side, M, dtype, solves and (overwrite_b or vector))
    layout, inverse = M.layout_in(M.grid), name == "inv_triangular"
    schedule = TriangularSchedule(
        layout, PANEL, can_read(M, X), X.layout_in(M.grid), lower, solves, inverse=inverse, device=device_of(M)
    )
    what = f"{'Solution' if solves else 'Product'} with a triangle ({shape_of(A)}), {shape_of(X)}"
    matrices, executor = {"A": M, "B": X}, TriangularSolve if solves else TriangularProduct
    if not solves:
        matrices["C"] = empty_like(X, dtype)
    _, report = run_panels(
        schedule, partial(executor, alpha=alpha, unit=unit), matrices, what, moves + more, steps.start
    )
    X = matrices["B" if solves else "C"]
    if vector:
        return X.allgather()[:, 0]
    X.report = report
    if more:
        steps.did(X)
        back = right_side if overwrite_b and right_side.dtype == dtype else empty_like(right_side, dtype)
        X = steps.reported(steps.did(X.redistribute(back)), what=what)
    report = X.later_report
    X = X.T if side == "R" else X
    X.report = report
    return X


def _right_side(B: DistMatrix, M: DistMatrix, dtype: np.dtype, overwrite: bool) -> tuple[DistMatrix, list[RunReport]]:
    """Return B or a copy, on M's grid with rows distributed as M's, and the list of reports of moves.  Collective."""
    rows, here = M.distribution.rows, B.layout_in(M.grid)
    if here.grid == M.layout_in(M.grid).grid and here.distribution.rows.canonical == rows.canonical:
        return working_copy(B, BLOCK, True, overwrite, dtype=dtype)
    X = empty_like(M, dtype, Distribution(rows, BlockCyclic.even(B.shape[1], M.grid.shape[1])), B.order)
    B.redistribute(X)
    return X, [X.report]
