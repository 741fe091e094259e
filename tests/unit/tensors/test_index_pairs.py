"""Pairs of ranges are the pairs of their indices, of which each rank computes only its own."""

from __future__ import annotations

import random

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.index_pairs import RangePairs


def drawn(draw: random.Random, n: int) -> BlockCyclic:
    parts = draw.randint(1, 4)
    return BlockCyclic(n, draw.randint(1, 5), parts, draw.randrange(parts))


def test_pairs_of_ranges_are_those_of_their_indices() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        n = draw.randint(0, 30)
        stepped = range(n)[draw.randint(-5, 5) :: draw.choice((1, 2, 3, -1, -2))]
        ends = [stepped, range(len(stepped))][:: draw.choice((1, -1))]
        ranges, listed = RangePairs(*ends), IndexPairs(*map(np.array, ends))
        a, b = (drawn(draw, n if end is stepped else len(stepped)) for end in ends)
        assert np.array_equal(ranges.counts(a, b), listed.counts(a, b))
        for by_target, dim in ((False, a), (True, b)):
            for part in range(dim.parts):
                maps, known = (dict(x.maps(a, b, part, by_target)) for x in (ranges, listed))
                assert maps.keys() == known.keys()
                for peer, pairs in maps.items():
                    assert [*zip(*pairs.indices())] == [*zip(*known[peer].indices())]
                    assert pairs.size == ranges.counts(a, b)[(peer, part) if by_target else (part, peer)]
