"""A binary tree over ranks as a value: triangles of k columns go up to the first rank, and what it makes comes down.

Of six ranks 0 receives from 1, then from 2, which has received from 3, and then from 4, which has received from 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.rounds import COLS, Messages, Round

MEASURED = 2  # numbers that come down with a factor of A^H A: how far it is from I, and its shift


@dataclass(frozen=True)
class Tree:
    """Messages along the edges of a binary tree.

    ranks : the ranks in the order of their rows; the first is the root.
    up    : words that each sends to its parent; 0: no message.   down : words that its parent sends to it.
    """

    ranks: tuple[int, ...]
    up: tuple[int, ...]
    down: tuple[int, ...]

    def parent(self, at: int) -> int:
        """Return the place of the parent of the rank at a place; -1 for the root."""
        return at & (at - 1) if at else -1

    def children(self, at: int) -> list[int]:
        """Return the places of the children, in the order in which they are received: that of their rows."""
        return children(at, len(self.ranks))

    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages of a rank."""
        total = Traffic()
        if rank in self.ranks:
            at = self.ranks.index(rank)
            edges = [(at, True)] * (at > 0) + [(child, False) for child in self.children(at)]
            for child, mine in edges:
                for words, sent in ((self.up[child], mine), (self.down[child], not mine)):
                    if words:
                        (total.sent if sent else total.received)(words)
        return total

    def rounds(self, itemsize: int) -> Iterator[Round]:
        """Yield the messages, level by level: up, and down again."""
        places, ranks = np.arange(1, len(self.ranks)), np.array(self.ranks)
        levels = [places[(places & -places) == 1 << s] for s in range(len(self.ranks).bit_length())]
        for rising, words in ((True, np.array(self.up)), (False, np.array(self.down))):
            for level in levels if rising else levels[::-1]:
                at = level[words[level] > 0]
                ends = ranks[at], ranks[at & (at - 1)]
                source, target = ends if rising else ends[::-1]
                yield Round([Messages("reduce", source, target, words[at], itemsize, COLS)], hidden=False)


def children(at: int, size: int) -> list[int]:
    """Return the places of the children of a place in a tree of so many places."""
    steps = (1 << s for s in range(size.bit_length()))
    return [at + step for step in steps if step < (at & -at or size) and at + step < size]


def packed(height: int, k: int) -> int:
    """Return the words on and above the diagonal of the first rows of a matrix of k columns."""
    return height * k - height * (height - 1) // 2


def heights(rows: Sequence[int], k: int) -> list[int]:
    """Return the rows of the triangle that each rank sends to its parent: those of all ranks below it, at most k."""
    ends = [at + (at & -at or len(rows)) for at in range(len(rows))]
    return [min(k, sum(rows[at:end])) for at, end in enumerate(ends)]


@lru_cache(maxsize=64)
def tsqr_tree(ranks: tuple[int, ...], rows: tuple[int, ...], k: int) -> Tree:
    """Return the tree of TSQR: R goes up, and the R of all with the rows that form Q comes down.

    rows : the rows of the matrix that each rank has; any numbers, also 0.
    """
    high = heights(rows, k)
    return Tree(ranks, tuple(packed(h, k) for h in high), tuple(packed(k, k) + h * k for h in high))


@lru_cache(maxsize=64)
def gram_tree(ranks: tuple[int, ...], rows: tuple[int, ...], k: int) -> Tree:
    """Return the tree of a pass of CholeskyQR: A^H A is summed up on the way up, and its factor R comes down."""
    high = heights(rows, k)
    return Tree(ranks, tuple(packed(k, k) * (h > 0) for h in high), (packed(k, k) + MEASURED,) * len(ranks))


@lru_cache(maxsize=64)
def broadcast_tree(ranks: tuple[int, ...], words: int) -> Tree:
    """Return the tree by which all ranks get what the first one has."""
    return Tree(ranks, (0,) * len(ranks), (words,) * len(ranks))
