"""The messages of an exchange in which two nodes exchange one message, whatever the number of their ranks.

Rank to rank, a rank may send P - 1 messages, and a node of p ranks p^2 messages to each other node.  Here each rank
writes its elements for node T into one buffer on its own node; one rank sends the buffer, one rank of T receives it,
and the ranks of T copy their elements from there.  A node has N - 1 partners among N nodes, which its ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.mover_registry import SHARED
from pdgemm.schedules.rounds import LINE, Messages, Round

WordsOf = Callable[[np.ndarray], np.ndarray]


class Segment(NamedTuple):
    """The elements for one rank, or from one rank, in the buffer of `holder`, from element `start` on."""

    holder: int
    peer: int
    start: int


class NodeMessage(NamedTuple):
    """A message to a rank, or from it, of words that begin at `start` in the buffer."""

    sent: bool
    peer: int
    start: int
    words: int


class NodeMessages:
    """The messages between N nodes, in steps: node S sends to node S + d, for a few distances d in each step.

    nodes : the node of each rank.
    words_to, words_from : functions of an array of ranks, which return the words that these ranks together send to each
        rank, or receive from each rank; without what a rank copies within its own memory.
    most  : the words of the largest message.   at_once : the most messages of a rank in a step, in each direction.
    slots : the number of these messages.

    Distance d belongs to the rank at place d mod w of its node, where w is the number of ranks of the smallest node.
    So a node has w partners for each slot of a step.  At distance 0 nothing is sent: elements are written where those
    of other nodes are received.
    """

    def __init__(self, nodes: tuple[int, ...], words_to: WordsOf, words_from: WordsOf, most: int, at_once: int) -> None:
        names, self.node = np.unique(nodes, return_inverse=True)
        self.ranks = [np.flatnonzero(self.node == node) for node in range(len(names))]
        self.width = min(map(len, self.ranks))
        self.most, self.slots = most, min(at_once, -(-len(self.ranks) // self.width))
        self._to, self._from, self._known = words_to, words_from, dict[tuple[int, bool], np.ndarray]()

    @property
    def steps(self) -> Iterator[range]:
        """Yield the distances of each step."""
        nodes, each = len(self.ranks), self.width * self.slots
        return (range(d, min(d + each, nodes)) for d in range(0, nodes, each))

    @property
    def events(self) -> int:
        """The approximate number of messages and reads of a rank."""
        return len(self.ranks) + len(self.ranks) // self.width

    def holder(self, node: int, distance: int) -> int:
        """Return the rank of a node that sends, and receives, the messages of a distance."""
        return int(self.ranks[node][distance % self.width])

    def place(self, distance: int) -> int:
        """Return where the message of a distance begins in the buffers of its rank."""
        return distance // self.width % self.slots * self.most

    def at(self, node: int, distance: int) -> int:
        """Return the node at a distance after a node; nodes are numbered 0, 1, ..., around a ring."""
        return (node + distance) % len(self.ranks)

    def _by_node(self, words: np.ndarray) -> np.ndarray:
        """Return the sums over the ranks of each node."""
        return np.bincount(self.node, words, len(self.ranks)).astype(np.int64)

    @cached_property
    def words(self) -> np.ndarray:
        """The words that each node (a row) sends to each node (a column)."""
        return np.stack([self._by_node(self._to(ranks)) for ranks in self.ranks])

    def segments(self, rank: int, distances: range, outgoing: bool) -> Iterator[Segment]:
        """Yield the places in the buffers of its node of the elements that a rank sends, or receives.

        A buffer has the elements of each rank of the sending node, for each rank of the other node.
        """
        here = int(self.node[rank])
        place = int(np.flatnonzero(self.ranks[here] == rank)[0])
        of_node = self._pairs(here, outgoing)
        for d in distances:
            others = self.ranks[self.at(here, d if outgoing else -d)]
            words = of_node[:, others] if outgoing else of_node[:, others].T  # (sender, receiver)
            starts = np.cumsum(words).reshape(words.shape) - words
            own = (place, slice(None)) if outgoing else (slice(None), place)
            for peer, start, size in zip(others.tolist(), starts[own].tolist(), words[own].tolist()):
                if size:
                    yield Segment(self.holder(here, d), peer, self.place(d) + start)

    def _pairs(self, node: int, outgoing: bool) -> np.ndarray:
        """Return the words that each rank of a node (a row) sends to each rank, or receives from it."""
        if (node, outgoing) not in self._known:
            words_of = self._to if outgoing else self._from
            self._known[node, outgoing] = np.stack([words_of(np.array([rank])) for rank in self.ranks[node]])
        return self._known[node, outgoing]

    def messages(self, rank: int, distances: range) -> Iterator[NodeMessage]:
        """Yield the messages that a rank sends and receives in a step, without those of no words."""
        here = int(self.node[rank])
        for d in distances:
            if d and self.holder(here, d) == rank:
                there, before = self.at(here, d), self.at(here, -d)
                for sent, node, words in (
                    (True, there, self.words[here, there]),
                    (False, before, self.words[before, here]),
                ):
                    if words:
                        yield NodeMessage(sent, self.holder(node, d), self.place(d), int(words))

    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages of a rank: those of its node that it holds, and what it reads in buffers."""
        total, here = Traffic(), int(self.node[rank])
        to_me = self._by_node(self._from(np.array([rank])))
        for distances in self.steps:
            for message in self.messages(rank, distances):
                (total.sent if message.sent else total.received)(message.words)
            for d in distances:
                if self.holder(here, d) != rank:
                    total.read(int(to_me[self.at(here, -d)]))
        return total

    def rounds(self, itemsize: int) -> Iterator[Round]:
        """Yield the messages of each step, and what ranks read in buffers."""
        size = len(self.node)
        into = np.stack([self._by_node(self._from(np.array([rank]))) for rank in range(size)])
        every, nodes = np.arange(size), np.arange(len(self.ranks))
        for distances in self.steps:
            moves = list[Messages]()
            for d in distances:
                holders, before = (
                    np.array([self.holder(node, d) for node in range(len(nodes))]),
                    (nodes - d) % len(nodes),
                )
                words, source = into[every, before[self.node]], holders[self.node]
                read = (source != every) & (words > 0)
                moves.append(Messages(SHARED.name, source[read], every[read], words[read], itemsize, LINE))
                words, sent = self.words[before, nodes], (self.words[before, nodes] > 0) & (d > 0)
                moves.append(Messages("exchange", holders[before][sent], holders[sent], words[sent], itemsize, LINE))
            yield Round(moves, hidden=False)
