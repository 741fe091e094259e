"""A registered algorithm (allgather_3d.py: an entry, a schedule and an executor) is planned, saved and run.

test_algorithms, test_any_problem and test_plans also run its products.
"""

from __future__ import annotations

from typing import Any

import pytest
from allgather_3d import ENTRY, allgather_3d_registered
from fake_device import fake_device
from problems import TOLERANCE, gemm_error

from pdgemm import DistMatrix, Plan, ProcessGrid, pdgemm, plan
from pdgemm.errors import ArgumentError

pytestmark = pytest.mark.mpi


def test_it_is_planned_explained_saved_and_carried_out(comm: Any, grid: Any) -> None:
    A, B, C = (DistMatrix.random((31, 31), grid=grid, block=4, seed=s) for s in (1, 2, 3))
    unknown = "algorithm 'allgather_3d' is not one of auto, summa"
    with pytest.raises(ArgumentError, match=unknown):
        pdgemm(1, A, B, algorithm=ENTRY.name)
    with allgather_3d_registered():
        assert comm.size == 1 or ENTRY.name in plan(A, B, C).explain(all=True)  # a candidate of "auto"
        p = plan(A, B, C, algorithm=ENTRY.name)
        assert p.algorithm == ENTRY.name
        saved = p.to_json()
        again = Plan.from_json(saved)
        assert again == p
        product = again.prepare(A, B, C)
        for _ in range(2):
            product()
            assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
            assert C.report.algorithm == ENTRY.name in str(C.report.summary())
            assert C.report.counted == p.traffic(comm.rank)
        with pytest.raises(ArgumentError, match="allgather_3d on a .* grid is impossible .* Pr x Pc x layers <="):
            plan(A, B, C, algorithm=ENTRY.name, shape=(comm.size + 1, 1))
    with pytest.raises(ArgumentError, match=unknown):
        pdgemm(1, A, B, algorithm=ENTRY.name)
    with pytest.raises(ArgumentError, match="not a plan that was saved"):
        Plan.from_json(saved)


def test_it_is_not_chosen_for_matrices_on_a_device(comm: Any) -> None:
    with allgather_3d_registered(), fake_device("late") as device, ProcessGrid(comm) as grid:
        A, B, C = (DistMatrix.random((31, 31), grid=grid, block=4, seed=s, device="fake") for s in (1, 2, 3))
        with pytest.raises(ArgumentError, match="algorithm 'allgather_3d' is for matrices on the host"):
            pdgemm(1, A, B, 0, C, algorithm=ENTRY.name)
        assert ENTRY.name not in plan(A, B, C).explain()
        assert comm.allgather(device.races) == [[]] * comm.size
