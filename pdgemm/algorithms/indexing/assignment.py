"""assign(): elements are set to a number, to a matrix, or to an array that is the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.algorithms.indexing.selection import scatter_selection
from pdgemm.errors import ArgumentError, DTypeError, LayoutError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import merged
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, to_host
from pdgemm.local.arrays.dtypes import can_convert, element_type
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.local.arrays.evaluation import evaluated, is_extension
from pdgemm.local.arrays.keys import Picked, last_of_each, picked
from pdgemm.matrix.argument_checks import check_matrices, communicator, overlap, same_places
from pdgemm.matrix.array_functions import fitted, part_of_broadcast
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import check_not_freed, described_elements, together
from pdgemm.transport.block_copy import copy_blocks


def assign(A: DistMatrix, key: Any, value: Any) -> None:
    """Set A[key] := value, as `A[key] = value` does.  Collective over the grid of A.

    A     : DistMatrix (m, n), or a view; not the conjugate of a complex matrix.
    key   : a key that reads elements, rows, columns or a submatrix, A[key]; or a mask of all elements, a DistMatrix or
            an array of truth values (m, n), with a number as value.  The same on every rank.
    value : a number; an array that is the same on every rank; or a DistMatrix of any layout over the same ranks, of a
            type that A can hold.  Broadcast as in NumPy.  If a key names a row or column twice, the last value stays.
            A matrix that shares memory with A is copied first, so that it is read as it was.

    Cost per rank: for a number or an array, nothing is sent; for a matrix, each element that changes its rank is sent
    once, in one exchange; a matrix that is broadcast to a larger shape is first gathered on every rank.
    Raises ArgumentError (also an IndexError for keys), LayoutError, DTypeError, GridError or DeviceError on every rank;
    then nothing is assigned.
    """
    common = together(communicator(A=A))
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
            raise ArgumentError("A[mask] = x sets elements to a number; A[...] = numpy.where(mask, B, A) to those of B")
        else:
            arguments.append("under a mask")
    if mask is not None:
        (where,), *_ = fitted("A[mask] = x", (mask,), A)
        with together(A.grid.comm, A.device != devices.HOST):  # a device may lack memory on one rank
            _set_under_mask(A.stored, where, _number(value, A.dtype))
    elif isinstance(value, DistMatrix):
        if common.flag:
            with together(A.grid.comm):  # a rank may lack memory
                value = value.copy()
        if value.shape != whole:
            A[key] = value.allgather()
        elif all(windows):
            value.redistribute(target)
        else:
            scatter_selection(target, np.asarray(rows.indices), np.asarray(cols.indices), value)
    else:
        with together(A.grid.comm, A.device != devices.HOST):
            _set(A, rows, cols, value)


def _value_description(value: Any, dtype: np.dtype) -> list[object]:
    """Return the description of a value in messages.  Raises DTypeError or another error if no element can hold it."""
    if isinstance(value, DistMatrix):
        return ["to a matrix"]
    if not isinstance(value, np.ndarray):
        return [f"to {_number(value, dtype)}"]
    if not can_convert(element_type(value.dtype), dtype):
        raise DTypeError(f"{value.dtype} elements cannot become {dtype}")
    return [f"to an array of shape {value.shape}", described_elements(value)]


def _number(value: Any, dtype: np.dtype) -> Any:
    """Return a number in the type of elements.  Raises an exception if the type cannot hold the number."""
    filled = np.zeros(1, dtype)
    filled[:] = value
    return filled[0]


def _mask(key: Any, shape: tuple[int, int]) -> Any:
    """Return the key if it is a mask of all elements, a matrix or an array; else None.  Raises LayoutError."""
    if not isinstance(key, (DistMatrix, np.ndarray)) or key.ndim != 2:
        return None
    if key.dtype != bool or key.shape != shape:
        raise LayoutError(f"a mask has truth values in the shape of the matrix, {shape}; got {key.dtype}, {key.shape}")
    return key


def _spread(value: Any, places: tuple[Picked, Picked]) -> Any:
    """Return a value in two dimensions that can be broadcast to these rows and columns.  Raises LayoutError."""
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
    """Set elements of this rank to a number, or to this rank's part of an array of two dimensions.  Local."""
    i, j = A.grid.coords
    (down, from_rows), (across, from_cols) = (
        _places(dim, x.indices, part)
        for dim, x, part in zip((A.distribution.rows, A.distribution.cols), (rows, cols), (i, j))
    )
    values = part_of_broadcast(value, from_rows, from_cols) if np.ndim(value) else _number(value, A.dtype)
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
    """Set elements of an array to a number where a mask beside it is true.  Local."""
    if isinstance(x, np.ndarray):
        x[where] = number
        return
    number = number.astype(np.float32) if is_extension(x.dtype) else number
    evaluated(lambda x, where: np.where(where, number, x), [x, where], x)


def _places(dim: BlockCyclic, indices: range | np.ndarray, part: int) -> tuple[Any, np.ndarray]:
    """Return the local indices of those `indices` that a part owns, and the positions of these in `indices`."""
    if isinstance(indices, range):
        window = dim.window(indices.start, indices.stop)
        return dim.local_window(indices.start, indices.stop, part), window.indices(part)
    last = last_of_each(indices)
    mine = last[dim.owner(indices[last]) == part]
    return dim.to_local(indices[mine]), mine
