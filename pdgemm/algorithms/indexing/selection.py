"""select() copies rows and columns in any order to a new matrix, and assign() sets rows, columns and elements.

Elements are set to a number, to a matrix, or to an array that is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.redistribution import between_nodes, check_buffers, move_report, timed_exchange, transfer_ways
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.index_map import IndexPairs, merged
from pdgemm.grids.index_pairs import AnyPairs
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, to_host
from pdgemm.local.arrays.dtypes import can_convert, element_type
from pdgemm.local.arrays.elementwise import evaluated, is_extension, set_elements
from pdgemm.local.arrays.keys import Picked, last_of_each, picked
from pdgemm.matrix.argument_checks import check_matrices, check_result, communicator, overlap, same_places
from pdgemm.matrix.array_functions import fitted, part_of_broadcast
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import is_readable, new_array, shared_or_sent
from pdgemm.schedules.exchanges.exchange import Selection, plan_selection
from pdgemm.support.agreement import check_not_freed, described_elements, together
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.exchange_buffers import ExchangeBuffers
from pdgemm.transport.packed_exchange import repeated_if_unmapped

Indices = Any  # a list, array, mask, slice or range; None for all


def select(A: DistMatrix, rows: Indices = None, cols: Indices = None) -> DistMatrix:
    """Return a new matrix of some rows and columns of A, in the order of the indices, as A[rows] does.  Collective.

    A    : DistMatrix (m, n), or a view.
    rows, cols : a list or array of indices, which may repeat, or be negative as in NumPy; a mask (a 1-D array of m, or
           n, truth values); a slice of any step, or a range; None for all.  The same on every rank.

    The result is a copy and not a view, also for a slice, with the grid, the blocks and the type of A; `.report` has
    the words that were sent.

    Cost per rank: each element of the result that is on another rank in A is sent once, packed, in one exchange;
    messages of at most 1 MiB (on a device, or between two nodes, 32 MiB).
    Raises ArgumentError, which is an IndexError too, or another error of the package, on every rank.
    """
    start, comm = perf_counter(), communicator(A=A)
    with (agreement := together(comm)) as arguments:
        check_matrices(A=A)
        sides = _indices(rows, cols, A)
        layout = A.distribution
        distribution = Distribution(*(dim.resized(len(x)) for dim, x in zip((layout.rows, layout.cols), sides)))
        pairs = [IndexPairs(x, np.arange(len(x))) for x in sides]
        arguments += ["select", layout, A.dtype, *pairs]
        local = new_array(distribution.local_shape(A.grid.coords), A.dtype, A.order, A.grid, devices.of(A.stored))
        agreement.flag = not is_readable(local, A.grid)
    out = DistMatrix(local, A.grid, distribution, A.order, shared=not agreement.flag)
    copy_pairs("select", A, out, pairs, start)
    return out


def _indices(rows: Indices, cols: Indices, A: DistMatrix) -> list[np.ndarray]:
    """Return the indices of rows and of columns as arrays."""
    keys = [slice(None) if x is None else x for x in (rows, cols)]
    everything = slice(None)
    sides = picked((keys[0], everything), A.shape)[0], picked((everything, keys[1]), A.shape)[1]
    return [np.asarray(x.indices, np.int64) for x in sides]


@repeated_if_unmapped
def copy_pairs(
    name: str,
    X: DistMatrix,
    Y: DistMatrix,
    pairs: Sequence[AnyPairs],
    start: float,
    memory_limit: int | None = None,
) -> None:
    """Copy elements of X to Y, and set Y.report.  X and Y share no memory.  Collective.

    pairs : which row of X is copied to which row of Y, and the same for columns.
    memory_limit : bytes per rank for the message buffers.
    """
    grid, comm = Y.grid, Y.grid.comm

    def set_up(by_nodes: bool) -> tuple[Selection, ExchangeBuffers | None]:
        with together(comm) as arguments:
            check_result("A", Y, {})
            if X.device != Y.device:
                raise DeviceError(f"A is on {Y.device}, B on {X.device}; copy one of them with to_device")
            if not can_convert(X.dtype, Y.dtype):
                raise DTypeError(f"{X.dtype} elements cannot become {Y.dtype}")
            where = devices.of(X.stored)
            ways = transfer_ways(where, X.grid, X.shared, X.mpi_addressable and Y.mpi_addressable)
            rows, cols = pairs
            direct = plan_selection(X.layout_in(grid), Y.layout_in(grid), comm.size, (rows, cols), ways, memory_limit)
            plan = between_nodes(direct, grid, by_nodes, memory_limit)
            check_buffers(plan, memory_limit, X)
            arguments += [name, plan.description]
            workspace = None if grid.draft else ExchangeBuffers(plan, comm.rank, where, grid.memory)
        return plan, workspace

    plan, workspace = shared_or_sent(comm, set_up)
    if workspace is None:
        grid.draft.add("A", plan)
        return
    recorder = timed_exchange(name, 1, X.stored, 0, Y.stored, plan, workspace, grid)
    Y.report = move_report("A", plan, grid, recorder, perf_counter() - start)


def assign(A: DistMatrix, key: Any, value: Any) -> None:
    """Set A[key] := value, as `A[key] = value` does.  Collective over the grid of A.

    A     : DistMatrix (m, n), or a view; not the conjugate of a complex matrix.
    key   : any key with which A[key] reads elements, rows, columns or a submatrix; or a mask, an array or DistMatrix
            (m, n) of truth values, if the value is a number.  The same on every rank.
    value : a number; an array that is the same on every rank; or a DistMatrix of any layout over the same ranks, of a
            type that A can hold.  Broadcast as in NumPy.  If a key names a row or column twice, the last value stays.
            A matrix that shares memory with A is copied first, so that its old elements are assigned.

    Cost per rank: for a number or an array, nothing is sent; for a matrix, each element that changes its rank is sent
    once, in one exchange; a matrix that is broadcast to a larger shape is first gathered on every rank.
    Raises ArgumentError (also an IndexError for keys), LayoutError, DTypeError, GridError or DeviceError on every rank;
    then nothing is assigned.
    """
    start, common = perf_counter(), together(communicator(A=A))
    with common as arguments:
        check_matrices(A=A)
        if A.conjugated:
            raise ArgumentError("this matrix is the conjugate of another one, and cannot be written to")
        if isinstance(value, DistMatrix):
            check_not_freed(value.grid.comm)
        value = value if isinstance(value, DistMatrix) or not np.ndim(value) else to_host(devices.adopted(value))
        arguments += ["A[i0:i1, j0:j1] = ...", *_value_description(value, A.dtype)]
        mask = _mask(key, A.shape)
        if mask is None:
            rows, cols = picked(key, A.shape)
            arguments += [rows, cols]
            value = value if np.ndim(value) == 0 else _spread(value, (rows, cols))
            whole = (len(rows.indices), len(cols.indices))
            windows = [isinstance(x.indices, range) for x in (rows, cols)]
            target = A._window(rows.indices, cols.indices) if all(windows) else A[...]
            if isinstance(value, DistMatrix) and overlap(target.stored, value.stored):
                common.flag = not same_places(value, target)  # becomes True on all ranks if it is True on any
        elif np.ndim(value):
            raise ArgumentError("A[mask] = x takes only a number x; for a matrix B: A[...] = numpy.where(mask, B, A)")
        else:
            arguments.append("under a mask")
    if mask is not None:
        (where,), *_ = fitted("A[mask] = x", (mask,), A)
        with together(A.grid.comm, A.device != devices.HOST):  # a device may be out of memory on one rank
            _set_under_mask(A.stored, where, as_element(value, A.dtype))
    elif isinstance(value, DistMatrix):
        if common.flag:
            with together(A.grid.comm):  # a rank may be out of memory
                value = value.copy()
        if value.shape != whole:
            A[key] = value.allgather()
        elif all(windows):
            value.redistribute(target)
        else:  # of an index that occurs twice, the last row or column of the value is assigned
            places = [(last_of_each(x), x) for x in map(np.asarray, (rows.indices, cols.indices))]
            copy_pairs("assign", value, target, [IndexPairs(last, x[last]) for last, x in places], start)
    else:
        with together(A.grid.comm, A.device != devices.HOST):
            _set(A, rows, cols, value)


def _value_description(value: Any, dtype: np.dtype) -> list[object]:
    """Return the description of a value in messages.  Raises DTypeError or another error if A's type cannot hold it."""
    if isinstance(value, DistMatrix):
        return ["to a matrix"]
    if not isinstance(value, np.ndarray):
        return [f"to {as_element(value, dtype)}"]
    if not can_convert(element_type(value.dtype), dtype):
        raise DTypeError(f"{value.dtype} elements cannot become {dtype}")
    return [f"to an array of shape {value.shape}", described_elements(value)]


def as_element(value: Any, dtype: np.dtype) -> Any:
    """Return a number in the type of elements.  Raises an exception if the type cannot hold the number."""
    filled = np.zeros(1, dtype)
    filled[:] = value
    return filled[0]


def _mask(key: Any, shape: tuple[int, int]) -> Any:
    """Return the key if it is a mask (a matrix or a 2-D array), else None.  Raises LayoutError if it does not fit."""
    if not isinstance(key, (DistMatrix, np.ndarray)) or key.ndim != 2:
        return None
    if key.dtype != bool or key.shape != shape:
        raise LayoutError(f"a mask must be of truth values in the matrix's shape {shape}; got {key.dtype}, {key.shape}")
    return key


def _spread(value: Any, places: tuple[Picked, Picked]) -> Any:
    """Return a value as a 2-D array or matrix that can be broadcast to these rows and columns.  Raises LayoutError."""
    whole = tuple(len(x.indices) for x in places)
    what = value.distribution if isinstance(value, DistMatrix) else f"an array of shape {value.shape}"
    if not isinstance(value, DistMatrix):
        kept = [n for x, n in zip(places, whole) if not x.dropped]
        while value.ndim > len(kept) and len(value) == 1:
            value = value[0]
        if value.ndim <= len(kept):  # add the dimension that the key drops
            value = value.reshape(-1, 1) if places[1].dropped and not places[0].dropped else np.atleast_2d(value)
    if len(value.shape) != 2 or any(n not in (1, m) for n, m in zip(value.shape, whole)):
        raise LayoutError(f"{what} cannot be broadcast to {whole[0]} x {whole[1]} elements")
    return value


def _set(A: Any, rows: Picked, cols: Picked, value: Any) -> None:
    """Set this rank's elements of A[rows, cols] to a number, or to the elements of a 2-D array.  Local."""
    i, j = A.grid.coords
    (down, from_rows), (across, from_cols) = (
        _places(dim, x.indices, part)
        for dim, x, part in zip((A.distribution.rows, A.distribution.cols), (rows, cols), (i, j))
    )
    values = part_of_broadcast(value, from_rows, from_cols) if np.ndim(value) else as_element(value, A.dtype)
    if isinstance(down, slice) and isinstance(across, slice):
        target = A.stored[down, across]
        if np.ndim(value) == 0:
            target[...] = values
        else:
            set_elements(target, np.broadcast_to(values, target.shape))
        return
    places = [np.arange(n)[x] for n, x in zip(A.stored.shape, (down, across))]
    device, shape = devices.of(A.stored), tuple(map(len, places))
    if device is None:
        A.stored[np.ix_(*places)] = values
    elif 0 not in shape:
        source = device.empty(shape, A.dtype)
        set_elements(source, np.broadcast_to(np.asarray(values, A.dtype), shape))
        down, across = (merged(np.arange(len(x)), x, np.ones(len(x), np.int64)) for x in places)
        copy_blocks(source, A.stored, down, across)


def _set_under_mask(x: Array, where: Array, number: Any) -> None:
    """Set elements of an array to a number where a mask of its shape is true.  Local."""
    if isinstance(x, np.ndarray):
        x[where] = number
        return
    number = number.astype(np.float32) if is_extension(x.dtype) else number
    evaluated(lambda x, where: np.where(where, number, x), [x, where], x)


def _places(dim: BlockCyclic, indices: range | np.ndarray, part: int) -> tuple[Any, np.ndarray]:
    """Return the local indices of the `indices` that grid row or column `part` owns, and their places in `indices`."""
    if isinstance(indices, range):
        window = dim.window(indices.start, indices.stop)
        return dim.local_window(indices.start, indices.stop, part), window.indices(part)
    last = last_of_each(indices)
    mine = last[dim.owner(indices[last]) == part]
    return dim.to_local(indices[mine]), mine
