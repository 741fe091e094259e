"""The transport of an exchange with one message between two nodes, by buffers that the ranks of a node share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from mpi4py import MPI

from pdgemm.instrument.recorder import nothing
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.exchanges.block_messages import EXCHANGE, Block
from pdgemm.support.waits import Wait
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.exchange_buffers import TileTransfer, part_of
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.movers.panel_views import column_buffer

RECEIVED, SENT = "received", "sent"  # names of the two buffers of each rank


def send_by_nodes(transfer: TileTransfer) -> None:
    """Carry out the steps of `NodeMessages`; elements that stay on this rank are copied during the first message.

    In each step the ranks of a node write all elements for some nodes, wait for each other, send and receive, wait for
    each other again, and read.
    """
    plan, grid, recorder, me = transfer.plan, transfer.grid, transfer.recorder, transfer.grid.comm.rank
    steps, (received, _), (sent, _) = plan.by_nodes, *transfer.buffers.messages
    assert steps is not None
    if transfer.buffers.of_node is None:
        transfer.buffers.of_node = NodeArrays(grid, received=(received, None), sent=(sent, None))
    buffers = transfer.buffers.of_node
    outgoing, incoming, here = _by_peer(plan.sends(me)), _by_peer(plan.receives(me)), int(steps.node[me])
    staying = iter(plan.staying(me))
    for distances in steps.steps:
        for segment in steps.segments(me, distances, outgoing=True):
            is_here = int(steps.node[segment.peer]) == here  # nothing is sent
            buffer = buffers(RECEIVED if is_here else SENT, segment.holder)
            for block, place in _places(transfer, buffer, segment.start, outgoing[segment.peer]):
                with recorder.phase("pack"):
                    copy_blocks(part_of(transfer.X, block), place, block.rows, block.cols)
        buffers.sync()
        requests, received_bytes = list[MPI.Request](), 0
        for message in steps.messages(me, distances):
            part = slice(message.start, message.start + message.words)
            if message.sent:
                requests.append(grid.comm.Isend(wire(sent[part]), dest=message.peer))
                recorder.traffic.sent(message.words)
            else:
                requests.append(grid.comm.Irecv(wire(received[part]), source=message.peer))
                recorder.traffic.received(message.words)
                received_bytes += message.words * plan.wire.itemsize
        end_of_span = recorder.moving(EXCHANGE, received_bytes) if received_bytes else nothing
        for block in staying:
            with recorder.phase("pack"):
                for tile in plan.tiles(block):
                    transfer.assign(part_of(transfer.Y, block), part_of(transfer.X, block), *tile)
        with recorder.phase("wait"), Wait(grid.comm):
            MPI.Request.Waitall(requests)
        end_of_span()
        buffers.sync()
        for segment in steps.segments(me, distances, outgoing=False):
            buffer = buffers(RECEIVED, segment.holder)
            for block, place in _places(transfer, buffer, segment.start, incoming[segment.peer]):
                with recorder.phase("pack"):
                    transfer.assign(part_of(transfer.Y, block), place, block.rows, block.cols)
                if segment.holder != me:
                    recorder.traffic.read(place.size)
    buffers.sync()


def _by_peer(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """Return the blocks of each peer, in the order in which both ranks list them."""
    by_peer = defaultdict[int, list[Block]](list)
    for block in blocks:
        by_peer[block.peer].append(block)
    return by_peer


def _places(transfer: TileTransfer, buffer: Array, start: int, blocks: list[Block]) -> Iterator[tuple[Block, Array]]:
    """Yield blocks, and arrays of their shapes, one after the other in a buffer from element `start` on."""
    for block in blocks:
        rows, cols = block.shape
        yield block, column_buffer(rows, transfer.plan.order, cols, buffer[start : start + rows * cols])
        start += rows * cols
