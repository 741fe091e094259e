"""Panels of a matrix in a file, of which one is read while another is used; and parts of one, written meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import bilinear, zero
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io.matrix_files import Transfer
from pdgemm.io.source import ReadSums, Region, Source
from pdgemm.io.streamed.tiling import STAGED, Range, TileStep, Tiling
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


class _AtOnce(Executor):
    """Does what it is given in the thread that gives it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as bad:
            done.set_exception(bad)
        return done


def worker() -> Executor:
    """Return a thread for transfers; this one where the MPI library cannot be called by two."""
    return ThreadPoolExecutor(1) if MPI.Query_thread() == MPI.THREAD_MULTIPLE else _AtOnce()


class Panels:
    """op(X) by panels, of which at most two are in memory.  Collective over the grid, but for the reading itself.

    shape, block : of the largest panel.   loads : how many will be read.
    sums    : receives those of what is read.
    nbytes  : bytes that this rank has read.   wait : seconds that it waited for them.
    """

    def __init__(
        self,
        source: Source,
        transfer: Transfer,
        grid: ProcessGrid,
        shape: tuple[int, int],
        block: tuple[int, int],
        loads: int,
        reader: Executor,
        sums: ReadSums,
    ) -> None:
        self._source, self._transfer, self._reader, self._sums = source, transfer, reader, sums
        order: Order = "F" if source.transposed else "C"
        self._buffers = [
            DistMatrix.empty(shape, grid=grid, block=block, dtype=source.dtype, order=order)
            for _ in range(min(2, max(1, loads)))
        ]
        self._panel, self._coming = self._buffers[-1], self._buffers[-1]
        self._reading: Future[tuple[int, np.ndarray]] | None = None
        self._region: Region = (0, 0), (0, 0)
        self.nbytes, self.wait = 0, 0.0

    def begin(self, rows: Range, cols: Range) -> None:
        """Begin to read op(X)[rows, cols] into the buffer that is not in use."""
        self._buffers.reverse()
        self._coming = there = self._buffers[-1][: rows[1] - rows[0], : cols[1] - cols[0]]
        self._region, start = (rows, cols), (rows[0], cols[0])
        if self._source.transposed:
            there, start = there.T, start[::-1]
        self._reading = self._reader.submit(
            read_and_sum, self._transfer, there, start, self._source.stored.dtype.itemsize
        )

    def end(self) -> None:
        """Wait for what was begun.  Local; raises the errors of reading."""
        if self._reading is not None:
            start = perf_counter()
            nbytes, total = self._reading.result()
            self.nbytes += nbytes
            self.wait += perf_counter() - start
            self._panel, self._reading = self._coming, None
            self._sums.add(self._region, total)

    def panel(self, rows: int, cols: int) -> DistMatrix:
        """Return the panel that was read last; one without elements where nothing is multiplied."""
        panel = self._panel[:rows, :cols]
        return panel.T.H if self._source.op == "C" else panel


def loaded_steps(comm: MPI.Intracomm, tiling: Tiling, a: Panels | None, b: Panels | None) -> Iterator[TileStep]:
    """Yield each step when its panels are there, while those of the next are read.  Collective over `comm`.

    a, b : None: an operand that lies in memory.
    """
    steps, read = tiling.steps(), [x for x in (a, b) if x is not None]
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
    """Begin to read what a step needs."""
    if step is not None:
        for x, reads, where in zip((a, b), step.reads, ((step.rows, step.inner), (step.inner, step.cols))):
            if x is not None and reads:
                x.begin(*where)


class TileWriter:
    """Writes slabs of a tile in a thread.  All is local.

    total  : the checksum of what this rank has written, as a sum.   nbytes, wait : as those of Panels.
    entry_bytes : that this rank has read of C on entry.   seconds : in which the thread wrote.
    """

    def __init__(self, transfer: Transfer, dtype: np.dtype, writer: Executor) -> None:
        self._transfer, self._dtype, self._writer = transfer, dtype, writer
        self._writing: dict[int, Future[tuple[int, np.ndarray, float]]] = {}
        self.total, self.nbytes, self.entry_bytes, self.wait, self.seconds = zero(), 0, 0, 0.0, 0.0

    def begin(self, number: int, slab: DistMatrix, start: tuple[int, int]) -> None:
        self._writing[number] = self._writer.submit(self._written, slab, start)

    def end(self, number: int) -> None:
        """Wait until this slab is written, so that its memory can be used again.  Raises the errors of writing."""
        if number in self._writing:
            start = perf_counter()
            nbytes, total, seconds = self._writing.pop(number).result()
            self.nbytes += nbytes
            self.total += total
            self.seconds += seconds
            self.wait += perf_counter() - start

    def end_all(self) -> None:
        for number in list(self._writing):
            self.end(number)

    def _written(self, slab: DistMatrix, start: tuple[int, int]) -> tuple[int, np.ndarray, float]:
        total, begin = zero(), perf_counter()

        def put(row: int, col: int, part: np.ndarray) -> None:
            part = np.ascontiguousarray(part, self._dtype)
            rows, cols = (np.arange(first, first + n) for first, n in zip((row, col), part.shape))
            np.add(total, bilinear(part, rows, cols), out=total)
            self._transfer(row, col, part)

        nbytes = transfer_part(put, slab, start, self._dtype.itemsize)
        return nbytes, total, perf_counter() - begin


def transfer_part(transfer: Transfer, part: DistMatrix, start: tuple[int, int], itemsize: int) -> int:
    """Transfer this rank's elements of a part that begins at `start` in a file; return their bytes there.  Local."""
    local, (i, j) = part.local, part.grid.coords
    for row, first_row, rows in _runs(part.distribution.rows, i):
        for col, first_col, cols in _runs(part.distribution.cols, j):
            lines = max(1, STAGED // max(1, cols * max(itemsize, local.itemsize)))
            for at in range(0, rows, lines):
                piece = local[row + at : row + min(rows, at + lines), col : col + cols]
                transfer(start[0] + first_row + at, start[1] + first_col, piece)
    return local.size * itemsize


def read_and_sum(get: Transfer, part: DistMatrix, start: tuple[int, int], itemsize: int) -> tuple[int, np.ndarray]:
    """Read as `transfer_part` does, and return the bytes in the file and the sum of the elements.  Local."""
    total = zero()

    def read(row: int, col: int, piece: np.ndarray) -> None:
        get(row, col, piece)
        rows, cols = (np.arange(first, first + n) for first, n in zip((row, col), piece.shape))
        np.add(total, bilinear(piece, rows, cols), out=total)

    return transfer_part(read, part, start, itemsize), total


def _runs(dim: BlockCyclic, part: int) -> Iterator[tuple[int, int, int]]:
    """Yield the indices of a part that follow each other: the first as a local index, as a global one, and how many."""
    indices = dim.indices(part)
    ends = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    for first, end in pairwise(ends):
        if end > first:
            yield first, int(indices[first]), end - first
