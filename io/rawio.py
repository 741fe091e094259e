"""A contiguous dataset by MPI-IO, whatever h5py is built with: bytes at an offset of a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI

from pdgemm.dtypes import wire
from pdgemm.errors import Shield, raise_together
from pdgemm.files import file_error
from pdgemm.io.place import TILE_BYTES, Place, check_equal

Progress = Callable[[int, int], object]

# Open MPI makes a semaphore in /dev/shm for every file, for shared file pointers, which nobody here uses.  Without room
# for it files cannot be opened, or ranks wait forever for those that failed.  This is read when the first is opened;
# a program that has shared file pointers of its own sets it to "sm".
os.environ.setdefault("OMPI_MCA_sharedfp", "individual")


def read(
    path: Path,
    offset: int,
    stored: np.dtype,
    local: np.ndarray,
    place: Place,
    comm: MPI.Intracomm,
    progress: Progress | None = None,
) -> None:
    """local := this rank's share of the matrix of dtype `stored` at byte `offset`.  Collective."""
    _each_slab(path, MPI.MODE_RDONLY, offset, stored, local, place, comm, _read_rows, progress)


def write(
    path: Path, offset: int, local: np.ndarray, place: Place, comm: MPI.Intracomm, progress: Progress | None = None
) -> None:
    """This rank's share of the matrix at byte `offset` := local.  Collective."""
    _each_slab(path, MPI.MODE_WRONLY, offset, local.dtype, local, place, comm, _write_rows, progress)


def check(path: Path, offset: int, local: np.ndarray, place: Place, comm: MPI.Intracomm) -> None:
    """Is this rank's share in the file what it is in memory, bit for bit?  Collective."""
    _each_slab(path, MPI.MODE_RDONLY, offset, local.dtype, local, place, comm, _check_rows, None)


def _check_rows(file: MPI.File, part: np.ndarray, stored: np.dtype) -> None:
    found = np.empty(part.shape, stored)
    file.Read_all(wire(found))
    check_equal(found, part)


def _read_rows(file: MPI.File, part: np.ndarray, stored: np.dtype) -> None:
    if part.dtype == stored and part.flags.c_contiguous:
        file.Read_all(wire(part))
    else:
        staged = np.empty(part.shape, stored)
        file.Read_all(wire(staged))
        part[...] = staged


def _write_rows(file: MPI.File, part: np.ndarray, stored: np.dtype) -> None:
    file.Write_all(wire(np.ascontiguousarray(part)))


def _each_slab(
    path: Path,
    mode: int,
    offset: int,
    stored: np.dtype,
    local: np.ndarray,
    place: Place,
    comm: MPI.Intracomm,
    transfer: Callable[[MPI.File, np.ndarray, np.dtype], None],
    progress: Progress | None,
) -> None:
    """Open the file with this rank's view of the matrix and transfer the local rows slab by slab.

    Every rank makes the same number of collective transfers, with no rows where it has none left.  A rank
    whose transfer fails goes on taking part, so that the others do not wait for it; then all raise.
    """
    step = max(1, TILE_BYTES // max(1, place.distribution.cols.largest * stored.itemsize))
    count = -(-place.distribution.rows.largest // step)
    error, notify = None, Shield(progress)
    with _view(path, mode, offset, stored, place, comm) as file:
        for slab in range(count):
            try:
                transfer(file, local[slab * step : (slab + 1) * step], stored)
            except Exception as bad:
                error = error or file_error(path, bad)
            notify(slab + 1, count)
    raise_together(comm, error or notify.error)


@contextmanager
def _view(path: Path, mode: int, offset: int, dtype: np.dtype, place: Place, comm: MPI.Intracomm) -> Iterator[MPI.File]:
    """The file as if it held this rank's elements only, row by row."""
    file, error = None, None
    try:
        file = MPI.File.Open(comm, str(path), mode)
    except MPI.Exception as bad:
        error = file_error(path, bad)
    raise_together(comm, error)
    assert file is not None
    element = MPI.Datatype.fromcode(wire(np.empty(0, dtype)).dtype.char)
    filetype = _filetype(element, place)
    try:
        try:
            file.Set_view(offset, element, filetype, "native")
        except MPI.Exception as bad:
            error = file_error(path, bad)
        raise_together(comm, error)
        yield file
    finally:
        file.Close()
        filetype.Free()


def _filetype(element: MPI.Datatype, place: Place) -> MPI.Datatype:
    """This rank's elements among all of the matrix, run by run.  (MPI's darray knows no shorter first blocks.)"""
    (rows, highs), (cols, widths) = place.runs()
    if not rows or not cols:  # ROMIO 3 corrupts its memory on a type of no elements
        return element.Dup()
    row = element.Create_indexed(widths, cols)
    stride = place.distribution.cols.n * element.size
    # row by row: of runs of rows (blocks of a resized type) ROMIO 3 loses all but the first
    starts = [stride * at for first, high in zip(rows, highs) for at in range(first, first + high)]
    filetype = row.Create_hindexed_block(1, starts)
    row.Free()
    return filetype.Commit()
