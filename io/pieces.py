"""Transfers between a matrix and a file, piece by piece; each rank accesses one rectangular block of a piece.

For any layout of the matrix, a rank's block in a contiguous dataset is whole rows, or a part of one row: contiguous
bytes.  (An MPI file type of a block-cyclic layout would have an entry for each contiguous run of a rank's elements.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import bilinear, text, zero
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.errors import DTypeError
from pdgemm.grids.distribution import BlockCyclic, Distribution, even_owners
from pdgemm.local.arrays.device import HOST
from pdgemm.local.arrays.dtypes import TYPE, kind_rank, names
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.text import typed

ELEMENTS = 1 << 19  # elements of the largest block of a rank in a piece
INDICES = 1 << 17  # the most rows or columns of a piece, since a redistribution may keep arrays of that length

Progress = Callable[[int, int], object]
Transfer = Callable[..., object]  # (first row, first column, ..., elements): an index for each axis; it may be empty


def check_dtypes(what: str, stored: np.dtype, wanted: np.dtype, possible: tuple[np.dtype, ...]) -> None:
    """Raise DTypeError if a matrix cannot have the wanted type, or if the stored type cannot be converted to it."""
    if wanted not in possible:
        request = "" if wanted == stored else f", and dtype={wanted} was asked for"
        way = f": convert with {typed('--dtype', 'dtype=')}" if stored.kind in "biufc" else ""
        raise DTypeError(f"{what} holds {stored}{request}; a matrix can be of {names(possible)}{way}")
    safe = kind_rank(stored) <= kind_rank(wanted) if kind_rank(wanted) else np.can_cast(stored, wanted)
    if (stored.kind not in "biufc" and stored not in TYPE) or not safe:
        raise DTypeError(f"{what} holds {stored}, which cannot become {wanted}")


def within(transfer: Transfer, part: Sequence[tuple[int, int]]) -> Transfer:
    """Return `transfer` for a part of the array: it counts indices from the first element of the part.

    part : the range of each axis, of which the first index counts.
    """
    return lambda *place: transfer(*(i + first for i, (first, _) in zip(place, part)), place[-1])


class Piece(NamedTuple):
    """Rows and columns `start` to `stop` of a dataset, distributed over the ranks in order, one block each."""

    start: tuple[int, int]
    layout: Distribution

    @property
    def stop(self) -> tuple[int, int]:
        return self.start[0] + self.layout.shape[0], self.start[1] + self.layout.shape[1]

    def share(self, rank: int) -> tuple[int, int, tuple[int, int]]:
        """Return the first row, the first column and the shape of the block of a rank."""
        coords = divmod(rank, self.layout.cols.parts)
        places = zip(self.start, (self.layout.rows, self.layout.cols), coords)
        row, col = (first + dim.block * part if dim.count(part) else first for first, dim, part in places)
        return row, col, self.layout.local_shape(coords)


def cut(shape: tuple[int, int], unit: tuple[int, ...], ranks: int, period: tuple[int, int] = (1, 1)) -> list[Piece]:
    """Return the pieces of a dataset, as few as ELEMENTS and INDICES allow.

    unit   : rows and columns that are accessed together, as those of a chunk.
    period : rows and columns after which the layout of the matrix repeats.  Pieces of whole periods share the plan of
             one redistribution.
    """
    (m, n), (u, v) = shape, unit
    if not m * n:
        return []
    cols = _share(n, v, 1, min(ELEMENTS // u, INDICES), period[1])
    rows = _share(m, u, ranks, min(ELEMENTS // cols, INDICES // ranks), period[0]) if cols >= n else u
    down = (ranks, 1), (rows, cols)  # one grid column of ranks, each with whole rows or a part of one row
    across = (1, ranks), (u, _share(n, v, ranks, min(ELEMENTS // u, INDICES // ranks), period[1]))

    def steps(grid: tuple[int, int], block: tuple[int, int]) -> tuple[range, range]:
        return range(0, m, grid[0] * block[0]), range(0, n, grid[1] * block[1])

    grid, block = min(down, across, key=lambda x: len(steps(*x)[0]) * len(steps(*x)[1]))

    def distributed(axis: int, start: int, step: int) -> BlockCyclic:
        held = min(shape[axis] - start, step)
        return BlockCyclic(held, _share(held, unit[axis], grid[axis], block[axis]), grid[axis])

    row_steps, col_steps = steps(grid, block)
    return [
        Piece((row, col), Distribution(distributed(0, row, row_steps.step), distributed(1, col, col_steps.step)))
        for row in row_steps
        for col in col_steps
    ]


def _share(size: int, unit: int, ranks: int, most: int, period: int = 1) -> int:
    """Return a block size for an even distribution: one unit or more, `most` indices at most.

    If possible, the blocks of all ranks together are whole periods.
    """
    units = max(1, min(most // unit, -(-size // (unit * ranks))))
    alike = period // gcd(period, unit * ranks)
    return unit * (units - units % alike if units > alike and units * unit * ranks < size else units)


class Parcel(NamedTuple):
    """Small matrices that one exchange gathers, each on one rank.

    numbers : their indices in a list.   ranks : the rank that receives each whole matrix, ascending.
    """

    numbers: list[int]
    ranks: list[int]


def parcels(matrices: Sequence[DistMatrix], ranks: int) -> list[Parcel]:
    """Return parcels of all host matrices that have 1 to ELEMENTS elements, as few as the memory of a rank allows.

    For a parcel, a rank sends at most 2 ELEMENTS elements.  It receives an even share, at most about ELEMENTS elements.
    """
    groups, sizes, most = [list[int]()], [x.size for x in matrices], [0, 0]
    for number, x in enumerate(matrices):
        if x.device == HOST and 0 < x.size <= ELEMENTS:
            more = x.size, x.distribution.rows.largest * x.distribution.cols.largest
            most = [a + b for a, b in zip(most, more)]
            if groups[-1] and (most[0] > ranks * ELEMENTS or most[1] > 2 * ELEMENTS):
                groups.append([])
                most = [*more]
            groups[-1].append(number)
    return [Parcel(x, even_owners([sizes[number] for number in x], ranks).tolist()) for x in groups if x]


def whole_ones(matrices: Sequence[DistMatrix], parcel: Parcel, comm: MPI.Intracomm) -> dict[int, np.ndarray]:
    """Gather the matrices of a parcel; return those that are now whole on this rank, by number.  Collective."""
    with together(comm):
        out, wholes = [list[np.ndarray]() for _ in range(comm.size)], new_wholes(matrices, parcel, comm)
        for number, owner in zip(*parcel):
            out[owner].append(np.ascontiguousarray(matrices[number].local))
    parts = comm.alltoall(out)
    with together(comm):
        for rank, of_rank in enumerate(parts):
            for (number, whole), part in zip(wholes.items(), of_rank):
                if part.size:
                    whole[_window(matrices[number], rank)] = part
    return wholes


def spread_wholes(
    matrices: Sequence[DistMatrix], parcel: Parcel, wholes: Mapping[int, np.ndarray], comm: MPI.Intracomm
) -> None:
    """Scatter whole matrices, as `whole_ones` returns them, to the distributed matrices of a parcel.  Collective.

    One exchange, the transpose of that of `whole_ones`.
    """
    with together(comm):
        out = [
            [np.ascontiguousarray(whole[_window(matrices[number], rank)]) for number, whole in wholes.items()]
            for rank in range(comm.size)
        ]
    parts = [iter(of_rank) for of_rank in comm.alltoall(out)]
    with together(comm):
        for number, owner in zip(*parcel):
            matrices[number].local[...] = next(parts[owner])


def new_wholes(matrices: Sequence[DistMatrix], parcel: Parcel, comm: MPI.Intracomm) -> dict[int, np.ndarray]:
    """Allocate the matrices of a parcel that are whole on this rank, by number.  Local."""
    own = (number for number, owner in zip(*parcel) if owner == comm.rank)
    return {number: np.empty(matrices[number].shape, matrices[number].dtype) for number in own}


def _window(matrix: DistMatrix, rank: int) -> Any:
    """Return the index of a rank's elements in the whole matrix: slices if possible, because copies are then faster."""
    dims = zip((matrix.distribution.rows, matrix.distribution.cols), matrix.grid.coords_of(rank))
    rows, cols = (dim.indices(part) for dim, part in dims)
    ends = [(x[0], x[-1] + 1) if len(x) else (0, 0) for x in (rows, cols)]
    alike = all(len(x) == end - first for x, (first, end) in zip((rows, cols), ends))
    return tuple(slice(*x) for x in ends) if alike else np.ix_(rows, cols)


def write_pieces(matrix: DistMatrix, put: Transfer, unit: tuple[int, ...], progress: Progress | None = None) -> None:
    """Write the matrix to the dataset.  Collective over its grid; all ranks call `put` equally often.

    A matrix on a device is copied to the host one piece at a time.
    """
    for part, staged, start in _each(matrix, unit, progress):
        redistribute(part if part.device == HOST else part.to_host(), staged)
        with together(matrix.grid.comm):
            put(*start, staged.local)


def read_pieces(matrix: DistMatrix, get: Transfer, unit: tuple[int, ...], progress: Progress | None = None) -> None:
    """Read the matrix from the dataset.  Collective over its grid; all ranks call `get` equally often.

    A matrix on a device is copied from the host one piece at a time.
    """
    for part, staged, start in _each(matrix, unit, progress):
        with together(matrix.grid.comm):
            get(*start, staged.local)
            local = part.stored if part.device == HOST else np.empty(part.stored.shape, part.dtype, part.order)
        if local is part.stored:
            redistribute(staged, part)
            continue
        redistribute(staged, DistMatrix(local, part.grid, part.distribution, part.order))
        with together(matrix.grid.comm):
            set_elements(part.stored, local)


def file_checksum(
    shape: tuple[int, int], dtype: np.dtype, get: Transfer, unit: tuple[int, ...], comm: MPI.Intracomm
) -> str:
    """Return the checksum of the dataset, which equals the checksum of the matrix.  Collective."""
    return text(comm, file_sum(shape, dtype, get, unit, comm))


def sum_at(block: np.ndarray, row: int = 0, col: int = 0) -> np.ndarray:
    """Return the term of a block in the checksum of its matrix.   row, col : its first row and column.  Local."""
    rows, cols = block.shape
    return bilinear(block, np.arange(row, row + rows), np.arange(col, col + cols))


def file_sum(
    shape: tuple[int, int],
    dtype: np.dtype,
    get: Transfer,
    unit: tuple[int, ...],
    comm: MPI.Intracomm,
    start: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """Return this rank's term of the checksum of a dataset, or of its submatrix that begins at `start`.  Collective."""
    total = zero()
    for piece in cut(shape, unit, comm.size):
        row, col, own = piece.share(comm.rank)
        row, col = row + start[0], col + start[1]
        with together(comm):
            block = np.empty(own, dtype)
            get(row, col, block)
            total += sum_at(block, row, col)
    return total


def _each(
    matrix: DistMatrix, unit: tuple[int, ...], progress: Progress | None
) -> Iterator[tuple[DistMatrix, DistMatrix, tuple[int, int]]]:
    """Yield for each piece a view of the matrix, a buffer in the file's layout, and the start of this rank's block."""
    comm, base, notify = matrix.grid.comm, matrix.grid.base, GuardedCallback(progress)
    m, n = matrix.distribution.rows, matrix.distribution.cols
    pieces = cut(matrix.shape, unit, comm.size, (m.block * m.parts, n.block * n.parts))
    staged = None
    for number, piece in enumerate(pieces, 1):
        if staged is None or staged.distribution != piece.layout:
            staged = None  # free the buffer before the next one is allocated
            grid = base.work_grid(piece.layout.grid_shape, 1, tuple(range(comm.size)))
            staged = DistMatrix.empty(piece.layout.shape, grid=grid, block=piece.layout.block, dtype=matrix.dtype)
        rows, cols = (slice(*ends) for ends in zip(piece.start, piece.stop))
        row, col, _ = piece.share(comm.rank)
        yield matrix[rows, cols], staged, (row, col)
        notify(number, len(pieces))
    agree(comm, notify.error)
