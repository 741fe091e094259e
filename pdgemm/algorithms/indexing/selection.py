"""select() copies rows and columns in any order to a new matrix; scatter_selection() copies in the other direction."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.redistribution import move_report, transfer_ways
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import DeviceError, DTypeError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.index_map import IndexPairs
from pdgemm.instrument import spans
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.dtypes import can_convert
from pdgemm.local.arrays.keys import last_of_each, picked
from pdgemm.matrix.argument_checks import check_matrices, check_result, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import all_shared, new_array
from pdgemm.schedules.exchanges.exchange import Selection, fitted_messages
from pdgemm.support.agreement import together
from pdgemm.transport.packed_exchange import ExchangeBuffers, exchange, kept_if_it_fails, repeated_if_unmapped

Indices = Any  # a list, array, mask, slice or range; None for all


def select(A: DistMatrix, rows: Indices = None, cols: Indices = None) -> DistMatrix:
    """Return a new matrix of some rows and columns of A, in the order of the indices, as A[rows] does.  Collective.

    A    : DistMatrix (m, n), or a view.
    rows, cols : a list or array of indices, which may repeat and count from the end; a mask, a 1-D array of m (n) truth
           values; a slice of any step, or a range; None for all.  The same on every rank.

    The result is a copy and not a view, also for a slice, with the grid, the blocks and the type of A; `.report` has
    the words that were sent.

    Cost per rank: each element of the result that is on another rank in A is sent once, packed, in one exchange;
    messages of at most 1 MiB (device 32 MiB).
    Raises ArgumentError, which is an IndexError too, or another error of the package, on every rank.
    """
    start, comm = perf_counter(), communicator(A=A)
    with together(comm) as arguments:
        check_matrices(A=A)
        sides = _indices(rows, cols, A)
        layout = A.distribution
        distribution = Distribution(*(dim.resized(len(x)) for dim, x in zip((layout.rows, layout.cols), sides)))
        pairs = [IndexPairs(x, np.arange(len(x))) for x in sides]
        arguments += ["select", layout, A.dtype, *pairs]
        local = new_array(distribution.local_shape(A.grid.coords), A.dtype, A.order, A.grid, devices.of(A.stored))
    out = DistMatrix(local, A.grid, distribution, A.order)
    copy_pairs("select", A, out, pairs, start)
    out.shared = all_shared(out.stored, out.grid)
    return out


def scatter_selection(A: DistMatrix, rows: np.ndarray, cols: np.ndarray, B: DistMatrix) -> None:
    """Set A[rows, cols] := B, a matrix of that shape, in memory of its own.  Collective; `assign` has checked the rest.

    If an index occurs twice, its last row or column in B stays.  `A.report` has the words that were sent.
    """
    start = perf_counter()
    with together(communicator(A=A, B=B)) as arguments:
        check_matrices(A=A, B=B)
        check_result("A", A, {})
        pairs = [IndexPairs(last, x[last]) for x in (rows, cols) for last in [last_of_each(x)]]
        arguments += ["A[rows, cols] = B", A.distribution, B.distribution, B.dtype, *pairs]
        if B.device != A.device:
            raise DeviceError(f"A is on {A.device}, B on {B.device}; copy one of them with to_device")
        if not can_convert(B.dtype, A.dtype):
            raise DTypeError(f"{B.dtype} elements cannot become {A.dtype}")
        B.layout_in(A.grid)
    copy_pairs("assign", B, A, pairs, start)


def _indices(rows: Indices, cols: Indices, A: DistMatrix) -> list[np.ndarray]:
    """Return the indices of rows and of columns as arrays."""
    keys = [slice(None) if x is None else x for x in (rows, cols)]
    everything = slice(None)
    sides = picked((keys[0], everything), A.shape)[0], picked((everything, keys[1]), A.shape)[1]
    return [np.asarray(x.indices, np.int64) for x in sides]


@repeated_if_unmapped
def copy_pairs(name: str, X: DistMatrix, Y: DistMatrix, pairs: list[IndexPairs], start: float) -> None:
    """Copy the elements of these pairs of rows and of columns from X to Y, and set the report of Y.  Collective."""
    grid, comm = Y.grid, Y.grid.comm
    with together(comm) as arguments:
        where = devices.of(X.stored)
        shared = X.shared and X.grid.ranks_per_node is None
        shared, staged, nccl = transfer_ways(where, X.grid, shared, X.mpi_addressable and Y.mpi_addressable)
        source, target = X.layout_in(grid), Y.layout_in(grid)
        on = (source.conjugated == target.conjugated, shared, where.name if where else "", staged, nccl)
        plan = fitted_messages(Selection(source, target, comm.size, 1, *on, rows=pairs[0], cols=pairs[1]))
        arguments += [name, plan.description]
        workspace = ExchangeBuffers(plan, comm.rank, where)
    recorder = recorder_of(X.stored)
    recorder.hold(workspace.nbytes)
    with np.errstate(all="ignore"), kept_if_it_fails(workspace, X.stored, Y.stored), spans.timed(name, Y.stored.nbytes):
        exchange(1, X.stored, 0, Y.stored, plan, workspace, grid, recorder)
        recorder.finish()
    Y.report = move_report("A", plan, grid, recorder, perf_counter() - start)
