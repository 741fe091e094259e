"""The local arrays of a matrix: their allocation, and the agreement of the ranks on layout and device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.errors import GridError, LayoutError, MappingError, NodeMemoryError, OutOfMemoryError
from pdgemm.grids.distribution import Block, Distribution
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.alignment import aligned
from pdgemm.local.arrays.arguments import as_name
from pdgemm.local.arrays.device import Array, Device
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.support.agreement import check_not_freed, raised_on, together

T = TypeVar("T")


def new_array(
    shape: tuple[int, int], dtype: Any, order: Order, grid: ProcessGrid, device: Device | None = None
) -> Array:
    """Allocate an `aligned` array, not initialised, in node-shared memory if enough of this memory is left.  Local."""
    dtype = element_type(dtype)
    try:
        try:
            return aligned(shape, dtype, order, device, devices.shared_memory(device, grid).empty)
        except NodeMemoryError:
            return aligned(shape, dtype, order, device)
    except ValueError as bad:  # NumPy's own limit
        raise OutOfMemoryError(f"no rank has room for {shape[0]} x {shape[1]} elements of {dtype}: {bad}") from None


def allocated(comm: MPI.Comm, allocate: Callable[[], T]) -> T:
    """Return the result of `allocate`, a collective function; call it again if a rank lacks device memory.

    Device memory that its owner has freed stays allocated while other ranks map it.  So before the second call all
    ranks unmap the memory that they do not use.   allocate : raises OutOfMemoryError on all ranks, and writes nothing.
    Collective over comm.
    """
    try:
        return allocate()
    except OutOfMemoryError as lacking:
        if raised_on(lacking) != comm.size or not comm.allreduce(devices.in_use(), MPI.LOR):
            raise
    devices.release_memory()
    comm.Barrier()  # until all ranks have unmapped it
    return allocate()


def shared_or_sent(comm: MPI.Comm, set_up: Callable[[bool], T], required: bool = False) -> T:
    """Return set_up(True), with which ranks read each other's memory; if they cannot read it, return set_up(False).

    The first call is repeated as by `allocated`.  It fails where node-shared memory is exhausted or memory of another
    GPU cannot be mapped; both errors are raised on all ranks.
    required : raise the error of set_up(True), because the caller requested a mover.   Collective over comm.
    """
    try:
        return allocated(comm, partial(set_up, True))
    except (NodeMemoryError, MappingError):
        if required:
            raise
    gc.collect()  # frees buffers of the first attempt, to which its exception refers
    return allocated(comm, partial(set_up, False))


def new_local(
    grid: ProcessGrid, shape: tuple[int, int], block: Block | None, source: tuple[int, int], dtype: Any, order: Order,
    device: Device | None,
) -> tuple[Array, Distribution]:  # fmt: skip
    """Allocate the local array of a new matrix, and return it with the distribution.  Local."""
    distribution = Distribution.over(grid.shape, shape, block, source)
    as_name(order, "order", ("C", "F"))
    return new_array(distribution.local_shape(grid.coords), dtype, order, grid, device), distribution


def new_shared(grid: ProcessGrid, allocate: Callable[[list[object]], Array]) -> tuple[Array, bool]:
    """Return the local array of a new matrix, and the result of `all_shared` for the arrays of all ranks.  Collective.

    allocate : returns the local array.  It is called inside `with together(grid.comm) as arguments`, and gets the list
        `arguments`.  Like the function of `allocated`, it may be called twice.
    """

    def agreed() -> tuple[Array, bool]:
        with (agreement := together(grid.comm)) as arguments:
            local = allocate(arguments)
            agreement.flag = not is_readable(local, grid)
        return local, not agreement.flag

    return allocated(grid.comm, agreed)


def empty_like(A: Any, dtype: Any = None, distribution: Distribution | None = None, order: Order | None = None) -> Any:
    """Return an uninitialised matrix on the grid of A, in the layout of A or in another `distribution`.  Collective."""
    layout, order, device = distribution or A.distribution, order or A.order, devices.of(A.stored)
    shape = layout.local_shape(A.grid.coords)
    local, shared = new_shared(A.grid, lambda _: new_array(shape, dtype or A.dtype, order, A.grid, device))
    return type(A)(local, A.grid, layout, order, shared=shared)


def is_readable(local: Array, grid: ProcessGrid) -> bool:
    """Return whether other ranks of this node can read a local array in place; True for an empty one.  Local."""
    if grid.comm.size == 1:
        return False
    device = devices.of(local)
    if grid.draft:  # while a program is planned, nothing is allocated
        return bool(device.reach(grid).reads) if device else grid.shares_memory
    return not local.size or devices.shared_memory(device, grid).lies_here(local)


def all_shared(local: Array, grid: ProcessGrid) -> bool:
    """Return whether the ranks of every node can read each other's local arrays.  Collective over the grid."""
    readable = is_readable(local, grid)
    return readable if grid.comm.size == 1 or grid.draft else grid.comm.allreduce(readable, MPI.LAND)


def in_native_order(array: np.ndarray, what: str) -> np.ndarray:
    """Return a two-dimensional array in the byte order of this machine.  Raises DTypeError or LayoutError.

    what : the user's word for the array: "a matrix", "a block".
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    element_type(array.dtype)
    if array.ndim != 2:
        way = "; x[:, None] of a vector x is one column" if array.ndim == 1 else ""
        raise LayoutError(f"{what} has two dimensions, got an array of shape {array.shape}{way}")
    return array


def memory_order(array: np.ndarray) -> Order | None:
    """Return "C" or "F", or None for an array that is in both orders."""
    (rows, cols), (row_stride, col_stride) = array.shape, array.strides
    is_row, is_col = rows == 1 and col_stride == array.itemsize, cols == 1 and row_stride == array.itemsize
    if array.size <= 1 or is_row or is_col:
        return None
    if 1 in (rows, cols):  # one row of a column-major array, or one column of a row-major one
        return "F" if rows == 1 else "C"
    return "C" if col_stride == array.itemsize else "F"


def communicator_of(grid: ProcessGrid) -> MPI.Intracomm:
    """Return the communicator over which the ranks agree on a new matrix.  Raises GridError, only on this rank."""
    if not isinstance(grid, ProcessGrid):
        raise GridError(f"grid must be a ProcessGrid, got {type(grid).__name__}")
    return grid.comm


def device_on(grid: ProcessGrid, name: str) -> Device | None:
    """Return the device of this name, after the ranks have exchanged their access to its memory; None for the host.

    Collective over the grid.  Raises DeviceError on every rank.
    """
    comm = communicator_of(grid)
    check_not_freed(comm)
    if isinstance(name, str) and name == devices.HOST:
        return None
    with together(comm) as arguments:
        arguments += ["device", name]
        device = devices.device_named(name)
    if device and not grid.draft:
        device.discover_peers(grid)
    return device
