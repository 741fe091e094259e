"""The rounds of a schedule, as values: in each round, all ranks exchange messages, and then all ranks compute.

The simulator walks the rounds of a schedule, and a `Tally` sums the traffic and the work of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.mover_registry import MOVERS, RING, SHARED, reads
from pdgemm.schedules.node_relay import NodeLine


class Messages(NamedTuple):
    """Messages of one kind that are sent at the same time: message x is sent from source[x] to target[x].

    kind  : the mover, or another transport.  With a mover that reads, targets read their sources' memory instead.
    along : the name of the grid axis along which the messages are sent.
    """

    kind: str
    source: np.ndarray
    target: np.ndarray
    words: np.ndarray
    itemsize: int
    along: str

    @property
    def read(self) -> bool:
        return reads(self.kind)


ROWS, COLS, LAYERS = "row", "col", "depth"  # axes: along a grid row, along a grid column, through the layers
LINE = "line"  # an axis that joins all ranks of a grid in their order, whatever the other axes are


PRODUCT, MEMORY = "product", "memory"  # kinds of work: m n k multiplications, or k passes over m n elements


class WorkPiece(NamedTuple):
    """A piece of work that all ranks do at the same time.

    extents : m, n and k, each a number for all ranks, or an array with an entry for each rank.
    kind    : `PRODUCT` or `MEMORY`.
    share   : factor on the flops of a product, or an array of factors by rank; less than 1 for one triangle of C.
    """

    extents: tuple[Any, Any, Any]
    kind: str = PRODUCT
    share: Any = 1.0


@dataclass
class Round:
    """The messages and the work of all ranks in one round.

    moves  : messages that arrive, or panels that are read, before the work.
    work   : pieces of work, one after the other.
    hidden : the messages may overlap with the work of the previous round.
    """

    moves: list[Messages] = field(default_factory=list)
    work: list[WorkPiece] = field(default_factory=list)
    hidden: bool = True

    @property
    def transfers(self) -> list[Messages]:
        """The moves that take time: messages and copies, but not panels that are read in place."""
        return [x for x in self.moves if not (x.read and MOVERS[x.kind].by == "reading")]


class Channel(NamedTuple):
    """The common properties of messages that are counted together."""

    kind: str
    itemsize: int
    along: str
    after: bool  # the messages do not overlap with products


class Tally:
    """The traffic and work of each rank, summed over the rounds of a schedule.

    steps : number of pieces of work in which any rank multiplies.   widest : inner indices of the widest product.
    """

    def __init__(self, rounds: Iterable[Round], ranks: int) -> None:
        self.steps = self.widest = 0
        self._ranks, self._channels = ranks, dict[Channel, np.ndarray]()
        self._m, self._n, self._k = np.zeros((3, ranks), np.int64)
        for at in rounds:
            self.add(at)

    def add(self, at: Round) -> None:
        """Add the messages and products of one more round."""
        for x in at.moves:
            self._add(x, not at.hidden)
        for piece in at.work:
            m, n, k = (one_each(size, self._ranks) for size in piece.extents)
            busy = m * n * k > 0
            if piece.kind == PRODUCT and busy.any():
                self.steps += 1
                self.widest = max(self.widest, int(k[busy].max()))
                self._m, self._n = np.maximum(self._m, m), np.maximum(self._n, n)
                self._k += k

    def _add(self, x: Messages, after: bool) -> None:
        """Count messages.   after : the messages do not overlap with products."""
        counts = self._channels.setdefault(
            Channel(x.kind, x.itemsize, x.along, after), np.zeros((5, self._ranks), np.int64)
        )
        pieces = np.maximum(1, -(-x.words // max(1, LARGEST_MESSAGE_BYTES // x.itemsize)))  # a signal is empty

        def by_rank(ranks: np.ndarray, numbers: np.ndarray) -> np.ndarray:
            return np.bincount(ranks, numbers, self._ranks).astype(np.int64)

        received = by_rank(x.target, x.words)
        if x.read:
            counts[[1, 4]] += received
        else:
            counts[:4] += [by_rank(x.source, x.words), received, by_rank(x.source, pieces), by_rank(x.target, pieces)]

    @property
    def counts(self) -> np.ndarray:
        """Five rows: words sent, words received, messages sent, messages received, words read; a column per rank."""
        return sum(self._channels.values(), np.zeros((5, self._ranks), np.int64))

    def of(self, rank: int) -> dict[Channel, Traffic]:
        """Return the traffic of a rank by channel; channels that the rank does not use are left out."""
        if rank >= self._ranks:
            return {}
        by_channel = {channel: Traffic(*counts[:, rank].tolist()) for channel, counts in self._channels.items()}
        return {channel: traffic for channel, traffic in by_channel.items() if traffic != Traffic()}

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        """Return the most rows and columns in one product of a rank, and the inner indices of all its products."""
        sizes = (self._m, self._n, self._k)
        m, n, k = (int(x[rank]) if rank < self._ranks else 0 for x in sizes)
        return m, n, k


def grid_of(layout: Layout) -> np.ndarray:
    """Return the ranks of a layout as an array over the grid positions."""
    return np.array(layout.rank_map).reshape(layout.distribution.grid_shape)


def counts_of(dimension: BlockCyclic) -> np.ndarray:
    """Return the number of indices in each part of a dimension."""
    return np.array([dimension.count(part) for part in range(dimension.parts)])


def broadcast(
    mover: str, grid: np.ndarray, root: int | np.ndarray, words: np.ndarray, itemsize: int, along: str = ROWS
) -> list[Messages]:
    """Return the messages that broadcast words[i] along each row i of the array `grid`, from its column `root`.

    root : one column for all rows, or an array with the column of each row.
    """
    rows, cols = grid.shape
    line, first = np.arange(rows)[:, None], np.reshape(root, (-1, 1))
    senders = np.zeros(cols - 1, int) if reads(mover) else MOVERS[mover].senders(cols)
    source, target = grid[line, (first + senders) % cols], grid[line, (first + np.arange(1, cols)) % cols]
    return messages(mover, source, target, np.broadcast_to(words[:, None], (rows, cols - 1)), itemsize, along)


def relay(
    lines: list[NodeLine],
    grid: np.ndarray,
    parts: list[tuple[int, IndexMap]],
    whole: IndexMap,
    turn: int,
    breadth: np.ndarray,
    itemsize: int,
    along: str = ROWS,
) -> list[Messages]:
    """Return the messages and reads of panel number `turn` in each row of `grid`: sent between nodes, read on a node.

    lines : nodes along each row.       parts   : owner and index map of each part of the panel.
    whole : index map of the panel.     breadth : number of rows of the panel in each row of `grid`.
    """
    owners, in_one_run = [owner for owner, _ in parts], whole.contiguous
    sent, read = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for line, row, m_loc in zip(lines, grid.tolist(), breadth.tolist()):
        if not m_loc or len(row) == 1:
            continue
        for me in range(len(row)):
            role = line.role(me, owners, in_one_run, turn)
            if me == role.receiver:  # signals to the readers, which reply after reading
                sent += [x for other in role.readers for x in ((row[me], row[other], 0), (row[other], row[me], 0))]
            for (owner, runs), chain in zip(parts, role.chains):
                words = m_loc * runs.size
                if chain and me != owner:
                    sent.append((row[chain[chain.index(me) - 1]], row[me], words))
                elif me != owner:
                    read.append((row[owner if owner in line.near(me) else role.receiver], row[me], words))
    moves = []
    for kind, moved in ((RING.name, sent), (SHARED.name, read)):
        source, target, words = np.array(moved, np.int64).reshape(-1, 3).T
        moves.append(Messages(kind, source, target, words, itemsize, along))
    return moves


def reduce(grid: np.ndarray, root: int, words: np.ndarray, itemsize: int, along: str = ROWS) -> list[Messages]:
    """Return the messages that reduce words[i] along each row i of the array `grid` to its column `root`."""
    source = np.delete(grid, root, axis=1)
    target = np.broadcast_to(grid[:, [root]], source.shape)
    return messages("reduce", source, target, np.broadcast_to(words[:, None], source.shape), itemsize, along)


def messages(
    kind: str, source: np.ndarray, target: np.ndarray, words: np.ndarray, itemsize: int, along: str
) -> list[Messages]:
    """Return one `Messages`, in a list, without the empty messages, which are not sent."""
    sent = words.ravel() > 0
    return [Messages(kind, source.ravel()[sent], target.ravel()[sent], words.ravel()[sent], itemsize, along)]


def signals(source: np.ndarray, targets: np.ndarray, itemsize: int, along: str) -> Messages:
    """Return empty messages from source[x] to all of targets[x], which signal that the source's data can be read."""
    repeated = np.repeat(source, targets.shape[1])
    return Messages(RING.name, repeated, targets.ravel(), np.zeros(repeated.size, np.int64), itemsize, along)


def products(grid: np.ndarray, m: Any, n: Any, k: Any, share: Any = 1.0) -> list[WorkPiece]:
    """Return one product of each rank as a piece of work, in a list; the extents m, n, k are per grid position."""

    def by_rank(x: Any) -> np.ndarray:
        sizes = np.zeros(int(grid.max()) + 1, int)
        sizes[grid] = np.broadcast_to(x, grid.shape)
        return sizes

    return [WorkPiece((by_rank(m), by_rank(n), by_rank(k)), share=share)]


def one_each(sizes: Any, ranks: int) -> np.ndarray:
    """Return a size for each rank.   sizes : one for all ranks, or an array for the first ranks; the others get 0."""
    if np.ndim(sizes) == 0:
        return np.full(ranks, sizes)
    full = np.zeros(ranks, int)
    full[: len(sizes)] = sizes
    return full
