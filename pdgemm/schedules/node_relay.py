"""The ranks of a grid row or column, and the nodes that they are on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

from pdgemm.grids.index_map import IndexMap
from pdgemm.instrument.recorder import Traffic


class Passage(NamedTuple):
    """What the ranks of one node have to do with a panel.

    in_place : they read all of it where it lies.
    receiver : else one of them puts it together, where the others, its readers, find it.
    chains   : of each part, the places that it passes through; [] if it stays, or this rank is none of them.
    """

    in_place: bool
    receiver: int
    readers: list[int]
    chains: list[list[int]]


@dataclass(frozen=True)
class Line:
    """Places 0, 1, ... along a row or column.

    nodes : the node of each place.

    A panel crosses to each other node once, to one receiver, where the others read it: from its owner to the
    receiver on the next node, and on from there, as around a ring.
    """

    nodes: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Are they on more than one node?"""
        return len(self._places) > 1

    def near(self, place: int) -> list[int]:
        """The places on the same node."""
        return self._places[self.nodes[place]]

    def receiver(self, place: int, turn: int) -> int:
        """Who takes panel number `turn` where it comes to the node of a place from another: they take turns."""
        near = self.near(place)
        return near[turn % len(near)]

    def chain(self, owner: int, turn: int) -> list[int]:
        """The places that panel number `turn` passes through: its owner, then a receiver on each other node."""
        key = owner, turn % self._period
        if key not in self._chains:
            size = len(self.nodes)
            first = {self.nodes[owner]: owner}  # by node, in the order of places after the owner's
            for step in range(1, size):
                place = (owner + step) % size
                first.setdefault(self.nodes[place], self.receiver(place, turn))
            self._chains[key] = list(first.values())
        return self._chains[key]

    def passage(self, me: int, owners: list[int], one_run: bool, turn: int) -> Passage:
        """Of panel number `turn`, to the node of the place `me`.

        owners : of its parts.   one_run : its columns follow each other in its owner's array.
        """
        near = self.near(me)
        in_place = len(owners) == 1 and owners[0] in near and one_run
        receiver = self.receiver(me, turn)
        readers = [place for place in near if place != receiver] if self.several and not in_place else []
        chains = [self.chain(owner, turn) for owner in owners]
        return Passage(in_place, receiver, readers, [x if me in x and len(x) > 1 else [] for x in chains])

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        places: dict[int, list[int]] = {}
        for place, node in enumerate(self.nodes):
            places.setdefault(node, []).append(place)
        return places

    @cached_property
    def _period(self) -> int:
        return lcm(*map(len, self._places.values()))

    @cached_property
    def _chains(self) -> dict[tuple[int, int], list[int]]:
        return {}


def relayed(breadth: int, panels: list[tuple[list[tuple[int, IndexMap]], IndexMap]], line: Line, me: int) -> Traffic:
    """Traffic of the rank at place `me` when panels of `breadth` rows are read in place, and relayed between nodes.

    panels : of each, the owners of its parts and what they have of it, and the whole.
    """
    total = Traffic()
    if not breadth or len(line.nodes) == 1:
        return total
    for turn, (parts, whole) in enumerate(panels):
        way = line.passage(me, [owner for owner, _ in parts], whole.contiguous, turn)
        signals = len(way.readers) if me == way.receiver else min(1, len(way.readers))
        total.messages_sent += signals
        total.messages_received += signals
        for (owner, runs), chain in zip(parts, way.chains):
            words = breadth * runs.size
            if chain and me != chain[-1]:
                total.sent(words)
            if chain and me != owner:
                total.received(words)
            elif me != owner:
                total.read(words)
    return total
