"""A dataset through h5py: block-cyclic shares as regular hyperslabs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np

from pdgemm.errors import FileError, Shield, raise_together
from pdgemm.files import file_error
from pdgemm.io.place import Place, check_equal

Progress = Callable[[int, int], object]


def parallel_h5py() -> bool:
    """Is h5py built with MPI?  Raises FileError where it is built with another MPI than mpi4py's."""
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
    """The MPI libraries in this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libmpi" in line}
    return sorted({os.path.realpath(p) for p in paths if Path(p).name.startswith(("libmpi.", "libmpich."))})


def read(
    path: Path,
    name: str,
    local: np.ndarray,
    place: Place,
    comm: MPI.Comm,
    collective: bool,
    progress: Progress | None = None,
) -> None:
    """local := this rank's share of the dataset, converted to local's dtype.  Collective."""
    _each_tile(path, name, "r", local, place, comm, collective, _read_box, progress)


def write(
    path: Path, name: str, local: np.ndarray, place: Place, comm: MPI.Comm, progress: Progress | None = None
) -> None:
    """This rank's share of the dataset := local, by collective transfers.  Collective."""
    _each_tile(path, name, "r+", local, place, comm, True, _write_box, progress)


def check(path: Path, name: str, local: np.ndarray, place: Place, comm: MPI.Comm) -> None:
    """Is this rank's share in the file what it is in memory, bit for bit?  Collective."""
    _each_tile(path, name, "r", local, place, comm, True, _check_box, None)


def _check_box(dataset: Any, space: Any, box: np.ndarray, how: Any) -> None:
    found = np.empty(box.shape, box.dtype)
    dataset.read(h5py.h5s.create_simple(box.shape), space, found, dxpl=how)
    check_equal(found, box)


def _read_box(dataset: Any, space: Any, box: np.ndarray, how: Any) -> None:
    staged = box if box.flags.c_contiguous else np.empty(box.shape, box.dtype)
    dataset.read(h5py.h5s.create_simple(box.shape), space, staged, dxpl=how)
    if staged is not box:
        box[...] = staged


def _write_box(dataset: Any, space: Any, box: np.ndarray, how: Any) -> None:
    dataset.write(h5py.h5s.create_simple(box.shape), space, np.ascontiguousarray(box), dxpl=how)


def _each_tile(
    path: Path,
    name: str,
    mode: str,
    local: np.ndarray,
    place: Place,
    comm: MPI.Comm,
    collective: bool,
    transfer: Callable[[Any, Any, np.ndarray, Any], None],
    progress: Progress | None,
) -> None:
    """Transfer the share tile by tile; collectively, ranks with fewer tiles take part with nothing.

    A rank whose transfer fails goes on taking part, so that the others do not wait for it; then all raise.
    """
    tiles = list(place.tiles(local.itemsize))
    count = comm.allreduce(len(tiles), op=MPI.MAX) if collective else len(tiles)
    how = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    options: dict[str, Any] = {}
    if collective:
        how.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
        options = {"driver": "mpio", "comm": comm}
    error, notify, opened = None, Shield(progress), None
    try:
        opened = h5py.File(path, mode, **options)
    except Exception as bad:
        error = file_error(path, bad)
    raise_together(comm, error)  # before anyone waits in a collective transfer
    assert opened is not None
    try:
        with opened as file:
            dataset = file[name].id
            for number in range(count):
                try:
                    space = dataset.get_space()
                    if number < len(tiles):
                        box = _select(space, local, *tiles[number])
                    else:
                        space.select_none()
                        box = local[:0, :0]
                    transfer(dataset, space, box, how)
                except Exception as bad:
                    error = error or file_error(path, bad)
                notify(number + 1, count)
    except Exception as bad:
        error = error or file_error(path, bad)
    raise_together(comm, error or notify.error)


def _select(space: Any, local: np.ndarray, rows: Any, cols: Any) -> np.ndarray:
    """Select a tile in the file; the part of the local array that belongs to it."""
    space.select_hyperslab(
        (rows.start, cols.start),
        (rows.count, cols.count),
        (rows.stride, cols.stride),
        (rows.block, cols.block),
    )
    return local[rows.local : rows.local + rows.size, cols.local : cols.local + cols.size]
