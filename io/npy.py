"""Matrices in NumPy's .npy files, read and written by all ranks in parallel, by MPI-IO after the header."""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

import pdgemm
from pdgemm.algorithms.protection.checksum import checksum
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.grids.distribution import Block
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.instrument.run_report import RunReport, report_of_file
from pdgemm.instrument.spans import taking, timed
from pdgemm.io import mpi_io, pieces
from pdgemm.io.atomic import on_root, replacing
from pdgemm.io.pieces import Progress, Transfer, as_column, check_dtypes, part_of, within
from pdgemm.io.stored import CHANGED, Stored
from pdgemm.local.arrays.arguments import as_count
from pdgemm.local.arrays.device import HOST
from pdgemm.local.arrays.dtypes import TYPE, element_type
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of, device_on
from pdgemm.names import DeviceName, DType
from pdgemm.support.agreement import together
from pdgemm.support.file_states import State, ordinary, settled, state, state_of
from pdgemm.support.files import LOST, naming, reserve, to_disk

# version 3 differs from version 2 in the encoding of field names, and a matrix of numbers has no fields
_HEADERS = dict.fromkeys([(2, 0), (3, 0)], npy_format.read_array_header_2_0) | {
    (1, 0): npy_format.read_array_header_1_0
}


_SPACES = b" " * 128  # at the end of our headers, where every reader skips them, and there is no place for more
_MARK = rb"^\x93NUMPY.{4}[^\n]*" + _SPACES + rb"\n"


class _Header(NamedTuple):
    """The header of a file, the byte offset of the elements, and the state of the file."""

    shape: tuple[int, int]
    dtype: np.dtype
    fortran_order: bool
    offset: int
    state: State
    ndim: int


def load(
    path: str | Path,
    grid: ProcessGrid | None = None,
    block: Block | None = None,
    *,
    rows: Any = None,
    cols: Any = None,
    source: tuple[int, int] = (0, 0),
    dtype: DType | None = None,
    transpose: bool = False,
    device: DeviceName = HOST,
    progress: Progress | None = None,
) -> DistMatrix:
    """Read the array of a .npy file as a DistMatrix.  Collective over the grid.

    path       : a file with an array of numbers, as `numpy.save` writes it, in C or Fortran order and any byte order.
                 An array has two dimensions, or one, which is read as one column.
    grid       : by default a grid of all ranks.
    rows, cols : the part that is read, without the rest: a slice or a range of step 1, or a pair (start, stop).
    block, source, dtype, transpose, device, progress : as in `pdgemm.io.hdf5.load`.

    `.report` has the bytes and seconds.  Extra memory: at most 64 MiB per rank.
    Raises FileError, LayoutError, DTypeError, ArgumentError or DeviceError on every rank.
    """
    start, grid = perf_counter(), default_grid() if grid is None else grid
    comm = communicator_of(grid)
    with together(comm) as description:
        path = Path(path)
        requested = None if dtype is None else element_type(dtype)
        description += ["npy.load", path, rows, cols, requested, bool(transpose), device]
    device_on(grid, device)
    header = on_root(comm, path, lambda: _inspect(path))
    with together(comm):
        wanted = requested or header.dtype
        check_dtypes(str(path), header.dtype, wanted.newbyteorder("="), tuple(TYPE))
        part = part_of(header.shape, rows, cols)
    straight = header.fortran_order == bool(transpose)  # rows of the matrix are contiguous in the file
    matrix = DistMatrix.empty(
        part.shape[::-1] if transpose else part.shape,
        grid=grid,
        block=block,
        source=source,
        dtype=wanted.newbyteorder("="),
        order="C" if straight else "F",
        device=device,
    )
    there = matrix if straight else matrix.T
    in_file = part._replace(rows=part.cols, cols=part.rows) if header.fortran_order else part
    width = header.shape[0] if header.fortran_order else header.shape[1]
    with timed("read", matrix.local.nbytes), taking(None):
        with mpi_io.opened_by_mpi_io(path, header.offset, width, header.dtype, comm) as transfer:
            pieces.read_pieces(there, within(transfer, in_file), (1, 1), progress)
        on_root(comm, path, lambda: _check_unchanged(path, header))
    size, taken = part.size * header.dtype.itemsize, perf_counter() - start
    what = (path, ""), "mpi-io", (header.shape[: header.ndim], header.dtype), size, taken
    matrix.report = report_of_file("read", *what, part=None if part.shape == header.shape else part)
    return matrix


def dataset(path: str | Path, grid: ProcessGrid | None = None, *, dtype: DType | None = None) -> pdgemm.StoredMatrix:
    """Return the array of a .npy file as a matrix that stays in its file.  Collective over the grid.

    path, grid : as in `load`.   dtype : the type to convert to while reading; see `pdgemm.io.hdf5.dataset`.

    Raises FileError, LayoutError or DTypeError on every rank.
    """
    grid = default_grid() if grid is None else grid
    with together(communicator_of(grid)):
        path, wanted = Path(path), None if dtype is None else element_type(dtype)
    stored, wanted, transposed = array_properties(path, grid, wanted)
    return pdgemm.StoredMatrix(grid, (str(path), ""), stored, wanted, "T" if transposed else "N")


def array_properties(path: str | Path, grid: ProcessGrid, dtype: Any = None) -> tuple[Stored, np.dtype, bool]:
    """Return the properties of an array, the type of its matrix, and whether its columns are contiguous.  Collective.

    The rows of the Stored are contiguous.  Arguments and errors are those of `load`.
    """
    path = Path(path)
    header = on_root(grid.comm, path, lambda: _inspect(path))
    with together(grid.comm):
        wanted = (header.dtype if dtype is None else element_type(dtype)).newbyteorder("=")
        check_dtypes(str(path), header.dtype, wanted, tuple(TYPE))
    rows, cols = header.shape
    identity = header.state.device, header.state.inode, header.offset
    stored = Stored(
        shape=(cols, rows) if header.fortran_order else (rows, cols),
        dtype=header.dtype,
        file=path,
        offset=header.offset,
        unit=(1, 1),
        scattered=False,
        checksum=None,
        states={(path, header.state)},
        object=identity,
        objects={identity},
        ndim=header.ndim,
    )
    return stored, wanted, header.fortran_order


def save(
    path: str | Path,
    matrix: DistMatrix | np.ndarray,
    *,
    order: Order = "C",
    ndim: int = 2,
    check: bool = True,
    overwrite: bool = False,
    grid: ProcessGrid | None = None,
    progress: Progress | None = None,
) -> RunReport:
    """Write a DistMatrix, or a vector, as a .npy file, which `numpy.load` reads.  Collective over its grid.

    path  : the file, under exactly this name.  A file of `npy.save`, known by 128 spaces at the end of its header, is
            replaced, and with `overwrite` any other one.
    matrix, grid : a DistMatrix, or a 1-D array, as in `pdgemm.io.hdf5.save`.
    order : "C" or "F", the order of the elements in the file.
    ndim  : with 1, a matrix of one column becomes an array of one dimension.
    check : read the file back and compare its checksum before the file is renamed, as `pdgemm.io.hdf5.save` does.

    The file is complete under its name or does not exist: `save` writes a temporary file beside it, and renames the
    temporary file at the end.  Raises FileError, LayoutError, DTypeError or ArgumentError on every rank, and leaves
    the old file unchanged.
    """
    start, (A, ndim) = perf_counter(), as_column(matrix, ndim, grid)
    comm = communicator(matrix=A)
    with together(comm) as description:
        path = Path(path)
        description += ["npy.save", path, order, f"ndim={ndim}", bool(check), bool(overwrite)]
        if order not in ("C", "F"):
            raise ArgumentError(f'order {order!r} is neither "C" nor "F"')
        if as_count(ndim, "ndim", 1) > 2 or (ndim == 1 and A.shape[1] != 1):
            raise LayoutError(f"{path}: a matrix of shape {A.shape} is not saved with ndim={ndim}")
        if A.dtype.isbuiltin != 1:
            raise DTypeError(f"a .npy file cannot hold {A.dtype}: convert the matrix first, A.astype('float32')")
    stored = A if order == "C" else A.T
    header = _header(A.shape[:ndim], A.dtype, order == "F" and ndim == 2)
    size = A.size * A.dtype.itemsize
    output = replacing(path, comm, len(header) + size, bool(overwrite), _MARK)
    with timed("write", A.stored.nbytes), taking(None), output as partial:
        on_root(comm, path, lambda: _create(partial, header, size))

        def opened(write: bool) -> AbstractContextManager[Transfer]:
            return mpi_io.opened_by_mpi_io(partial, len(header), stored.shape[1], stored.dtype, comm, write=write)

        if size:
            with opened(write=True) as transfer:
                pieces.write_pieces(stored, transfer, (1, 1), progress)
        if size and check:
            with opened(write=False) as transfer:
                held = pieces.file_checksum(stored.shape, stored.dtype, transfer, (1, 1), comm)
            if held != checksum(stored):  # the same on every rank
                raise FileError(f"{path}: {LOST}")
        on_root(comm, path, lambda: _check_header(path, partial, header, size))
    return report_of_file("wrote", (path, ""), "mpi-io", (A.shape[:ndim], A.dtype), size, perf_counter() - start)


def _inspect(path: Path) -> _Header:
    """Return the contents of the header.  Raises FileError, LayoutError or DTypeError."""
    with naming(path), open(path, "rb", opener=ordinary) as file:
        try:
            version = npy_format.read_magic(file)
        except ValueError:
            raise FileError(f"{path}: it is not a .npy file") from None
        if version not in _HEADERS:
            raise FileError(f"{path}: version {version[0]}.{version[1]} of the .npy format is not known")
        shape, fortran_order, dtype = _HEADERS[version](file)
        offset, current, before = file.tell(), state_of(file.fileno()), settled(path)
    if len(shape) not in (1, 2):
        raise LayoutError(f"{path} is neither a matrix nor a vector: its shape is {shape}")
    fortran_order = fortran_order and len(shape) == 2
    if min(shape) < 0:
        raise FileError(f"{path} is damaged: its header says that its shape is {shape}")
    if dtype.kind not in "biufc":
        raise DTypeError(f"{path} holds {dtype}, which are no numbers")
    end = offset + prod(shape) * dtype.itemsize
    if end > current.size:
        raise FileError(f"{path} is truncated: its elements end at byte {end}, the file at {current.size}")
    if current != before:
        raise FileError(f"{path} {CHANGED}")
    return _Header((shape[0], prod(shape[1:])), dtype, fortran_order, offset, current, len(shape))


def _check_unchanged(path: Path, header: _Header) -> None:
    if state(path) != header.state:
        raise FileError(f"{path} {CHANGED}")


def _header(shape: tuple[int, ...], dtype: np.dtype, fortran_order: bool) -> bytes:
    text = io.BytesIO()
    described = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": fortran_order, "shape": shape}
    npy_format.write_array_header_1_0(text, described)
    header = text.getvalue()  # 6 bytes of magic, 2 of the version, and 2 of the length of the rest
    size = len(header) - 10 + len(_SPACES)
    return header[:8] + size.to_bytes(2, "little") + header[10:-1] + _SPACES + header[-1:]


def _check_header(path: Path, partial: Path, header: bytes, size: int) -> None:
    """Raise FileError if the file on the disk has another header or another size."""
    to_disk(partial, (len(header), len(header) + size))
    with partial.open("rb") as file:
        if file.read(len(header)) != header or os.fstat(file.fileno()).st_size != len(header) + size:
            raise FileError(f"{path}: {LOST}")


def _create(path: Path, header: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        reserve(file, len(header) + size)
        os.truncate(file.fileno(), len(header) + size)
