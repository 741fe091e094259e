"""Access to a dataset through h5py, collective or independent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from pathlib import Path
from typing import Any

from mpi4py import MPI  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np

from pdgemm.errors import FileError
from pdgemm.io.atomic import on_root
from pdgemm.io.pieces import Transfer, open_on_all
from pdgemm.support.agreement import together
from pdgemm.support.files import file_error
from pdgemm.support.waits import Wait


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
    """Open a dataset; yield a transfer of rectangles, which converts from or to the array's type.  Collective.

    collective : whether transfers are collective, too; ranks without elements take part with an empty selection.
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

        def transfer(row: int, col: int, part: np.ndarray) -> None:
            if not (part.size or collective):
                return
            there = np.ascontiguousarray(part)  # a copy where part is not contiguous
            try:
                space = _selected(dataset, row, col, part.shape)
                with Wait(comm) if collective else nullcontext():
                    move(h5py.h5s.create_simple(part.shape), space, there, dxpl=how)
            except Exception as bad:
                raise file_error(path, bad) from None
            if there is not part and not write:
                part[...] = there

        yield transfer


@contextmanager
def opened_by_one(path: Path, name: str, comm: MPI.Intracomm) -> Iterator[Transfer]:
    """Open a dataset that rank 0 writes for all ranks, in rectangles.  Collective.

    So an h5py without MPI can write compressed datasets.  Each transfer is collective: the other ranks send their
    rectangles to rank 0, which receives them one after the other, and has one in memory beside its own.
    """
    held = list[Any]()

    def opening() -> None:
        file = h5py.File(path, "r+")
        held.extend((file[name].id, file))

    def put(row: int, col: int, part: np.ndarray) -> None:
        if part.size:
            held[0].write(h5py.h5s.create_simple(part.shape), _selected(held[0], row, col, part.shape), part)

    def transfer(row: int, col: int, part: np.ndarray) -> None:
        with together(comm):  # a rank that lacks memory raises before another rank waits for it
            there = np.ascontiguousarray(part)
        places = comm.gather((row, col, part.shape), root=0) or []
        with together(comm):
            received = np.empty(max((prod(shape) for _, _, shape in places[1:]), default=0), part.dtype)
        if comm.rank:
            comm.Send([there.reshape(-1).view(np.uint8), MPI.BYTE], dest=0)
            return
        error: Exception | None = None
        for rank, (first, second, shape) in enumerate(places):
            some = there if rank == 0 else received[: prod(shape)].reshape(shape)
            if rank:  # after an error, too, because the other ranks send
                comm.Recv([some.reshape(-1).view(np.uint8), MPI.BYTE], source=rank)
            try:
                if error is None:
                    put(first, second, some)
            except Exception as bad:
                error = file_error(path, bad)
        if error is not None:
            raise error

    on_root(comm, path, opening)
    try:
        yield transfer
    except BaseException:
        for each in held:
            with suppress(Exception):
                each.close()
        raise
    on_root(comm, path, lambda: [each.close() for each in held])  # a full disk may be reported only at closing


def _selected(dataset: Any, row: int, col: int, shape: tuple[int, ...]) -> Any:
    """Return the selection of a rectangle in a dataset of one or two dimensions; it may be empty."""
    space = dataset.get_space()
    if shape[0] * shape[1]:
        ndim = space.get_simple_extent_ndims()
        space.select_hyperslab((row, col)[:ndim], shape[:ndim])
    else:
        space.select_none()
    return space
