"""Datasets of many matrices in one file, which is opened once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from pdgemm.io import mpi_io, pieces  # before h5py: these modules load MPI, which a parallel h5py needs

import h5py  # isort: skip
import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import bilinear, texts
from pdgemm.errors import FileError
from pdgemm.io.attributes import write_attributes
from pdgemm.io.new_dataset import attributes, contiguous
from pdgemm.io.pieces import Progress, Transfer
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together
from pdgemm.support.files import LOST, reserve, to_disk

_ALONE = 1, 1  # the unit of a contiguous dataset


class NewDatasets:
    """Contiguous datasets of many matrices in a file that still has a temporary name, which is opened once for all.

    matrices, checksums : by the names of the datasets.   comm : has the ranks of all matrices.
    The number of agreements of the ranks depends on the bytes of the matrices, and not on their number: small matrices
    travel in parcels (`pieces.parcels`), and a rank writes whole ones.
    """

    def __init__(
        self, partial: Path, path: Path, matrices: Mapping[str, DistMatrix], checksums: list[str], comm: MPI.Intracomm
    ) -> None:
        self._partial, self._path, self._comm = partial, path, comm
        self._names, self._matrices, self._checksums = [*matrices], [*matrices.values()], checksums
        self._parcels = pieces.parcels(self._matrices, comm.size)
        small = {number for parcel in self._parcels for number in parcel.numbers}
        self._large = [number for number, x in enumerate(self._matrices) if x.size and number not in small]
        self.offsets = list[int]()

    def create(self) -> list[int]:
        """Create the datasets in a file that has none of them and allocate their space; return the offsets.  Local."""
        with h5py.File(self._partial, "r+") as file:
            for name, x, checksum in zip(self._names, self._matrices, self._checksums):
                dataset = file.create_dataset(name, x.shape, x.dtype, dcpl=contiguous())
                write_attributes(dataset, attributes(x.grid, x.distribution, x.dtype, checksum))
                self.offsets.append(dataset.id.get_offset() or 0)
        with self._partial.open("rb+") as reserved:
            reserve(reserved, self._partial.stat().st_size)
        return self.offsets

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

    def check_elements(self) -> None:
        """Raise FileError if the elements, read back, have other checksums.  Collective."""
        totals = np.zeros(len(self._matrices), np.uint64)
        with self._opened(write=False) as transfers:
            with together(self._comm):
                for parcel in self._parcels:
                    for number in (x for x, rank in zip(*parcel) if rank == self._comm.rank):
                        whole = np.empty(self._matrices[number].shape, self._matrices[number].dtype)
                        transfers[number](0, 0, whole)
                        totals[number] = bilinear(whole, *map(np.arange, whole.shape))[0]
            for number in self._large:
                x = self._matrices[number]
                totals[number] = pieces.file_sum(x.shape, x.dtype, transfers[number], _ALONE, self._comm)[0]
        if texts(self._comm, totals) != self._checksums:  # the same on every rank
            raise FileError(f"{self._path}: {LOST}")

    def check_held(self) -> None:
        """Raise FileError if a dataset is not in its place.  Local; the metadata are read back from the disk."""
        ends = [(at, at + x.size * x.dtype.itemsize) for at, x in zip(self.offsets, self._matrices)]
        to_disk(self._partial, max(ends, key=lambda x: x[1] - x[0]))
        try:
            with h5py.File(self._partial, "r") as file:
                there = [h5py.h5d.open(file.id, name.encode()).get_offset() or 0 for name in self._names]
        except Exception as bad:  # h5py raises many types for a damaged file
            raise FileError(f"{self._path}: {LOST}: {' '.join(str(bad).split())}") from None
        if there != self.offsets or self._partial.stat().st_size < max(ends)[1]:
            raise FileError(f"{self._path}: {LOST}")

    @contextmanager
    def _opened(self, write: bool) -> Iterator[list[Transfer]]:
        """Open the file on all ranks; yield a transfer of each dataset.  Collective."""
        with mpi_io.all_by_mpi_io(self._partial, self._comm, write) as transfer_of:
            yield [transfer_of(at, x.shape[1], x.dtype) for at, x in zip(self.offsets, self._matrices)]
