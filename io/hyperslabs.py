"""Access to a dataset through h5py, collective or independent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mpi4py import MPI  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np

from pdgemm.errors import FileError
from pdgemm.io.matrix_files import Transfer
from pdgemm.io.pieces import open_on_all
from pdgemm.support.files import file_error
from pdgemm.support.waits import Wait


def parallel_h5py() -> bool:
    """Return whether h5py is built with MPI.  Raises FileError if it is built with another MPI than mpi4py's."""
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
def opened(path: Path, name: str, comm: MPI.Intracomm, collective: bool, write: bool = False) -> Iterator[Transfer]:
    """Open a dataset; the result reads or writes rows x columns, converting the type of the array.  Collective.

    collective : each transfer is collective, too; ranks without elements take part with an empty selection.
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
        both[1].close()  # it may keep the file open that a link led to
        both[0].close()

    with open_on_all(comm, path, write, opening, closing) as (_, dataset):
        move = dataset.write if write else dataset.read

        def transfer(row: int, col: int, part: np.ndarray) -> None:
            if not (part.size or collective):
                return
            there = np.ascontiguousarray(part)  # a copy where part is not contiguous
            try:
                space = dataset.get_space()
                if part.size:
                    space.select_hyperslab((row, col), part.shape)
                else:
                    space.select_none()
                with Wait(comm) if collective else nullcontext():
                    move(h5py.h5s.create_simple(part.shape), space, there, dxpl=how)
            except Exception as bad:
                raise file_error(path, bad) from None
            if there is not part and not write:
                part[...] = there

        yield transfer
