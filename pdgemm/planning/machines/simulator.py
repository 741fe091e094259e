"""The time of a schedule on a machine: by formulas for one rank (the alpha-beta-gamma model), or by a simulation.

A simulation has all ranks, their waits for each other and the traffic of each node.  The parameters of the machine are
those of the formulas, but each message connects two ranks: it arrives after its sender has reached the round, and the
ranks of a node share the network bandwidth of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil, log2
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.planning.machines.machine import Machine
from pdgemm.schedules.exchanges.block_messages import EXCHANGE, MOST_JOINED, AnyExchange, Redistribution
from pdgemm.schedules.mover_registry import IBCAST, MOVERS, NCCL
from pdgemm.schedules.products.product import Product
from pdgemm.schedules.rounds import MEMORY, Messages, Round, Tally, WorkPiece, one_each
from pdgemm.schedules.schedule import Schedule
from pdgemm.support.members import remembered

_MOST_SUMMED = 32  # nodes whose words are summed up
_SAMPLE = 4  # number of ranks whose figures are computed if there are more ranks
_WORTHWHILE = 0.8  # messages between nodes are chosen if they take less than this part of the time
_FEW = 4  # with fewer than a fourth as many messages as there are nodes, ranks send to ranks


@lru_cache(maxsize=16)
def sample(size: int) -> tuple[int, ...]:
    """Return the ranks whose figures are computed: all ranks, or _SAMPLE evenly spaced ones if there are more."""
    return tuple(sorted({round(x) for x in np.linspace(0, size - 1, min(size, _SAMPLE))}))


def memory_seconds(schedule: Schedule, machine: Machine, rank: int) -> float:
    """Return the time of the first touch of new memory, and of copies within memory."""
    touched, copied = schedule.extra_bytes(rank), schedule.copied(rank)
    return touched / machine.first_touch_bandwidth + copied / machine.copy_bandwidth


def product_seconds(product: Product, machine: Machine, rank: int) -> float:
    """Return the time of a product: multiplications, transfers that may overlap with them, and other transfers."""
    m, n, k = product.local_shape(rank)
    moving, first, last, after = 0.0, 0.0, 0.0, 0.0
    for x in product.transfers(rank):
        # words that BLAS reads in place, like the rank's local panels, need no transfer
        in_place = 0 if product.transport.fetched else x.traffic.words_read
        words, messages = x.traffic.words_received - in_place, x.traffic.messages_received
        kind = NCCL.name if product.nccl else x.kind
        taken = machine.transfer(kind, words, messages, x.itemsize, x.stride, x.length, len(product.grid.ranks))
        if x.after:
            after += taken
        elif product.sums_follow and x.kind == "reduce":
            last += taken
        else:
            moving += taken
            hops = MOVERS[x.kind].hops(x.length) if x.kind in MOVERS else 1  # messages until the last rank has a panel
            first += taken / max(1, product.panels) * (hops - 1)
    computing = machine.multiply(product.panel_dtype, (m, n, k), product.block_mnk(m, n, k))
    computing *= product.blas_products * product.formed.share(rank)
    overlaps, local = product.lookahead > 0, product.first_panel_is_local
    pipeline = machine.pipeline(computing, moving, product.panels, overlaps, local)
    last -= machine.overlap * min(last, computing / max(1, product.panels))
    return memory_seconds(product, machine, rank) + first + pipeline + last + after


def exchange_seconds(exchange: Redistribution, machine: Machine, rank: int, nodes: tuple[int, ...] = ()) -> float:
    """Return the time of an exchange: words sent are packed and unpacked; words that stay or are read are copied.

    The ranks of a node share its network: words between nodes take the time of those of the busiest node.
    nodes : the node of each rank; (): that in the exchange, or consecutive ranks are on a node.
    """
    traffic, itemsize = exchange.traffic(rank), exchange.wire.itemsize
    copied, moving, partners = exchange.copied(rank) / machine.copy_bandwidth, 0.0, 0
    if not exchange.shared:
        (near, far), messages = machine.links(EXCHANGE), (traffic.messages_sent, traffic.messages_received)
        nodes = exchange.nodes or nodes or consecutive(exchange.size, machine.ranks_per_node)
        if steps := exchange.by_nodes:  # the ranks of a node wait for each other twice in each step
            partners = max(messages)
            moving = 2 * len([*steps.steps]) * ceil(log2(max(2, steps.width))) * near.alpha + partners * far.alpha
        for each, number in zip(() if steps else exchange.words_with(rank), messages):
            peers = each.nonzero()[0].tolist()
            here = [peer for peer in peers if nodes[peer] == nodes[rank]]
            inside, partners = len(here) / max(1, len(peers)), max(partners, len(peers))
            latency = number * (inside * near.alpha + (1 - inside) * far.alpha)
            moving = max(moving, latency + int(each[here].sum()) * itemsize * near.beta)
        moving += _network_words(exchange, nodes) * itemsize * far.beta
    words = max(traffic.words_sent, traffic.words_received - traffic.words_read)
    return machine.call_overhead + copied + moving + machine.crowded(words, partners, itemsize, exchange.size)


@remembered
def _network_words(exchange: Any, nodes: tuple[int, ...]) -> int:
    """Return the words that the busiest node sends to other nodes, or receives from them.

    nodes : the node of each rank; where there are many, only those of the ranks of `sample` are compared.
    """
    node, names = np.array(nodes), {*nodes}
    if len(names) == 1:
        return 0
    if len(names) > _MOST_SUMMED:
        names = {nodes[rank] for rank in sample(exchange.size)}
    ranks = ((name, words_of) for name in names for words_of in exchange.words_of)
    return max(int(words_of((node == name).nonzero()[0])[node != name].sum()) for name, words_of in ranks)


@lru_cache(maxsize=8)
def consecutive(ranks: int, per_node: int | None) -> tuple[int, ...]:
    """Return the node of each rank, where a node holds consecutive ranks; its number is that of its first rank."""
    return tuple((np.arange(ranks) // (per_node or ranks) * (per_node or ranks)).tolist())


def fastest_exchange(
    direct: AnyExchange, nodes: tuple[int, ...], machine: Machine, memory_limit: int | None = None
) -> AnyExchange:
    """Return an exchange with messages from rank to rank, or with one message between two nodes, if that is faster.

    direct : the exchange from rank to rank.   nodes : the node of each rank; (): all ranks are on one node.
    memory_limit : bytes for the buffers of a rank; None: no limit.
    """
    number = len({*nodes})
    if direct.shared or direct.device or number in (0, direct.size):
        return direct
    if _FEW * max(direct.traffic(rank).messages_received for rank in sample(direct.size)) < number:
        return direct
    return _fastest(direct, (nodes, machine, memory_limit))


@remembered  # in `direct`; a cache of this module would keep the indices of many selections
def _fastest(direct: Any, where: tuple[tuple[int, ...], Machine, int | None]) -> Any:
    """Return the result of `fastest_exchange` if a rank has many partners.   where : its other arguments."""
    nodes, machine, memory_limit = where
    joined = direct.joined(nodes)
    fits = memory_limit is None or joined.extra_bytes(None) <= memory_limit
    if not fits or joined.words * joined.wire.itemsize > MOST_JOINED:
        return direct
    seconds = [max(exchange_seconds(x, machine, rank, nodes) for rank in sample(x.size)) for x in (direct, joined)]
    return joined if seconds[1] < _WORTHWHILE * seconds[0] else direct


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
    check_events([schedule], ranks)
    node = nodes_of(machine, ranks)
    clock = starting_seconds(schedule, machine, ranks)
    computed, before = np.zeros(ranks), np.zeros(ranks)
    tally = Tally((), ranks)
    entering = np.zeros(int(node[-1]) + 1)
    for at in schedule.rounds():
        tally.add(at)
        if not (at.hidden and schedule.lookahead):  # the messages follow the work, on their senders, too
            clock, before = clock + before, np.zeros(ranks)
        ready = clock.copy()
        transfers = [passed_on(x) for x in at.transfers]
        for x in transfers:
            if not x.read:
                np.maximum.at(ready, x.target, clock[x.source])  # the sender must have reached the round
        moving, into = transfer_seconds(transfers, machine, node)
        entering += into
        clock = ready + before + moving - machine.overlap * np.minimum(before, moving)
        before = working_seconds(at, machine, schedule, ranks)
        computed += before
        clock += machine.panel_overhead * (before > 0)
    clock += before
    sent, received, messages_sent, messages_received, read = tally.counts
    by_message = sent, received - read, messages_sent, messages_received
    return Simulation(float(clock.max()), computed, *by_message, entering)


def check_events(schedules: Sequence[Schedule], ranks: int) -> None:
    """Raise ArgumentError if the schedules have too many messages and products to simulate."""
    events = sum(x.events for x in schedules) * ranks
    if events > MOST_EVENTS:
        raise ArgumentError(
            f"{events} messages and products of {ranks} ranks are too many to simulate, at most {MOST_EVENTS}; "
            "the formulas take any number"
        )


def nodes_of(machine: Machine, ranks: int) -> np.ndarray:
    """Return the node of each rank; nodes hold consecutive ranks."""
    return np.arange(ranks) // (machine.ranks_per_node or ranks)


def starting_seconds(schedule: Schedule, machine: Machine, ranks: int) -> np.ndarray:
    """Return the seconds before the first round on each rank: those of new memory, of copies, and of a call."""
    seconds = np.array([memory_seconds(schedule, machine, rank) for rank in range(ranks)])
    return seconds + machine.call_overhead * isinstance(schedule, Redistribution)


def passed_on(x: Messages) -> Messages:
    """Return messages as they cross the network: MPI libraries broadcast a large panel from each rank to the next.

    Schedules count all messages of a broadcast by the MPI library as sent by the owner of the panel.
    """
    if x.kind != IBCAST.name or not x.source.size:
        return x
    again = np.r_[False, x.source[1:] == x.source[:-1]]
    return x._replace(source=np.where(again, np.r_[-1, x.target[:-1]], x.source))


def transfer_seconds(moves: list[Messages], machine: Machine, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds in which each rank transfers the messages of a round, and the bytes that enter each node.

    In an exchange a rank also sends one message after the other, while it receives others.
    """
    levels, entering = moving_seconds(moves, machine, node)
    moving = levels.sum(axis=0)
    for x in (x for x in moves if x.kind == EXCHANGE):
        words = np.bincount(x.target, x.words, len(node))
        partners = np.bincount(np.unique(x.source * len(node) + x.target) % len(node), minlength=len(node))
        moving += machine.crowded(words, partners, x.itemsize, len(node))
        sending, _ = moving_seconds([x._replace(source=x.target, target=x.source)], machine, node)
        moving = np.maximum(moving, sending.sum(axis=0))
    return moving, entering


def moving_seconds(moves: list[Messages], machine: Machine, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds in which each rank receives the messages of a round, and the bytes that enter each node.

    The seconds have two rows: for messages from the rank's own node, which it receives one after the other, and for
    messages from other nodes, which share the bandwidth into the rank's node.   node : the node of each rank.
    """
    seconds, entering = np.zeros((2, len(node))), np.zeros(int(node[-1]) + 1)
    last, far = np.zeros(len(node)), [(np.zeros(0, int), np.zeros(0))]
    for x in moves:
        away = node[x.source] != node[x.target]
        (inside, link), sizes = machine.links(x.kind), x.words * x.itemsize
        taken = np.where(away, link.alpha, inside.alpha + sizes * inside.beta)
        np.add.at(seconds, (away.astype(int), x.target), taken)
        entering += np.bincount(node[x.target[away]], sizes[away], len(entering))
        far.append((x.target[away], sizes[away] * link.beta))
    target, alone = map(np.concatenate, zip(*far))
    np.maximum.at(last, target, _on_shared_link(alone, node[target]))
    seconds[1] += last
    return seconds, entering


def _on_shared_link(alone: np.ndarray, link: np.ndarray) -> np.ndarray:
    """Return the seconds of messages that begin together, where those of one link have equal parts of its bandwidth.

    This is the sum of min(t, s) over the seconds s of all messages of the link, for a message of t seconds alone.
    alone : the seconds of each message alone.   link : the number of its link.
    """
    order = np.lexsort((alone, link))
    alone, link = alone[order], link[order]
    until, at = np.concatenate([[0.0], np.cumsum(alone)]), np.arange(len(alone))
    first, after = np.searchsorted(link, link), np.searchsorted(link, link, "right")
    seconds = np.empty(len(alone))
    seconds[order] = until[1:] - until[first] + (after - 1 - at) * alone
    return seconds


def working_seconds(at: Round, machine: Machine, schedule: Schedule, ranks: int) -> np.ndarray:
    """Return the seconds in which each rank does the work of a round."""
    return sum((_seconds(x, machine, schedule, ranks) for x in at.work), np.zeros(ranks))


def _seconds(work: WorkPiece, machine: Machine, schedule: Schedule, ranks: int) -> np.ndarray:
    """Return the time of a piece of work on each rank."""
    dtype = schedule.panel_dtype
    extents = np.stack([one_each(x, ranks) for x in work.extents])
    if work.kind == MEMORY:
        return np.prod(extents, axis=0) * dtype.itemsize / machine.copy_bandwidth
    order = np.lexsort(extents)  # np.unique(extents, axis=1) takes ten times as long
    ordered = extents[:, order]
    first = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))
    seconds, shapes = np.empty(ranks), zip(*ordered[:, first].tolist())
    seconds[order] = np.array([machine.multiply(dtype, mnk, mnk) for mnk in shapes])[np.cumsum(first) - 1]
    seconds[: np.size(work.share) if np.ndim(work.share) else ranks] *= work.share
    return seconds * schedule.blas_products
