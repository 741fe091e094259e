"""Survivors read matrices of lost ranks in the shared memory of their node; rules for steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from problems import grid_shapes
from tiers import everything, in_turn, square_grid

import pdgemm
from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, GridError
from pdgemm.grids import node_memory
from pdgemm.resilience import kept_state
from pdgemm.support import launcher

pytestmark = [pytest.mark.mpi, square_grid]

RANKS = launcher.launched_size()
GRIDS = grid_shapes(RANKS)
LAYOUTS: list[dict[str, Any]] = [  # layouts of A; a state is A and views of A
    {"block": 4, "dtype": "float64"},
    {"block": (3, 50), "dtype": "complex64", "order": "F"},
    {"block": None, "dtype": "int8"},
    {"block": (1, 2), "dtype": "bfloat16"},
]


@contextmanager
def without(comm: Any, gone: list[int], **grid: Any) -> Iterator[Any]:
    """Yield a grid of the ranks that are not in `gone`; on the others None."""
    left = comm.Split(MPI.UNDEFINED if comm.rank in gone else 0, comm.rank)
    if left:
        with ProcessGrid(left, **grid) as made:
            yield made
        left.Free()
    else:
        yield None
    comm.Barrier()


def state_of(grid: Any, layout: dict[str, Any], shape: tuple[int, int] = (23, 17)) -> dict[str, Any]:
    last = tuple(n - 1 for n in grid.shape)
    A = DistMatrix.from_function(lambda i, j: (7 * i + 3 * j) % 100, shape, grid=grid, source=last, **layout)
    state: dict[str, Any] = {"grid": A, "T": A.T, "H": A.H, "part": A[2:9, 5:16], "private": A.copy(), "k": 7}
    return state | {"empty": DistMatrix.zeros((0, 5), grid=grid, dtype=layout["dtype"])}


@pytest.mark.skipif(RANKS < 2, reason="one rank has no survivors")
@pytest.mark.parametrize("nodes", ["", "2"])
@pytest.mark.parametrize(("shape", "layout"), [*in_turn(GRIDS, LAYOUTS)])
def test_any_layout_is_inherited(
    comm: Any, monkeypatch: Any, shape: tuple[int, int], layout: dict[str, Any], nodes: str
) -> None:
    plans = []

    def planned(*arguments: Any) -> Any:
        plans.append(kept_state_plan(*arguments))
        return plans[-1]

    kept_state_plan = kept_state.plan_inheritance
    monkeypatch.setattr(kept_state, "plan_inheritance", planned)
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", nodes)
    base = comm.Dup()
    with ProcessGrid(base, shape) as grid:
        given = state_of(grid, layout)
        expected = {name: x.allgather() for name, x in given.items() if name != "k"}
        kept = kept_state.KeptState(given, grid, lambda state: False)
        assert all(kept.state[name].shared for name in expected) or grid.memory.alone
        every = [[0], [RANKS - 1], [*range(1, RANKS, 2)]] + ([[*range(1, RANKS)]] if everything() else [])
        for gone in [x for x in every if len(x) < RANKS]:
            alone = any(
                {rank for rank, node in enumerate(grid.nodes) if node == grid.nodes[x]} <= {*gone} for x in gone
            )
            with without(base, gone) as left:
                if left is None:
                    continue
                plans.clear()
                found = kept.inherited(left)
                assert (found is None) == alone
                if found is None:
                    continue
                assert found.state["k"] == 7
                assert not found.last
                for name, x in expected.items():
                    made = found.state[name]
                    np.testing.assert_array_equal(made.allgather(), x)
                    assert (made.grid, made.dtype, made.order) == (left, given[name].dtype, given[name].order)
                    assert made.block == kept.state[name].block
                traffic = [plan.traffic(left.rank) for plan in plans]
                assert found.inherited_words == sum(x.words_received for x in traffic)
                assert len(plans) == len(expected)
                sent = left.comm.allreduce(sum(x.words_sent for x in traffic))
                assert sent == left.comm.allreduce(found.inherited_words)
        for name, x in expected.items():  # the kept elements are unchanged
            np.testing.assert_array_equal(kept.state[name].allgather(), x)
    base.Free()


@pytest.mark.skipif(RANKS < 2, reason="one rank has no survivors")
def test_the_memory_of_ranks_that_are_gone_is_given_back(comm: Any) -> None:
    base = comm.Dup()
    with ProcessGrid(base) as grid:
        if grid.memory.alone or not grid.memory.size:
            pytest.skip("no ranks that share memory")
        A = DistMatrix.random((300, 300), grid=grid, block=7)
        comm.Barrier()
        if grid.rank == grid.size - 1:
            node_memory.abandon([0])
        comm.Barrier()
        assert (A.local == 0).all() == (grid.rank == 0)
    base.Free()


def test_a_step_changes_no_matrix_of_the_state(comm: Any) -> None:
    def make(grid: Any) -> dict[str, Any]:
        return {"A": DistMatrix.eye(30, grid=grid, block=4), "C": DistMatrix.zeros((30, 30), grid=grid, block=4)}

    def step(state: dict[str, Any]) -> dict[str, Any]:
        for write in (
            lambda: pdgemm.pdgemm(1, state["A"], state["A"], 1, state["C"]),
            lambda: state["C"].local.fill(1),
        ):
            with pytest.raises(ValueError, match="read-only"):
                write()
        return {"C": pdgemm.pdgemm(1, state["A"], state["A"], 1, state["C"].copy()), "T": state["C"].T}

    with pdgemm.resilient(comm) as r:
        found = r.run(make, step)
    assert [*found] == ["C", "T"]
    np.testing.assert_array_equal(found["C"].allgather(), np.eye(30))
    for x in found.values():  # writable for the caller
        x.local[...] = 1
    assert r.recoveries == []
    assert "--with-ft ulfm" in r.why_not
    found["C"].grid.free()


def test_steps_are_repeated_until_done(comm: Any) -> None:
    seen = []

    def step(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(state["k"])
        return {"k": state["k"] + 1}

    with pdgemm.resilient(comm) as r:
        assert r.run(lambda grid: {"k": 3}, step, lambda state: state["k"] == 6) == {"k": 6}
        assert r.run(lambda grid: {"k": 9}, step, lambda state: state["k"] == 9) == {"k": 9}
        assert r.run(lambda grid: {"k": 0}, step) == {"k": 1}
    assert seen == [3, 4, 5, 0]


def test_valid_states(comm: Any) -> None:
    with pdgemm.resilient(comm) as r, ProcessGrid(comm.Dup()) as other:
        A = DistMatrix.zeros((5, 5), grid=r.grid)
        for bad, error, text in [
            ([A], ArgumentError, "a state must be a dict of names and values, got list"),
            ({1: A}, ArgumentError, "a state must be a dict"),
            ({"A": [A]}, ArgumentError, "'A' is a list"),
            ({"A": {"x": A}}, ArgumentError, "'A' is a dict"),
            ({"A": DistMatrix.zeros((5, 5), grid=other)}, GridError, "'A' is on .* of another communicator"),
        ]:
            with pytest.raises(error, match=text):
                r.run(lambda grid, bad=bad: bad, lambda state: state)
        if RANKS > 1:
            with pytest.raises(ArgumentError, match="different arguments: rank 0: the state, x"):
                r.run(lambda grid: {"y" if grid.rank else "x": 1}, lambda state: state)
        r.grid.free()


def test_bad_arguments(comm: Any) -> None:
    for bad in (0, -1, float("nan"), "60"):
        r = pdgemm.resilient(comm, patience=bad)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="patience must be a positive number of seconds"), r:
            pass
    with pytest.raises(GridError, match="intracommunicator"):
        pdgemm.resilient(3)  # type: ignore[arg-type]
    with pdgemm.resilient(comm) as r, pytest.raises(ZeroDivisionError):
        r.run(lambda grid: {"k": 0}, lambda state: {"k": 1 // state["k"]})
