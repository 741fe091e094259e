"""A dataset that is read as a matrix, whole or in parts, of which op is a factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdgemm.algorithms.protection import checksum
from pdgemm.errors import FileError
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import hdf5, hyperslabs, mpi_io, pieces
from pdgemm.io.atomic import on_root
from pdgemm.io.matrix_files import Progress, Transfer
from pdgemm.io.stored import CHANGED, Stored, changed_file, check_unchanged
from pdgemm.local.arrays.dtypes import STORED
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import DeviceName

Region = tuple[tuple[int, int], tuple[int, int]]  # its rows and columns, each the first and the one after the last


class ReadSums:
    """What a job has read of op(X), by sums of the elements as they came, in the order of the file.

    dtype : of the elements in memory.
    known : whether earlier jobs, whose sum is `total` on rank 0 and 0 elsewhere, have read a region.

    total : the sum of this rank; of all ranks together that of `protection.checksum`, where all of X was read.
    """

    def __init__(
        self, what: str, dtype: np.dtype, known: Callable[[Region], bool] = lambda region: False, total: int = 0
    ) -> None:
        self.dtype, self.total = dtype, np.array([total], np.uint64)
        self._what, self._known, self._sums = what, known, dict[Region, int]()

    def add(self, region: Region, read: np.ndarray) -> None:
        """Count a region.  Local; raises FileError if it was read before and had another sum."""
        if region not in self._sums and not self._known(region):
            self.total += read
        if self._sums.setdefault(region, now := int(read[0])) != now:
            raise FileError(f"{self._what} {CHANGED}")


class Source(NamedTuple):
    """A dataset that is to be read as a matrix.

    what   : the name of the matrix, for people.
    dataset : its file and its name in there.
    stored : what `hdf5.dataset_properties` returned.
    dtype  : type of the matrix.
    """

    what: str
    dataset: tuple[str, str]
    stored: Stored
    dtype: np.dtype
    op: str = "N"

    @property
    def transposed(self) -> bool:
        return self.op != "N"

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of op(matrix)."""
        rows, cols = self.stored.shape
        return (cols, rows) if self.transposed else (rows, cols)

    @property
    def ndim(self) -> int:
        """The dimensions of op(matrix): 1 for a column that is a dataset of one dimension."""
        return 2 if self.transposed else self.stored.ndim

    @property
    def nbytes(self) -> int:
        """The bytes of the dataset in its file."""
        return self.stored.shape[0] * self.stored.shape[1] * self.stored.dtype.itemsize

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns of op(matrix) that are read together."""
        rows, cols = self.stored.unit
        return (cols, rows) if self.transposed else (rows, cols)

    def read(
        self, grid: ProcessGrid, block: Block | None, device: DeviceName = "host", progress: Progress | None = None
    ) -> DistMatrix:
        """Return the matrix, or its transpose where op is not "N".  Collective; raises the errors of `hdf5.load`."""
        return hdf5.load(
            *self.dataset, grid, block, dtype=self.dtype, transpose=self.transposed, device=device, progress=progress
        )

    def is_same(self, other: Source) -> bool:
        """Are both the same elements, whatever their names?"""
        return self.stored.object == other.stored.object

    def checksum(self, grid: ProcessGrid, dtype: np.dtype | None = None) -> str:
        """Return the checksum of the elements as they are, of this type.  Collective; raises FileError."""
        with self.opened_alone(grid) as get:
            return pieces.file_checksum(self.stored.shape, dtype or self.stored.dtype, get, self.stored.unit, grid.comm)

    @contextmanager
    def opened_alone(self, grid: ProcessGrid, sums: ReadSums | None = None) -> Iterator[Transfer]:
        """Open the dataset for reads that each rank makes when it wants, in a thread of its own too.

        Collective; raises FileError if the file has changed since it was looked at, now or at the end.
        sums : of what is read in the block, all of it; then a file that has another time or owner at the end, or is
               another one, is read once more, and has changed only if the sums differ.
        """
        stored, comm = self.stored, grid.comm
        path, name = Path(self.dataset[0]), self.dataset[1]
        if stored.offset is not None and stored.dtype in STORED:
            way = mpi_io.opened_by_mpi_io(stored.file, stored.offset, stored.shape[1], stored.dtype, comm)
        else:
            way = hyperslabs.opened_by_hdf5(path, name, comm, False)
        on_root(comm, path, lambda: check_unchanged(f"{path}:{name}", stored))
        with way as transfer:
            yield transfer
        if sums is None:
            on_root(comm, path, lambda: check_unchanged(f"{path}:{name}", stored))
        elif (file := on_root(comm, path, lambda: changed_file(stored))) is not None:
            again = source(grid, self.what, self.dataset, self.dtype, self.op)
            same_shape, read = again.stored.shape == stored.shape, checksum.text(comm, sums.total)
            if not (same_shape and again.checksum(grid, sums.dtype) == read):
                raise FileError(f"{path}:{name}: {file} {CHANGED}")


def ndim_of_product(b: Source, entry: Source | None) -> int:
    """Return the dimensions of the dataset of C: 1 where op(B), or C on entry, is a column of one dimension."""
    return min(x.ndim for x in (b, entry) if x is not None)


def source(
    grid: ProcessGrid, what: str, dataset: tuple[str, str], dtype: str | np.dtype | None = None, op: str = "N"
) -> Source:
    """Look at a dataset.  Collective over the grid; raises the errors of `hdf5.load` that need no element."""
    stored, found = hdf5.dataset_properties(*dataset, grid, dtype)
    return Source(what, dataset, stored, found, op.upper())
