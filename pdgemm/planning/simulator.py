"""Walk the schedule of a product for all ranks at once: who waits for whom, and what each node sends and receives.

The same alpha-beta-gamma figures as in the formulas, but every message between the two ranks that exchange it: a
panel arrives when its sender has got there, and ranks of one node share its way to the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.model.machine import Machine
from pdgemm.schedules import Product
from pdgemm.schedules.rounds import Messages, one_each

MOST_EVENTS = 20_000_000  # some seconds


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
    events = product.events * ranks
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
    for at in product.rounds():
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
    shapes, inverse = np.unique(np.stack([one_each(x, ranks) for x in work]), axis=1, return_inverse=True)
    seconds = [machine.multiply(dtype, mnk, mnk) for mnk in zip(*shapes.tolist())]
    return np.array(seconds)[inverse.ravel()]
