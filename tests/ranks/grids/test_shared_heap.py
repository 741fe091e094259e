"""Blocks of shared memory do not overlap, all of their pages exist, and pages of freed blocks are freed."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiers import square_grid

from pdgemm.grids import node_memory, shared_heap
from pdgemm.grids.shared_heap import Heap

pytestmark = square_grid

PAGE = mmap.PAGESIZE


def filled(heap: Any, nbytes: int, value: int) -> np.ndarray:
    block: np.ndarray = heap.block(nbytes)
    block[:] = value
    return block


def test_blocks_are_reused_and_freed() -> None:
    """In any order of allocations, blocks do not overlap, a view keeps its block alive, and in the end all are free."""
    heap, rng = Heap(mmap.mmap(-1, 1 << 27), lambda part: True), np.random.default_rng(0)
    held: list[np.ndarray] = []
    for turn in range(600):
        if held and rng.random() < 0.5:
            held.pop(rng.integers(len(held)))
        else:
            size = int(rng.choice([1, 4096, 100_000, 5 << 20]))
            held.append(filled(heap, size, turn % 256)[size // 2 :])  # keep only a view
        if turn % 100 == 0:
            assert all((x == x[0]).all() for x in held)
    ends = sorted((x.ctypes.data, x.ctypes.data + x.size) for x in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert heap.block(1 << 27) is None
    held.clear()
    assert heap.used == 0 and len(heap._gaps) == 1
    assert sum(end - start for start, end in heap._warm) <= shared_heap.KEPT


def test_pages_that_are_not_retained_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of freed blocks beyond KEPT bytes are freed; only these are allocated again for new blocks."""
    monkeypatch.setattr(shared_heap, "KEPT", 6 << 20)
    taken: list[int] = []
    heap = Heap(mmap.mmap(-1, 1 << 26), lambda part: not taken.append(len(part)))  # type: ignore[func-returns-value]
    blocks = [filled(heap, 4 << 20, 7) for _ in "abc"]
    starts = [block.ctypes.data for block in blocks]
    assert taken == [4 << 20] * 3
    while blocks:
        del blocks[0]
    taken.clear()
    again = [heap.block(size) for size in (4 << 20, 4 << 20, 6 << 20)]
    assert [x.ctypes.data for x in again if x is not None] == starts
    assert taken == [4 << 20, 4 << 20, 2 << 20]  # the first 4 MiB of the third block were retained
    assert [x.any() for x in again if x is not None] == [False, False, True]  # freed pages are zero again


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A file in memory; blocks are aligned to small pages."""
    for module in (shared_heap, node_memory):
        monkeypatch.setattr(module, "PAGE", PAGE)
    file = os.memfd_create("memory")
    yield file
    os.close(file)


def pages(file: int) -> int:
    """Return the number of pages that a file occupies."""
    return os.fstat(file).st_blocks * 512 // PAGE


@pytest.mark.parametrize("failed", [False, KeyboardInterrupt()])
def test_a_failed_block_frees_its_pages(failed: Any, file: int) -> None:
    """If pages for a block cannot be allocated, those allocated for it are freed; retained pages stay."""
    os.ftruncate(file, 16 * PAGE)
    answers = iter([True, True, True, failed, True])

    def take(part: memoryview) -> bool:
        part[:] = bytes([7]) * len(part)
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    heap = Heap(mmap.mmap(file, 16 * PAGE), take)
    held = [heap.block(2 * PAGE) for _ in "abc"]
    del held[2], held[0]  # the next block begins at the place of the third
    with pytest.raises(KeyboardInterrupt) if failed else nullcontext():
        assert heap.block(5 * PAGE) is None
    assert pages(file) == 6 and heap.used == 2 * PAGE and len(heap._gaps) == 2
    held.append(heap.block(5 * PAGE))
    assert held[1] is not None and pages(file) == 9


def test_a_forked_process_gives_nothing_back() -> None:
    heap = Heap(mmap.mmap(-1, 1 << 28), lambda part: True)
    block = filled(heap, 100 << 20, 7)
    child = os.fork()
    if child == 0:
        del block
        os._exit(heap.block(1) is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert (block == 7).all()


@pytest.mark.mpi
def test_missing_pages_are_an_error(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that cannot be allocated, as in a full /dev/shm, are noticed: writing to them would raise SIGBUS."""
    os.ftruncate(file, 8 * PAGE)
    memory = mmap.mmap(file, 8 * PAGE)
    os.ftruncate(file, 4 * PAGE)
    heap = Heap(memory, partial(node_memory._take, spare=0))
    first = filled(heap, PAGE, 7)
    assert pages(file) == 1
    assert heap.block(5 * PAGE) is None  # only 3 of 5 pages are left
    assert pages(file) == 1 and heap.used == PAGE and len(heap._gaps) == 1
    second = filled(heap, 3 * PAGE, 8)
    assert pages(file) == 4 and (first == 7).all()
    assert heap.block(1) is None
    del second
    monkeypatch.setattr(os, "statvfs", None)  # raises if pages are allocated: retained pages are not
    assert heap.block(3 * PAGE) is not None


@pytest.mark.mpi
def test_some_memory_is_left_to_others(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page remains free, also if others allocate meanwhile; if the free memory is unknown, no page is allocated."""

    def taken(*free: int) -> int:
        """Return how many of 3 pages are allocated, given the free pages before each allocation; one must remain."""
        left = iter(free)
        for length in (0, 3 * PAGE):  # truncation frees the old pages
            os.ftruncate(file, length)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=next(left), f_frsize=PAGE))
        done = node_memory._take(memoryview(mmap.mmap(file, 3 * PAGE)), PAGE)
        assert done == (pages(file) == 3)
        return pages(file)

    assert taken(4, 3, 2) == 3
    assert taken(3) == 0
    assert taken(9, 9, 1) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # a read-only folder
        assert taken(9) == 0
    monkeypatch.setattr(node_memory, "WHERE", "/dev/null/shm")
    assert taken(9) == 0
