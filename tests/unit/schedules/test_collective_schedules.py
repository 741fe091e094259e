"""Schedules of collectives: right results of every algorithm, on any number of ranks, with parts of any sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from collectives import check_counts, check_parts, on_all_ranks

from pdgemm.errors import ArgumentError
from pdgemm.planning.collective_plan import choose_collective, collective_costs, costs_table, parts_of
from pdgemm.planning.machines.machine import Machine
from pdgemm.schedules.collectives.collective import OPERATIONS, Collective, algorithms, even_parts
from pdgemm.schedules.schedule import RankMap


def every_collective(p: int) -> Iterator[Collective]:
    """Yield all algorithms on p ranks, in random order, with even, uneven and empty parts."""
    rng = np.random.default_rng(p)
    ranks = tuple(rng.permutation(p + 3)[:p].tolist())
    nodes = [(), *(tuple((np.arange(p) % n).tolist()) for n in (2, 3) if p % n == 0 and p > n)]
    for operation in OPERATIONS:
        parts = p * p if operation == "all_to_all" else p
        for name in algorithms(operation):
            for counts in (even_parts(3 * p + 1, parts), tuple(rng.integers(0, 4, parts).tolist()), (0,) * parts):
                for node in nodes:
                    if node or name != "two-level":
                        yield Collective(operation, name, ranks, counts, np.dtype("d"), node)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12])
def test_every_algorithm(p: int) -> None:
    """Parts, sums, words and messages are right; sums of floating-point numbers have equal bits on all ranks."""
    addends = np.random.default_rng(p).standard_normal((p, p)).tolist()
    for x in every_collective(p):
        check_parts(x)
        check_counts(x)
        if x.operation == "all_reduce":
            end = on_all_ranks(x, [dict(enumerate(row)) for row in addends], lambda a, b: a + b)
            assert all(has == end[0] for has in end)
        if x.operation == "all_gather":  # no part is sent twice, on any number of ranks
            received = [x.traffic(rank).words_received for rank in x.ranks]
            assert received == [x.words - own for own in x.counts]
        if (x.operation, x.algorithm) == ("all_reduce", "ring") and len({*x.counts}) == 1:
            assert {x.traffic(rank).words_received for rank in x.ranks} == {round(x.lower_bounds()[1])}


def test_even_algorithms_send_the_least() -> None:
    """With even parts, on 2^k ranks, words of the busiest rank and numbers of rounds have closed forms."""
    p, n = 16, 16 * 10
    counts, pairs = even_parts(n, p), even_parts(n * p, p * p)
    for operation, name, words, rounds in (
        ("all_reduce", "ring", 2 * n * 15 / 16, 30),
        ("all_reduce", "halving", 2 * n * 15 / 16, 8),
        ("all_reduce", "doubling", n * 4, 4),
        ("reduce_scatter", "ring", n * 15 / 16, 15),
        ("reduce_scatter", "halving", n * 15 / 16, 4),
        ("all_reduce", "nearest", 2 * n * 15 / 16, 8),
        ("all_reduce", "pairwise", 2 * n * 15 / 16, 16),
        ("all_gather", "bruck", n * 15 / 16, 4),
        ("gather", "tree", n * 15 / 16, 4),
        ("broadcast", "tree", n, 4),
        ("all_to_all", "pairwise", n * 15 / 16, 15),
        ("all_to_all", "bruck", n * 8 * 4 / 16, 4),
    ):
        x = Collective(operation, name, tuple(range(p)), pairs if "to" in operation else counts, np.dtype("f"))
        assert max(x.traffic(rank).words_received for rank in range(p)) == words, (operation, name)
        assert len([*x.rounds()]) == rounds, (operation, name)


def test_two_levels_send_less_between_nodes() -> None:
    p, n = 24, 24 * 100
    node = tuple(np.arange(p) // 6)
    between = {}
    for name in ("ring", "two-level"):
        x = Collective("all_reduce", name, tuple(range(p)), even_parts(n, p), np.dtype("f"), node)
        assert {x.traffic(rank).words_received for rank in range(p)} == {2 * n * 23 // 24}
        between[name] = sum(
            int(step.words[np.array(node)[step.source] != np.array(node)[step.target]].sum())
            for at in x.rounds()
            for step in at.moves
        )
    assert between["two-level"] == 2 * n * 3  # each node receives 3/4 of the vector in both phases
    assert between["ring"] == 4 * 2 * n * 23 // 24


def test_the_fastest_is_chosen() -> None:
    """For short vectors an algorithm of few messages is chosen, for long ones of few words, or by nodes."""
    machine, kind = Machine(ranks_per_node=8), np.dtype("d")
    short, long = (
        choose_collective("all_reduce", parts_of("all_reduce", n, 64), kind, 64, machine) for n in (64, 10**8)
    )
    assert short.algorithm in ("doubling", "tree") and long.algorithm in ("ring", "two-level")
    costs = collective_costs("all_reduce", parts_of("all_reduce", 10**6, 64), kind, 64, machine)
    assert [x.seconds for x in costs] == sorted(x.seconds for x in costs) and len(costs) == 7
    assert "two-level" not in [
        x.collective.algorithm for x in collective_costs("all_reduce", (9, 0), kind, 2, Machine())
    ]
    text = costs_table(costs)
    assert "of bound" in text and "any algorithm needs at least 1.97 M words per rank, and at least 6 rounds" in text
    scatter = collective_costs("scatter", parts_of("scatter", 640, 64), kind, 64, machine)
    assert {x.words for x in scatter} == {630}  # the root sends all other parts
    with pytest.raises(ArgumentError, match="all_gather on 5000 ranks sends too many messages to simulate"):
        choose_collective("all_gather", (1,) * 5000, kind, 5000, machine)


def test_bad_arguments() -> None:
    def collective(operation: str, name: str, p: int = 2, counts: Any = (1, 1), node: Any = ()) -> Collective:
        return Collective(operation, name, tuple(range(p)), counts, np.dtype("f"), node)

    for arguments, message in (
        (("all_reduced", "ring"), "collective operations are all_reduce, .*; got 'all_reduced'"),
        (("all_reduce", "rings"), "algorithms of all_reduce are tree, ring, .*; got 'rings'"),
        (("all_reduce", "ring", 3), "all_reduce on 3 ranks needs 3 counts >= 0"),
        (("all_to_all", "bruck", 2), "all_to_all on 2 ranks needs 4 counts"),
        (("all_gather", "ring", 2, (1, -1)), "counts >= 0"),
        (("all_reduce", "two-level", 3, (1, 1, 1), (0, 0, 1)), "needs several nodes with equally many ranks"),
    ):
        with pytest.raises(ArgumentError, match=message):
            collective(*arguments)


def test_a_grid_has_any_number_of_axes() -> None:
    """The stride of an axis is the product of the lengths of faster axes; "line", all ranks, is an axis, too."""
    grid = RankMap((("pipeline", 2), ("data", 1), ("col", 3), ("row", 4)), tuple(range(0, 48, 2)))
    assert grid.lengths == {"line": 24, "pipeline": 2, "data": 1, "col": 3, "row": 4}
    assert grid.strides == {"line": 1, "pipeline": 24, "data": 1, "col": 8, "row": 2}
    assert (grid.shape, grid.layers) == ((3, 4), 1)
    layers = RankMap.of_layers((2, 3), tuple(range(12)), 2)
    assert (layers.strides["depth"], layers.layer(1), layers.layer_of(7)) == (6, tuple(range(6, 12)), 1)
    assert RankMap.of_line((3, 5, 9)).strides == {"line": 2}
