"""A matrix to and from a file in pieces, of which each rank has a share that lies in the file in one box.

Whatever the layout of the matrix, a rank's share of a piece is some whole rows, or a part of one row: contiguous bytes.
(A file type of MPI for a block-cyclic layout has an entry for each run of a rank's elements.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import gcd
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.io.checksum import bilinear, text, zero
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.files import file_error

ELEMENTS = 1 << 19  # of a rank's share of a piece
INDICES = 1 << 17  # rows or columns of a piece: where blocks are small, its exchange has, and keeps, arrays as long

T = TypeVar("T")
Progress = Callable[[int, int], object]
Transfer = Callable[[int, int, np.ndarray], object]  # first row, first column, elements; empty arrays too


class Piece(NamedTuple):
    """Rows and columns `start` to `stop` of a dataset, dealt to the ranks in order, one block each."""

    start: tuple[int, int]
    layout: Distribution

    @property
    def stop(self) -> tuple[int, int]:
        return self.start[0] + self.layout.shape[0], self.start[1] + self.layout.shape[1]

    def share(self, rank: int) -> tuple[int, int, tuple[int, int]]:
        """First row and column of what a rank has of it, and its shape."""
        coords = divmod(rank, self.layout.cols.parts)
        places = zip(self.start, (self.layout.rows, self.layout.cols), coords)
        row, col = (first + dim.block * part if dim.count(part) else first for first, dim, part in places)
        return row, col, self.layout.local_shape(coords)


def cut(shape: tuple[int, int], unit: tuple[int, int], ranks: int, period: tuple[int, int] = (1, 1)) -> list[Piece]:
    """A dataset in as few pieces as the bounds allow.

    unit   : rows and columns that are read or written together, those of a chunk.
    period : rows and columns after which the layout of the matrix begins again.  Pieces of whole periods have exchanges
             that are alike, of which one is kept.
    """
    (m, n), (u, v) = shape, unit
    if not m * n:
        return []
    wide = _share(n, v, 1, min(ELEMENTS // u, INDICES), period[1])
    tall = _share(m, u, ranks, min(ELEMENTS // wide, INDICES // ranks), period[0]) if wide >= n else u
    down = (ranks, 1), (tall, wide)  # ranks below each other, with whole rows or parts of one
    across = (1, ranks), (u, _share(n, v, ranks, min(ELEMENTS // u, INDICES // ranks), period[1]))

    def steps(way: tuple[tuple[int, int], tuple[int, int]]) -> tuple[range, range]:
        return tuple(range(0, size, parts * most) for size, parts, most in zip(shape, *way))  # type: ignore[return-value]

    way = min(down, across, key=lambda way: len(steps(way)[0]) * len(steps(way)[1]))

    def dealt(axis: int, start: int, step: int) -> BlockCyclic:
        held = min(shape[axis] - start, step)
        return BlockCyclic(held, _share(held, unit[axis], way[0][axis], way[1][axis]), way[0][axis])

    rows, cols = steps(way)
    return [
        Piece((row, col), Distribution(dealt(0, row, rows.step), dealt(1, col, cols.step)))
        for row in rows
        for col in cols
    ]


def _share(size: int, unit: int, ranks: int, most: int, period: int = 1) -> int:
    """An even share in whole units, at most `most` if one unit is not more; all shares in whole periods if they fit."""
    units = max(1, min(most // unit, -(-size // (unit * ranks))))
    alike = period // gcd(period, unit * ranks)
    return unit * (units - units % alike if units > alike and units * unit * ranks < size else units)


@contextmanager
def open_on_all(
    comm: MPI.Intracomm, path: Path, opening: Callable[[], T], closing: Callable[[T], object]
) -> Iterator[T]:
    """A file that all ranks open and close, or an exception on all.  Collective; the block raises on all or none."""
    file, error = None, None
    try:
        file = opening()
    except Exception as bad:
        error = file_error(path, bad)
    agree(comm, error)
    assert file is not None
    try:
        yield file
    except BaseException:
        with suppress(Exception):
            closing(file)
        raise
    try:
        closing(file)  # what was written may be found to have no room only now
    except Exception as bad:
        error = file_error(path, bad)
    agree(comm, error)


def write(matrix: DistMatrix, put: Transfer, unit: tuple[int, int], progress: Progress | None = None) -> None:
    """The dataset := matrix.  Collective over its grid; `put` is called on all ranks equally often."""
    for part, staged, start in _each(matrix, unit, progress):
        redistribute(part, staged)
        with together(matrix.grid.comm):
            put(*start, staged.local)


def read(matrix: DistMatrix, get: Transfer, unit: tuple[int, int], progress: Progress | None = None) -> None:
    """matrix := the dataset.  Collective over its grid; `get` is called on all ranks equally often."""
    for part, staged, start in _each(matrix, unit, progress):
        with together(matrix.grid.comm):
            get(*start, staged.local)
        redistribute(staged, part)


def checksum(shape: tuple[int, int], dtype: np.dtype, get: Transfer, unit: tuple[int, int], comm: MPI.Intracomm) -> str:
    """The checksum of the dataset, as that of a matrix.  Collective."""
    total = zero()
    for piece in cut(shape, unit, comm.size):
        row, col, (rows, cols) = piece.share(comm.rank)
        with together(comm):
            found = np.empty((rows, cols), dtype)
            get(row, col, found)
            total += bilinear(found, np.arange(row, row + rows), np.arange(col, col + cols))
    return text(comm, total)


def _each(
    matrix: DistMatrix, unit: tuple[int, int], progress: Progress | None
) -> Iterator[tuple[DistMatrix, DistMatrix, tuple[int, int]]]:
    """Each piece as a part of the matrix, and as it meets the file; where this rank's share begins."""
    comm, base, notify = matrix.grid.comm, matrix.grid.base, GuardedCallback(progress)
    m, n = matrix.distribution.rows, matrix.distribution.cols
    found = cut(matrix.shape, unit, comm.size, (m.block * m.parts, n.block * n.parts))
    staged = None
    for number, piece in enumerate(found, 1):
        if staged is None or staged.distribution != piece.layout:
            staged = None  # its room is the next one's
            grid = base.work_grid(piece.layout.grid_shape, 1, tuple(range(comm.size)))
            staged = DistMatrix.empty(piece.layout.shape, grid=grid, block=piece.layout.block, dtype=matrix.dtype)
        rows, cols = (slice(*ends) for ends in zip(piece.start, piece.stop))
        row, col, _ = piece.share(comm.rank)
        yield matrix[rows, cols], staged, (row, col)
        notify(number, len(found))
    agree(comm, notify.error)
