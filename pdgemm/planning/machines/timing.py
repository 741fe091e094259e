"""The time of a schedule on a machine by the alpha-beta-gamma model: formulas for one rank.  No MPI, no data."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2
from typing import Any

import numpy as np

from pdgemm.planning.machines.machine import Machine
from pdgemm.schedules.exchanges.block_messages import EXCHANGE, MOST_JOINED, AnyExchange, Redistribution
from pdgemm.schedules.mover_registry import MOVERS, NCCL
from pdgemm.schedules.products.product import Product
from pdgemm.schedules.schedule import Schedule
from pdgemm.support.remembered import remembered

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
