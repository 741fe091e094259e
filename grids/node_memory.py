"""NodeMemory: a window of memory that the ranks of a node share, in which each rank reads arrays of other ranks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from time import perf_counter, sleep
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import NodeMemoryError
from pdgemm.grids.shared_heap import PAGE, Heap, give_back
from pdgemm.support import failures
from pdgemm.support.files import say
from pdgemm.support.waits import Wait
from pdgemm.support.watchdog import CODE, end_job

WHERE = "/dev/shm"  # file system of Linux for memory that processes share
ZERO = "/dev/zero"  # source of the zeros that fill memory
_LEAST = 1 << 22  # bytes per rank of the smallest window; as many stay free for MPI's own windows, which also grow
_PATIENCE = 1e-3  # seconds of waiting without sleep; a rank that waits longer leaves its core to other ranks
_NAP = 2e-4  # seconds of a sleep; with shorter sleeps that begin later (`poll_until`), uneven work takes 15% longer
_LEVELS = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)  # 0 to 3 in Open MPI


class NodeMemory:
    """The allocator of arrays that the other ranks of a node can read.  Collective over `node`.

    Each rank allocates in its own part of the window of the node, without communication; the other ranks find an array
    by its offset (`where`, `array`).  The window is sparse: an array gets all its pages from the system when it is
    allocated, first touched by its owner.  When nothing refers to the array any more, its pages return to the system,
    except a few pages that are cached for the next array.

    limit   : the largest number of bytes of the whole window.
    oversubscribed : whether there are more ranks than cores; then a rank sleeps during long waits.
    size    : bytes of this rank's part; 0 where there is no shared memory, or no other rank on the node.

    The memory is valid until MPI_Finalize.  A forked process sees the same elements, not a copy.
    """

    failed = False  # only GPU memory can fail to be mapped

    def __init__(self, node: MPI.Intracomm, limit: float, oversubscribed: bool) -> None:
        self.node, self.alone, self.oversubscribed = node, node.size == 1, oversubscribed
        self.window = None if self.alone else _window(node, limit)
        self.size = self.window.size if self.window else 0
        if self.window:  # the ranks of the window are in the order of MPI.COMM_WORLD
            self._places = np.argsort(np.argsort(node.allgather(MPI.COMM_WORLD.rank))).tolist()
            self._heap = self.window.heap

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> np.ndarray:
        """Allocate an array that the other ranks of the node can read.  Local.

        Raises NodeMemoryError if too little memory is free.
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
        """Return whether the other ranks of the node can read this array of this rank."""
        return self.alone or self._offset(x) >= 0

    def where(self, x: np.ndarray) -> list[int]:
        """Return the offset of an array, by which the other ranks find it."""
        return [0 if self.alone else self._offset(x)]

    def _offset(self, x: np.ndarray) -> int:
        """Return the offset of an array in this rank's part of the window; -1 for an array outside this part."""
        if not self.size:
            return -1
        at = int(x.__array_interface__["data"][0]) - self._heap.address
        return at if 0 <= at < self.size else -1

    def array(self, rank: int, shape: Sequence[int], dtype: np.dtype, where: Sequence[int], strides: Any) -> np.ndarray:
        """Return an array of another rank of the node.   where : the result of the method `where` on that rank."""
        assert self.window is not None
        return np.ndarray(shape, dtype, self.window.parts[self._places[rank]], where[0], strides)

    def sync(self) -> None:
        """Make the writes of all ranks of the node visible to all ranks of the node.  Collective over the node."""
        if self.window:
            self.window.fence()
            if self.oversubscribed:
                with Wait(self.node):
                    _complete(self.node.Ibarrier())
            else:
                self.node.Barrier()
            self.window.fence()

    def map_all(self, places: object) -> None:
        """Do nothing: the window is mapped on all ranks of the node."""

    def fence(self) -> None:
        """Order this rank's writes before its next signal, and its reads after the last signal received.  Local."""
        if self.window:
            self.window.fence()

    def gather(self, words: np.ndarray) -> np.ndarray:
        """Synchronise as `sync`, and return the words of all ranks, a row per rank.  Collective over the node."""
        if self.alone:
            return words[None, :]
        rows = np.empty((self.node.size, words.size), words.dtype)
        self.fence()
        self.node.Allgather(words, rows)
        self.fence()
        return rows


def _complete(request: MPI.Request) -> None:
    """Wait for a request, and leave the core to the other ranks meanwhile; a wait inside MPI would keep it busy."""
    end = perf_counter() + _PATIENCE
    while not request.Test():
        if perf_counter() < end:
            os.sched_yield()
        else:
            sleep(_NAP)


class _Window:
    """One MPI-3 shared window for all arrays of a set of ranks, created once and freed at the end of the program.

    MPI libraries allow a limited number of windows, creating and freeing them is collective, and an array must not
    outlive its window.
    """

    def __init__(self, node: MPI.Intracomm, size: int) -> None:
        self.size = size
        ordered = failures.tracked(MPI.Intracomm(node.Split(0, key=MPI.COMM_WORLD.rank)))
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        try:
            with silent_ucx(), Wait(ordered):
                self._window = MPI.Win.Allocate_shared(size, 1, info, ordered)
        except MPI.Exception as bad:  # perhaps only on this rank, and the others would wait: end the job
            if failures.detector.guards() and failures.is_of_failure(bad):
                raise
            say(
                f"error: MPI made no window of {size * node.size} bytes in {WHERE} ({bad}): perhaps another program "
                "filled it meanwhile; start again, or set PDGEMM_NODE_MEMORY=0"
            )
            end_job(CODE)
        self._window.Lock_all(MPI.MODE_NOCHECK)  # locks nothing, but opens an epoch, in which Sync is allowed
        info.Free()
        self.fence = self._window.Sync
        self.parts: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(ordered.size)]
        self.heap = Heap(self.parts[ordered.rank], partial(_take, spare=_LEAST * ordered.size))


_windows: dict[tuple[int, ...], _Window] = {}  # windows by the ranks that share them, ascending, in MPI.COMM_WORLD


def _window(node: MPI.Intracomm, limit: float) -> _Window | None:
    """Return the window of these ranks, created at the first call; None if it does not fit.  Collective over `node`."""
    ranks = MPI.Group.Translate_ranks(node.group, list(range(node.size)), MPI.COMM_WORLD.group)
    key = tuple(sorted(ranks))
    if MPI.UNDEFINED in key:  # the node has ranks of another MPI.COMM_WORLD
        return None
    if key not in _windows:
        # half of the free bytes, because other jobs need memory, too, and MPI libraries have been seen to hang if a
        # window does not fit; pages that earlier windows may still take count as free: each array checks for free pages
        most = min(_free_bytes() / 2, limit) / node.size
        size = int(node.allreduce(most, MPI.MIN)) // PAGE * PAGE
        if size < _LEAST:
            return None
        _windows[key] = _Window(node, size)
    return _windows[key]


def abandon(failed: Container[int]) -> None:
    """Return the memory of failed ranks (of MPI.COMM_WORLD), which is not read any more, to the system.  Local."""
    for ranks, window in _windows.items():
        for rank, part in zip(ranks, window.parts):
            if rank in failed:
                give_back(part)


def _take(part: memoryview, spare: int) -> bool:
    """Fill new shared memory with pages, if `spare` bytes then stay free; return whether it was filled.  Local.

    The kernel writes zeros to the pages, and returns an error if no page is free.  A process that wrote them itself
    would get SIGBUS.
    """
    try:
        with open(ZERO, "rb", buffering=0) as zeros:
            while part:
                if _free_bytes() < len(part) + spare:  # for each piece, because other jobs take memory, too
                    return False
                part = part[zeros.readinto(part[:PAGE]) :]
    except OSError:
        return False
    return True


def _free_bytes() -> int:
    """Return the free bytes of /dev/shm.

    If this process may not write to /dev/shm, MPI libraries put windows elsewhere: the result is 0.
    """
    with suppress(OSError):
        if os.access(WHERE, os.W_OK):
            there = os.statvfs(WHERE)
            return there.f_bavail * there.f_frsize
    return 0


@contextmanager
def silent_ucx() -> Iterator[None]:
    """Run the block with the messages of UCX switched off, by a control variable of MPI's tools interface.  Local.

    Where UCX finds no usable network, as in containers and on most personal computers, the Open MPI of PyPI prints an
    error on each rank that creates a window.  It does not concern windows of shared memory, which do not use UCX.
    If the user has set how much UCX prints, the user's setting stays.
    """
    name = "opal_common_ucx_verbose"
    wanted = MPI.get_vendor()[0] == "Open MPI" and f"OMPI_MCA_{name}" not in os.environ
    if not wanted or not hasattr(library := ctypes.CDLL(MPI.__file__), "MPI_T_init_thread"):
        yield
        return
    at, count, handle, before = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    level = _LEVELS.index(MPI.Query_thread())  # Open MPI would apply a lower level to all of MPI
    library.MPI_T_init_thread(level, ctypes.byref(ctypes.c_int()))
    known = (
        not library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(at))
        and not library.MPI_T_cvar_handle_alloc(at, None, ctypes.byref(handle), ctypes.byref(count))
        and not library.MPI_T_cvar_read(handle, ctypes.byref(before))
        and not library.MPI_T_cvar_write(handle, ctypes.byref(ctypes.c_int(-1)))
    )
    try:
        yield
    finally:
        if known:
            library.MPI_T_cvar_write(handle, ctypes.byref(before))
        library.MPI_T_finalize()
