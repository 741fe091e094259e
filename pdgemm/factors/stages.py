"""The steps of functions of `pdgemm.linalg` as values: what they will do to matrices that have no elements yet."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from pdgemm.algorithms.product_options import Operands, ProductOptions, problem_of
from pdgemm.algorithms.redistribution import reached
from pdgemm.arrays import device as devices
from pdgemm.arrays import dtypes
from pdgemm.factors import householder, lu
from pdgemm.factors.cholesky import cholesky_schedule
from pdgemm.factors.tall_qr import rows_of, rows_only
from pdgemm.factors.triangular import BLOCK, beside, posed, triangular_schedule
from pdgemm.gemm import default_layout
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.model.machine import Machine, machine_at_hand, on_nodes
from pdgemm.panel_algorithms.panel_run import device_of
from pdgemm.panel_schedules.panel_schedule import is_balanced
from pdgemm.panel_schedules.row_moves import permutation
from pdgemm.panel_schedules.tsqr_schedule import cholesky_pass, tsqr_schedule
from pdgemm.planning.planner import plan_product
from pdgemm.planning.program import Program, Stage
from pdgemm.schedules.exchanges.exchange import plan_exchange

PASSES = 2  # of CholeskyQR over a matrix, if it is not ill-conditioned


def unmade(
    like: DistMatrix,
    distribution: Distribution | None = None,
    *,
    grid: ProcessGrid | None = None,
    dtype: np.dtype | None = None,
    order: Order | None = None,
) -> DistMatrix:
    """Return a new matrix without elements: where another one lies, on its device, or elsewhere.  Local."""
    grid, device = grid or like.grid, devices.of(like.stored)
    nothing = devices.empty((0, 0), dtype or like.dtype, order or like.order, device)
    X = DistMatrix(nothing, grid, distribution or like.distribution, order or like.order)
    X.shared = bool(device.reach(grid).reads) if device else grid.shares_memory
    return X


class Stages:
    """Keeps what the steps of a function will do, which are called here as the function calls them.

    The methods take matrices, with or without elements, and return those that the functions of these names return,
    without elements.   machine : of the model, by default as for `pdgemm`.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine, self.found = machine, list[tuple[str, Stage]]()

    def plan(self, A: DistMatrix) -> Program:
        """Return the plan of all steps, on the ranks of a matrix."""
        machine = self._machine or on_nodes(machine_at_hand(bool(device_of(A))), A.grid.ranks_per_node)
        return Program(tuple(self.found), A.grid.size, machine)

    def moved(self, X: DistMatrix, name: str, to: DistMatrix, adds: bool = False) -> DistMatrix:
        """The redistribution of a matrix, of some name in the plan.   adds : to what is there."""
        device, usable = devices.of(X.stored), X.mpi_addressable and to.mpi_addressable
        reach = reached(device, X.grid, X.shared and X.grid.ranks_per_node is None, usable)
        layouts, on = (X.layout_in(X.grid), to.layout_in(X.grid)), (device.name if device else "", *reach[1:])
        self.found.append((name, plan_exchange(*layouts, X.grid.size, not adds, None, reach[0], *on)))
        return to

    def product(self, A: DistMatrix, B: DistMatrix, C: DistMatrix | None = None, beta: complex = 0) -> DistMatrix:
        if C is None:
            layout, order = default_layout(A, B)
            C = unmade(A, layout, grid=A.grid.base, dtype=dtypes.product(A.dtype, B.dtype), order=order)
        options = ProductOptions(machine=self._machine)
        self.found.append(("C", plan_product(problem_of(Operands(A, B, C, False), options, 1, beta, shared=True))))
        return C

    def fitting(self, A: DistMatrix, block: int, order: Order | None = None) -> DistMatrix:
        """A copy that a panel algorithm overwrites: where A lies if the ranks share the work there."""
        if is_balanced(A.layout_in(A.grid), block):
            return unmade(A, order=order)
        squares, base = Distribution.over(A.grid.base.shape, A.shape, block), A.grid.base
        return self.moved(A, "A", unmade(A, squares, grid=base, order=order))

    def cholesky(self, A: DistMatrix, lower: bool = True) -> DistMatrix:
        W = self.fitting(A if lower else A.T, BLOCK)
        self.found.append(("A", cholesky_schedule(W)))
        return W if lower else W.T

    def lu(self, A: DistMatrix) -> tuple[DistMatrix, np.ndarray]:
        """The factors, and a permutation of the rows, at random."""
        W = self.fitting(A, lu.BLOCK, "C")
        schedule = lu.lu_schedule(W)
        self.found.append(("A", schedule))
        return W, permutation(schedule.exchanged, A.shape[0])

    def householder(self, A: DistMatrix, want_q: bool = True) -> tuple[DistMatrix, DistMatrix]:
        W, h = self.fitting(A, householder.BLOCK), min(A.shape)
        self.found.append(("A", householder.householder_schedule(W, want_q)))
        return unmade(W[:, :h]), unmade(W[:h])

    def triangular(
        self,
        A: DistMatrix,
        B: Any,
        lower: bool = False,
        trans: str = "N",
        side: str = "L",
        solves: bool = True,
        inverse: bool = False,
    ) -> Any:
        """The solution of a triangular system, or a product with a triangle."""
        M, lower, B, dtype = posed(A, B, lower, trans, side)
        M = M if M.dtype == dtype else unmade(M, dtype=dtype)
        if not is_balanced(M.layout_in(M.grid), BLOCK):
            M = self.fitting(M, BLOCK)
        column = Distribution(M.distribution.rows, BlockCyclic.even(1, M.grid.shape[1]))
        lies = beside(B, M) if isinstance(B, DistMatrix) else column
        if not isinstance(B, DistMatrix):
            X = unmade(M, column, dtype=dtype, order="F")
        elif lies is B.distribution:
            X = unmade(B, dtype=dtype)
        else:
            X = self.moved(B, "B", unmade(M, lies, dtype=dtype, order=B.order))
        self.found.append(("A", triangular_schedule(M, X, lower, solves, inverse)))
        if not isinstance(B, DistMatrix):
            return B
        if lies is not B.distribution:
            X = self.moved(X, "X", unmade(B, dtype=dtype))
        return X.T if side == "R" else X

    def inv_triangular(self, A: DistMatrix, lower: bool = False) -> DistMatrix:
        base = A.grid.base
        identity = unmade(A, Distribution.over(base.shape, A.shape, BLOCK), grid=base)
        return self.moved(self.triangular(A, identity, lower, inverse=True), "X", unmade(A))

    def permuted(self, X: Any, order: np.ndarray) -> Any:
        if isinstance(X, DistMatrix):
            self.found.append(("X", lu.permutation_schedule(X, order)))
        return X

    def tall_qr(self, A: DistMatrix, method: str = "auto", passes: int = PASSES) -> DistMatrix:
        """Q by rows, by two passes of CholeskyQR, one where the columns are nearly orthonormal, or by TSQR."""
        X, grid = A, rows_only(A)
        if grid is not A.grid:
            X = self.moved(X, "A", unmade(X, Distribution.over(grid.shape, A.shape), grid=grid, order="C"))
        if A.shape[1]:
            steps = [tsqr_schedule] if method == "tsqr" else [cholesky_pass] * passes
            self.found += [("A", step(*rows_of(X))) for step in steps]
        return unmade(X, order="C")

    def placed(self, Q: DistMatrix, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
        """Q in the layout of A, and R."""
        if not Q.same_layout(A) or Q.order != A.order:
            Q = self.moved(Q, "Q", unmade(A))
        layout = Distribution(A.distribution.cols.over(A.grid.shape[0]), A.distribution.cols)
        return unmade(A), unmade(A, layout)

    def qr(self, A: DistMatrix, method: str = "auto", passes: int = PASSES) -> tuple[DistMatrix, DistMatrix]:
        (m, n), h = A.shape, min(A.shape)
        if (fastest_method(A) if method == "auto" else method) == "householder":
            Q, R = self.householder(A)
            if not Q.same_layout(A[:, :h]):
                Q = self.moved(Q, "Q", unmade(A[:, :h]))
                R = self.moved(R, "R", unmade(A, beneath(A)))
            return Q, R
        Q, first = self.placed(self.tall_qr(A[:, :h], method, passes), A[:, :h])
        if m < n:
            R = self.product(Q.H, A, unmade(A, Distribution(first.distribution.rows, A.distribution.cols)))
            self.moved(first, "R", R[:, :m])
            return Q, R
        return Q, first


def beneath(A: DistMatrix) -> Distribution:
    """Return the distribution of R: the columns of A, and as many of these as A has rows, at most, for rows."""
    cols = A.distribution.cols
    return Distribution(cols.window(0, min(A.shape)).over(A.grid.shape[0]), cols)


def fastest_method(A: DistMatrix) -> Literal["householder", "auto"]:
    """Return how `qr` factors a matrix: by reflections, or by rows, whichever plan takes less time.  Local.

    Where all columns are one panel of reflections, a single rank would do all the work.
    """
    if min(A.shape) <= householder.BLOCK or A.device != devices.HOST:
        return "auto"
    plans = {}
    for method in ("householder", "tall"):
        stages = Stages()
        stages.qr(A, method)
        plans[method] = stages.plan(A).seconds
    return "householder" if plans["householder"] < plans["tall"] else "auto"
