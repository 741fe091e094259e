"""Matrices and tensors in NumPy's .npy files, read and written by all ranks in parallel, by MPI-IO after the header."""

from __future__ import annotations

import io
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

import pdgemm
from pdgemm.errors import ArgumentError, DTypeError, FileError
from pdgemm.grids.distribution import Block
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.run_report import RunReport, report_of_file
from pdgemm.instrument.spans import taking, timed
from pdgemm.io import boxes, dataset_access, tensor_source
from pdgemm.io.atomic import check_header, create_with_header, on_root, replacing
from pdgemm.io.pieces import Progress
from pdgemm.local.arrays.device import HOST
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import DeviceName, DType
from pdgemm.support.agreement import together
from pdgemm.support.files import LOST
from pdgemm.tensors.dist_tensor import DistTensor

_SPACES = b" " * 128  # mark our headers; every reader skips spaces at the end of a header
_MARK = rb"^\x93NUMPY.{4}[^\n]*" + _SPACES + rb"\n"


def load(
    path: str | Path,
    grid: ProcessGrid | None = None,
    block: Block | None = None,
    *,
    rows: Any = None,
    cols: Any = None,
    part: Any = None,
    source: tuple[int, int] = (0, 0),
    layout: Any = None,
    dtype: DType | None = None,
    transpose: bool = False,
    device: DeviceName = HOST,
    progress: Progress | None = None,
) -> Any:
    """Read the array of a .npy file as a DistMatrix, or a DistTensor.  Collective over the grid.

    path       : a file with an array of numbers, as `numpy.save` writes it, in C or Fortran order and any byte order.
                 An array of one dimension is read as one column, and one of more than two as a DistTensor.
    grid       : by default a grid of all ranks.
    rows, cols : the part to read: a slice or a range of step 1, or a pair (start, stop).
    part, block, source, layout, dtype, transpose, device, progress : as in `pdgemm.io.hdf5.load`.

    `.report` has the bytes and seconds.  Extra memory: at most 64 MiB per rank.
    Raises FileError, LayoutError, DTypeError, ArgumentError or DeviceError on every rank.
    """
    how: Any = {"source": source, "dtype": dtype, "transpose": transpose, "device": device, "progress": progress}
    named = lambda: (Path(path), "")  # noqa: E731
    return tensor_source.load("npy.load", named, grid, block, rows, cols, part, layout, **how)


def dataset(path: str | Path, grid: ProcessGrid | None = None, *, dtype: DType | None = None) -> pdgemm.StoredMatrix:
    """Return the array of a .npy file as a matrix that stays in its file.  Collective over the grid.

    path, grid : as in `load`.   dtype : the type to convert to while reading; see `pdgemm.io.hdf5.dataset`.

    Raises FileError, LayoutError or DTypeError on every rank.
    """
    return pdgemm.StoredMatrix(*tensor_source.inspected("npy.dataset", lambda: (Path(path), ""), grid, dtype))


def save(
    path: str | Path,
    matrix: DistMatrix | DistTensor | np.ndarray,
    *,
    order: Order = "C",
    ndim: int = 2,
    check: bool = True,
    overwrite: bool = False,
    grid: ProcessGrid | None = None,
    progress: Progress | None = None,
) -> RunReport:
    """Write a matrix, a tensor or a vector as a .npy file, which `numpy.load` reads.  Collective over its grid.

    path  : the file, under exactly this name.  A file of `npy.save`, known by 128 spaces at the end of its header, is
            replaced; a file of another program is replaced only with `overwrite`.
    matrix, grid : a DistMatrix, a DistTensor, or a 1-D array, as in `pdgemm.io.hdf5.save`.
    order : "C" or "F", the order of the elements in the file.
    ndim  : with 1, a matrix of one column becomes an array of one dimension.
    check : read the file back and compare its checksum before the file is renamed, as `pdgemm.io.hdf5.save` does.

    The file is complete under its name or does not exist: `save` writes a temporary file beside it, and renames the
    temporary file at the end.  Raises FileError, LayoutError, DTypeError or ArgumentError on every rank, and leaves
    the old file unchanged.
    """
    start, (A, ndim) = perf_counter(), boxes.as_saved(matrix, ndim, grid)
    comm = communicator(matrix=boxes.unfolded(A))
    with together(comm) as description:
        path = Path(path)
        description += ["npy.save", path, order, f"ndim={ndim}", bool(check), bool(overwrite)]
        if order not in ("C", "F"):
            raise ArgumentError(f'order {order!r} is neither "C" nor "F"')
        boxes.check_dimensions(str(path), A, ndim)
        if A.dtype.isbuiltin != 1:
            raise DTypeError(f"a .npy file cannot hold {A.dtype}: convert the matrix first, A.astype('float32')")
    stored = A if order == "C" else A.T
    header = _header(A.shape[:ndim], A.dtype, order == "F" and ndim > 1)
    size = A.size * A.dtype.itemsize
    output = replacing(path, comm, len(header) + size, bool(overwrite), _MARK)
    with timed("write", boxes.unfolded(A).stored.nbytes), taking(None), output as file:
        on_root(comm, path, lambda: create_with_header(file, header, size))
        array, unit = (file, len(header), stored.shape, stored.dtype, comm), (1,) * len(stored.shape)
        if size:
            with dataset_access.opened_by_mpi_io(*array, write=True) as transfer:
                boxes.write(stored, transfer, unit, progress)
        if size and check:
            with dataset_access.opened_by_mpi_io(*array) as transfer:
                held = boxes.dataset_checksum(stored.shape, stored.dtype, transfer, unit, comm)
            if held != boxes.checksum_of(stored):  # the same on every rank
                raise FileError(f"{path}: {LOST}")
        on_root(comm, path, lambda: check_header(path, file, header, size))
    return report_of_file("wrote", (path, ""), "mpi-io", (A.shape[:ndim], A.dtype), size, perf_counter() - start)


def _header(shape: tuple[int, ...], dtype: np.dtype, fortran_order: bool) -> bytes:
    text = io.BytesIO()
    described = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": fortran_order, "shape": shape}
    npy_format.write_array_header_1_0(text, described)
    header = text.getvalue()  # 6 bytes of magic, 2 of the version, and 2 of the length of the rest
    size = len(header) - 10 + len(_SPACES)
    return header[:8] + size.to_bytes(2, "little") + header[10:-1] + _SPACES + header[-1:]
