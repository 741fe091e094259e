"""redistribute(): Y := alpha X + beta Y between any two layouts, as one exchange of packed messages."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.arrays import device as devices
from pdgemm.arrays.device import Array, Device
from pdgemm.arrays.dtypes import fits, wire
from pdgemm.arrays.elementwise import Combine, scale
from pdgemm.arrays.integers import as_count
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, GridError, LayoutError, MemoryLimitError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.layout import Layout, Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.report import MoveReport
from pdgemm.matrix.argument_checks import as_scalar, check_matrices, check_result, communicator, same_memory
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import all_shared, device_on, distribution_on, new_array
from pdgemm.movers.block_copy import copy_blocks
from pdgemm.movers.node_arrays import Neighbours
from pdgemm.schedules.exchange import Exchange, best_places, plan_exchange
from pdgemm.support.agreement import together


def redistribute(
    X: DistMatrix,
    out: DistMatrix | None = None,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    grid: ProcessGrid | None = None,
    block: int | tuple[int, int] | None = None,
    source: tuple[int, int] = (0, 0),
    order: Order = "C",
    dtype: Any = None,
    relabel: bool = False,
    memory_limit: int | None = None,
    check: bool = True,
) -> DistMatrix:
    """Y := alpha X + beta Y, from any layout to any layout.  Collective over the grid of X; also X.redistribute(...).

    X   : DistMatrix (m, n); `X.T` and `X.H` transpose and conjugate on the way.
    out : Y, DistMatrix (m, n) of any layout and type over the same ranks, overwritten, not read where beta is 0; it
          may be X itself, or lie exactly on it where no element changes its place.
          None: Y is made, by `grid` (default: that of X), `block, source, order` as for `DistMatrix.empty`, and
          `dtype` (default: that of X).
    alpha, beta  : scalars of the type of Y.
    relabel      : place the ranks on a grid of the same shape such that most elements stay where they are.  Where
                   that is better, Y lies on a new grid, `Y.grid`, that the caller frees.
    memory_limit : bytes per rank for the buffers of messages.
    check        : False skips the allreduce that makes all ranks raise the same exception.

    Returns Y; `Y.report` says how many words were sent, and how long it took.

    Cost per rank: each element that changes its owner is sent once, packed; messages of at most 1 MiB, four at a time.
    Raises LayoutError, GridError, DTypeError, ArgumentError or MemoryLimitError, the same on every rank and before
    anything is sent.
    """
    start, comm, made = perf_counter(), communicator(X=X, out=out), out is None
    if grid is not None:  # the ranks meet on it, if it is one that they can meet on
        with together(comm, check) as said:
            said.append("redistribute to a grid")
            check_matrices(X=X)
            if not isinstance(grid, ProcessGrid) or grid.place_in(X.grid) is None:
                raise GridError(f"grid is a ProcessGrid over the ranks of {X.grid!r}, got {grid!r}")
    if relabel and made:
        grid = _relabelled(X, grid or X.grid.base, block, source)
    if made:
        device_on(grid or X.grid.base, X.device)
    with together(comm, check) as said:
        if out is None:
            if beta != 0:
                raise ArgumentError(f"beta = {beta} needs an out to be added to")
            out = _made(X, grid or X.grid.base, block, source, order, dtype)
        elif (grid, block, source, order, dtype, relabel) != (None, None, (0, 0), "C", None, False):
            raise ArgumentError("out has a layout and a type: grid, block, source, order, dtype and relabel make one")
        _check(X, out)
        alpha, beta = (as_scalar(x, out.dtype, name) for x, name in ((alpha, "alpha"), (beta, "beta")))
        limit = None if memory_limit is None else as_count(memory_limit, "memory_limit", 0)
        layout, target = X.layout_in(X.grid), out.layout_in(X.grid)
        if alpha == 0:  # X is not read
            layout = target
        shared = X.shared and X.grid.ranks_per_node is None
        where = devices.of(X.stored)
        shared, staged = reached(where, X.grid, shared, X.mpi_addressable and out.mpi_addressable)
        there = (where.name if where else "", staged)
        plan = plan_exchange(layout, target, comm.size, alpha == 1 and beta == 0, limit, shared, *there)
        if limit is not None and plan.extra_bytes(None) > limit:
            raise MemoryLimitError(
                f"memory limit {limit} bytes per rank is too small to redistribute {X!r}: "
                f"at least {plan.extra_bytes(None)} bytes are needed"
            )
        said += ["redistribute", *["out=None"] * made, f"alpha={alpha}", f"beta={beta}", plan.description]
        room = Room(plan, comm.rank, where)
    assert out is not None  # an error was raised on all ranks
    recorder = recorder_of(X.stored)
    recorder.hold(room.nbytes)
    with np.errstate(all="ignore"), kept_if_it_fails(room), spans.timed("redistribute", out.stored.nbytes):
        if alpha == 0:
            scale(beta, out.stored)
        else:
            exchange(alpha, X.stored, beta, out.stored, plan, room, X.grid, recorder)
        recorder.finish()
    if made:
        out.shared = all_shared(out.stored, out.grid)
    out.report = move_report("X", plan, comm.rank, recorder, perf_counter() - start)
    return out


class kept_if_it_fails:
    """After an exception in the middle of a transfer MPI may still read and write the buffers: they are never freed."""

    __slots__ = ("_room",)

    def __init__(self, room: object) -> None:
        self._room = room

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            _in_flight.append(self._room)


_in_flight: list[object] = []


def reached(device: Device | None, grid: ProcessGrid, shared: bool, plain: bool) -> tuple[bool, bool]:
    """Can ranks read each other's matrices, if that is where `shared` says; must messages be staged?"""
    if device is None:
        return shared, False
    reach = device.reach(grid)
    return shared and bool(reach.reads), reach.staged or not plain


def _made(
    X: DistMatrix,
    grid: ProcessGrid,
    block: int | tuple[int, int] | None,
    source: tuple[int, int],
    order: Order,
    dtype: Any,
) -> DistMatrix:
    """A matrix of the shape of X whose elements are not set.  Local."""
    if order not in ("C", "F"):
        raise ArgumentError(f'order {order!r} is neither "C" nor "F"')
    layout = distribution_on(grid, X.shape, block, source)
    where = devices.of(X.stored)
    local = new_array(layout.local_shape(grid.coords), X.dtype if dtype is None else dtype, order, grid, where)
    return DistMatrix(local, grid, layout, order)


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
        raise DeviceError(f"X is on {X.device}, out on {Y.device}; bring one to the other's with to_device")
    if X.shape != Y.shape:
        raise LayoutError(f"shapes differ: X is {X.distribution}, out is {Y.distribution}")
    if not fits(X.dtype, Y.dtype):
        raise DTypeError(f"{X.dtype} elements cannot become {Y.dtype}")
    in_place = X.same_layout(Y) and same_memory(X.stored, Y.stored)  # element by element: no harm
    check_result("out", Y, {} if in_place else {"X": X})


def _relabelled(
    X: DistMatrix, grid: ProcessGrid, block: int | tuple[int, int] | None, source: tuple[int, int]
) -> ProcessGrid:
    """A grid like `grid` whose ranks already hold most of what they will hold."""
    with together(X.grid.comm) as said:
        here = X.layout_in(X.grid)
        place = grid.place_in(X.grid)
        if place is None:
            raise GridError(f"grids over different ranks: {X.grid!r} and {grid!r}")
        there = Layout(Distribution.over(grid.shape, X.shape, block, source), place, X.dtype)
        best = best_places(here, there, X.grid.size)
        said += ["redistribute with relabel", here, there]
    return grid if best == place else ProcessGrid(X.grid.comm, grid.shape, ranks=best)


def exchange(
    alpha: Any,
    X: Array,
    beta: Any,
    Y: Array,
    plan: Exchange,
    room: Room,
    grid: ProcessGrid,
    recorder: Recorder,
) -> None:
    """This rank's part of Y := alpha X + beta Y; X and Y are local arrays.  Collective over the grid."""
    conjugated = plan.source.conjugated != plan.target.conjugated

    combine = Combine(alpha, beta, room.scratch, conjugated)
    (_pull if plan.shared else _send)(X, Y, plan, room, grid, recorder, combine)


def _pull(
    X: Array, Y: Array, plan: Exchange, room: Room, grid: ProcessGrid, recorder: Recorder, combine: Combine
) -> None:
    """Copy what this rank is to hold, once, from where it lies in the memory of the node."""
    me, near = grid.comm.rank, Neighbours(grid, X=(X, plan.source))
    for block in plan.pulls(me):
        part = X if block.peer == me else near("X", block.peer)
        with recorder.phase("pack"):
            for tile in ((block.rows, block.cols),) if combine.room is None else plan.tiles(block):
                copy_blocks(part, Y, *tile, combine)
        if block.peer != me:
            recorder.traffic.read(block.rows.size * block.cols.size)
    recorder.settle()
    near.sync()


def _send(
    X: Array, Y: Array, plan: Exchange, room: Room, grid: ProcessGrid, recorder: Recorder, combine: Combine
) -> None:
    """Packing, transfer and unpacking of a message happen while it is in cache.

    What lies contiguous is sent from where it is, or received where it belongs.  While messages travel, what stays is
    copied.
    """
    comm, me, order = grid.comm, grid.comm.rank, plan.target.order

    incoming = ((block.peer, *tile) for block in plan.receives(me) for tile in plan.tiles(block))
    outgoing = ((block.peer, *tile) for block in plan.sends(me) for tile in plan.tiles(block))
    at_once = 8 * plan.words if plan.plain else plan.words  # what is only copied needs no room
    staying = (tile for block in plan.stays(me) for tile in plan.tiles(block, at_once))
    requests = [MPI.REQUEST_NULL] * len(room.messages)
    arrived: list[Callable[[], object]] = [_nothing] * room.receiving
    over: list[Callable[[], object]] = [_nothing] * room.receiving

    def receive(slot: int) -> None:
        tile = next(incoming, None)
        if tile is None:
            return
        peer, rows, cols = tile
        place = _contiguous(Y, rows.target, cols.target, rows, cols, plan) if plan.plain else None
        arrived[slot] = _nothing
        if place is None:
            place, packed = room.shaped(slot, rows.size, cols.size, order)
            rows, cols = rows.shifted(rows.source[0], 0), cols.shifted(cols.source[0], 0)

            def unpack() -> None:
                with recorder.phase("pack"):
                    copy_blocks(packed, Y, rows, cols, combine)

            arrived[slot] = unpack
        recorder.settle()  # what was here before has been unpacked
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
            place, packed = room.shaped(slot, rows.size, cols.size, order)
            rows, cols = rows.shifted(0, rows.target[0]), cols.shifted(0, cols.target[0])
            with recorder.phase("pack"):
                copy_blocks(X, packed, rows, cols)
            recorder.settle()
        requests[slot] = comm.Isend(wire(place), dest=peer)
        recorder.traffic.sent(place.size)

    for slot in range(len(requests)):
        receive(slot) if slot < room.receiving else send(slot)
    while True:
        tile = next(staying, None)
        if tile is not None:
            with recorder.phase("pack"):
                copy_blocks(X, Y, *tile, combine)
            slot, done = MPI.Request.Testany(requests)
            if not done:
                continue
        else:
            with recorder.phase("wait"):
                slot = MPI.Request.Waitany(requests)
        if slot == MPI.UNDEFINED:
            if tile is None:
                return
        elif slot < room.receiving:
            over[slot]()
            arrived[slot]()
            receive(slot)
        else:
            send(slot)


class Room:
    """The buffers of one exchange on one rank: of its device, or of the host where messages are staged there."""

    def __init__(self, plan: Exchange, rank: int, device: Device | None = None) -> None:
        self.receiving, sending = plan.slots(rank)
        self.messages: list[tuple[Array, Array]] = []  # as MPI sees them, and as those who pack and unpack do
        for _ in range(self.receiving + sending):
            if device and plan.staged:
                self.messages.append(tuple(device.pinned(plan.words, plan.wire)))
            else:
                self.messages.append((devices.empty((plan.words,), plan.wire, device=device),) * 2)
        self.scratch = None if plan.plain or device else np.empty((2, plan.words), plan.wide)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x, _ in self.messages) + (0 if self.scratch is None else self.scratch.nbytes)

    def shaped(self, slot: int, rows: int, cols: int, order: str) -> tuple[Array, Array]:
        """A message of rows x cols, on both sides."""
        sent, packed = (_shaped(x, rows, cols, order) for x in self.messages[slot])
        return sent, packed


def _contiguous(
    x: Array, row_starts: np.ndarray, col_starts: np.ndarray, rows: IndexMap, cols: IndexMap, plan: Exchange
) -> Array | None:
    """The block within a local array, if it lies there as it travels."""
    if plan.staged or not rows.contiguous or not cols.contiguous or x.dtype != plan.wire:
        return None
    r, c = int(row_starts[0]), int(col_starts[0])
    view = x[r : r + rows.size, c : c + cols.size]
    contiguous = view.flags.c_contiguous if plan.target.order == "C" else view.flags.f_contiguous
    return view if contiguous else None


def _shaped(buffer: Array, rows: int, cols: int, order: str) -> Array:
    words = buffer[: rows * cols]
    return words.reshape(rows, cols) if order == "C" else words.reshape(cols, rows).T


def _nothing() -> None:
    """Received where it belongs."""
