"""Reductions, broadcasting and NumPy's functions of matrices on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_device import fake_device

pytestmark = pytest.mark.mpi


@pytest.mark.on_ranks(1, 3, 4)
def test_elements_of_matrices_on_a_device(comm: Any) -> None:
    from pdgemm import DistMatrix, ProcessGrid

    x, row = np.random.default_rng(0).standard_normal((13, 8)), np.arange(8.0)
    with fake_device() as device, ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(x, grid=grid, block=(2, 3), device="fake")
        square = DistMatrix.from_global(x[:8], grid=grid, device="fake")
        for axis in (None, 0, 1):
            assert np.allclose(A.sum(axis), x.sum(axis)) and np.array_equal(A.argmax(axis), x.argmax(axis))
            assert np.allclose(A.var(axis), x.var(axis))
            kept = A.max(axis, keepdims=True)
            assert kept.device == "fake" and np.array_equal(kept.allgather(), x.max(axis, keepdims=True))
        assert np.array_equal((A - row).allgather(), x - row)
        assert np.array_equal((A * A[2:3, :]).allgather(), x * x[2:3])
        assert np.array_equal((square + square.T).allgather(), x[:8] + x[:8].T)
        assert np.allclose(A @ row, x @ row)
        assert np.allclose((A @ x.T[:, :2]).allgather(), x @ x.T[:, :2])
        assert np.array_equal(A[3], x[3]) and A[3, 2] == x[3, 2]
        x[4, 1], x[2, 5] = np.inf, np.nan  # not multiplied by 0
        X = DistMatrix.from_global(x, grid=grid, block=(2, 3), order="F", device="fake")
        for k in (-20, -1, 0, 2):
            assert np.array_equal(np.triu(X, k).allgather(), np.triu(x, k), equal_nan=True)
            assert np.array_equal(np.tril(X.T, k).allgather(), np.tril(x.T, k), equal_nan=True)
        x = A.allgather()
        assert np.array_equal(np.vstack((A, A)).allgather(), np.vstack((x, x)))
        assert not np.ones_like(A).allgather().sum() - A.size
        assert np.isclose(np.trace(A), np.trace(x)) and np.isclose(A.norm(), np.linalg.norm(x))
        with pytest.raises(TypeError, match=r"copy it first, A.to_host\(\)"):
            np.where(A > 0, A, 0)
    assert not device.races
