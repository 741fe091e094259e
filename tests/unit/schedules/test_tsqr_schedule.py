"""The tree of TSQR: each rank sends one message to its parent; words by formula equal those of the messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import simulate
from pdgemm.schedules.panels.tsqr_schedule import (
    TallSchedule,
    broadcast_tree,
    cholesky_pass,
    gram_tree,
    heights,
    packed_words,
    svd_of_triangle,
    tsqr_schedule,
    tsqr_tree,
)
from pdgemm.schedules.schedule import Schedule

DTYPE = np.dtype(np.float64)


@pytest.mark.parametrize("size", range(1, 18))
def test_words_and_messages_of_the_edges(size: int) -> None:
    """Each rank but the first has one parent, and the depth of the tree is at most log2(ranks)."""
    source = np.random.default_rng(size)
    ranks = tuple(source.permutation(size + 2)[:size].tolist())
    rows = tuple(source.integers(0, 4, size).tolist())
    trees = [kind(ranks, rows, k, DTYPE) for kind in (tsqr_tree, gram_tree) for k in (1, 2, 5)]
    for tree in (*trees, broadcast_tree(ranks, 3, DTYPE)):
        edges = [(child, at) for at in range(size) for child in tree.children(at)]
        assert sorted(child for child, _ in edges) == list(range(1, size))
        assert all(tree.parent(child) == at for child, at in edges) and tree.parent(0) == -1
        depth, counts = [0] * size, np.zeros((size + 2, 4), int)  # words sent, received; messages sent, received
        for child, at in sorted(edges):
            depth[child] = depth[at] + 1
            for words, sender, target in ((tree.up[child], child, at), (tree.down[child], at, child)):
                counts[ranks[sender], ::2] += words, words > 0
                counts[ranks[target], 1::2] += words, words > 0
        assert max(depth) <= int(np.log2(size))
        for rank in range(size + 2):
            assert [*vars(tree.traffic(rank)).values()] == [*counts[rank], 0]
        assert tree.total_words == sum(tree.up[1:]) + sum(tree.down[1:])


def test_words() -> None:
    """On 5 ranks with 3, 0, 1, 9 and 0 rows, a rank sends the rows of its subtree, at most a triangle of k rows."""
    rows, k = (3, 0, 1, 9, 0), 4
    assert heights(rows, k) == [4, 0, 4, 4, 0]
    assert [packed_words(h, k) for h in range(5)] == [0, 4, 7, 9, 10]
    tree = tsqr_tree(tuple(range(5)), rows, k, DTYPE)
    assert tree.up == (10, 0, 10, 10, 0) and tree.down == (26, 10, 26, 26, 10)
    assert gram_tree(tuple(range(5)), rows, k, DTYPE).up == (10, 0, 10, 10, 0)


@pytest.mark.parametrize("kind", [cholesky_pass, tsqr_schedule, svd_of_triangle])
def test_figures_from_the_rounds(kind: Callable[..., TallSchedule]) -> None:
    """Messages of the schedule equal those of its tree."""
    for size in (1, 2, 5):
        ranks, rows = tuple(range(size))[::-1], (9, 0, 4, 7, 1)[:size]
        schedule = kind(ranks, rows, 4, DTYPE)
        for rank in range(size):
            assert Schedule.transfers(schedule, rank) == schedule.transfers(rank)
        assert schedule.total_words == schedule.tree.total_words and schedule.flops > 0
        assert simulate(schedule, Machine(), size).words_received.sum() == schedule.total_words
