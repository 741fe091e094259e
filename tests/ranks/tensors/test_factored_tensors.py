"""Linear algebra of the matrices of tensors, whose grids have no communicators of rows and columns of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdgemm import DistTensor, ProcessGrid, linalg
from pdgemm.grids.tensor_layout import TensorLayout

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(2, 4)]


def test_factors_on_grids_of_other_shapes(comm: Any) -> None:
    x = np.random.default_rng(4).standard_normal((9, 3, 3)) + 3 * np.eye(9).reshape(9, 3, 3)
    square = x.reshape(9, 9)
    with ProcessGrid(comm.Dup()) as grid:
        for shape in ((comm.size, 1), (1, comm.size)):
            layout = TensorLayout.even(x.shape, (0,), (1, 2), shape)
            A = DistTensor.from_global(x, grid=grid, layout=layout).matrix([0])
            assert A.grid.shape == shape
            assert np.isclose(linalg.slogdet(A)[1], np.linalg.slogdet(square)[1])
            R = linalg.qr(A)[1].allgather()
            assert np.allclose(R.T @ R, square.T @ square)
            assert np.allclose(linalg.svd(A)[1], np.linalg.svd(square)[1])
            S = DistTensor.from_global(
                square @ square.T, grid=grid, layout=TensorLayout.even((9, 9), (0,), (1,), shape)
            )
            C = S.matrix([0])
            assert np.allclose(linalg.eigvalsh(C), np.linalg.eigvalsh(square @ square.T))
            assert np.allclose(linalg.cholesky(C).allgather(), np.linalg.cholesky(square @ square.T))
            assert np.allclose(linalg.solve(A, C).allgather(), square.T)
