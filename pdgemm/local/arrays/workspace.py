"""Workspace in host memory: freed memory is cached for the next product, because its pages are already mapped."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from threading import Lock
from typing import Any

import numpy as np

KEPT = 1 << 28  # most freed bytes that are cached
_LEAST = 1 << 20  # bytes of the smallest array that is cached: malloc itself caches smaller arrays


def _pageable(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class BufferCache:
    """Allocates arrays, and caches the memory that was freed last.

    allocate : called with a number of bytes; returns memory of this size, or raises MemoryError.
    least : bytes of the smallest array that is allocated by `allocate` and cached.
    most  : the largest number of bytes that are cached.

    The first write to a page costs a page fault, which clears the page; networks with RDMA also register the page.  A
    loop of products pays this cost once, as if its products were prepared.  The memory of an array may be used again as
    soon as no object refers to the array.

    A finalizer may run at any time: it records the freed memory, and adds it to the cache only if the lock is free.
    """

    def __init__(
        self, allocate: Callable[[int], np.ndarray] = _pageable, least: int = _LEAST, most: int = KEPT
    ) -> None:
        self._allocate, self._least, self._most = allocate, least, most
        self._lock = Lock()
        self._freed: deque[np.ndarray] = deque()
        self._kept: list[np.ndarray] = []  # the oldest first

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> np.ndarray:
        """Return an array whose elements are undefined.  Raises MemoryError where there is not enough memory."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < self._least:
            return np.empty(shape, dtype, order)  # type: ignore[call-overload]
        memory = self._take(nbytes)
        block = np.frombuffer(memory.data, np.uint8, nbytes)  # views of the array refer to `block`, not to `memory`
        weakref.finalize(block, self._release, memory).atexit = False
        return np.ndarray(shape, dtype, block, order=order)  # type: ignore[arg-type]

    @property
    def kept(self) -> int:
        """Bytes of cached memory."""
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
        """Add the memory that finalizers recorded to the cache, and free the oldest memory beyond the limit."""
        while self._freed:
            self._kept.append(self._freed.popleft())
        while self.kept > self._most:
            self._kept.pop(0)


host = BufferCache()
