"""Access to a contiguous dataset by MPI-IO, at its offset in a file, with any build of h5py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.lib.stride_tricks import as_strided

from pdgemm.io.pieces import Transfer, open_on_all
from pdgemm.local.arrays.dtypes import wire
from pdgemm.support.files import file_error

# Open MPI creates a semaphore in /dev/shm for every file, for shared file pointers, which are not used here.  If
# /dev/shm is full, files cannot be opened, or ranks wait for ever for ranks that failed.  Open MPI reads the variable
# at the first open; a program that uses shared file pointers sets the variable to "sm".
os.environ.setdefault("OMPI_MCA_sharedfp", "individual")

_GAP = 1 << 12  # bytes between two rows of a part; a smaller gap is read with the rows, as the system reads whole pages
_STRIPE = 1 << 22  # bytes of one read of several rows and the gaps between them


@contextmanager
def opened_by_mpi_io(
    path: Path, offset: int, cols: int, stored: np.dtype, comm: MPI.Intracomm, write: bool = False
) -> Iterator[Transfer]:
    """Open the matrix at byte `offset`; yield a transfer that reads or writes a block of the matrix.  Collective.

    cols, stored : columns and type of the whole matrix.  A transfer is local, and converts from or to its array's type.
    """
    with all_by_mpi_io(path, comm, write) as transfer_of:
        yield transfer_of(offset, cols, stored)


@contextmanager
def all_by_mpi_io(path: Path, comm: MPI.Intracomm, write: bool = False) -> Iterator[Callable[..., Transfer]]:
    """Open a file once for all its contiguous datasets.  Collective.

    Yields a local function of offset, cols and stored, which returns a transfer as `opened_by_mpi_io` yields it.
    """
    mode = MPI.MODE_WRONLY if write else MPI.MODE_RDONLY
    with open_on_all(comm, path, write, lambda: MPI.File.Open(comm, str(path), mode), MPI.File.Close) as file:
        yield partial(_transfer, path, file, write)


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
    """Yield ranges of rows of a block that are accessed at once: all rows, if the block is contiguous in the file."""
    rows, width = part.shape
    lines = max(1, rows)
    if width < cols and (write or (cols - width) * itemsize >= _GAP):
        lines = 1
    elif width < cols:
        lines = max(1, _STRIPE // (cols * itemsize))
    for first in range(0, rows if width else 0, lines):
        yield slice(first, min(rows, first + lines))
