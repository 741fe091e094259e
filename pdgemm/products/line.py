"""The ranks of a grid row or column, and the nodes that they are on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from pdgemm.grids.runs import Pairing
from pdgemm.timing import Traffic


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


def relayed(breadth: int, panels: list[tuple[list[tuple[int, Pairing]], Pairing]], line: Line, me: int) -> Traffic:
    """Traffic of the rank at place `me` when panels of `breadth` rows are read in place, and relayed between nodes.

    panels : of each, the owners of its parts and what they have of it, and the whole.
    """
    total = Traffic()
    if not breadth or len(line.nodes) == 1:
        return total
    near = line.near(me)
    for turn, (parts, whole) in enumerate(panels):
        receiver = line.receiver(me, turn)
        in_place = len(parts) == 1 and parts[0][0] in near and whole.single
        signals = 0 if in_place or not line.several or len(near) == 1 else len(near) - 1 if me == receiver else 1
        total.messages_sent += signals
        total.messages_received += signals
        for owner, runs in parts:
            words, chain = breadth * runs.size, line.chain(owner, turn)
            if me in chain[:-1]:
                total.sent(words)
            if me in chain[1:]:
                total.received(words)
            elif me != owner:
                total.read(words)
    return total
