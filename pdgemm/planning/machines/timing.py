"""The time of a schedule on a machine by the alpha-beta-gamma model: formulas for one rank.  No MPI, no data."""

from __future__ import annotations

from pdgemm.planning.machines.machine import Machine
from pdgemm.schedules.exchanges.exchange import EXCHANGE, Exchange
from pdgemm.schedules.mover_registry import MOVERS, NCCL
from pdgemm.schedules.products.product import Product
from pdgemm.schedules.schedule import Schedule


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


def exchange_seconds(exchange: Exchange, machine: Machine, rank: int) -> float:
    """Return the time of an exchange: words sent are packed and unpacked; words that stay or are read are copied."""
    traffic, itemsize = exchange.traffic(rank), exchange.wire.itemsize
    words = max(traffic.words_sent, traffic.words_received - traffic.words_read)
    messages = max(traffic.messages_sent, traffic.messages_received)
    moving = machine.transfer(EXCHANGE, words, messages, itemsize, 1, exchange.size, exchange.size)
    return machine.call_overhead + exchange.copied(rank) / machine.copy_bandwidth + moving
