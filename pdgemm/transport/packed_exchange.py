"""The transport of blocks between ranks in one exchange, Y := alpha X + beta Y: read in place, packed, or by NCCL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from itertools import zip_longest
from time import monotonic, sleep
from typing import Any, ParamSpec, TypeVar

from mpi4py import MPI

from pdgemm.errors import MappingError
from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device, of
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.schedules.exchanges.block_messages import EXCHANGE, Block, Redistribution
from pdgemm.schedules.exchanges.exchange import Exchange
from pdgemm.schedules.staircase import Staircase
from pdgemm.support.agreement import raised_on
from pdgemm.support.waits import Wait
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.exchange_buffers import ExchangeBuffers, TileTransfer, part_of
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import flat

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


P = ParamSpec("P")
T = TypeVar("T")


def exchange(
    alpha: Any,
    X: Array | Sequence[Array],
    beta: Any,
    Y: Array | Sequence[Array],
    plan: Redistribution,
    buffers: ExchangeBuffers,
    grid: ProcessGrid,
    recorder: Recorder,
    within: Staircase | None = None,
) -> None:
    """Compute Y := alpha X + beta Y, where X and Y are this rank's local arrays.  Collective over the grid.

    Where a rank has several arrays in the plan, X or Y is the list of these arrays, and `block.part` is the number of
    the array in the list.
    within : the elements of Y that are assigned; `plan.copies_only` is then False.
    """
    combine = Combine(alpha, beta, buffers.scratch, plan.conjugates)
    carry_out = _pull if plan.shared else _send_by_nccl if plan.nccl else send_by_nodes if plan.nodes else _send
    carry_out(TileTransfer(X, Y, plan, buffers, grid, recorder, combine, within))


def _pull(transfer: TileTransfer) -> None:
    """Copy each element of this rank's Y once, from the node-shared memory of the rank that owns it in X."""
    X, Y, plan, recorder, grid = transfer.X, transfer.Y, transfer.plan, transfer.recorder, transfer.grid
    assert isinstance(plan, Exchange)
    me, peers = grid.comm.rank, NodeArrays(grid, X=(X, plan.source))
    for block in plan.pulls(me):
        part = X if block.peer == me else peers("X", block.peer)
        with recorder.phase("pack"):
            for tile in ((block.rows, block.cols),) if transfer.combine.workspace is None else plan.tiles(block):
                transfer.assign(Y, part, *tile)
        if block.peer != me:
            recorder.traffic.read(block.rows.size * block.cols.size)
    recorder.synchronize_copies()
    peers.sync()


def _send(transfer: TileTransfer) -> None:
    """Send, receive and copy tiles, each small enough to stay in cache while it is packed, sent and unpacked.

    Contiguous tiles are sent from X and received into Y without packing.  Elements that stay on this rank are copied
    while messages are in flight.
    """
    plan, recorder, messages = transfer.plan, transfer.recorder, _Messages(transfer)
    at_once = 8 * plan.words if plan.copies_only else plan.words  # a plain copy needs no scratch buffer
    for block in plan.staying(transfer.grid.comm.rank):
        x, y = part_of(transfer.X, block), part_of(transfer.Y, block)
        for tile in plan.tiles(block, at_once):
            with recorder.phase("compute" if of(x) else "pack"):  # the copy stream packs messages meanwhile
                transfer.assign(y, x, *tile)
            messages.progress()
    messages.finish()


class _Messages:
    """The messages of one rank: each buffer has one message in flight; when it is complete, the next tile starts."""

    def __init__(self, transfer: TileTransfer) -> None:
        self._transfer = transfer
        plan, buffers, me = transfer.plan, transfer.buffers, transfer.grid.comm.rank
        self._incoming = (tile for block in plan.receives(me) for tile in _tiles(plan, block))
        self._outgoing = (tile for block in plan.sends(me) for tile in _tiles(plan, block))
        self._requests = [MPI.REQUEST_NULL] * len(buffers.messages)
        self._unpack: list[Callable[[], object]] = [nothing] * buffers.receiving
        self._end_of_span: list[Callable[[], object]] = [nothing] * buffers.receiving
        for slot in range(len(self._requests)):
            self._next(slot)

    def progress(self) -> None:
        """Test the messages in flight; if one has arrived or left, unpack it and start the next tile in its buffer."""
        slot, done = MPI.Request.Testany(self._requests)
        if done and slot != MPI.UNDEFINED:
            self._complete(slot)

    def finish(self) -> None:
        """Wait until all messages have arrived and left."""
        while True:
            with self._transfer.recorder.phase("wait"), Wait(self._transfer.grid.comm):
                slot = MPI.Request.Waitany(self._requests)
            if slot == MPI.UNDEFINED:
                return
            self._complete(slot)

    def _complete(self, slot: int) -> None:
        if slot < self._transfer.buffers.receiving:
            self._end_of_span[slot]()
            self._unpack[slot]()
        self._next(slot)

    def _next(self, slot: int) -> None:
        receiving = slot < self._transfer.buffers.receiving
        tile = next(self._incoming if receiving else self._outgoing, None)
        if tile is not None:
            (self._receive if receiving else self._send)(slot, *tile)

    def _receive(self, slot: int, block: Block, rows: IndexMap, cols: IndexMap) -> None:
        transfer, recorder = self._transfer, self._transfer.recorder
        place, self._unpack[slot] = transfer.incoming(slot, block, rows, cols)
        recorder.synchronize_copies()  # until the last message in this buffer is unpacked
        self._requests[slot] = transfer.grid.comm.Irecv(wire(place), source=block.peer)
        recorder.traffic.received(place.size)
        self._end_of_span[slot] = recorder.moving("exchange", place.nbytes)

    def _send(self, slot: int, block: Block, rows: IndexMap, cols: IndexMap) -> None:
        transfer, recorder = self._transfer, self._transfer.recorder
        place = transfer.outgoing(slot, block, rows, cols, recorder.synchronize_copies)
        self._requests[slot] = transfer.grid.comm.Isend(wire(place), dest=block.peer)
        recorder.traffic.sent(place.size)


def _send_by_nccl(transfer: TileTransfer) -> None:
    """Carry out the exchange as `_send` does, by NCCL, with all messages in the order of the copy stream.

    All ranks go through the tiles by the distance from sender to receiver, so that both enqueue a tile in the same
    step, and no rank waits for a tile that its sender enqueues later.
    """
    X, Y, plan, recorder, comm = transfer.X, transfer.Y, transfer.plan, transfer.recorder, transfer.grid.comm
    me, device = comm.rank, of(X)
    assert device is not None and isinstance(plan, Exchange)
    device.exchange(comm, [], [])  # all ranks create the communicator, even ranks that send nothing
    for block in plan.staying(me):
        for tile in plan.tiles(block):
            with recorder.phase("compute"):
                transfer.assign(Y, X, *tile)
    outgoing = {(block.peer - me) % plan.size: _tiles(plan, block) for block in plan.sends(me)}
    incoming = {(me - block.peer) % plan.size: _tiles(plan, block) for block in plan.receives(me)}
    for distance in range(1, plan.size):
        for sent, received in zip_longest(outgoing.get(distance, ()), incoming.get(distance, ())):
            sends, receives = list[tuple[Array, int]](), list[tuple[Array, int]]()
            unpack: Callable[[], object] = nothing
            if sent:
                place = transfer.outgoing(transfer.buffers.receiving, *sent)
                sends.append((flat(place), sent[0].peer))
                recorder.traffic.sent(place.size)
            if received:
                place, unpack = transfer.incoming(0, *received)
                receives.append((flat(place), received[0].peer))
                recorder.traffic.received(place.size)
            with recorder.phase("pack"):
                device.exchange(comm, sends, receives)
            unpack()


def _tiles(plan: Redistribution, block: Block) -> Iterator[tuple[Block, IndexMap, IndexMap]]:
    return ((block, rows, cols) for rows, cols in plan.tiles(block))


def repeated_if_unmapped(operation: Callable[P, T]) -> Callable[P, T]:
    """Return an operation with a second attempt, made if ranks cannot map each other's memory.  Collective."""

    @wraps(operation)
    def repeated(*args: P.args, **options: P.kwargs) -> T:
        with suppress(MappingError):  # nothing has been written yet, and later plans read nothing in place
            return operation(*args, **options)
        return operation(*args, **options)

    return repeated


class kept_if_it_fails:
    """A context: after an exception in it, buffers are never freed, because MPI may still read and write them.

    Other ranks that wait for this rank in NCCL are informed.  After a MappingError, which all ranks raise before
    anything is transferred, the buffers are freed as usual.

    workspace : the buffers.
    arrays : the operands, which the caller may free or overwrite next.  So after an exception the context waits until
        their device, if any, is idle; if it does not become idle, the operands are not freed, either.
    """

    __slots__ = ("_arrays", "_workspace")

    def __init__(self, workspace: object, *arrays: Array) -> None:
        self._workspace, self._arrays = workspace, arrays

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, MappingError):
            _in_flight.append(self._workspace)
            used = {device for x in self._arrays if (device := devices.of(x)) is not None}
            for device in used if not raised_on(error) else ():  # the other ranks would wait for this rank
                device.abandon_nccl(f"{type(error).__name__}: {error}")
            if not all(map(_is_idle, used)):
                _in_flight.append(self._arrays)


def _is_idle(device: Device) -> bool:
    """Wait until all streams of a device are idle; return False if one of them fails, or not all are idle in time."""
    end = monotonic() + _PATIENCE
    try:
        events = [x.record() for x in (device.product_stream, device.transfer_stream, device.upload_stream)]
        while not all(device.happened(event) for event in events):
            if monotonic() > end:
                return False
            sleep(1e-3)
    except Exception:  # the exception that is being raised already is more informative
        return False
    return True


_in_flight: list[object] = []
_PATIENCE = 10.0  # seconds of waiting for a device after an exception
