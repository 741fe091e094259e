"""A registered mover (tree_mover.py: an entry and a function) is planned and sends panels.

test_summa, test_algorithms, test_any_problem, test_plans, test_overlap and test_trace also use it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from checked_product import check
from fake_device import SCHEDULES, fake_device
from problems import TOLERANCE, accepted, gemm_error
from tree_mover import BY_MESSAGES, TREE, tree, tree_registered

from pdgemm import DistMatrix, Machine, Plan, ProcessGrid, pdgemm, plan
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import Reach
from pdgemm.planning.machines.machine import Link
from pdgemm.schedules.mover_registry import MOVERS, mover_choices
from pdgemm.transport.movers import BROADCASTS, register_mover

pytestmark = pytest.mark.mpi


def test_it_is_planned_saved_and_carried_out(comm: Any, grid: Any) -> None:
    A, B, C = (DistMatrix.random((31, 31), grid=grid, block=4, seed=s) for s in (1, 2, 3))
    asked: dict[str, Any] = {"algorithm": "summa", "shape": grid.shape, "panel_width": 5, "lookahead": 2}
    with tree_registered():
        p = plan(A, B, C, mover="tree", **asked)
        assert p.product.mover == "tree"
        again = Plan.from_json(p.to_json())
        assert again == p
        again.execute(A, B, C)
        assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
        assert C.report.mover == "tree" and "mover tree" in str(C.report.summary())
        assert C.report.counted == p.traffic(comm.rank)
    with pytest.raises(ArgumentError, match="mover 'tree' is not one of auto, mpi, shared, ibcast, ring, staged"):
        pdgemm(1, A, B, mover="tree", **asked)
    with pytest.raises(ArgumentError, match="its mover 'tree' cannot transfer its panels"):
        Plan.from_json(p.to_json())


def test_it_is_chosen_if_the_machine_is_faster_with_it(comm: Any) -> None:
    fast, slow = Link(1e-9, 1e-12), Link(1e-3, 1e-8)
    with ProcessGrid(comm) as grid, tree_registered():
        A = DistMatrix.random((64, 64), grid=grid, block=4, seed=1)
        links = dict.fromkeys(BY_MESSAGES, slow) | {"tree": fast}
        machine = replace(Machine(), intra={**Machine().intra, **links})
        for mover in ("mpi", "tree", "ring"):
            C = pdgemm(1, A, A, algorithm="summa", shape=grid.shape, mover=mover, machine=machine)
            assert C.report.mover == (mover if mover != "mpi" else "tree" if comm.size > 1 else "ibcast")
            assert C.report.counted == C.report.predicted
        assert Machine.from_dict(json.loads(machine.as_json())) == machine


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_sends_panels_packed_on_a_device(comm: Any, schedule: str) -> None:
    """The tree sends panels on a device with delayed work and CUDA-aware MPI."""
    with (
        tree_registered(),
        fake_device(schedule, reach=Reach("", staged=False)) as device,
        ProcessGrid(comm) as grid,
    ):
        for name, shape, layers in accepted(comm.size):
            if name in ("summa", "stationary_a", "2.5d"):
                asked: dict[str, Any] = {"device": "fake", "mover": "tree", "panel_width": 5}
                report = check(grid, (9, 14, 41), name, shape, layers, block=3, **asked)
                assert report.mover in ("tree", "shift") or comm.size == 1
        assert comm.allgather(device.races) == [[]] * comm.size


def test_no_name_is_taken_twice(comm: Any) -> None:
    for name in mover_choices():
        with pytest.raises(ArgumentError, match=f"mover '{name}' exists already"):
            register_mover(replace(TREE, name=name), tree)
    assert {*BROADCASTS} == {name for name, mover in MOVERS.items() if mover.by in ("messages", "nccl")}
