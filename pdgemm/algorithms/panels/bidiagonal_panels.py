"""Reduction of a matrix to an upper band by blocked reflections from both sides: Grosser & Lang, Efficient parallel
reduction to bidiagonal form, Parallel Comput. 25(8), 1999.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_qr import compact_qr
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.panels.bidiagonal_schedule import BidiagonalBandSchedule
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.collectives import carry_out
from pdgemm.transport.panels.task import Task


class BidiagonalBand:
    """Overwrites A (m, n), m >= n, with Q^H A P, an upper band; elements outside of the band are left over.

    Cost per rank for P ranks: (4 m n^2 - 4/3 n^3)/P flops, and 4 m n b that all ranks do.
    Error: |A - Q B P^H| <= c m n^{1/2} eps |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
    """

    def __init__(self, task: Task[BidiagonalBandSchedule]) -> None:
        self._task, self._plan, self._A = task, task.schedule, task.arrays["A"]
        self._rows, self._cols = self._plan.A.distribution.rows, self._plan.A.distribution.cols

    def __call__(self) -> int:
        if self._task.grid.idle:
            return 0
        with np.errstate(all="ignore"):
            for panel in self._plan.steps:
                self._reflect_columns(panel)
                if self._plan.right_reflectors(panel):
                    self._reflect_rows(panel)
        return 0

    def _reflect_columns(self, panel: Panel) -> None:
        """Factor the columns of a panel into (I - V T V^H) R, and subtract V T^H V^H A from the columns behind."""
        task, plan, (i, j), w = self._task, self._plan, self._task.grid.coords, panel.width
        gathering, cols = plan.column_gathering(panel), self._cols.local_window(panel.start, panel.stop, panel.col)
        down, right = self._rows.below(panel.start, i), self._cols.below(panel.stop, j)
        indices = [self._behind(self._rows, panel.start, r) for r in range(plan.grid.shape[0])]
        mine = self._A[down:, cols] if j == panel.col else None
        V = self._gathered(gathering, mine, indices, gathering.offsets[:: plan.grid.shape[1]].tolist(), w)
        (R, T), C = self._triangles(w), self._A[down:, right:]
        own, Z, TZ = self._local(len(indices[i]), w), *self._sums(w, C.shape[1])
        with task.computing():
            compact_qr(V, R, T)
            if mine is not None:
                here = np.flatnonzero(indices[i] < w)
                mine[here] = R[indices[i][here]]
            own[...] = V[indices[i]]
            gemm_accumulate(1, own.T.conj(), C, 0, Z)
        self._sum(plan.column_sums(panel).of(task.grid.comm.rank), Z)
        with task.computing():
            gemm_accumulate(1, T.T.conj(), Z, 0, TZ)
        task.update(own, TZ, C)

    def _reflect_rows(self, panel: Panel) -> None:
        """Factor the rows of a panel into L (I - U S U^H)^H, and subtract A U S U^H from the rows below."""
        task, plan, (i, j), w = self._task, self._plan, self._task.grid.coords, panel.width
        gathering, rows = plan.row_gathering(panel), self._rows.local_window(panel.start, panel.stop, panel.row)
        down, right, k = self._rows.below(panel.stop, i), self._cols.below(panel.stop, j), plan.right_reflectors(panel)
        indices = [self._behind(self._cols, panel.stop, c) for c in range(plan.grid.shape[1])]
        mine = self._A[rows, right:] if i == panel.row else None
        first = panel.row * plan.grid.shape[1]
        ends = gathering.offsets[first : first + plan.grid.shape[1] + 1].tolist()
        P = self._gathered(gathering, None if mine is None else mine.T, indices, ends, w)
        U, (R, S), C = P[:, :k], self._triangles(k), self._A[down:, right:]
        own, Y, YS = self._local(len(indices[j]), k), *self._sums(C.shape[0], k)
        with task.computing():
            np.conjugate(P, out=P)
            compact_qr(U, R, S)
            rest = P[:, k:]  # where fewer columns are behind the panel than it has rows
            if rest.size:
                rest -= U @ (S.conj().T @ (U.conj().T @ rest))
            if mine is not None:
                here = np.flatnonzero(indices[j] < k)
                mine[:k, here], mine[k:, here] = R[indices[j][here]].conj().T, rest[indices[j][here]].conj().T
            own[...] = U[indices[j]]
            gemm_accumulate(1, C, own, 0, Y)
            np.conjugate(own, out=own)
        self._sum(plan.row_sums(panel).of(task.grid.comm.rank), Y)
        with task.computing():
            gemm_accumulate(1, Y, S, 0, YS)
        task.update(YS, own.T, C)

    def _gathered(
        self, gathering: Collective, mine: np.ndarray | None, indices: list[np.ndarray], ends: list[int], w: int
    ) -> np.ndarray:
        """Return a panel, column-major, whose rows all ranks gather.

        mine : this rank's rows.   indices : the rows of each part.   ends : where parts begin and end in the vector.
        """
        task = self._task
        parts, own = task.workspace["panel"][: gathering.words], gathering.ranks.index(task.grid.comm.rank)
        start, stop = gathering.offsets[own : own + 2].tolist()
        if mine is not None:
            parts[start:stop].reshape(-1, w)[...] = mine
        carry_out(gathering, task.grid.comm, [parts], task.recorder.traffic)
        height = gathering.words // w
        P = task.workspace["reflectors"][: height * w].reshape(w, height).T
        with task.computing():
            for rows, (lo, hi) in zip(indices, pairwise(ends)):
                P[rows] = parts[lo:hi].reshape(-1, w)
        return P

    def _sum(self, collective: Collective | None, x: np.ndarray) -> None:
        carry_out(collective, self._task.grid.comm, [x.reshape(-1)], self._task.recorder.traffic)

    def _sums(self, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of sums over ranks, and of their products with a triangle."""
        sums, multiplied = (self._task.workspace[name][: rows * cols] for name in ("sums", "multiplied sums"))
        return sums.reshape(rows, cols), multiplied.reshape(rows, cols)

    def _local(self, rows: int, cols: int) -> np.ndarray:
        return self._task.workspace["local reflectors"][: rows * cols].reshape(rows, cols)

    def _triangles(self, k: int) -> np.ndarray:
        return self._task.workspace["triangles"][: 2 * k * k].reshape(2, k, k).transpose(0, 2, 1)

    @staticmethod
    def _behind(dimension: BlockCyclic, start: int, part: int) -> np.ndarray:
        """Return the indices of a part from `start` on, counted from there."""
        return np.asarray(dimension.indices(part))[dimension.below(start, part) :] - start
