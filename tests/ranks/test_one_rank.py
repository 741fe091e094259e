"""Each public function on one rank, without messages; results equal those of NumPy and SciPy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.linalg

import pdgemm
from pdgemm import Batch, DistMatrix, linalg
from pdgemm.io import hdf5, npy, safetensors
from pdgemm.local.blas import local_lapack

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(1)]

N, SEED = 12, 3
RNG = np.random.default_rng(SEED)
X, Y, b = RNG.standard_normal((N, N)), RNG.standard_normal((N, N)), RNG.standard_normal(N)
H, L = X @ X.T + N * np.eye(N), np.tril(X) + N * np.eye(N)
TALL = X[:, :5]


def whole(x: Any) -> Any:
    """Return a result, or each of a tuple, as NumPy arrays."""
    if isinstance(x, tuple):
        return tuple(map(whole, x))
    return x.allgather() if hasattr(x, "allgather") else x.to_global() if hasattr(x, "to_global") else x


def test_blocks_of_one_rank_do_not_end_panels(grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routines of LAPACK are called as often for a matrix in small blocks as for one block."""
    calls, call = Counter[str](), local_lapack.call_lapack

    def counted(routine: str, *arguments: Any) -> int:
        calls[routine] += 1
        return call(routine, *arguments)

    monkeypatch.setattr(local_lapack, "call_lapack", counted)
    for function in (linalg.lu_factor, linalg.cholesky, linalg.inv, linalg.inv_triangular, linalg.det, linalg.qr):
        numbers = []
        for block in (2, None):
            options: Any = {"mode": "economic", "method": "householder"} if function is linalg.qr else {}
            function(DistMatrix.from_global(H, grid=grid, block=block), **options)
            numbers.append(dict(calls))
            calls.clear()
        assert numbers[0] == numbers[1] and numbers[0], function


def test_linear_algebra(comm: Any, grid: Any) -> None:
    A, B, S, T, F = (DistMatrix.from_global(x, grid=grid, block=4) for x in (X, Y, H, L, TALL))
    lu, low = linalg.lu_factor(A), linalg.cholesky(S)
    results: dict[str, tuple[Any, Any]] = {
        "cho_factor": (np.tril(whole(linalg.cho_factor(S, lower=True)[0])), np.linalg.cholesky(H)),
        "cho_solve": (linalg.cho_solve(low, b), np.linalg.solve(H, b)),
        "cholesky": (low, np.linalg.cholesky(H)),
        "cond": (linalg.cond(A), np.linalg.cond(X)),
        "det": (linalg.det(A), np.linalg.det(X)),
        "eigh": (linalg.eigh(S)[0], np.linalg.eigvalsh(H)),
        "eigvalsh": (linalg.eigvalsh(S), np.linalg.eigvalsh(H)),
        "expm": (linalg.expm(A), scipy.linalg.expm(X)),
        "gram": (linalg.gram(F), TALL.T @ TALL),
        "hemm": (linalg.hemm(1, S, B), H @ Y),
        "her2k": (np.tril(whole(linalg.her2k(1, A, B))), np.tril(X @ Y.T + Y @ X.T)),
        "herk": (np.tril(whole(linalg.herk(1, A))), np.tril(X @ X.T)),
        "householder_qr": (abs(np.diag(whole(linalg.householder_qr(F)[1]))), abs(np.diag(np.linalg.qr(TALL)[1]))),
        "inertia": (tuple(linalg.inertia(S)), (0, 0, N)),
        "inv": (linalg.inv(A), np.linalg.inv(X)),
        "inv_triangular": (linalg.inv_triangular(T, lower=True), np.linalg.inv(L)),
        "kron": (linalg.kron(F, F), np.kron(TALL, TALL)),
        "lstsq": (linalg.lstsq(F, b)[0], np.linalg.lstsq(TALL, b)[0]),
        "lu": (linalg.lu(A)[2], scipy.linalg.lu(X)[2]),
        "lu_factor": (lu.LU, scipy.linalg.lu_factor(X)[0]),
        "lu_solve": (linalg.lu_solve(lu, b), np.linalg.solve(X, b)),
        "matrix_power": (linalg.matrix_power(A, 3), X @ X @ X),
        "matrix_rank": (linalg.matrix_rank(F), 5),
        "matrix_sign": (linalg.matrix_sign(S), np.eye(N)),
        "matvec": (linalg.matvec(A, b), X @ b),
        "newton_schulz": (np.linalg.svd(whole(linalg.newton_schulz(F, 9)))[1] > 0.6, np.ones(5, bool)),
        "norm": (linalg.norm(A), np.linalg.norm(X)),
        "outer": (linalg.outer(b, b, grid=grid), np.outer(b, b)),
        "pinv": (linalg.pinv(F), np.linalg.pinv(TALL)),
        "plan": (bool(linalg.plan("cholesky", S).words == linalg.plan(linalg.cholesky, S).words), True),
        "polar": (linalg.polar(A), scipy.linalg.polar(X)),
        "qr": (np.matmul(*whole(linalg.qr(F))), TALL),
        "slogdet": (tuple(linalg.slogdet(A)), tuple(np.linalg.slogdet(X))),
        "solve": (linalg.solve(A, b), np.linalg.solve(X, b)),
        "solve_triangular": (linalg.solve_triangular(T, b, lower=True), np.linalg.solve(L, b)),
        "sqrtm": (linalg.sqrtm(S), scipy.linalg.sqrtm(H)),
        "svd": (linalg.svd(A)[1], np.linalg.svd(X)[1]),
        "svdvals": (linalg.svdvals(F), np.linalg.svd(TALL)[1]),
        "symm": (linalg.symm(1, S, B, side="R"), Y @ H),
        "syr2k": (np.tril(whole(linalg.syr2k(1, A, B))), np.tril(X @ Y.T + Y @ X.T)),
        "syrk": (np.tril(whole(linalg.syrk(1, A))), np.tril(X @ X.T)),
        "trmm": (linalg.trmm(T, B, lower=True), L @ Y),
    }
    assert {*results} == {name for name in linalg.__all__ if not isinstance(getattr(linalg, name), type)}
    for name, (result, expected) in results.items():
        for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (whole(result), expected)), strict=True):
            assert np.allclose(x, y), name


def test_products_and_moves(comm: Any, grid: Any) -> None:
    A, B = (DistMatrix.from_global(x, grid=grid, block=5) for x in (X, Y))
    C = pdgemm.pdgemm(2, A, B)
    one, other = (Batch.from_global(np.stack([x, 2 * x]), comm) for x in (X, Y))
    D = DistMatrix.from_global(X, grid=grid, block=5)
    pdgemm.assign(D, np.s_[:2, :3], B[1:3, 4:7])
    groups = np.arange(N) % 2
    assigned = X.copy()
    assigned[:2, :3] = Y[1:3, 4:7]
    results: dict[str, tuple[Any, Any]] = {
        "assign": (D, assigned),
        "matmul": (pdgemm.matmul(A, B), X @ Y),
        "matmul_batched": (pdgemm.matmul_batched(one, other), np.stack([X @ Y, 4 * X @ Y])),
        "matmul_grouped": (pdgemm.matmul_grouped(A, other, groups), (X @ Y) * (1 + groups[:, None])),
        "pdgemm": (C, 2 * X @ Y),
        "plan": (pdgemm.plan(A, B, D).execute(A, B, D.copy()), X @ Y),
        "quantize": (
            np.rint(whole(pdgemm.quantize(A, "int8").decode()) / abs(X).max() * 127),
            np.rint(X / abs(X).max() * 127),
        ),
        "redistribute": (pdgemm.redistribute(A, grid=grid, block=2), X),
        "select": (pdgemm.select(A, [3, 1], [2]), X[[3, 1]][:, [2]]),
    }
    for name, (result, expected) in results.items():
        assert np.allclose(whole(result), expected), name
    assert pdgemm.verify(C, 2, A, B).passed
    assert pdgemm.checksum(A) == pdgemm.checksum(pdgemm.redistribute(A, grid=grid, block=3))


def test_files(comm: Any, grid: Any, tmp_path: Path) -> None:
    A, B = (DistMatrix.from_global(x, grid=grid, block=5) for x in (X, Y))
    hdf5.save(tmp_path / "a.h5", "a", A)
    hdf5.save_all(tmp_path / "state.h5", {"b": B})
    npy.save(tmp_path / "a.npy", A)
    safetensors.save_all(tmp_path / "a.safetensors", {"a": A})
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["a"], X)
    pdgemm.multiply_files((tmp_path / "a.h5", "a"), (tmp_path / "state.h5", "b"), (tmp_path / "c.h5", "c"), grid=grid)
    for matrix, expected in (
        (hdf5.load(tmp_path / "a.h5", "a", grid=grid), X),
        (hdf5.load_all(tmp_path / "state.h5", grid).matrices["b"], Y),
        (npy.load(tmp_path / "a.npy", grid=grid), X),
        (safetensors.load_all(tmp_path / "a.safetensors", grid)["a"], X),
        (hdf5.load(tmp_path / "c.h5", "c", grid=grid), X @ Y),
        (hdf5.dataset(tmp_path / "a.h5", "a", grid) @ B, X @ Y),
        (npy.dataset(tmp_path / "a.npy", grid) @ B, X @ Y),
    ):
        assert np.allclose(whole(matrix), expected)
