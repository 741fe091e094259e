"""Schedules of exchanges: their formulas equal sums over their rounds, and the simulation."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.layout import Layout
from pdgemm.grids.rectangles import Rectangle
from pdgemm.planning.machines.machine import Link, Machine
from pdgemm.planning.machines.simulator import fastest_exchange, simulate, words_between
from pdgemm.schedules.exchanges.block_messages import Redistribution
from pdgemm.schedules.exchanges.exchange import Exchange, Selection, plan_exchange, plan_inheritance
from pdgemm.schedules.exchanges.rectangle_exchange import plan_rectangles
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
    for rank in range(size):
        known = schedule.traffic(rank)
        assert run.traffic(rank) == replace(known, words_received=known.words_received - known.words_read, words_read=0)


@pytest.mark.parametrize(("limit", "shared"), [(None, False), (None, True), (0, False), (300, True)])
def test_between_layouts(limit: int | None, shared: bool) -> None:
    for number, (one, other) in enumerate(product(GRIDS, GRIDS)):
        source = layout(one, 1 + number % 5, number)
        target = layout(other, 1 + number % 3, number + 1, "CF"[number % 2])
        summed(plan_exchange(source, target, SIZE, memory_limit=limit, shared=shared))


def one_by_one(exchange: Redistribution) -> list[tuple[int, int, int]]:
    """Return the sender, receiver and words of each message, or read, by the index maps of each pair of ranks."""
    return [
        (rank, block.peer, rows.size * cols.size)
        for rank in range(exchange.size)
        for block in exchange.sends(rank)
        for rows, cols in ([(block.rows, block.cols)] if exchange.shared else exchange.tiles(block))
    ]


def check_messages(exchange: Redistribution) -> None:
    """Check that the messages of the rounds are those of `one_by_one`, and also the words that stay on each rank."""
    (at,) = exchange.rounds()
    (x,) = at.moves
    messages = one_by_one(exchange)
    assert sorted(zip(x.source.tolist(), x.target.tolist(), x.words.tolist())) == sorted(messages)
    words, every = words_between(exchange, exchange.size), range(exchange.size)
    for words_of, of_pairs in zip(exchange.words_of, (words, words.T)):
        assert np.array_equal([words_of(np.array([rank])) for rank in every], of_pairs)
    stay = sum(block.rows.size * block.cols.size for rank in range(exchange.size) for block in exchange.staying(rank))
    if not exchange.shared:
        assert sum(exchange.copied(rank) for rank in range(exchange.size)) == stay * exchange.wire.itemsize


@pytest.mark.parametrize("words", [1, 5, 12, 1000])
@pytest.mark.parametrize("shared", [False, True])
def test_messages_by_counts_are_those_by_index_maps(words: int, shared: bool) -> None:
    """The fast way to list all messages lists the same ones; also those of a few picked rows, and events count them."""
    draw = np.random.default_rng(words)
    rows = IndexPairs(draw.integers(0, SHAPE[0], 9), draw.permutation(SHAPE[0])[:9])
    cols = IndexPairs(draw.permutation(SHAPE[1]), draw.permutation(SHAPE[1]))
    for number, (one, other) in enumerate(product(GRIDS, GRIDS)):
        source = layout(one, 1 + number % 5, number)
        target = layout(other, 1 + number % 3, number + 1, "CF"[number % 2])
        exchange = Exchange(source, target, SIZE, words, True, shared)
        check_messages(exchange)
        check_messages(Selection(source, target, SIZE, words, True, shared, rows=rows, cols=cols))
        itself = replace(exchange, size=20, target=replace(target, rank_map=tuple(10 + x for x in target.rank_map)))
        (at,) = itself.rounds()  # all elements change their owner
        assert itself.events == -(-len(at.moves[0].words) // itself.size)


def test_out_of_inherited_arrays() -> None:
    for number, (one, other) in enumerate(product(GRIDS, GRIDS[3:])):
        target = layout(other, 2, 3)
        target = Layout(target.distribution, tuple(range(len(target.rank_map))), target.dtype)
        exchange = plan_inheritance(layout(one, 3, number), target, 4, (0, 1, 2, 3, 1, 3))
        summed(exchange, 4)
        check_messages(exchange)
        summed(exchange.joined((0, 1, 0, 1)), 4)


@pytest.mark.parametrize("inward", [True, False])
def test_with_rectangles(inward: bool) -> None:
    cuts = ((0, 5), (5, 6), (6, 6), (6, 14), (14, 20), (20, 23))
    rectangles = tuple((((lo, hi), (0, 9)), ((lo, hi), (9, 17))) for lo, hi in cuts)

    held = tuple(tuple(Rectangle(*x) for x in each) for each in rectangles)
    for number, grid in enumerate(GRIDS):
        exchange = plan_rectangles(held, layout(grid, 4, number), inward, "C")
        summed(exchange)
        check_messages(exchange)
        summed(exchange.joined((0, 1, 0, 2, 2, 0)))


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


def test_the_choice_keeps_no_indices() -> None:
    """The choice is cached in the exchange, and not in the module, where the indices of selections would stay."""
    whole = IndexPairs(np.arange(23), np.arange(23)[::-1]), IndexPairs(np.arange(17), np.arange(17))
    direct = Selection(layout((6, 1), 1, 0), layout((2, 3), 4, 1), SIZE, 1000, True, rows=whole[0], cols=whole[1])
    nodes, slow = (
        (0, 0, 2, 2, 4, 4),
        Machine(ranks_per_node=2, inter={kind: Link(1e-2, x.beta) for kind, x in Machine().inter.items()}),
    )
    joined = fastest_exchange(direct, nodes, slow)
    assert joined.nodes == nodes and fastest_exchange(direct, nodes, slow) is joined
    kept = weakref.ref(direct)
    del direct, joined
    gc.collect()
    assert kept() is None
