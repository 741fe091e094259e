"""A new dataset in a temporary file, which takes the name of the old file when the dataset is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pdgemm.io import boxes, dataset_access  # before h5py: these modules load MPI, which a parallel h5py needs

import h5py  # isort: skip
import numpy as np

import pdgemm
from pdgemm.errors import FileError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.run_report import RunReport, report_of_file
from pdgemm.io.atomic import check_writable_on_all, on_root, replacing
from pdgemm.io.pieces import Transfer
from pdgemm.io.stored import Old, access_unit, check_target, old, stored_dataset, write_attributes
from pdgemm.support.files import LOST, check_replaced, reserve, to_disk

_CHECKSUM = "pdgemm_checksum"


class NewDataset:
    """A dataset that is written to a file with a temporary name.  All methods are collective over the grid.

    layout : the layout of the matrix in memory, which attributes record; of a tensor, that of its unfolding.
    checksum : the checksum of the matrix; None: not known yet.
    ndim : dimensions of the dataset; 1: the matrix has one column.
    extents : the extents of a tensor, at least two; None: the shape of the matrix.
    unit : indices along each axis that are written together.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        grid: ProcessGrid,
        layout: Distribution,
        dtype: np.dtype,
        checksum: str | None = None,
        ndim: int = 2,
        extents: tuple[int, ...] | None = None,
    ) -> None:
        self._path, self._name, self._comm, self._dtype = path, name, grid.comm, dtype
        self._extents: tuple[int, ...] = layout.shape if extents is None else extents
        self._attributes = attributes(grid, layout, dtype, checksum)
        self._nbytes = layout.shape[0] * layout.shape[1] * dtype.itemsize
        self._parallel, self._chunked, self._ndim = dataset_access.parallel_h5py(), False, ndim
        self.checksum, self._links = checksum, set[bytes]()  # all links of the file, on rank 0

    @contextmanager
    def replacing(
        self, replaces: RunReport | None = None, overwrite: bool = True, storage: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """Create the dataset, which the block writes and completes.  The block raises on all ranks or on none.

        replaces, overwrite : as in `hdf5.save`.   storage : chunks and compression; None: the dataset is contiguous.
        """
        size = 0 if storage and storage.get("compression") else self._nbytes
        with replacing(self._path, self._comm, size) as partial:
            on_root(self._comm, self._path, lambda: _check_replaced(self._path, self._name, replaces, overwrite))
            self.create(partial, storage)
            yield

    def create(self, partial: Path, storage: dict[str, Any] | None = None) -> None:
        """Create the dataset in a file, and allocate its space.

        If the old file has other contents than this dataset, the new file begins as a copy of the old one.  The copy
        keeps references, links, user block and all else; HDF5 reuses the space of the deleted dataset.
        """
        self._partial = partial
        chunked = {name: value for name, value in (storage or {}).items() if value and self._nbytes}
        self._chunked = bool(chunked)
        self._offset, self.unit = on_root(self._comm, self._path, lambda: self._create(chunked))

    def reopen(self, partial: Path) -> None:
        """Continue with the contiguous dataset in a file, which has the shape and the type of this one."""
        self._partial = partial
        stored = on_root(self._comm, self._path, lambda: stored_dataset(partial, self._name))
        self._offset, self.unit = stored.offset or 0, stored.unit

    def opened(self, write: bool) -> AbstractContextManager[Transfer]:
        """Open the dataset.  Transfers of boxes are collective if h5py is parallel, or if chunks are written."""
        if self._parallel:
            return dataset_access.opened_by_hdf5(self._partial, self._name, self._comm, True, write=write)
        if self._chunked and write:
            return dataset_access.opened_by_one(self._partial, self._name, self._comm)
        if self._chunked:
            return dataset_access.opened_by_hdf5(self._partial, self._name, self._comm, False)
        return self.opened_alone(write)

    def opened_alone(self, write: bool) -> AbstractContextManager[Transfer]:
        """Open a dataset without chunks for independent transfers, which each rank may make at any time."""
        array = self._offset, self._extents, self._dtype
        return dataset_access.opened_by_mpi_io(self._partial, *array, self._comm, write=write)

    def complete(self, checksum: str, check: bool) -> None:
        """Record the checksum of the elements.  Raises FileError if the elements, read back, have another checksum.

        check : whether to read the elements back.
        """
        if check and self._nbytes:
            with self.opened(write=False) as transfer:
                held = boxes.dataset_checksum(self._extents, self._dtype, transfer, self.unit, self._comm)
            if held != checksum:  # the same on every rank
                raise FileError(f"{self._path}: {LOST}")
        if self.checksum != checksum:
            self.checksum = checksum
            on_root(self._comm, self._path, self._record)
        on_root(self._comm, self._path, self.check_held)

    @property
    def place(self) -> tuple[str, str]:
        """The file and the name to read the dataset from before it is complete."""
        return str(self._partial), self._name

    def report(self, seconds: float) -> RunReport:
        method = "mpio" if self._parallel else "one writer" if self._chunked else "mpi-io"
        array = self._extents[: self._ndim], self._dtype
        return report_of_file("wrote", (self._path, self._name), method, array, self._nbytes, seconds, self.checksum)

    def _create(self, storage: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
        """Create the dataset on rank 0, and return its offset in the file and its `access_unit`."""
        partial, name = self._partial, self._name
        if not check_target(self._path, name):
            shutil.copyfile(self._path, partial)
        storage = storage or {"dcpl": contiguous()}
        with h5py.File(partial, "a") as file:
            if file.get(name, getlink=True):
                del file[name]
            dataset = file.create_dataset(name, self._extents[: self._ndim], self._dtype, **storage)
            write_attributes(dataset, self._attributes)
            self._links = _links(file)
            place = dataset.id.get_offset() or 0, access_unit(dataset)
        if not self._chunked:
            with partial.open("rb+") as reserved:
                reserve(reserved, partial.stat().st_size)
        return place

    def _record(self) -> None:
        with h5py.File(self._partial, "r+") as file:
            write_attributes(file[self._name], {_CHECKSUM: self.checksum})

    def check_held(self) -> None:
        """Raise FileError if the new file has lost metadata or links that were written to it, as after a disk fault.

        Local.  The metadata are read back from the disk, because a storage may lose only the metadata.
        """
        to_disk(self._partial, (self._offset, self._offset + (self._nbytes if self._offset else 0)))
        try:
            held = stored_dataset(self._partial, self._name)
            with h5py.File(self._partial, "r") as file:
                links = _links(file)
        except Exception as bad:  # h5py raises many types for a damaged file
            raise FileError(f"{self._path}: {LOST}: {' '.join(str(bad).split())}") from None
        there = held.extents, held.dtype, held.offset or 0, held.checksum
        if there != (self._extents, self._dtype, self._offset, self.checksum) or not self._links <= links:
            raise FileError(f"{self._path}: {LOST}: {self._name} is {held.extents} {held.dtype} in it")


def contiguous() -> Any:
    """Return the properties of a dataset that is allocated at once, contiguously, without writing fill values."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return plist


def _links(file: h5py.File) -> set[bytes]:
    """Return the names of all links in a file."""
    names, root = set[bytes](), file["/"]
    root.id.links.visit(names.add)
    return names


def check_savable(path: Path, name: str, grid: ProcessGrid, size: int) -> Old | None:
    """Check that a dataset of `size` bytes can be saved here; return the dataset that it would replace, or None.

    Collective; raises FileError on every rank.
    """
    on_root(grid.comm, path, lambda: check_target(path, name))
    check_writable_on_all(path, grid.comm, size)
    return on_root(grid.comm, path, lambda: old(path, name))


def attributes(grid: ProcessGrid, layout: Distribution, dtype: np.dtype, checksum: str | None) -> dict[str, str]:
    """Return the attributes that pdgemm writes to a dataset."""
    placed = {"grid": grid.shape, "block": layout.block, "source": layout.source}
    origin = {"pdgemm_version": pdgemm.__version__, "pdgemm_dtype": str(dtype)}
    return {**origin, "pdgemm_layout": json.dumps(placed)} | ({_CHECKSUM: checksum} if checksum else {})


def _check_replaced(path: Path, name: str, read: RunReport | None, overwrite: bool) -> None:
    """Raise an error where a dataset may not be replaced, or was replaced since it was read.

    The caller holds the lock of the file.
    """
    check_target(path, name)
    if read is None:
        there = old(path, name)
        check_replaced(f"{path}:{name}", there is None or there.by_pdgemm, overwrite)
        return
    current = stored_dataset(path, name)
    if (current.extents[: current.ndim], str(current.dtype), current.checksum) != (
        read.shape,
        read.dtype,
        read.checksum,
    ):
        raise FileError(f"{path}:{name} was replaced after it was read here, and was not overwritten: try again")
