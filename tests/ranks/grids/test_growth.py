"""Memory, open files and shared memory do not grow over many products, grids, saves and loads."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import everything

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.io import hdf5

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

MOST = 4 << 20  # allowed bytes per rank, as allocators keep pages; less than a leak of 8 KiB per step with --all
COUNTS = {"products": 2000, "grids": 500, "saves and loads": 500}


def held() -> tuple[int, int, int]:
    """Return the private bytes of this process, its open files, and the machine's files of shared memory."""
    gc.collect()
    pages = Path("/proc/self/smaps_rollup").read_text()
    private = sum(int(line.split()[1]) << 10 for line in pages.splitlines() if line.startswith("Private_Dirty"))
    return private, len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))


@pytest.mark.parametrize("what", list(COUNTS))
def test_nothing_grows(comm: Any, shared_tmp_path: Path, what: str) -> None:
    """Each step is repeated COUNTS times with --all, otherwise COUNTS / 50 times."""
    grid = ProcessGrid(comm)
    A, B = (DistMatrix.random((60, 50), grid=grid, block=16, seed=seed) for seed in (1, 2))
    C = DistMatrix.zeros((60, 60), grid=grid)
    path = shared_tmp_path / "x.h5"

    def product(number: int) -> None:
        options: list[dict[str, Any]] = [{}, {"mover": "ring"}, {"algorithm": "inner"}, {"protect": "detect"}]
        if number % 2:
            pdgemm(1.0, A, B, 1.0, C, transb="T", **options[number // 2 % 4])
        else:
            _ = A @ B.T

    def new_grid(number: int) -> None:
        with ProcessGrid(comm) as mine:
            X = DistMatrix.eye(20, grid=mine)
            assert np.trace(X @ X) == 20

    def saved(number: int) -> None:
        hdf5.save(path, "x", A)
        assert (hdf5.load(path, "x", grid, verify=number % 2 == 0) - A).norm() == 0
        if number % 5 == 0:
            hdf5.save_all(shared_tmp_path / "all.h5", {"A": A, "B": B}, keep=2)

    steps: dict[str, Callable[[int], None]] = dict(zip(COUNTS, (product, new_grid, saved)))
    count = COUNTS[what] // (1 if everything() else 50)
    for number in range(10):  # fill all caches
        steps[what](number)
    comm.Barrier()
    before = held()
    for number in range(count):
        steps[what](number)
    comm.Barrier()
    after = held()
    assert after[0] - before[0] < MOST, f"memory grows by {(after[0] - before[0]) / count:.0f} bytes per step"
    assert after[1] <= before[1] + 2 and after[2] <= before[2] + 2 * comm.size, (before, after)
