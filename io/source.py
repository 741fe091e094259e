"""A dataset that is read as a matrix, whole or in parts, for a product with op(matrix)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdgemm.algorithms.protection import checksum
from pdgemm.errors import FileError, LayoutError
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import hdf5, hyperslabs, mpi_io, npy, pieces
from pdgemm.io.atomic import on_root
from pdgemm.io.pieces import Transfer
from pdgemm.io.stored import CHANGED, Stored, changed_file, check_unchanged
from pdgemm.local.arrays.dtypes import STORED
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.text import op_name

_TURNED = {("N", "T"): "T", ("T", "T"): "N", ("N", "C"): "C", ("C", "C"): "N"}  # (op, letter): op of the turned one
Region = tuple[tuple[int, int], tuple[int, int]]  # (first, one after the last) of the rows and of the columns


class ReadSums:
    """Checksums of the regions of op(X) that a job has read, taken when they were read, in the order of the file.

    dtype : type of the elements in memory.

    The attribute `total` is the sum of this rank.  When all of X was read, the `total` of all ranks add up to
    `protection.checksum`.
    """

    def __init__(self, what: str, dtype: np.dtype) -> None:
        self.dtype, self.total = dtype, checksum.zero()
        self._what, self._sums = what, dict[Region, int]()

    def add(self, region: Region, read: np.ndarray) -> None:
        """Add the sum `read` of a region.  Local; raises FileError if the region was read before with another sum."""
        if region not in self._sums:
            self.total += read
        if self._sums.setdefault(region, now := int(read[0])) != now:
            raise FileError(f"{self._what} {CHANGED}")


class Source(NamedTuple):
    """A dataset that is to be read as a matrix.

    what   : the name of the matrix in messages.
    dataset : the file, and the name of the dataset in the file, "" in a .npy file.
    stored : the properties from `hdf5.dataset_properties` or `npy.array_properties`.
    dtype  : type of the matrix.
    op     : of the stored elements.   letter : of the user's argument; these differ for a .npy file in Fortran order.
    """

    what: str
    dataset: tuple[str, str]
    stored: Stored
    dtype: np.dtype
    op: str = "N"
    letter: str = "N"

    @property
    def op_name(self) -> str:
        """The name of op(matrix), such as "A^T", in titles."""
        return op_name(self.what, self.letter)

    @property
    def place(self) -> str:
        """The file, and the dataset in it, in messages."""
        return ":".join(filter(None, self.dataset))

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

    def turned(self, letter: str) -> Source:
        """Return the source of the transpose ("T") or of the conjugate transpose ("C"); op(matrix) for "N".

        Raises LayoutError where op(matrix) would be the conjugate of a dataset of complex elements.
        """
        now = self.op
        if letter == "N":
            return self
        if self.dtype.kind != "c":
            now, letter = ("T" if now == "C" else now), "T"
        if (now, letter) not in _TURNED:
            raise LayoutError("the conjugate of a matrix in a file is no view: load it, or conjugate the other operand")
        return self._replace(op=_TURNED[now, letter])

    def again(self, grid: ProcessGrid) -> Source:
        """Return the source with the properties that its dataset has now.  Collective."""
        return self._replace(stored=source(grid, self.what, self.dataset, self.dtype).stored)

    def read(self, grid: ProcessGrid, block: Block | None, **more: Any) -> DistMatrix:
        """Return the matrix, or its transpose where op is not "N".  Collective; raises the errors of `load`.

        more : arguments of `hdf5.load` or `npy.load`.
        """
        (path, name), how = self.dataset, {"dtype": self.dtype, "transpose": self.transposed, **more}
        if name:
            return hdf5.load(path, name, grid, block, **how)
        how["transpose"] ^= npy.array_properties(path, grid, self.dtype)[2]
        return npy.load(path, grid, block, **how)

    def is_same(self, other: Source) -> bool:
        """Return whether both sources are the same dataset, whatever its names."""
        return self.stored.object == other.stored.object

    def checksum(self, grid: ProcessGrid, dtype: np.dtype | None = None) -> str:
        """Return the checksum of the elements in this type, without op.  Collective; raises FileError."""
        with self.opened_alone(grid) as get:
            return pieces.file_checksum(self.stored.shape, dtype or self.stored.dtype, get, self.stored.unit, grid.comm)

    @contextmanager
    def opened_alone(self, grid: ProcessGrid, sums: ReadSums | None = None) -> Iterator[Transfer]:
        """Open the dataset for independent reads, which each rank makes at any time, also in a thread.

        Collective; raises FileError if the file has changed since its inspection, at the beginning or at the end.
        sums : receives the sums of all reads in the block.  A file that has another time or owner at the end, or that
               was replaced, is then read once more, and has changed only if the sums differ.
        """
        if grid.draft:  # a program is planned, in which this rank has no elements to read
            yield lambda row, col, elements: None
            return
        stored, comm = self.stored, grid.comm
        path, name = Path(self.dataset[0]), self.dataset[1]
        if stored.offset is not None and (stored.dtype in STORED or not name):
            way = mpi_io.opened_by_mpi_io(stored.file, stored.offset, stored.shape[1], stored.dtype, comm)
        else:
            way = hyperslabs.opened_by_hdf5(path, name, comm, False)
        on_root(comm, path, lambda: check_unchanged(self.place, stored))
        with way as transfer:
            yield transfer
        if sums is None:
            on_root(comm, path, lambda: check_unchanged(self.place, stored))
        elif (file := on_root(comm, path, lambda: changed_file(stored))) is not None:
            again = self.again(grid)
            same_shape, read = again.stored.shape == stored.shape, checksum.text(comm, sums.total)
            if not (same_shape and again.checksum(grid, sums.dtype) == read):
                raise FileError(f"{self.place}: {file} {CHANGED}")


def ndim_of_product(b: Source, entry: Source | None) -> int:
    """Return the dimensions of the dataset of C: 1 where op(B), or C on entry, is a column of one dimension."""
    return min(x.ndim for x in (b, entry) if x is not None)


def source(
    grid: ProcessGrid, what: str, dataset: tuple[str, str], dtype: str | np.dtype | None = None, op: str = "N"
) -> Source:
    """Inspect a dataset, or a .npy file, whose dataset has the name "".  Collective over the grid.

    Raises the errors of `hdf5.load` and `npy.load` that do not depend on elements, and that of `Source.turned`.
    """
    if dataset[1]:
        stored, matrix_dtype = hdf5.dataset_properties(*dataset, grid, dtype)
        return Source(what, dataset, stored, matrix_dtype, op.upper(), op.upper())
    stored, matrix_dtype, transposed = npy.array_properties(dataset[0], grid, dtype)
    return Source(what, dataset, stored, matrix_dtype, "T" if transposed else "N", op.upper()).turned(op.upper())
