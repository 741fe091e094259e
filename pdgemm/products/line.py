"""The ranks of a grid row or column, and the nodes that they are on."""

from __future__ import annotations

from dataclasses import dataclass

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
        return len(set(self.nodes)) > 1

    def near(self, place: int) -> list[int]:
        """The places on the same node."""
        return [other for other, node in enumerate(self.nodes) if node == self.nodes[place]]

    def receiver(self, place: int, slot: int) -> int:
        """Who takes what comes to the node of a place in a slot of the ring: they take turns."""
        near = self.near(place)
        return near[slot % len(near)]

    def chain(self, owner: int, slot: int) -> list[int]:
        """The places that a panel passes through: its owner, then a receiver on each other node."""
        size = len(self.nodes)
        first = {self.nodes[owner]: owner}  # by node, in the order of places after the owner's
        for step in range(1, size):
            place = (owner + step) % size
            first.setdefault(self.nodes[place], self.receiver(place, slot))
        return list(first.values())


def relayed(
    breadth: int, panels: list[tuple[list[tuple[int, Pairing]], Pairing]], line: Line, me: int, slots: int
) -> Traffic:
    """Traffic of the rank at place `me` when panels of `breadth` rows are read in place, and relayed between nodes.

    panels : of each, the owners of its parts and what they have of it, and the whole.
    """
    total = Traffic()
    if not breadth or len(line.nodes) == 1:
        return total
    near = line.near(me)
    for number, (parts, whole) in enumerate(panels):
        slot = number % slots
        receiver = line.receiver(me, slot)
        in_place = len(parts) == 1 and parts[0][0] in near and whole.single
        signals = 0 if in_place or not line.several or len(near) == 1 else len(near) - 1 if me == receiver else 1
        total.messages_sent += signals
        total.messages_received += signals
        for owner, runs in parts:
            words, chain = breadth * runs.size, line.chain(owner, slot)
            if me in chain[:-1]:
                total.sent(words)
            if me in chain[1:]:
                total.received(words)
            elif me != owner:
                total.read(words)
    return total
