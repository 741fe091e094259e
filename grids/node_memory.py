"""Memory that the ranks of a node share, so that one reads the arrays of another where they lie."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from functools import cache, partial
from math import inf, prod
from time import perf_counter, sleep
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import NodeMemoryError
from pdgemm.grids.shared_heap import PAGE, Heap

WHERE = "/dev/shm"  # where Linux keeps memory that processes share
ZERO = "/dev/zero"  # what memory is touched with, and the door to WHERE
_LEAST = 1 << 22  # bytes per rank that are worth a window, and that are left to MPI, whose own windows fill later, too
_TURN = 1.0  # seconds of waiting for other jobs, all in all, before one does without
_MAKING = 10.0  # the same for a window, which is made once
_LULL = 60.0  # seconds without waiting, after which one is patient again
_PATIENCE = 1e-3  # seconds of waiting that keep a core from those who are waited for; then this rank sleeps
_NAP = 2e-4  # seconds


class NodeMemory:
    """Arrays that the ranks of a node can read in each other's memory.  Collective over `node`.

    Each rank hands out its own part of the node's window without asking the others; they reach an array by its
    offset (`where`, `array`).  The window is sparse: an array takes its memory from the system when it is made, all or
    nothing, first touched by its owner, and what nothing refers to any more goes back to the system, but for a little
    that is kept for the next array.

    limit   : bytes of the window, at most.
    crowded : more ranks than cores: who waits for long does it asleep.
    size    : bytes of this rank's part; 0 where there is no memory to share, or nobody to share it with.

    The memory ends with MPI_Finalize, and a forked process sees the same elements, not a copy.
    """

    def __init__(self, node: MPI.Intracomm, limit: float, crowded: bool) -> None:
        self.node, self.alone, self.crowded = node, node.size == 1, crowded
        self.window = None if self.alone else _window(node, limit)
        self.size = self.window.size if self.window else 0
        if self.window:  # whose ranks are in the order of the world
            self._places = np.argsort(np.argsort(node.allgather(MPI.COMM_WORLD.rank))).tolist()
            self._heap = self.window.heap

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> np.ndarray:
        """An array that the other ranks of the node can read.  Local.

        Raises NodeMemoryError where there is no room.
        """
        if self.alone:
            return np.empty(shape, dtype, order)  # type: ignore[call-overload]
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        block = self._heap.block(nbytes) if self.size else None
        if block is None:
            raise NodeMemoryError(f"no room for {nbytes} bytes in the memory that the ranks of the node share, {WHERE}")
        return np.ndarray(shape, dtype, block, order=order)  # type: ignore[arg-type]

    def lies_here(self, x: np.ndarray) -> bool:
        """Can the ranks of the node read an array of this rank?"""
        return self.alone or self._offset(x) >= 0

    def where(self, x: np.ndarray) -> list[int]:
        """What the other ranks have to know, to find an array."""
        return [0 if self.alone else self._offset(x)]

    def _offset(self, x: np.ndarray) -> int:
        """Where an array begins in this rank's part; -1 for one that lies elsewhere."""
        if not self.size:
            return -1
        at = int(x.__array_interface__["data"][0]) - self._heap.address
        return at if 0 <= at < self.size else -1

    def array(self, rank: int, shape: Sequence[int], dtype: np.dtype, where: Sequence[int], strides: Any) -> np.ndarray:
        """An array of a rank of the node, by what its `where` says."""
        assert self.window is not None
        return np.ndarray(shape, dtype, self.window.parts[self._places[rank]], where[0], strides)

    def sync(self) -> None:
        """What any rank of the node wrote before is seen by all of them behind.  Collective over the node."""
        if self.window:
            self.window.fence()
            if self.crowded:
                _wait(self.node.Ibarrier())
            else:
                self.node.Barrier()
            self.window.fence()

    def fence(self) -> None:
        """What this rank wrote is seen by whom it tells, and what it was told of is seen by this rank.  Local."""
        if self.window:
            self.window.fence()

    def gather(self, words: np.ndarray) -> np.ndarray:
        """`sync`, and the words of all ranks of the node, one row for each.  Collective over the node."""
        if self.alone:
            return words[None, :]
        rows = np.empty((self.node.size, words.size), words.dtype)
        self.fence()
        self.node.Allgather(words, rows)
        self.fence()
        return rows


def _wait(request: MPI.Request) -> None:
    """Leave the core to the ranks that are waited for, as MPI's own waiting does not."""
    end = perf_counter() + _PATIENCE
    while not request.Test():
        if perf_counter() < end:
            os.sched_yield()
        else:
            sleep(_NAP)


class _Window:
    """One MPI-3 shared window for all arrays of a set of ranks, made once and kept to the end.

    MPI libraries allow only so many windows, creating and freeing them is collective, and an array that outlived its
    window would be gone.
    """

    def __init__(self, node: MPI.Intracomm, size: int) -> None:
        self.size = size
        ordered = node.Split(0, key=MPI.COMM_WORLD.rank)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        try:
            self._window = MPI.Win.Allocate_shared(size, 1, info, MPI.Intracomm(ordered))
        except MPI.Exception as bad:  # on this rank only, perhaps: the others would wait for it, in MPI, for ever
            print(
                f"pdgemm: error: MPI made no window of {size * node.size} bytes in {WHERE} ({bad}): perhaps "
                "another program filled it meanwhile; start again, or set PDGEMM_NODE_MEMORY=0",
                file=sys.stderr,
                flush=True,
            )
            MPI.COMM_WORLD.Abort(3)
        self._window.Lock_all(MPI.MODE_NOCHECK)  # nothing is locked: an epoch, for Sync to be allowed in
        info.Free()
        self.fence = self._window.Sync
        self.parts: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(ordered.size)]
        self.heap = Heap(self.parts[ordered.rank], partial(_take, spare=_LEAST * ordered.size))


_windows: dict[tuple[int, ...], _Window] = {}  # by the ranks in the world, in order


def _window(node: MPI.Intracomm, limit: float) -> _Window | None:
    """The window of these ranks, made for the first who asks, if there is room for one.  Collective over `node`."""
    ranks = MPI.Group.Translate_ranks(node.group, list(range(node.size)), MPI.COMM_WORLD.group)
    key = tuple(sorted(ranks))
    if MPI.UNDEFINED in key:  # ranks of another world have no numbers
        return None
    if key not in _windows:
        node.Barrier()  # who holds the lock waits for nobody who wants it
        # half of what is free and not promised yet, for others want some, too; but not nothing.  MPI libraries have
        # been seen to wait forever for a window that does not fit
        with _turn(LOCK_EX) if node.rank == 0 else nullcontext(inf) as free:
            share, promised = free / node.size, sum(window.size for window in _windows.values())
            most = min(max((share - promised) / 2, share / 32), limit / node.size)
            size = int(node.allreduce(most, MPI.MIN)) // PAGE * PAGE
            if size < _LEAST:
                return None
            _windows[key] = _Window(node, size)
    return _windows[key]


def _take(part: memoryview, spare: int) -> bool:
    """Touch shared memory for the first time, if that leaves `spare` bytes to others.  Local.

    The kernel writes, zeros: where it finds no page it says so, while a process that writes is ended by SIGBUS.
    """
    try:
        with open(ZERO, "rb", buffering=0) as zeros:
            while part:
                with _turn(LOCK_SH) as free:  # others take some, too: it is looked at again after each piece
                    if free < len(part) + spare:
                        return False
                    part = part[zeros.readinto(part[:PAGE]) :]
    except OSError:
        return False
    return True


@contextmanager
def _turn(lock: int) -> Iterator[int]:
    """Bytes that may still be shared: for all who take some (LOCK_SH), or for one who makes a window (LOCK_EX).

    The locks are a courtesy among jobs, which any program may hold up, so nobody depends on them.  Without the door
    one may only be overtaken.  Who cannot lock WHERE makes no window, but may take memory: the kernel says where there
    is none (`_take`), and a window that is made meanwhile has half of what is free, at most half of the whole.  So
    that, and an eighth for what MPI libraries want on top, is left.
    """
    with ExitStack() as stack:
        free = 0
        with suppress(OSError):
            door, where = (_opened(path, stack) for path in (ZERO, WHERE))
            _lock(door, ZERO, lock)
            locked = _lock(where, WHERE, lock)
            if lock == LOCK_SH:  # who makes a window keeps the door shut until those who are inside are done
                flock(door, LOCK_UN)
            if (locked or lock == LOCK_SH) and os.access(WHERE, os.W_OK):  # else MPI libraries put windows elsewhere
                there = os.fstatvfs(where)
                free = (there.f_bavail - (0 if locked else there.f_blocks * 5 // 8)) * there.f_frsize
        yield free


def _opened(path: str, until: ExitStack) -> int:
    file = os.open(path, os.O_RDONLY)
    until.callback(os.close, file)
    until.callback(flock, file, LOCK_UN)  # what another thread forked meanwhile has the file open, too
    return file


_patience: dict[tuple[str, int], tuple[float, float]] = {}  # seconds of waiting that are left, and when one last waited


def _lock(file: int, path: str, lock: int) -> bool:
    """Lock a file, if this process has not waited for too long for such locks already, all in all."""
    start = now = perf_counter()
    left, last = _patience.get((path, lock), (_MAKING if (path, lock) == (WHERE, LOCK_EX) else _TURN, now))
    if now - last > _LULL:
        left = _TURN
    while True:
        try:
            flock(file, lock | LOCK_NB)
            return True
        except BlockingIOError:
            if now - start >= left:
                _tell(path)
                return False
            sleep(_NAP)
            now = perf_counter()
            _patience[path, lock] = left - (now - start), now


@cache
def _tell(path: str) -> None:
    """Once; and of those who share a window, the first."""
    if not _windows or MPI.COMM_WORLD.rank in {ranks[0] for ranks in _windows}:
        print(
            f"pdgemm: warning: other processes keep {path} locked (flock; see lslocks): this job goes on without "
            "waiting for them, perhaps with less shared memory",
            file=sys.stderr,
            flush=True,
        )
