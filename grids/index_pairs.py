"""Pairs of a source index and a target index: of ranges, of rows that ranks deal out, and of rows of several axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, IndexPairs, identity, index_maps, merged, overlap_counts


def places_in_range(indices: np.ndarray, run: range) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the indices that are in a range, and their positions in the range."""
    places, rest = divmod(indices - run.start, run.step)
    at = np.flatnonzero((rest == 0) & (places >= 0) & (places < len(run)))
    return at, places[at]


@dataclass(frozen=True)
class RangePairs:
    """Pairs of the indices of two ranges of equal length, of which a rank computes only its own."""

    source: range
    target: range

    def _of(self, dim: BlockCyclic, part: int, of_target: bool) -> IndexPairs:
        """Return the pairs of which a part has the target, or the source."""
        places = np.sort(places_in_range(dim.indices(part), self.target if of_target else self.source)[1])
        return IndexPairs(*(x.start + places * x.step for x in (self.source, self.target)))

    def counts(self, a: BlockCyclic, b: BlockCyclic) -> np.ndarray:
        """Return, for all i and j, the number of pairs from an index of part i of a to an index of part j of b."""
        return np.stack([self._of(b, part, True).counts(a, b)[:, part] for part in range(b.parts)], axis=1)

    def maps(self, a: BlockCyclic, b: BlockCyclic, part: int, by_target: bool) -> Iterator[tuple[int, IndexMap]]:
        """Yield peer parts and maps as `IndexPairs` does."""
        return self._of(b if by_target else a, part, by_target).maps(a, b, part, by_target)


def pairs_between(source: Any, target: Any) -> IndexPairs | RangePairs:
    """Return the pairs of the indices of two ranges or arrays."""
    ranges = isinstance(source, range) and isinstance(target, range)
    return RangePairs(source, target) if ranges else IndexPairs(np.asarray(source), np.asarray(target))


@dataclass(frozen=True)
class DealtPairs:
    """Pairs of rows of which part i of the source has `rows[i][j]` for part j of the target, one after the other.

    A part of the source has its rows for part 0 first, a part of the target its rows from part 0.
    """

    rows: tuple[tuple[int, ...], ...]

    def counts(self, a: object = None, b: object = None) -> np.ndarray:
        """Return, for all i and j, the number of pairs from part i of the source to part j of the target."""
        return np.array(self.rows, np.int64)

    def maps(self, a: object, b: object, part: int, by_target: bool) -> Iterator[tuple[int, IndexMap]]:
        """Yield peer parts and maps as `index_maps` does."""
        counts = self.counts()
        source, target = (counts.cumsum(axis) - counts for axis in (1, 0))
        for peer in range(len(counts)) if part >= 0 else ():
            here = (peer, part) if by_target else (part, peer)
            if counts[here]:
                yield peer, IndexMap(source[here].reshape(1), target[here].reshape(1), counts[here].reshape(1))


@dataclass(frozen=True)
class IndexProduct:
    """Pairs of a row of a source and a row of a target, where rows enumerate the indices of several axes.

    axes : for each axis, the first one slowest: its distributions in the source and in the target, and the pairs of
           its indices; None: each index is pairs_between with itself.

    The parts of the source and of the target are numbered like the rows, by the parts of the first axis first.
    """

    axes: tuple[tuple[BlockCyclic, BlockCyclic, IndexPairs | RangePairs | None], ...]

    def counts(self, a: object = None, b: object = None) -> np.ndarray:
        """Return, for all i and j, the number of pairs from part i of the source to part j of the target."""
        counts = np.ones((1, 1), np.int64)
        for source, target, pairs in self.axes:
            counts = np.kron(counts, pairs.counts(source, target) if pairs else overlap_counts(source, target))
        return counts

    def maps(self, a: object, b: object, part: int, by_target: bool) -> Iterator[tuple[int, IndexMap]]:
        """Yield peer parts and maps as `index_maps` does."""
        parts = [(target if by_target else source).parts for source, target, _ in self.axes]
        if part >= 0:
            place = [int(x) for x in np.unravel_index(part, parts)] if parts else []
            yield from self._maps(len(self.axes), place, by_target)

    def _maps(self, number: int, place: list[int], by_target: bool) -> Iterator[tuple[int, IndexMap]]:
        """Yield peer parts and maps of the first `number` axes."""
        if not number:
            yield 0, identity(1)
            return
        source, target, pairs = self.axes[number - 1]
        part, ends = place[number - 1], (source, target)
        maps = pairs.maps(*ends, part, by_target) if pairs else index_maps(*ends, part, by_target)
        last = list(maps)
        parts = ends[not by_target].parts
        for before, slow in self._maps(number - 1, place, by_target):
            for peer, fast in last:
                here = (peer, part) if by_target else (part, peer)
                yield before * parts + peer, _product(slow, fast, *(x.count(at) for x, at in zip(ends, here)))


AnyPairs = IndexPairs | DealtPairs | IndexProduct


def _product(slow: IndexMap, fast: IndexMap, source: int, target: int) -> IndexMap:
    """Return the map of pairs (i, j), where i is an index of `slow` and j of `fast`, j varying faster.

    source, target : the number of indices j in the local array of the source, and of the target.
    """
    of_source, of_target = (x[:, None] * n for x, n in zip(slow.indices(), (source, target)))
    lengths = np.tile(fast.lengths, slow.size)
    return merged((of_source + fast.source).ravel(), (of_target + fast.target).ravel(), lengths)
