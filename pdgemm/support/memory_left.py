"""Free memory of this machine and of control groups (jobs of Slurm); memory that this process frees and retains."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from os import environ
from pathlib import Path

MACHINE = "memory"
ROOT = Path("/")
_NO_LIMIT = 1 << 60  # bytes; a limit of this size or more means that there is no limit
KEPT = 1 << 25  # bytes: larger blocks are returned at once (DEFAULT_MMAP_THRESHOLD_MAX of glibc's malloc.c)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3), where a threshold of trimming of -1 is never reached


def memory_left() -> dict[str, int]:
    """Return the free bytes under each limit, by name: the machine, control groups; {} where the system reports none.

    Memory that the system can free counts as free: the page cache, its own caches, and swap.  So no more memory can
    be allocated than this.
    """
    machine = _table(ROOT / "proc/meminfo")
    swap = machine.get("SwapFree", 0)
    free = {MACHINE: machine["MemAvailable"] + swap} if "MemAvailable" in machine else {}
    for folder, limit, used, prefix in _groups():
        most, now = _number(folder / limit), _number(folder / used)
        if most is None or now is None or most >= _NO_LIMIT:
            continue
        pages = _table(folder / "memory.stat")
        files = sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        cached = files + pages.get("slab_reclaimable", 0)
        free[f"control group {folder}"] = max(0, most - now + min(cached, now)) + swap
    return free


@cache
def keep_freed_memory() -> bool:
    """Let this process retain the memory that it frees, for the next step of a loop.  Local; returns whether it does.

    The C library of Linux returns freed memory at the end of the heap to the system, and each of its pages is faulted
    in and zeroed when it is used again.  Blocks of more than `KEPT` bytes are still returned.  Thresholds that the user
    has set in the environment are not changed; other C libraries have none.
    """
    tuned = environ.get("GLIBC_TUNABLES", "")
    for name in ("trim_threshold", "mmap_threshold"):
        if f"MALLOC_{name.upper()}_" in environ or f"glibc.malloc.{name}" in tuned:
            return False
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(*x) for x in ((_MMAP_THRESHOLD, KEPT), (_TRIM_THRESHOLD, -1)))
    return False


def largest_so_far() -> int:
    """Return the bytes of the largest resident set that this process has had; 0 where the system reports none."""
    return _table(ROOT / "proc/self/status").get("VmHWM", 0)


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield for each control group (v1 or v2), inner first: folder, limit file, usage file, prefix in memory.stat."""
    with suppress(OSError):
        for line in (ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = ROOT / "sys/fs/cgroup"
            if controllers == "":
                names = "memory.max", "memory.current", ""
            elif "memory" in controllers.split(","):
                base, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            else:
                continue
            here = base / path.lstrip("/")
            for folder in (here, *here.parents):
                if folder == base or base in folder.parents:
                    yield folder, *names


def _number(path: Path) -> int | None:
    """Return the number in a file; None where the file is missing or holds another text, such as "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    """Return the numbers of a file by their names; numbers in kB are converted to bytes."""
    numbers = dict[str, int]()
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, *number = line.split()
            if number and number[0].isdecimal():
                numbers[name.rstrip(":")] = int(number[0]) * (1024 if number[1:] == ["kB"] else 1)
    return numbers
