"""Index maps between two block-cyclic layouts of one dimension, as runs of consecutive indices.

Take n = 8 indices, in blocks of 2 over 2 parts on one side and in blocks of 3 over 2 parts on the other:

    global index         0 1 | 2 3 | 4 5 | 6 7
    part, source layout   0     1     0     1          0 1 2 | 3 4 5 | 6 7
    part, target layout                                  0       1      0

Part 0 of the source holds 0 1 4 5; part 0 of the target holds 0 1 2 6 7, part 1 holds 3 4 5.  So part 0 of the source
sends local indices 0 1 to local indices 0 1 of part 0, and 2 3 to 1 2 of part 1: these are two index maps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Index

_LONGEST_PATTERN = 64  # runs; a map with a longer pattern is copied by index


class StridedRuns(NamedTuple):
    """Runs of consecutive indices, all of one length, at a constant stride on both sides.

    (source 0, target 1, strides 4 and 2, repeats 3, length 2) maps 0 1, 4 5, 8 9 to 1 2, 3 4, 5 6.
    """

    source: int  # first index
    target: int
    source_stride: int
    target_stride: int
    repeats: int  # number of runs
    length: int  # length of each run


class IndexMap:
    """A map of local indices of a source to local indices of a target, stored run by run.

    Runs ascend on both sides, except in maps of `IndexPairs`, whose indices may have any order.

    source = [0, 4], target = [1, 3], lengths = [2, 2] maps 0 1 4 5 to 1 2 3 4.
    """

    __slots__ = ("__weakref__", "_period", "_strided_runs", "ends", "lengths", "size", "source", "target")

    def __init__(self, source: np.ndarray, target: np.ndarray, lengths: np.ndarray, period: int = -1) -> None:
        self.source = source  # first index of each run
        self.target = target
        self.lengths = lengths
        self.ends = lengths.cumsum()  # number of indices up to the end of each run
        self.size = int(self.ends[-1])
        self._period = period
        self._strided_runs: list[StridedRuns] | None = None

    @property
    def contiguous(self) -> bool:
        """Whether the map is a single run."""
        return len(self.lengths) == 1

    def pack(self) -> IndexMap:
        """Return the map of the same source indices to 0, 1, 2, ..."""
        return packed(self.source, self.lengths)

    def unpack(self) -> IndexMap:
        """Return the map of 0, 1, 2, ... to the same target indices."""
        return merged(self.ends - self.lengths, self.target, self.lengths)

    def cut(self, start: int, stop: int) -> IndexMap:
        """Return the map of the index pairs with numbers start, ..., stop - 1; 0 <= start < stop <= size."""
        if start == 0 and stop == self.size:
            return self
        if self.contiguous:
            return IndexMap(self.source + start, self.target + start, np.array([stop - start]))
        first, last = self.ends.searchsorted(start, "right"), self.ends.searchsorted(stop, "left")
        runs = slice(first, last + 1)
        source, target, lengths = self.source[runs].copy(), self.target[runs].copy(), self.lengths[runs].copy()
        skipped = start - (self.ends[first] - lengths[0])
        source[0] += skipped
        target[0] += skipped
        lengths[0] -= skipped
        lengths[-1] -= self.ends[last] - stop
        return IndexMap(source, target, lengths, self.period if len(lengths) > 3 else -1)

    def count_below(self, source: Index) -> Index:
        """Return the number of source indices that are less than `source`, an int or an array of ints."""
        run = self.source.searchsorted(source, "right") - 1  # -1 where all runs begin at larger indices
        below = self.ends[run] - self.lengths[run] + np.minimum(self.lengths[run], source - self.source[run])
        below = np.where(run < 0, 0, below)
        return below if below.ndim else int(below)

    @property
    def inverse(self) -> IndexMap:
        """The map of target indices to source indices."""
        return IndexMap(self.target, self.source, self.lengths, self._period)

    def shifted(self, source: int, target: int) -> IndexMap:
        """Return the map with `source` subtracted from all source indices and `target` from all target indices."""
        if not source and not target:
            return self  # which may know its strided runs
        return IndexMap(self.source - source, self.target - target, self.lengths, self._period)

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all source indices and all target indices."""
        at, skipped = np.arange(self.size), self.ends - self.lengths
        return at + np.repeat(self.source - skipped, self.lengths), at + np.repeat(self.target - skipped, self.lengths)

    @property
    def period(self) -> int:
        """The least p such that runs r and r + p are equally long, and equally far apart for all r; 0 if there is none.

        The first and the last run, which may be cut short, are not compared.  A period of the map is a period of each
        piece of the map.
        """
        if self._period < 0:
            self._period = _period(self.source[1:-1], self.target[1:-1], self.lengths[1:-1])
        return self._period

    @property
    def strided_runs(self) -> list[StridedRuns]:
        """The whole map as a few strided runs; an empty list where the runs have no pattern."""
        if self._strided_runs is None:
            self._strided_runs = self._find_strided_runs()
        return self._strided_runs

    def _find_strided_runs(self) -> list[StridedRuns]:
        """Return strided runs that together cover all runs of the map; an empty list where the runs have no pattern."""
        runs = len(self.lengths)
        period = self.period if runs > 3 else runs
        if not period:
            return []
        if period > runs - 2:
            rounds = [range(r, r + 1) for r in range(runs)]
        else:  # every period-th run, without the first and the last
            rounds = [range(r, runs - 1, period) for r in range(1, period + 1)]
            # the first and the last run may continue the pattern, or be shorter because the map was cut
            for end, at in ((0, period - 1), (runs - 1, (runs - 2) % period)):
                each = rounds[at]
                longer = range(min(end, each.start), max(end + 1, each.stop), period)
                near = longer[:3] if end == 0 else longer[-3:]
                places = [x[near].tolist() for x in (self.source, self.target)]
                if len(set(self.lengths[near].tolist())) == 1 and all(x[1] - x[0] == x[-1] - x[-2] for x in places):
                    rounds[at] = longer
                else:
                    rounds.append(range(end, end + 1))
        groups = []
        for each in rounds:
            first, second = each[0], each[min(1, len(each) - 1)]
            source, target = int(self.source[first]), int(self.target[first])
            apart = int(self.source[second]) - source, int(self.target[second]) - target
            groups.append(StridedRuns(source, target, *apart, len(each), int(self.lengths[first])))
        return groups


def _period(source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> int:
    """Return the period of these runs, as defined for `IndexMap.period`; 0 if there is none."""
    for period in range(1, min(_LONGEST_PATTERN, len(lengths)) + 1):
        if (lengths[period:] == lengths[:-period]).all() and all(
            (step == step[0]).all() for x in (source, target) if len(step := x[period:] - x[:-period])
        ):
            return period
    return 0


class CommonRefinement(NamedTuple):
    """The runs of indices into which the block boundaries of two layouts together cut one dimension.

    Blocks of 2 and of 3 cut 8 indices into 0 1 | 2 | 3 | 4 5 | 6 7.
    """

    starts: np.ndarray  # first global index of each run
    lengths: np.ndarray
    owner: np.ndarray  # owner of each run in the first layout
    other: np.ndarray  # owner of each run in the second layout


def common_refinement(a: BlockCyclic, b: BlockCyclic) -> CommonRefinement:
    """Return the common runs of two layouts of one dimension; each run has one owner in a, and one owner in b."""
    starts = np.sort(np.concatenate((a.starts, b.starts)), kind="stable")  # union1d takes a hundred times as long
    starts = starts[np.diff(starts, prepend=-1) > 0]
    return CommonRefinement(starts, np.diff(starts, append=a.n), a.owner(starts), b.owner(starts))


@lru_cache(maxsize=256)
def overlap_counts(a: BlockCyclic, b: BlockCyclic) -> np.ndarray:
    """Return, for all i and j, the number of indices that part i holds in layout a and part j in layout b.

    In the example at the top of the module: [[2, 2], [3, 1]].
    """
    period = math.lcm(a.block * a.parts, b.block * b.parts)  # indices after which both layouts repeat
    ahead = min(a.n, max(0, -a.skip, -b.skip))  # indices of long first blocks, which do not repeat
    rounds, rest = divmod(a.n - ahead, period)
    if rounds > 1:
        ends = (0, ahead), (ahead, ahead + period), (a.n - rest, a.n)
        first, one, last = (overlap_counts(a.window(*end), b.window(*end)) for end in ends)
        return first + rounds * one + last
    runs = common_refinement(a, b)
    pair = runs.owner * b.parts + runs.other
    return np.bincount(pair, runs.lengths, a.parts * b.parts).astype(np.int64).reshape(a.parts, b.parts)


def index_maps(a: BlockCyclic, b: BlockCyclic, part: int, by_target: bool = False) -> Iterator[tuple[int, IndexMap]]:
    """Yield each part of b that shares indices with `part` of a, and the map from local indices of a to those of b.

    by_target : `part` is a part of b, and the parts of a are yielded.

    Memory is needed for the blocks of `part` only.
    """
    mine, theirs = (b, a) if by_target else (a, b)
    starts, lengths = _cut_blocks(mine, theirs, part)
    peers = theirs.owner(starts)
    by_peer = np.argsort(peers, kind="stable")
    for runs in np.split(by_peer, np.flatnonzero(np.diff(peers[by_peer])) + 1) if len(starts) else []:
        at = starts[runs]
        yield int(peers[runs[0]]), merged(a.to_local(at), b.to_local(at), lengths[runs])


def _cut_blocks(mine: BlockCyclic, theirs: BlockCyclic, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the blocks of `part` at the block boundaries of `theirs`; return the global starts and lengths, ascending."""
    held = mine.count(part)
    if not held:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    lacking = mine.skip if part == mine.source else 0
    local = np.append(0, np.arange(mine.block - lacking, held, mine.block))
    lengths = np.diff(local, append=held)
    starts = mine.to_global(local, part)
    first = theirs.number(starts) + 1  # number of the next block in the other layout
    pieces = theirs.number(starts + lengths - 1) - first + 2  # number of pieces of each block of `part`
    turn = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)  # 0, 1, ... in each block
    cuts = (np.repeat(first, pieces) + turn - 1) * theirs.block - theirs.skip
    cuts = np.where(turn == 0, np.repeat(starts, pieces), cuts)
    ends = np.append(cuts[1:], 0)
    last = np.append(turn[1:] == 0, True)
    ends[last] = starts + lengths
    return cuts, ends - cuts


class IndexPairs:
    """Pairs of a source index and a target index: the rows that are picked from a matrix, and their new positions.

    source, target : integer arrays of equal length; no index occurs twice in `target`.

    Two objects are equal if their arrays are equal; the text of an object has a checksum, the same on all ranks.
    """

    __slots__ = ("_digest", "source", "target")

    def __init__(self, source: np.ndarray, target: np.ndarray) -> None:
        self.source, self.target = (np.ascontiguousarray(x, np.int64) for x in (source, target))
        self._digest = blake2b(self.source.tobytes() + self.target.tobytes(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexPairs) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"IndexPairs({len(self.source)} of checksum {self._digest})"

    def counts(self, a: BlockCyclic, b: BlockCyclic) -> np.ndarray:
        """Return, for all i and j, the number of pairs from an index of part i of a to an index of part j of b."""
        pair = a.owner(self.source) * b.parts + b.owner(self.target)
        return np.bincount(pair, minlength=a.parts * b.parts).reshape(a.parts, b.parts)

    def maps(self, a: BlockCyclic, b: BlockCyclic, part: int, by_target: bool) -> Iterator[tuple[int, IndexMap]]:
        """Yield peer parts and maps as `index_maps` does, only for the pairs.  Each map has the order of the pairs."""
        sides = (a, self.source), (b, self.target)
        (theirs, other), (mine, own) = sides if by_target else sides[::-1]
        held = np.flatnonzero(mine.owner(own) == part)
        peers = theirs.owner(other[held])
        by_peer = np.argsort(peers, kind="stable")
        for at in np.split(by_peer, np.flatnonzero(np.diff(peers[by_peer])) + 1) if len(held) else []:
            chosen = held[at]
            local = a.to_local(self.source[chosen]), b.to_local(self.target[chosen])
            yield int(peers[at[0]]), merged(*local, np.ones(len(chosen), np.int64))


def identity(n: int) -> IndexMap:
    """Return the map of 0, 1, ..., n - 1 to themselves; n > 0."""
    return IndexMap(np.zeros(1, int), np.zeros(1, int), np.array([n]))


def packed(source: np.ndarray, lengths: np.ndarray) -> IndexMap:
    """Return the map of runs of source indices to 0, 1, 2, ..."""
    return merged(source, lengths.cumsum() - lengths, lengths)


def merged(source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> IndexMap:
    """Return the map of the given runs; runs that follow each other without a gap on both sides are joined."""
    if len(lengths) < 2:
        return IndexMap(source, target, lengths)
    gap = (source[1:] != source[:-1] + lengths[:-1]) | (target[1:] != target[:-1] + lengths[:-1])
    opens = np.append(True, gap)
    return IndexMap(source[opens], target[opens], np.add.reduceat(lengths, np.flatnonzero(opens)))
