"""Matrices in shared memory of a node are read in place, at the right time, and reads are counted."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from time import sleep
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from checked_product import check_summa
from mpi4py import MPI
from problems import BLOCKS, TOLERANCE, gemm_error, grid_shapes
from tiers import every_grid, in_turn, pairs, square_grid

from pdgemm import DistMatrix, Plan, ProcessGrid, pdgemm, plan
from pdgemm.algorithms.products import broadcast_panels, layer_sums
from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.errors import LayoutError, MemoryLimitError, NodeMemoryError
from pdgemm.grids import node_memory
from pdgemm.grids.distribution import Distribution
from pdgemm.planning import planner
from pdgemm.schedules.products import reduction
from pdgemm.transport.movers import panel_views
from pdgemm.transport.movers.node_arrays import NodeArrays

pytestmark = square_grid


@pytest.mark.mpi(min_size=2)
def test_a_neighbour_sees_the_array_itself(comm: Any, grid: Any) -> None:
    A = DistMatrix.from_function(lambda i, j: 100 * i + j, (23, 31), grid=grid, block=(3, 4), order="F")
    view = A[2:20, 5:30].T
    assert A.shared and view.shared and A.H.shared and not A.copy().shared
    assert DistMatrix.from_local(A.local, A.shape, grid=grid, block=A.block).shared
    near = NodeArrays(grid, A=(A.stored, A.layout_in(grid)), V=(view.stored, view.layout_in(grid)))
    for rank in range(comm.size):
        i, j = grid.coords_of(rank)
        rows, cols = A.distribution.rows.indices(i), A.distribution.cols.indices(j)
        assert np.array_equal(near("A", rank), 100 * rows[:, None] + cols)
        rows, cols = view.distribution.rows.indices(j), view.distribution.cols.indices(i)
        assert np.array_equal(near("V", rank), 100 * (cols + 2) + rows[:, None] + 5)
    near.sync()
    if A.local.size:
        A.local[0, 0] = -1
    grid.memory.sync()
    assert all(near("A", rank)[0, 0] == -1 for rank in range(comm.size) if near("A", rank).size)
    near.sync()


@pytest.mark.mpi(min_size=2)
def test_long_waits_for_ranks_without_a_core_sleep(comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    naps = Mock(side_effect=sleep)
    monkeypatch.setattr(node_memory, "sleep", naps)
    assert grid.memory.oversubscribed == (grid.node.size > len(set().union(*comm.allgather(os.sched_getaffinity(0)))))
    for oversubscribed in (False, True):
        monkeypatch.setattr(grid.memory, "oversubscribed", oversubscribed)
        comm.Barrier()
        if comm.rank == 0:
            sleep(20 * node_memory._PATIENCE)
        grid.memory.sync()
        if comm.rank or not oversubscribed:  # rank 0 may have to wait, too
            assert naps.called == oversubscribed


@pytest.mark.mpi(min_size=2)
def test_panels_are_multiplied_in_place(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are not copied, buffered or sent: every panel that BLAS reads is a part of the owner's matrix."""
    prepared, copied = Mock(), Mock()
    prepared.side_effect = Accumulator.prepared
    monkeypatch.setattr(Accumulator, "prepared", lambda *args: prepared(*args))
    for module in (broadcast_panels, panel_views):
        monkeypatch.setattr(module, "copy_blocks", copied)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for block in (None, 64) if shape[0] == shape[1] else (None,):
                n = 300 * max(shape)
                A, B, C = (DistMatrix.random((n, n), grid=grid, block=block, seed=s) for s in (1, 2, 3))
                pdgemm(1, A, B, 0, C, algorithm="summa", shape=shape)
                assert C.report.mover == "shared"
                assert C.report.counted.messages_received == C.report.extra_bytes == 0
                from_row, from_col = n - A.local.shape[1], n - B.local.shape[0]
                assert C.report.counted.words_read == C.local.shape[0] * from_row + C.local.shape[1] * from_col
                assert prepared.call_count == sum(shape) - math.gcd(*shape)  # one per pair of owners
                window: Any = grid.memory.window
                panels = [x for call in prepared.call_args_list for x in call.args[1:3]]
                parts = [np.frombuffer(part, np.uint8) for part in window.parts]
                assert all(any(np.may_share_memory(x, part) for part in parts) for x in panels)
                prepared.reset_mock()
    assert not copied.called


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late", ["reader", "writer"])
def test_late_ranks_and_shared_memory(comm: Any, late: str) -> None:
    """Other ranks wait for a late rank, before they read what it writes, and before they write what it reads."""

    def dawdle(*_: int) -> None:
        if late == "reader" and comm.rank == comm.size - 1:
            sleep(0.01)

    n = 16
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A, B, C, D = (DistMatrix.zeros((n, n), grid=grid, block=2) for _ in "ABCD")
        for turn in range(1, 4):
            if late == "writer" and comm.rank == 0:
                sleep(0.03)
            A.local[...] = B.local[...] = turn
            options: dict[str, Any] = {"mover": "shared", "algorithm": "summa", "shape": grid.shape, "check": False}
            pdgemm(1, A, B, 0, C, panel_width=2, progress=dawdle, **options)
            A.local[...] = B.local[...] = np.nan
            assert (C.local == n * turn**2).all()
            A.local[...] = turn
            A.redistribute(D, check=False)
            A.T.redistribute(D, check=False)
            A.local[...] = np.nan
            assert (D.local == turn).all()


@pytest.mark.mpi(min_size=2)
def test_ranks_synchronise_before_they_read_copies(comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once after a product; and once before it, if copies of elements are read or a prepared product is executed."""
    calls, sync = list[NodeArrays](), NodeArrays.sync
    monkeypatch.setattr(NodeArrays, "sync", lambda self: (calls.append(self), sync(self)))
    A, B, C = (DistMatrix.random((40, 40), grid=grid, seed=s) for s in range(3))
    how: dict[str, Any] = {"algorithm": "summa", "shape": grid.shape, "mover": "shared"}
    product = plan(A, B, C, **how).prepare(A, B, C)
    private = A.copy()
    assert A.shared and not private.shared
    for multiply, expected in (
        (lambda: pdgemm(1, A, B, 0, C, **how), 1),
        (lambda: pdgemm(1, private, B, 0, C, **how), 2),
        (product, 2),
    ):
        calls.clear()
        multiply()
        assert len(calls) == expected
        assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE


@pytest.mark.mpi(min_size=2)
def test_without_shared_memory_products_send_messages(comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank has no shared memory left, all ranks send messages.

    Also with check=False, which skips the comparison of arguments, but not this agreement.
    """
    S, C = (DistMatrix.random((40, 40), grid=grid, seed=s) for s in (1, 3))
    A, B = (DistMatrix.random((40, 40), grid=grid, seed=s).copy() for s in (1, 2))
    assert S.shared and not A.shared
    how: dict[str, Any] = {"algorithm": "summa", "shape": grid.shape}
    p = plan(A, B, C, **how)
    tight = plan(*(DistMatrix.zeros((40, 40), grid=grid) for _ in "ABC"), memory_limit=1000, **how)
    with pytest.raises(MemoryLimitError, match="memory limit 1000 bytes per rank is too small for matrices"):
        tight.execute(A, B, C)
    if comm.rank == 0:
        monkeypatch.setattr(grid.memory._heap, "block", lambda *_: None)
    for check in (True, False):
        pdgemm(1, A, B, 0, C, check=check, **how)
        assert C.report.mover == "ibcast"
        assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
        for carry_out in (partial(p.execute, A, B, C, check=check), p.prepare(A, B, C, check=check)):
            C.local[...] = np.nan
            carry_out()
            assert C.report.mover == "ibcast"
            assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
        old = C.allgather()
        # a plan by messages may move C, and then reads it only if it was not made for beta = 0
        assert p.problem.beta_is_zero and not p._for(A, B, C, None, shared=False).problem.beta_is_zero
        p.execute(A, B, C, beta=1, check=check)
        assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather(), 1, old) <= TOLERANCE
        before = C.local.copy()
        shared = plan(A, B, C, mover="shared", **how)
        for carry_out in (shared.execute, shared.prepare):
            with pytest.raises(NodeMemoryError):
                carry_out(A, B, C, check=check)
        with pytest.raises(NodeMemoryError, match="no room for .* that the ranks of the node share"):
            pdgemm(1, A, B, 0, C, mover="shared", check=check, **how)
        assert np.array_equal(C.local, before)
    D = pdgemm(1, S, S, **how)
    assert D.report.mover == "shared" and not D.shared


@pytest.mark.mpi(min_size=3)
def test_a_plan_is_not_carried_out_on_other_nodes(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def matrices(per_node: int) -> tuple[Any, ...]:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", str(per_node))
        grid = ProcessGrid(comm.Dup())
        return tuple(DistMatrix.random((30, 30), grid=grid, block=4, seed=s) for s in range(3))

    one, two, three = matrices(comm.size), matrices(2), matrices(3)
    for given, other in ((one, two), (two, one), (two, three)):
        p = Plan.from_json(plan(*given, algorithm="summa").to_json())
        p.execute(*given)
        if given[0].grid.nodes != other[0].grid.nodes:
            with pytest.raises(LayoutError, match="for other nodes"):
                p.execute(*other)


@pytest.mark.mpi(min_size=2)
def test_threads_multiply_on_communicators_of_their_own(comm: Any) -> None:
    """Two threads multiply at the same time, on two communicators of the same ranks, in one shared window."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI was started for one thread at a time")
    grids = [ProcessGrid(comm.Dup()) for _ in range(2)]

    def work(grid: Any, value: int) -> bool:
        A, B = (DistMatrix.from_function(lambda i, j: value, (30, 30), grid=grid, block=3) for _ in "AB")
        right = [(pdgemm(1, A, B, check=False).local == 30 * value**2).all() for _ in range(20)]
        return all(right)  # all products are carried out, even if one is wrong: no rank hangs

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(work, grids, (2, 3)))


@pytest.mark.mpi(min_size=3)
@every_grid
@pytest.mark.parametrize("per_node", [2, 3, 4])
def test_each_panel_crosses_to_each_node_once(comm: Any, per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel is sent once to each other node, and read in place by the other ranks of a node."""
    if per_node >= comm.size:
        pytest.skip("all ranks share memory")
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", str(per_node))
    own = comm.Dup()
    places = itertools.product(grid_shapes(comm.size), [1, -1])
    with ExitStack() as stack:
        grids = [stack.enter_context(ProcessGrid(own, x, ranks=range(own.size)[::order])) for x, order in places]
        assert grids[0].nodes == tuple(rank - rank % per_node for rank in range(comm.size))
        assert grids[0].node.size == min(per_node, comm.size - grids[0].nodes[comm.rank])
        assert grids[0].ranks_per_node == per_node
        varied = pairs(grids, BLOCKS, [(13, 8, 40), (29, 61, 300)])
        for number, (grid, blocks, mnk) in enumerate(varied[:: 1 if comm.size < 6 else 3]):
            orders = ("CCC", "FFF", "CFC")[number % 3]
            report = check_summa(grid, mnk, blocks, (0, 0), "float64", mover="shared", orders=orders)
            assert report.mover == "shared"
            crossing = own.allreduce(report.counted.words_received - report.counted.words_read)
            shape, k = grid.shape, mnk[2]
            nodes = np.array(grid.nodes)[np.array(grid.rank_map).reshape(shape)]
            rows = [len(set(x)) - 1 for x in nodes.tolist()]
            cols = [len(set(x)) - 1 for x in nodes.T.tolist()]
            C = Distribution.over(shape, mnk[:2], None if blocks[0] is None else (blocks[0], blocks[1]))
            of_a = sum(rows[i] * C.local_shape((i, 0))[0] for i in range(shape[0]))
            of_b = sum(cols[j] * C.local_shape((0, j))[1] for j in range(shape[1]))
            assert crossing == k * (of_a + of_b)
    own.Free()


@pytest.fixture
def windows_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that limits windows of partial sums to a number of elements, and clears cached plans."""

    def limit(elements: int) -> None:
        monkeypatch.setattr(reduction, "LARGEST_MESSAGE_BYTES", elements * 8)
        planner.best_plan.cache_clear()

    yield limit
    planner.best_plan.cache_clear()


@pytest.mark.mpi(min_size=2)
@every_grid
@pytest.mark.parametrize(("rows", "order"), in_turn([3, 40], "CF"))
def test_partial_sums_are_read_in_place(comm: Any, grid: Any, rows: int, order: Any, windows_of: Any) -> None:
    """By "inner" and "2.5d" with SUMMA inside: no messages, in one window of rows or several, also with idle ranks."""
    windows_of(rows * 29)
    grids: list[Any] = [("inner", None, None)]
    grids += [("2.5d", (pr, pc), c) for c in (2, 3) for pr in (1, 2, 3) for pc in (1, 2) if pr * pc * c <= comm.size]
    for algorithm, shape, layers in grids:
        layout: dict[str, Any] = {"grid": grid, "block": 4, "order": order}
        A, B, C = (DistMatrix.random(x, seed=s, **layout) for s, x in enumerate(((37, 90), (90, 29), (37, 29))))
        a, b, c = A.allgather(), B.allgather(), C.allgather()
        pdgemm(2, A, B, 1, C, algorithm=algorithm, shape=shape, layers=layers)
        assert gemm_error(C.allgather(), 2, a, b, 1, c) <= TOLERANCE
        report = C.report
        assert report.counted == report.predicted
        if report.inside != "cannon":
            assert report.mover == "shared"
            assert report.counted.messages_received == report.counted.messages_sent == 0
            assert algorithm == "2.5d" or report.panels == (13 if rows == 3 else 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late", ["reader", "writer"])
def test_sums_wait_for_late_ranks(comm: Any, late: str, windows_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the last rank adds late, or the first multiplies late, no rank reads or writes too early."""
    windows_of(4 * 20)
    owner, name = (layer_sums, "copy_blocks") if late == "reader" else (Accumulator, "add_wide")
    right, slow = getattr(owner, name), comm.size - 1 if late == "reader" else 0

    def delayed(*args: Any) -> None:
        sleep(0.003 * (comm.rank == slow))
        right(*args)

    monkeypatch.setattr(owner, name, delayed)
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A, B, C = (DistMatrix.random((20, 20), grid=grid, seed=seed) for seed in range(3))
        a, b = A.allgather(), B.allgather()
        for algorithm, alpha in itertools.product(("inner", "2.5d"), (1, -2)):
            pdgemm(alpha, A, B, 0, C, algorithm=algorithm)  # type: ignore[arg-type]
            assert max(comm.allgather(gemm_error(C.allgather(), alpha, a, b))) <= TOLERANCE
