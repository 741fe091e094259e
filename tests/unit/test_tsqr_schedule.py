"""The tree of TSQR: each rank is received from once, and the words by formula are those of its messages."""

from __future__ import annotations

import numpy as np
import pytest

from pdgemm.panel_schedules.tsqr_schedule import broadcast_tree, gram_tree, heights, packed, tsqr_tree
from pdgemm.schedules.rounds import Tally

SIZES = range(1, 18)


@pytest.mark.parametrize("size", SIZES)
def test_edges(size: int) -> None:
    tree = broadcast_tree(tuple(range(size)), 1)
    edges = [(child, at) for at in range(size) for child in tree.children(at)]
    assert sorted(child for child, _ in edges) == list(range(1, size))
    assert all(tree.parent(child) == at for child, at in edges) and tree.parent(0) == -1
    depth = [0] * size
    for child in range(1, size):
        depth[child] = depth[tree.parent(child)] + 1
    assert max(depth) <= int(np.log2(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_traffic_is_that_of_the_rounds(size: int, k: int) -> None:
    source = np.random.default_rng(size * k)
    ranks = tuple(source.permutation(size + 2)[:size].tolist())
    rows = tuple(source.integers(0, 4, size).tolist())
    for tree in (tsqr_tree(ranks, rows, k), gram_tree(ranks, rows, k), broadcast_tree(ranks, 3)):
        counts = Tally(tree.rounds(8), size + 2).counts
        for rank in range(size + 2):
            assert [*vars(tree.traffic(rank)).values()] == counts[:, rank].tolist()
        assert counts[0].sum() == counts[1].sum() == sum(tree.up[1:]) + sum(tree.down[1:])


def test_words() -> None:
    """Of 5 ranks with 3, 0, 1, 9 and 0 rows: what a rank has, and all below it, is at most a triangle of k rows."""
    rows, k = (3, 0, 1, 9, 0), 4
    assert heights(rows, k) == [4, 0, 4, 4, 0]
    assert [packed(h, k) for h in range(5)] == [0, 4, 7, 9, 10]
    tree = tsqr_tree(tuple(range(5)), rows, k)
    assert tree.up == (10, 0, 10, 10, 0) and tree.down == (26, 10, 26, 26, 10)
    assert gram_tree(tuple(range(5)), rows, k).up == (10, 0, 10, 10, 0)
