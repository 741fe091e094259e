"""One rank's elements of the lower triangle of a Hermitian matrix: products with a vector, and updates of rank 2 k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.blas.local_gemm import gemm_accumulate, prepare_gemv, prepare_hemv
from pdgemm.local.blas.local_lapack import subtract_her2k
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.tridiagonal_schedule import TridiagonalSchedule, as_slices
from pdgemm.transport.movers.panel_views import column_buffer


class PairedColumns(NamedTuple):
    """Matrices V and W with interleaved columns, v_1, w_1, v_2, w_2, ..., so that one product reads both.

    V W^H + W V^H = [v_1 w_1 v_2 w_2 ...] [w_1 v_1 w_2 v_2 ...]^H.
    X : (m, 2 k), column-major, the interleaved columns.
    """

    X: np.ndarray

    @property
    def V(self) -> np.ndarray:
        return self.X[:, ::2]

    @property
    def W(self) -> np.ndarray:
        return self.X[:, 1::2]

    def v(self, j: int) -> np.ndarray:
        return self.X[:, 2 * j]

    def w(self, j: int) -> np.ndarray:
        return self.X[:, 2 * j + 1]

    def column(self, j: int, rows: slice, out: np.ndarray) -> np.ndarray:
        """Return the rows `rows` of column j of V W^H + W V^H; only the first j columns of V and W are used."""
        X = self.X[:, : 2 * j]
        return np.matmul(X[rows], _exchanged(X[j]).conj(), out=out)

    def times(self, x: np.ndarray, columns: slice, out: np.ndarray) -> np.ndarray:
        """Return V W^H x + W V^H x; only the columns `columns` of V and W are used."""
        X = self.X[:, 2 * columns.start : 2 * columns.stop]
        return np.matmul(X, _exchanged((x.conj() @ X).conj()), out=out)

    def exchanged(self, buffer: np.ndarray) -> np.ndarray:
        """Return w_1, v_1, w_2, v_2, ... in a buffer."""
        X = column_buffer(len(self.X), "F", self.X.shape[1], buffer)
        X[:, ::2], X[:, 1::2] = self.W, self.V
        return X


def _exchanged(row: np.ndarray) -> np.ndarray:
    """Return x_2, x_1, x_4, x_3, ... for a vector x."""
    return row.reshape(-1, 2)[:, ::-1].reshape(-1)


class PartOfTriangle(NamedTuple):
    """A local submatrix of A.  Either all of it is below the diagonal of A, or its diagonal is on the diagonal of A.

    rows, cols : the entries of vectors that belong to the rows and columns of the submatrix.
    hermitian  : the second case: the submatrix is Hermitian, and only its lower triangle is read.
    """

    A: np.ndarray
    rows: slice
    cols: slice
    hermitian: bool


class HermitianTiles:
    """This rank's elements on and below the diagonal of A.  Local.

    A : the local array; its rows and columns are ordered by class (`TridiagonalSchedule`), until `reorder(back=True)`.
    """

    def __init__(self, plan: TridiagonalSchedule, A: np.ndarray, coords: tuple[int, int]) -> None:
        self._plan, self._A = plan, A
        self._rows, self._cols = (plan.local_classes(at, parts) for at, parts in zip(coords, plan.grid.shape))
        self.reorder(back=False)

    def reorder(self, back: bool) -> None:
        """Reorder the rows and columns of A class by class, or `back` to their own order."""
        for x, classes in ((self._A.T, len(self._rows)), (self._A, len(self._cols))):
            order = np.argsort(np.arange(x.shape[1]) // self._plan.by_class.block % classes, kind="stable")
            order = np.argsort(order) if back else order
            for some in slabs(*x.shape) if classes > 1 and x.size else ():  # slabs of rows that fit in cache
                x[some] = x[some, order]

    def _parts(self, panel: Panel, start: int) -> Iterator[PartOfTriangle]:
        """Yield the submatrices from row and column `start` on; those that are not Hermitian have one block column."""
        by_class, b = self._plan.by_class, self._plan.by_class.block
        for c, cols in self._cols.items():
            first = by_class.below(start, c)
            for r, rows in self._rows.items():
                if c == r:
                    yield self._part(
                        panel, (r, c), slice(rows.start + first, rows.stop), slice(cols.start + first, cols.stop)
                    )
                    continue
                bounds = [first, *range((first // b + 1) * b, by_class.count(c), b), by_class.count(c)]
                for here in as_slices(bounds) if first < by_class.count(c) else ():
                    top = by_class.below(int(by_class.to_global(here.start, c)), r)
                    block = slice(cols.start + here.start, cols.start + here.stop)
                    yield self._part(panel, (r, c), slice(rows.start + top, rows.stop), block)

    def _part(self, panel: Panel, classes: tuple[int, int], rows: slice, cols: slice) -> PartOfTriangle:
        """Return the submatrix of some local rows and columns.   classes : the classes of rows and columns."""
        (r, c), segments = classes, self._plan.segments[panel]
        down, right = self._rows[r].stop - segments[r].stop, self._cols[c].stop - segments[c].stop
        places = slice(rows.start - down, rows.stop - down), slice(cols.start - right, cols.stop - right)
        return PartOfTriangle(self._A[rows, cols], *places, r == c)

    def product(self, panel: Panel, v: np.ndarray, y: np.ndarray) -> Callable[[], None]:
        """Return a function that computes y := this rank's terms of A v, in rows and columns from the panel's start.

        Each block of columns is read from memory once: while it is in cache, its adjoint is multiplied, too.
        """
        calls = list[Callable[[], None]]()
        for A, rows, cols, hermitian in self._parts(panel, panel.start):
            if not A.size:
                continue
            if hermitian:
                calls.append(prepare_hemv(A, v[cols], y[rows]))
            else:
                calls.append(prepare_gemv(A, v[cols], y[rows]))
                calls.append(prepare_gemv(A, v[rows], y[cols], adjoint=True))

        def multiply() -> None:
            y[:] = 0
            for call in calls:
                call()

        return multiply

    def update(self, panel: Panel, VW: PairedColumns, exchanged: np.ndarray) -> None:
        """A := A - V W^H - W V^H in the trailing matrix.   exchanged : the columns w_1, v_1, w_2, v_2, ..."""
        for A, rows, cols, hermitian in self._parts(panel, panel.stop):
            if hermitian:
                subtract_her2k(VW.V[rows], VW.W[rows], A)
            else:
                gemm_accumulate(-1, VW.X[rows], exchanged[cols].T, 1, A, conjugate_b=A.dtype.kind == "c")
