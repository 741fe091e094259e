"""How many panels of SUMMA have which number, owners and width, at the cost of owner pairs, not of panels."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.schedules.node_relay import Parts
from pdgemm.schedules.steps import runs_of_pairs


class _Pair(NamedTuple):
    """The inner indices of one owner pair, in panels of `summa_steps`.

    gaps : where they are no longer one run of the array of A, and of B.
    """

    owners: tuple[int, int]
    total: int
    panels: int
    gaps: tuple[list[int], list[int]]  # in A, and in B

    def words(self, first: int, step: int, count: int) -> int:
        """Return the inner indices of panels number first, first + step, ..., so many."""
        ends = (_floor_sum(count, self.panels, self.total * step, self.total * (first + x)) for x in (1, 0))
        return next(ends) - next(ends)

    def cut(self, operand: int) -> set[int]:
        """Return the panels that are several runs of the array of A, or of B."""
        found = set()
        for gap in self.gaps[operand]:
            panel = -(-gap * self.panels // self.total)
            if self.total * panel // self.panels != gap:
                found.add(panel - 1)
        return found


def parts_by_number(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int, period: int) -> tuple[Parts, Parts]:
    """Return the parts of the panels of A, and of B, of `summa_steps`.

    Those of one owner pair whose numbers are the same modulo `period` are one entry.
    """
    pairs = _pairs(inner_a, inner_b, width)
    rows: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = [], []
    for (number, words, count), pair in _classes(pairs, period):
        for into, owner in zip(rows, pair.owners):
            into.append((number, owner, words, 1, 1, count))
    for place, pair in enumerate(pairs):
        for operand, into in enumerate(rows):
            for panel in pair.cut(operand):  # counted above as one run
                number = sum(min(x.panels, panel) for x in pairs) + sum(x.panels > panel for x in pairs[:place])
                words = pair.words(panel, 1, 1)
                for alone, sign in ((0, 1), (1, -1)):
                    into.append((number % period, pair.owners[operand], sign * words, alone, 1, sign))
    a, b = (Parts(*np.array(x, np.int64).reshape(-1, 6).T) for x in rows)
    return a, b


def _pairs(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int) -> list[_Pair]:
    """Return the owner pairs in the order of their panels in a turn."""
    found = []
    for first, col, row, starts, lengths in runs_of_pairs(inner_a, inner_b):
        ends = np.cumsum(lengths)
        local = (x.to_local(starts) for x in (inner_a, inner_b))
        gaps = [ends[:-1][x[1:] != x[:-1] + lengths[:-1]].tolist() for x in local]
        total = int(ends[-1])
        found.append((first, _Pair((col, row), total, -(-total // width), (gaps[0], gaps[1]))))
    return [pair for _, pair in sorted(found, key=lambda x: x[0])]


def _classes(pairs: list[_Pair], period: int) -> Iterator[tuple[tuple[int, int, int], _Pair]]:
    """Yield number modulo period, inner indices and count of panels of one pair, for all pairs.

    Between two turns in which a pair has its last panel, the numbers of a pair's panels grow by that of the pairs left.
    """
    before = start = 0
    for end in sorted({pair.panels for pair in pairs}):
        left = [pair for pair in pairs if pair.panels > start]
        cycle = period // gcd(len(left), period)
        for place, pair in enumerate(left):
            for turn in range(start, min(end, start + cycle)):
                count = -(-(end - turn) // cycle)
                number = before + (turn - start) * len(left) + place
                yield (number % period, pair.words(turn, cycle, count), count), pair
        before += len(left) * (end - start)
        start = end


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of (a i + b) // m for i from 0 to n - 1 (as Euclid's algorithm has it), all >= 0 and m > 0."""
    total = 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        most = a * n + b
        if most < m:
            return total
        n, b = divmod(most, m)
        m, a = a, m
