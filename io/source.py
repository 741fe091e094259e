"""A dataset that is read as a matrix, whole or in parts, for a product with op(matrix)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.lib import format as npy_format

from pdgemm.algorithms.protection import checksum
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.rectangles import Rectangle
from pdgemm.instrument.observer import Observer
from pdgemm.instrument.run_report import RunReport, report_of_file
from pdgemm.instrument.spans import taking, timed
from pdgemm.io import dataset_access, pieces
from pdgemm.io.atomic import on_root
from pdgemm.io.pieces import Progress, Transfer, check_dtypes, within
from pdgemm.io.stored import (
    CHANGED,
    Stored,
    changed_file,
    check_checksum,
    check_unchanged,
    check_verifiable,
    stored_dataset,
)
from pdgemm.local.arrays.arguments import as_range
from pdgemm.local.arrays.dtypes import STORED, TYPE, element_type
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together
from pdgemm.support.file_states import ordinary, settled, state_of
from pdgemm.support.files import naming
from pdgemm.support.text import op_name

# version 3 differs from version 2 in the encoding of field names, and a matrix of numbers has no fields
_HEADERS = dict.fromkeys([(2, 0), (3, 0)], npy_format.read_array_header_2_0) | {
    (1, 0): npy_format.read_array_header_1_0
}

Region = tuple[tuple[int, int], tuple[int, int]]  # (first, one after the last) of the rows and of the columns


class ReadSums:
    """Checksums of the regions of op(X) that this rank has read, with the row and column numbers of the file.

    dtype : type of the elements in memory.

    The attribute `total` is the sum of this rank.  When all of X was read, the totals of all ranks add up to
    `protection.checksum`.
    """

    def __init__(self, what: str, dtype: np.dtype) -> None:
        self.dtype, self.total = dtype, checksum.zero()
        self._what, self._sums = what, dict[Region, int]()

    def add(self, region: Region, read: np.ndarray) -> None:
        """Add the checksum `read` of a region.  Local; raises FileError if an earlier read had another checksum."""
        if region not in self._sums:
            self.total += read
        if self._sums.setdefault(region, now := int(read[0])) != now:
            raise FileError(f"{self._what} {CHANGED}")


class Source(NamedTuple):
    """A dataset that is to be read as a matrix.

    what   : the name of the matrix in messages.
    dataset : the file, and the name of the dataset in the file, "" in a .npy file.
    stored : the properties of the dataset, or of the array in a .npy file, as a matrix with contiguous rows.
    dtype  : type of the matrix.
    op     : op that is applied to the stored elements.   letter : op that the user named.  The two differ for a .npy
             file in Fortran order.
    by_columns : the rows of `stored` are columns of the array, as in a .npy file in Fortran order.
    """

    what: str
    dataset: tuple[str, str]
    stored: Stored
    dtype: np.dtype
    op: str = "N"
    letter: str = "N"
    by_columns: bool = False

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
        """The number of dimensions of op(matrix): 1 for a column that is a dataset of one dimension."""
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
        """Return the source of the transpose ("T") or conjugate transpose ("C") of op(matrix); for "N", this source.

        Raises LayoutError where op(matrix) would be the conjugate of a dataset of complex elements.
        """
        now = self.op
        if letter == "N":
            return self
        if self.dtype.kind != "c":
            now, letter = ("T" if now == "C" else now), "T"
        if now not in ("N", letter):
            raise LayoutError("a matrix in a file has no conjugate view: load it, or conjugate the other operand")
        return self._replace(op=letter if now == "N" else "N")

    def again(self, grid: ProcessGrid) -> Source:
        """Inspect the dataset again, and return the source with its current properties.  Collective."""
        return self._replace(
            stored=source(grid, self.what, self.dataset, self.dtype, tensor=self.stored.ndim > 2).stored
        )

    def read(
        self,
        grid: ProcessGrid,
        block: Block | None,
        rows: Any = None,
        cols: Any = None,
        verify: bool = False,
        progress: Progress | None = None,
        **layout: Any,
    ) -> DistMatrix:
        """Return the matrix, or its transpose where op is not "N".  Collective; raises the errors of `load`.

        rows, cols, verify, progress : as in `hdf5.load`, where rows and columns are those of the array in the file.
        layout : the other arguments of `DistMatrix.empty`.
        """
        start, comm, stored = perf_counter(), grid.comm, self.stored
        of_array = stored.shape[::-1] if self.by_columns else stored.shape
        with together(comm):
            part = Rectangle(as_range(rows, "rows", of_array[0]), as_range(cols, "cols", of_array[1]))
            whole = part.shape == of_array
            carried, collective = self.way(verify, None if whole else part)
        in_file = part._replace(rows=part.cols, cols=part.rows) if self.by_columns else part
        shape = in_file.shape[::-1] if self.transposed else in_file.shape
        layout |= {"block": block, "dtype": carried, "order": "F" if self.transposed else "C"}
        matrix = DistMatrix.empty(shape, grid=grid, **layout)
        there = matrix.T if self.transposed else matrix
        with timed("read", matrix.local.nbytes), taking(None):
            with self.opened(comm, collective, stored.shape) as transfer:
                pieces.read_pieces(there, within(transfer, in_file), stored.unit, progress)
            on_root(comm, Path(self.dataset[0]), lambda: check_unchanged(self.place, stored))
        if verify:
            check_checksum(stored, self.place, checksum.checksum(there))  # the same on every rank
        matrix = matrix.astype(self.dtype, copy=False)
        matrix.report = self.report(collective, of_array, part.size, start, None if whole else part)
        return matrix

    def way(self, verify: bool, part: Any) -> tuple[np.dtype, bool]:
        """Return the type in which elements are read, and whether transfers are collective.   part : None for all."""
        stored, carried = self.stored, self.dtype
        if verify:  # the checksum is that of the stored bits, without conversion
            if part is not None:
                raise ArgumentError(f"{self.place}: verify needs the whole dataset, not {part}")
            check_verifiable(stored, self.place)
            carried = stored.dtype
        elif carried.kind == "c" and stored.dtype.kind != "c" and self.dataset[1]:
            carried = np.empty(0, carried).real.dtype  # HDF5 cannot convert real to complex numbers
        return carried, bool(self.dataset[1]) and not stored.scattered and dataset_access.parallel_h5py()

    def report(self, collective: bool, of_array: tuple[int, ...], size: int, start: float, part: Any) -> RunReport:
        """Return the report of a read of `size` elements that began at `start`.   part : None for all."""
        method = "mpio" if collective else "mpi-io" if self._contiguous else "independent"
        stored = self.stored
        array, nbytes = (of_array[: stored.ndim], stored.dtype), size * stored.dtype.itemsize
        what = self.dataset, method, array, nbytes, perf_counter() - start, stored.checksum
        return report_of_file("read", *what, part)

    def read_again(self, say: Observer, grid: ProcessGrid, block: Block | None, **layout: Any) -> DistMatrix:
        """Inspect the dataset again, and read it as `read` does.   say : receives progress and the report."""
        with say.progress(f"read {self.what}", self.nbytes, "B/s") as progress:
            matrix = self.again(grid).read(grid, block, progress=progress, **layout)
        say.report("read", matrix.report)
        return matrix

    def is_same(self, other: Source) -> bool:
        """Return whether both sources are the same dataset, whatever its names."""
        return self.stored.object == other.stored.object

    def checksum(self, grid: ProcessGrid, dtype: np.dtype | None = None) -> str:
        """Return the checksum of the stored elements, read as `dtype`, without op.  Collective; raises FileError."""
        with self.opened_alone(grid) as get:
            return pieces.file_checksum(self.stored.shape, dtype or self.stored.dtype, get, self.stored.unit, grid.comm)

    @contextmanager
    def opened_alone(self, grid: ProcessGrid, sums: ReadSums | None = None) -> Iterator[Transfer]:
        """Open the dataset for independent reads, which each rank may make at any time, also in a thread.

        Collective; raises FileError if the file has changed since its inspection, at the beginning or at the end.
        sums : receives the sums of all reads in the block.  A file that has another time or owner at the end, or that
               was replaced, is read once more if `sums` is given, and counts as changed only if the sums differ.
        """
        if grid.draft:  # a program is planned, in which this rank has no elements to read
            yield lambda row, col, elements: None
            return
        stored, comm, path = self.stored, grid.comm, Path(self.dataset[0])
        on_root(comm, path, lambda: check_unchanged(self.place, stored))
        with self.opened(comm, False, stored.shape) as transfer:
            yield transfer
        if sums is None:
            on_root(comm, path, lambda: check_unchanged(self.place, stored))
        elif (file := on_root(comm, path, lambda: changed_file(stored))) is not None:
            again = self.again(grid)
            same_shape, read = again.stored.shape == stored.shape, checksum.text(comm, sums.total)
            if not (same_shape and again.checksum(grid, sums.dtype) == read):
                raise FileError(f"{self.place}: {file} {CHANGED}")

    @property
    def _contiguous(self) -> bool:
        """Whether the elements can be read by MPI-IO at their offset in a file."""
        return self.stored.offset is not None and (self.stored.dtype in STORED or not self.dataset[1])

    def opened(
        self, comm: MPI.Intracomm, collective: bool, extents: tuple[int, ...]
    ) -> AbstractContextManager[Transfer]:
        """Open the dataset: with MPI-IO where its bytes are contiguous in a file, else through HDF5.  Collective.

        extents : those of the dataset, or its shape as a matrix.
        """
        (path, name), stored = self.dataset, self.stored
        if collective or not self._contiguous:
            return dataset_access.opened_by_hdf5(Path(path), name, comm, collective)
        assert stored.offset is not None
        return dataset_access.opened_by_mpi_io(stored.file, stored.offset, extents, stored.dtype, comm)


def ndim_of_product(b: Source, entry: Source | None) -> int:
    """Return the dimensions of the dataset of C: 1 where op(B), or C on entry, is a column of one dimension."""
    return min(x.ndim for x in (b, entry) if x is not None)


def source(
    grid: ProcessGrid, what: str, dataset: tuple[str, str], dtype: Any = None, op: str = "N", tensor: bool = False
) -> Source:
    """Inspect a dataset, or a .npy file, and return its source.  Collective over the grid.

    dataset : the file, and the name of the dataset in it, "" for a .npy file.
    tensor  : the dataset may have more than two dimensions.

    Raises the errors of `hdf5.load` and `npy.load` that do not depend on elements, and that of `Source.turned`.
    """
    path, name = Path(dataset[0]), dataset[1]
    place, possible = (f"{path}:{name}", STORED) if name else (str(path), tuple(TYPE))
    stored, by_columns = on_root(
        grid.comm, path, lambda: (stored_dataset(path, name), False) if name else _stored_array(path)
    )
    with together(grid.comm):
        if stored.ndim > 2 and not tensor:
            extents = stored.extents[::-1] if by_columns else stored.extents
            raise LayoutError(f"{place} is neither a matrix nor a vector: its shape is {extents}")
        wanted = stored.dtype if dtype is None else element_type(dtype)
        wanted = wanted if name else wanted.newbyteorder("=")
        check_dtypes(place, stored.dtype, wanted, possible)
    letter = op.upper()
    if not by_columns:
        return Source(what, dataset, stored, wanted, letter, letter)
    return Source(what, dataset, stored, wanted, "T", letter, by_columns).turned(letter)


def _stored_array(path: Path) -> tuple[Stored, bool]:
    """Return the properties of the array of a .npy file, and whether it is in Fortran order.

    The rows of the Stored are contiguous.  Raises FileError, LayoutError or DTypeError.
    """
    with naming(path), open(path, "rb", opener=ordinary) as file:
        try:
            version = npy_format.read_magic(file)
        except ValueError:
            raise FileError(f"{path}: it is not a .npy file") from None
        if version not in _HEADERS:
            raise FileError(f"{path}: version {version[0]}.{version[1]} of the .npy format is not known")
        shape, fortran_order, dtype = _HEADERS[version](file)
        offset, current, before = file.tell(), state_of(file.fileno()), settled(path)
    if not shape:
        raise LayoutError(f"{path} is neither a matrix nor a vector: its shape is {shape}")
    fortran_order = fortran_order and len(shape) > 1
    if min(shape) < 0:
        raise FileError(f"{path} is damaged: its header says that its shape is {shape}")
    if dtype.kind not in "biufc":
        raise DTypeError(f"{path} holds {dtype}, which are not numbers")
    end = offset + prod(shape) * dtype.itemsize
    if end > current.size:
        raise FileError(f"{path} is truncated: its elements end at byte {end}, the file at {current.size}")
    if current != before:
        raise FileError(f"{path} {CHANGED}")
    extents = (*shape, 1)[: max(2, len(shape))]
    identity = current.device, current.inode, offset
    stored = Stored(
        extents=extents[::-1] if fortran_order else extents,
        dtype=dtype,
        file=path,
        offset=offset,
        states={(path, current)},
        object=identity,
        objects={identity},
        ndim=len(shape),
        unit=(1,) * len(extents),
    )
    return stored, fortran_order
