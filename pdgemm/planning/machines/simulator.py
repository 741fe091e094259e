"""Simulate a schedule on all ranks: the waits of ranks for each other, and the traffic of each node.

The parameters of the machine are those of the formulas (`timing`), but each message connects two ranks: it arrives
after its sender has reached the round, and the ranks of a node share the network bandwidth of the node.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.timing import memory_seconds
from pdgemm.schedules.exchanges.block_messages import EXCHANGE, Redistribution
from pdgemm.schedules.rounds import MEMORY, Tally, WorkPiece, one_each
from pdgemm.schedules.schedule import Schedule

MOST_EVENTS = 20_000_000  # messages and products: their simulation takes some seconds
MOST_PAIRED = 2048  # ranks for which `words_between` returns the words of each pair


@dataclass(frozen=True)
class Simulation:
    """The seconds until the last rank finishes, and per rank: seconds of computing, words and messages."""

    seconds: float
    computed: np.ndarray
    words_sent: np.ndarray
    words_received: np.ndarray
    messages_sent: np.ndarray
    messages_received: np.ndarray
    node_bytes: np.ndarray  # bytes that enter each node

    def traffic(self, rank: int) -> Traffic:
        sent, received = self.words_sent[rank], self.words_received[rank]
        return Traffic(int(sent), int(received), int(self.messages_sent[rank]), int(self.messages_received[rank]))

    @classmethod
    def of_nothing(cls, ranks: int) -> Simulation:
        """Return the simulation of a schedule without rounds."""
        idle, none = np.zeros(ranks), np.zeros(ranks, np.int64)
        return cls(0.0, idle, none, none, none, none, np.zeros(1))

    def then(self, other: Simulation) -> Simulation:
        """Return the simulation of both runs, where the other run begins when this one has ended on all ranks."""
        return Simulation(*(getattr(self, x.name) + getattr(other, x.name) for x in fields(self)))


def words_between(schedule: Schedule, ranks: int) -> np.ndarray:
    """Return the words that each rank (a row) sends to each other rank (a column), or lets that rank read.

    Raises ArgumentError if there are too many messages, or too many ranks.
    """
    if schedule.events * ranks > MOST_EVENTS or ranks > MOST_PAIRED:
        raise ArgumentError(f"{ranks} ranks send too many messages to show for each pair; the limit is {MOST_PAIRED}")
    words = np.zeros((ranks, ranks), np.int64)
    for at in schedule.rounds():
        for x in at.moves:
            np.add.at(words, (x.source, x.target), x.words)
    return words


def simulate(schedule: Schedule, machine: Machine, ranks: int) -> Simulation:
    """Return the simulation of a schedule on ranks 0, 1, ... of its layouts; nodes hold consecutive ranks."""
    events = schedule.events * ranks
    if events > MOST_EVENTS:
        raise ArgumentError(
            f"{events} messages and products of {ranks} ranks are too many to simulate, at most {MOST_EVENTS}; "
            "the formulas take any number"
        )
    per_node = machine.ranks_per_node or ranks
    node = np.arange(ranks) // per_node
    clock = np.array([memory_seconds(schedule, machine, rank) for rank in range(ranks)])
    clock += machine.call_overhead * isinstance(schedule, Redistribution)
    computed, before = np.zeros(ranks), np.zeros(ranks)
    tally = Tally((), ranks)
    entering = np.zeros(int(node[-1]) + 1)
    for at in schedule.rounds():
        tally.add(at)
        ready, receiving, sending = clock.copy(), np.zeros(ranks), np.zeros(ranks)
        for x in at.transfers:
            if not x.read:
                np.maximum.at(ready, x.target, clock[x.source])  # the sender must have reached the round
            away = node[x.source] != node[x.target]
            (inside, link), sizes = machine.links(x.kind), x.words * x.itemsize
            into = np.bincount(node[x.target[away]], sizes[away], len(entering))
            out = np.bincount(node[x.source[away]], sizes[away], len(entering))
            entering += into
            on_network = np.maximum(into, out)[node] * link.beta
            alone = np.where(away, link.alpha, inside.alpha + sizes * inside.beta)
            receiving += _busy(x.target, alone, away, on_network)
            if x.kind == EXCHANGE:  # its sender sends one message after the other, while it receives others
                sending += _busy(x.source, alone, away, on_network)
                words = np.bincount(x.target, x.words, ranks)
                partners = np.bincount(np.unique(x.source * ranks + x.target) % ranks, minlength=ranks)
                receiving += machine.crowded(words, partners, x.itemsize, ranks)
        moving = np.maximum(receiving, sending)
        hidden = machine.overlap * np.minimum(before, moving) if at.hidden and schedule.lookahead else 0.0
        clock = ready + before + moving - hidden
        before = sum((_seconds(x, machine, schedule, ranks) for x in at.work), np.zeros(ranks))
        computed += before
        clock += machine.panel_overhead * (before > 0)
    clock += before
    sent, received, messages_sent, messages_received, read = tally.counts
    by_message = sent, received - read, messages_sent, messages_received
    return Simulation(float(clock.max()), computed, *by_message, entering)


def _busy(ends: np.ndarray, seconds: np.ndarray, away: np.ndarray, on_network: np.ndarray) -> np.ndarray:
    """Return the time in which each rank sends, or receives, messages one after the other.

    ends : the rank that sends, or receives, each message; it needs `seconds` for it, if no other message is sent.
    away : which messages leave a node; their ranks also wait `on_network` seconds for the network of the node.
    """
    waiting = np.bincount(ends[away], minlength=len(on_network)) > 0
    return np.bincount(ends, seconds, len(on_network)) + waiting * on_network


def _seconds(work: WorkPiece, machine: Machine, schedule: Schedule, ranks: int) -> np.ndarray:
    """Return the time of a piece of work on each rank."""
    dtype = schedule.panel_dtype
    extents = np.stack([one_each(x, ranks) for x in work.extents])
    if work.kind == MEMORY:
        return np.prod(extents, axis=0) * dtype.itemsize / machine.copy_bandwidth
    shapes, inverse = np.unique(extents, axis=1, return_inverse=True)
    seconds = np.array([machine.multiply(dtype, mnk, mnk) for mnk in zip(*shapes.tolist())])[inverse.ravel()]
    seconds[: np.size(work.share) if np.ndim(work.share) else ranks] *= work.share
    return seconds * schedule.blas_products
