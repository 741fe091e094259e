"""Fixtures of tests of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def parallel() -> bool:
    """Whether h5py is built with MPI."""
    from pdgemm.io import dataset_access

    return dataset_access.parallel_h5py()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles and slabs of a few rows, which are read in even smaller pieces."""
    from pdgemm.io.streamed import file_panels, svd_plan, tiling

    for module in (file_panels, svd_plan, tiling):
        monkeypatch.setattr(module, "STAGED", 1 << 9)
    monkeypatch.setattr(tiling, "_LEAST", 4)


@pytest.fixture
def everyone(comm: Any) -> Iterator[None]:
    """Wait for all ranks after a test, because rank 0 prepares the folder of the next test."""
    yield
    comm.Barrier()


@pytest.fixture
def problem(grid: Any, shared_tmp_path: Path) -> Any:
    """A file of matrices, and products of them that save checkpoints (checkpointed.py)."""
    from checkpointed import Problem

    return Problem(grid, shared_tmp_path)
