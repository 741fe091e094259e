"""The state of the file under a name: whether it is an ordinary file, and whether it has changed.  Needs no MPI."""

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
    """Open ordinary files only, as `opener` of open(): a FIFO would wait for ever, and a device would lose the data."""
    with suppress(FileNotFoundError):
        check_ordinary(Path(path).stat())  # before the file is opened: opening alone changes some devices
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    try:
        check_ordinary(os.fstat(descriptor))  # another file may have the name by now
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_ordinary(status: os.stat_result) -> None:
    """Raise OSError where the status is not that of an ordinary file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")


class State(NamedTuple):
    """The identity of a file, and the times of its last write and its last change.

    Programs may set the time of the last write (`modified`), and cp -p does.  The time of the last change of contents,
    owner, mode, links or `modified` (`changed`) is set by the system only.
    """

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds
    changed: int  # nanoseconds

    @property
    def identity(self) -> set[tuple[int, int]]:
        """The properties that a rename preserves: device and inode, or on some network file systems size and time."""
        return {(self.device, self.inode), (self.size, self.modified)}


def state(path: Path) -> State | None:
    """Return the state of the file under this name; None if there is none.  (NFS asks the server only at an open.)"""
    try:
        with open(path, "rb", opener=ordinary) as file:
            return state_of(file.fileno())
    except FileNotFoundError:
        return None


def state_of(descriptor: int) -> State:
    status = os.fstat(descriptor)
    return State(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def settled(path: Path) -> State | None:
    """Return the state of a file like `state`, after a wait such that each later write will change this state.

    The clock of a file system stands still for at most 10 ms, or 2 s where its times are whole seconds; two writes
    within such a time have the same time stamp.
    """
    now = state(path)
    if now is not None:
        tick = 11_000_000 if now.changed % 1_000_000_000 else 2_000_000_000  # nanoseconds
        if (age := time_ns() - now.changed) < tick:
            sleep(min(tick, tick - age) / 1e9)  # a server's clock may be ahead of ours
            now = state(path)
    return now
