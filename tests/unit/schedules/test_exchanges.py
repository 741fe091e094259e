"""Schedules of exchanges: their formulas equal sums over their rounds, and the simulation."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.grids.rectangles import Rectangle
from pdgemm.planning.machines.machine import Link, Machine
from pdgemm.planning.machines.simulator import simulate, words_between
from pdgemm.planning.machines.timing import fastest_exchange
from pdgemm.schedules.exchanges.exchange import plan_exchange
from pdgemm.schedules.exchanges.inherited_exchange import plan_inheritance
from pdgemm.schedules.exchanges.rectangle_exchange import plan_rectangles
from pdgemm.schedules.exchanges.redistribution import Redistribution
from pdgemm.schedules.schedule import Schedule

SIZE, SHAPE = 6, (23, 17)
GRIDS = [(1, 6), (2, 3), (6, 1), (2, 2), (1, 1)]


def layout(grid: tuple[int, int], block: int, seed: int, order: str = "C") -> Layout:
    ranks = np.random.default_rng(seed).permutation(SIZE)[: grid[0] * grid[1]]
    rows, cols = (BlockCyclic(n, block, parts) for n, parts in zip(SHAPE, grid))
    return Layout(Distribution(rows, cols), tuple(ranks.tolist()), np.dtype(np.float32), order)  # type: ignore[arg-type]


def summed(schedule: Redistribution, size: int = SIZE) -> None:
    """Check that the formulas of an exchange equal sums over its rounds, and the simulation."""
    for rank in range(size):
        assert schedule.traffic(rank) == Schedule.traffic(schedule, rank), rank
    assert schedule.total_words == sum(schedule.traffic(rank).words_received for rank in range(size))
    words = words_between(schedule, size)
    assert words.sum() == schedule.total_words and not words.diagonal().any()
    run = simulate(schedule, Machine(), size)
    assert [run.traffic(rank) for rank in range(size)] == [schedule.traffic(rank) for rank in range(size)] or (
        schedule.shared and not run.words_received.any()
    )


@pytest.mark.parametrize(("limit", "shared"), [(None, False), (None, True), (0, False), (300, True)])
def test_between_layouts(limit: int | None, shared: bool) -> None:
    for number, (one, other) in enumerate(product(GRIDS, GRIDS)):
        source = layout(one, 1 + number % 5, number)
        target = layout(other, 1 + number % 3, number + 1, "CF"[number % 2])
        summed(plan_exchange(source, target, SIZE, memory_limit=limit, shared=shared))


def test_out_of_inherited_arrays() -> None:
    for number, (one, other) in enumerate(product(GRIDS, GRIDS[3:])):
        target = layout(other, 2, 3)
        target = Layout(target.distribution, tuple(range(len(target.rank_map))), target.dtype)
        summed(plan_inheritance(layout(one, 3, number), target, 4, (0, 1, 2, 3, 1, 3)), 4)


@pytest.mark.parametrize("inward", [True, False])
def test_with_rectangles(inward: bool) -> None:
    cuts = ((0, 5), (5, 6), (6, 6), (6, 14), (14, 20), (20, 23))
    rectangles = tuple((((lo, hi), (0, 9)), ((lo, hi), (9, 17))) for lo, hi in cuts)

    held = tuple(tuple(Rectangle(*x) for x in each) for each in rectangles)
    for number, grid in enumerate(GRIDS):
        summed(plan_rectangles(held, layout(grid, 4, number), inward, "C"))


@pytest.mark.parametrize("per_node", [1, 5, 8, 24])
def test_between_nodes(per_node: int) -> None:
    """Fewer messages than pairs of nodes, the same words that change their node, and every word once on its rank."""
    size, shape = 48, (50, 61)
    nodes = tuple((np.arange(size) // per_node * per_node).tolist())
    sides = ((1, 48), 1), ((6, 8), 4), ((48, 1), 3), ((4, 7), 2)
    for (one, block), (other, size_of_block) in product(sides, sides):
        source, target = (
            Layout(Distribution.over(grid, shape, b), tuple(range(grid[0] * grid[1])), np.dtype(np.float64))
            for grid, b in ((one, block), (other, size_of_block))
        )
        direct = plan_exchange(source, target, size)
        joined = direct.joined(nodes)
        traffic = [joined.traffic(rank) for rank in range(size)]
        assert traffic == [Schedule.traffic(joined, rank) for rank in range(size)]
        pairs = words_between(direct, size)
        across = pairs[np.array(nodes)[:, None] != np.array(nodes)].sum()
        assert sum(x.words_sent for x in traffic) == across == sum(x.words_received - x.words_read for x in traffic)
        number = len({*nodes})
        assert sum(x.messages_sent for x in traffic) <= number * (number - 1)
        assert joined.extra_bytes(None) == max(joined.extra_bytes(rank) for rank in range(size))


def test_messages_between_nodes_are_chosen_for_many_partners() -> None:
    """Where a message costs much; never on one node, nor with a rank on each node, nor beyond the memory limit."""
    size, shape = 64, (256, 256)
    ranks, dtype = tuple(range(size)), np.dtype(np.float64)
    source = Layout(Distribution.over((1, 64), shape, 1), ranks, dtype)
    target = Layout(Distribution.over((8, 8), shape, 3), ranks, dtype)
    direct = plan_exchange(source, target, size)
    nodes = tuple((np.arange(size) // 8 * 8).tolist())
    slow = Machine(ranks_per_node=8, inter={kind: Link(1e-4, x.beta) for kind, x in Machine().inter.items()})
    joined = fastest_exchange(direct, nodes, slow)
    assert joined.nodes == nodes and joined == direct.joined(nodes)
    assert fastest_exchange(direct, nodes, slow, joined.extra_bytes(None)) == joined
    assert fastest_exchange(direct, nodes, slow, joined.extra_bytes(None) - 1) is direct
    assert fastest_exchange(direct, (), slow) is direct and fastest_exchange(direct, ranks, slow) is direct
    quick = Machine(ranks_per_node=8, inter={kind: Link(1e-9, x.beta) for kind, x in Machine().inter.items()})
    assert fastest_exchange(direct, nodes, quick) is direct
