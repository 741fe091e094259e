"""Access to a dataset in boxes: by MPI-IO at its offset in a file, or through h5py, collective or independent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from math import prod
from pathlib import Path
from platform import node
from typing import Any, TypeVar

from mpi4py import MPI  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np
from numpy.lib.stride_tricks import as_strided

from pdgemm.errors import FileError, PdgemmError
from pdgemm.io.atomic import on_root
from pdgemm.io.pieces import Transfer
from pdgemm.local.arrays.dtypes import wire
from pdgemm.support.agreement import agree, together
from pdgemm.support.files import file_error
from pdgemm.support.waits import Wait

# Open MPI creates a semaphore in /dev/shm for every file, for shared file pointers, which are not used here.  If
# /dev/shm is full, files cannot be opened, or ranks wait for ever for ranks that failed.  Open MPI reads the variable
# at the first open; a program that uses shared file pointers sets the variable to "sm".
os.environ.setdefault("OMPI_MCA_sharedfp", "individual")

_GAP = 1 << 12  # bytes between two rows of a part; a smaller gap is read with the rows, as the system reads whole pages
_STRIPE = 1 << 22  # bytes of one read of several rows and the gaps between them

T = TypeVar("T")


@contextmanager
def open_on_all(
    comm: MPI.Intracomm, path: Path, write: bool, opening: Callable[[], T], closing: Callable[[T], object]
) -> Iterator[T]:
    """Open a file on all ranks and close it after the block, or raise on all ranks.  Collective.

    The block must raise on all ranks or on none.
    """
    file: T | None = None
    error: PdgemmError | None = None
    try:
        os.close(os.open(path, os.O_RDWR if write else os.O_RDONLY))
    except OSError as bad:
        shared = "is its folder shared by all nodes?"
        error = FileError(f"{path}: rank {comm.rank} on {node()} cannot open it ({bad.strerror}): {shared}")
    agree(comm, error)  # MPI would wait for ever for a rank that cannot open the file
    try:
        with Wait(comm):
            file = opening()
    except Exception as bad:
        error = file_error(path, bad)
    agree(comm, error)
    assert file is not None
    try:
        yield file
    except BaseException:
        with suppress(Exception):
            closing(file)
        raise
    try:
        with Wait(comm):
            closing(file)  # a full disk may be reported only at closing
    except Exception as bad:
        error = file_error(path, bad)
    agree(comm, error)


# ------------------------------------------------------------------ MPI-IO
@contextmanager
def opened_by_mpi_io(
    path: Path, offset: int, extents: Sequence[int], stored: np.dtype, comm: MPI.Intracomm, write: bool = False
) -> Iterator[Transfer]:
    """Open the array at byte `offset`; yield a transfer that reads or writes a box of the array.  Collective.

    extents, stored : extents, at least two, and type of the whole array.  The transfer is local, and converts between
    `stored` and the type of the array that it is called with.
    """
    with all_by_mpi_io(path, comm, write) as transfer_of:
        yield partial(_box_in_blocks, partial(transfer_of, offset), tuple(extents), stored)


@contextmanager
def all_by_mpi_io(path: Path, comm: MPI.Intracomm, write: bool = False) -> Iterator[Callable[..., Transfer]]:
    """Open a file once for all its contiguous datasets.  Collective.

    Yields a local function: transfer_of(offset, cols, stored) returns the transfer that `opened_by_mpi_io` would yield.
    """
    mode = MPI.MODE_WRONLY if write else MPI.MODE_RDONLY
    with open_on_all(comm, path, write, lambda: MPI.File.Open(comm, str(path), mode), MPI.File.Close) as file:
        yield partial(_transfer, path, file, write)


def _box_in_blocks(
    transfer_of: Callable[..., Transfer], extents: tuple[int, ...], stored: np.dtype, *place: Any
) -> None:
    """Read or write a box of an array, as blocks of the matrix whose columns enumerate the last axes.

    place : the first index of the box along each axis, and its elements.  All axes after the last one of which the box
    has not all indices belong to the columns, so there are as few blocks as possible.
    """
    *start, box = place
    if not box.size:
        return
    axis = max((x for x, n in enumerate(extents) if x and box.shape[x] < n), default=1)
    move, inner = transfer_of(prod(extents[axis:]), stored), prod(extents[axis + 1 :])
    for index in np.ndindex(box.shape[: axis - 1]):
        first = [i + j for i, j in zip(start, (*index, 0))]
        row = int(np.ravel_multi_index(first, extents[:axis]))
        move(row, start[axis] * inner, box[index].reshape(box.shape[axis - 1], -1))


def _transfer(path: Path, file: MPI.File, write: bool, offset: int, cols: int, stored: np.dtype) -> Transfer:
    """Return a transfer that reads or writes a block of the matrix at byte `offset` of an open file."""
    move = file.Write_at if write else file.Read_at

    def transfer(row: int, col: int, part: np.ndarray) -> None:
        for lines in _together(part, cols, stored.itemsize, write):
            some = part[lines]
            contiguous = len(some) == 1 or some.shape[1] == cols  # in the file
            shape = some.shape if contiguous else ((len(some) - 1) * cols + some.shape[1],)
            as_stored = contiguous and some.dtype == stored and some.flags.c_contiguous
            there = some if as_stored else some.astype(stored, "C") if write else np.empty(shape, stored)
            moved(there, offset + ((row + lines.start) * cols + col) * stored.itemsize)
            if not write and there is not some:
                step = cols * stored.itemsize, stored.itemsize
                some[...] = there if contiguous else as_strided(there, some.shape, step)

    def moved(there: np.ndarray, at: int) -> None:
        status = MPI.Status()
        try:
            move(at, [wire(there), MPI.BYTE], status)
            count = status.Get_count(MPI.BYTE)
            if count != there.nbytes:
                done = "written" if write else "read, the file is truncated"
                raise OSError(f"of {there.nbytes} bytes at byte {at} only {max(0, count)} were {done}")
        except Exception as bad:
            raise file_error(path, bad) from None

    return transfer


def _together(part: np.ndarray, cols: int, itemsize: int, write: bool) -> Iterator[slice]:
    """Yield ranges of rows of a block, one for each access to the file: all rows, if the block is contiguous there."""
    rows, width = part.shape
    lines = max(1, rows)
    if width < cols and (write or (cols - width) * itemsize >= _GAP):
        lines = 1
    elif width < cols:
        lines = max(1, _STRIPE // (cols * itemsize))
    for first in range(0, rows if width else 0, lines):
        yield slice(first, min(rows, first + lines))


# ------------------------------------------------------------------ HDF5
def parallel_h5py() -> bool:
    """Return whether h5py is built with MPI.  Raises FileError if h5py and mpi4py use different MPI libraries."""
    if not h5py.get_config().mpi:
        return False
    libraries = loaded_mpi_libraries()
    if len(libraries) > 1:  # opening a file would crash the process
        raise FileError(
            f"h5py and mpi4py use different MPI libraries ({', '.join(libraries)}): "
            "set MPI4PY_LIBMPI to the one that h5py was built with"
        )
    return True


def loaded_mpi_libraries() -> list[str]:
    """Return the MPI libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libmpi" in line}
    return sorted({os.path.realpath(p) for p in paths if Path(p).name.startswith(("libmpi.", "libmpich."))})


@contextmanager
def opened_by_hdf5(
    path: Path, name: str, comm: MPI.Intracomm, collective: bool, write: bool = False
) -> Iterator[Transfer]:
    """Open a dataset; yield a transfer that reads or writes a box of the dataset.  Collective.

    The transfer converts between the type of the dataset and that of the array.
    collective : whether each transfer is collective; ranks without elements take part with an empty selection.
    """
    how = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    options: dict[str, Any] = {}
    if collective:
        how.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
        options = {"driver": "mpio", "comm": comm}
    mode = "r+" if write else "r"

    def opening() -> tuple[h5py.File, Any]:
        file = h5py.File(path, mode, **options)
        return file, file[name].id

    def closing(both: tuple[h5py.File, Any]) -> None:
        both[1].close()  # an open dataset may keep the target file of a link open
        both[0].close()

    with open_on_all(comm, path, write, opening, closing) as (_, dataset):
        move = dataset.write if write else dataset.read

        def transfer(*place: Any) -> None:
            *start, part = place
            if not (part.size or collective):
                return
            there = np.ascontiguousarray(part)  # a copy where part is not contiguous
            try:
                space = _selected(dataset, start, part.shape)
                with Wait(comm) if collective else nullcontext():
                    move(h5py.h5s.create_simple(part.shape), space, there, dxpl=how)
            except Exception as bad:
                raise file_error(path, bad) from None
            if there is not part and not write:
                part[...] = there

        yield transfer


@contextmanager
def opened_by_one(path: Path, name: str, comm: MPI.Intracomm) -> Iterator[Transfer]:
    """Open a dataset that rank 0 writes for all ranks, in boxes.  Collective.

    So an h5py without MPI can write compressed datasets.  Each transfer is collective: the other ranks send their
    boxes to rank 0, which receives them one after the other, and holds one in memory besides its own.
    """
    put, stack = list[Transfer](), ExitStack()  # only on rank 0

    def opening() -> None:
        put.append(stack.enter_context(opened_by_hdf5(path, name, MPI.COMM_SELF, collective=False, write=True)))

    def transfer(*place: Any) -> None:
        *start, part = place
        with together(comm):  # a rank that lacks memory raises before another rank waits for it
            there = np.ascontiguousarray(part)
        places = comm.gather((start, part.shape), root=0) or []
        with together(comm):
            received = np.empty(max((prod(shape) for _, shape in places[1:]), default=0), part.dtype)
        if comm.rank:
            comm.Send([there.reshape(-1).view(np.uint8), MPI.BYTE], dest=0)
            return
        error: Exception | None = None
        for rank, (first, shape) in enumerate(places):
            some = there if rank == 0 else received[: prod(shape)].reshape(shape)
            if rank:  # after an error, too, because the other ranks send
                comm.Recv([some.reshape(-1).view(np.uint8), MPI.BYTE], source=rank)
            try:
                if error is None:
                    put[0](*first, some)
            except Exception as bad:
                error = file_error(path, bad)
        if error is not None:
            raise error

    on_root(comm, path, opening)
    with stack:
        yield transfer
        on_root(comm, path, stack.close)  # a full disk may be reported only at closing


def _selected(dataset: Any, start: Sequence[int], shape: tuple[int, ...]) -> Any:
    """Return the selection of a box, which may be empty, in a dataset, also of a column in one of one dimension."""
    space = dataset.get_space()
    if prod(shape):
        ndim = space.get_simple_extent_ndims()
        space.select_hyperslab(tuple(start[:ndim]), shape[:ndim])
    else:
        space.select_none()
    return space
