"""Datasets of many matrices in one file, which is opened once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from pdgemm.io import dataset_access, pieces  # before h5py: these modules load MPI, which a parallel h5py needs

import h5py  # isort: skip
import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import checksums, texts
from pdgemm.errors import ArgumentError, FileError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.run_report import report_of_file
from pdgemm.instrument.spans import taking, timed
from pdgemm.io.atomic import on_root
from pdgemm.io.new_dataset import attributes, contiguous
from pdgemm.io.pieces import Progress, Transfer, check_dtypes
from pdgemm.io.stored import check_checksum, check_unchanged, check_verifiable, stored_datasets, write_attributes
from pdgemm.local.arrays.device import HOST, Array
from pdgemm.local.arrays.dtypes import STORED, element_type
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import allocated, device_on, is_readable, new_local
from pdgemm.support.agreement import together
from pdgemm.support.files import LOST, reserve, to_disk

_ALONE = 1, 1  # the unit of a contiguous dataset


class ManyDatasets:
    """Contiguous datasets of many matrices in a file, which is opened once for all.

    matrices : the matrices in memory.   offsets : the byte at which each dataset begins.   comm : the ranks of all
    matrices.
    The number of agreements of the ranks depends on the bytes of the matrices, and not on their number: small matrices
    are exchanged in parcels (`pieces.parcels`), and each is read or written as a whole by one rank.
    """

    def __init__(self, file: Path, matrices: Sequence[DistMatrix], offsets: list[int], comm: MPI.Intracomm) -> None:
        self._file, self._matrices, self._offsets, self._comm = file, matrices, offsets, comm
        self._parcels = pieces.parcels(self._matrices, comm.size)
        small = {number for parcel in self._parcels for number in parcel.numbers}
        self._large = [number for number, x in enumerate(self._matrices) if x.size and number not in small]

    def read(self) -> None:
        """Read all matrices.  Collective."""
        with self._opened(write=False) as transfers:
            for parcel in self._parcels:
                with together(self._comm):
                    wholes = self._own_wholes(parcel, transfers)
                pieces.spread_wholes(self._matrices, parcel, wholes, self._comm)
            for number in self._large:
                pieces.read_pieces(self._matrices[number], transfers[number], _ALONE)

    def write(self, progress: Progress) -> None:
        """Write all matrices.  Collective.   progress : called as progress(done, total) after each matrix."""
        done, total = count(1), len(self._matrices)
        for _ in range(sum(not x.size for x in self._matrices)):
            progress(next(done), total)
        with self._opened(write=True) as transfers:
            for parcel in self._parcels:
                wholes = pieces.whole_ones(self._matrices, parcel, self._comm)
                with together(self._comm):
                    for number, whole in wholes.items():
                        transfers[number](0, 0, whole)
                for _ in parcel.numbers:
                    progress(next(done), total)
            for number in self._large:
                pieces.write_pieces(self._matrices[number], transfers[number], _ALONE)
                progress(next(done), total)

    def check_elements(self, path: Path, recorded: list[str]) -> None:
        """Raise FileError, which names `path`, if the elements, read back, have other checksums.  Collective."""
        totals = np.zeros(len(self._matrices), np.uint64)
        with self._opened(write=False) as transfers:
            with together(self._comm):
                for parcel in self._parcels:
                    for number, whole in self._own_wholes(parcel, transfers).items():
                        totals[number] = pieces.sum_at(whole)[0]
            for number in self._large:
                x = self._matrices[number]
                totals[number] = pieces.file_sum(x.shape, x.dtype, transfers[number], _ALONE, self._comm)[0]
        if texts(self._comm, totals) != recorded:  # the same on every rank
            raise FileError(f"{path}: {LOST}")

    def _own_wholes(self, parcel: pieces.Parcel, transfers: list[Transfer]) -> dict[int, np.ndarray]:
        """Read the matrices of a parcel that are whole on this rank; return them by number.  Local."""
        wholes = pieces.new_wholes(self._matrices, parcel, self._comm)
        for number, whole in wholes.items():
            transfers[number](0, 0, whole)
        return wholes

    @contextmanager
    def _opened(self, write: bool) -> Iterator[list[Transfer]]:
        """Open the file on all ranks; yield a transfer of each dataset.  Collective."""
        with dataset_access.all_by_mpi_io(self._file, self._comm, write) as transfer_of:
            yield [transfer_of(at, x.shape[1], x.dtype) for at, x in zip(self._offsets, self._matrices)]


def create_datasets(partial: Path, matrices: Mapping[str, DistMatrix], checksums: list[str]) -> list[int]:
    """Create the datasets in a file that has none of them, and allocate their space; return their offsets.  Local."""
    offsets = list[int]()
    with h5py.File(partial, "r+") as file:
        for (name, x), checksum in zip(matrices.items(), checksums):
            dataset = file.create_dataset(name, x.shape, x.dtype, dcpl=contiguous())
            write_attributes(dataset, attributes(x.grid, x.distribution, x.dtype, checksum))
            offsets.append(dataset.id.get_offset() or 0)
    with partial.open("rb+") as reserved:
        reserve(reserved, partial.stat().st_size)
    return offsets


def check_datasets(partial: Path, path: Path, matrices: Mapping[str, DistMatrix], offsets: list[int]) -> None:
    """Raise FileError, which names `path`, if a dataset is not at its offset.  Local; the metadata are read back."""
    ends = [(at, at + x.size * x.dtype.itemsize) for at, x in zip(offsets, matrices.values())]
    to_disk(partial, max(ends, key=lambda x: x[1] - x[0]))
    try:
        with h5py.File(partial, "r") as file:
            there = [h5py.h5d.open(file.id, name.encode()).get_offset() or 0 for name in matrices]
    except Exception as bad:  # h5py raises many types for a damaged file
        raise FileError(f"{path}: {LOST}: {' '.join(str(bad).split())}") from None
    if there != offsets or partial.stat().st_size < max(ends)[1]:
        raise FileError(f"{path}: {LOST}")


def load_datasets(
    path: Path, names: Sequence[str], grid: ProcessGrid, layouts: Mapping[str, Mapping[str, Any]]
) -> dict[str, DistMatrix]:
    """Load the contiguous datasets of a file, as `hdf5.load` with `verify` loads each.  Collective.

    layouts : options of `load` by the names of datasets.

    The file is opened once, and the ranks agree once on all layouts, types and checksums.  A matrix's report has a
    share of the total seconds in proportion to its bytes.  Raises the errors of `load`, for the first bad dataset.
    """
    comm = grid.comm
    stored = on_root(comm, path, lambda: stored_datasets(path, names))
    stored = {name: x for name, x in stored.items() if x.offset is not None or 0 in x.shape}
    if not stored:
        return {}
    for name, dataset in stored.items():
        check_verifiable(dataset, f"{path}:{name}")

    def check(there: list[DistMatrix]) -> None:
        on_root(comm, path, lambda: check_unchanged(str(path), next(iter(stored.values()))))
        for (name, dataset), computed in zip(stored.items(), checksums(comm, there)):  # the same on every rank
            check_checksum(dataset, f"{path}:{name}", computed)

    return read_datasets("hdf5.load_all", path, stored, grid, layouts, STORED, check)


def read_datasets(
    call: str,
    path: Path,
    stored: Mapping[str, Any],
    grid: ProcessGrid,
    layouts: Mapping[str, Mapping[str, Any]],
    possible: tuple[np.dtype, ...],
    check: Callable[[list[DistMatrix]], object],
) -> dict[str, DistMatrix]:
    """Read contiguous datasets of a file as matrices, by name, in the wanted layouts and types.  Collective.

    call : the function that all ranks have called.   stored : the shape, dtype and offset of each dataset, by name.
    possible : the types that matrices can have.
    check : is called on all ranks with the matrices as they are in the file; raises on all ranks.
    """
    start, comm = perf_counter(), grid.comm
    matrices, wanted = _allocated_in_layouts(call, path, stored, grid, layouts, possible)
    there = [x.T if x.order == "F" else x for x in matrices]
    with timed("read", sum(x.local.nbytes for x in matrices)), taking(None):
        ManyDatasets(path, there, [x.offset or 0 for x in stored.values()], comm).read()
    check(there)
    with together(comm):
        loaded = {name: x.astype(dtype, copy=False) for name, x, dtype in zip(stored, matrices, wanted)}
    total, seconds = sum(x.nbytes for x in there), perf_counter() - start
    for (name, dataset), x in zip(stored.items(), there):
        what = (path, name), "mpi-io", (dataset.shape, dataset.dtype), x.nbytes, seconds * x.nbytes / max(1, total)
        loaded[name].report = report_of_file("read", *what, getattr(dataset, "checksum", None))
    return loaded


def checked_layouts(layouts: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Return the options of `load` for each matrix, by name.  Raises ArgumentError where they are invalid."""
    layouts = {} if layouts is None else layouts
    if not isinstance(layouts, Mapping) or not all(isinstance(x, Mapping) for x in layouts.values()):
        raise ArgumentError(f'layouts must be of the form {{"w": {{"block": 64}}}}, got {layouts!r:.60}')
    wanted = {str(name): dict(options) for name, options in layouts.items()}
    for name, options in wanted.items():
        if unknown := set(options) - {"block", "source", "dtype", "transpose", "device"}:
            raise ArgumentError(f"layouts[{name!r}]: load has no option {', '.join(map(str, unknown))}")
    return wanted


def _allocated_in_layouts(
    call: str,
    path: Path,
    stored: Mapping[str, Any],
    grid: ProcessGrid,
    layouts: Mapping[str, Mapping[str, Any]],
    possible: tuple[np.dtype, ...],
) -> tuple[list[DistMatrix], list[np.dtype]]:
    """Return a matrix for each dataset, of the dataset's type and in the wanted layout; and the wanted types.

    Arguments are those of `read_datasets`.  Matrices that are wanted transposed have arrays in Fortran order.
    Collective over the grid.
    """
    options = [{"block": None, "source": (0, 0), "dtype": None, **layouts.get(name, {})} for name in stored]
    places = [device_on(grid, each.get("device", HOST)) for each in options]

    def allocate() -> tuple[list[DistMatrix], list[np.dtype]]:
        arrays, wanted = list[tuple[Array, ProcessGrid, Distribution, Order]](), list[np.dtype]()
        with (agreement := together(grid.comm)) as arguments:
            arguments += [call, path]
            for (name, there), each, device in zip(stored.items(), options, places):
                wanted.append(there.dtype if each["dtype"] is None else element_type(each["dtype"]))
                check_dtypes(f"{path}:{name}", there.dtype, wanted[-1], possible)
                order: Order = "F" if each.get("transpose") else "C"
                shape = there.shape[::-1] if order == "F" else there.shape
                local, layout = new_local(grid, shape, each["block"], each["source"], there.dtype, order, device)
                arrays.append((local, grid, layout, order))
                arguments += [name, layout, wanted[-1], order]
            agreement.flag = not all(is_readable(local, grid) for local, *_ in arrays)
        return [DistMatrix(*x, shared=not agreement.flag) for x in arrays], wanted

    return allocated(grid.comm, allocate)
