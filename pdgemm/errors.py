"""Exceptions, and how all ranks raise the same one.

A rank that raises alone leaves the others waiting in their next communication.  So every
collective function first looks for trouble on its own rank, then calls `raise_together`
(or `check_together`), and after that nobody raises alone.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI


class PdgemmError(Exception):
    """Base of what pdgemm raises on purpose: bad input, told in one line, on all ranks."""


class LayoutError(PdgemmError, ValueError):
    """Shapes, blocks or layouts that do not fit together."""


class GridError(PdgemmError, ValueError):
    """A process grid that cannot be built, or grids that differ where one is needed."""


class DTypeError(PdgemmError, TypeError):
    """An element type that is not supported, or types that differ."""


class ArgumentError(PdgemmError, ValueError):
    """An argument out of its range, or not the same on all ranks."""


class MemoryLimitError(PdgemmError, MemoryError):
    """The memory limit is too small; the message says what would be enough."""


class OutOfMemoryError(PdgemmError, MemoryError):
    """A rank could not allocate what it needs."""


class NodeMemoryError(OutOfMemoryError):
    """The ranks of a node have no room left in the memory that they share."""


class DeviceError(PdgemmError, ValueError):
    """A device that is not there, or matrices in the memory of different ones."""


class FileError(PdgemmError, OSError):
    """A file or dataset that cannot be read or written."""


def raise_together(comm: MPI.Comm, error: Exception | None) -> None:
    """If any rank of `comm` brings an error, raise it on all.  Collective; one allreduce of 4 words.

    The lowest failing rank's exception is raised everywhere, and says which ranks it concerns.
    """
    check_together(comm, error, "")


def check_together(comm: MPI.Comm, error: Exception | None, description: str, flag: bool = False) -> bool:
    """`raise_together`, and also raise if the ranks' descriptions of the problem differ.  Is the flag of any rank set?

    Collective; one allreduce of 4 words, whatever the length of the description.
    """
    from mpi4py import MPI

    global waiting
    refuse_freed(comm)
    if comm.size == 1 and error is None:
        return flag
    digest = int.from_bytes(hashlib.blake2b(description.encode(errors="surrogatepass"), digest_size=7).digest(), "big")
    lowest = np.array([comm.size if error is None else comm.rank, digest, -digest, -flag])
    here = meetings.get(comm.handle)
    if here:
        here.joined += 1
    waiting = monotonic(), comm, here
    try:
        comm.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    finally:
        waiting = None
    first = int(lowest[0])
    if first < comm.size:
        failed = [rank for rank, bad in enumerate(comm.allgather(error is not None)) if bad]
        raise comm.bcast(_told(error, failed, comm.size) if comm.rank == first else None, root=first)
    if lowest[1] != -lowest[2]:
        raise ArgumentError(_disagreement(comm.allgather(description)))
    return bool(lowest[3])


class Meetings:
    """The calls of `check_together` on one communicator, as far as this rank has come; `watchdog` looks on."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.joined = 0
        self.unchecked = 0  # the last one that this rank left out, with check=False
        self.asked = 0  # the last one that a lower rank asked after


meetings: dict[int, Meetings] = {}  # by the handles of their communicators
waiting: tuple[float, MPI.Comm, Meetings | None] | None = None  # since when this rank waits for the others, and where


class together:
    """Work that may fail on some ranks only and does not communicate; a failure is raised on all.

    What the `with` block appends to the list it is given must be the same on all ranks, else all raise.
    check : False where the caller vouches for all that: nothing is compared, a failure is this rank's alone.
    flag  : set it on any rank, and behind the block it is set on all.
    """

    __slots__ = ("_check", "_comm", "_said", "flag")

    def __init__(self, comm: MPI.Comm, check: bool = True) -> None:
        self._comm, self._check, self._said, self.flag = comm, check, list[object](), False

    def __enter__(self) -> list[object]:
        refuse_freed(self._comm)
        return self._said

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._check:
            if here := meetings.get(self._comm.handle):
                here.joined = here.unchecked = here.joined + 1
        elif error is None or isinstance(error, Exception):
            description = ""
            if error is None and self._comm.size > 1:
                try:
                    description = ", ".join(map(str, self._said))
                except Exception as bad:  # Python writes no integer of more than 4300 digits
                    error = ArgumentError(f"an argument cannot be written: {bad}")
            self.flag = check_together(self._comm, error, description, self.flag)


def refuse_freed(comm: MPI.Comm) -> None:
    """No rank has a communicator of which to ask the others, but all of them freed it."""
    if not comm:
        raise GridError("the process grid was freed, and with it what its matrices communicate by")


class Shield:
    """Calls a user's callback so that its exception can harm nobody: the first one is kept for later.

    An exception out of the middle of a collective operation would leave the other ranks waiting.
    """

    def __init__(self, callback: Callable[[int, int], object] | None) -> None:
        self._callback = callback
        self.error: Exception | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._callback is not None and self.error is None:
            try:
                self._callback(done, total)
            except Exception as bad:
                self.error = bad


def _told(error: Exception | None, failed: list[int], size: int) -> Exception:
    """The error as it is sent to the others: picklable, and naming the failing ranks."""
    assert error is not None
    if isinstance(error, MemoryError) and not isinstance(error, PdgemmError):
        error = OutOfMemoryError(str(error) or "out of memory")
    where = f" [{ranks_text(failed)} of {size}]" if len(failed) < size else ""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of some library that cannot travel
        error = PdgemmError(f"{type(error).__name__}: {error}")
    if isinstance(error, PdgemmError) and len(error.args) == 1:
        error.args = (f"{error.args[0]}{where}",)
    elif where:
        error.add_note(where.strip())
    return error


def _disagreement(descriptions: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        groups.setdefault(text, []).append(rank)
    parts = [text.split(", ") for text in groups]
    same = _alike(parts)
    alike = _alike([part[same:][::-1] for part in parts])
    differ = (", ".join([*part[: min(same, 1)], *part[same : len(part) - alike]]) for part in parts)  # with its name
    said = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in zip(differ, groups.values()))
    return f"the ranks were called with different arguments: {said}"


def _alike(parts: list[list[str]]) -> int:
    """Of how many first items are all lists the same?"""
    return next((n for n, items in enumerate(zip(*parts)) if len({*items}) > 1), min(map(len, parts)))


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> 'ranks 0-2, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
