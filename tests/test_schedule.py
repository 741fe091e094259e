"""The panels of SUMMA, and the formulas that count them: one process, no MPI."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdgemm.costs import gemm_flops, summa_traffic
from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.planner import Plan, plan_summa
from pdgemm.schedule import PanelStep, summa_steps
from pdgemm.timing import Traffic


@st.composite
def inner_pairs(draw: st.DrawFn) -> tuple[BlockCyclic, BlockCyclic]:
    """How A's columns and B's rows are dealt: the same n, all else free."""
    n = draw(st.integers(0, 60))

    def one() -> BlockCyclic:
        parts = draw(st.integers(1, 5))
        return BlockCyclic(n, draw(st.integers(1, 12)), parts, draw(st.integers(0, parts - 1)))

    return one(), one()


widths = st.integers(1, 30)


@given(inner_pairs(), widths)
def test_every_inner_index_is_multiplied_exactly_once(pair: tuple[BlockCyclic, BlockCyclic], width: int) -> None:
    inner_a, inner_b = pair
    seen = []
    for step in summa_steps(inner_a, inner_b, width):
        in_a = inner_a.to_global(step.a.indices(), step.col)
        in_b = inner_b.to_global(step.b.indices(), step.row)
        assert in_a.tolist() == in_b.tolist()  # A's columns meet B's rows
        assert (inner_a.owner(in_a) == step.col).all()
        assert (inner_b.owner(in_b) == step.row).all()
        assert len(in_a) == step.width == step.a.size == step.b.size
        seen.extend(in_a.tolist())
    assert sorted(seen) == list(range(inner_a.n))


@given(inner_pairs(), widths)
def test_panels_are_as_few_as_the_width_allows_and_nearly_equal(
    pair: tuple[BlockCyclic, BlockCyclic], width: int
) -> None:
    by_owners: dict[tuple[int, int], list[int]] = {}
    for step in summa_steps(*pair, width):
        by_owners.setdefault((step.col, step.row), []).append(step.width)
    for panels in by_owners.values():
        assert max(panels) <= width
        assert max(panels) - min(panels) <= 1
        assert len(panels) == -(-sum(panels) // width)


@given(inner_pairs(), widths)
def test_runs_are_maximal(pair: tuple[BlockCyclic, BlockCyclic], width: int) -> None:
    for step in summa_steps(*pair, width):
        for runs in (step.a, step.b):
            assert (runs.lengths > 0).all()
            assert (runs.starts[1:] > runs.starts[:-1] + runs.lengths[:-1]).all()


def test_equal_cyclic_layouts_give_one_wide_panel_per_owner() -> None:
    inner = BlockCyclic(4096, 64, 4)
    steps = summa_steps(inner, inner, 10**6)
    assert [step.width for step in steps] == [1024] * 4
    assert all(step.a.single and step.b.single for step in steps)


def test_owners_take_turns() -> None:
    inner = BlockCyclic.even(4096, 2)
    assert [step.col for step in summa_steps(inner, inner, 512)] == [0, 1] * 4


# ------------------------------------------------------------------ costs
@st.composite
def products(draw: st.DrawFn) -> tuple[Distribution, Distribution]:
    """A and B on one grid."""
    grid = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    m, n, k = (draw(st.integers(0, 30)) for _ in "mnk")
    block = st.tuples(st.integers(1, 9), st.integers(1, 9))
    source = st.tuples(st.integers(0, grid[0] - 1), st.integers(0, grid[1] - 1))
    return (
        Distribution.over(grid, (m, k), draw(block), draw(source)),
        Distribution.over(grid, (k, n), draw(block), draw(source)),
    )


def counted(
    A: Distribution, B: Distribution, steps: tuple[PanelStep, ...], mover: str, coords: tuple[int, int]
) -> Traffic:
    """The traffic of one rank, message by message."""
    traffic = Traffic()
    for inner, breadth, owners in (
        (A.cols, A.rows.count(coords[0]), [s.col for s in steps]),
        (B.rows, B.cols.count(coords[1]), [s.row for s in steps]),
    ):
        me = coords[1] if inner is A.cols else coords[0]
        for step, root in zip(steps, owners, strict=True):
            words = breadth * step.width
            if inner.parts == 1 or words == 0:
                continue
            if me != root:
                traffic.received(words)
            if mover == "ring":
                if (me + 1) % inner.parts != root:
                    traffic.sent(words)
            elif me == root:
                traffic.sent(words, copies=inner.parts - 1)
    return traffic


@given(products(), widths, st.sampled_from(["ibcast", "ring"]))
def test_formula_equals_counting_and_nothing_is_lost(
    product: tuple[Distribution, Distribution], width: int, mover: str
) -> None:
    A, B = product
    steps = summa_steps(A.cols, B.rows, width)
    every = [(i, j) for i in range(A.rows.parts) for j in range(A.cols.parts)]
    total = Traffic()
    for coords in every:
        formula = summa_traffic(A, B, steps, mover, coords)
        assert formula == counted(A, B, steps, mover, coords)
        total = total + formula
    assert total.words_sent == total.words_received
    assert total.messages_sent == total.messages_received
    (m, k), n = A.shape, B.shape[1]
    assert total.words_received == m * k * (A.cols.parts - 1) + k * n * (B.rows.parts - 1)


def test_flops() -> None:
    assert gemm_flops(2, 3, 4) == 48
    assert gemm_flops(2, 3, 4, complex_=True) == 192


# ------------------------------------------------------------------ planning
def square(n: int, q: int) -> tuple[Distribution, Distribution]:
    return Distribution.over((q, q), (n, n)), Distribution.over((q, q), (n, n))


def test_without_a_limit_panels_have_the_width_asked_for() -> None:
    plan = plan_summa(*square(4096, 2), np.dtype("d"), panel_width=300, lookahead=2)
    assert plan.width == 300
    widest = max(step.width for step in plan.steps)
    assert plan.extra_bytes((0, 0)) == 3 * widest * (2048 + 2048) * 8


@given(products(), st.integers(0, 3), st.integers(0, 20000))
def test_the_limit_holds_on_every_rank_or_is_refused(
    product: tuple[Distribution, Distribution], lookahead: int, limit: int
) -> None:
    A, B = product
    dtype = np.dtype("d")
    try:
        plan = plan_summa(A, B, dtype, lookahead=lookahead, memory_limit=limit)
    except MemoryLimitError as refused:
        needed = Plan(A, B, dtype, 1, lookahead, "ibcast").largest_extra_bytes
        assert needed > limit
        assert f"at least {needed} bytes" in str(refused)
        assert plan_summa(A, B, dtype, lookahead=lookahead, memory_limit=needed)
        return
    for coords in [(i, j) for i in range(A.rows.parts) for j in range(A.cols.parts)]:
        assert plan.extra_bytes(coords) <= limit


def test_nothing_is_buffered_on_one_rank() -> None:
    assert plan_summa(*square(1000, 1), np.dtype("d"), memory_limit=0).extra_bytes((0, 0)) == 0


def test_messages_stay_below_the_limits_of_mpi() -> None:
    tall = Distribution.over((1, 2), (10**9, 1000)), Distribution.over((1, 2), (1000, 10))
    plan = plan_summa(*tall, np.dtype("d"))
    assert plan.width * 10**9 * 8 <= 8 * 10**9
    wide = Distribution.over((2, 2), (2 * 10**6, 4096)), Distribution.over((2, 2), (4096, 10))
    assert plan_summa(*wide, np.dtype("d")).width * 10**6 * 8 <= 1 << 30


@pytest.mark.parametrize("options", [{"lookahead": -1}, {"panel_width": 0}])
def test_impossible_options(options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        plan_summa(*square(10, 2), np.dtype("d"), **options)
