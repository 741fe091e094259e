"""Fixtures of Slurm jobs: a site file for this machine, and a folder with two matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_jobs import Batch, site_file, write_matrices


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(site_file(tmp_path_factory.mktemp("site") / "here.sh"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a.h5:/x (61 x 83) and b.h5:/y (83 x 29)."""
    write_matrices(tmp_path, (61, 83), (83, 29))
    return tmp_path


@pytest.fixture
def batch(folder: Path, site: str) -> Batch:
    return Batch(folder, site)
