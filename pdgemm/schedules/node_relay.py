"""The relay of panels between nodes along a grid row or grid column; within a node, panels are read in place."""

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
from pdgemm.schedules.steps import OwnerPair, owner_pairs


class RelayRole(NamedTuple):
    """The roles of the ranks of one node for one panel; a position is an index along the grid row or grid column.

    in_place : all ranks of the node read the whole panel in the memory of its owner.
    receiver : if not `in_place`, the rank that assembles the panel; the `readers` read it in the receiver's memory.
    chains   : for each part of the panel, the positions that relay it; [] if this rank is not among them.
    """

    in_place: bool
    receiver: int
    readers: list[int]
    chains: list[list[int]]


@dataclass(frozen=True)
class NodeLine:
    """The nodes of the positions 0, 1, ... along a grid row or grid column.

    nodes : the node of each position.

    A panel is sent once to each other node: from its owner to the receiver on the next node, and from there to the
    receiver on the node after that, as around a ring.  The other ranks of a node read the panel from its receiver.
    """

    nodes: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Are the positions on more than one node?"""
        return len(self._places) > 1

    def near(self, place: int) -> list[int]:
        """Return the positions on the node of position `place`."""
        return self._places[self.nodes[place]]

    def receiver(self, place: int, turn: int) -> int:
        """Return the receiver of panel number `turn` on the node of `place`; the positions of a node take turns."""
        near = self.near(place)
        return near[turn % len(near)]

    def chain(self, owner: int, turn: int) -> list[int]:
        """Return the positions that relay panel number `turn`: its owner, then the receiver on each other node."""
        key = owner, turn % self.period
        if key not in self._chains:
            size = len(self.nodes)
            first = {self.nodes[owner]: owner}  # by node, in the order of the positions after the owner
            for step in range(1, size):
                place = (owner + step) % size
                first.setdefault(self.nodes[place], self.receiver(place, turn))
            self._chains[key] = list(first.values())
        return self._chains[key]

    def role(self, me: int, owners: list[int], one_run: bool, turn: int) -> RelayRole:
        """Return the roles on the node of position `me` for panel number `turn`.

        owners  : positions that own the parts of the panel.
        one_run : the columns of the panel are contiguous in the array of its owner.
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
        """For each owner, a position on the node that its panels reach last.

        Panels go around the line from the owner on, and reach each node at the node's first position after the owner.
        The result is the last of these positions.
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
        """The number of panels after which the same ranks are receivers again."""
        return lcm(*map(len, self._places.values()))

    @cached_property
    def _chains(self) -> dict[tuple[int, int], list[int]]:
        return {}


@dataclass(frozen=True)
class Parts:
    """The parts of panels 0, 1, ...: a panel has one part for each position that owns some of it.

    Each field is an array with one entry for each part, or one for several similar parts of different panels:
    panel : number of the panel, or this number modulo a common multiple of the numbers of ranks of the nodes.
    owner : position that owns the part.   words : number of inner indices of all parts of the entry together.
    alone : the part is a whole, contiguous panel.   first : the part is the first part of its panel.
    count : number of parts of the entry; a negative entry corrects another entry that counts too many parts.
    """

    panel: np.ndarray
    owner: np.ndarray
    words: np.ndarray
    alone: np.ndarray
    first: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, panels: Iterable[tuple[list[tuple[int, IndexMap]], IndexMap]]) -> Parts:
        """Return the parts of panels.

        panels : for each panel, a list of the owner and the index map of each part, and the index map of the panel.
        """
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
    signals = int((parts.count * np.where(receiver, len(near) - 1, 1))[put_together].sum())
    return Traffic(
        words_sent=int(words[sends].sum()),
        words_received=int(words[~mine].sum()),
        messages_sent=int(parts.count[sends].sum()) + signals,
        messages_received=int(parts.count[takes].sum()) + signals,
        words_read=int(words[~mine & ~takes].sum()),
    )


def parts_by_number(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int, period: int) -> tuple[Parts, Parts]:
    """Return the parts of the panels of A, and the parts of the panels of B, in `summa_steps`.

    Panels with the same owners in A and in B share an entry if their numbers are equal modulo `period`.
    """
    pairs = owner_pairs(inner_a, inner_b, width)
    rows: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = [], []
    for (number, words, count), pair in _classes(pairs, period):
        for into, owner in zip(rows, pair.owners):
            into.append((number, owner, words, 1, 1, count))
    for place, pair in enumerate(pairs):
        for operand, into in enumerate(rows):
            for panel in pair.cut(operand):  # the loop above counted this panel as one run
                number = sum(min(x.panels, panel) for x in pairs) + sum(x.panels > panel for x in pairs[:place])
                words = _words(pair, panel, 1, 1)
                for alone, sign in ((0, 1), (1, -1)):
                    into.append((number % period, pair.owners[operand], sign * words, alone, 1, sign))
    a, b = (Parts(*np.array(x, np.int64).reshape(-1, 6).T) for x in rows)
    return a, b


def _classes(pairs: list[OwnerPair], period: int) -> Iterator[tuple[tuple[int, int, int], OwnerPair]]:
    """Yield classes of panels: (panel number modulo `period`, inner indices, number of panels), and their owner pair.

    Owner pairs take turns.  So the number of the next panel of a pair is larger than that of its last panel by the
    number of pairs that still have panels.
    """
    before = start = 0
    for end in sorted({pair.panels for pair in pairs}):
        left = [pair for pair in pairs if pair.panels > start]
        cycle = period // gcd(len(left), period)
        for place, pair in enumerate(left):
            for turn in range(start, min(end, start + cycle)):
                count = -(-(end - turn) // cycle)
                number = before + (turn - start) * len(left) + place
                yield (number % period, _words(pair, turn, cycle, count), count), pair
        before += len(left) * (end - start)
        start = end


def _words(pair: OwnerPair, first: int, step: int, count: int) -> int:
    """Return the number of inner indices of `count` panels: number first, first + step, first + 2 step, ..."""
    ends = (_floor_sum(count, pair.panels, pair.total * step, pair.total * (first + x)) for x in (1, 0))
    return next(ends) - next(ends)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of (a i + b) // m over i = 0, ..., n - 1, by Euclid's algorithm; all arguments >= 0, m > 0."""
    total = 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        most = a * n + b
        if most < m:
            return total
        n, b = divmod(most, m)
        m, a = a, m
