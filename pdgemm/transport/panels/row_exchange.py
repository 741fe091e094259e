"""Rows of a matrix that are permuted along the grid columns, or divided by numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.local.arrays.device import Array, beside, of
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import on_host, set_elements
from pdgemm.schedules.panels.row_moves import RowMoves, ScalingSchedule
from pdgemm.support.waits import Wait
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.panels.task import ROWS, Task

_CACHED = 1 << 15  # elements that are copied at a time


def exchange_rows(task: Task[Any], moves: RowMoves, cols: slice = slice(None), *, transposed: bool = False) -> None:
    """Compute A[targets, cols] := A[sources, cols] with local columns.  Collective over a grid column.

    transposed : A^T takes the place of A, so that columns are exchanged along a grid row.

    The workspace has "leaving rows", for the rows of A that move, and "arriving rows", for rows from other ranks.
    If MPI does not accept device memory, copies of both on the host are sent and received.
    """
    X, rows, order, col = task.arrays["A"], task.schedule.A.distribution.rows, task.schedule.A.order, task.grid.col
    if transposed:
        X, rows, order, col = X.T, task.schedule.A.distribution.cols, "CF"[order == "C"], task.grid.row
    X = X[:, cols]
    me, width, device = col.rank, X.shape[1], of(X)
    staged = device is not None and device.reach(task.grid).staged
    if not width or not moves.targets.size:
        return
    source, target = rows.owner(moves.sources), rows.owner(moves.targets)
    there, here = rows.to_local(moves.sources), rows.to_local(moves.targets)
    task.recorder.synchronize_copies()  # until the rows that arrived last are copied
    coming, requests = list[tuple[np.ndarray, Array]](), list[MPI.Request]()
    uploads = list[tuple[Array, np.ndarray]]()
    left = arrived = 0
    for r in range(rows.parts):
        which = here[(source == r) & (target == me)]
        if r != me and which.size:
            x = column_buffer(which.size, order, width, task.workspace["arriving rows"][arrived:])
            arrived += x.size
            received = x
            if staged:
                received = np.empty(x.shape, x.dtype, order)
                uploads.append((x, received))
            requests.append(col.Irecv(wire(received), source=r, tag=ROWS))
            task.recorder.traffic.received(x.size)
            coming.append((which, x))
    for r in range(rows.parts):
        which = there[(source == me) & (target == r)]
        if which.size:
            x = column_buffer(which.size, order, width, task.workspace["leaving rows"][left:])
            left += x.size
            with task.packing():
                _take(X, which, x)
            if r == me:
                coming.append((here[(source == me) & (target == me)], x))
            else:
                task.recorder.synchronize_copies()
                requests.append(col.Isend(wire(on_host(x) if staged else x), dest=r, tag=ROWS))
                task.recorder.traffic.sent(x.size)
    with task.recorder.phase("wait"), Wait(col):
        MPI.Request.Waitall(requests)
    for x, received in uploads:
        set_elements(x, received)
    with task.packing():
        for which, x in coming:
            if device:
                copy_blocks(x, X, *_rows(which, width))
            elif order == "F":
                X.T[:, which] = x.T
            else:
                X[which] = x
    task.copied()


def _rows(which: np.ndarray, width: int) -> tuple[IndexMap, IndexMap]:
    """Return the map of rows 0, 1, 2, ... of an array to rows `which` of another array, and the map of columns."""
    return IndexMap(np.arange(which.size), which, np.ones(which.size, int)), identity(width)


def _take(X: Array, which: np.ndarray, to: Array) -> None:
    """Copy rows `which` of X to another array, a few at a time: NumPy copies them to a temporary array first."""
    if of(X):
        rows, cols = _rows(which, X.shape[1])
        copy_blocks(X, to, rows.inverse, cols)
        return
    if not to.flags.c_contiguous:
        for here, there in zip(to.T, X.T):
            np.take(there, which, out=here, mode="clip")
        return
    step = max(1, _CACHED // X.shape[1])
    for at in range(0, len(which), step):
        to[at : at + step] = X[which[at : at + step]]


def divide_rows(task: Task[ScalingSchedule], diagonal: np.ndarray) -> None:
    """Divide row i of A by diagonal[i]."""
    with task.computing():
        A, rows = task.arrays["A"], task.schedule.rows.indices(task.grid.coords[0])
        np.divide(A, beside(diagonal[rows][:, None], A), out=A)
