"""Walk the schedule of a product for all ranks at once: who waits for whom, and what each node sends and receives.

The same alpha-beta-gamma figures as in the formulas, but every message between the two ranks that exchange it: a
panel arrives when its sender has got there, and ranks of one node share its way to the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import singledispatch
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.model.machine import Machine
from pdgemm.schedules import Cannon, Inner, Layered, Product, Stationary, Summa
from pdgemm.schedules.product import READ
from pdgemm.schedules.steps import cannon_neighbours

MOST_EVENTS = 20_000_000  # some seconds


class Messages(NamedTuple):
    """Messages of one kind that travel at the same time: message x goes from source[x] to target[x]."""

    kind: str
    source: np.ndarray
    target: np.ndarray
    words: np.ndarray
    itemsize: int


@dataclass
class Round:
    """What all ranks do between two products.

    messages : arrive before the product.   work : (m, n, k) that ranks multiply, an array each.
    hidden   : the messages may travel while the product of the round before is computed.
    """

    messages: list[Messages] = field(default_factory=list)
    work: tuple[Any, Any, Any] = (0, 0, 0)
    hidden: bool = True


@dataclass(frozen=True)
class Simulation:
    """Seconds in which the last rank is done, and of each rank what it computed, sent and received."""

    seconds: float
    finished: np.ndarray
    computed: np.ndarray
    words_sent: np.ndarray
    words_received: np.ndarray
    messages_sent: np.ndarray
    messages_received: np.ndarray
    node_bytes: np.ndarray  # that enter each node

    def traffic(self, rank: int) -> Traffic:
        sent, received = self.words_sent[rank], self.words_received[rank]
        return Traffic(int(sent), int(received), int(self.messages_sent[rank]), int(self.messages_received[rank]))


def simulate(product: Product, machine: Machine, ranks: int) -> Simulation:
    """The events of a product on so many ranks, numbered as its layouts number them; nodes hold consecutive ranks."""
    sums = product.reduction if isinstance(product, (Layered, Inner)) else None
    events = (product.panels + (product.grid.layers * sums.turns(None) if sums else 0)) * ranks
    if events > MOST_EVENTS:
        raise ArgumentError(
            f"{events} messages and products of {ranks} ranks are too many to walk through one by one, at most "
            f"{MOST_EVENTS}; the formulas take any number"
        )
    per_node = machine.ranks_per_node or ranks
    node = np.arange(ranks) // per_node
    clock = np.array([product.memory_seconds(machine, rank) for rank in range(ranks)])
    computed, before = np.zeros(ranks), np.zeros(ranks)
    counts = np.zeros((4, ranks), np.int64)
    entering = np.zeros(int(node[-1]) + 1)
    for at in rounds(product):
        ready, near, far = clock.copy(), np.zeros(ranks), np.zeros(ranks)
        for x in at.messages:
            _count(counts, x)
            np.maximum.at(ready, x.target, clock[x.source])  # who sends has to have got there
            away = node[x.source] != node[x.target]
            _arrive(near, x, ~away, machine.intra[x.kind].alpha, machine.intra[x.kind].beta)
            link, sizes = machine.inter[x.kind], x.words[away] * x.itemsize
            into = np.bincount(node[x.target[away]], sizes, len(entering))
            out = np.bincount(node[x.source[away]], sizes, len(entering))
            entering += into
            _arrive(far, x, away, link.alpha, 0)
            waiting = np.zeros(ranks, bool)
            waiting[x.target[away]] = True
            far += waiting * np.maximum(into, out)[node] * link.beta
        moving = near + far
        hidden = machine.overlap * np.minimum(before, moving) if at.hidden and product.lookahead else 0.0
        clock = ready + before + moving - hidden
        before = _seconds(at.work, machine, product.panel_dtype, ranks)
        computed += before
        clock += machine.step * (before > 0)
    clock += before
    sent, received, messages_sent, messages_received = counts
    return Simulation(float(clock.max()), clock, computed, sent, received, messages_sent, messages_received, entering)


def _count(counts: np.ndarray, x: Messages) -> None:
    size = counts.shape[1]
    for row, ranks in ((0, x.source), (1, x.target)):
        counts[row] += np.bincount(ranks, x.words, size).astype(np.int64)
        counts[row + 2] += np.bincount(ranks, minlength=size)


def _arrive(seconds: np.ndarray, x: Messages, which: np.ndarray, alpha: float, beta: float) -> None:
    """Add what these messages take to the time of those who receive them."""
    np.add.at(seconds, x.target[which], alpha + x.words[which] * x.itemsize * beta)


def _seconds(work: tuple[Any, Any, Any], machine: Machine, dtype: np.dtype, ranks: int) -> np.ndarray:
    shapes, inverse = np.unique(np.stack([_full(x, ranks) for x in work]), axis=1, return_inverse=True)
    seconds = [machine.multiply(dtype, mnk, mnk) for mnk in zip(*shapes.tolist())]
    return np.array(seconds)[inverse.ravel()]


# ------------------------------------------------------------------ the schedules, round by round
@singledispatch
def rounds(product: Product) -> Iterator[Round]:
    """What all ranks do, step by step."""
    raise NotImplementedError(type(product).__name__)


@rounds.register
def _(product: Summa) -> Iterator[Round]:
    grid, rows, cols = _grid(product), product.A.distribution.rows, product.B.distribution.cols
    size_a, size_b = product.A.dtype.itemsize, product.B.dtype.itemsize
    high, wide = _counts_of(rows), _counts_of(cols)
    for turn, bundle in enumerate(product.bundles):
        messages = []
        for step in bundle.steps:
            if product.nodes:
                messages += _relay(product, "A", grid, step.col, turn, high * step.width, size_a)
                messages += _relay(product, "B", grid.T, step.row, turn, wide * step.width, size_b)
            else:
                messages += _broadcast(product.mover, grid, step.col, high * step.width, size_a)
                messages += _broadcast(product.mover, grid.T, step.row, wide * step.width, size_b)
        yield Round(messages, _on(grid, high[:, None], wide[None, :], bundle.width))


@rounds.register
def _(product: Stationary) -> Iterator[Round]:
    if not product.mnk[2]:
        return
    grid = _grid(product)
    high, deep = _counts_of(product.A.distribution.rows), _counts_of(product.A.distribution.cols)
    added: list[Messages] = []
    for step in product.steps:
        messages = _broadcast(product.mover, grid.T, step.row, deep * step.width, product.B.dtype.itemsize)
        yield Round(added + messages, _on(grid, high[:, None], step.width, deep[None, :]))
        added = _reduce(grid, step.col, high * step.width, product.accumulate.itemsize)
    yield Round(added)


@rounds.register
def _(product: Cannon) -> Iterator[Round]:
    if not product.mnk[2]:
        return
    grid, (pr, pc) = _grid(product), product.C.distribution.grid_shape
    i, j = np.indices(grid.shape)
    steps = np.array([[[*step] for step in product.steps(rank)] for rank in grid.ravel().tolist()])
    held_a, held_b = steps.reshape(pr, pc, pc, 2).transpose(3, 2, 0, 1)  # by step
    width_a, width_b = product.widths
    high, wide = _counts_of(product.C.distribution.rows), _counts_of(product.C.distribution.cols)
    for number in range(pc):
        messages = []
        if number:
            source = np.array([cannon_neighbours((pr, pc), x, number - 1)[1] for x in range(pc)])
            words = high[:, None] * width_a[held_a[number]]
            messages += _messages("shift", grid[i, source[j]], grid, words, product.A.dtype.itemsize)
            if number % (pc // pr) == 0:
                words = wide[None, :] * width_b[held_b[number]]
                messages += _messages("shift", grid[(i + 1) % pr, j], grid, words, product.B.dtype.itemsize)
        yield Round(messages, _on(grid, high[:, None], wide[None, :], width_a[held_a[number]]))


@rounds.register
def _(product: Layered) -> Iterator[Round]:
    if not product.mnk[2]:
        return
    layers = [rounds(product.layer(product.grid.layer(x)[0])) for x in range(product.layers)]
    for together in zip_longest(*layers, fillvalue=Round()):
        messages = [x for one in together for x in one.messages]
        ranks = max(product.place) + 1
        m, n, k = (sum(_full(one.work[x], ranks) for one in together) for x in range(3))
        yield Round(messages, (m, n, k))
    yield Round(_sums(product), hidden=False)


@rounds.register
def _(product: Inner) -> Iterator[Round]:
    high, n = sum(hi - lo for lo, hi in product.windows), product.mnk[1]
    deep = [product.A.local_shape(rank)[1] for rank in range(product.size)]
    if product.windows:
        yield Round([], (high, n, np.array(deep)))
        yield Round(_sums(product), hidden=False)


def _sums(product: Layered | Inner) -> list[Messages]:
    """The parts of C on their way to be added up."""
    messages: list[Messages] = []
    reduction = product.reduction
    if reduction.read:
        return messages
    for at, group in enumerate(reduction.groups):
        i, j = divmod(at, reduction.cols.parts)
        members = np.array(group)
        source, target = (x.ravel() for x in np.meshgrid(members, members, indexing="ij"))
        for window in reduction.windows(group[0]):
            words = np.tile(reduction.counts(i, j, window), len(group))
            others = source != target
            messages += _messages("reduce", source[others], target[others], words[others], product.accumulate.itemsize)
    return messages


def _grid(product: Product) -> np.ndarray:
    return np.array(product.C.place).reshape(product.C.distribution.grid_shape)


def _counts_of(dimension: Any) -> np.ndarray:
    return np.array([dimension.count(part) for part in range(dimension.parts)])


def _broadcast(mover: str, grid: np.ndarray, root: int, words: np.ndarray, itemsize: int) -> list[Messages]:
    """From column `root` of the grid to the others of each row; words[i] in row i.  What is read in place stays."""
    if mover in READ:
        return []
    rows, cols = grid.shape
    others = np.arange(1, cols)
    target = grid[:, (root + others) % cols]
    source = grid[:, (root + others - 1) % cols] if mover == "ring" else np.broadcast_to(grid[:, [root]], target.shape)
    return _messages(mover, source, target, np.broadcast_to(words[:, None], (rows, cols - 1)), itemsize)


def _relay(
    product: Summa, name: str, grid: np.ndarray, root: int, turn: int, words: np.ndarray, itemsize: int
) -> list[Messages]:
    """From column `root` of the grid to one rank on each other node of each row, and on from there."""
    chains = [row[product.line(name, int(row[0])).chain(root, turn)] for row in grid]
    hops = [len(chain) - 1 for chain in chains]
    source, target = (np.concatenate([chain[which] for chain in chains]) for which in (slice(-1), slice(1, None)))
    return _messages("ring", source, target, np.repeat(words, hops), itemsize)


def _reduce(grid: np.ndarray, root: int, words: np.ndarray, itemsize: int) -> list[Messages]:
    """From all other columns of each row to column `root`."""
    source = np.delete(grid, root, axis=1)
    target = np.broadcast_to(grid[:, [root]], source.shape)
    return _messages("reduce", source, target, np.broadcast_to(words[:, None], source.shape), itemsize)


def _messages(kind: str, source: np.ndarray, target: np.ndarray, words: np.ndarray, itemsize: int) -> list[Messages]:
    """An empty message is not sent."""
    sent = words.ravel() > 0
    return [Messages(kind, source.ravel()[sent], target.ravel()[sent], words.ravel()[sent], itemsize)]


def _on(grid: np.ndarray, m: Any, n: Any, k: Any) -> tuple[Any, Any, Any]:
    """Sizes by grid position as sizes by rank."""

    def by_rank(x: Any) -> np.ndarray:
        sizes = np.zeros(int(grid.max()) + 1, int)
        sizes[grid] = np.broadcast_to(x, grid.shape)
        return sizes

    return by_rank(m), by_rank(n), by_rank(k)


def _full(sizes: Any, ranks: int) -> np.ndarray:
    """One size for all, or those of the first ranks, as one for each."""
    if np.ndim(sizes) == 0:
        return np.full(ranks, sizes)
    full = np.zeros(ranks, int)
    full[: len(sizes)] = sizes
    return full
