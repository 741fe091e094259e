"""Ordinary files, read and written by one process: complete under their names or not there.  Needs no MPI."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from pdgemm.errors import FileError, PdgemmError
from pdgemm.support.file_states import check_ordinary, ordinary, settled, state
from pdgemm.support.json_input import Seconds, variable
from pdgemm.support.text import printable, short_name

UNFINISHED = set[Path]()  # what is to be removed if this process is ended now
_TIDIED = set[Path]()  # beside which nothing is left of jobs that were killed before this one began
LOST = "what was written is not what the file holds (disk full, quota, bad disk)"
WAIT = "PDGEMM_LOCK_WAIT"  # in the environment: for how many seconds a job waits for another that saves to its file
_WAIT = 600.0  # where it says nothing
_TURN = 1.0  # seconds after which whoever waits hears of it
_NAP = 0.05  # seconds between the first two looks at the lock
_GONE = 9  # times that a lock file of another user may go before it is opened
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def read_file(path: str | Path, limit: int = 1 << 20, what: str = "") -> bytes:
    """All of a file of at most `limit` bytes.  Raises FileError: `what` it is, by default its path, and why."""
    with naming(what or path), open(path, "rb", opener=ordinary) as file:
        large = os.fstat(file.fileno()).st_size > limit
        text = b"" if large else file.read(limit + 1)  # it may grow, and what is made when it is read has no size
        if large or len(text) > limit:
            raise FileError(f"{what or path}: larger than {limit} bytes, which is too much for such a file")
        return text


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Work on a file, whose errors become a FileError that names it."""
    try:
        yield
    except PdgemmError:
        raise
    except (OSError, ValueError) as bad:  # ValueError: characters that no path has
        raise file_error(path, bad) from None


def file_error(path: str | Path, error: Exception) -> PdgemmError:
    """An error met while working on a file, in one line that names it, or the missing one if that is another."""
    if isinstance(error, PdgemmError):
        return error
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    if isinstance(error, FileNotFoundError) and error.filename and str(error.filename) not in str(path):
        path, folder = error.filename, Path(error.filename).parent
        reason += "" if folder.exists() else f"; there is no folder {folder}: was it moved or removed?"
    return FileError(f"{path}: {reason}")


def check_writable(path: Path, size: int) -> Path:
    """The file that is to be replaced, links resolved, if `size` bytes could be written now.  Raises FileError."""
    with naming(path):
        target = _resolved(path)
        folder = target.parent
        if not folder.exists():
            raise FileError(f"{path}: the folder {folder} does not exist")
        if not folder.is_dir():
            raise FileError(f"{path}: {folder} is not a folder")
        if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.R_OK | os.W_OK)):
            raise FileError(f"{path}: no permission to read and write")
        free = shutil.disk_usage(folder).free
        try:
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with tempfile.TemporaryFile(dir=folder) as file:
                reserve(file, size)
        except OSError as bad:
            raise FileError(f"{path}: {bad.strerror}: {size} bytes are needed, {free} are free in {folder}") from None
    return target


def _resolved(path: Path) -> Path:
    """Behind all links."""
    target = Path(os.path.realpath(path))
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):  # the folder is looked at later
        return target
    check_ordinary(found)
    if not target.exists() or not target.samefile(path):  # /dev/fd/3 of a file that was removed
        raise OSError(errno.ENOENT, "the file has no name that it could be replaced under")
    return target


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


# ------------------------------------------------------------------ replacing a file
def write_file(path: Path, data: bytes | str) -> None:
    """The file := data, on disk when this returns; if it raises FileError, what was there is untouched."""
    output = Output(path, check_writable(path, len(data)))
    try:
        with naming(path):
            while (partial := output.begin()) is None:
                pass
            encoded = data if isinstance(data, bytes) else data.encode()
            partial.write_bytes(encoded)
            to_disk(partial)
            if partial.read_bytes() != encoded:
                raise FileError(f"{path}: {LOST}")
            output.publish()
    finally:
        output.end()


def to_disk(path: Path, but: tuple[int, int] = (0, 0)) -> None:
    """Have a file's bytes on the disk, and read from there when they are read next, as far as the system obeys.

    but : the first byte, and the one after the last, of those that may stay in memory.
    """
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        with suppress(OSError):  # it is done for whole pages: those with any other byte
            os.posix_fadvise(file.fileno(), 0, but[0] + PAGESIZE, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file.fileno(), but[1] // PAGESIZE * PAGESIZE, 0, os.POSIX_FADV_DONTNEED)


class Output:
    """A file that is written under a temporary name beside its own, which it takes when it is complete.

    A lock beside the file keeps other jobs from replacing it from `begin` to `end`: what is read of it in between is
    what it holds when it is replaced.  The lock goes with the process.  Where the file system has none, a line says
    so; there and among programs that know nothing of the lock, `publish` refuses to replace another file than that of
    `begin`, but for what comes to be in the short time between that look and the rename.

    path : as the user calls it.   target : what `check_writable` returned.
    kept : the temporary name, under which the file stays if it is not completed; None: a new one, and it goes.
    """

    def __init__(self, path: Path, target: Path, kept: Path | None = None) -> None:
        self._path, self._target, self._kept = path, target, kept is not None
        self._partial = kept or hidden_name(target, f".{uuid.uuid4().hex[:12]}.partial")
        self._lock = hidden_name(target, ".pdgemm-lock")
        self._held: int | None = None
        self._since: float | None = None

    def begin(self) -> Path | None:
        """Lock the file.  The name to write under; None: another job has the lock, ask again.  Raises FileError."""
        wait, now = file_patience(), monotonic()
        if self._since is None:
            self._since = now
        turn = now + _TURN
        while (held := self._try()) is None:
            waited = now - self._since
            if waited >= wait:
                raise FileError(
                    f"{self._path}: {_holder(self._lock)} is saving to it, and was not done in {wait:g} s; "
                    f"try again, or set {WAIT} to more seconds"
                )
            if not waited:
                say(f"{self._path}: waiting for {_holder(self._lock)}, which is saving to it; {wait:g} s at most")
            if now >= turn:
                return None
            sleep(min(_TURN, _NAP + waited / 8))  # a server that many jobs ask has other things to do
            now = monotonic()
        self._held = held
        UNFINISHED.update((self._lock,) if self._kept else (self._partial, self._lock))
        with suppress(OSError):  # it is another user's
            os.fchmod(held, 0o666)  # who may save to the file may lock it, whatever our umask
        with suppress(OSError):  # it only helps those who wait
            os.ftruncate(held, 0)
            os.pwrite(held, process_name().encode(), 0)
        with suppress(OSError):  # no locks here: another job may be writing
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_left()
        self._before = settled(self._target)
        return self._partial

    def _remove_left(self) -> None:
        """Remove what jobs that were killed have left of this file, whose lock is ours.  Once: folders may be large."""
        if self._target in _TIDIED:
            return
        _TIDIED.add(self._target)
        name = hidden_name(self._target, ".*.partial").name
        left = re.compile(re.escape(name).replace(r"\*", "[0-9a-f]{12}") + OF_MPI)
        for path in self._target.parent.glob(".*.partial*"):
            if left.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _try(self) -> int | None:
        with naming(f"{self._path}: its lock file {self._lock}"):
            return lock(self._lock)

    def publish(self, last: Callable[[], object] | None = None) -> None:
        """The file is complete.  Raises FileError where it was changed since `begin`.

        last : called when nothing but the rename is left to do; it may give the old file other names.
        """
        with self._partial.open("rb+") as file:
            os.fsync(file.fileno())  # the data reaches the disk before the name does
        if self._target.exists():
            _owned_alike(self._target, self._partial)
        if state(self._target) != self._before:
            raise FileError(f"{self._path}: another program changed it meanwhile, and it was left like that: try again")
        if last is not None:
            last()
        self._partial.replace(self._target)
        self.end()

    def end(self) -> None:
        """Nothing remains beside the file.  May be called again."""
        if self._held is None:
            return
        UNFINISHED.discard(self._lock)  # before it may be somebody else's
        partial = () if self._kept else (self._partial,)
        for path in (*partial, self._lock) if _is_at(self._held, self._lock) else partial:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        UNFINISHED.discard(self._partial)
        os.close(self._held)  # after the file is gone: whoever gets the lock now sees that, and makes a new one
        self._held = None


OF_MPI = r"(\.(data|metadata)\.\d+)?"  # which an MPI library adds to the name of a file, and leaves where it is killed


def hidden_name(target: Path, ending: str) -> Path:
    """A hidden name in the same folder, no longer than names may be."""
    most = os.pathconf(target.parent, "PC_NAME_MAX") - len(ending) - 1
    return target.with_name(f".{short_name(target.name, most)}{ending}")


def _owned_alike(old: Path, new: Path) -> None:
    found = old.stat()
    for user, group in ((-1, found.st_gid), (found.st_uid, -1)):
        with suppress(PermissionError):  # only root gives files away
            os.chown(new, user, group)
    shutil.copymode(old, new)


# ------------------------------------------------------------------ locks
def lock(path: Path) -> int | None:
    """Lock a file, made where there is none: a descriptor, with which the lock goes.  None: somebody else has it.

    By flock: two descriptors of one process exclude each other too, and on NFS Linux asks the server.  Who has the lock
    may remove the file, so whoever gets it then looks whether the file is still under its name.
    """
    gone = 0
    while True:
        try:
            descriptor = ordinary(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except PermissionError as bad:  # it is another user's
            try:
                descriptor = ordinary(path, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:  # who has removed it; or nothing may be made in this folder
                gone += 1
                if gone > _GONE:
                    raise bad from None
                continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as bad:
            if bad.errno != errno.ESTALE:  # which NFS says of a file that was removed
                _say_no_locks(path.parent, bad.strerror)
                return descriptor
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Is the open file the one under this name?"""
    try:
        with open(path, "rb", opener=ordinary) as file:
            return os.path.sameopenfile(descriptor, file.fileno())
    except OSError:
        return False


def file_patience() -> float:
    """For how many seconds this job waits for another one."""
    wait = variable(WAIT, Seconds, "a number of seconds")
    return _WAIT if wait is None else float(wait)


def process_name() -> str:
    """This process, its host and its job, for people."""
    job = next((f" of job {os.environ[name]}" for name in _JOBS if os.environ.get(name)), "")
    return f"process {os.getpid()} on {platform.node()}{job}"


def _holder(path: Path) -> str:
    """What `process_name` said there, of another process."""
    with suppress(OSError):
        text = "".join(filter(str.isprintable, read_file(path)[:200].decode(errors="replace")))
        return text or "another process"
    return "another process"


@cache
def _say_no_locks(folder: Path, reason: str) -> None:
    say(f"files in {folder} cannot be locked ({reason}): of jobs that save to one file at once, only one will succeed")


def say(text: str) -> None:
    """Print a line to whoever looks after the job; when nobody does, the work goes on all the same."""
    with suppress(OSError, ValueError):
        line = " ".join(["pdgemm:", *printable(text).split()])
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: launchers mix what ranks write
