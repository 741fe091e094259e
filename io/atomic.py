"""Atomic replacement of files, by rank 0 for all ranks: a file is complete under its name or does not exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mpi4py import MPI

from pdgemm.errors import FileError
from pdgemm.support import files
from pdgemm.support.files import LOST, reserve, to_disk

T = TypeVar("T")


def on_root(comm: MPI.Comm, path: Path, work: Callable[[], T]) -> T:
    """Call `work` on rank 0; return its result, or raise its error, on every rank.

    Errors of the operating system and of HDF5 become a FileError that names the file.
    """
    result, error = None, None
    if comm.rank == 0:
        try:
            result = work()
        except Exception as bad:
            error = files.file_error(path, bad)
    result, error = comm.bcast((result, error), root=0)
    if error is not None:
        raise error
    return result


def check_writable_on_all(path: Path, comm: MPI.Comm, size: int, *replaced: Any) -> Path:
    """Return `path`, links resolved; raise the errors of `check_writable` on every rank.  Collective.

    replaced : `overwrite` and `mark` of `check_writable`.
    """
    return on_root(comm, path, partial(files.check_writable, path, size, *replaced))


def create_with_header(path: Path, header: bytes, size: int) -> None:
    """Write the header of a file, and reserve the space of `size` bytes of elements.  Local."""
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        reserve(file, len(header) + size)
        os.truncate(file.fileno(), len(header) + size)


def check_header(path: Path, partial: Path, header: bytes, size: int) -> None:
    """Raise FileError, which names `path`, if the file on the disk has another header or another size.  Local."""
    to_disk(partial, (len(header), len(header) + size))
    with partial.open("rb") as file:
        if file.read(len(header)) != header or os.fstat(file.fileno()).st_size != len(header) + size:
            raise FileError(f"{path}: {LOST}")


@contextmanager
def replacing(
    path: Path,
    comm: MPI.Comm,
    size: int,
    *replaced: Any,
    kept: Path | None = None,
    last: Callable[[], object] | None = None,
) -> Iterator[Path]:
    """Yield a temporary name beside `path` for the block to write; then rename that file.  Collective over `comm`.

    Jobs that replace the same file wait for each other (`files.Output`), so the file that the block reads is also the
    file that it replaces.  The block raises on all ranks or on none.  If it raises, the temporary file is removed and
    the old file is unchanged; a job that is killed leaves a file `.NAME.*.partial`, which the next job removes.
    size : bytes to be written; FileError is raised before the first byte if the disk has too little space.
    replaced : `overwrite` and `mark` of `check_writable`; default: any file is replaced.
    kept : the temporary name to use; its file stays if the block raises.  None: a new name, and the file is removed.
    last : called on rank 0 just before the rename; `last` may give the old file other names.
    """
    outputs = list[files.Output]()
    target, begun = check_writable_on_all(path, comm, size, *replaced), None
    on_root(comm, path, lambda: outputs.append(files.Output(path, target, kept)))  # other ranks may not see the folder
    try:
        while begun is None:  # try repeatedly, so that all ranks wait in collective calls
            begun = on_root(comm, path, lambda: outputs[0].begin())
        yield begun
        comm.Barrier()  # every rank has closed the file
        on_root(comm, path, lambda: outputs[0].publish(last))
    except FileError as error:  # name the caller's file instead of the temporary file
        if kept is None:
            error.args = (str(error).replace(str(begun or path), str(path)),)
        raise
    finally:
        for output in outputs:
            output.end()
