"""Workspace in host memory: what is freed is kept for the next product, because its pages are known to the system."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from threading import Lock
from typing import Any

import numpy as np

KEPT = 1 << 28  # freed bytes that are kept
_LEAST = 1 << 20  # bytes of the smallest array that is kept: malloc itself keeps smaller ones


def _pageable(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class BufferCache:
    """Allocates arrays, and keeps the last bytes that were freed.

    allocate : returns memory of the given number of bytes, or raises MemoryError.
    least : bytes of the smallest array that it allocates, and is kept.
    most  : bytes that are kept.

    A page that is written for the first time costs a page fault, which clears it; networks with RDMA register it, too.
    That is paid once by a loop of products, as if they were prepared.  An array that is freed may be handed out again
    as soon as nothing refers to it any more.

    A finalizer may run at any time: it records the memory, and sorts it in only if no other thread holds the lock.
    """

    def __init__(
        self, allocate: Callable[[int], np.ndarray] = _pageable, least: int = _LEAST, most: int = KEPT
    ) -> None:
        self._allocate, self._least, self._most = allocate, least, most
        self._lock = Lock()
        self._freed: deque[np.ndarray] = deque()
        self._kept: list[np.ndarray] = []  # the oldest first

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> np.ndarray:
        """Return an array whose elements are undefined.  Raises MemoryError where there is no memory for it."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < self._least:
            return np.empty(shape, dtype, order)  # type: ignore[call-overload]
        memory = self._take(nbytes)
        block = np.frombuffer(memory.data, np.uint8, nbytes)  # all views of it refer to it, not to its memory
        weakref.finalize(block, self._release, memory).atexit = False
        return np.ndarray(shape, dtype, block, order=order)  # type: ignore[arg-type]

    @property
    def kept(self) -> int:
        """Bytes that are kept for the next array."""
        return sum(x.nbytes for x in self._kept)

    def _take(self, nbytes: int) -> np.ndarray:
        with self._lock:
            self._settle()
            fitting = [x for x in self._kept if nbytes <= x.nbytes <= 2 * nbytes]
            if fitting:
                best = min(fitting, key=len)
                self._kept = [x for x in self._kept if x is not best]
                return best
            try:
                return self._allocate(nbytes)
            except MemoryError:
                self._kept.clear()
                return self._allocate(nbytes)

    def _release(self, memory: np.ndarray) -> None:
        self._freed.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Keep what finalizers recorded, and free the oldest where it is too much."""
        while self._freed:
            self._kept.append(self._freed.popleft())
        while self.kept > self._most:
            self._kept.pop(0)


host = BufferCache()
