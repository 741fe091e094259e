"""The elements of a Hermitian matrix on and below its diagonal on one rank: products with a vector, and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pdgemm.local.blas.local_gemm import gemm_accumulate, prepare_gemv, prepare_hemv
from pdgemm.local.blas.local_lapack import subtract_her2k
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.tridiagonal_schedule import TridiagonalSchedule, as_slices
from pdgemm.transport.movers.panel_views import column_buffer


class PartOfTriangle(NamedTuple):
    """Elements of A below its diagonal, or a Hermitian matrix, of which only the lower triangle counts.

    rows, cols : its places in vectors.
    """

    A: np.ndarray
    rows: slice
    cols: slice
    hermitian: bool


class HermitianTiles:
    """This rank's elements on and below the diagonal of A.  Local.

    A : the local array, which is reordered: its rows and columns lie class by class until `restore`.
    buffer : workspace for a row and for a column of A, at least; it is used here and in `restore` alone.
    """

    def __init__(self, plan: TridiagonalSchedule, A: np.ndarray, coords: tuple[int, int], buffer: np.ndarray) -> None:
        self._plan, self._A, self._buffer = plan, A, buffer
        self._rows, self._cols = (plan.local_classes(at, parts) for at, parts in zip(coords, plan.grid.shape))
        self._reorder(False)

    def restore(self) -> None:
        """Return the rows and columns of A to their order."""
        self._reorder(True)

    def _reorder(self, back: bool) -> None:
        for x, classes in ((self._A, self._rows), (self._A.T, self._cols)):
            if len(classes) > 1:
                _reorder_blocks(x, self._plan.by_class.block, len(classes), back, self._buffer)

    def _parts(self, panel: Panel, start: int) -> Iterator[PartOfTriangle]:
        """Yield the parts in the rows and columns from `start` on; those below the diagonal have a block of columns."""
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
        """Return the part of A in these local rows and columns, which are of one class each."""
        (r, c), segments = classes, self._plan.segments[panel]
        down, right = self._rows[r].stop - segments[r].stop, self._cols[c].stop - segments[c].stop
        places = slice(rows.start - down, rows.stop - down), slice(cols.start - right, cols.stop - right)
        return PartOfTriangle(self._A[rows, cols], *places, r == c)

    def product(self, panel: Panel, v: np.ndarray, y: np.ndarray) -> Callable[[], None]:
        """Return the function that computes y := this rank's part of A v, for these vectors, from the panel on.

        Each block of columns is read from memory once: from the cache it is multiplied again, by its other vector.
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

    def update(self, panel: Panel, X: np.ndarray, exchanged: np.ndarray) -> None:
        """A := A - V W^H - W V^H behind a panel, where X has columns v, w, v, w ..., and `exchanged` w, v, w, v ..."""
        for A, rows, cols, hermitian in self._parts(panel, panel.stop):
            if hermitian:
                subtract_her2k(X[rows, ::2], X[rows, 1::2], A)
            else:
                gemm_accumulate(-1, X[rows], exchanged[cols].T, 1, A, conjugate_b=A.dtype.kind == "c")


def _reorder_blocks(A: np.ndarray, block: int, classes: int, back: bool, buffer: np.ndarray) -> None:
    """Put the rows of A, whose blocks are of so many classes in turn, class by class, or back."""
    starts, width = [*range(0, len(A), block)], buffer.size // max(1, len(A))
    order = [at for x in range(classes) for at in starts[x::classes]]
    sizes = [min(block, len(A) - at) for at in order]
    for cols in (slice(at, min(at + width, A.shape[1])) for at in range(0, A.shape[1], width)):
        before = column_buffer(len(A), "F" if A.flags.f_contiguous else "C", cols.stop - cols.start, buffer)
        before[...] = A[:, cols]
        for at, place in zip(order, as_slices([*accumulate(sizes, initial=0)])):
            natural = slice(at, at + place.stop - place.start)
            source, target = (place, natural) if back else (natural, place)
            A[target, cols] = before[source]
