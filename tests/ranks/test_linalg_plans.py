"""Plans of factorisations and solves: what they say before is what the run counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import positive_definite, rng_matrix
from problems import grid_shapes
from tiers import few_grids

pytestmark = pytest.mark.mpi


@few_grids
@pytest.mark.parametrize("block", [16, None, (24, 40)])
def test_words_are_as_planned(comm: Any, block: Any) -> None:
    from pdgemm import DistMatrix, ProcessGrid, linalg

    S, b = positive_definite(200, "float64"), rng_matrix(200, 31, "float64")
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A, B = (DistMatrix.from_global(x, grid=grid, block=block) for x in (S, b))
            plan, L = linalg.plan(linalg.cholesky, A), linalg.cholesky(A)
            report: Any = L.report
            assert plan.traffic(comm.rank) == report.counted
            assert plan.seconds > 0 and plan.flops == 200**3 // 3
            assert plan == linalg.plan(linalg.cholesky, A) and "cholesky" in str(plan)
            assert len(set(comm.allgather(str(plan)))) == 1
            ways: list[dict[str, Any]] = [{"lower": True}, {"lower": True, "trans": "C"}, {"lower": True, "side": "R"}]
            for how in ways:
                X = B.T if "side" in how else B
                planned = linalg.plan(linalg.solve_triangular, L, X, **how)
                solved: Any = linalg.solve_triangular(L, X, **how)
                assert planned.traffic(comm.rank) == solved.report.counted
            planned, (Q, R) = linalg.plan(linalg.householder_qr, A), linalg.householder_qr(A)
            made: Any = R.report
            assert planned.traffic(comm.rank) == made.counted and Q is not None
            assert linalg.plan(linalg.lu_factor, A[:, :150]).words >= 0  # the rows that it exchanges are drawn
            both = linalg.plan(linalg.cho_solve, L, b[:, 0])
            assert [stage.algorithm for name, stage in both.stages if name == "A"][-1] == "trsm"  # type: ignore[union-attr]
            assert both.extra_bytes(None) >= both.extra_bytes(comm.rank)


def test_bad_arguments(comm: Any) -> None:
    from pdgemm import DistMatrix, ProcessGrid, linalg
    from pdgemm.errors import ArgumentError, LayoutError

    with ProcessGrid(comm) as grid:
        A = DistMatrix.eye(4, grid=grid)
        with pytest.raises(ArgumentError, match="plans are made for cholesky, cho_solve"):
            linalg.plan(np.sin, A)
        with pytest.raises(LayoutError, match="B has 3 elements"):
            linalg.plan(linalg.trmm, A, np.ones(3))
