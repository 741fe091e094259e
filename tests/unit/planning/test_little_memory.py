"""Plans for little memory, and of huge products, are computed by formulas: one process, no MPI."""

from __future__ import annotations

import itertools

import pytest
from drawn_problems import inner_pairs, widths
from hypothesis import given, settings, strategies as st
from tiers import examples

from pdgemm.errors import MemoryLimitError
from pdgemm.planning.machines.machine import Machine, on_nodes
from pdgemm.planning.planner import best_plan
from pdgemm.planning.question import MOST_TRIED, Question
from pdgemm.schedules import node_relay, steps
from pdgemm.schedules.node_relay import NodeLine, Parts, _floor_sum, parts_by_number, relayed
from pdgemm.schedules.products.reduction import Reduction
from pdgemm.schedules.steps import in_one_run_each, summa_steps

MOST_STEPS = 10_000  # steps of a few products on thousands of ranks with one panel per pair of owners
NODES = on_nodes(Machine(), 16)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a counter of panel steps that a plan lists, at most MOST_STEPS; listing windows is an error."""
    seen = [0]

    class Counted(steps.PanelStep):
        def __new__(cls, *fields: object, **named: object) -> Counted:  # type: ignore[misc]
            seen[0] += 1
            assert seen[0] <= MOST_STEPS
            return super().__new__(cls, *fields, **named)  # type: ignore[arg-type]

    def turned(self: Reduction, rank: int) -> list[object]:
        raise AssertionError("the windows of a reduction are counted, and not listed")

    monkeypatch.setattr(steps, "PanelStep", Counted)
    monkeypatch.setattr(Reduction, "windows", turned)
    steps.summa_steps.cache_clear()
    return seen


@pytest.mark.parametrize(
    ("n", "ranks", "memory", "machine"),
    [
        (10**5, 4, 1 << 20, Machine()),
        (10**5, 64, 10 << 30, NODES),
        (10**9, 4, 10 << 30, Machine()),
        (10**9, 64, None, NODES),
        (10**9, 64, 1 << 57, NODES),
        (10**5, 1024, 100 << 20, NODES),
    ],
)
def test_no_plan_walks_through_its_panels(
    n: int, ranks: int, memory: int | None, machine: Machine, walked: list[int]
) -> None:
    question = Question(n, n, n, ranks, memory=memory, machine=machine)
    lacking = question.shortage()
    if lacking:
        assert memory is not None and question.least_bytes > memory
        with pytest.raises(MemoryLimitError, match="at least .* are needed"):
            question.plan()
        more = question.on_more_ranks()
        if more is None:
            assert question.least_ranks > MOST_TRIED
        else:
            assert more.plan().extra_bytes(None) + more.given_bytes == more.least_bytes <= memory
            assert more.ranks >= question.least_ranks and more.ranks % ranks == 0
    else:
        assert question.candidates()[0].memory_bytes_per_rank == question.least_bytes <= (memory or 1 << 80)
        assert question.on_more_ranks() is None or memory is not None


@settings(max_examples=examples(300), deadline=None)
@given(inner_pairs(), widths, st.lists(st.integers(0, 3), min_size=5, max_size=5), st.integers(1, 3))
def test_relayed_panels_by_formula(
    pair: tuple[steps.BlockCyclic, steps.BlockCyclic], width: int, nodes: list[int], times: int
) -> None:
    """Counts by formula equal those of single panels; so does the test whether each panel is one run."""
    panels = summa_steps(*pair, width)
    assert in_one_run_each(*pair, width) == all(x.a.contiguous for x in panels)
    assert in_one_run_each(*reversed(pair), width) == all(x.a.contiguous for x in summa_steps(*reversed(pair), width))
    one_by_one = (
        Parts.of(([(x.col, x.a)], x.a) for x in panels),
        Parts.of(([(x.row, x.b)], x.b) for x in panels),
    )
    for operand, inner in enumerate(pair):
        line = NodeLine(tuple(nodes[: inner.parts]))
        parts = parts_by_number(*pair, width, times * line.period)[operand]
        for me in range(inner.parts):
            assert relayed(7, parts, line, me) == relayed(7, one_by_one[operand], line, me)


def test_counts_of_a_long_product_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts by the period of panels, and by walking through all panels, are equal for each rank."""
    found = []
    for walks in (False, True):
        plan = Question(
            3000, 2000, 9000, 12, algorithm="summa", shape=(3, 4), width=8, machine=on_nodes(Machine(), 4)
        ).plan()
        if walks:
            monkeypatch.setattr(node_relay.NodeLine, "period", 1 << 40)
        assert plan.product.nodes
        found.append([plan.product.traffic(rank) for rank in range(12)])
        best_plan.cache_clear()
    assert found[0] == found[1]
    assert sum(x.messages_sent for x in found[0]) == sum(x.messages_received for x in found[0]) > 9000 // 8


def test_floor_sums() -> None:
    for n, m, a, b in itertools.product(range(6), range(1, 7), range(8), range(9)):
        assert _floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))
    assert _floor_sum(10**9, 7, 7, 0) == 10**9 * (10**9 - 1) // 2


def test_idle_ranks_are_printed() -> None:
    """On a prime number of ranks a plan leaves some idle, and says so."""
    some, all_busy = (Question(20_000, 20_000, 20_000, ranks).plan() for ranks in (1021, 1024))
    assert "on 1021 ranks by 2.5d (summa) on 10 x 10 x 10 (21 ranks idle), redistributing" in str(some)
    assert "idle" not in str(all_busy)
