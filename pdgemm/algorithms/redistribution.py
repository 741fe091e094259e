"""redistribute() computes Y := alpha X + beta Y between any two layouts by one exchange of packed messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, get_args

import numpy as np

from pdgemm.algorithms.protection.checksum import checksum, repaired
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, GridError, LayoutError, MemoryLimitError
from pdgemm.grids.distribution import Block, Distribution
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.run_report import RunReport, report_of_move
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import as_count, as_name
from pdgemm.local.arrays.device import Device
from pdgemm.local.arrays.dtypes import can_convert
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.matrix.argument_checks import as_scalar, check_matrices, check_result, communicator, same_places
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import all_shared, device_on, new_array, shared_or_sent
from pdgemm.names import DType, Protection
from pdgemm.planning.machines.machine import machine_at_hand, on_nodes
from pdgemm.planning.machines.simulator import fastest_exchange
from pdgemm.schedules.exchanges.block_messages import AnyExchange, Redistribution
from pdgemm.schedules.exchanges.exchange import Exchange, plan_exchange
from pdgemm.support.agreement import together
from pdgemm.transport.exchange_buffers import ExchangeBuffers
from pdgemm.transport.packed_exchange import exchange, kept_if_it_fails, repeated_if_unmapped
from pdgemm.transport.store import store


@repeated_if_unmapped
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
    memory_limit: int | None = None,
    protect: Protection | None = None,
    check: bool = True,
) -> DistMatrix:
    """Compute Y := alpha X + beta Y between any two layouts.  Collective over the grid of X; also X.redistribute(...).

    X   : DistMatrix (m, n); `X.T` and `X.H` are transposed and conjugated during the exchange.
    out : Y, DistMatrix (m, n) of any layout and type over the same ranks, overwritten, not read if beta is 0; Y may be
          X itself, or share all the memory of X if the layouts are the same.
          None: Y is allocated on `grid` (default: that of X), with `block, source, order` as for `DistMatrix.empty`
          and `dtype` (default: that of X).
    like : a matrix of the shape of X; Y gets the layout of `like`.  Replaces out, grid, block, source and order.
    alpha, beta  : scalars of the type of Y.
    memory_limit : bytes per rank for the message buffers.
    protect      : compare the bits of Y and X by `checksum`; alpha must be 1, beta 0, and the types the
                   same.  "detect" raises CorruptionError if the bits differ; "repair" redistributes again, three
                   times at most.
    check        : False skips the allreduce that makes all ranks raise the same exception.

    Returns Y; `Y.report` has the words that were sent and the seconds of the redistribution.

    Cost per rank: each element that changes its owner is sent once, packed; messages of at most 1 MiB (on a
    device, or between two nodes, 32 MiB).
    Raises LayoutError, GridError, DTypeError, ArgumentError or MemoryLimitError on every rank, before any message.
    """
    start, comm, new_result = perf_counter(), communicator(X=X, out=out), out is None
    if like is not None or grid is not None:
        _check_target(X, like, grid, (new_result, grid, block, source, order), check)
    if like is not None:
        grid, order = like.grid, like.order
    if new_result:
        there = X.grid.base if grid is None else grid
        device_on(there, X.device)

    def set_up(by_nodes: bool) -> tuple[DistMatrix, Any, Any, Exchange, ExchangeBuffers | None]:
        Y, agreement = out, together(comm, check)
        with agreement as description:
            if Y is None:
                if beta != 0:
                    raise ArgumentError(f"beta = {beta} requires out, the matrix that it scales")
                layout = Distribution.over(there.shape, X.shape, block, source) if like is None else like.distribution
                Y = _new_result(X, there, layout, X.dtype if dtype is None else dtype, order)
            elif (grid, block, source, order, dtype) != (None, None, (0, 0), "C", None):
                raise ArgumentError("grid, block, source, order, dtype make a new matrix, but out was given")
            _check(X, Y)
            a, b = (as_scalar(x, Y.dtype, name) for x, name in ((alpha, "alpha"), (beta, "beta")))
            plan = _planned(X, Y, a, b, memory_limit, by_nodes)
            if protect is not None:
                as_name(protect, "protect", get_args(Protection))
                if a != 1 or b != 0 or X.dtype != Y.dtype:
                    raise ArgumentError("protect compares bits: alpha must be 1, beta 0, and the type of Y that of X")
            description += ["redistribute", f"protect={protect}", *["out=None"] * new_result]
            description += [f"alpha={a}", f"beta={b}", plan.description]
            agreement.check |= bool(plan.nodes)  # a rank may lack memory that the ranks of a node share
            on = devices.of(X.stored), X.grid.memory
            workspace = ExchangeBuffers(plan, comm.rank, *on) if not X.grid.draft else None
        return Y, a, b, plan, workspace

    out, alpha, beta, plan, workspace = shared_or_sent(comm, set_up)
    if new_result:
        out.shared = all_shared(out.stored, out.grid)
    if workspace is None:
        X.grid.draft.add("X", plan)
        return out
    recorder = _carried_out(X, alpha, out, beta, plan, workspace, protect)
    out.report = move_report("X", plan, X.grid, recorder, perf_counter() - start)
    return out


def _check_target(X: DistMatrix, like: DistMatrix | None, grid: Any, options: tuple[object, ...], check: bool) -> None:
    """Raise on all ranks if the elements of X cannot be redistributed to the layout of `like`, or to `grid`.

    options : (out is None, grid, block, source, order), as the caller of `redistribute` passed them.
    """
    with together(communicator(X=X), check) as description:
        description.append("redistribute to a grid" if like is None else "redistribute like another matrix")
        check_matrices(X=X, **({} if like is None else {"like": like}))
        if like is None:
            if not isinstance(grid, ProcessGrid) or grid.rank_map_in(X.grid) is None:
                raise GridError(f"grid must be a ProcessGrid over the ranks of {X.grid!r}, got {grid!r}")
            return
        if options != (True, None, None, (0, 0), "C"):
            raise ArgumentError("like determines the layout: omit out, grid, block, source and order")
        like.layout_in(X.grid)  # raises for a grid over other ranks
        if like.shape != X.shape:
            raise LayoutError(f"shapes differ: X is {X.distribution}, like is {like.distribution}")


def _new_result(X: DistMatrix, grid: ProcessGrid, layout: Distribution, dtype: DType, order: Order) -> DistMatrix:
    """Return a matrix that is not initialised, on the device of X.  Local."""
    as_name(order, "order", ("C", "F"))
    local = new_array(layout.local_shape(grid.coords), dtype, order, grid, devices.of(X.stored))
    return DistMatrix(local, grid, layout, order)


def _planned(X: DistMatrix, Y: DistMatrix, alpha: Any, beta: Any, memory_limit: int | None, by_nodes: bool) -> Exchange:
    """Return the exchange from X to Y.  Local; raises MemoryLimitError."""
    limit = None if memory_limit is None else as_count(memory_limit, "memory_limit", 0)
    target = Y.layout_in(X.grid)
    layout = target if alpha == 0 else X.layout_in(X.grid)  # X is not read if alpha is 0
    ways = transfer_ways(devices.of(X.stored), X.grid, X.shared, X.mpi_addressable and Y.mpi_addressable)
    plan = plan_exchange(layout, target, X.grid.size, alpha == 1 and beta == 0, limit, *ways)
    plan = between_nodes(plan, X.grid, by_nodes, limit)
    check_buffers(plan, limit, X)
    return plan


def check_buffers(plan: Redistribution, memory_limit: int | None, X: DistMatrix) -> None:
    """Raise MemoryLimitError if the message buffers of an exchange of X need more bytes.  Local."""
    if memory_limit is not None and plan.extra_bytes(None) > memory_limit:
        raise MemoryLimitError(
            f"memory limit {memory_limit} bytes per rank is too small to redistribute {X!r}: "
            f"at least {plan.extra_bytes(None)} bytes are needed"
        )


def _carried_out(
    X: DistMatrix, alpha: Any, Y: DistMatrix, beta: Any, plan: Exchange, buffers: ExchangeBuffers, protect: str | None
) -> Recorder:
    """Compute Y := alpha X + beta Y, and return the recorder of words and seconds.  Collective."""
    call: Any = "redistribute", alpha, X.stored, beta, Y.stored, plan, buffers, X.grid
    expected = checksum(X) if protect else ""
    recorder = timed_exchange(*call)
    if protect:
        repaired(X, Y, expected, partial(timed_exchange, *call) if protect == "repair" else None)
    return recorder


def timed_exchange(
    name: str,
    alpha: Any,
    X: Any,
    beta: Any,
    Y: Any,
    plan: Redistribution,
    buffers: ExchangeBuffers,
    grid: ProcessGrid,
    then: Callable[[Recorder], object] | None = None,
) -> Recorder:
    """Compute Y := alpha X + beta Y, and return the recorder.  Collective; the plan is the same on all ranks.

    X, Y : the local array, or the list of this rank's blocks.   name : the name of the span that is recorded.
    then : is called with the recorder after the exchange, for further work on Y.
    """
    sources, targets = (x if isinstance(x, list) else [x] for x in (X, Y))
    recorder = recorder_of([*targets, *sources][0])
    recorder.hold(buffers.nbytes)
    kept = kept_if_it_fails(buffers, *sources, *targets)
    with np.errstate(all="ignore"), kept, spans.timed(name, sum(y.nbytes for y in targets)):
        if alpha == 0:
            with recorder.phase("compute"):
                store(Y, None, Combine(beta=beta))
        else:
            exchange(alpha, X, beta, Y, plan, buffers, grid, recorder)
        if then:
            then(recorder)
        recorder.finish()
    return recorder


def transfer_ways(
    device: Device | None, grid: ProcessGrid, shared: bool, addressable: bool
) -> tuple[bool, str, bool, bool]:
    """Return whether all ranks can read each other's matrices, the name of the device, and how messages are sent.

    shared : the ranks of each node can read each other's matrices.   addressable : MPI can access the matrices.
    The device's name is "" for the host; the last two values say whether messages are staged, and whether NCCL sends.
    """
    shared = shared and grid.ranks_per_node is None
    if device is None:
        return shared, "", False, False
    reach = device.reach(grid)
    nccl = reach.nccl and addressable and grid.size > 1
    return shared and bool(reach.reads), device.name, not nccl and (reach.staged or not addressable), nccl


def between_nodes(
    direct: AnyExchange, grid: ProcessGrid, allowed: bool = True, memory_limit: int | None = None
) -> AnyExchange:
    """Return an exchange, with one message between two nodes if that is `allowed` and faster on this machine.

    Local; all ranks choose alike.
    """
    if not allowed or not grid.shares_memory or grid.ranks_per_node is None:
        return direct
    machine = (grid.draft and grid.draft.machine) or on_nodes(machine_at_hand(), grid.ranks_per_node)
    return fastest_exchange(direct, grid.nodes, machine, memory_limit)


def move_report(name: str, plan: Exchange, grid: ProcessGrid, recorder: Recorder, seconds: float) -> RunReport:
    ends = {"source": str(plan.source), "target": str(plan.target)}
    return report_of_move(recorder, [plan], grid, seconds, name=name, **ends)


def _check(X: DistMatrix, Y: DistMatrix) -> None:
    check_matrices(X=X, out=Y)
    if X.device != Y.device:
        raise DeviceError(f"X is on {X.device}, out on {Y.device}; copy one of them with to_device")
    if X.shape != Y.shape:
        raise LayoutError(f"shapes differ: X is {X.distribution}, out is {Y.distribution}")
    if not can_convert(X.dtype, Y.dtype):
        raise DTypeError(f"{X.dtype} elements cannot become {Y.dtype}")
    check_result("out", Y, {} if same_places(X, Y) else {"X": X})  # in place, elements are read before they are written
