"""A file is complete under its name or not there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from mpi4py import MPI

from pdgemm.errors import FileError, PdgemmError

T = TypeVar("T")
PARTIAL = set[Path]()  # files that rank 0 has begun


def on_root(comm: MPI.Comm, path: Path, work: Callable[[], T]) -> T:
    """Rank 0 works on a file; its result is returned, or its error raised, on every rank.

    Errors of the operating system and of HDF5 become a FileError that names the file.
    """
    result, error = None, None
    if comm.rank == 0:
        try:
            result = work()
        except Exception as bad:
            error = file_error(path, bad)
    result, error = comm.bcast((result, error), root=0)
    if error is not None:
        raise error
    return result


def file_error(path: Path, error: Exception) -> PdgemmError:
    """An error met while working on a file, in one line that names the file."""
    if isinstance(error, PdgemmError):
        return error
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return FileError(f"{path}: {reason}")


def check_writable(path: Path, comm: MPI.Comm, size: int) -> None:
    """Could `size` bytes be written under this name now?  Collective; raises FileError on every rank."""

    def check() -> None:
        target = Path(os.path.realpath(path))
        folder = target.parent
        if target.is_dir():
            raise FileError(f"{path} is a folder, not a file")
        if not folder.is_dir():
            raise FileError(f"{path}: the folder {folder} does not exist")
        if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
            raise FileError(f"{path}: no permission to write")
        free = shutil.disk_usage(folder).free
        try:
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with tempfile.TemporaryFile(dir=folder) as file:
                reserve(file, size)
        except OSError as bad:
            raise FileError(f"{path}: {bad.strerror}: {size} bytes are needed, {free} are free in {folder}") from bad

    on_root(comm, path, check)


def reserve(file: IO[bytes], size: int) -> None:
    """Have the file system set `size` bytes aside for a file; nothing where it cannot.

    A full disk, a quota or a limit shows now, not while many ranks write: MPI libraries may keep such an
    error to themselves.  (Not os.posix_fallocate, which writes to every block where it cannot reserve.)
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", libc.fallocate)
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if size and fallocate(file.fileno(), 0, 0, size) != 0 and ctypes.get_errno() != errno.EOPNOTSUPP:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def replacing(path: Path, comm: MPI.Comm, size: int) -> Iterator[Path]:
    """Write under a temporary name beside `path`, renamed at the end.  Collective over `comm`.

    The block raises on all ranks or on none.  If it raises, the temporary file is removed and what was
    under the name is untouched; a job that is killed leaves a file `.NAME.*.partial`, safe to delete.
    size : bytes about to be written; a disk without room for them is refused before the first.
    """
    target = Path(os.path.realpath(path))
    check_writable(path, comm, size)
    name = f".{target.name}.{comm.bcast(uuid.uuid4().hex[:12])}.partial"
    partial = target.with_name(name)
    if comm.rank == 0:
        PARTIAL.add(partial)
    try:
        yield partial
        comm.Barrier()  # every rank has closed it
        on_root(comm, path, lambda: _publish(partial, target))
    except BaseException as error:
        if comm.rank == 0:
            partial.unlink(missing_ok=True)
        if isinstance(error, FileError):  # the caller knows the file by its own name
            raise FileError(str(error).replace(str(partial), str(path))) from error
        raise
    finally:
        PARTIAL.discard(partial)


def _publish(partial: Path, target: Path) -> None:
    with partial.open("rb+") as file:
        os.fsync(file.fileno())  # the data reaches the disk before the name does
    if target.exists():
        shutil.copymode(target, partial)
    partial.replace(target)
