"""Index sets as runs of consecutive indices, and how two ways of dealing one dimension meet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic

_LONGEST_PATTERN = 64  # runs; a longer pattern is copied by index


class Stretch(NamedTuple):
    """Runs of `length` indices, `times` of them, at equal distances on both sides."""

    source: int
    target: int
    source_stride: int
    target_stride: int
    times: int
    length: int


class Pairing:
    """Which local indices of a source go to which local indices of a target, run by run, ascending in both."""

    __slots__ = ("_period", "_stretches", "ends", "lengths", "size", "source", "target")

    def __init__(self, source: np.ndarray, target: np.ndarray, lengths: np.ndarray, period: int = -1) -> None:
        self.source = source  # first index of each run
        self.target = target
        self.lengths = lengths
        self.ends = lengths.cumsum()  # number of pairs up to and with each run
        self.size = int(self.ends[-1])
        self._period = period
        self._stretches: list[Stretch] | None = None

    @property
    def single(self) -> bool:
        return len(self.lengths) == 1

    def pack(self) -> Pairing:
        """The same source indices to 0, 1, 2, ..."""
        return packed(self.source, self.lengths)

    def unpack(self) -> Pairing:
        """0, 1, 2, ... to the same target indices."""
        return merged(self.ends - self.lengths, self.target, self.lengths)

    def cut(self, start: int, stop: int) -> Pairing:
        """The pairs number start..stop, with 0 <= start < stop <= size."""
        if start == 0 and stop == self.size:
            return self
        if self.single:
            return Pairing(self.source + start, self.target + start, np.array([stop - start]))
        first, last = self.ends.searchsorted(start, "right"), self.ends.searchsorted(stop, "left")
        runs = slice(first, last + 1)
        source, target, lengths = self.source[runs].copy(), self.target[runs].copy(), self.lengths[runs].copy()
        skipped = start - (self.ends[first] - lengths[0])
        source[0] += skipped
        target[0] += skipped
        lengths[0] -= skipped
        lengths[-1] -= self.ends[last] - stop
        return Pairing(source, target, lengths, self.period if len(lengths) > 3 else -1)

    def before(self, source: int) -> int:
        """Number of pairs with a smaller source index."""
        run = int(self.source.searchsorted(source, "right")) - 1
        return (
            0
            if run < 0
            else int(self.ends[run] - self.lengths[run] + min(self.lengths[run], source - self.source[run]))
        )

    @property
    def inverse(self) -> Pairing:
        """Target indices to source indices."""
        return Pairing(self.target, self.source, self.lengths, self._period)

    def shifted(self, source: int, target: int) -> Pairing:
        """Source indices less `source`, target indices less `target`."""
        return Pairing(self.source - source, self.target - target, self.lengths, self._period)

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target indices one by one."""
        at, skipped = np.arange(self.size), self.ends - self.lengths
        return at + np.repeat(self.source - skipped, self.lengths), at + np.repeat(self.target - skipped, self.lengths)

    @property
    def period(self) -> int:
        """After how many runs the runs repeat at a constant distance, the first and the last apart; 0: never.

        What repeats in the whole repeats in each piece of it.
        """
        if self._period < 0:
            self._period = _period(self.source[1:-1], self.target[1:-1], self.lengths[1:-1])
        return self._period

    @property
    def stretches(self) -> list[Stretch]:
        """All pairs as few stretches; none where there is no pattern."""
        if self._stretches is None:
            self._stretches = self._find_stretches()
        return self._stretches

    def _find_stretches(self) -> list[Stretch]:
        runs = len(self.lengths)
        period = self.period if runs > 3 else runs
        if not period:
            return []
        if period > runs - 2:
            rounds = [range(r, r + 1) for r in range(runs)]
        else:  # runs that lie at equal distances
            rounds = [range(r, runs - 1, period) for r in range(1, period + 1)]
            # the first run and the last may go on with the pattern, or be cut off
            for end, at in ((0, period - 1), (runs - 1, (runs - 2) % period)):
                each = rounds[at]
                longer = range(min(end, each.start), max(end + 1, each.stop), period)
                near = longer[:3] if end == 0 else longer[-3:]
                places = [x[near].tolist() for x in (self.source, self.target)]
                if len(set(self.lengths[near].tolist())) == 1 and all(x[1] - x[0] == x[-1] - x[-2] for x in places):
                    rounds[at] = longer
                else:
                    rounds.append(range(end, end + 1))
        found = []
        for each in rounds:
            first, second = each[0], each[min(1, len(each) - 1)]
            source, target = int(self.source[first]), int(self.target[first])
            apart = int(self.source[second]) - source, int(self.target[second]) - target
            found.append(Stretch(source, target, *apart, len(each), int(self.lengths[first])))
        return found


def _period(source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> int:
    for period in range(1, min(_LONGEST_PATTERN, len(lengths)) + 1):
        if (lengths[period:] == lengths[:-period]).all() and all(
            (step == step[0]).all() for x in (source, target) if len(step := x[period:] - x[:-period])
        ):
            return period
    return 0


class Meeting(NamedTuple):
    """One dimension dealt in two ways, cut wherever either of them starts a block."""

    starts: np.ndarray  # global
    lengths: np.ndarray
    owner: np.ndarray  # in the first way
    other: np.ndarray  # in the second


def meeting(a: BlockCyclic, b: BlockCyclic) -> Meeting:
    starts = np.sort(np.concatenate((a.starts, b.starts)), kind="stable")  # union1d takes a hundred times as long
    starts = starts[np.diff(starts, prepend=-1) > 0]
    return Meeting(starts, np.diff(starts, append=a.n), a.owner(starts), b.owner(starts))


@lru_cache(maxsize=256)
def common(a: BlockCyclic, b: BlockCyclic) -> np.ndarray:
    """Number of indices that part i holds in the way of a and part j in the way of b, for all i and j."""
    period = math.lcm(a.block * a.parts, b.block * b.parts)  # after which both ways repeat
    ahead = min(a.n, max(0, -a.skip, -b.skip))  # but for long first blocks
    rounds, rest = divmod(a.n - ahead, period)
    if rounds > 1:
        ends = (0, ahead), (ahead, ahead + period), (a.n - rest, a.n)
        first, one, last = (common(a.window(*end), b.window(*end)) for end in ends)
        return first + rounds * one + last
    met = meeting(a, b)
    pair = met.owner * b.parts + met.other
    return np.bincount(pair, met.lengths, a.parts * b.parts).astype(np.int64).reshape(a.parts, b.parts)


def pairings(a: BlockCyclic, b: BlockCyclic, part: int, by_target: bool = False) -> Iterator[tuple[int, Pairing]]:
    """What `part` of a hands to each part of b; `by_target`: what each part of a hands to `part` of b.

    Takes memory for the blocks of this part alone.
    """
    mine, theirs = (b, a) if by_target else (a, b)
    starts, lengths = _cut_blocks(mine, theirs, part)
    peers = theirs.owner(starts)
    by_peer = np.argsort(peers, kind="stable")
    for runs in np.split(by_peer, np.flatnonzero(np.diff(peers[by_peer])) + 1) if len(starts) else []:
        at = starts[runs]
        yield int(peers[runs[0]]), merged(a.to_local(at), b.to_local(at), lengths[runs])


def _cut_blocks(mine: BlockCyclic, theirs: BlockCyclic, part: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of `part`, cut where the other way starts a block: global starts and lengths, ascending."""
    held = mine.count(part)
    if not held:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    lacking = mine.skip if part == mine.source else 0
    local = np.append(0, np.arange(mine.block - lacking, held, mine.block))
    lengths = np.diff(local, append=held)
    starts = mine.to_global(local, part)
    first = theirs.number(starts) + 1  # number of the next block of theirs
    pieces = theirs.number(starts + lengths - 1) - first + 2  # in each of my blocks
    turn = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)  # 0, 1, ... within my block
    cuts = (np.repeat(first, pieces) + turn - 1) * theirs.block - theirs.skip
    cuts = np.where(turn == 0, np.repeat(starts, pieces), cuts)
    ends = np.append(cuts[1:], 0)
    last = np.append(turn[1:] == 0, True)
    ends[last] = starts + lengths
    return cuts, ends - cuts


def whole(n: int) -> Pairing:
    """0, 1, ..., n - 1 to themselves; n > 0."""
    return Pairing(np.zeros(1, int), np.zeros(1, int), np.array([n]))


def packed(source: np.ndarray, lengths: np.ndarray) -> Pairing:
    """Runs of source indices to 0, 1, 2, ..."""
    return merged(source, lengths.cumsum() - lengths, lengths)


def merged(source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> Pairing:
    """Join runs that follow each other without a gap on both sides."""
    if len(lengths) < 2:
        return Pairing(source, target, lengths)
    gap = (source[1:] != source[:-1] + lengths[:-1]) | (target[1:] != target[:-1] + lengths[:-1])
    opens = np.append(True, gap)
    return Pairing(source[opens], target[opens], np.add.reduceat(lengths, np.flatnonzero(opens)))
