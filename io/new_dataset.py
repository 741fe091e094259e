"""A dataset that is written and takes its place, and that of its file, when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pdgemm.io import (
    hyperslabs,
    mpi_io,  # before h5py: they load MPI, which a parallel h5py needs
    pieces,
)

import h5py  # isort: skip
import numpy as np

import pdgemm
from pdgemm.errors import FileError, PdgemmError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.report import IOReport
from pdgemm.io.atomic import check_writable_on_all, on_root, replacing
from pdgemm.io.attributes import write_attributes
from pdgemm.io.matrix_files import Transfer
from pdgemm.io.stored import Old, access_unit, check_target, old, stored_dataset
from pdgemm.support.files import LOST, reserve, to_disk

_CHECKSUM = "pdgemm_checksum"


class NewDataset:
    """A dataset in a file that is not under its name yet.  All methods are collective over the grid.

    ndim : of the dataset; 1: the matrix has one column.
    unit : rows and columns that are written together.
    """

    def __init__(
        self,
        partial: Path,
        path: Path,
        name: str,
        grid: ProcessGrid,
        shape: tuple[int, int],
        dtype: np.dtype,
        checksum: str | None,
        ndim: int = 2,
    ) -> None:
        self._ndim, self._chunked = ndim, False
        self._partial, self._path, self._name, self._comm = partial, path, name, grid.comm
        self._shape, self._dtype = shape, dtype
        self._parallel = hyperslabs.parallel_h5py()
        self._links = set[bytes]()  # of the whole file, on rank 0
        self.checksum = checksum

    def copy_others(self) -> None:
        """Begin with a copy of the old file, if it has more than this dataset.

        It keeps references, links, user block and all else; HDF5 reuses the space of the deleted dataset.
        """
        path = self._path

        def copy() -> None:
            if not check_target(path, self._name):
                shutil.copyfile(path, self._partial)

        on_root(self._comm, path, copy)

    def create(self, attributes: dict[str, str], storage: dict[str, Any]) -> None:
        """Create the dataset, allocated, and the file where there is none."""
        elements = self._shape[0] * self._shape[1]
        storage = {name: value for name, value in storage.items() if value and elements}
        self._chunked = bool(storage)
        made = on_root(self._comm, self._path, lambda: self._create(attributes, storage))
        self._offset, self.unit = made

    def reopen(self) -> None:
        """Go on with the dataset as it is in the file.  Raises FileError if it is another one."""
        name, found = self._name, on_root(self._comm, self._path, lambda: stored_dataset(self._partial, self._name))
        empty = not self._shape[0] * self._shape[1]
        if (found.shape, found.dtype) != (self._shape, self._dtype) or (found.offset is None and not empty):
            raise FileError(f"{self._partial}:{name} is {found.shape} {found.dtype}, not {self._shape} {self._dtype}")
        self._offset, self.unit = found.offset or 0, found.unit

    def opened(self, write: bool) -> AbstractContextManager[Transfer]:
        """Open it for transfers of rectangles, which are collective where h5py is built with MPI."""
        if self._parallel:
            return hyperslabs.opened_by_hdf5(self._partial, self._name, self._comm, True, write=write)
        if self._chunked and write:
            return hyperslabs.opened_by_one(self._partial, self._name, self._comm)
        if self._chunked:
            return hyperslabs.opened_by_hdf5(self._partial, self._name, self._comm, False)
        return self.opened_alone(write)

    def opened_alone(self, write: bool) -> AbstractContextManager[Transfer]:
        """The same of a dataset without chunks, for transfers that each rank makes when it wants."""
        cols = self._shape[1]
        return mpi_io.opened_by_mpi_io(self._partial, self._offset, cols, self._dtype, self._comm, write=write)

    def complete(self, checksum: str, check: bool) -> None:
        """Record the checksum of what was written.  Raises FileError if the file, read back, has another one.

        What describes the dataset in its file is read back from the disk in any case: a storage may lose that alone.
        """
        if check and self._shape[0] * self._shape[1]:
            with self.opened(write=False) as transfer:
                held = pieces.file_checksum(self._shape, self._dtype, transfer, self.unit, self._comm)
            if held != checksum:  # on every rank alike
                raise FileError(f"{self._path}: {LOST}")
        if self.checksum != checksum:
            self.checksum = checksum
            on_root(self._comm, self._path, self._record)
        on_root(self._comm, self._path, self._check_held)

    @property
    def place(self) -> tuple[str, str]:
        """File and name under which it can be read before it is complete."""
        return str(self._partial), self._name

    def report(self, seconds: float) -> IOReport:
        method = "mpio" if self._parallel else "one writer" if self._chunked else "mpi-io"
        nbytes = self._shape[0] * self._shape[1] * self._dtype.itemsize
        what = str(self._path), self._name, method, self._shape, str(self._dtype)
        return IOReport("wrote", *what, nbytes, seconds, self.checksum)

    def _create(self, attributes: dict[str, str], storage: dict[str, Any]) -> tuple[int, tuple[int, int]]:
        """Return the offset of the dataset, and its unit.  On rank 0."""
        partial, name = self._partial, self._name
        if not self._chunked:  # allocate it now, contiguously, without writing fill values
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.CONTIGUOUS)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            storage = {"dcpl": plist}
        with h5py.File(partial, "a") as file:
            if file.get(name, getlink=True):
                del file[name]
            dataset = file.create_dataset(name, self._shape[: self._ndim], self._dtype, **storage)
            write_attributes(dataset, attributes)
            self._links = _links(file)
            place = dataset.id.get_offset() or 0, access_unit(dataset)
        if not self._chunked:
            with partial.open("rb+") as reserved:
                reserve(reserved, partial.stat().st_size)
        return place

    def _record(self) -> None:
        with h5py.File(self._partial, "r+") as file:
            write_attributes(file[self._name], {_CHECKSUM: self.checksum})

    def _check_held(self) -> None:
        """Raise FileError where the new file does not hold what was written to it, as after a fault of the disk."""
        nbytes = self._shape[0] * self._shape[1] * self._dtype.itemsize if self._offset else 0
        to_disk(self._partial, (self._offset, self._offset + nbytes))
        try:
            held = stored_dataset(self._partial, self._name)
            with h5py.File(self._partial, "r") as file:
                links = _links(file)
        except (
            PdgemmError,
            OSError,
            RuntimeError,
            KeyError,
            ValueError,
        ) as bad:  # h5py has many for one that is damaged
            raise FileError(f"{self._path}: {LOST}: {' '.join(str(bad).split())}") from None
        there = held.shape, held.dtype, held.offset or 0, held.checksum
        if there != (self._shape, self._dtype, self._offset, self.checksum) or not self._links <= links:
            raise FileError(f"{self._path}: {LOST}: {self._name} is {held.shape} {held.dtype} there")


def _links(file: h5py.File) -> set[bytes]:
    """Return the names of all links in a file."""
    names, root = set[bytes](), file["/"]
    root.id.links.visit(names.add)
    return names


@contextmanager
def new_dataset(
    path: Path,
    name: str,
    grid: ProcessGrid,
    layout: Distribution,
    dtype: np.dtype,
    checksum: str | None = None,
    replaces: IOReport | None = None,
    storage: dict[str, Any] | None = None,
    ndim: int = 2,
) -> Iterator[NewDataset]:
    """Write a dataset in the block, which calls `complete`.  Collective; the block raises on all ranks or on none.

    layout   : of the matrix in memory, which attributes record.   checksum : None: it is not known yet.
    replaces, ndim : as in `hdf5.save`.   storage : chunks and compression; None: the dataset is contiguous.
    """
    storage = storage or {}
    size = 0 if storage.get("compression") else layout.shape[0] * layout.shape[1] * dtype.itemsize
    with replacing(path, grid.comm, size) as partial:
        if replaces is not None:
            on_root(grid.comm, path, lambda: _check_same(path, name, replaces))
        made = NewDataset(partial, path, name, grid, layout.shape, dtype, checksum, ndim)
        made.copy_others()
        made.create(attributes(grid, layout, dtype, checksum), storage)
        yield made


def check_savable(path: Path, name: str, grid: ProcessGrid, size: int) -> Old | None:
    """Check that a dataset of `size` bytes can be saved here, and return the one that it would replace.

    Collective; raises FileError on every rank.
    """
    on_root(grid.comm, path, lambda: check_target(path, name))
    check_writable_on_all(path, grid.comm, size)
    return on_root(grid.comm, path, lambda: old(path, name))


def attributes(grid: ProcessGrid, layout: Distribution, dtype: np.dtype, checksum: str | None) -> dict[str, str]:
    """Return the attributes of a dataset that is written."""
    placed = {"grid": grid.shape, "block": layout.block, "source": layout.source}
    made_by = {"pdgemm_version": pdgemm.__version__, "pdgemm_dtype": str(dtype)}
    return {**made_by, "pdgemm_layout": json.dumps(placed)} | ({_CHECKSUM: checksum} if checksum else {})


def _check_same(path: Path, name: str, read: IOReport) -> None:
    """Raise FileError if the dataset is not the one that was read; the caller holds the lock of the file."""
    found = stored_dataset(path, name)
    if (found.shape, str(found.dtype), found.checksum) != (read.shape, read.dtype, read.checksum):
        raise FileError(f"{path}:{name} was replaced after it was read here, and was not overwritten: try again")
