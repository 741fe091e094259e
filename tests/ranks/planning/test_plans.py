"""Plans: figures, JSON form, and execution."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from allgather_3d import ENTRY
from problems import TOLERANCE, accepted, gemm_error
from tiers import everything, in_turn, square_grid
from tree_mover import BY_MESSAGES

from pdgemm import DistMatrix, Plan, ProcessGrid, pdgemm, plan
from pdgemm.algorithms import prepared
from pdgemm.algorithms.plan_workspace import Workspace
from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError, MemoryLimitError, PdgemmError
from pdgemm.grids import process_grid
from pdgemm.planning.algorithm_registry import families
from pdgemm.planning.machines.machine import Machine, on_nodes
from pdgemm.planning.question import Question

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("allgather_3d")]


def matrices(grid: Any, mnk: tuple[int, int, int], block: Any = 3, dtype: str = "float64") -> tuple[Any, Any, Any]:
    m, n, k = mnk
    made: dict[str, Any] = {"grid": grid, "block": block, "dtype": dtype}
    A = DistMatrix.random((m, k), seed=1, **made)
    return A, DistMatrix.random((k, n), seed=2, **made), DistMatrix.random((m, n), seed=3, **made)


def test_planned_figures_equal_those_of_the_run(comm: Any, grid: Any) -> None:
    A, B, C = matrices(grid, (40, 30, 50))
    a, b = A.allgather(), B.allgather()
    p = plan(A, B, C)
    for _ in range(3):
        C.local[...] = np.nan
        assert p.execute(A, B, C) is C
        assert gemm_error(C.allgather(), 1, a, b) <= TOLERANCE
        assert C.report.counted == p.traffic(comm.rank)
        assert C.report.extra_bytes == p.extra_bytes(comm.rank)
        assert C.report.predicted_seconds == p.seconds > 0
        assert C.report.lower_bound_words == p.lower_bound_words
        assert C.report.inside == p.inside and (comm.rank or p.inside in str(C.report))
    before = C.allgather()
    p = plan(A, B, C, beta=1)
    p.execute(A, B, C, alpha=2, beta=-1)
    assert gemm_error(C.allgather(), 2, a, b, -1, before) <= TOLERANCE
    p.execute(A, B, C, alpha=0, beta=0)
    assert not C.allgather().any()
    C.local[...] = 3
    plan(A[:, :0], B[:0], C, beta=2).execute(A[:, :0], B[:0], C, beta=2)  # k = 0
    assert (C.allgather() == 6).all()
    slow = replace(Machine(), call_overhead=100.0)  # ranks with other machine files get the same plan
    plan(A, B, C, algorithm="row", machine=slow if comm.rank else None)


@square_grid
@pytest.mark.parametrize(
    ("algorithm", "mover"), in_turn([*families(), ENTRY.name], ["auto", *BY_MESSAGES]), indirect=["mover"]
)
def test_a_prepared_product_reads_current_elements(comm: Any, algorithm: str, mover: str) -> None:
    """A prepared product reads the current elements of its matrices, also after its grid was evicted from the cache."""
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    if not cases:
        pytest.skip("one rank has no layers")
    with ProcessGrid(comm) as grid, ProcessGrid(comm, (comm.size, 1)) as other:
        A = DistMatrix.random((31, 22), grid=grid, block=3, seed=1)
        B = DistMatrix.random((27, 31), grid=other, block=(5, 2), seed=2, order="F")
        C = DistMatrix.random((22, 27), grid=grid, block=(4, 5), seed=3)
        for number, (_, shape, layers) in enumerate(cases[: 4 if everything() else 2]):
            A = A if number % 2 else A.copy()  # in shared memory, or a private copy
            p = plan(A.T, B.T, C, beta=1, algorithm=algorithm, shape=shape, layers=layers, mover=mover, panel_width=4)
            product = p.prepare(A.T, B.T, C, alpha=2)
            for turn, beta in enumerate((0, 1, -0.5, 0)):
                A.local[...] += turn
                B.local[...] -= turn
                if beta == 0:
                    C.local[...] = np.nan
                before = C.allgather()
                assert product(beta) is C
                assert gemm_error(C.allgather(), 2, A.allgather().T, B.allgather().T, beta, before) <= TOLERANCE
                assert C.report.counted == product.plan.traffic(comm.rank)
                assert C.report.extra_bytes == product.plan.extra_bytes(comm.rank)
                if turn == 1:
                    for ranks in range(12):  # evict the grid of the product
                        places = [(rank + ranks) % comm.size for rank in range(comm.size)]
                        grid.work_grid((1, comm.size), 1, tuple(places))
            with pytest.raises(DTypeError, match="beta must be a number"):
                product("x")  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="the plan was made for"):
            plan(A.T, B.T, C).prepare(A.T, B.T, DistMatrix.zeros((22, 27), grid=grid, block=7))
        moved = plan(A.T, B.T, C, algorithm="summa", shape=(comm.size, 1))
        if any(name == "C" for name, _ in moved.moves):
            with pytest.raises(ArgumentError, match="the plan was made for beta = 0"):
                moved.prepare(A.T, B.T, C)(1)
        pdgemm(1, A.T, B.T, 0, C)


def test_a_prepared_product_allocates_nothing(comm: Any, grid: Any, tree_mover: None) -> None:
    """A prepared product reuses views, buffers and calls of BLAS, for every mover."""
    A, B, C = (DistMatrix.random((200, 200), grid=grid, block=8, seed=s) for s in (1, 2, 3))
    for mover in ("auto", *BY_MESSAGES):
        product = plan(A, B, C, algorithm="summa", shape=grid.shape, mover=mover).prepare(A, B, C)
        product()
        tracemalloc.start()
        for _ in range(3):
            product()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 20_000


def test_every_plan_survives_json(comm: Any, grid: Any) -> None:
    operands = []
    for dtype in ("float64", "bfloat16", "complex64", "int8"):
        made = dtype if dtype in ("float64", "complex64") else "float32"
        A, B, _ = (x.astype(dtype) for x in matrices(grid, (20, 12, 9), dtype=made))
        operands.append((A, B, pdgemm(0, A, B)))
    cases = [("auto", None, None)] * len(operands) + accepted(comm.size)
    for (algorithm, shape, layers), (A, B, C) in zip(cases, itertools.cycle(operands)):
        p = plan(A.T, B, transa="T", algorithm=algorithm, shape=shape, layers=layers, memory_limit=10**6)
        again = Plan.from_json(p.to_json())
        assert again == p
        assert again.traffic(comm.rank) == p.traffic(comm.rank)
        again.execute(A, B, C)
        assert C.report.algorithm == p.algorithm
    text = p.to_json()
    broken = ["", "[]", "{}", "[" * 100_000, text[:-5]]
    broken += [text.replace('"rows"', '"lows"'), text.replace("Plan", "Exec")]
    broken += ['{"is": "Plan", "product": 5, "transposed": "x", "moves": 7, "problem": null}']
    broken += [text.replace('"transposed": false', f'"transposed": {x}') for x in ("0", "null", '"no"')]
    broken += [text.replace('"lookahead": ', '"lookahead": 0.'), text.replace('"parts": ', '"parts": 1' + 30 * "0")]
    broken += ['{"is": "range", "start": 0, "stop": 100000000000}']
    for bad in broken:
        if bad != text:
            with pytest.raises(ArgumentError, match="not"):
                Plan.from_json(bad)


def test_explain_shows_the_choice_first(comm: Any, grid: Any) -> None:
    p = plan(*matrices(grid, (60, 60, 60), None), memory_limit=16_000)
    candidates, text = p.candidates(), p.explain(all=True)
    assert [x.chosen for x in candidates] == [True] + [False] * (len(candidates) - 1)
    assert text.count("  chosen\n") == 1 and str(p) in " ".join(text.split())
    assert ("too big" in text) == (comm.size > 1)


@pytest.mark.parametrize("mover", ["auto", "mpi", "ring"])
def test_a_plan_by_extents_is_that_of_matrices_made_by_default(comm: Any, grid: Any, mover: str) -> None:
    machine = on_nodes(Machine(), grid.ranks_per_node)
    for m, n, k in ((64, 64, 64), (2000, 30, 500), (7, 5, 9000), (300, 0, 4), (20, 30, 0)):
        A, B, C = (DistMatrix.empty(shape, grid=grid) for shape in ((m, k), (k, n), (m, n)))
        p = plan(A, B, C, mover=mover, machine=machine)
        assert p == Question(m, n, k, comm.size, mover=mover, machine=machine).plan()


def test_repeated_products_set_up_nothing(comm: Any, grid: Any) -> None:
    """Grids of products are created once, and at most WORK_GRIDS of them are cached."""
    A, B, C = matrices(grid, (24, 24, 24))
    kept = grid._shared.work_grids
    cases = accepted(comm.size)
    for _ in range(2):
        for algorithm, shape, layers in cases:
            pdgemm(1, A, B, 0, C, algorithm=algorithm, shape=shape, layers=layers)
            before = dict(kept)
            pdgemm(1, A, B, 0, C, algorithm=algorithm, shape=shape, layers=layers)
            assert kept == before
            assert len(kept) <= process_grid.WORK_GRIDS


def test_plans_refuse_other_matrices(comm: Any, grid: Any) -> None:
    A, B, C = matrices(grid, (12, 12, 12))
    p = plan(A, B, C)
    other = DistMatrix.zeros((12, 12), grid=grid, block=5)
    if comm.size > 1:
        for wrong in ((other, B, C), (A, B, other), (A, B.astype("float32"), C)):
            with pytest.raises((LayoutError, DTypeError), match="the plan was made for"):
                p.execute(*wrong)
        with ProcessGrid(comm, (1, comm.size)) as columns:  # after the product, C has to be redistributed
            wide = DistMatrix.zeros((12, 12), grid=columns)
            moving = plan(A, B, wide, algorithm="row")
            assert "C" in [name for name, _ in moving.moves]
            with pytest.raises(ArgumentError, match=r"plan\(..., beta=1\)"):
                moving.execute(A, B, wide, beta=1)
    many = replace(p, problem=replace(p.problem, size=comm.size + 1))
    with pytest.raises(GridError, match=f"made for {comm.size + 1} ranks"):
        many.execute(A, B, C)
    with pytest.raises(DTypeError, match="C must be a DistMatrix"):
        p.execute(A, B, None)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="B must be a DistMatrix"):
        p.execute(A, np.zeros((12, 12)), C)
    with pytest.raises(ArgumentError, match="shares memory"):
        p.execute(A, A, A)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"machine": 5}, "machine must be a Machine"),
    ({"mover": ["ring"]}, "mover .* is not one of"),
    ({"algorithm": "strassen"}, "is not one of auto, summa"),
    ({"shape": (0, 1)}, "Pr must be >= 1"),
    ({"shape": 3}, "shape must be a pair"),
    ({"layers": -1}, "layers must be >= 1"),
    ({"layers": 1.5}, "layers is a whole number"),
    ({"shape": (99, 99)}, "is impossible on"),
    ({"algorithm": "cannon", "shape": (2, 3)}, "one side of its grid divides the other|is impossible"),
    ({"algorithm": "2.5d", "layers": 99}, "Pr x Pc x layers <="),
    ({"algorithm": "row", "shape": (1, 99)}, "its grid is"),
    ({"algorithm": "inner", "layers": 77}, "its grid is 1 x 1"),
    ({"algorithm": "allgather", "layers": 2}, "allgather .*is impossible on . ranks?: its grid is"),
    ({"algorithm": "reduce_scatter", "shape": (1, 99)}, "reduce_scatter .*is impossible on"),
    ({"memory_limit": 1, "algorithm": "row"}, "bytes are needed, .* more"),
]


def test_impossible_plans_are_refused_on_all_ranks_alike(comm: Any, grid: Any) -> None:
    A, B, C = matrices(grid, (12, 12, 12))
    before = C.local.copy()
    for asked, message in IMPOSSIBLE[: -1 if comm.size == 1 else None]:
        for call in (lambda x=asked: pdgemm(1, A, B, 0, C, **x), lambda x=asked: plan(A, B, C, **x)):
            with pytest.raises(PdgemmError, match=message) as refused:
                call()
            assert len(set(comm.allgather(str(refused.value)))) == 1
    assert np.array_equal(C.local, before)


def test_the_limit_is_kept_at_every_size_down_to_the_smallest(comm: Any, grid: Any) -> None:
    A, B, C = matrices(grid, (37, 41, 53), 4)
    a, b = A.allgather(), B.allgather()
    for algorithm, shape, layers in accepted(comm.size):
        asked: dict[str, Any] = {"algorithm": algorithm, "shape": shape, "layers": layers}
        limit = 1 << 20
        while True:
            try:
                pdgemm(1, A, B, 0, C, memory_limit=limit, **asked)
            except MemoryLimitError as refused:
                least = int(str(refused).split("at least ")[1].split()[0])
                assert f"{least - limit} more" in str(refused)
                pdgemm(1, A, B, 0, C, memory_limit=least, **asked)
                assert C.report.extra_bytes <= least
                break
            assert C.report.extra_bytes <= limit
            if limit == 0:
                break
            limit //= 32
        assert gemm_error(C.allgather(), 1, a, b) <= TOLERANCE


def test_a_repeated_product_reuses_its_views(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C caches the views of its last product while A and B exist; after any change the result is right."""
    made: list[object] = []
    make = prepared.executor_of
    monkeypatch.setattr(prepared, "executor_of", lambda call: made.append(call.alpha) or make(call))

    def random(seed: int) -> DistMatrix:
        return DistMatrix.random((300, 300), grid=grid, seed=seed)

    def check(alpha: complex, A: DistMatrix, B: DistMatrix, beta: complex, expected: int) -> None:
        made.clear()
        old = C.allgather()
        pdgemm(alpha, A, B, beta, C, algorithm="summa", shape=grid.shape)
        assert gemm_error(C.allgather(), alpha, A.allgather(), B.allgather(), beta, old) <= TOLERANCE
        assert len(made) == expected

    with ProcessGrid(comm) as grid:
        A, B, C = (random(seed) for seed in range(3))
        check(1, A, B, 0, 1)
        A.local[...] += 1
        check(1, A, B, 2, 0)
        check(3, A, B, 0, 1)  # another alpha: new views
        check(3, B, A, 0, 1)
        check(3, B, A, 1, 0)
        check(3, B, A[:, :], 1, 0)  # a view of all of A: the same elements
        wide = np.random.default_rng(comm.rank).random((A.local.shape[0], 2 * A.local.shape[1]))
        close, far = wide.reshape(-1)[: A.local.size].reshape(A.local.shape), wide[:, : A.local.shape[1]]
        lying = [DistMatrix.from_local(x, A.shape, grid=grid, block=A.block) for x in (close, far)]
        for X in lying:  # same address, other distance between rows
            check(3, X, B, 0, 1)
        check(5, B, A, 1, 1)
        place = A.local.ctypes.data
        gc.disable()
        try:
            del A
            assert C.last_run is None
            others = [random(seed) for seed in range(5, 9)]  # one of them gets A's old address
        finally:
            gc.enable()
        found = comm.allreduce(any(x.local.ctypes.data == place for x in others))
        assert found or comm.size == 1
        for x in others:
            check(3, B, x, 0, 1)


def test_buffers_are_freed_after_the_call(comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All buffers of a product are freed at its end by reference counts, not by the garbage collector."""
    alive: list[Any] = []
    buffers = Workspace.__init__

    def seen(self: Any, *args: Any) -> None:
        buffers(self, *args)
        alive.append(weakref.ref(self))
        alive.extend(weakref.ref(x) for x in self.product.values() if x.nbytes > prepared.SMALL)

    monkeypatch.setattr(Workspace, "__init__", seen)
    A, B, C = (DistMatrix.random((300, 300), grid=grid, block=7, seed=seed) for seed in range(3))
    gc.disable()
    try:
        for algorithm, shape, layers in accepted(comm.size):
            alive.clear()
            pdgemm(1, A, B, 0, C, algorithm=algorithm, shape=shape, layers=layers)
            assert alive
            assert not [x() for x in alive if x() is not None], algorithm
    finally:
        gc.enable()
