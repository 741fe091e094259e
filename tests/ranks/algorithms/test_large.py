"""Matrices beyond 2 GiB, whose numbers of bytes exceed a C int."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from tiers import thorough

from pdgemm import DistMatrix
from pdgemm.io import hdf5

pytestmark = [pytest.mark.mpi, pytest.mark.large, pytest.mark.on_ranks(1), thorough]

N = 24_000  # N x N float32 are 2.15 GiB
MARKED = [(0, 0), (0, N - 1), (N // 2, 3), (N - 2, N // 3), (N - 1, N - 1)]


def marks(matrix: Any) -> dict[tuple[int, int], float]:
    """Return this rank's elements at the positions MARKED."""
    rows, cols = matrix.distribution.rows, matrix.distribution.cols
    return {
        (i, j): float(matrix.local[rows.to_local(i), cols.to_local(j)])
        for i, j in MARKED
        if matrix.distribution.owner(i, j) == matrix.grid.coords
    }


@pytest.mark.timeout(300)
def test_files_beyond_2_gib(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """On one rank the local array is larger than 2 GiB, on two ranks only the file."""
    if comm.size > 2:
        pytest.skip("more than two ranks test nothing new")
    path = shared_tmp_path / "large.h5"
    A = DistMatrix.zeros((N, N), grid=grid, block=(1000, 700), dtype=np.float32)
    for number, (i, j) in enumerate(MARKED, 1):
        if A.distribution.owner(i, j) == grid.coords:
            A.local[A.distribution.rows.to_local(i), A.distribution.cols.to_local(j)] = number
    report = hdf5.save(path, "x", A)
    assert report.bytes > 1 << 31
    del A
    if comm.rank == 0:
        with h5py.File(path) as file:
            assert [file["x"][i, j] for i, j in MARKED] == [1, 2, 3, 4, 5]
            assert not file["x"][N - 1, : N - 1].any()
    B = hdf5.load(path, "x", grid, verify=True)
    found = {place: value for part in comm.allgather(marks(B)) for place, value in part.items()}
    assert found == dict(zip(MARKED, [1, 2, 3, 4, 5]))
    assert comm.allreduce(int(np.count_nonzero(B.local))) == len(MARKED)
