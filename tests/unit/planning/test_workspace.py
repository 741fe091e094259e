"""Freed workspace is cached for the next product, up to a limit."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.local.arrays.workspace import BufferCache

LEAST = 1 << 20


def _address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def test_memory_is_handed_out_again() -> None:
    cache = BufferCache()
    for nbytes in (0, 8, LEAST - 8):  # small arrays are not cached
        array = cache.empty((nbytes // 8,), np.float64)
        del array
        assert cache.kept == 0
    first = cache.empty((LEAST,), np.uint8)
    there = _address(first)
    del first
    assert cache.kept == LEAST
    again = cache.empty((256, LEAST // 2048), np.float64, "F")
    assert (_address(again), again.flags.f_contiguous, cache.kept) == (there, True, 0)
    view = again.reshape(-1, order="F")[1:].view()
    del again
    other = cache.empty((LEAST,), np.uint8)
    assert cache.kept == 0 and not np.shares_memory(view, other)  # a view keeps the memory in use
    del view
    assert cache.kept == LEAST


def test_blocks_are_at_most_twice_the_request() -> None:
    room = BufferCache()
    large, middle = room.empty((4 * LEAST,), np.uint8), room.empty((3 * LEAST,), np.uint8)
    there = _address(middle)
    del large, middle
    small = room.empty((LEAST,), np.uint8)
    assert room.kept == 7 * LEAST
    best = room.empty((2 * LEAST,), np.uint8)  # the smallest cached block that is large enough
    assert (_address(best), room.kept) == (there, 4 * LEAST)
    assert small.nbytes == LEAST


def test_the_oldest_is_freed_first() -> None:
    room = BufferCache(most=5 * LEAST)
    arrays = [room.empty((2 * LEAST + number,), np.uint8) for number in range(3)]
    while arrays:
        arrays.pop(0)
    assert room.kept == 4 * LEAST + 3
    huge = room.empty((6 * LEAST,), np.uint8)
    del huge
    assert room.kept == 0  # a block beyond the limit evicts the others, and is not cached


def test_finalizers_that_run_while_memory_is_looked_for() -> None:
    """The garbage collector may run finalizers in the thread that holds the lock: no deadlock."""
    room = BufferCache()
    ring: list[object] = [room.empty((LEAST,), np.uint8)]
    ring.append(ring)
    with room._lock:
        del ring
        gc.collect()
        assert room.kept == 0
    assert room.empty((LEAST,), np.uint8).size == LEAST
    assert room.kept == LEAST


def test_cached_workspace_is_freed_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    room = BufferCache()
    kept = room.empty((LEAST,), np.uint8)
    del kept
    full = [True]
    allocate = np.empty

    def empty(*args: object) -> np.ndarray:
        if full.pop() if full else False:
            raise MemoryError
        return allocate(*args)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(np, "empty", empty)
    assert room.empty((3 * LEAST,), np.uint8).nbytes == 3 * LEAST
    assert not full
    assert room.kept == 3 * LEAST


@pytest.mark.parametrize("algorithm", ["summa", "cannon"])
def test_a_second_product_allocates_no_workspace(algorithm: str) -> None:
    """The second product reuses the workspace of the first, here for sums in a wider type on one rank."""
    n = 512
    with ProcessGrid(MPI.COMM_SELF) as grid:
        A, B = (DistMatrix.random((n, n), grid=grid, dtype=np.float32, seed=seed) for seed in (0, 1))
        C = DistMatrix.zeros((n, n), grid=grid, dtype=np.float32)
        used = {"algorithm": algorithm, "accumulate_dtype": "float64"}
        pdgemm(1.0, A, B, 0.0, C, **used)
        assert C.report.extra_bytes >= 8 * n * n
        tracemalloc.start()
        pdgemm(1.0, A, B, 0.0, C, **used)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 1 << 19
