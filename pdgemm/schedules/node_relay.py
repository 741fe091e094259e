"""How panels are relayed between nodes along a grid row or column, and read in place within a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.steps import runs_of_pairs


class RelayRole(NamedTuple):
    """What the ranks of one node do with a panel; a position is an index along the row or column.

    in_place : they read all of it in the memory of its owner.
    receiver : otherwise this one assembles it, and the others, the readers, read it in the receiver's memory.
    chains   : for each part, the positions that relay it; [] if it stays on its node, or this rank is none of them.
    """

    in_place: bool
    receiver: int
    readers: list[int]
    chains: list[list[int]]


@dataclass(frozen=True)
class NodeLine:
    """The nodes of the positions 0, 1, ... along a row or column.

    nodes : the node of each position.

    A panel is sent to each other node once, to one receiver, where the other ranks read it: from its owner to the
    receiver on the next node, and on from there, as around a ring.
    """

    nodes: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Are the positions on more than one node?"""
        return len(self._places) > 1

    def near(self, place: int) -> list[int]:
        """Return the positions on the same node."""
        return self._places[self.nodes[place]]

    def receiver(self, place: int, turn: int) -> int:
        """Return the position that receives panel number `turn` on the node of a position; they alternate."""
        near = self.near(place)
        return near[turn % len(near)]

    def chain(self, owner: int, turn: int) -> list[int]:
        """Return the positions that relay panel number `turn`: its owner, then a receiver on each other node."""
        key = owner, turn % self.period
        if key not in self._chains:
            size = len(self.nodes)
            first = {self.nodes[owner]: owner}  # by node, in the order of positions after the owner's
            for step in range(1, size):
                place = (owner + step) % size
                first.setdefault(self.nodes[place], self.receiver(place, turn))
            self._chains[key] = list(first.values())
        return self._chains[key]

    def role(self, me: int, owners: list[int], one_run: bool, turn: int) -> RelayRole:
        """Return what the node of position `me` does with panel number `turn`.

        owners : positions that own its parts.   one_run : its columns are contiguous in the array of its owner.
        """
        near = self.near(me)
        in_place = len(owners) == 1 and owners[0] in near and one_run
        receiver = self.receiver(me, turn)
        readers = [place for place in near if place != receiver] if self.several and not in_place else []
        chains = [self.chain(owner, turn) for owner in owners]
        return RelayRole(in_place, receiver, readers, [x if me in x and len(x) > 1 else [] for x in chains])

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        places: dict[int, list[int]] = {}
        for place, node in enumerate(self.nodes):
            places.setdefault(node, []).append(place)
        return places

    @cached_property
    def ends(self) -> np.ndarray:
        """For each owner the first position, after which its panels have reached all nodes.

        With the positions counted on around the line, a panel has reached all nodes where the last of them begins: at
        the first position of a node, or at the next position of a node of which one lies before the owner.
        """
        size = len(self.nodes)
        around = np.array(self.nodes * 2)
        by_node = np.argsort(around, kind="stable")
        same = np.diff(around[by_node]) == 0
        following = np.zeros(2 * size, np.int64)  # the next position of the same node
        following[by_node[:-1][same]] = by_node[1:][same]
        first = max(places[0] for places in self._places.values())
        before = np.maximum.accumulate(np.append(first, following[: size - 1]))
        return np.asarray(before % size)

    @cached_property
    def period(self) -> int:
        """After how many panels the same ranks receive again."""
        return lcm(*map(len, self._places.values()))

    @cached_property
    def _chains(self) -> dict[tuple[int, int], list[int]]:
        return {}


@dataclass(frozen=True)
class Parts:
    """The parts of panels 0, 1, ...; the arrays have an entry for each part, or for several that are alike.

    panel : number of its panel, or what is left of it modulo a multiple of the ranks of each node.
    owner : position that owns it.   words : number of the inner indices of all that the entry stands for.
    alone : it is the whole panel, and contiguous.   first : it is the first part of its panel.
    count : how many the entry stands for; where one is less than none, another entry has as many more.
    """

    panel: np.ndarray
    owner: np.ndarray
    words: np.ndarray
    alone: np.ndarray
    first: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, panels: Iterable[tuple[list[tuple[int, IndexMap]], IndexMap]]) -> Parts:
        """Return the parts of panels, given for each panel the owners and index maps of its parts, and its own map."""
        rows = [
            (number, owner, runs.size, len(parts) == 1 and whole.contiguous, not place, 1)
            for number, (parts, whole) in enumerate(panels)
            for place, (owner, runs) in enumerate(parts)
        ]
        return cls(*np.array(rows, np.int64).reshape(-1, 6).T)


def relayed(breadth: int, parts: Parts, line: NodeLine, me: int) -> Traffic:
    """Return the traffic of the rank at position `me` when panels of `breadth` rows are read in place and relayed."""
    if not breadth or len(line.nodes) == 1:
        return Traffic()
    words, mine = breadth * parts.words, parts.owner == me
    if not line.several:
        read = int(words[~mine].sum())
        return Traffic(words_received=read, words_read=read)
    near, nodes = line.near(me), np.array(line.nodes)
    here = nodes[parts.owner] == nodes[me]
    receiver = parts.panel % len(near) == near.index(me)
    takes = receiver & ~here
    sends = mine | (takes & (nodes[line.ends[parts.owner]] != nodes[me]))
    put_together = parts.first.astype(bool) & ~(parts.alone.astype(bool) & here)
    signals = int((parts.count * np.where(receiver, len(near) - 1, min(1, len(near) - 1)))[put_together].sum())
    return Traffic(
        words_sent=int(words[sends].sum()),
        words_received=int(words[~mine].sum()),
        messages_sent=int(parts.count[sends].sum()) + signals,
        messages_received=int(parts.count[takes].sum()) + signals,
        words_read=int(words[~mine & ~takes].sum()),
    )


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
