"""The steps of collective operations on any number of ranks: source, target and parts of each message.

A vector is cut into parts.  `members` are the places of the ranks that take part, that is, their indices in
`Collective.ranks`.  Member i owns the parts cuts[i] to cuts[i + 1], possibly none.  A range of parts continues at part
0 after the last part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class CollectiveStep(NamedTuple):
    """Messages that are sent at the same time; entries with the same source and target are one message.

    source, target : places of ranks.   first, number : the range of parts that a message carries.
    adds : the target adds the received parts to its parts; otherwise it overwrites its parts with them.
    """

    source: np.ndarray
    target: np.ndarray
    first: np.ndarray
    number: np.ndarray
    adds: bool = False

    @property
    def reversed(self) -> CollectiveStep:
        """The messages in the opposite direction; they carry the same parts, which are not added."""
        return CollectiveStep(self.target, self.source, self.first, self.number)


CollectiveSteps = Iterator[CollectiveStep]


def powers_below(size: int) -> list[int]:
    """Return the powers of two 1, 2, 4, ... below `size`."""
    return [1 << s for s in range(size.bit_length()) if 1 << s < size]


def side_by_side(*groups: CollectiveSteps) -> CollectiveSteps:
    """Yield the steps of several groups of ranks at the same time: the first step of all groups, then the second."""
    while steps := [x for x in (next(group, None) for group in groups) if x is not None]:
        source, target, first, number = (np.concatenate([x[at] for x in steps]) for at in range(4))
        yield CollectiveStep(source, target, first, number, steps[0].adds)


# ---------------------------------------------------------------- rings
def ring_reduce_scatter(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send each part once around the ring, from the member after its owner to its owner; members add their addends."""
    p = len(members)
    for step in range(p - 1):
        yield _owned(members, np.roll(members, -1), cuts, (np.arange(p) - step - 1) % p, adds=True)


def ring_all_gather(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send each part once around the ring, from its owner."""
    p = len(members)
    for step in range(p - 1):
        yield _owned(members, np.roll(members, -1), cuts, (np.arange(p) - step) % p)


def pairwise_reduce_scatter(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send each owner its part from the members 1, 2, 3, ... places before it; the owner adds them in this order."""
    p = len(members)
    for step in range(1, p):
        to = (np.arange(p) + step) % p
        yield _owned(members, members[to], cuts, to, adds=True)


def pairwise_all_gather(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send each member's part to all other members at once."""
    at, steps = np.arange(len(members)), np.arange(1, len(members))[:, None]
    if len(steps):
        to, owner = (at + steps) % len(at), np.broadcast_to(at, (len(steps), len(at))).ravel()
        yield _owned(members[owner], members[to.ravel()], cuts, owner)


def _owned(
    source: np.ndarray, target: np.ndarray, cuts: np.ndarray, owner: np.ndarray, adds: bool = False
) -> CollectiveStep:
    return CollectiveStep(source, target, cuts[owner], cuts[owner + 1] - cuts[owner], adds)


# ---------------------------------------------------------------- halving and doubling
class _Folded:
    """The active members of a collective, whose number `size` is a power of two; `extra` members are not active.

    Among the first 2 `extra` members, each odd one is active, and also acts for the even one before it.
    """

    def __init__(self, members: np.ndarray, cuts: np.ndarray) -> None:
        self.members, self.size = members, 1 << (len(members).bit_length() - 1)
        self.extra = len(members) - self.size
        at = np.arange(self.size + 1)
        starts = np.where(at < self.extra, 2 * at, at + self.extra)  # the first member that each active one represents
        self.active = members[starts[:-1] + (at[:-1] < self.extra)]
        self.cuts = cuts[starts]
        self.even, self.odd = members[: 2 * self.extra : 2], members[1 : 2 * self.extra : 2]

    def fold(self, parts: int) -> CollectiveSteps:
        """Yield the step in which the even members send all parts to the odd members, which add them."""
        if self.extra:
            yield _all(self.even, self.odd, parts, adds=True)

    def unfold(self, first: np.ndarray, number: np.ndarray) -> CollectiveSteps:
        """Yield the step in which the odd members send parts back to the even members."""
        if self.extra:
            yield CollectiveStep(self.odd, self.even, first, number)

    def halves(self, distance: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the active members, their partners at `distance`, and the range of parts that the partner will sum."""
        at = np.arange(self.size)
        partner = at ^ distance
        side = partner // distance * distance
        first = self.cuts[side]
        return self.active, self.active[partner], first, self.cuts[side + distance] - first

    def from_the_nearest(self) -> CollectiveSteps:
        """Yield the steps in which partners at distances 1, 2, 4, ... send each other the parts that the receiver sums.

        These are the parts of the members whose places equal the receiver's modulo twice the distance.
        """
        at = np.arange(self.size)
        for distance in powers_below(self.size):
            partner = at ^ distance
            owner = (partner % (2 * distance))[:, None] + np.arange(0, self.size, 2 * distance)
            source, target = (np.repeat(self.active[x], owner.shape[1]) for x in (at, partner))
            first = self.cuts[owner].ravel()
            yield CollectiveStep(source, target, first, self.cuts[owner + 1].ravel() - first, adds=True)


def halving_reduce_scatter(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send each partner, the farthest first, the parts that the partner will sum (Rabenseifner).

    The number of parts that a member still sums halves in each step.
    """
    folded = _Folded(members, cuts)
    yield from folded.fold(int(cuts[-1]))
    for distance in powers_below(folded.size)[::-1]:
        yield CollectiveStep(*folded.halves(distance), adds=True)
    even = np.arange(0, 2 * folded.extra, 2)
    yield from folded.unfold(cuts[even], cuts[even + 1] - cuts[even])


def nearest_reduce_scatter(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send each partner, the nearest first, the parts that the partner will sum.

    The number of parts that a member still sums halves in each step.  The sums are formed as in a binary tree over the
    members.  If the addends are spread over twice as many members, and each member adds its addends up in a binary
    tree, too, the sums have the same bits.
    """
    folded = _Folded(members, cuts)
    yield from folded.fold(int(cuts[-1]))
    yield from folded.from_the_nearest()
    even = np.arange(0, 2 * folded.extra, 2)
    yield from folded.unfold(cuts[even], cuts[even + 1] - cuts[even])


def nearest_all_reduce(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Reduce-scatter from the nearest partner to the farthest, and all-gather in the opposite order."""
    folded, parts = _Folded(members, cuts), int(cuts[-1])
    yield from folded.fold(parts)
    halves = [*folded.from_the_nearest()]
    yield from halves
    for step in halves[::-1]:
        yield step.reversed
    yield from folded.unfold(np.zeros(folded.extra, int), np.full(folded.extra, parts))


def halving_doubling_all_reduce(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """All-reduce by halving and doubling among a power of two of members.

    Each further member only sends its vector to one of these at the beginning, and receives the sum from it at the end.
    """
    folded, parts = _Folded(members, cuts), int(cuts[-1])
    yield from folded.fold(parts)
    halves = [CollectiveStep(*folded.halves(distance), adds=True) for distance in powers_below(folded.size)[::-1]]
    yield from halves
    for step in halves[::-1]:
        yield step.reversed
    yield from folded.unfold(np.zeros(folded.extra, int), np.full(folded.extra, parts))


def doubling_all_reduce(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Exchange the whole vector between partners, both of which add: few messages, for short vectors."""
    folded, parts = _Folded(members, cuts), int(cuts[-1])
    yield from folded.fold(parts)
    for distance in powers_below(folded.size):
        yield _all(folded.active, folded.active[np.arange(folded.size) ^ distance], parts, adds=True)
    yield from folded.unfold(np.zeros(folded.extra, int), np.full(folded.extra, parts))


def _all(source: np.ndarray, target: np.ndarray, parts: int, adds: bool = False) -> CollectiveStep:
    return CollectiveStep(source, target, np.zeros(len(source), int), np.full(len(source), parts), adds)


def bruck_all_gather(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send the parts that a member holds to the member 1, 2, 4, ... places before it (Bruck et al. 1997)."""
    p, at, parts = len(members), np.arange(len(members)), int(cuts[-1])
    for distance in powers_below(p):
        ends = at + min(distance, p - distance)
        first = cuts[at]
        number = cuts[ends % p] + parts * (ends // p) - first
        yield CollectiveStep(members, members[at - distance], first, number)


# ---------------------------------------------------------------- trees, whose root is member 0
def binomial_reduce(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Reduce up the tree, neighbours first, then pairs of neighbours: ((x_0 + x_1) + (x_2 + x_3)) + ..."""
    for child, parent in _edges(len(members)):
        yield _all(members[child], members[parent], int(cuts[-1]), adds=True)


def binomial_broadcast(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Broadcast down the tree: the root sends to the member half the tree away, then both send a quarter away, ..."""
    for child, parent in _edges(len(members))[::-1]:
        yield _all(members[parent], members[child], int(cuts[-1]))


def binomial_gather(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Gather up the tree: each member sends its parent the parts of its subtree."""
    for child, parent in _edges(len(members)):
        ends = np.minimum(child + (child & -child), len(members))
        yield CollectiveStep(members[child], members[parent], cuts[child], cuts[ends] - cuts[child])


def binomial_scatter(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Scatter down the tree: each member sends each child the parts of the child's subtree."""
    yield from (step.reversed for step in [*binomial_gather(members, cuts)][::-1])


def _edges(size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the children and parents of a binomial tree, level by level, from the leaves."""
    levels = [np.arange(d, size, 2 * d) for d in powers_below(size)]
    return [(child, child & (child - 1)) for child in levels]


def flat_gather(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Gather without a tree: the root receives the parts of the members one after the other."""
    for at in range(1, len(members)):
        yield _owned(members[[at]], members[[0]], cuts, np.array([at]))


def flat_scatter(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Scatter without a tree: the root sends the members their parts one after the other."""
    yield from (step.reversed for step in flat_gather(members, cuts))


# ---------------------------------------------------------------- all-to-all: member s sends part s p + t to member t
def pairwise_all_to_all(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send from each member to the member 1, 2, 3, ... places after it: the fewest words possible."""
    p, at = len(members), np.arange(len(members))
    for distance in range(1, p):
        to = (at + distance) % p
        yield CollectiveStep(members, members[to], at * p + to, np.ones(p, int))


def bruck_all_to_all(members: np.ndarray, cuts: np.ndarray) -> CollectiveSteps:
    """Send parts to the member 1, 2, 4, ... places after the sender, many in one message (Bruck et al. 1997).

    A part is sent in the steps whose distances add up to the distance from its first to its last member.  No algorithm
    has fewer messages.
    """
    p, at = len(members), np.arange(len(members))
    for distance in powers_below(p):
        far = np.arange(p)[np.arange(p) & distance > 0]  # total distances of the parts that move in this step
        here, far = np.repeat(at, len(far)), np.tile(far, p)
        owner = (here - far % distance) % p
        parts = owner * p + (owner + far) % p
        yield CollectiveStep(members[here], members[(here + distance) % p], parts, np.ones(len(parts), int))
