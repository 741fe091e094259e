"""sort() and cumsum(): one exchange gathers whole columns on each rank, and NumPy computes with these columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.blocks import from_blocks, reported_blocks, set_from_blocks
from pdgemm.algorithms.statistics.ranked import at_places, check_ordered, elements_of, keys_of, sum_over_ranks
from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.rectangles import Rectangle
from pdgemm.instrument.run_report import MoveReport
from pdgemm.local.arrays.folds import added, widened
from pdgemm.local.arrays.integers import as_whole
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


def sort(a: DistMatrix, axis: int | None = -1) -> DistMatrix:
    """Return a new matrix with the elements sorted along an axis, or all sorted; NaN last.  Collective over the grid.

    axis : 0 sorts each column, 1 or -1 each row: the result has the layout of A.  None sorts all mn elements: the
           result has one column, in one block per grid row (the result of NumPy has one dimension).

    Cost per rank: along an axis, each element that changes its rank is sent once to the rank with its whole column
    (row), and once back: at most 2 mn/P words in, mn/P elements of memory.  For axis None, a local sort, one allreduce
    of 255 Pr counts for each byte of an element, and one exchange in which each element is sent at most once; the ranks
    of the first grid column hold mn/Pr elements.  `.report` has the words of the last exchange.
    Raises ArgumentError, or DTypeError for a complex matrix and axis None; on every rank.
    """
    if axis is None:
        return _all_sorted(a)
    return _through_columns("sort", a, axis, lambda x: np.sort(widened(x), axis=0).astype(x.dtype))


def cumsum(a: DistMatrix, axis: int) -> DistMatrix:
    """Return the cumulative sums of the elements along an axis.  Collective over the grid.

    Sums of bool and integers are int64, as in `A.sum`; 16-bit floats are added up in float32.  Each column (row) is
    added up in order on one rank, so that the result does not depend on the layout.  Cost as of `sort` along an axis.
    Error: at most (m - 1) eps sum |a| to first order (Higham 2002, 4.2).
    """
    return _through_columns("cumsum", a, axis, _added_up)


def _added_up(x: np.ndarray) -> np.ndarray:
    sums = np.cumsum(added(x), axis=0)
    return sums.astype(x.dtype) if x.dtype.itemsize == 2 and x.dtype.kind not in "biu" else sums


def whole_columns(name: str, a: Any, axis: Any, *described: object) -> tuple[DistMatrix, np.ndarray, MoveReport]:
    """Return A (axis 0) or its transpose (axis 1), this rank's whole columns of it, and the report.  Collective.

    Each rank gets a contiguous range of columns; the ranges are about equally long.
    """
    comm = communicator(a=a)
    with together(comm) as arguments:
        check_matrices(a=a)
        if axis is None or as_whole(axis, "axis") not in (0, 1, -1, -2):
            raise ArgumentError(f"{name} of a matrix is taken along axis 0 or 1, got {axis}")
        arguments += [name, axis % 2, a.distribution, a.dtype, *described]
    A = a if axis % 2 == 0 else a.T
    block, report = reported_blocks(A, None, _share(A.shape[1], comm.size, comm.rank))
    return A, block, report


def _share(n: int, parts: int, part: int) -> tuple[int, int]:
    """Return the range of columns of a rank, (start, stop)."""
    width = BlockCyclic.even(n, parts).block
    return min(n, part * width), min(n, (part + 1) * width)


def _through_columns(name: str, a: Any, axis: Any, act: Callable[[np.ndarray], np.ndarray]) -> DistMatrix:
    """Return the result of a function of whole columns, in the layout of A.  Collective."""
    start = perf_counter()
    A, block, _ = whole_columns(name, a, axis)
    comm, (m, n) = A.grid.comm, A.shape
    changed = np.ascontiguousarray(act(block))
    out: DistMatrix = np.empty_like(A.to_host(), dtype=changed.dtype)  # type: ignore[assignment]
    shares = tuple((Rectangle((0, m), _share(n, comm.size, rank)),) for rank in range(comm.size))
    report = set_from_blocks(out, [changed], shares, start)
    out = (out if A is a else out.T).to_device(a.device)
    out.report = report
    return out


def _all_sorted(a: DistMatrix) -> DistMatrix:
    """Return all elements in one column, sorted.  Collective.

    Each rank sorts its elements, and cuts them where the parts of the result begin; equal elements are distributed in
    the order of the ranks, so that each part gets exactly its number of elements.  Then the owner of a part sorts it.
    """
    comm = communicator(a=a)
    with together(comm) as arguments:
        check_matrices(a=a)
        check_ordered(a.dtype, "sort")
        arguments += ["sort", a.distribution, a.dtype]
        keys = keys_of(a)
    parts, size = a.grid.shape[0], a.size
    ends = np.minimum(np.arange(1, parts) * BlockCyclic.even(size, parts).block, size)
    inner = ends[ends < size]
    first = at_places(keys, inner, comm)  # the first key of each part except part 0
    left, right = keys.searchsorted(first, "left"), keys.searchsorted(first, "right")
    equal, earlier = right - left, np.zeros(len(inner), np.int64)  # elements of these values: here, on lower ranks
    comm.Exscan(equal, earlier)
    if comm.rank == 0:
        earlier[:] = 0
    taken = np.clip(inner - sum_over_ranks(left, comm) - earlier, 0, equal)
    cuts = [0, *(left + taken).tolist(), *[len(keys)] * (len(ends) - len(inner) + 1)]
    elements = elements_of(keys, a.dtype)
    pieces = [elements[i:j].reshape(-1, 1) for i, j in pairwise(cuts)]
    lengths = np.array(comm.allgather([len(x) for x in pieces]))
    starts = np.append(0, ends) + lengths[: comm.rank].sum(axis=0)
    places = [(int(at), int(at) + len(x)) for at, x in zip(starts, pieces)]
    out = from_blocks(pieces, grid=a.grid, rows=places, cols=(0, 1), shape=(size, 1))
    report = out.report
    out.local[...] = elements_of(keys_of(out), a.dtype).reshape(out.local.shape)
    out = out.to_device(a.device)
    out.report = report
    return out
