"""Exchanges with one message between two nodes: exact elements, and words and messages as planned."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from problems import grid_shapes
from tiers import every_grid, everything

from pdgemm import DistMatrix, Machine, Plan, ProcessGrid, pdgemm, plan, select
from pdgemm.algorithms import redistribution
from pdgemm.algorithms.blocks import reported_blocks
from pdgemm.algorithms.redistribution import timed_exchange
from pdgemm.errors import NodeMemoryError
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.instrument.recorder import Traffic
from pdgemm.planning.machines.machine import Link
from pdgemm.schedules.exchanges import block_messages
from pdgemm.schedules.exchanges.exchange import Exchange, Selection, fitted_messages, plan_exchange
from pdgemm.transport.exchange_buffers import ExchangeBuffers

pytestmark = pytest.mark.mpi(min_size=3)
SIZES = [(1, 1), (7, 5), (40, 31), (3, 64), (0, 4), (29, 29)]
TYPES = ["float64", "float32", "complex128", "bfloat16", "int32"]


def drawn(grids: list[Any], draw: random.Random, shape: tuple[int, int], dtype: str) -> DistMatrix:
    """Return a matrix in a drawn layout, whose elements are small integers."""
    grid, block = draw.choice(grids), (draw.choice([1, 3, 16]), draw.choice([1, 4, 100]))
    source = draw.randrange(grid.shape[0]), draw.randrange(grid.shape[1])

    def element(i: Any, j: Any) -> Any:
        return (5 * i + 3 * j) % 17 + (1j * ((i + j) % 5) if "complex" in dtype else 0)

    options: dict[str, Any] = {
        "grid": grid,
        "block": block,
        "source": source,
        "dtype": dtype,
    }
    X = DistMatrix.from_function(element, shape, order=draw.choice("CF"), **options)
    return X.H.T if draw.random() < 0.3 else X


def carried_out(alpha: Any, X: DistMatrix, beta: Any, Y: DistMatrix, plan: Exchange) -> Traffic:
    """Compute Y := alpha X + beta Y by the plan, and return what was counted."""
    buffers = ExchangeBuffers(plan, X.grid.comm.rank, shared=X.grid.memory)
    for array, _ in buffers.messages:
        array.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in floating-point types
    return timed_exchange("test", alpha, X.stored, beta, Y.stored, plan, buffers, X.grid).traffic


def check_counts(plan: Exchange, grid: Any, counted: Traffic) -> None:
    """Compare the traffic of this rank with the formula and with the rounds, and the messages of all ranks."""
    assert counted == plan.traffic(grid.comm.rank) == sum(plan.tally.of(grid.comm.rank).values(), Traffic())
    nodes = len({*grid.nodes})
    assert grid.comm.allreduce(counted.messages_sent, MPI.SUM) <= nodes * (nodes - 1)
    assert grid.comm.allreduce(counted.words_sent - counted.words_received + counted.words_read, MPI.SUM) == 0


@every_grid
@pytest.mark.parametrize("nbytes", [0, block_messages.NODE_BYTES], ids=["several steps", "one step"])
@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_drawn_layouts(comm: Any, per_node: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if per_node >= comm.size:
        pytest.skip("all ranks share memory")
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", str(per_node))
    monkeypatch.setattr(block_messages, "NODE_BYTES", nbytes)
    own, draw = comm.Dup(), random.Random(per_node + nbytes)
    with ExitStack() as stack:
        places = [(x, order) for x in grid_shapes(comm.size) for order in (1, -1)]
        grids = [stack.enter_context(ProcessGrid(own, x, ranks=range(own.size)[::order])) for x, order in places]
        grids.append(stack.enter_context(ProcessGrid(own, ranks=range(1, own.size))))
        for number in range(60 if everything() else 12):
            shape, dtype = draw.choice(SIZES), draw.choice(TYPES)
            X, Y = (drawn(grids, draw, shape, dtype) for _ in "XY")
            if Y.conjugated:
                Y = Y.copy()
            alpha, beta = draw.choice([(1, 0), (1, 0), (2, 0), (-1, 3)])
            grid, before, x = X.grid, Y.allgather(), X.allgather()
            source, target = X.layout_in(grid), Y.layout_in(grid)
            plan = plan_exchange(source, target, grid.size, (alpha, beta) == (1, 0)).joined(grid.nodes)
            if beta == 0 and dtype != "int32":
                Y.local[...] = np.nan
            counted = carried_out(alpha, X, beta, Y, plan)
            expected = (alpha * x + (beta * before if beta else 0)).astype(x.dtype)
            assert np.array_equal(Y.allgather(), expected), (number, shape, dtype, alpha, beta)
            assert np.array_equal(X.allgather(), x)
            check_counts(plan, grid, counted)
            assert plan.by_nodes
            assert len([*plan.by_nodes.steps]) == (1 if nbytes else -(-len({*grid.nodes}) // plan.by_nodes.width))


@pytest.mark.on_ranks(4, 6)
def test_picked_rows_and_columns(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    with ProcessGrid(comm.Dup()) as grid, ProcessGrid(grid.base.comm, (1, comm.size)) as other:
        X = DistMatrix.random((20, 18), grid=grid, block=(2, 3))
        Y = DistMatrix.zeros((12, 7), grid=other, block=(5, 1))
        rng = np.random.default_rng(0)
        rows, cols = rng.integers(0, 20, 12), rng.permutation(18)[:7]
        pairs = {"rows": IndexPairs(rows, np.arange(12)), "cols": IndexPairs(cols, np.arange(7))}
        one = Selection(X.layout_in(grid), Y.layout_in(grid), grid.size, 1, True, **pairs)
        plan = fitted_messages(one).joined(grid.nodes)
        counted = carried_out(1, X, 0, Y, plan)
        assert np.array_equal(Y.allgather(), X.allgather()[np.ix_(rows, cols)])
        check_counts(plan, grid, counted)


@pytest.mark.on_ranks(4, 6)
def test_blocks_of_any_size(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rectangles on a rank, into a matrix and out of it, and sorted elements."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    monkeypatch.setattr(redistribution, "machine_at_hand", slow_messages)
    nodes, whole = comm.size // 2, np.random.default_rng(0).random((31, 24))
    with ProcessGrid(comm.Dup()) as grid:
        ends = np.linspace(0, 31, 2 * comm.size + 1).astype(int)
        own = [(int(ends[at]), int(ends[at + 1])) for at in (comm.rank, 2 * comm.size - 1 - comm.rank)]
        A = DistMatrix.from_blocks([whole[slice(*x)] for x in own], rows=own, cols=(0, 24), grid=grid, block=(2, 5))
        assert np.array_equal(A.allgather(), whole)
        parts = [((0, 31), (comm.rank, 20)), ((5, 5), (0, 3)), ((comm.rank, 30), (2, 9))]
        blocks, report = reported_blocks(A, *map(list, zip(*parts)))
        for (rows, cols), x in zip(parts, blocks):
            assert np.array_equal(x, whole[slice(*rows), slice(*cols)])
        for x in (A.report, report):
            assert x.counted == x.predicted and x.extra_bytes == x.predicted_extra_bytes
            assert grid.comm.allreduce(x.counted.messages_sent) == nodes * (nodes - 1)


def slow_messages(per_node: int | None = None) -> Machine:
    """Return a machine on which a message between nodes takes as long as many small products."""
    links = {kind: Link(1e-2, x.beta) for kind, x in Machine().inter.items()}
    return Machine(name="slow messages", ranks_per_node=per_node, inter=links)


@pytest.mark.on_ranks(4, 6)
def test_the_model_chooses_them(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In products, redistributions and selections, whose reports have the planned words."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    monkeypatch.setattr(redistribution, "machine_at_hand", slow_messages)
    with ProcessGrid(comm.Dup()) as grid:
        columns = ProcessGrid(grid.base.comm, (1, comm.size))
        A, B = (DistMatrix.random((40, 40), grid=columns, block=1, seed=seed).copy() for seed in (1, 2))
        a, b, nodes = A.allgather(), B.allgather(), comm.size // 2
        for C, expected in (
            (A.redistribute(grid=grid, block=3), a),
            (A.redistribute(grid=grid, block=3, alpha=2, order="F"), 2 * a),
            (select(A, rows=np.arange(40)[::-1]).redistribute(grid=grid, block=7), a[::-1]),
        ):
            assert np.array_equal(C.allgather(), expected)
            report = C.report
            assert report.counted == report.predicted and report.extra_bytes == report.predicted_extra_bytes
            assert grid.comm.allreduce(report.counted.messages_sent) == nodes * (nodes - 1)
        how: dict[str, Any] = {"algorithm": "summa", "shape": grid.shape, "machine": slow_messages(2)}
        planned = plan(A, B, **how)
        assert {name for name, move in planned.moves if move.nodes} == {"A", "B", "C"}
        C = pdgemm(1, A, B, **how)
        assert np.allclose(C.allgather(), a @ b, rtol=1e-13, atol=1e-13)
        assert C.report.counted == C.report.predicted == planned.traffic(comm.rank)
        assert C.report.extra_bytes == C.report.predicted_extra_bytes == planned.extra_bytes(comm.rank)
        assert Plan.from_json(planned.to_json()) == planned


@pytest.mark.on_ranks(4)
def test_without_node_memory_ranks_send_to_ranks(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank lacks memory that its node shares, all ranks carry out the exchange from rank to rank."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    monkeypatch.setattr(redistribution, "machine_at_hand", slow_messages)
    with ProcessGrid(comm.Dup()) as grid:
        X = DistMatrix.random((40, 40), grid=ProcessGrid(grid.base.comm, (1, comm.size)), block=1).copy()
        Y = DistMatrix.zeros((40, 40), grid=grid, block=3)
        empty = NodeMemory.empty

        def full(memory: NodeMemory, *size: Any, **options: Any) -> Any:
            if comm.rank == 1:
                raise NodeMemoryError("no room")
            return empty(memory, *size, **options)

        monkeypatch.setattr(NodeMemory, "empty", full)
        X.redistribute(out=Y, check=False)
        assert np.array_equal(Y.allgather(), X.allgather())
        assert grid.comm.allreduce(Y.report.counted.messages_sent) == 12
