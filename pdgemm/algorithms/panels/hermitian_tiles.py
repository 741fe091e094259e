"""The tiles of a Hermitian matrix on and below its diagonal, on one rank: their product with a vector, their update."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pdgemm.local.blas.local_gemm import gemm_accumulate, prepare_gemv
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.tridiagonal_schedule import TridiagonalSchedule


class HermitianTiles:
    """This rank's elements on and below the diagonal of A, which is in square blocks.  Local.

    A : the local array, column-major.  Blocks on the diagonal become whole: their upper triangle is overwritten.
    vectors : workspace for two vectors of local rows and two of local columns.
    """

    def __init__(
        self, plan: TridiagonalSchedule, A: np.ndarray, vectors: np.ndarray, coords: tuple[int, int]
    ) -> None:
        self._plan, self._A, self._vectors, self._coords = plan, A, vectors, coords
        self._rows, self._cols = plan.A.distribution.rows, plan.A.distribution.cols
        for cols, top, below in self._blocks(0):
            if below > top:
                block = A[top:below, cols]
                block[...] = np.tril(block) + np.tril(block, -1).conj().T
                np.fill_diagonal(block, block.diagonal().real)

    def _blocks(self, start: int) -> Iterator[tuple[slice, int, int]]:
        """Yield the blocks of local columns from `start` on, their first local row, and the first below the diagonal
        block: the same row where another rank has this block.
        """
        (i, j), first, b = self._coords, self._cols.below(start, self._coords[1]), self._cols.block
        while first < self._A.shape[1]:
            stop = min((first // b + 1) * b, self._A.shape[1])
            g = int(self._cols.to_global(first, j))
            yield slice(first, stop), self._rows.below(g, i), self._rows.below(g + stop - first, i)
            first = stop

    def product(self, start: int) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return the function that computes y := this rank's part of A v, for v and y from row `start` on.

        Each block of columns is read from memory once: from the cache it is multiplied again, by its other vector.
        """
        A, (i, j), n = self._A, self._coords, self._plan.n
        rows, cols = self._rows.window(start, n).indices(i), self._cols.window(start, n).indices(j)
        r0, c0 = A.shape[0] - len(rows), A.shape[1] - len(cols)
        ends = np.cumsum([len(rows), len(rows), len(cols), len(cols)])
        v_rows, y_rows, v_cols, y_cols, _ = np.split(self._vectors, ends)
        calls = list[Callable[[], None]]()
        for c, top, below in self._blocks(start):
            here = slice(c.start - c0, c.stop - c0)
            if top < A.shape[0]:
                calls.append(prepare_gemv(1, A[top:, c], v_cols[here], y_rows[top - r0 :]))
            if below < A.shape[0]:
                calls.append(prepare_gemv(1, A[below:, c], v_rows[below - r0 :], y_cols[here], adjoint=True))

        def multiply(v: np.ndarray, y: np.ndarray) -> None:
            np.take(v, rows, out=v_rows, mode="clip")
            np.take(v, cols, out=v_cols, mode="clip")
            y_rows[:], y_cols[:], y[:] = 0, 0, 0
            for call in calls:
                call()
            y[rows] = y_rows
            y[cols] += y_cols

        return multiply

    def update(self, panel: Panel, of_rows: np.ndarray, of_cols: np.ndarray) -> None:
        """A := A - V W^H - W V^H behind a panel, where V W^H + W V^H = of_rows of_cols^H on all of this rank."""
        A = self._A
        r0, c0 = A.shape[0] - len(of_rows), A.shape[1] - len(of_cols)
        for cols, top, _ in self._blocks(panel.stop):
            left, right = of_rows[top - r0 :], of_cols[cols.start - c0 : cols.stop - c0]
            gemm_accumulate(-1, left, right.T, 1, A[top:, cols], conjugate_b=A.dtype.kind == "c")
