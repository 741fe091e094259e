"""How blocks travel between ranks in one exchange, into Y := alpha X + beta Y: read in place, packed, or by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device, of
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.schedules.exchanges.exchange import Block, Exchange, Redistribution
from pdgemm.schedules.staircase import Staircase
from pdgemm.support.waits import Wait
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.movers.panel_views import column_room
from pdgemm.transport.movers.pipeline import flat
from pdgemm.transport.store import store


def exchange(
    alpha: Any,
    X: Array | Sequence[Array],
    beta: Any,
    Y: Array | Sequence[Array],
    plan: Redistribution,
    workspace: Room,
    grid: ProcessGrid,
    recorder: Recorder,
    within: Staircase | None = None,
) -> None:
    """Compute Y := alpha X + beta Y, where X and Y are this rank's local arrays.  Collective over the grid.

    Where a plan has several arrays on a rank, X or Y is a list of them, and each block says in which it is.
    within : the elements of Y that are assigned; the plan is then not one that only copies.
    """
    combine = Combine(alpha, beta, workspace.scratch, plan.conjugates)
    carry_out: Any = _pull if plan.shared else _send_by_nccl if plan.nccl else _send
    carry_out(X, Y, plan, workspace, grid, recorder, combine, within)


def _pull(
    X: Array,
    Y: Array,
    plan: Exchange,
    workspace: Room,
    grid: ProcessGrid,
    recorder: Recorder,
    combine: Combine,
    within: Staircase | None,
) -> None:
    """Copy each element of this rank's Y once, from the node-shared memory of its owner in X."""
    me, peers = grid.comm.rank, NodeArrays(grid, X=(X, plan.source))
    for block in plan.pulls(me):
        part = X if block.peer == me else peers("X", block.peer)
        with recorder.phase("pack"):
            for tile in ((block.rows, block.cols),) if combine.room is None else plan.tiles(block):
                store(Y, part, combine, *tile, within=within)
        if block.peer != me:
            recorder.traffic.read(block.rows.size * block.cols.size)
    recorder.synchronize_copies()
    peers.sync()


def _send(
    X: Array | Sequence[Array],
    Y: Array | Sequence[Array],
    plan: Redistribution,
    workspace: Room,
    grid: ProcessGrid,
    recorder: Recorder,
    combine: Combine,
    within: Staircase | None,
) -> None:
    """Send, receive and copy tiles that are small enough to be packed, sent and unpacked while they are in cache.

    Contiguous tiles are sent from X and received into Y without packing.  Elements that stay on this rank are copied
    while messages are in flight.
    """
    comm, me, order = grid.comm, grid.comm.rank, plan.order

    incoming = ((block.peer, _held(Y, block), *tile) for block in plan.receives(me) for tile in plan.tiles(block))
    outgoing = ((block.peer, _held(X, block), *tile) for block in plan.sends(me) for tile in plan.tiles(block))
    at_once = 8 * plan.words if plan.copies_only else plan.words  # elements that are only copied need no buffer
    staying = (
        (_held(Y, block), _held(X, block), *tile) for block in plan.staying(me) for tile in plan.tiles(block, at_once)
    )
    requests = [MPI.REQUEST_NULL] * len(workspace.messages)
    arrived: list[Callable[[], object]] = [nothing] * workspace.receiving
    over: list[Callable[[], object]] = [nothing] * workspace.receiving

    def receive(slot: int) -> None:
        tile = next(incoming, None)
        if tile is None:
            return
        peer, y, rows, cols = tile
        place = _contiguous(y, rows.target, cols.target, rows, cols, plan) if plan.copies_only else None
        arrived[slot] = nothing  # the message is received directly into Y
        if place is None:
            place, packed = workspace.shaped(slot, rows.size, cols.size, order)
            rows, cols = rows.shifted(rows.source[0], 0), cols.shifted(cols.source[0], 0)

            def unpack() -> None:
                with recorder.phase("pack"):
                    store(y, packed, combine, rows, cols, within=within)

            arrived[slot] = unpack
        recorder.synchronize_copies()  # the last message in this buffer has been unpacked
        requests[slot] = comm.Irecv(wire(place), source=peer)
        recorder.traffic.received(place.size)
        over[slot] = recorder.moving("exchange", place.nbytes)

    def send(slot: int) -> None:
        tile = next(outgoing, None)
        if tile is None:
            return
        peer, x, rows, cols = tile
        place = _contiguous(x, rows.source, cols.source, rows, cols, plan)
        if place is None:
            place, packed = workspace.shaped(slot, rows.size, cols.size, order)
            rows, cols = rows.shifted(0, rows.target[0]), cols.shifted(0, cols.target[0])
            with recorder.phase("pack"):
                copy_blocks(x, packed, rows, cols)
            recorder.synchronize_copies()
        requests[slot] = comm.Isend(wire(place), dest=peer)
        recorder.traffic.sent(place.size)

    for slot in range(len(requests)):
        receive(slot) if slot < workspace.receiving else send(slot)
    while True:
        tile = next(staying, None)
        if tile is not None:
            with recorder.phase("compute" if of(tile[1]) else "pack"):  # a device packs messages meanwhile
                store(tile[0], tile[1], combine, *tile[2:], within=within)
            slot, done = MPI.Request.Testany(requests)
            if not done:
                continue
        else:
            with recorder.phase("wait"), Wait(comm):
                slot = MPI.Request.Waitany(requests)
        if slot == MPI.UNDEFINED:
            if tile is None:
                return
        elif slot < workspace.receiving:
            over[slot]()
            arrived[slot]()
            receive(slot)
        else:
            send(slot)


def _send_by_nccl(
    X: Array,
    Y: Array,
    plan: Exchange,
    workspace: Room,
    grid: ProcessGrid,
    recorder: Recorder,
    combine: Combine,
    within: Staircase | None,
) -> None:
    """Do what `_send` does in the order of the copy stream.

    All ranks go through the tiles by the distance of the ranks that send and receive them, so that none waits for a
    tile that comes after one of its own.
    """
    comm, me, size, device = grid.comm, grid.comm.rank, plan.size, of(X)
    assert device is not None
    device.exchange(comm, [], [])  # all ranks create the communicator, those that send nothing as well
    for tile in (tile for block in plan.staying(me) for tile in plan.tiles(block)):
        with recorder.phase("compute"):
            store(Y, X, combine, *tile, within=within)
    outgoing = {(block.peer - me) % size: plan.tiles(block) for block in plan.sends(me)}
    incoming = {(me - block.peer) % size: plan.tiles(block) for block in plan.receives(me)}
    for distance in range(1, size):
        tiles = zip_longest(outgoing.get(distance, ()), incoming.get(distance, ()))
        for leaving, coming in tiles:
            sends, receives, unpacked = list[tuple[Array, int]](), list[tuple[Array, int]](), None
            with recorder.phase("pack"):
                if leaving:
                    rows, cols = leaving
                    place = _contiguous(X, rows.source, cols.source, rows, cols, plan)
                    if place is None:
                        place, _ = workspace.shaped(workspace.receiving, rows.size, cols.size, plan.order)
                        copy_blocks(X, place, rows.shifted(0, rows.target[0]), cols.shifted(0, cols.target[0]))
                    sends.append((flat(place), (me + distance) % size))
                    recorder.traffic.sent(place.size)
                if coming:
                    rows, cols = coming
                    place = _contiguous(Y, rows.target, cols.target, rows, cols, plan) if plan.copies_only else None
                    if place is None:
                        place, unpacked = workspace.shaped(0, rows.size, cols.size, plan.order)
                    receives.append((flat(place), (me - distance) % size))
                    recorder.traffic.received(place.size)
                device.exchange(comm, sends, receives)
                if unpacked is not None:
                    there = rows.shifted(rows.source[0], 0), cols.shifted(cols.source[0], 0)
                    store(Y, unpacked, combine, *there, within=within)


class Room:
    """Holds the message buffers of an exchange on one rank, in device memory or, where staged, on the host."""

    def __init__(self, plan: Redistribution, rank: int, device: Device | None = None) -> None:
        self.receiving, sending = plan.slots(rank)
        self.messages: list[tuple[Array, Array]] = []  # each as passed to MPI, and as packed and unpacked
        own = devices.own_memory(device)
        for _ in range(self.receiving + sending):
            if device and plan.staged:
                self.messages.append(tuple(device.pinned(plan.words, plan.wire)))
            else:
                self.messages.append((own.empty((plan.words,), plan.wire),) * 2)
        self.scratch = None if plan.copies_only or device else own.empty((2, plan.words), plan.wide)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x, _ in self.messages) + (0 if self.scratch is None else self.scratch.nbytes)

    def shaped(self, slot: int, rows: int, cols: int, order: str) -> tuple[Array, Array]:
        """Return a message buffer as rows x cols, once as passed to MPI and once as packed and unpacked."""
        sent, packed = (column_room(rows, order, cols, x) for x in self.messages[slot])
        return sent, packed


def _held(x: Array | Sequence[Array], block: Block) -> Array:
    """Return the array of this rank that a block is in."""
    return x[block.part] if isinstance(x, Sequence) else x


def _contiguous(
    x: Array, row_starts: np.ndarray, col_starts: np.ndarray, rows: IndexMap, cols: IndexMap, plan: Redistribution
) -> Array | None:
    """Return the block as a view of a local array if it can be sent or received in place, else None."""
    if plan.staged or not rows.contiguous or not cols.contiguous or x.dtype != plan.wire:
        return None
    r, c = int(row_starts[0]), int(col_starts[0])
    view = x[r : r + rows.size, c : c + cols.size]
    contiguous = view.flags.c_contiguous if plan.order == "C" else view.flags.f_contiguous
    return view if contiguous else None


class kept_if_it_fails:
    """Keeps buffers for ever after an exception during a transfer, because MPI may still read and write them."""

    __slots__ = ("_workspace",)

    def __init__(self, workspace: object) -> None:
        self._workspace = workspace

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            _in_flight.append(self._workspace)


_in_flight: list[object] = []
