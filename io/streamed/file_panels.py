"""Threads that read panels of a matrix in a file while other panels are multiplied, and write rows of a tile of C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import zero
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.report import CheckReport
from pdgemm.io.pieces import Transfer, sum_at
from pdgemm.io.source import ReadSums, Region, Source
from pdgemm.io.streamed.tiling import STAGED, PanelShape, Range, TileStep
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together

Start = Callable[..., Callable[[], Any]]  # called with a function and its arguments: see `worker`


@contextmanager
def worker() -> Iterator[Start]:
    """Yield a function that starts a transfer.  It returns a second function: wait for the transfer; return its result.

    The transfer runs in a thread.  Where two threads cannot call MPI, it runs in the second function.
    """
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        yield partial
        return
    with ThreadPoolExecutor(1) as thread:
        yield lambda *work: thread.submit(*work).result


class Panels:
    """op(X) in panels, of which at most two are in memory.  Collective over the grid, except the reads themselves.

    sums    : receives the sums of the panels that are read.
    nbytes  : bytes that this rank has read.   wait : seconds that this rank waited for reads.
    """

    def __init__(
        self,
        source: Source,
        transfer: Transfer,
        grid: ProcessGrid,
        shape: PanelShape,
        reader: Start,
        sums: ReadSums,
    ) -> None:
        self._source, self._transfer, self._reader, self._sums = source, transfer, reader, sums
        order: Order = "F" if source.transposed else "C"
        self._buffers = [
            DistMatrix.empty(shape.shape, grid=grid, block=shape.block, dtype=source.dtype, order=order)
            for _ in range(min(2, max(1, shape.loads)))
        ]
        self._panel = self._buffers[-1]
        self._reading: tuple[Region, DistMatrix, Callable[[], tuple[int, np.ndarray]]] | None = None
        self.nbytes, self.wait = 0, 0.0

    def begin(self, rows: Range, cols: Range) -> None:
        """Begin to read op(X)[rows, cols] into the buffer that is not in use."""
        self._buffers.reverse()
        panel, start = self._buffers[-1][: rows[1] - rows[0], : cols[1] - cols[0]], (rows[0], cols[0])
        there = (panel.T, start[::-1]) if self._source.transposed else (panel, start)
        itemsize = self._source.stored.dtype.itemsize
        self._reading = (rows, cols), panel, self._reader(transfer_and_sum, self._transfer, *there, itemsize)

    def end(self) -> None:
        """Wait for the read that was begun, if any.  Local; raises the errors of reading."""
        if self._reading is not None:
            start, (region, self._panel, result) = perf_counter(), self._reading
            nbytes, total = result()
            self.nbytes += nbytes
            self.wait += perf_counter() - start
            self._reading = None
            self._sums.add(region, total)

    def panel(self, rows: int, cols: int) -> DistMatrix:
        """Return the panel that was read last, rows x cols: the first rows and columns of its buffer."""
        panel = self._panel[:rows, :cols]
        return panel.T.H if self._source.op == "C" else panel


@contextmanager
def opened_panels(
    grid: ProcessGrid, *wanted: tuple[Source | None, PanelShape], panel_grid: ProcessGrid | None = None
) -> Iterator[list[Panels | None]]:
    """Open matrices in files, and yield their panels, all of which are read by one worker.  Collective.

    wanted : the matrices, None for an operand that is in memory, and the shapes of their panels.
    panel_grid : the grid of the panels, over the ranks of `grid`; None: the same grid.
    """
    with ExitStack() as stack:
        sums = [x and ReadSums(x.place, x.dtype) for x, _ in wanted]
        opened = [x and stack.enter_context(x.opened_alone(grid, y)) for (x, _), y in zip(wanted, sums)]
        reader = stack.enter_context(worker())  # ends before the files are closed
        yield [
            Panels(x, get, panel_grid or grid, shape, reader, y) if x and get and y else None
            for (x, shape), get, y in zip(wanted, opened, sums)
        ]


def loaded_steps(
    comm: MPI.Intracomm, steps: Iterator[TileStep], a: Panels | None, b: Panels | None = None
) -> Iterator[TileStep]:
    """Yield each step when its panels are in memory, while the panels of the next step are read.  Collective.

    a, b : the panels of op(A) and op(B); None: an operand that is in memory.
    """
    read = [x for x in (a, b) if x is not None]
    step = next(steps, None)
    with together(comm):
        _begin(a, b, step)
    while step is not None:
        coming = next(steps, None)
        with together(comm):
            for x in read:
                x.end()
            _begin(a, b, coming)
        yield step
        step = coming


def _begin(a: Panels | None, b: Panels | None, step: TileStep | None) -> None:
    """Begin to read the panels that a step needs."""
    if step is not None:
        for x, reads, where in zip((a, b), step.reads, ((step.rows, step.inner), (step.inner, step.cols))):
            if x is not None and reads:
                x.begin(*where)


class TileWriter:
    """Writes a tile in a thread, one slab (a block of rows) after the other.  All methods are local.

    total  : this rank's share of the checksum of C.   nbytes : bytes that this rank has written.
    wait   : seconds that this rank waited for writes.   seconds : seconds that the thread spent in writes.
    checks : the reports of the checks of the products.
    bytes_read, read_wait : bytes that this rank read, and seconds that it waited for them, over all operands.
    """

    def __init__(self, transfer: Transfer, dtype: np.dtype, writer: Start) -> None:
        self._transfer, self._dtype, self._writer = transfer, dtype, writer
        self._writing: dict[int, Callable[[], tuple[int, np.ndarray, float]]] = {}
        self.total, self.nbytes, self.wait, self.seconds = zero(), 0, 0.0, 0.0
        self.bytes_read, self.read_wait, self.checks = 0, 0.0, list[CheckReport]()

    def begin(self, number: int, slab: DistMatrix, start: tuple[int, int]) -> None:
        self._writing[number] = self._writer(self._written, slab, start)

    def end(self, number: int) -> None:
        """Wait until this slab is written, so that its memory can be used again.  Raises the errors of writing."""
        if number in self._writing:
            start = perf_counter()
            nbytes, total, seconds = self._writing.pop(number)()
            self.nbytes += nbytes
            self.total += total
            self.seconds += seconds
            self.wait += perf_counter() - start

    def end_all(self) -> None:
        for number in list(self._writing):
            self.end(number)

    def _written(self, slab: DistMatrix, start: tuple[int, int]) -> tuple[int, np.ndarray, float]:
        begin = perf_counter()
        nbytes, total = transfer_and_sum(self._transfer, slab, start, self._dtype.itemsize, self._dtype)
        return nbytes, total, perf_counter() - begin


def transfer_part(transfer: Transfer, part: DistMatrix, start: tuple[int, int], itemsize: int) -> int:
    """Read or write this rank's elements of a submatrix; return their bytes in the file.  Local.

    start : the row and the column of the submatrix in the file.
    """
    local, (i, j) = part.local, part.grid.coords
    for row, first_row, rows in _runs(part.distribution.rows, i):
        for col, first_col, cols in _runs(part.distribution.cols, j):
            lines = max(1, STAGED // max(1, cols * max(itemsize, local.itemsize)))
            for at in range(0, rows, lines):
                piece = local[row + at : row + min(rows, at + lines), col : col + cols]
                transfer(start[0] + first_row + at, start[1] + first_col, piece)
    return local.size * itemsize


def transfer_and_sum(
    transfer: Transfer, part: DistMatrix, start: tuple[int, int], itemsize: int, dtype: np.dtype | None = None
) -> tuple[int, np.ndarray]:
    """Call `transfer_part`; return the bytes in the file, and this rank's share of the checksum.  Local.

    dtype : when writing, the type to which elements are converted before they are summed and written.
    """
    total = zero()

    def summed(row: int, col: int, piece: np.ndarray) -> None:
        piece = piece if dtype is None else np.ascontiguousarray(piece, dtype)
        transfer(row, col, piece)
        np.add(total, sum_at(piece, row, col), out=total)

    return transfer_part(summed, part, start, itemsize), total


def _runs(dim: BlockCyclic, part: int) -> Iterator[tuple[int, int, int]]:
    """Yield each run of consecutive global indices of a grid part: first local index, first global index, length."""
    indices = dim.indices(part)
    ends = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    for first, end in pairwise(ends):
        if end > first:
            yield first, int(indices[first]), end - first
