"""Rows that change their places along the grid columns: X[targets] := X[sources]."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pdgemm.arrays.device import Array
from pdgemm.arrays.dtypes import wire
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.instrument.recorder import Recorder
from pdgemm.panel_algorithms.task import Task
from pdgemm.panel_schedules.row_moves import PermutationSchedule, RowMoves

_TAG = (1 << 12) + 2
_CACHED = 1 << 15  # elements that are copied at a time: NumPy copies rows that it looks up once more


def exchange_rows(
    X: Array, rows: BlockCyclic, moves: RowMoves, col: MPI.Comm, leaving: Array, arriving: Array, recorder: Recorder
) -> None:
    """Compute X[targets] := X[sources], where X is this rank's part of a matrix.  Collective over a grid column.

    leaving, arriving : workspace for the rows of X that move, and for those that come from other ranks.
    """
    me, width = col.rank, X.shape[1]
    if not width or not moves.targets.size:
        return
    source, target = rows.owner(moves.sources), rows.owner(moves.targets)
    there, here = rows.to_local(moves.sources), rows.to_local(moves.targets)
    coming, requests = list[tuple[np.ndarray, Array]](), list[MPI.Request]()
    left = arrived = 0
    for r in range(rows.parts):
        which = here[(source == r) & (target == me)]
        if r != me and which.size:
            x = arriving[arrived : arrived + which.size * width].reshape(-1, width)
            arrived += x.size
            requests.append(col.Irecv(wire(x), source=r, tag=_TAG))
            recorder.traffic.received(x.size)
            coming.append((which, x))
    for r in range(rows.parts):
        which = there[(source == me) & (target == r)]
        if which.size:
            x = leaving[left : left + which.size * width].reshape(-1, width)
            left += x.size
            with recorder.phase("pack"):
                _take(X, which, x)
            if r == me:
                coming.append((here[(source == me) & (target == me)], x))
            else:
                requests.append(col.Isend(wire(x), dest=r, tag=_TAG))
                recorder.traffic.sent(x.size)
    with recorder.phase("wait"):
        MPI.Request.Waitall(requests)
    with recorder.phase("pack"):
        for which, x in coming:
            X[which] = x


def _take(X: np.ndarray, which: np.ndarray, to: np.ndarray) -> None:
    step = max(1, _CACHED // X.shape[1])
    for at in range(0, len(which), step):
        to[at : at + step] = X[which[at : at + step]]


class PermuteRows:
    """A := A[order], of a PermutationSchedule."""

    def __init__(self, task: Task[PermutationSchedule]) -> None:
        self._task = task

    def __call__(self) -> int:
        task, rows = self._task, self._task.schedule.A.distribution.rows
        if not task.grid.idle:
            rooms = task.workspace["leaving rows"], task.workspace["arriving rows"]
            exchange_rows(task.arrays["A"], rows, task.schedule.moves, task.grid.col, *rooms, task.recorder)
        return 0
