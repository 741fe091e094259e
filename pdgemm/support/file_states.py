"""Which file is under a name, whether it is one at all, and whether it has changed.  Needs no MPI."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from time import sleep, time_ns
from typing import NamedTuple

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
}  # fmt: skip


def ordinary(path: str | Path, flags: int) -> int:
    """The `opener` of open() that opens files only: a FIFO would wait for ever, a device lose what it is given."""
    with suppress(FileNotFoundError):
        check_ordinary(Path(path).stat())  # before it is opened, for that alone does something to some devices
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    try:
        check_ordinary(os.fstat(descriptor))  # which may have become another one
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_ordinary(status: os.stat_result) -> None:
    """Raises OSError for what is not a file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")


class State(NamedTuple):
    """Which file it is, and when it was written to.

    Programs may set the time of the last write (`modified`), and cp -p does.  That of the last change of contents,
    owner, mode, links or the other time (`changed`) is the system's own.
    """

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds
    changed: int  # nanoseconds


def state(path: Path) -> State | None:
    """Of the file under this name; None where there is none.  (Opened, because NFS looks at the server only then.)"""
    try:
        with open(path, "rb", opener=ordinary) as file:
            return state_of(file.fileno())
    except FileNotFoundError:
        return None


def state_of(descriptor: int) -> State:
    found = os.fstat(descriptor)
    return State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def settled(path: Path) -> State | None:
    """The same, when a write that follows will give the file another state.

    The clock of a file system stands still for at most 10 ms, or 2 s where its times are whole seconds; two writes in
    one of these spans have the same time.
    """
    now = state(path)
    if now is not None:
        tick = 11_000_000 if now.changed % 1_000_000_000 else 2_000_000_000  # nanoseconds
        if (age := time_ns() - now.changed) < tick:
            sleep(min(tick, tick - age) / 1e9)  # a server's clock may be ahead of ours
            now = state(path)
    return now
