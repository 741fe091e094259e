"""A file is complete under its name or not there, and all ranks know which: rank 0 works on it for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from mpi4py import MPI

from pdgemm.errors import FileError
from pdgemm.support import files

T = TypeVar("T")


def on_root(comm: MPI.Comm, path: Path, work: Callable[[], T]) -> T:
    """Rank 0 works on a file; its result is returned, or its error raised, on every rank.

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


def check_writable(path: Path, comm: MPI.Comm, size: int) -> Path:
    """Could `size` bytes be written under this name now?  Collective; raises FileError on every rank."""
    return on_root(comm, path, partial(files.check_writable, path, size))


@contextmanager
def replacing(path: Path, comm: MPI.Comm, size: int) -> Iterator[Path]:
    """Write under a temporary name beside `path`, renamed at the end.  Collective over `comm`.

    Of jobs that replace the same file one waits for the other (`files.Output`), so that what the block reads of the
    file is what it replaces.  The block raises on all ranks or on none.  If it raises, the temporary file is removed
    and what was under the name is untouched; a job that is killed leaves a file `.NAME.*.partial`, safe to delete.
    size : bytes about to be written; a disk without room for them is refused before the first.
    """
    output, begun = files.Output(path, check_writable(path, comm, size)), None
    try:
        while begun is None:  # in turns, so that all ranks wait together and see each other alive
            begun = on_root(comm, path, output.begin)
        yield begun
        comm.Barrier()  # every rank has closed it
        on_root(comm, path, output.publish)
    except FileError as error:  # the caller knows the file by its own name
        raise FileError(str(error).replace(str(begun or path), str(path))) from error
    finally:
        if comm.rank == 0:
            output.end()
