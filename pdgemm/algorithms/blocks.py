"""from_blocks() makes a matrix from blocks of any size on the ranks; to_blocks() copies parts of a matrix to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.redistribution import between_nodes, timed_exchange
from pdgemm.errors import ArgumentError, DTypeError, LayoutError
from pdgemm.grids.distribution import Block
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.rectangles import Rectangle, bounding, check_partition, stacked
from pdgemm.instrument.run_report import RunReport, report_of_move
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import as_range, as_whole
from pdgemm.local.arrays.device import HOST, Array
from pdgemm.local.arrays.elementwise import on_host
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of, device_on, in_native_order, shared_or_sent
from pdgemm.names import DeviceName
from pdgemm.schedules.exchanges.rectangle_exchange import RectangleExchange, plan_rectangles
from pdgemm.support.agreement import together
from pdgemm.support.text import counted
from pdgemm.transport.exchange_buffers import ExchangeBuffers

Range = Any  # a pair (start, stop), a slice or a range; None for all


def from_blocks(
    local: Any,
    *,
    grid: ProcessGrid,
    rows: Range | list[Range] = None,
    cols: Range | list[Range] = None,
    axis: int | None = None,
    shape: tuple[int, int] | None = None,
    block: Block | None = None,
    source: tuple[int, int] = (0, 0),
    order: Order = "C",
    device: DeviceName = HOST,
) -> DistMatrix:
    """Make a matrix from blocks on the ranks: A[rows, cols] = local on each rank.  Collective over the grid.

    local : this rank's block, (rows, columns), or a list of blocks; None or [] on a rank without blocks.  Arrays of
            NumPy, or of any library that exports memory (DLPack, buffers), of one dtype on all ranks.  Only read.
            If all blocks of all ranks are on `device`, they are sent from it; otherwise they are copied to the host.
    rows, cols : the indices of the block: a pair (start, stop), a slice or a range; for a list of blocks a list of
            these, or one for all blocks.  Without `rows` a block starts at row 0, without `cols` at column 0.
    axis  : replaces rows and cols.  0: the blocks are stacked in the order of the ranks; 1: they are side by side.
    shape : (m, n); by default the smallest matrix that contains all blocks.
    block, source, order, device : layout of the result, as in `DistMatrix.empty`.

    The blocks of all ranks cover the matrix: each element is in exactly one block.  `.report` has the words sent.

    Cost per rank: each element that changes its rank is sent once, packed, in one exchange; messages of at most 1 MiB
    (on a device, or between two nodes, 32 MiB).
    Raises LayoutError if blocks overlap or elements are missing; the message names the ranks and the rectangles.
    Raises DTypeError, ArgumentError, GridError or DeviceError for other mistakes.  All errors are raised on every rank,
    before any element is sent.
    """
    start, comm = perf_counter(), communicator_of(grid)
    device_on(grid, device)
    with together(comm) as arguments:
        blocks, places = _blocks_and_places(local, rows, cols, axis)
        arguments += ["DistMatrix.from_blocks", f"axis={axis}", f"shape={shape}"]
        elsewhere = {devices.name_of(x) for x in blocks if x.size} - {device}
    parts = comm.allgather(([x.shape for x in blocks], places, [x.dtype.name for x in blocks if x.size], elsewhere))
    via = HOST if any(names for *_, names in parts) else device
    with together(comm):
        placed = [held for _, held, *_ in parts] if axis is None else stacked([shapes for shapes, *_ in parts], axis)
        rectangles = tuple(map(tuple, placed))
        whole = bounding(rectangles) if shape is None else shape
        dtype = _one_dtype([types for _, _, types, _ in parts])
        blocks = [on_host(x) for x in blocks] if via == HOST else blocks
    matrix = DistMatrix.empty(whole, grid=grid, block=block, dtype=dtype, source=source, order=order, device=via)
    report = set_from_blocks(matrix, blocks, rectangles, start)
    matrix = matrix.to_device(device)
    matrix.report = report
    return matrix


def set_from_blocks(
    matrix: DistMatrix, blocks: list[Array], rectangles: tuple[tuple[Rectangle, ...], ...], start: float
) -> RunReport:
    """Set all elements of a matrix from the blocks of all ranks, and return the report.  Collective.

    The blocks are on the host or the device that the matrix is on.
    """
    with together(matrix.grid.comm):
        check_partition(rectangles, matrix.shape)
    return _move(matrix, blocks, rectangles, True, start)


def to_blocks(A: DistMatrix, rows: Range | list[Range] = None, cols: Range | list[Range] = None) -> Any:
    """Return A[rows, cols] as an array; ranks may request different parts.  Collective over the grid of A.

    A    : DistMatrix (m, n), or a view.
    rows, cols : a pair (start, stop), a slice or a range; None for all; (0, 0) for no elements.  Parts of several ranks
           may have elements in common.  With a list of ranges the result is a list of arrays.

    The arrays are row-major NumPy arrays of the type of A.  If A is on a device, the parts are exchanged there, and
    then copied to the host.

    Cost per rank: each requested element on another rank is sent once for each part that contains it, in one exchange.
    Raises ArgumentError or GridError on every rank.
    """
    return reported_blocks(A, rows, cols)[0]


def reported_blocks(A: DistMatrix, rows: Any = None, cols: Any = None) -> tuple[Any, RunReport]:
    """Return the result of `to_blocks`, and the report of words and seconds.  Collective over the grid of A."""
    start, comm = perf_counter(), communicator(A=A)
    with together(comm) as arguments:
        check_matrices(A=A)
        arguments += ["to_blocks", A.distribution, A.dtype]
        several = isinstance(rows, list) or isinstance(cols, list)
        count = max((len(x) for x in (rows, cols) if isinstance(x, list)), default=1)
        down, across = _each(rows, "rows", count, A.shape[0]), _each(cols, "cols", count, A.shape[1])
        requested = [Rectangle(*ends) for ends in zip(down, across)]
    rectangles = tuple(map(tuple, comm.allgather(requested)))
    with together(comm):
        there = [devices.empty(x.shape, A.dtype, device=devices.of(A.stored)) for x in requested]
    report = _move(A, there, rectangles, False, start)
    with together(comm):
        blocks = [on_host(x) for x in there]
    return blocks if several else blocks[0], report


def _move(
    matrix: DistMatrix, blocks: list[Array], rectangles: tuple[tuple[Rectangle, ...], ...], inward: bool, start: float
) -> RunReport:
    """Copy the elements of the blocks of all ranks to a matrix, or back, and return the report.  Collective."""
    grid, device, name = matrix.grid, devices.of(matrix.stored), "from_blocks" if inward else "to_blocks"

    def set_up(by_nodes: bool) -> tuple[RectangleExchange, ExchangeBuffers]:
        with together(grid.comm) as arguments:
            on: tuple[str, bool] = ("", False)
            if device:
                held = [x for x in (matrix.stored, *blocks) if x.size]
                for x in held:
                    device.check(x)
                on = device.name, device.reach(grid).staged or not all(map(device.addressable, held))
            order: Order = matrix.order if inward else "C"
            plan = plan_rectangles(rectangles, matrix.layout_in(grid), inward, order, *on)
            plan = between_nodes(plan, grid, by_nodes)
            arguments += [name, f"nodes={plan.nodes}"]
            buffers = ExchangeBuffers(plan, grid.comm.rank, device, grid.memory)
        return plan, buffers

    plan, buffers = shared_or_sent(grid.comm, set_up)
    X, Y = (blocks, matrix.stored) if inward else (matrix.stored, blocks)
    recorder = timed_exchange(name, 1, X, 0, Y, plan, buffers, grid)
    ends = counted(sum(map(len, rectangles)), "block") + " of any size", str(plan.layout)
    source, target = ends if inward else ends[::-1]
    return report_of_move(recorder, [plan], grid, perf_counter() - start, name="A", source=source, target=target)


def _blocks_and_places(local: Any, rows: Any, cols: Any, axis: Any) -> tuple[list[Array], list[Rectangle]]:
    """Return this rank's blocks and, if axis is None, their rectangles.  Local."""
    arrays = [] if local is None else local if isinstance(local, list) else [local]
    blocks = [in_native_order(devices.adopted(x), "a block") for x in arrays]
    if axis is not None:
        if as_whole(axis, "axis") not in (0, 1) or rows is not None or cols is not None:
            raise ArgumentError(f"axis must be 0 or 1, without rows or cols; got axis={axis}, rows={rows}, cols={cols}")
        return blocks, []
    if rows is None and cols is None and blocks:
        raise ArgumentError(
            "from_blocks needs the place of each block: rows=(start, stop), cols=(start, stop); or axis=0"
        )
    down = _each(rows, "rows", len(blocks), None, [x.shape[0] for x in blocks])
    across = _each(cols, "cols", len(blocks), None, [x.shape[1] for x in blocks])
    places = [Rectangle(*ends) for ends in zip(down, across)]
    for x, place in zip(blocks, places):
        if x.shape != place.shape:
            m, n = place.shape
            raise LayoutError(f"{place} are {m} x {n} elements, the block is of shape {x.shape}")
    return blocks, places


def _each(listed: Any, name: str, count: int, extent: int | None, lengths: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return one range for each block: the ranges of a list, or the same range for all blocks."""
    if isinstance(listed, list) and len(listed) != count:
        raise ArgumentError(f"{name} is a list of {len(listed)} ranges for {counted(count, 'block')}")
    ranges = listed if isinstance(listed, list) else [listed] * count
    return [as_range(x, name, extent, length) for x, length in zip(ranges, lengths or [0] * count)]


def _one_dtype(of_ranks: Sequence[Sequence[str]]) -> np.dtype:
    """Return the type of all blocks that have elements; float64 if no block has elements."""
    first_ranks = dict[str, int]()  # by dtype, the first rank with a block of this dtype
    for rank, names in enumerate(of_ranks):
        for name in names:
            first_ranks.setdefault(name, rank)
    if len(first_ranks) > 1:
        types = " and ".join(f"{name} (rank {rank})" for name, rank in list(first_ranks.items())[:2])
        raise DTypeError(f"the blocks of all ranks must have one dtype, got {types}")
    return np.dtype(next(iter(first_ranks), "float64"))
