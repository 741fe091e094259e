"""Memory that the ranks of a node share, so that one reads the arrays of another where they lie."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import NodeMemoryError

WHERE = "/dev/shm"  # where Linux keeps memory that processes share
_HUGE = 1 << 21  # bytes of a huge page
_SHARE = 0.5  # of what is free there
_LEAST = 1 << 22  # bytes per rank that are worth a window
_KEPT = 1 << 26  # bytes of given up arrays that may wait for the next one, more where more is in use


class NodeMemory:
    """One MPI-3 shared window for all arrays that the ranks of a node share.  Collective over `node`.

    Each rank hands out its own part of the window, without asking the others; the others reach an array by its
    offset (`offset`, `array`).  Only what is touched takes memory, first touched by its owner, in huge pages where
    the system has them; an array's memory goes back when nothing refers to it any more.

    One window for all: MPI libraries allow only so many, creating and freeing them is collective, and an array
    that outlived its window would be gone.  It is made once for a set of ranks and stays to the end.

    size : bytes of this rank's part; 0 where there is no memory to share, or nobody to share it with.

    PDGEMM_NODE_MEMORY: bytes of the window, at most; 0: none.  By default half of what is free in /dev/shm.
    """

    def __init__(self, node: MPI.Intracomm) -> None:
        self.node, self.alone = node, node.size == 1
        # MPI libraries have been seen to wait forever for a window that does not fit: ask for no more than is there
        most = min(_free() * _SHARE, float(os.environ.get("PDGEMM_NODE_MEMORY", "inf"))) / node.size
        share = int(node.allreduce(most, MPI.MIN)) // _HUGE * _HUGE
        self.size = share if node.size > 1 and share >= _LEAST else 0
        if not self.size:
            return
        self.node = node.Dup()  # whose barriers never meet those of a grid
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        self._window = MPI.Win.Allocate_shared(self.size, 1, info, self.node)
        self._window.Lock_all(MPI.MODE_NOCHECK)  # nothing is locked: an epoch, for Sync to be allowed in
        info.Free()
        self._parts: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(node.size)]
        self._heap = _Heap(self._parts[node.rank])

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

    def offset(self, x: np.ndarray) -> int:
        """Where an array begins in this rank's part; -1 for one that lies elsewhere.  0 where nobody else is."""
        if self.alone:
            return 0
        if not self.size:
            return -1
        at = int(x.__array_interface__["data"][0]) - self._heap.address
        return at if 0 <= at < self.size else -1

    def array(self, rank: int, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any) -> np.ndarray:
        """An array in the part of a rank of the node."""
        return np.ndarray(shape, dtype, self._parts[rank], offset, strides)

    def sync(self) -> None:
        """What any rank of the node wrote before is seen by all of them behind.  Collective over the node."""
        if self.size:
            self._window.Sync()
            self.node.Barrier()
            self._window.Sync()

    def fence(self) -> None:
        """What this rank wrote is seen by whom it tells, and what it was told of is seen by this rank.  Local."""
        if self.size:
            self._window.Sync()

    def gather(self, words: np.ndarray) -> np.ndarray:
        """`sync`, and the words of all ranks of the node, one row for each.  Collective over the node."""
        if self.alone:
            return words[None, :]
        rows = np.empty((self.node.size, words.size), words.dtype)
        self._window.Sync()
        self.node.Allgather(words, rows)
        self._window.Sync()
        return rows


class _Heap:
    """Hands out blocks of one piece of memory.

    A finalizer may run in the middle of anything, so it only says which block is free: `_freed`.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memoryview(memory)
        self.address = np.frombuffer(memory, np.uint8).ctypes.data
        first = -self.address % mmap.PAGESIZE
        self._gaps = [(first, (len(self._memory) - first) // mmap.PAGESIZE * mmap.PAGESIZE)]  # (start, end), in order
        self._freed: deque[tuple[int, int]] = deque()
        self.used = self._kept = 0  # bytes; `_kept` of given up blocks whose pages are still there
        self._advise(*self._gaps[0], "MADV_HUGEPAGE")

    def block(self, nbytes: int) -> np.ndarray | None:
        """`nbytes` bytes, given back when nothing refers to them any more; None where there are none."""
        while self._freed:
            self._join(self._freed.popleft())
        size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        page = _HUGE if size >= _HUGE else mmap.PAGESIZE
        if size > _free() + self._kept:
            return None
        for number, (start, end) in enumerate(self._gaps):
            at = start + -(start + self.address) % page
            if at + size <= end:
                self._gaps[number : number + 1] = [x for x in ((start, at), (at + size, end)) if x[0] < x[1]]
                self.used += size
                self._kept = max(0, self._kept - size)
                block = np.frombuffer(self._memory, np.uint8, max(1, nbytes), at)
                weakref.finalize(block, self._release, at, at + size).atexit = False
                return block
        return None

    def _release(self, start: int, end: int) -> None:
        self.used -= end - start
        self._kept += end - start
        if self._kept > max(_KEPT, self.used):
            self._kept -= end - start
            self._advise(start, end, "MADV_REMOVE")
        self._freed.append((start, end))

    def _join(self, gap: tuple[int, int]) -> None:
        insort(self._gaps, gap)
        at = self._gaps.index(gap)
        for left in (at, at - 1):
            if 0 <= left < len(self._gaps) - 1 and self._gaps[left][1] == self._gaps[left + 1][0]:
                self._gaps[left : left + 2] = [(self._gaps[left][0], self._gaps[left + 1][1])]

    def _advise(self, start: int, end: int, advice: str) -> None:
        """Whether the system follows is its own affair."""
        number = getattr(mmap, advice, None)
        if number is not None:
            _madvise(self.address + start, end - start, number)


def _free() -> int:
    """Bytes that may still be shared."""
    try:
        there = os.statvfs(WHERE)
    except OSError:
        return 0
    return there.f_bavail * there.f_frsize


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_kept: dict[tuple[int, ...], NodeMemory] = {}  # one window for each set of ranks, by their numbers in the world


def node_memory(node: MPI.Intracomm) -> NodeMemory:
    """The shared memory of these ranks, made for the first who asks.  Collective over `node`."""
    ranks = tuple(MPI.Group.Translate_ranks(node.group, list(range(node.size)), MPI.COMM_WORLD.group))
    if ranks not in _kept or MPI.UNDEFINED in ranks:  # ranks of another world have no numbers
        _kept[ranks] = NodeMemory(node)
    return _kept[ranks]
