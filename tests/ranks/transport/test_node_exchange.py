"""Exchanges with one message between two nodes: exact elements, and words and messages as planned."""

from __future__ import annotations

import random
import re
from collections import Counter
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI
from problems import grid_shapes
from tiers import every_grid, everything

from pdgemm import (
    Batch,
    DistMatrix,
    Machine,
    Plan,
    ProcessGrid,
    linalg,
    matmul_grouped,
    pdgemm,
    plan,
    plan_grouped,
    select,
)
from pdgemm.algorithms import redistribution
from pdgemm.algorithms.blocks import reported_blocks
from pdgemm.algorithms.redistribution import timed_exchange
from pdgemm.errors import ArgumentError, NodeMemoryError
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.instrument import spans
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


def slow_messages(per_node: int | None = None, alpha: float = 1e-2) -> Machine:
    """Return a machine on which a message between nodes takes as long as many small products."""
    links = {kind: Link(alpha, x.beta) for kind, x in Machine().inter.items()}
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


def forbid_node_memory(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a rank that is `full` gets no memory that its node shares."""
    error = NodeMemoryError("no room")
    if full:
        monkeypatch.setattr(NodeMemory, "empty", Mock(side_effect=error))


@pytest.mark.on_ranks(4)
def test_without_node_memory_ranks_send_to_ranks(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank lacks memory that its node shares, all ranks carry out the exchange from rank to rank."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    monkeypatch.setattr(redistribution, "machine_at_hand", slow_messages)
    with ProcessGrid(comm.Dup()) as grid:
        X = DistMatrix.random((40, 40), grid=ProcessGrid(grid.base.comm, (1, comm.size)), block=1).copy()
        Y = DistMatrix.zeros((40, 40), grid=grid, block=3)
        forbid_node_memory(comm.rank == 1, monkeypatch)
        X.redistribute(out=Y, check=False)
        assert np.array_equal(Y.allgather(), X.allgather())
        assert grid.comm.allreduce(Y.report.counted.messages_sent) == 12


def divide(grid: Any, places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that each rank of a grid is on the node of this number; the ranks of a node need not be consecutive."""
    shared = grid._shared
    node = MPI.Intracomm(shared.comm.Split(places[shared.comm.rank]))
    nodes = tuple(places.index(place) for place in places)
    here = {"node": node, "memory": NodeMemory(node, inf, True), "nodes": nodes, "shares_memory": True}
    for name, value in (here | {"ranks_per_node": max(Counter(nodes).values())}).items():
        monkeypatch.setattr(shared, name, value)


@pytest.mark.on_ranks(4, 6)
@pytest.mark.parametrize("nbytes", [0, 64, block_messages.NODE_BYTES])
def test_scattered_and_ragged_nodes(comm: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with 1 to 3 ranks, which do not follow each other; repeated, and with several messages in a step."""
    monkeypatch.setattr(block_messages, "NODE_BYTES", nbytes)
    with ProcessGrid(comm.Dup()) as grid, ProcessGrid(grid.base.comm, (comm.size, 1)) as rows:
        for places in ([0, 1, 0, 1, 2, 0], [2, 0, 1, 0, 1, 1], [0, 1, 1, 0, 2, 3]):
            divide(grid, places[: comm.size], monkeypatch)
            X = DistMatrix.random((31, 23), grid=grid, block=(2, 3))
            Y = DistMatrix.zeros((31, 23), grid=rows, block=1, order="F")
            plan = plan_exchange(X.layout_in(grid), Y.layout_in(grid), grid.size).joined(grid.nodes)
            buffers = ExchangeBuffers(plan, comm.rank, shared=grid.memory)
            for again in range(3):
                X.local[...] += again
                counted = timed_exchange("test", 1, X.stored, 0, Y.stored, plan, buffers, grid).traffic
                assert np.array_equal(Y.allgather(), X.allgather())
                check_counts(plan, grid, counted)


@pytest.mark.on_ranks(4, 6)
def test_rows_of_groups(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the owners of the groups, and back; and from rank to rank where a rank lacks node-shared memory."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    monkeypatch.setattr(redistribution, "machine_at_hand", slow_messages)
    rng = np.random.default_rng(0)
    with ProcessGrid(comm.Dup(), (comm.size, 1)) as grid:
        X = DistMatrix.random((200, 12), grid=grid, block=(1, 12))
        w, owner = rng.random((8, 12, 5)), np.arange(8) % comm.size
        W, groups = Batch.from_global([*w], grid.comm, owner), rng.integers(-1, 8, (200, 2))
        expected = np.where(groups[..., None] < 0, 0, np.einsum("ia,ijab->ijb", X.allgather(), w[groups]))
        partners = (comm.size // 2) * (comm.size // 2 - 1)
        for messages in (partners, comm.size * (comm.size - 1)):
            routing = plan_grouped(X, groups[X.indices()[0]], owner)
            batch = routing.to_groups(X, check=False)
            Y = routing.to_rows(batch, check=False)
            chosen = groups.ravel() >= 0
            assert np.array_equal(Y.allgather()[chosen], np.repeat(X.allgather(), 2, axis=0)[chosen])
            Z = matmul_grouped(X, W, routing, check=False)
            assert np.allclose(Z.allgather().reshape(200, 2, 5), expected, rtol=1e-13)
            for report, times in ((batch.report, 1), (Y.report, 1), (Z.report, 2)):
                assert report.counted == report.predicted and report.extra_bytes == report.predicted_extra_bytes
                assert grid.comm.allreduce(report.counted.messages_sent) == times * messages
            forbid_node_memory(comm.rank == 1, monkeypatch)


@pytest.mark.on_ranks(4)
def test_what_is_planned_is_sent(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have the messages of a run on their machine; bytes are traced once, where they are received."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    with ProcessGrid(comm.Dup()) as grid:
        A = DistMatrix.random((40, 40), grid=ProcessGrid(grid.base.comm, (1, comm.size)), block=1)

        def mixed(A: DistMatrix) -> list[Any]:
            picked = select(A, cols=np.random.default_rng(0).permutation(40))
            return [picked.report, A.redistribute(grid=A.grid, block=7).report]

        monkeypatch.setattr(redistribution, "machine_at_hand", partial(slow_messages, alpha=1e-12))
        programs = [linalg.plan(mixed, A, machine=machine) for machine in (slow_messages(2), None)]
        assert [[bool(move.nodes) for _, move in x.stages] for x in programs] == [[True, True], [False, False]]
        monkeypatch.setattr(redistribution, "machine_at_hand", slow_messages)
        with spans.taking(trace := spans.Trace()):
            counted = sum((x.counted for x in mixed(A)), Traffic())
        assert counted == programs[0].traffic(comm.rank)
        arrived = sum(x[4] for x in trace.spans if x[0] == spans.MOVING)
        assert arrived == 8 * (counted.words_received - counted.words_read)


@pytest.mark.on_ranks(4)
def test_ranks_with_other_machines_do_not_wait(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    monkeypatch.setattr(
        redistribution, "machine_at_hand", partial(slow_messages, alpha=1e-2 if comm.rank == 0 else 1e-12)
    )
    with ProcessGrid(comm.Dup()) as grid:
        with pytest.raises(ArgumentError, match=r"different arguments.*nodes=\(0, 0, 2, 2\)"):
            DistMatrix.from_blocks(np.ones((40, 10)), axis=1, grid=grid, block=3)
        A = DistMatrix.random((40, 40), grid=ProcessGrid(grid.base.comm, (1, comm.size)), block=1)
        some = np.random.default_rng(0).permutation(40)
        for move in (lambda: A.redistribute(grid=grid, block=3), lambda: select(A, cols=some)):
            with pytest.raises(ArgumentError, match="different arguments"):
                move()


@pytest.mark.on_ranks(4)
def test_a_saved_plan_with_other_messages_is_refused(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    with ProcessGrid(comm.Dup()) as grid:
        A, B = (DistMatrix.random((40, 40), grid=ProcessGrid(grid.base.comm, (1, 4)), block=1) for _ in "AB")
        saved = plan(A, B, algorithm="summa", shape=grid.shape, machine=slow_messages(2))
        text = saved.to_json()
        words = saved.moves[0][1].words
        for old, new, said in (
            (f'"words": {words}', '"words": 1', "other messages between nodes"),
            ('"nccl": false, "nodes": [0', '"nccl": true, "nodes": [0', "other messages between nodes"),
            ('"nodes": [0, 0, 2, 2]', '"nodes": [0, 0, 0, 3]', "its lists of nodes|other messages between nodes"),
            ('"shared": true, "reads"', '"shared": false, "reads"', "its lists of nodes"),
        ):
            places = [x.start() for x in re.finditer(re.escape(old), text)]
            assert places, old
            for place in places:
                with pytest.raises(ArgumentError, match=f"not a plan that was saved: .*{said}"):
                    Plan.from_json(text[:place] + new + text[place + len(old) :])


@pytest.mark.on_ranks(4)
def test_matrices_outside_of_node_memory_within_the_limit(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved plan whose operands have to be copied has smaller messages, if the limit requires that."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    with ProcessGrid(comm.Dup()) as grid:
        A, B = DistMatrix.random((64, 8), grid=grid, seed=1), DistMatrix.random((8, 64), grid=grid, seed=2)
        C = DistMatrix.zeros((64, 64), grid=ProcessGrid(grid.base.comm, (1, 4)), block=1)
        how: dict[str, Any] = {"algorithm": "summa", "shape": grid.shape, "machine": slow_messages(2)}
        limit = plan(A, B, C, **how).extra_bytes(None)
        saved = plan(A, B, C, memory_limit=limit, **how)
        assert [move.nodes for _, move in saved.moves] == [grid.nodes]
        a, b = A.copy(), B.copy()
        assert not a.shared
        saved.execute(a, b, C)
        assert np.allclose(C.allgather(), a.allgather() @ b.allgather(), rtol=1e-13)
        assert C.report.extra_bytes == C.report.predicted_extra_bytes <= limit
