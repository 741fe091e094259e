"""Plans: candidates, memory limits, and formulas that hold for any rank; one process, no MPI."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from tiers import examples
from tree_mover import BY_MESSAGES

from pdgemm.errors import MemoryLimitError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.planning import planner
from pdgemm.planning.algorithm_registry import algorithm_choices
from pdgemm.planning.machines.machine import Link, Machine
from pdgemm.planning.machines.simulator import product_seconds
from pdgemm.planning.planner import candidates
from pdgemm.planning.problem import Problem
from pdgemm.planning.product_plan import ProductPlan, with_moves
from pdgemm.planning.search.candidates import Arrangement, arrangements
from pdgemm.schedules.products import Inner, Summa

DOUBLE = np.dtype("d")
FORCED = algorithm_choices()


def plan_product(A: Layout, B: Layout, C: Layout, size: int, **options: Any) -> ProductPlan:
    accumulate = options.pop("accumulate")
    width = planner.panel_width(options.pop("panel_width", None), accumulate, options.get("machine", Machine()))
    plain, lookahead, mover = options.pop("plain", True), options.pop("lookahead", 1), options.pop("mover", "ibcast")
    return planner.plan_product(Problem(A, B, C, size, plain, accumulate, width, lookahead, mover, **options))


def test_the_width_of_panels() -> None:
    """On a device, rows of panels have equal bytes for every type; panels are narrow enough for exact sums of int8."""
    real, whole = np.dtype("f4"), np.dtype("i4")
    widths = {size: planner.panel_width(None, real, Machine(), size) for size in (0, 1, 2, 4, 8, 16)}
    assert widths == {0: 512, 1: 16384, 2: 8192, 4: 4096, 8: 2048, 16: 1024}
    assert planner.panel_width(300, real, Machine(), 2) == planner.panel_width(300, whole, Machine(), 1) == 300
    assert planner.panel_width(1 << 20, whole, Machine()) == 2**24 // 2**14
    assert 2**17 - 16 <= planner.panel_width(1 << 20, whole, Machine(), 1) < 2**17


def layout(grid: tuple[int, int], shape: tuple[int, int], **kinds: Any) -> Layout:
    block = kinds.pop("block", None)
    rank_map = kinds.pop("rank_map", tuple(range(grid[0] * grid[1])))
    return Layout(Distribution.over(grid, shape, block), rank_map, kinds.pop("dtype", DOUBLE), **kinds)


def square(n: int, q: int) -> tuple[Layout, Layout, Layout, int]:
    return layout((q, q), (n, n)), layout((q, q), (n, n)), layout((q, q), (n, n)), q * q


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, Layout, Layout, int]:
    """Draw layouts of A, B and C on any grids of up to 6 ranks."""
    size = draw(st.integers(1, 6))
    m, n, k = (draw(st.integers(0, 30)) for _ in "mnk")

    def one(shape: tuple[int, int]) -> Layout:
        pr = draw(st.integers(1, size))
        pc = draw(st.integers(1, size // pr))
        rank_map = draw(st.permutations(range(size)))[: pr * pc]
        whole = Distribution.over((pr, pc), (shape[0] + 3, shape[1] + 2), draw(st.tuples(*[st.integers(1, 9)] * 2)))
        i, j = draw(st.integers(0, 3)), draw(st.integers(0, 2))
        window = whole.window((i, i + shape[0]), (j, j + shape[1]))
        dtype = np.dtype(draw(st.sampled_from(["float32", "float64"])))
        return Layout(window, tuple(rank_map), dtype, draw(st.sampled_from("CF")))  # type: ignore[arg-type]

    return one((m, k)), one((k, n)), one((m, n)), size


@pytest.mark.parametrize("algorithm", ["summa", "cannon", "2.5d", "inner", "stationary_a", "stationary_b"])
@pytest.mark.parametrize(("size", "rank_map"), [(2, (0, 1)), (4, (2, 0, 3, 1)), (8, (*range(8),))])
def test_a_plans_own_layouts_need_no_redistribution(algorithm: str, size: int, rank_map: tuple[int, ...]) -> None:
    """For matrices in the layouts of a plan, the new plan has no redistribution and as many words."""
    q = 4 if size == 8 else 2
    given = [layout((size // q, q), (96, 96), rank_map=rank_map) for _ in "ABC"]
    options: dict[str, Any] = {"accumulate": DOUBLE, "algorithm": algorithm}
    plan = plan_product(*given, size, **options)
    again = plan_product(*Arrangement(plan.product, plan.transposed).layouts, size, **options)
    assert again.moves == ()
    assert again.total_words == plan.product.total_words


def test_without_a_limit_panels_have_the_width_asked_for() -> None:
    plan = plan_product(*square(4096, 2), accumulate=DOUBLE, panel_width=300, lookahead=2)
    assert isinstance(plan.product, Summa) and plan.product.widest <= 300
    assert plan.extra_bytes(0) == 3 * plan.product.widest * (2048 + 2048) * 8
    # one rank needs no buffers
    assert plan_product(*square(1000, 1), accumulate=DOUBLE, memory_limit=0).extra_bytes(0) == 0


@settings(max_examples=examples(300))
@given(problems(), st.integers(0, 3), st.integers(0, 20000), st.sampled_from(FORCED))
def test_the_limit_holds_on_every_rank_or_is_refused(
    problem: tuple[Layout, Layout, Layout, int], lookahead: int, limit: int, algorithm: str
) -> None:
    """A plan is within the limit on every rank, or the error names the least limit; sent words equal received words."""
    assume(problem[-1] > 1 or algorithm != "2.5d")  # a single rank has no layers
    options = {"accumulate": DOUBLE, "lookahead": lookahead, "algorithm": algorithm}
    try:
        plan = plan_product(*problem, memory_limit=limit, **options)
    except MemoryLimitError as refused:
        needed = int(str(refused).split("at least ")[1].split()[0])
        assert needed > limit
        plan, limit = plan_product(*problem, memory_limit=needed, **options), needed
    for rank in range(problem[-1]):
        assert plan.extra_bytes(rank) <= plan.extra_bytes(None) <= limit
    total = sum((plan.traffic(rank) for rank in range(problem[-1])), Traffic())
    assert total.words_sent == total.words_received == plan.total_words
    assert total.messages_sent == total.messages_received


def test_suitable_layouts_are_not_redistributed() -> None:
    """Only matrices in unsuitable layouts are redistributed."""
    A, B, C, size = square(100, 2)
    same, cyclic, rows, T = (layout((2, 2), (100, 100), block=x) for x in (50, 7, (7, 50), None))
    T = T.T
    for layouts, algorithm, chosen, moves in (
        ((A, B, C), "auto", "summa", [""]),
        ((A, B, same), "auto", "summa", [""]),  # other blocks, but every element on the same rank
        ((A, B, cyclic), "auto", "", ["C"]),  # to redistribute A and B would send more words
        ((rows, B, C), "auto", "", ["A", "C"]),
        ((T, B, C), "summa", "summa", ["A"]),
        ((T, B, C), "auto", "stationary_b", [""]),  # A is transposed
        ((T, T, T), "auto", "", [""]),
    ):
        plan = plan_product(*layouts, size, accumulate=DOUBLE, algorithm=algorithm)
        assert "".join(name for name, _ in plan.moves) in moves and plan.algorithm == (chosen or plan.algorithm)


def test_a_huge_inner_dimension_is_reduced_once() -> None:
    A, B = layout((8, 1), (10**6, 30)).T, layout((8, 1), (10**6, 30))
    C = layout((8, 1), (30, 30))
    plan = plan_product(A, B, C, 8, accumulate=DOUBLE)
    assert isinstance(plan.product, Inner) and (plan.moves, plan.total_words) == ((), 30 * 30 * 7)
    tall = layout((8, 1), (10**6, 30))  # m is huge: no reduction, only the small matrix is sent
    plan = plan_product(tall, C, tall, 8, accumulate=DOUBLE)
    assert (plan.shape, plan.moves, plan.total_words) == ((8, 1, 1), (), 30 * 30 * 7)
    # on a square grid, redistributing A and B to columns and rows saves words
    A, B, C = layout((2, 2), (30, 10**6)), layout((2, 2), (10**6, 30)), layout((2, 2), (30, 30))
    summa, inner = (plan_product(A, B, C, 4, accumulate=DOUBLE, algorithm=x) for x in ("summa", "inner"))
    assert inner.total_words < 0.63 * summa.total_words


def test_redistribution_may_save_memory() -> None:
    A, B, C = layout((1, 4), (10**5, 4)), layout((1, 4), (4, 100)), layout((1, 4), (10**5, 100))
    options: dict[str, Any] = {"accumulate": DOUBLE, "memory_limit": 400_000}
    alone, plan = (plan_product(A, B, C, 4, algorithm=x, **options) for x in ("inner", "auto"))
    assert (plan.product, plan.moves) == (alone.product, alone.moves)


def test_messages_and_panels_share_the_free_memory() -> None:
    """With little memory there are more messages, but never one for each element."""
    A, B, C = layout((2, 2), (1200, 1200)).T, layout((2, 2), (1200, 1200)), layout((2, 2), (1200, 1200))
    copy = 600 * 600 * 8
    for factor in (1.05, 1.1, 1.5, 2, 4):
        plan = plan_product(A, B, C, 4, accumulate=DOUBLE, memory_limit=int(copy * factor))
        assert plan.extra_bytes(None) <= copy * factor
        assert plan.traffic(1).messages_sent < 1000


def test_a_large_c_is_reduced_piece_by_piece() -> None:
    A, B, C = layout((1, 4), (20_000, 20_000)), layout((4, 1), (20_000, 20_000)), layout((2, 2), (20_000, 20_000))
    plan = plan_product(A, B, C, 4, accumulate=DOUBLE, algorithm="inner")
    assert not plan.moves
    assert plan.extra_bytes(None) < 5 * (1 << 26)  # C has 3.2 GB
    assert plan.total_words == 3 * 20_000**2


def test_between_nodes_more_panels_are_in_flight() -> None:
    one, several = Machine(), Machine(ranks_per_node=2)
    assert [planner.panels_ahead(None, x) for x in (one, several)] == [1, 4]
    assert [planner.panels_ahead(asked, several) for asked in (0, 7)] == [0, 7]
    assert planner.panels_ahead(None, several, on_device=True) == 1


def test_messages_stay_below_the_limits_of_mpi() -> None:
    for grid, m, k, widest in (((1, 2), 10**9, 1000, 1), ((2, 2), 2 * 10**6, 4096, (1 << 30) // 8 // 10**6)):
        A, B, C = layout(grid, (m, k)), layout(grid, (k, 10)), layout(grid, (m, 10))
        plan = plan_product(A, B, C, grid[0] * grid[1], accumulate=DOUBLE, algorithm="summa")
        assert isinstance(plan.product, Summa) and plan.product.widest <= widest


def test_default_mover_and_width(tree_mover: None) -> None:
    problem = square(4096, 4)
    fast, slow = Link(1e-6, 1e-10), Link(1e-3, 1e-8)
    for mover, other in itertools.permutations(BY_MESSAGES, 2):
        links = {**dict.fromkeys(BY_MESSAGES, slow), mover: fast}
        machine = replace(Machine(), intra={**Machine().intra, **links})
        options: dict[str, Any] = {"accumulate": DOUBLE, "algorithm": "summa", "machine": machine}
        plan = plan_product(*problem, mover="auto", **options)
        assert plan.product.mover == mover
        assert plan_product(*problem, mover=other, **options).product.mover == other  # as requested
    # if narrow panels cost nothing, they fill the pipeline sooner
    narrow = replace(Machine(), panel_overhead=0.0, overlap=1.0, copy_bandwidth=1e15)
    flat = {x: {8: 5e10} for x in ("float32", "float64")}
    options = {"accumulate": DOUBLE, "algorithm": "summa", "machine": replace(narrow, gamma=flat)}
    assert plan_product(*problem, width_asked=False, **options).product.width == planner.WIDTHS[-1]
    assert plan_product(*problem, width_asked=True, **options).product.width == planner.PANEL_WIDTH
    tight = plan_product(*problem, width_asked=False, memory_limit=10**6, mover="auto", **options)
    assert tight.extra_bytes(None) <= 10**6


@settings(max_examples=examples(100))
@given(problems(), st.sampled_from(["auto", "summa", "2.5d", "cannon"]), st.integers(1, 4))
def test_plans_come_cheapest_first_and_none_is_left_out(
    problem: tuple[Layout, Layout, Layout, int], algorithm: str, per_node: int
) -> None:
    assume(problem[-1] > 1 or algorithm != "2.5d")
    asked = Problem(*problem, True, DOUBLE, 512, 1, "ibcast", algorithm, machine=Machine(ranks_per_node=per_node))
    costs = [plan.cost for plan in candidates(asked)]
    assert costs == sorted(costs)
    assert sorted(with_moves(way, asked).cost for way in set(arrangements(asked))) == costs


def test_moves_count_twice() -> None:
    A, B, C, size = square(64, 2)
    plan = plan_product(replace(A, rank_map=(1, 0, 2, 3)), B, C, size, accumulate=DOUBLE, algorithm="cannon")
    product = max(product_seconds(plan.product, Machine(), rank) for rank in range(4))
    assert "A" in dict(plan.moves) and plan.seconds > product
    assert plan.cost == pytest.approx(2 * plan.seconds - product, rel=0.05)


def test_column_layouts_are_retained_if_that_saves_words() -> None:
    """For 1.2M x 6000 x 6000 in blocks of columns, SUMMA without redistribution would send 200 times the bound."""
    A, B, C = (layout((1, 16), shape) for shape in ((1_200_000, 6000), (6000, 6000), (1_200_000, 6000)))
    plan = plan_product(A, B, C, 16, accumulate=DOUBLE)
    assert (plan.shape, plan.algorithm) == ((16, 1, 1), "stationary_a")  # it takes B in columns
    assert [name for name, _ in plan.moves] == ["A", "C"]
    here = plan_product(A, B, C, 16, accumulate=DOUBLE, shape=(1, 16), algorithm="summa")
    assert plan.words < here.words / 7


def test_under_a_limit_the_chosen_plan_is_nearly_fastest() -> None:
    shapes = (2000, 3000), (3000, 500), (2000, 500)
    A, B, C = (layout((1, 8), shape) for shape in shapes)
    for limit in (600_000, 2_611_715, 20_000_000):
        plan = plan_product(A, B, C, 8, accumulate=DOUBLE, memory_limit=limit)
        fitted = [planner.fit(x, limit) for x in candidates(plan.problem)]
        assert plan.cost <= 1.1 * min(x.cost for x in fitted if planner.fits_in_memory(x, limit))
        assert plan.extra_bytes(None) <= limit
