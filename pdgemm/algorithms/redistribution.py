"""redistribute() computes Y := alpha X + beta Y between any two layouts by one exchange of packed messages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.store import store
from pdgemm.arrays import device as devices
from pdgemm.arrays.device import Array, Device, of
from pdgemm.arrays.dtypes import fits, wire
from pdgemm.arrays.elementwise import Combine
from pdgemm.arrays.integers import as_count
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, GridError, LayoutError, MemoryLimitError
from pdgemm.grids.distribution import Block, Distribution
from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.layout import Layout, Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.instrument.report import MoveReport
from pdgemm.matrix.argument_checks import as_scalar, check_matrices, check_result, communicator, same_memory
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import all_shared, device_on, new_array, new_local
from pdgemm.movers.block_copy import copy_blocks
from pdgemm.movers.node_arrays import NodeArrays
from pdgemm.movers.panel_views import column_room
from pdgemm.movers.pipeline import flat
from pdgemm.names import DType
from pdgemm.schedules.exchange import Exchange, best_places, plan_exchange
from pdgemm.support.agreement import together


def redistribute(
    X: DistMatrix,
    out: DistMatrix | None = None,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    like: DistMatrix | None = None,
    grid: ProcessGrid | None = None,
    block: Block | None = None,
    source: tuple[int, int] = (0, 0),
    order: Order = "C",
    dtype: DType | None = None,
    relabel: bool = False,
    memory_limit: int | None = None,
    check: bool = True,
) -> DistMatrix:
    """Compute Y := alpha X + beta Y between any two layouts.  Collective over the grid of X; also X.redistribute(...).

    X   : DistMatrix (m, n); `X.T` and `X.H` are transposed and conjugated during the exchange.
    out : Y, DistMatrix (m, n) of any layout and type over the same ranks, overwritten, not read where beta is 0; it
          may be X itself, or share all its memory where the layouts are the same.
          None: Y is allocated on `grid` (default: that of X), with `block, source, order` as for `DistMatrix.empty`
          and `dtype` (default: that of X).
    like : a matrix of the shape of X, whose layout Y gets, in place of out, grid, block, source and order.
    alpha, beta  : scalars of the type of Y.
    relabel      : map the ranks to a grid of the same shape such that most elements stay on their ranks.  Where that
                   reduces the words sent, Y is on a new grid, `Y.grid`, that the caller frees.
    memory_limit : bytes per rank for the message buffers.
    check        : False skips the allreduce that makes all ranks raise the same exception.

    Returns Y; `Y.report` has the words that were sent and the seconds that it took.

    Cost per rank: each element that changes its owner is sent once, packed; messages of at most 1 MiB (device 32 MiB).
    Raises LayoutError, GridError, DTypeError, ArgumentError or MemoryLimitError on every rank, before any message.
    """
    start, comm, made = perf_counter(), communicator(X=X, out=out), out is None
    if like is not None:
        out, dtype = _like(X, like, dtype, (out is None, grid, block, source, order, relabel), check), None
    if grid is not None:  # Y's grid has to be over the ranks of X's grid
        with together(comm, check) as description:
            description.append("redistribute to a grid")
            check_matrices(X=X)
            if not isinstance(grid, ProcessGrid) or grid.rank_map_in(X.grid) is None:
                raise GridError(f"grid must be a ProcessGrid over the ranks of {X.grid!r}, got {grid!r}")
    if relabel and made:
        grid = _relabelled(X, grid or X.grid.base, block, source)
    if made:
        device_on(grid or X.grid.base, X.device)
    with together(comm, check) as description:
        if out is None:
            if beta != 0:
                raise ArgumentError(f"beta = {beta} requires out, the matrix that it scales")
            there = grid or X.grid.base
            wanted = X.dtype if dtype is None else dtype
            local, distribution = new_local(there, X.shape, block, source, wanted, order, devices.of(X.stored))
            out = DistMatrix(local, there, distribution, order)
        elif (grid, block, source, order, dtype, relabel) != (None, None, (0, 0), "C", None, False):
            raise ArgumentError("grid, block, source, order, dtype and relabel are for a new matrix, but out was given")
        _check(X, out)
        alpha, beta = (as_scalar(x, out.dtype, name) for x, name in ((alpha, "alpha"), (beta, "beta")))
        limit = None if memory_limit is None else as_count(memory_limit, "memory_limit", 0)
        target = out.layout_in(X.grid)
        layout = target if alpha == 0 else X.layout_in(X.grid)  # X is not read where alpha is 0
        shared = X.shared and X.grid.ranks_per_node is None
        where = devices.of(X.stored)
        shared, staged, nccl = reached(where, X.grid, shared, X.mpi_addressable and out.mpi_addressable)
        on = (where.name if where else "", staged, nccl)
        plan = plan_exchange(layout, target, comm.size, alpha == 1 and beta == 0, limit, shared, *on)
        if limit is not None and plan.extra_bytes(None) > limit:
            raise MemoryLimitError(
                f"memory limit {limit} bytes per rank is too small to redistribute {X!r}: "
                f"at least {plan.extra_bytes(None)} bytes are needed"
            )
        description += ["redistribute", *["out=None"] * made, f"alpha={alpha}", f"beta={beta}", plan.description]
        workspace = Room(plan, comm.rank, where)
    assert out is not None  # an error was raised on all ranks
    recorder = recorder_of(X.stored)
    recorder.hold(workspace.nbytes)
    with np.errstate(all="ignore"), kept_if_it_fails(workspace), spans.timed("redistribute", out.stored.nbytes):
        if alpha == 0:
            with recorder.phase("compute"):
                store(out.stored, None, Combine(beta=beta))
        else:
            exchange(alpha, X.stored, beta, out.stored, plan, workspace, X.grid, recorder)
        recorder.finish()
    if made:
        out.shared = all_shared(out.stored, out.grid)
    out.report = move_report("X", plan, comm.rank, recorder, perf_counter() - start)
    return out


def _like(X: DistMatrix, like: DistMatrix, dtype: Any, others: tuple[object, ...], check: bool) -> DistMatrix:
    """Return a matrix of X's type, or another, in the layout of `like`."""
    with together(communicator(X=X), check) as description:
        description.append("redistribute like another matrix")
        check_matrices(X=X, like=like)
        if others != (True, None, None, (0, 0), "C", False):
            raise ArgumentError("like has a layout: out, grid, block, source, order and relabel are not taken with it")
        like.layout_in(X.grid)  # raises for a grid over other ranks
        if like.shape != X.shape:
            raise LayoutError(f"shapes differ: X is {X.distribution}, like is {like.distribution}")
        local = new_array(like.stored.shape, dtype or X.dtype, like.order, like.grid, devices.of(X.stored))
    return type(X)(local, like.grid, like.distribution, like.order)


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


def reached(device: Device | None, grid: ProcessGrid, shared: bool, addressable: bool) -> tuple[bool, bool, bool]:
    """Return whether ranks can read each other's matrices in place, whether messages are staged, and sent by NCCL."""
    if device is None:
        return shared, False, False
    reach = device.reach(grid)
    nccl = reach.nccl and addressable and grid.size > 1
    return shared and bool(reach.reads), not nccl and (reach.staged or not addressable), nccl


def move_report(name: str, plan: Exchange, rank: int, recorder: Recorder, seconds: float) -> MoveReport:
    return MoveReport(
        name=name,
        source=str(plan.source),
        target=str(plan.target),
        rank=rank,
        seconds=seconds,
        counted=recorder.traffic,
        predicted=plan.traffic(rank),
        extra_bytes=recorder.peak_bytes,
        predicted_extra_bytes=plan.extra_bytes(rank),
    )


def _check(X: DistMatrix, Y: DistMatrix) -> None:
    check_matrices(X=X, out=Y)
    if X.device != Y.device:
        raise DeviceError(f"X is on {X.device}, out on {Y.device}; copy one of them with to_device")
    if X.shape != Y.shape:
        raise LayoutError(f"shapes differ: X is {X.distribution}, out is {Y.distribution}")
    if not fits(X.dtype, Y.dtype):
        raise DTypeError(f"{X.dtype} elements cannot become {Y.dtype}")
    in_place = X.same_layout(Y) and same_memory(X.stored, Y.stored)  # each element is read before it is overwritten
    check_result("out", Y, {} if in_place else {"X": X})


def _relabelled(
    X: DistMatrix, grid: ProcessGrid, block: int | tuple[int, int] | None, source: tuple[int, int]
) -> ProcessGrid:
    """Return a grid of the shape of `grid` whose rank map keeps the most elements of X on their ranks."""
    with together(X.grid.comm) as description:
        here = X.layout_in(X.grid)
        place = grid.rank_map_in(X.grid)
        if place is None:
            raise GridError(f"grids over different ranks: {X.grid!r} and {grid!r}")
        there = Layout(Distribution.over(grid.shape, X.shape, block, source), place, X.dtype)
        best = best_places(here, there, X.grid.size)
        description += ["redistribute with relabel", here, there]
    return grid if best == place else ProcessGrid(X.grid.comm, grid.shape, ranks=best)


def exchange(
    alpha: Any,
    X: Array,
    beta: Any,
    Y: Array,
    plan: Exchange,
    workspace: Room,
    grid: ProcessGrid,
    recorder: Recorder,
) -> None:
    """Compute Y := alpha X + beta Y, where X and Y are this rank's local arrays.  Collective over the grid."""
    conjugated = plan.source.conjugated != plan.target.conjugated
    combine = Combine(alpha, beta, workspace.scratch, conjugated)
    way = _pull if plan.shared else _send_by_nccl if plan.nccl else _send
    way(X, Y, plan, workspace, grid, recorder, combine)


def _pull(
    X: Array, Y: Array, plan: Exchange, workspace: Room, grid: ProcessGrid, recorder: Recorder, combine: Combine
) -> None:
    """Copy each element of this rank's Y once, from the node-shared memory of its owner in X."""
    me, peers = grid.comm.rank, NodeArrays(grid, X=(X, plan.source))
    for block in plan.pulls(me):
        part = X if block.peer == me else peers("X", block.peer)
        with recorder.phase("pack"):
            for tile in ((block.rows, block.cols),) if combine.room is None else plan.tiles(block):
                store(Y, part, combine, *tile)
        if block.peer != me:
            recorder.traffic.read(block.rows.size * block.cols.size)
    recorder.synchronize_copies()
    peers.sync()


def _send(
    X: Array, Y: Array, plan: Exchange, workspace: Room, grid: ProcessGrid, recorder: Recorder, combine: Combine
) -> None:
    """Send, receive and copy tiles that are small enough to be packed, sent and unpacked while they are in cache.

    Contiguous tiles are sent from X and received into Y without packing.  Elements that stay on this rank are copied
    while messages are in flight.
    """
    comm, me, order = grid.comm, grid.comm.rank, plan.target.order

    incoming = ((block.peer, *tile) for block in plan.receives(me) for tile in plan.tiles(block))
    outgoing = ((block.peer, *tile) for block in plan.sends(me) for tile in plan.tiles(block))
    at_once = 8 * plan.words if plan.copies_only else plan.words  # elements that are only copied need no buffer
    staying = (tile for block in plan.staying(me) for tile in plan.tiles(block, at_once))
    requests = [MPI.REQUEST_NULL] * len(workspace.messages)
    arrived: list[Callable[[], object]] = [nothing] * workspace.receiving
    over: list[Callable[[], object]] = [nothing] * workspace.receiving

    def receive(slot: int) -> None:
        tile = next(incoming, None)
        if tile is None:
            return
        peer, rows, cols = tile
        place = _contiguous(Y, rows.target, cols.target, rows, cols, plan) if plan.copies_only else None
        arrived[slot] = nothing  # the message is received directly into Y
        if place is None:
            place, packed = workspace.shaped(slot, rows.size, cols.size, order)
            rows, cols = rows.shifted(rows.source[0], 0), cols.shifted(cols.source[0], 0)

            def unpack() -> None:
                with recorder.phase("pack"):
                    store(Y, packed, combine, rows, cols)

            arrived[slot] = unpack
        recorder.synchronize_copies()  # the last message in this buffer has been unpacked
        requests[slot] = comm.Irecv(wire(place), source=peer)
        recorder.traffic.received(place.size)
        over[slot] = recorder.moving("exchange", place.nbytes)

    def send(slot: int) -> None:
        tile = next(outgoing, None)
        if tile is None:
            return
        peer, rows, cols = tile
        place = _contiguous(X, rows.source, cols.source, rows, cols, plan)
        if place is None:
            place, packed = workspace.shaped(slot, rows.size, cols.size, order)
            rows, cols = rows.shifted(0, rows.target[0]), cols.shifted(0, cols.target[0])
            with recorder.phase("pack"):
                copy_blocks(X, packed, rows, cols)
            recorder.synchronize_copies()
        requests[slot] = comm.Isend(wire(place), dest=peer)
        recorder.traffic.sent(place.size)

    for slot in range(len(requests)):
        receive(slot) if slot < workspace.receiving else send(slot)
    while True:
        tile = next(staying, None)
        if tile is not None:
            with recorder.phase("compute" if of(X) else "pack"):  # a device packs messages meanwhile
                store(Y, X, combine, *tile)
            slot, done = MPI.Request.Testany(requests)
            if not done:
                continue
        else:
            with recorder.phase("wait"):
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
    X: Array, Y: Array, plan: Exchange, workspace: Room, grid: ProcessGrid, recorder: Recorder, combine: Combine
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
            store(Y, X, combine, *tile)
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
                        place, _ = workspace.shaped(workspace.receiving, rows.size, cols.size, plan.target.order)
                        copy_blocks(X, place, rows.shifted(0, rows.target[0]), cols.shifted(0, cols.target[0]))
                    sends.append((flat(place), (me + distance) % size))
                    recorder.traffic.sent(place.size)
                if coming:
                    rows, cols = coming
                    place = _contiguous(Y, rows.target, cols.target, rows, cols, plan) if plan.copies_only else None
                    if place is None:
                        place, unpacked = workspace.shaped(0, rows.size, cols.size, plan.target.order)
                    receives.append((flat(place), (me - distance) % size))
                    recorder.traffic.received(place.size)
                device.exchange(comm, sends, receives)
                if unpacked is not None:
                    there = rows.shifted(rows.source[0], 0), cols.shifted(cols.source[0], 0)
                    store(Y, unpacked, combine, *there)


class Room:
    """Holds the message buffers of an exchange on one rank, in device memory or, where staged, on the host."""

    def __init__(self, plan: Exchange, rank: int, device: Device | None = None) -> None:
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


def _contiguous(
    x: Array, row_starts: np.ndarray, col_starts: np.ndarray, rows: IndexMap, cols: IndexMap, plan: Exchange
) -> Array | None:
    """Return the block as a view of a local array if it can be sent or received in place, else None."""
    if plan.staged or not rows.contiguous or not cols.contiguous or x.dtype != plan.wire:
        return None
    r, c = int(row_starts[0]), int(col_starts[0])
    view = x[r : r + rows.size, c : c + cols.size]
    contiguous = view.flags.c_contiguous if plan.target.order == "C" else view.flags.f_contiguous
    return view if contiguous else None
