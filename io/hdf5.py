"""Matrices in HDF5 files: one standard dataset, read and written by all ranks at once.

Three ways, chosen by what is there and named in the report:

    "mpio"         h5py built with MPI: collective hyperslabs; contiguous, chunked, compressed.
    "mpi-io"       any h5py, contiguous dataset in native byte order: MPI-IO straight at the dataset's
                   place in the file, through a block-cyclic file type.
    "independent"  any h5py, anything else, reading only: each rank reads its own blocks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from pdgemm.io import hyperslabs, rawio  # before h5py: they load MPI, which a parallel h5py needs

import h5py  # isort: skip
import numpy as np

import pdgemm
from pdgemm.arguments import communicator
from pdgemm.device import HOST
from pdgemm.dtypes import BFLOAT16, OPERANDS, RESULTS, element_type, names, rank
from pdgemm.errors import DTypeError, FileError, LayoutError, together
from pdgemm.files import check_ordinary, reserve
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io.atomic import on_root, replacing
from pdgemm.io.checksum import checksum
from pdgemm.io.place import as_stored
from pdgemm.matrix import Block, DistMatrix, communicator_of, meet
from pdgemm.tracing import timed

Progress = Callable[[int, int], object]
STORED = tuple(dtype for dtype in dict.fromkeys((*OPERANDS, *RESULTS)) if dtype != BFLOAT16)  # which HDF5 has not


@dataclass(frozen=True)
class IOReport:
    """What a load or save did; the bytes are those of all ranks together."""

    action: str
    path: str
    name: str
    method: str
    shape: tuple[int, int]
    dtype: str
    bytes: int
    seconds: float

    def __str__(self) -> str:
        mib = self.bytes / 2**20
        return (
            f"{self.action} {self.path}:{self.name} ({self.shape[0]} x {self.shape[1]} {self.dtype}, {mib:.1f} MiB) "
            f"by {self.method} in {self.seconds:.3f} s, {mib / max(self.seconds, 1e-9):.0f} MiB/s"
        )


class _Stored(NamedTuple):
    """What rank 0 learns about a dataset."""

    shape: tuple[int, int]
    dtype: np.dtype
    offset: int | None  # where its bytes lie, if they lie in one piece and in native order
    checksum: str | None


def load(
    path: str | Path,
    name: str,
    grid: ProcessGrid,
    block: Block = None,
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

    `.report` names the way it was read, bytes and seconds.  Extra memory: at most 256 MiB per rank.
    Raises FileError, LayoutError, DTypeError or DeviceError on every rank.
    """
    start, comm = perf_counter(), communicator_of(grid)
    with together(comm) as said:
        path = Path(path)
        said += ["hdf5.load", path, name, block, source, dtype, transpose, verify, device]
    meet(grid, device)
    stored = on_root(comm, path, lambda: _inspect(path, name))
    with together(comm):
        wanted = stored.dtype if dtype is None else element_type(dtype)
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
    local, place = as_stored(matrix, transpose)
    with timed("read", local.nbytes):
        if 0 in stored.shape:
            pass
        elif method == "mpi-io":
            assert stored.offset is not None
            rawio.read(path, stored.offset, stored.dtype, local, place, comm, progress)
        else:
            hyperslabs.read(path, name, local, place, comm, method == "mpio", progress)
    if verify:
        found = checksum(comm, local, *place.indices())
        if found != stored.checksum:  # on every rank alike
            raise FileError(f"{path}:{name} is damaged: its checksum is {found}, recorded was {stored.checksum}")
    if wanted != carried:
        matrix = matrix.astype(wanted)
    matrix = matrix.to_device(device)
    matrix.report = _report("read", path, name, method, stored.shape, stored.dtype, start)
    return matrix


def save(
    path: str | Path,
    name: str,
    matrix: DistMatrix,
    *,
    chunks: tuple[int, int] | bool | None = None,
    compression: str | None = None,
    check: bool = True,
    progress: Progress | None = None,
) -> IOReport:
    """A DistMatrix as one dataset.  Collective over its grid.

    path, name : the dataset is new or replaced; whatever else the file holds stays in it.
    chunks, compression : as in h5py ("gzip"); need an h5py built with MPI.
    check : read back what was written and compare it, before the file gets its name: an MPI library may
            keep a failed write to itself.

    The file is complete under its name or not there: it is written under a temporary name beside it
    and renamed at the end.  Attributes of the dataset record layout, dtype and a checksum.
    Raises FileError on every rank, and leaves what was there before.
    """
    start, comm = perf_counter(), communicator(matrix=matrix)
    with together(comm) as said:
        path = Path(path)
        said += ["hdf5.save", path, name, chunks, compression, check]
        if matrix.dtype not in STORED or not matrix.dtype.isnative:
            raise DTypeError(f"a matrix of {matrix.dtype} cannot be saved; use astype, to one of {names(STORED)}")
        method = "mpio" if hyperslabs.parallel_h5py() else "mpi-io"
        if (chunks or compression) and method != "mpio":
            raise FileError(f"{path}: chunks and compression need an h5py built with MPI; this one is not")
    matrix = matrix.to_host()
    local, place = as_stored(matrix)
    layout = {"grid": matrix.grid.shape, "block": matrix.block, "source": matrix.distribution.source}
    attributes = {
        "pdgemm_version": pdgemm.__version__,
        "pdgemm_dtype": str(matrix.dtype),
        "pdgemm_layout": json.dumps(layout),
        "pdgemm_checksum": checksum(comm, local, *place.indices()),
    }
    size = matrix.shape[0] * matrix.shape[1] * matrix.dtype.itemsize
    with timed("write", local.nbytes), replacing(path, comm, 0 if compression else size) as partial:
        storage = {"chunks": chunks, "compression": compression}
        offset = on_root(comm, path, lambda: _create(partial, path, name, matrix, attributes, storage))
        if size and method == "mpio":
            hyperslabs.write(partial, name, local, place, comm, progress)
            if check:
                hyperslabs.check(partial, name, local, place, comm)
        elif size:
            rawio.write(partial, offset, local, place, comm, progress)
            if check:
                rawio.check(partial, offset, local, place, comm)
    return _report("wrote", path, name, method, matrix.shape, matrix.dtype, start)


def _inspect(path: Path, name: str) -> _Stored:
    """What there is to know about a dataset before reading it.  On rank 0."""
    if not path.exists():
        raise FileError(f"{path}: no such file")
    check_ordinary(path.stat())
    with h5py.File(path, "r") as file:
        dataset = file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            raise FileError(f"{path} has no dataset {name}; it has {_contents(file) or 'none'}")
        if dataset.ndim != 2:
            raise LayoutError(f"{path}:{name} is not a matrix: its shape is {dataset.shape}")
        plain = (
            dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
            and not dataset.external
            and dataset.dtype.isnative
        )
        recorded = dataset.attrs.get("pdgemm_checksum")
        return _Stored(
            shape=dataset.shape,
            dtype=dataset.dtype.newbyteorder("="),
            offset=dataset.id.get_offset() if plain else None,
            checksum=None if recorded is None else str(recorded),
        )


def _contents(file: h5py.File) -> str:
    """The datasets of a file, at most ten."""
    found: list[str] = []

    def visit(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            found.append(f"/{name} ({' x '.join(map(str, item.shape or ()))} {item.dtype})")
        return True if len(found) == 10 else None  # anything but None ends the visit

    file.visititems(visit)
    return ", ".join(found)


def _check_dtypes(what: str, stored: np.dtype, wanted: np.dtype) -> None:
    if wanted not in STORED:
        asked = "" if wanted == stored else f", and dtype={wanted} was asked for"
        raise DTypeError(f"{what} holds {stored}{asked}; a matrix can be of {names(STORED)}: convert with dtype=")
    safe = rank(stored) <= rank(wanted) if rank(wanted) else np.can_cast(stored, wanted)
    if stored.kind not in "biufc" or not safe:
        raise DTypeError(f"{what} holds {stored}, which cannot become {wanted}")


def _way_to_read(stored: _Stored) -> str:
    if hyperslabs.parallel_h5py():
        return "mpio"
    return "mpi-io" if stored.offset is not None and stored.dtype in STORED else "independent"


def _create(
    partial: Path,
    path: Path,
    name: str,
    matrix: DistMatrix,
    attributes: dict[str, str],
    storage: dict[str, Any],
) -> int:
    """The file with room for the dataset and all that the old file held; the dataset's place in it."""
    if not name.strip("/."):
        raise FileError(f"{path}: {name!r} is not the name of a dataset")
    if path.exists() and not _holds_only(path, name):
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
        if isinstance(file.get(name, getlink=True), h5py.ExternalLink):
            raise FileError(f"{path}: {name} is a link into another file")
        if name in file:
            if not isinstance(file[name], h5py.Dataset):
                raise FileError(f"{path}: {name} is there already, as another kind of object")
            del file[name]
        dataset = file.create_dataset(name, matrix.shape, matrix.dtype, **storage)
        dataset.attrs.update(attributes)
        offset = 0 if chunked else dataset.id.get_offset() or 0
    if not chunked:
        with partial.open("rb+") as reserved:
            reserve(reserved, partial.stat().st_size)
    return offset


def _holds_only(path: Path, name: str) -> bool:
    """Is the dataset about to be replaced all that the file holds?"""
    with h5py.File(path, "r") as file:
        return (
            list(file) == [name.strip("/")]
            and isinstance(file.get(name), h5py.Dataset)
            and not file.attrs
            and not file.userblock_size
        )


def _report(
    action: str, path: Path, name: str, method: str, shape: tuple[int, int], dtype: np.dtype, start: float
) -> IOReport:
    size = shape[0] * shape[1] * dtype.itemsize
    return IOReport(action, str(path), name, method, shape, str(dtype), size, perf_counter() - start)
