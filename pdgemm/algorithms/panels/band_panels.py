"""Reductions to a band by blocked Householder reflections, of a Hermitian matrix and of any matrix.

Bischof, Lang & Sun, A framework for symmetric band reduction, ACM Trans. Math. Softw. 26(4), 2000; Auckenthaler et al.,
Parallel Comput. 37(12), 2011; Grosser & Lang, Efficient parallel reduction to bidiagonal form, Parallel Comput. 25(8),
1999.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.algorithms.panels.panel_run import PanelAlgorithm
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_qr import compact_qr
from pdgemm.schedules.panels.band_schedule import SMALLEST, BandSchedule, BidiagonalBandSchedule, OneSide
from pdgemm.schedules.panels.panel_schedule import Panel, Window, lower_tiles
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.panels.gathered_panel import gathered_window, indices_between
from pdgemm.transport.panels.task import Task


class BandReduction(PanelAlgorithm[BandSchedule]):
    """Overwrites the lower triangle of a Hermitian A (n, n) with that of the band matrix B = Q^H A Q, of bandwidth b.

    Only the lower triangle is read; above the diagonal, A is overwritten.  Below the band, the reflectors are stored:
    Q = (I - V_1 T_1 V_1^H) (I - V_2 T_2 V_2^H) ..., where V_k is unit lower trapezoidal from row (k+1)b on, and is
    stored without its unit diagonal.

    tau : (n,), overwritten: its first elements are the diagonals of T_1, T_2, ...

    Cost per rank for P ranks: 4/3 n^3/P + 5 n^2 b flops; 3/2 n^2 words in.
    Error: |A - Q B Q^H| <= c n^{3/2} eps |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
    """

    def __init__(self, task: Task[BandSchedule], tau: np.ndarray) -> None:
        super().__init__(task)
        self._tau = tau

    def __call__(self) -> None:
        for panel in self._plan.reduced:
            V, T = self._factored(panel)
            self._update(panel, V, self._two_sided(panel, V, T))

    def _factored(self, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
        """Gather a panel below its diagonal block, factor it into (I - V T V^H) R on all ranks, and return V and T."""
        task, plan, (i, j), k = self._task, self._plan, self._task.grid.coords, self._plan.reflectors(panel)
        columns = panel.start, panel.stop
        P = gathered_window(task, "A", plan.A, plan.gathering(panel), (panel.stop, plan.n), columns)
        V, R, T = factor_panel(task, P, k)
        with task.computing():
            self._tau[panel.start : panel.start + k] = T.diagonal()
            if j == panel.col:
                A, mine = self._A[self._rows.below(panel.stop, i) :], self._global_rows(panel)
                A = A[:, self._cols.local_window(*columns, j)]
                A[...] = P[mine]
                here = np.flatnonzero(mine < k)
                A[here, :k] = np.where(mine[here, None] > np.arange(k), A[here, :k], R[mine[here]])
        return V, T

    def _two_sided(self, panel: Panel, V: np.ndarray, T: np.ndarray) -> np.ndarray:
        """Return W = X - V T^H V^H X / 2, where X = A V T, so that Q^H A Q is A - V W^H - W V^H."""
        task, plan, (m, k) = self._task, self._plan, V.shape
        sums = task.workspace["sums"][: m * k]
        Y, X = sums.reshape(m, k), task.workspace["W"][: m * k].reshape(m, k)
        with task.computing():
            self._multiply(panel, V, Y)
        task.carry_out(plan.summing(panel), sums)
        with task.computing():
            gemm_accumulate(1, Y, T, 0, X)
            X -= V @ (T.conj().T @ (V.conj().T @ X)) / 2
        return X

    def _multiply(self, panel: Panel, V: np.ndarray, Y: np.ndarray) -> None:
        """Y := this rank's terms of A V: elements below the diagonal are used twice, as a_ij and as a_ji."""
        of_rows, of_cols, w = self._global_rows(panel), self._global_cols(panel), V.shape[1]
        V_rows, Y_rows = self._buffers("of rows", len(of_rows), w)
        V_cols, Y_cols = self._buffers("of columns", len(of_cols), w)
        V_rows[...], V_cols[...] = V[of_rows], V[of_cols]
        conjugated = V_rows.conj()  # V_rows itself where the type is real
        Y_rows[...] = Y_cols[...] = 0
        for (r, c), here in self._tiles(panel):
            tile = self._A[here]
            if of_rows[r.start] <= of_cols[c.stop - 1]:  # on the diagonal
                tile = self._below(tile, of_rows[r], of_cols[c], 0)
                gemm_accumulate(1, tile, V_cols[c], 1, Y_rows[r])
                tile = self._below(self._A[here], of_rows[r], of_cols[c], -1)
            else:
                gemm_accumulate(1, tile, V_cols[c], 1, Y_rows[r])
            gemm_accumulate(1, tile.T, conjugated[r], 1, Y_cols[c])
        Y[...] = 0
        Y[of_rows] += Y_rows
        Y[of_cols] += Y_cols.conj()

    def _below(self, tile: np.ndarray, rows: np.ndarray, cols: np.ndarray, offset: int) -> np.ndarray:
        """Return a copy of a tile with zeros above the diagonal of A; if offset is -1, also on the diagonal."""
        buffer = self._task.workspace["tile"]
        copy = buffer[: tile.size].reshape(tile.shape) if tile.size <= buffer.size else np.empty_like(tile)
        np.copyto(copy, tile)
        copy[rows[:, None] + offset < cols] = 0
        if copy.dtype.kind == "c" and not offset:  # the diagonal is real
            same = rows[:, None] == cols
            copy[same] = copy[same].real
        return copy

    def _update(self, panel: Panel, V: np.ndarray, W: np.ndarray) -> None:
        """A := A - V W^H - W V^H, on and below the diagonal, by one product with twice as many columns."""
        of_rows, of_cols, k = self._global_rows(panel), self._global_cols(panel), V.shape[1]
        left, right = self._task.workspace["of rows"], self._task.workspace["of columns"]
        L, R = left[: len(of_rows) * 2 * k].reshape(-1, 2 * k), right[: len(of_cols) * 2 * k].reshape(-1, 2 * k)
        with self._task.computing():
            L[:, :k], L[:, k:] = V[of_rows], W[of_rows]
            np.conjugate(W[of_cols], out=R[:, :k])
            np.conjugate(V[of_cols], out=R[:, k:])
            for (r, c), here in self._tiles(panel):
                gemm_accumulate(-1, L[r], R[c].T, 1, self._A[here])

    def _tiles(self, panel: Panel) -> list[tuple[Window, Window]]:
        """Return each tile of the trailing lower triangle: its slices in the trailing and in the whole local array."""
        (i, j), plan = self._task.grid.coords, self._plan
        down, right = self._rows.below(panel.stop, i), self._cols.below(panel.stop, j)
        tiles = lower_tiles(self._rows, self._cols, (i, j), panel.stop, plan.n, SMALLEST)
        return [
            ((slice(r.start - down, r.stop - down), slice(c.start - right, c.stop - right)), (r, c))
            for r, c, *_ in tiles
        ]

    def _buffers(self, name: str, height: int, width: int) -> np.ndarray:
        return self._task.workspace[name][: 2 * height * width].reshape(2, height, width)

    def _global_rows(self, panel: Panel) -> np.ndarray:
        """Return the global indices of this rank's rows below a panel, counted from the end of the panel."""
        return indices_between(self._rows, panel.stop, self._plan.n, self._task.grid.coords[0])

    def _global_cols(self, panel: Panel) -> np.ndarray:
        return indices_between(self._cols, panel.stop, self._plan.n, self._task.grid.coords[1])


class BidiagonalBand(PanelAlgorithm[BidiagonalBandSchedule]):
    """Overwrites A (m, n), m >= n, with the upper band matrix Q^H A P, of bandwidth b.

    Elements outside of the band are not meaningful.

    Cost per rank for P ranks: (4 m n^2 - 4/3 n^3)/P flops, and 4 m n b flops that all ranks repeat.
    Error: |A - Q B P^H| <= c m n^{1/2} eps |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
    """

    def __call__(self) -> None:
        for side in self._plan.sides:
            self._reflect(side)

    def _reflect(self, side: OneSide) -> None:
        """Factor the columns of X in a panel into (I - V T V^H) R, and subtract V T^H V^H X from later columns of X.

        X is A, or A^T to factor rows of A.
        """
        task, plan, (panel, transposed, start, k) = self._task, self._plan, side
        P = gathered_window(task, "A", plan.A, plan.gathering(side), *plan.factored(side), "C" if transposed else "F")
        X, rows, cols, (i, j), at = self._A, self._rows, self._cols, task.grid.coords, panel.col
        if transposed:
            P, X, rows, cols, (i, j), at = P.T, X.T, cols, rows, (j, i), panel.row
        V, R, T = factor_panel(task, P, k)
        mine, down = indices_between(rows, start, rows.n, i), rows.below(start, i)
        own, C = V[mine], X[down:, cols.below(panel.stop, j) :]
        Z, TZ = (
            column_buffer(k, "F" if transposed else "C", C.shape[1], task.workspace[name])
            for name in ("sums", "multiplied sums")
        )
        with task.computing():
            if j == at:
                here = np.flatnonzero(mine < k)
                own_columns = X[down:, cols.local_window(panel.start, panel.stop, j)]
                own_columns[here] = np.hstack([R[mine[here]], P[mine[here], k:]])
            gemm_accumulate(1, own.T.conj(), C, 0, Z)
        task.carry_out(plan.sums(side).of(task.grid.comm.rank), task.workspace["sums"][: Z.size])
        with task.computing():
            gemm_accumulate(1, T.T.conj(), Z, 0, TZ)
        task.update(own, TZ, C)


def factor_panel(task: Task[Any], P: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factor the first k columns of P into (I - V T V^H) R, multiply the others by (I - V T V^H)^H; return V, R, T.

    V overwrites the first k columns of P.  Where P has more columns than rows, R is not square.
    """
    R, T = task.workspace["triangles"][: 2 * k * k].reshape(2, k, k).transpose(0, 2, 1)
    with task.computing():
        compact_qr(P[:, :k], R, T)
        rest = P[:, k:]
        if rest.size:
            rest -= P[:, :k] @ (T.conj().T @ (P[:, :k].conj().T @ rest))
    return P[:, :k], R, T
