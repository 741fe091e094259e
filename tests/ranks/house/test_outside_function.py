"""A user's function of linear algebra is planned, simulated and counted like functions of the package.

Conjugate gradients with Jacobi's preconditioner (Saad, Iterative Methods for Sparse Linear Systems, 2003, algorithm
9.1), for several right-hand sides at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import positive_definite, rng_matrix
from problems import grid_shapes
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LayoutError
from pdgemm.linalg.work import Work
from pdgemm.planning.product_plan import ProductPlan

pytestmark = pytest.mark.mpi


def jacobi_cg(A: Any, B: Any, tolerance: float = 1e-10, most: int = 200) -> Any:
    """Return X with A X = B for a positive definite A.  `X.report` has all words, and the flops of the products."""
    work, scale = Work("jacobi_cg"), 1 / A.diagonal()[:, None]
    X, R = B.copy() * 0, B.copy()
    Z = R * scale
    P, rho = Z, (R.conj() * Z).sum(axis=0)
    for step in range(most):
        left = A.grid.expected(float(R.norm()), 0.0 if step >= A.grid.iterations(most, 10) else np.inf)
        if left <= tolerance:
            return work.reported(X, step)
        Q = work.product(1, A, P)
        length = rho / (P.conj() * Q).sum(axis=0)
        X, R = X + P * length, R - Q * length
        Z = R * scale
        before, rho = rho, (R.conj() * Z).sum(axis=0)
        P = Z + P * (rho / before)
    raise ArithmeticError(f"not converged in {most} steps: {left:.1e}")


@pytest.mark.on_ranks(2, 4)
def test_right_and_as_planned_on_every_grid(comm: Any) -> None:
    n, blocks = 24, ((None, 7), (7, (40, 3)), ((40, 3), None))
    for shape, (dtype, some) in in_turn(grid_shapes(comm.size), [*zip(("float64", "complex128", "float64"), blocks)]):
        a = positive_definite(n, dtype)
        a += np.diag(np.linspace(1, 50, n)) * np.abs(a).max()
        b = rng_matrix(n, 5, dtype)
        wanted = np.linalg.solve(a, b)
        with ProcessGrid(comm, shape) as grid:
            for block in some:
                A, B = (DistMatrix.from_global(x, grid=grid, block=block) for x in (a, b))
                if A.block[0] != B.block[0]:
                    B = B.redistribute(DistMatrix.empty(B.shape, grid=grid, block=(A.block[0], 2), dtype=B.dtype))
                X = jacobi_cg(A, B)
                assert np.abs(X.allgather() - wanted).max() <= 1e-8 * np.abs(wanted).max()
                assert np.array_equal(A.allgather(), a) and np.array_equal(B.allgather(), b)
                report: Any = X.report
                plan = linalg.plan(jacobi_cg, A, B, iterations=report.steps)
                products = [stage for _, stage in plan.stages if isinstance(stage, ProductPlan)]
                assert len(products) == report.products == report.steps and plan.flops == report.flops
                assert plan.traffic(comm.rank) == report.counted == report.predicted
                run, counted = plan.simulate(), report.counted
                assert run.words_sent[comm.rank] == counted.words_sent
                assert run.messages_sent[comm.rank] == counted.messages_sent
                assert plan.seconds > 0 and "product" in str(plan)


def test_it_stops_with_an_error_on_all_ranks(comm: Any, grid: Any) -> None:
    A, B = DistMatrix.eye(6, grid=grid), DistMatrix.ones((7, 2), grid=grid)
    for call in (jacobi_cg, lambda A, B: linalg.plan(jacobi_cg, A, B)):
        with pytest.raises(LayoutError):
            call(A, B)
