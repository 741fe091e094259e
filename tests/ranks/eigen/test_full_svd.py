"""All singular values, with vectors and without, in ways that divide the work among the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import EPS, rng_matrix
from problems import grid_shapes
from tiers import every_grid

pytestmark = pytest.mark.mpi


@every_grid
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_all_triplets_by_a_polar_factor(comm: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """|A - U S V^H|, |U^H U - I| and |V^H V - I| within c n eps; square, tall, wide, singular; full matrices, too."""
    from pdgemm import DistMatrix, ProcessGrid, linalg

    monkeypatch.setattr("pdgemm.linalg.singular.full_svd.ON_ONE_RANK", 6)
    cases = {
        "square": rng_matrix(21, 21, dtype), "tall": rng_matrix(40, 17, dtype), "oblong": rng_matrix(20, 15, dtype),
        "wide": rng_matrix(14, 25, dtype), "rank 4": rng_matrix(22, 4, dtype) @ rng_matrix(4, 18, dtype),
        "zero": np.zeros((9, 9), dtype), "small": rng_matrix(12, 5, dtype),
    }  # fmt: skip
    for number, (name, a) in enumerate(cases.items()):
        (m, n), shapes = a.shape, grid_shapes(comm.size)
        with ProcessGrid(comm, shapes[number % len(shapes)]) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=[(4, 3), None, 5][number % 3])
            for full in (False, True):
                U, s, Vh = linalg.svd(A, full_matrices=full)
                report: Any = U.report
                assert report.counted == report.predicted, name
                u, vh, k = U.allgather().astype("D"), Vh.allgather().astype("D"), min(m, n)
                assert (u.shape, vh.shape) == (((m, m), (n, n)) if full else ((m, k), (k, n)))
                bound = EPS * max(m, n) * np.finfo(dtype).eps
                size = np.linalg.norm(a, 2)
                assert np.linalg.norm((u[:, :k] * s) @ vh[:k] - a, 2) <= 2 * bound * size, name
                for x in (u.conj().T @ u, vh @ vh.conj().T):
                    assert np.linalg.norm(x - np.eye(len(x)), 2) <= bound, name
                exact = np.linalg.svd(a.astype("D"), compute_uv=False)
                assert np.abs(s - exact).max() <= bound * size and (np.diff(s) <= 0).all() and (s >= 0).all(), name
                assert len(set(comm.allgather(s.tobytes()))) == 1 and s.dtype == np.finfo(dtype).dtype


@every_grid
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_values_through_a_band(comm: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All singular values within n eps s_1 of LAPACK's; words and messages are those planned."""
    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm.linalg.functions.iterations import Work
    from pdgemm.linalg.singular.bidiagonal import through_band

    monkeypatch.setattr("pdgemm.linalg.singular.bidiagonal.BAND", 5)
    for number, shape in enumerate(grid_shapes(comm.size)):
        for m, n in ((31, 31), (36, 30), (50, 14), (11, 10), (3, 3), (1, 1)):
            a = rng_matrix(m, n, dtype)
            with ProcessGrid(comm, shape) as grid:
                A = DistMatrix.from_global(a, grid=grid, block=[4, None, 5][number % 3], order="CF"[number % 2])
                work = Work("values")
                s = through_band(work, A)
                report: Any = work.reported(A.copy(), 0).report
                assert report.counted == report.predicted and np.array_equal(A.allgather(), a)
            exact = np.linalg.svd(a.astype("D"), compute_uv=False)
            assert np.abs(s - exact).max() <= EPS * n * np.finfo(dtype).eps * exact[0], (m, n)
            assert len(set(comm.allgather(s.tobytes()))) == 1 and s.dtype == np.finfo(dtype).dtype
