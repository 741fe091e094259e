"""sort() and cumsum() of whole columns, and elements by their position in the sorted order of all elements.

One exchange gathers whole columns on each rank; `sort` and `cumsum` are then local, on the host or a device.

Elements by position are determined by counting; no element is sent.  A real number of b bits is mapped to a key, an
integer of b bits: larger numbers have larger keys, and NaN has the largest.  The key at a position of the sorted order
is determined byte by byte: each rank counts how many of its sorted keys are less than each of the 255 next guesses, and
the counts are summed over the ranks.  After b/8 steps the key is known exactly, and so is its element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.blocks import set_from_blocks
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.rectangles import Rectangle
from pdgemm.local.arrays.arguments import as_whole
from pdgemm.local.arrays.device import Array, beside, empty, of, to_host
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONVERT, evaluated
from pdgemm.local.arrays.folds import ON_DEVICE, added, widened
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


def check_ordered(dtype: np.dtype, name: str) -> None:
    """Raise DTypeError for complex numbers, which have no order."""
    if dtype.kind == "c":
        raise DTypeError(f"{name} of complex numbers: they have no order; use abs(A), A.real or A.imag")


def keys_of(A: Any) -> Array:
    """Return the keys of this rank's elements, sorted: larger elements have larger keys, and NaN the largest.  Local.

    For a matrix on a device, the device computes, sorts and stores the keys.
    """
    x = A.local
    return in_order(keys_of_elements, x, np.dtype(f"u{widened(x[:0]).itemsize}"))


def in_order(act: Callable[[Array], Array], x: Array, dtype: np.dtype) -> Array:
    """Return act(elements of x), converted to `dtype` and sorted, in one dimension, on the device of x.  Local."""
    values = empty((x.size,), dtype, device=of(x))
    evaluated(act, [x], values.reshape(x.shape))
    values.sort()
    return values


def keys_of_elements(x: Array) -> Array:
    """Return the keys of elements, unsorted."""
    x = widened(x)
    bits = x.view(np.dtype(f"u{x.itemsize}"))
    top = bits.dtype.type(1 << (8 * x.itemsize - 1))
    if x.dtype.kind == "i":
        return bits ^ top
    if x.dtype.kind == "f":
        return np.where(np.isnan(x), ~top | top, np.where(bits >= top, ~bits, bits | top))
    return bits


def places_in(keys: Array, values: np.ndarray, side: Literal["left", "right"] = "left") -> np.ndarray:
    """Return numpy.searchsorted(keys, values, side), for sorted keys or elements on the host or on a device."""
    places: np.ndarray = to_host(np.searchsorted(keys, beside(values, keys), side))
    return places


def elements_of(keys: Array, dtype: np.dtype) -> Array:
    """Return the elements that have these keys.   dtype : the elements' type: bool, integer or floating-point."""
    wide = widened(np.zeros(0, dtype)).dtype
    if dtype.kind == "b":
        return keys.astype(bool)
    bits = keys.astype(np.dtype(f"u{wide.itemsize}"))
    top = bits.dtype.type(1 << (8 * wide.itemsize - 1))
    if wide.kind == "i":
        bits = bits ^ top
    elif wide.kind == "f":
        bits = np.where(bits >= top, bits ^ top, ~bits)
    return bits.view(wide).astype(dtype)


def at_places(keys: Array, places: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """Return the keys at the positions `places`, counted from 0, of the sorted keys of all ranks.  Collective.

    Cost: one allreduce for each byte of a key, of 255 counts for each position.
    """
    low = np.zeros((len(places), 1), keys.dtype)  # the known bytes of each key, the highest first
    digits = np.arange(1, 256).astype(keys.dtype)
    for shift in range(8 * keys.itemsize - 8, -1, -8):
        less = sum_over_ranks(places_in(keys, low + (digits << keys.dtype.type(shift))), comm)
        byte = (less <= places[:, None]).sum(axis=1, keepdims=True)
        low += byte.astype(keys.dtype) << keys.dtype.type(shift)
    return low[:, 0]


def cuts_of(keys: Array, ends: np.ndarray, size: int, comm: MPI.Intracomm) -> list[int]:
    """Return where this rank's sorted keys are cut, so that part k of all ranks has the keys ends[k - 1] to ends[k].

    keys : of `size` in all.   ends : positions in the sorted order of all keys; the first part begins at 0.
    Of equal keys, those of lower ranks are in earlier parts.  Collective; cost as for `at_places`.
    """
    inner = ends[ends < size]
    first = at_places(keys, inner, comm)  # the first key of each part except part 0
    left, right = places_in(keys, first, "left"), places_in(keys, first, "right")
    equal, earlier = right - left, np.zeros(len(inner), np.int64)  # equal keys: on this rank, on lower ranks
    comm.Exscan(equal, earlier)
    if comm.rank == 0:
        earlier[:] = 0
    taken = np.clip(inner - sum_over_ranks(left, comm) - earlier, 0, equal)
    return [0, *(left + taken).tolist(), *[len(keys)] * (len(ends) - len(inner) + 1)]


def sum_over_ranks(counts: Any, comm: MPI.Intracomm) -> np.ndarray:
    """Return the sums of integers over the ranks.  Collective."""
    summed = np.array(counts, np.int64)
    comm.Allreduce(MPI.IN_PLACE, summed, MPI.SUM)
    return summed


def sort(a: DistMatrix, axis: int | None = -1) -> DistMatrix:
    """Return a new matrix with the elements sorted along an axis, or all sorted; NaN last.  Collective over the grid.

    axis : 0 sorts each column, 1 or -1 each row: the result has the layout of A.  None sorts all mn elements: the
           result has one column, in one block per grid row (the result of NumPy has one dimension).

    Cost per rank: along an axis, each element that changes its rank is sent once to the rank with its whole column
    (row), and once back: at most 2 mn/P words in, 2 mn/P elements of memory.  For axis None, a local sort, one
    allreduce of 255 Pr counts for each byte of an element, and one exchange in which each element is sent at most once;
    the ranks of the first grid column hold mn/Pr elements.  `.report` has the words of the last exchange.
    Raises ArgumentError, or DTypeError for a complex matrix and axis None; on every rank.
    """
    if axis is None:
        return _all_sorted(a)
    return _through_columns("sort", a, axis, lambda x: np.sort(widened(x), axis=0).astype(x.dtype))


def cumsum(a: DistMatrix, axis: int) -> DistMatrix:
    """Return the cumulative sums of the elements along an axis.  Collective over the grid.

    Sums of bool and integers are int64, as in `A.sum`; 16-bit floats are added up in float32.  Each column (row) is
    added up on one rank, on the host in order, so that the result does not depend on the layout.  Cost as for `sort`
    along an axis.  Error: at most (m - 1) eps sum |a| to first order (Higham 2002, 4.2).
    """
    return _through_columns("cumsum", a, axis, _added_up)


def _added_up(x: Array) -> Array:
    sums = np.cumsum(added(x), axis=0)
    return sums.astype(x.dtype) if x.dtype.itemsize == 2 and x.dtype.kind not in "biu" else sums


def whole_columns(name: str, a: Any, axis: Any, *described: object) -> tuple[DistMatrix, DistMatrix]:
    """Return A (axis 0) or its transpose (axis 1), and a copy of it with whole columns on each rank.  Collective.

    Each rank gets a contiguous range of columns; the ranges are about equally long.
    """
    comm = communicator(a=a)
    with together(comm) as arguments:
        check_matrices(a=a)
        if axis is None or as_whole(axis, "axis") not in (0, 1, -1, -2):
            raise ArgumentError(f"{name} of a matrix is taken along axis 0 or 1, got {axis}")
        arguments += [name, axis % 2, a.distribution, a.dtype, *described]
    A = a if axis % 2 == 0 else a.T
    grid = A.grid.base.work_grid((1, comm.size), 1, tuple(range(comm.size)))
    block = max(1, A.shape[0]), BlockCyclic.even(A.shape[1], comm.size).block
    return A, redistribute(A, grid=grid, block=block)


def _through_columns(name: str, a: Any, axis: Any, act: Callable[[Array], Array]) -> DistMatrix:
    """Apply a function to whole columns (axis 0) or rows; return the result in the layout of A.  Collective."""
    A, columns = whole_columns(name, a, axis)
    with together(a.grid.comm):
        changed = of_columns(act, columns.local)
    moved = DistMatrix(changed, columns.grid, columns.distribution)
    out = moved.redistribute(like=A)
    if A is a:
        return out
    result = out.T
    result.report = out.later_report
    return result


def of_columns(act: Callable[[Array], Array], x: Array) -> Array:
    """Return act(x) for an array x of whole columns; on a device, some columns at a time.  Local."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(act(x))
    result = empty(x.shape, act(np.ones((1, 1), x.dtype)).dtype, device=of(x))
    for cols in slabs(x.shape[1], x.shape[0], ON_DEVICE) if x.size else ():
        CONVERT(result[:, cols], act(x[:, cols]))
    return result


def _all_sorted(a: DistMatrix) -> DistMatrix:
    """Return all elements in one column, sorted.  Collective.

    Each rank sorts its elements, and cuts them where the parts of the result begin; equal elements are distributed in
    the order of the ranks, so that each part gets exactly its number of elements.  Then the owner of a part sorts it.
    """
    start, comm = perf_counter(), communicator(a=a)
    with together(comm) as arguments:
        check_matrices(a=a)
        check_ordered(a.dtype, "sort")
        arguments += ["sort", a.distribution, a.dtype]
        keys = keys_of(a)
    parts, size = a.grid.shape[0], a.size
    ends = np.minimum(np.arange(1, parts) * BlockCyclic.even(size, parts).block, size)
    cuts = cuts_of(keys, ends, size, comm)
    with together(comm):
        of_keys = partial(elements_of, dtype=a.dtype)
        elements = empty((len(keys), 1), a.dtype, device=of(keys))
        evaluated(of_keys, [keys.reshape(-1, 1)], elements)
        del keys
    pieces = [elements[i:j] for i, j in pairwise(cuts)]
    lengths = np.array(comm.allgather([len(x) for x in pieces]))
    starts = np.append(0, ends) + np.cumsum(lengths, axis=0) - lengths
    places = tuple(
        tuple(Rectangle((int(at), int(at) + int(n)), (0, 1)) for at, n in zip(*each)) for each in zip(starts, lengths)
    )
    out = DistMatrix.empty((size, 1), grid=a.grid, dtype=a.dtype, device=a.device)
    out.report = set_from_blocks(out, pieces, places, start)
    with together(comm):
        evaluated(of_keys, [keys_of(out).reshape(out.local.shape)], out.local)
    return out
