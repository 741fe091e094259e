"""Heap: an allocator of blocks in one piece of shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

PAGE = 1 << 21  # bytes of a huge page, to which large blocks are aligned
KEPT = 1 << 26  # freed bytes whose pages are cached for the next block, because the system is slow to find pages
_MOST_KEPT, _SHARE = 1 << 28, 16  # in a large memory, this part of it is cached instead, at most 256 MiB


class Heap:
    """An allocator of blocks of `memory`; a block is freed when no array refers to the block any more.

    take : function that fills a part of `memory` with pages of the system; False where the system has too few.  A block
           gets all its pages before it is returned, because a process that writes where no page is free gets SIGBUS.

    The pages of freed blocks return to the system, except the last KEPT bytes, or more in a large memory.  A finalizer
    may run at any time: it records the block, and frees the block only if the lock is free.  In a forked process the
    finalizer does nothing.
    """

    def __init__(self, memory: Any, take: Callable[[memoryview], bool]) -> None:
        self._memory, self._take, self._process, self._lock = memoryview(memory), take, os.getpid(), Lock()
        self.address = np.frombuffer(memory, np.uint8).ctypes.data
        first = -self.address % mmap.PAGESIZE
        self._gaps = [(first, (len(self._memory) - first) // mmap.PAGESIZE * mmap.PAGESIZE)]  # (start, end), ascending
        self._freed: deque[tuple[int, int]] = deque()
        self._warm: list[tuple[int, int]] = []  # parts of gaps that still have their pages, oldest first
        self.used = 0  # bytes of allocated blocks
        self._advise(*self._gaps[0], "MADV_HUGEPAGE")

    def block(self, nbytes: int) -> np.ndarray | None:
        """Allocate `nbytes` bytes; None where no gap is large enough, pages are lacking, or the process is a fork."""
        if os.getpid() != self._process:
            return None
        with self._lock:
            self._settle()
            size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
            page = PAGE if size >= PAGE else mmap.PAGESIZE
            for start, end in self._gaps:
                at = start + -(start + self.address) % page
                if at + size > end:
                    continue
                warm = [x for x in self._warm if x[0] < at + size and at < x[1]]
                if not self._fill(at, at + size, warm):
                    return None
                for pieces, piece in [(self._gaps, (start, end)), *((self._warm, x) for x in warm)]:
                    number = pieces.index(piece)
                    pieces[number : number + 1] = _without(piece, at, at + size)
                self.used += size
                block = np.frombuffer(self._memory, np.uint8, max(1, nbytes), at)
                weakref.finalize(block, self._release, at, at + size).atexit = False
                return block
        return None

    def _fill(self, start: int, end: int, warm: list[tuple[int, int]]) -> bool:
        """Fill a part of a gap with its missing pages, all or none; return whether the part has all its pages."""
        cold = [(start, end)]
        for there in warm:
            cold = [piece for x in cold for piece in _without(x, *there)]
        done = False
        try:
            done = all(self._take(self._memory[slice(*piece)]) for piece in cold)
        finally:
            if not done:  # pages are lacking, or an exception ended the loop
                for piece in cold:
                    self._advise(*piece, "MADV_REMOVE")
        return done

    def _release(self, start: int, end: int) -> None:
        if os.getpid() != self._process:
            return
        self._freed.append((start, end))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Free the blocks that finalizers recorded."""
        while self._freed:
            start, end = self._freed.popleft()
            self.used -= end - start
            self._join((start, end))
            self._warm.append((start, end))
        while _total(self._warm) > max(KEPT, min(_MOST_KEPT, len(self._memory) // _SHARE)):
            self._advise(*self._warm.pop(0), "MADV_REMOVE")

    def _join(self, gap: tuple[int, int]) -> None:
        """Add a gap, and merge it with the gaps next to it."""
        insort(self._gaps, gap)
        at = self._gaps.index(gap)
        for left in (at, at - 1):
            if 0 <= left < len(self._gaps) - 1 and self._gaps[left][1] == self._gaps[left + 1][0]:
                self._gaps[left : left + 2] = [(self._gaps[left][0], self._gaps[left + 1][1])]

    def _advise(self, start: int, end: int, advice: str) -> None:
        """Advise the system about pages (madvise); the system may ignore the advice."""
        number = getattr(mmap, advice, None)
        if number is not None:
            _madvise(self.address + start, end - start, number)


def give_back(memory: Any) -> None:
    """Return the pages of shared memory to the system; all processes then read zeros from this memory."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    first = -address % mmap.PAGESIZE
    _madvise(address + first, (len(memory) - first) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_REMOVE)


def _without(piece: tuple[int, int], start: int, end: int) -> list[tuple[int, int]]:
    """Return the parts of a piece before `start` and from `end` on, as far as they are not empty."""
    return [x for x in ((piece[0], min(piece[1], start)), (max(piece[0], end), piece[1])) if x[0] < x[1]]


def _total(pieces: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in pieces)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
