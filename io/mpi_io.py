"""Access to a contiguous dataset by MPI-IO, at its offset in a file, with any build of h5py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI

from pdgemm.io.pieces import Transfer, open_on_all
from pdgemm.support.files import file_error

# Open MPI creates a semaphore in /dev/shm for every file, for shared file pointers, which are not used here.  If that
# is full, files cannot be opened, or ranks wait for ever for those that failed.  Open MPI reads the variable at the
# first open; a program that uses shared file pointers sets it to "sm".
os.environ.setdefault("OMPI_MCA_sharedfp", "individual")


@contextmanager
def opened(
    path: Path, offset: int, cols: int, stored: np.dtype, comm: MPI.Intracomm, write: bool = False
) -> Iterator[Transfer]:
    """Open the matrix at byte `offset`; the result reads or writes whole rows or a part of one.  Collective.

    cols, stored : columns and type of the whole matrix.  A transfer is local, and converts to the type of its array.
    """
    mode = MPI.MODE_WRONLY if write else MPI.MODE_RDONLY
    with open_on_all(comm, path, write, lambda: MPI.File.Open(comm, str(path), mode), MPI.File.Close) as file:
        move = file.Write_at if write else file.Read_at

        def transfer(row: int, col: int, part: np.ndarray) -> None:
            if not part.size:
                return
            at, status = offset + (row * cols + col) * stored.itemsize, MPI.Status()
            there = part if part.dtype == stored else np.empty(part.shape, stored)
            try:
                move(at, [there, MPI.BYTE], status)
                moved = status.Get_count(MPI.BYTE)
                if moved != there.nbytes:
                    done = "written" if write else "read, the file is truncated"
                    raise OSError(f"of {there.nbytes} bytes at byte {at} only {max(0, moved)} were {done}")
            except Exception as bad:
                raise file_error(path, bad) from None
            if there is not part:
                part[...] = there

        yield transfer
