"""Matrices in HDF5 files: one standard dataset, read and written by all ranks at once.

Three ways, chosen by what is there and named in the report:

    "mpio"         h5py built with MPI: collective hyperslabs; contiguous, chunked, compressed.
    "mpi-io"       any h5py, contiguous dataset whose elements lie there as they do in memory: MPI-IO straight at
                   the dataset's place in its file.
    "independent"  any h5py, anything else, reading only: each rank reads through h5py for itself.

In all of them a rank reads or writes whole rows, or parts of one; from there to the layout of the matrix it is a
redistribution, of a piece of the dataset at a time (`pdgemm.io.pieces`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from pdgemm.io import (
    hyperslabs,
    mpi_io,  # before h5py: they load MPI, which a parallel h5py needs
    pieces,
)

import h5py  # isort: skip
import numpy as np

import pdgemm
from pdgemm.arrays.device import HOST
from pdgemm.arrays.dtypes import BFLOAT16, OPERANDS, RESULTS, element_type, names, rank
from pdgemm.errors import DTypeError, FileError
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.spans import taking, timed
from pdgemm.io.atomic import check_writable, on_root, replacing
from pdgemm.io.checksum import checksum
from pdgemm.io.pieces import Transfer
from pdgemm.io.stored import Stored, check_names, check_target, check_unchanged, inspect, unit
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of, device_on
from pdgemm.support.agreement import together
from pdgemm.support.files import reserve

Progress = Callable[[int, int], object]
STORED = tuple(dtype for dtype in dict.fromkeys((*OPERANDS, *RESULTS)) if dtype != BFLOAT16)  # which HDF5 has not


@dataclass(frozen=True)
class IOReport:
    """What a load or save did; the bytes are those of all ranks together.

    checksum : the one recorded with the dataset; None where there is none.
    """

    action: str
    path: str
    name: str
    method: str
    shape: tuple[int, int]
    dtype: str
    bytes: int
    seconds: float
    checksum: str | None

    def __str__(self) -> str:
        mib = self.bytes / 2**20
        return (
            f"{self.action} {self.path}:{self.name} ({self.shape[0]} x {self.shape[1]} {self.dtype}, {mib:.1f} MiB) "
            f"by {self.method} in {self.seconds:.3f} s, {mib / max(self.seconds, 1e-9):.0f} MiB/s"
        )


def load(
    path: str | Path,
    name: str,
    grid: ProcessGrid,
    block: Block | None = None,
    *,
    source: tuple[int, int] = (0, 0),
    dtype: Any = None,
    transpose: bool = False,
    verify: bool = False,
    device: str = HOST,
    progress: Progress | None = None,
) -> DistMatrix:
    """A dataset as a DistMatrix.  Collective over the grid.

    path, name : file and two-dimensional dataset.
    block, source : layout of the result, as in `DistMatrix.empty`.
    dtype     : convert while reading; needed where the file holds integers other than int8 and int32.
    transpose : the transpose of the dataset, at no cost: the local arrays are in Fortran order.
    verify    : compare with the checksum that `save` left.
    device    : where the matrix is to lie, as in `DistMatrix.empty`; what is read comes to the host first.
    progress  : called as progress(done, total) after each transfer.

    Links are followed, and a dataset is read where its bytes are: in another file, or in those of a virtual dataset,
    all of which must be there.  A file that changes while it is read is refused.

    `.report` names the way it was read, bytes and seconds.  Extra memory: at most 64 MiB per rank, or two chunks of it.
    Raises FileError, LayoutError, DTypeError or DeviceError on every rank.
    """
    start, comm = perf_counter(), communicator_of(grid)
    with together(comm) as said:
        path = Path(path)
        check_names(path, name)
        asked = None if dtype is None else element_type(dtype)
        # what the ranks say of the layout is compared when the matrix is made
        said += ["hdf5.load", path, name, asked, bool(transpose), bool(verify), device]
    device_on(grid, device)
    stored = on_root(comm, path, lambda: _inspect(path, name))
    with together(comm):
        wanted = asked or stored.dtype
        _check_dtypes(f"{path}:{name}", stored.dtype, wanted)
        if verify and stored.checksum is None:
            raise FileError(f"{path}:{name} carries no checksum to verify")
        method = _way_to_read(stored)
        carried = wanted
        if verify:  # the checksum is one of the bits as they are stored
            carried = stored.dtype
        elif wanted.kind == "c" and stored.dtype.kind != "c":  # HDF5 cannot make real numbers complex
            carried = np.empty(0, wanted).real.dtype
    matrix = DistMatrix.empty(
        stored.shape[::-1] if transpose else stored.shape,
        grid=grid,
        block=block,
        source=source,
        dtype=carried,
        order="F" if transpose else "C",
    )
    there = matrix.T if transpose else matrix
    way: AbstractContextManager[Transfer]
    with timed("read", matrix.local.nbytes), taking(None):
        if method == "mpi-io":
            assert stored.offset is not None
            way = mpi_io.opened(stored.file, stored.offset, stored.shape[1], stored.dtype, comm)
        else:
            way = hyperslabs.opened(path, name, comm, method == "mpio")
        with way as transfer:
            pieces.read(there, transfer, stored.unit, progress)
        on_root(comm, path, lambda: check_unchanged(f"{path}:{name}", stored))
    if verify:
        found = checksum(there)
        if found != stored.checksum:  # on every rank alike
            raise FileError(f"{path}:{name} is damaged: its checksum is {found}, recorded was {stored.checksum}")
    if wanted != carried:
        matrix = matrix.astype(wanted)
    matrix = matrix.to_device(device)
    matrix.report = _report("read", path, name, method, stored.shape, stored.dtype, start, stored.checksum)
    return matrix


def save(
    path: str | Path,
    name: str,
    matrix: DistMatrix,
    *,
    chunks: tuple[int, int] | bool | None = None,
    compression: str | None = None,
    check: bool = True,
    replaces: IOReport | None = None,
    progress: Progress | None = None,
) -> IOReport:
    """A DistMatrix as one dataset.  Collective over its grid.

    path, name : the dataset is new or replaced; whatever else the file holds stays in it.  A name that is a
            link comes to stand for the new dataset: what a soft link led to, and what has other names (hard links),
            stays under those.  A name that leads into another file by an external link is refused.
    chunks, compression : as in h5py ("gzip"); need an h5py built with MPI.
    check : read back what was written and compare its checksum, before the file gets its name: an MPI library may
            keep a failed write to itself.
    replaces : the report of the load that gave what the matrix was made from, where that is this dataset.  If another
            job has saved something else there since, that job's work would be lost: FileError.

    The file is complete under its name or not there: it is written under a temporary name beside it
    and renamed at the end.  Attributes of the dataset record layout, dtype and a checksum.
    Raises FileError on every rank, and leaves what was there before.
    """
    start, comm = perf_counter(), communicator(matrix=matrix)
    with together(comm) as said:
        path = Path(path)
        check_names(path, name)
        said += ["hdf5.save", path, name, chunks, compression, check, replaces and replaces.checksum]
        if matrix.dtype not in STORED or not matrix.dtype.isnative:
            raise DTypeError(f"a matrix of {matrix.dtype} cannot be saved; use astype, to one of {names(STORED)}")
        method = "mpio" if hyperslabs.parallel_h5py() else "mpi-io"
        if (chunks or compression) and method != "mpio":
            raise FileError(f"{path}: chunks and compression need an h5py built with MPI; this one is not")
    matrix = matrix.to_host()
    layout = {"grid": matrix.grid.shape, "block": matrix.block, "source": matrix.distribution.source}
    written = checksum(matrix)
    attributes = {
        "pdgemm_version": pdgemm.__version__,
        "pdgemm_dtype": str(matrix.dtype),
        "pdgemm_layout": json.dumps(layout),
        "pdgemm_checksum": written,
    }
    size = matrix.shape[0] * matrix.shape[1] * matrix.dtype.itemsize
    room = 0 if compression else size
    with timed("write", matrix.stored.nbytes), taking(None), replacing(path, comm, room) as partial:
        storage = {"chunks": chunks, "compression": compression}
        if replaces is not None:
            on_root(comm, path, lambda: _check_same(path, name, replaces))
        offset, step = on_root(comm, path, lambda: _create(partial, path, name, matrix, attributes, storage))

        def opened(write: bool) -> AbstractContextManager[Transfer]:
            if method == "mpio":
                return hyperslabs.opened(partial, name, comm, True, write=write)
            return mpi_io.opened(partial, offset, matrix.shape[1], matrix.dtype, comm, write=write)

        if size:
            with opened(write=True) as transfer:
                pieces.write(matrix, transfer, step, progress)
        if size and check:
            with opened(write=False) as transfer:
                held = pieces.checksum(matrix.shape, matrix.dtype, transfer, step, comm)
            if held != written:  # on every rank alike
                raise FileError(f"{path}: what was written is not what the file holds (disk full, quota, bad disk)")
    return _report("wrote", path, name, method, matrix.shape, matrix.dtype, start, written)


def check_output(path: Path, name: str, grid: ProcessGrid, size: int) -> None:
    """Could a dataset of `size` bytes be saved under this name now?  Collective; raises FileError on every rank."""
    check_writable(path, grid.comm, size)
    on_root(grid.comm, path, lambda: check_target(path, name))


def _inspect(path: Path, name: str) -> Stored:
    """What there is to know about a dataset before reading it.  On rank 0."""
    if not path.exists():
        raise FileError(f"{path}: no such file")
    return inspect(path, name)


def _check_dtypes(what: str, stored: np.dtype, wanted: np.dtype) -> None:
    if wanted not in STORED:
        asked = "" if wanted == stored else f", and dtype={wanted} was asked for"
        raise DTypeError(f"{what} holds {stored}{asked}; a matrix can be of {names(STORED)}: convert with dtype=")
    safe = rank(stored) <= rank(wanted) if rank(wanted) else np.can_cast(stored, wanted)
    if stored.kind not in "biufc" or not safe:
        raise DTypeError(f"{what} holds {stored}, which cannot become {wanted}")


def _way_to_read(stored: Stored) -> str:
    if hyperslabs.parallel_h5py() and not stored.scattered:
        return "mpio"
    return "mpi-io" if stored.offset is not None and stored.dtype in STORED else "independent"


def _check_same(path: Path, name: str, read: IOReport) -> None:
    """The dataset is the one that was read.  With the file's lock, so that it stays so."""
    found = _inspect(path, name)
    if (found.shape, str(found.dtype), found.checksum) != (read.shape, read.dtype, read.checksum):
        raise FileError(f"{path}:{name} was replaced after it was read here, and was left like that: try again")


def _create(
    partial: Path,
    path: Path,
    name: str,
    matrix: DistMatrix,
    attributes: dict[str, str],
    storage: dict[str, Any],
) -> tuple[int, tuple[int, int]]:
    """The file with room for the dataset and all that the old file held; the dataset's place in it, and its chunks."""
    if not check_target(path, name):
        # a copy, so that references, links, user block and all else stay what they were; HDF5 uses the
        # space of the dataset that goes for the one that comes
        shutil.copyfile(path, partial)
    chunked = any(storage.values())
    if not chunked:  # all of its bytes now, in one piece, without writing zeros first
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.CONTIGUOUS)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        storage = {"dcpl": plist}
    with h5py.File(partial, "a") as file:
        if file.get(name, getlink=True):
            del file[name]
        dataset = file.create_dataset(name, matrix.shape, matrix.dtype, **storage)
        dataset.attrs.update(attributes)
        place = dataset.id.get_offset() or 0, unit(dataset)
    if not chunked:
        with partial.open("rb+") as reserved:
            reserve(reserved, partial.stat().st_size)
    return place


def _report(
    action: str,
    path: Path,
    name: str,
    method: str,
    shape: tuple[int, int],
    dtype: np.dtype,
    start: float,
    recorded: str | None,
) -> IOReport:
    size = shape[0] * shape[1] * dtype.itemsize
    return IOReport(action, str(path), name, method, shape, str(dtype), size, perf_counter() - start, recorded)
