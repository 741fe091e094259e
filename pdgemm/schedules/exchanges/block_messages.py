"""The base of all exchanges: blocks from rank to rank, in messages of a few bytes, or one message between two nodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.layout import Order
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.mover_registry import SHARED
from pdgemm.schedules.rounds import LINE, Messages, Round
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.support.members import remembered, remembered_if

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


PACKED_BYTES = 1 << 20  # bytes of a message, which stays in cache while it is packed, sent and unpacked
DEVICE_BYTES = 1 << 25  # bytes of a message on a device, where each message costs launches and waits
MOST_JOINED = 1 << 25  # bytes of the largest message between two nodes
NODE_BYTES = 1 << 22  # bytes of the messages of a rank to other nodes in one step, if they are that short
EXCHANGE = "exchange"  # kind of the messages of all exchanges
SLOTS, DEVICE_SLOTS = 2, 4  # messages in flight in each direction
_MOST_RUNS = 1 << 17  # runs in the index maps of a result that is cached, at 32 bytes each


def worth_keeping(result: object) -> bool:
    return not isinstance(result, list) or sum(len(x.rows.lengths) + len(x.cols.lengths) for x in result) < _MOST_RUNS


class Block(NamedTuple):
    """The rows times columns that a rank and a peer exchange: index maps from the local array to the message, or back.

    part : the number of the array that contains the block, for a rank with several arrays.
    """

    peer: int
    rows: IndexMap
    cols: IndexMap
    part: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.size, self.cols.size


class Redistribution(Schedule):
    """The base of all exchanges: blocks are sent in messages of at most `words` elements, a few messages at a time."""

    size: int
    words: int
    copies_only: bool
    shared: bool = False
    device: str = ""
    staged: bool = False
    nccl: bool = False
    nodes: tuple[int, ...] = ()
    algorithm = "redistribute"
    lookahead = 0

    @property
    def grid(self) -> RankMap:
        return RankMap.of_line(range(self.size))

    @property
    def panel_dtype(self) -> np.dtype:
        return self.wire

    @property
    def events(self) -> int:
        return self.traffic(0).messages_received

    @cached_property
    def by_nodes(self) -> NodeMessages | None:
        """The messages between nodes; None where ranks send to ranks."""
        at_once = max(1, NODE_BYTES // (self.words * self.wire.itemsize))
        return NodeMessages(self.nodes, *self.words_of, self.words, at_once) if self.nodes else None

    def joined(self, nodes: tuple[int, ...]) -> Self:
        """Return the exchange with one message between two nodes.   nodes : the node of each rank."""
        joined: Any = replace(self, nodes=nodes, words=1)  # type: ignore[type-var]
        return replace(joined, words=max(1, int(joined.by_nodes.words.max())))

    @property
    @abstractmethod
    def words_of(self) -> tuple[WordsOf, WordsOf]:
        """The functions `words_to` and `words_from` of `NodeMessages`."""

    def words_with(self, rank: int) -> Iterator[np.ndarray]:
        """Yield the words that a rank sends to each rank, and those that it receives from each rank."""
        return (words_of(np.array([rank])) for words_of in self.words_of)

    def rounds(self) -> Iterator[Round]:
        """Yield all messages, or reads, in one round; messages between nodes in several."""
        if self.by_nodes:
            yield from self.by_nodes.rounds(self.wire.itemsize)
            return
        source, target, rows, cols = self.blocks_sent()
        kind, words = SHARED.name, rows * cols
        if not self.shared:
            kind, (block, words) = EXCHANGE, self._message_words(rows, cols)
            source, target = source[block], target[block]
        yield Round([Messages(kind, source, target, words, self.wire.itemsize, LINE)], hidden=False)

    def blocks_sent(self) -> tuple[np.ndarray, ...]:
        """Return the sender, receiver, rows and columns of each block that any rank sends, as four arrays."""
        sent = [(rank, x.peer, *x.shape) for rank in range(self.size) for x in self.sends(rank)]
        return tuple(np.array(sent, np.int64).reshape(-1, 4).T)

    def copied(self, rank: int) -> int:
        """Return the bytes that a rank copies within its own memory, or reads in that of others.

        Between nodes, it copies what it sends and what it receives into buffers of its node, and out of them.
        """
        words = self.staying_words(rank)
        if self.by_nodes:
            words += sum(int(each.sum()) for each in self.words_with(rank))
        return words * self.wire.itemsize

    def staying_words(self, rank: int) -> int:
        """Return the words that a rank copies within its own memory."""
        return sum(x.rows.size * x.cols.size for x in self.staying(rank))

    @property
    @abstractmethod
    def order(self) -> Order:
        """The memory order of the result, and of the messages."""

    @property
    @abstractmethod
    def wire(self) -> np.dtype:
        """The type of elements in messages."""

    @property
    @abstractmethod
    def wide(self) -> np.dtype:
        """The type in which alpha X + beta Y is computed."""

    @property
    @abstractmethod
    def conjugates(self) -> bool:
        """Does the exchange conjugate the elements?"""

    @abstractmethod
    def blocks(self, rank: int, form: Callable[[IndexMap], IndexMap], by_target: bool) -> Iterable[Block]:
        """Yield a block of X on `rank` for each array of Y, on any rank, that receives elements of this rank's X.

        by_target : yield instead a block of Y on `rank` for each array of X from which this rank's Y gets elements.
        form : is applied to the two index maps of a block, which map rows (columns) of X to rows (columns) of Y.
        """

    @remembered_if(worth_keeping)
    def sends(self, rank: int) -> list[Block]:
        """Return the blocks that `rank` sends, to the nearest following rank first."""
        blocks = self.blocks(rank, IndexMap.pack, by_target=False)
        return sorted((x for x in blocks if x.peer != rank), key=lambda x: ((x.peer - rank) % self.size, x.part))

    @remembered_if(worth_keeping)
    def pulls(self, rank: int) -> list[Block]:
        """Return all blocks of Y on `rank`, with maps from X to Y: local ones first, others in `receives` order."""
        return self._received(rank, lambda x: x)

    @remembered_if(worth_keeping)
    def receives(self, rank: int) -> list[Block]:
        """Return the blocks that `rank` receives, from the nearest preceding rank first."""
        return [x for x in self._received(rank, IndexMap.unpack) if x.peer != rank]

    @remembered_if(worth_keeping)
    def staying(self, rank: int) -> list[Block]:
        """Return the blocks that `rank` copies within its own memory."""
        return [x for x in self._received(rank, lambda x: x) if x.peer == rank]

    def _received(self, rank: int, form: Callable[[IndexMap], IndexMap]) -> list[Block]:
        return sorted(self.blocks(rank, form, by_target=True), key=lambda x: ((rank - x.peer) % self.size, x.part))

    @remembered
    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages that a rank sends of X and receives for Y."""
        if self.by_nodes:
            return self.by_nodes.traffic(rank)
        ways = ([x.shape for x in blocks] for blocks in (self.sends(rank), self.receives(rank)))
        sent, received = (self.counted(*np.array(shapes, np.int64).reshape(-1, 2).T) for shapes in ways)
        return Traffic(sent[0], received[0], sent[1], received[1])

    def tiles(self, block: Block, words: int = 0) -> Iterator[tuple[IndexMap, IndexMap]]:
        """Yield the tiles of a block, in the same order on all ranks.

        words : the most elements of a tile; 0: as many as in a message.
        """
        rows, cols = block.shape
        tile_rows, tile_cols = self.tile(rows, cols, words or self.words)
        columns = [block.cols.cut(c, min(cols, c + tile_cols)) for c in range(0, cols, tile_cols)]
        for r in range(0, rows, tile_rows):
            part = block.rows.cut(r, min(rows, r + tile_rows))
            yield from ((part, column) for column in columns)

    def tile(self, rows: int, cols: int, words: int) -> tuple[int, int]:
        """Return the shape of a tile: whole rows, if rows are contiguous in the target, otherwise whole columns."""
        long, short = (cols, rows) if self.order == "C" else (rows, cols)
        long = min(long, words)
        short = max(1, min(short, words // long))
        return (short, long) if self.order == "C" else (long, short)

    def counted(self, rows: np.ndarray, cols: np.ndarray) -> tuple[int, int]:
        """Return the words and the messages of all blocks with these numbers of rows and columns."""
        some = rows * cols > 0
        long, short, length, lines = self._sides(rows[some], cols[some])
        return int((long * short).sum()), int((-(-long // length) * -(-short // lines)).sum())

    def _sides(self, rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the two sides of each block, and those of its tiles, as `tile` returns them for one block."""
        long, short = (cols, rows) if self.order == "C" else (rows, cols)
        length = np.minimum(long, self.words)
        return long, short, length, np.clip(self.words // length, 1, short)

    def _message_words(self, rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the block of each message, and the words of the message, as `tiles` cuts the blocks."""
        long, short, length, lines = self._sides(rows, cols)
        along = -(-long // length)
        tiles = along * -(-short // lines)
        block = np.repeat(np.arange(len(tiles)), tiles)
        down, across = divmod(np.arange(len(block)) - (tiles.cumsum() - tiles)[block], along[block])
        words = np.minimum(length[block], long[block] - across * length[block])
        return block, words * np.minimum(lines[block], short[block] - down * lines[block])

    def slots(self, rank: int | None) -> tuple[int, int]:
        """Return the numbers of messages in flight to and from `rank`; for rank None, the maximum over all ranks."""
        most = self.by_nodes.slots if self.by_nodes else 1 if self.nccl else DEVICE_SLOTS if self.device else SLOTS
        if rank is None or self.nodes:
            return most, most
        traffic = self.traffic(rank)
        return min(most, traffic.messages_received), min(most, traffic.messages_sent)

    def buffers(self, rank: int | None) -> Buffers:
        arriving, leaving = self.slots(rank)
        scratch = 0 if self.copies_only or self.device else 2 * self.words
        return {
            "arriving": (arriving * self.words, self.wire),
            "leaving": (leaving * self.words, self.wire),
            "scratch": (scratch, self.wide),
        }


AnyExchange = TypeVar("AnyExchange", bound=Redistribution)
