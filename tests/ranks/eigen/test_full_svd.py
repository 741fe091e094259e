"""All singular values, with vectors and without, in ways that divide the work among the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import EPS, forbid_replicated_triangles, rng_matrix
from problems import grid_shapes
from tiers import every_grid, everything

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.linalg.functions.iterations import Work
from pdgemm.linalg.singular.bidiagonal import through_band

pytestmark = pytest.mark.mpi


def with_values(values: np.ndarray, dtype: str) -> np.ndarray:
    """A matrix with these singular values, up to rounding, and random vectors."""
    U, V = (np.linalg.qr(rng_matrix(len(values), len(values), "complex128", seed=x))[0] for x in (1, 2))
    if np.dtype(dtype).kind != "c":
        U, V = (np.linalg.qr(x.real)[0] for x in (U, V))
    return ((U * values) @ V).astype(dtype)


@every_grid
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_all_triplets_by_products(comm: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """|A - U S V^H|, |U^H U - I| and |V^H V - I| within c n eps; square, tall, wide, singular; full matrices, too."""
    monkeypatch.setattr("pdgemm.linalg.singular.full_svd.ON_ONE_RANK", 6)
    cases = {
        "square": rng_matrix(21, 21, dtype), "tall": rng_matrix(40, 17, dtype), "oblong": rng_matrix(20, 15, dtype),
        "wide": rng_matrix(14, 25, dtype), "rank 4": rng_matrix(22, 4, dtype) @ rng_matrix(4, 18, dtype),
        "zero": np.zeros((9, 9), dtype), "small": rng_matrix(12, 5, dtype),
        "ill": with_values(np.logspace(0, -15, 24), dtype), "graded": np.diag(np.logspace(0, -30, 16)).astype(dtype),
        "one large": with_values(np.r_[1.0, np.full(19, 1e-3)], dtype), "unitary": with_values(np.ones(20), dtype),
        "huge": rng_matrix(16, 16, dtype) * np.sqrt(np.finfo(dtype).max), "tiny": rng_matrix(16, 16, dtype) * 1e-30,
    }  # fmt: skip
    for number, (name, a) in enumerate(cases.items()):
        (m, n), shapes = a.shape, grid_shapes(comm.size)
        with ProcessGrid(comm, shapes[number % len(shapes)]) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=[(4, 3), None, 5][number % 3])
            # the factors of a square matrix have one shape: one or the other, in turn
            for full in (False, True) if m != n or everything() else (number % 2 == 0,):
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
def test_no_rank_has_a_whole_triangle(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 512 values svd and pinv of tall and wide matrices take no QR whose R is on every rank."""
    monkeypatch.setattr("pdgemm.linalg.singular.full_svd.ON_ONE_RANK", 6)
    forbid_replicated_triangles(monkeypatch, 6)
    if comm.size == 1:  # which has all words anyway
        return
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for m, n in ((60, 9), (9, 60), (12, 12)):
                a = rng_matrix(m, n)
                A = DistMatrix.from_global(a, grid=grid, block=None if m > n else 4)
                X = linalg.pinv(A)
                report: Any = X.report
                assert report.counted == report.predicted
                exact = np.linalg.pinv(a)
                bound = EPS * max(m, n) * np.finfo(float).eps * np.linalg.cond(a)
                assert np.linalg.norm(X.allgather() - exact, 2) <= bound * np.linalg.norm(exact, 2), (m, n)


@every_grid
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_values_through_a_band(comm: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All singular values within n eps s_1 of LAPACK's; words and messages are those planned."""
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
