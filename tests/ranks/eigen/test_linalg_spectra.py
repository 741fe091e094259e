"""Polar factors, signs, roots, singular values and eigenvalues, compared with those of NumPy and SciPy."""

from __future__ import annotations

from sys import modules
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import eps_of, rng_matrix, wide, with_singular_values
from layouts import laid_out
from problems import DTYPES
from tiers import in_turn

from pdgemm import linalg
from pdgemm.errors import LinAlgError

pytestmark = pytest.mark.mpi


def orthogonality(Q: np.ndarray) -> float:
    """Return |Q^H Q - I|_F / (eps sqrt(n))."""
    n = Q.shape[1]
    return float(np.linalg.norm(wide(Q).conj().T @ wide(Q) - np.eye(n)) / (eps_of(Q) * np.sqrt(max(n, 1))))


def test_all_singular_values(comm: Any) -> None:
    for number, shape in enumerate([(23, 6), (6, 23), (1, 1), (0, 4), (4, 0)]):
        with laid_out(comm, x := rng_matrix(*shape, "complex128"), number) as A:
            for some in (None, min(shape)) if min(shape) else (None,):
                U, s, Vh = linalg.svd(A, some)
                assert np.allclose(s, np.linalg.svd(x, compute_uv=False))
                assert np.allclose((U.allgather() * s) @ Vh.allgather(), x)
                assert max(orthogonality(U.allgather()), orthogonality(Vh.allgather().conj().T)) <= 20
            assert np.allclose(np.linalg.svd(A, compute_uv=False), s)


def test_svd_of_low_rank_and_its_errors(comm: Any) -> None:
    x = with_singular_values(20, 15, np.r_[3, 2, 1, np.zeros(12)], "float64")
    with laid_out(comm, x) as A:
        U, s, Vh = linalg.svd(A, 6)
        assert np.allclose(s, [3, 2, 1, 0, 0, 0]) and np.allclose((U.allgather() * s) @ Vh.allgather(), x)
        assert orthogonality(U.allgather()) <= 20 and U.report.facts["bound"] < 1e-13
        assert not linalg.svd(A * 0, 2)[1].any()
        for seed in range(4):  # values after the k-th are not computed
            U, s, Vh = linalg.svd(A, 1, oversample=0, seed=seed)
            assert abs(s[0] - 3) <= 3 * U.report.facts["bound"]
        with pytest.raises(LinAlgError, match="contains NaN or infinity"):
            linalg.svd(A * np.inf, 3)


SHAPES = [(15, 15), (22, 15), (15, 22)]
SINGULAR_VALUES = [
    np.linspace(1, 2, 15), np.logspace(0, -3, 15), np.logspace(0, -15, 15), np.r_[np.ones(9), np.zeros(6)],
    np.r_[np.ones(8), np.full(7, 1e-9)],
]  # fmt: skip


def check_polar(A: Any, x: np.ndarray) -> None:
    """Check |U^H U - I| <= 10 eps sqrt(n) and |A - U H|_F <= 100 eps |A|_F: the weights of QDWH are at most 100."""
    U, H = linalg.polar(A)
    u, h = wide(U.allgather()), wide(H.allgather())
    assert orthogonality((u if x.shape[0] >= x.shape[1] else u.conj().T).astype(x.dtype)) <= 10
    assert np.linalg.norm(x - u @ h) <= 100 * eps_of(x) * np.linalg.norm(x)
    assert np.array_equal(h, h.conj().T)
    assert min(np.linalg.eigvalsh(h), default=0) >= -100 * eps_of(x) * np.linalg.norm(x)
    assert U.report.counted == U.report.predicted and U.report.facts["orthogonality"] <= 10 * eps_of(x) * max(x.shape)


@pytest.mark.parametrize(("dtype", "shape"), in_turn(DTYPES, SHAPES))
def test_polar(comm: Any, dtype: str, shape: tuple[int, int]) -> None:
    turn = 5 * SHAPES.index(shape) + DTYPES.index(dtype)
    for number in (turn % 5, (turn + 2) % 5):
        x = with_singular_values(*shape, SINGULAR_VALUES[number], dtype)
        with laid_out(comm, x, number + DTYPES.index(dtype)) as A:
            check_polar(A, x)


@pytest.mark.on_ranks(1)
def test_polar_of_nasty_matrices(comm: Any) -> None:
    kahan = 0.9 ** np.arange(18)[:, None] * (np.eye(18) - 0.4 * np.triu(np.ones((18, 18)), 1))
    graded = np.diag(10.0 ** -np.arange(0, 18)) @ rng_matrix(18, 18, "float64")
    hole = rng_matrix(9, 9, "float64")
    hole[:, 3] = 0
    cases = [kahan * 1e-290, graded, graded.T, hole, scipy.linalg.hilbert(14), np.eye(4), -np.ones((1, 1))]
    cases += [np.zeros((4, 3)), np.zeros((5, 0)), np.zeros((0, 5))]
    for number, x in enumerate(cases):
        with laid_out(comm, x, number) as A:
            check_polar(A, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sign_and_square_root(comm: Any, dtype: str) -> None:
    n, one = 14, np.eye(14, dtype=dtype)
    x = rng_matrix(n, n, dtype)
    h = x + x.conj().T
    w, V = np.linalg.eigh(wide(h))
    with laid_out(comm, h) as A:
        ways: Any = ("her", "gen") if dtype in ("float64", "complex64") else ("her",)
        bound = 100 * eps_of(x) * max(abs(w)) / min(abs(w))
        for assumed in ways:
            S = linalg.matrix_sign(A, assume_a=assumed)
            assert np.abs(S.allgather() - (V * np.sign(w)) @ V.conj().T).max() <= bound
            assert S.report.facts["residual"] <= n * eps_of(x) and S.same_layout(A)
    roots: Any = ((x @ x.conj().T + one / 4, "pos"), (x + 12 * one, "gen"))
    for whole, assumed in roots:
        exact = scipy.linalg.sqrtm(wide(whole))
        with laid_out(comm, whole) as A:
            X = linalg.sqrtm(A, assume_a=assumed)
            bound = 100 * eps_of(x) * np.linalg.cond(wide(whole)) ** 0.5 * np.abs(exact).max()
            assert np.abs(X.allgather() - exact).max() <= bound
            assert X.report.facts["residual"] <= 10 * n * eps_of(x) and X.same_layout(A)


def test_no_sign_and_no_square_root(comm: Any) -> None:
    with laid_out(comm, np.array([[0.0, 1], [-1, 0]])) as A:
        with pytest.raises(LinAlgError):
            linalg.matrix_sign(A)
        with pytest.raises(LinAlgError):
            linalg.sqrtm(A @ A)
        with pytest.raises(LinAlgError, match="not positive definite"):
            linalg.sqrtm(A @ A, assume_a="pos")


def check_eigh(A: Any, x: np.ndarray, k: int | None = None, **options: Any) -> Any:
    """Check residuals <= 10 n eps |A|_F (of k pairs: the tolerance), and eigenvalues equal to LAPACK's to n eps |A|."""
    w, V = linalg.eigh(A, k=k, **options)
    v, n, size, full = wide(V.allgather()), len(x), np.linalg.norm(x) or 1, wide(x)
    tolerance = 2e-5 if eps_of(x) > 1e-10 else 2e-10
    assert np.linalg.norm(full @ v - v * w) <= (10 * n * eps_of(x) if k is None else tolerance) * size
    assert orthogonality(v.astype(x.dtype)) <= (30 if k is None else 60)  # restarts rotate the basis of Lanczos
    exact = np.linalg.eigvalsh(full)
    exact = exact if k is None else exact[:k] if options.get("which") == "smallest" else exact[n - k :]
    assert np.abs(w - exact).max(initial=0) <= (n * eps_of(x) if k is None else tolerance) * size
    return V


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigh(comm: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rng_matrix(26, 26, dtype)
    h = x + x.conj().T
    with laid_out(comm, h[:23, :23]) as A:
        check_eigh(A, h[:23, :23])  # small: solved on one rank
        check_eigh(np.tril(A), h[:23, :23])  # the other triangle is not read
        check_eigh(np.triu(A), h[:23, :23], lower=False)
    monkeypatch.setattr(modules["pdgemm.linalg.eigen.division"], "SMALL", 20)
    monkeypatch.setattr(modules["pdgemm.linalg.eigen.eigh"], "_method", lambda *_: "division")
    with laid_out(comm, h) as A:
        assert check_eigh(A, h).report.steps >= 1


@pytest.mark.on_ranks(1)
def test_eigh_of_nasty_matrices(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules["pdgemm.linalg.eigen.division"], "SMALL", 12)
    monkeypatch.setattr(modules["pdgemm.linalg.eigen.eigh"], "_method", lambda *_: "division")
    cases = [np.eye(20), np.diag(np.arange(16.0) % 3), np.zeros((13, 13)), scipy.linalg.hilbert(16)]
    cases += [np.diag(np.r_[np.ones(9), 1 + 1e-14 * np.arange(9)]), np.zeros((0, 0)), np.eye(1) * 3]
    for number, x in enumerate(cases):
        with laid_out(comm, (x + x.T) / 2, number) as A:
            check_eigh(A, (x + x.T) / 2)


@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_some_eigenvalues(comm: Any, which: str) -> None:
    for number, dtype in enumerate(DTYPES[which == "smallest" :: 2]):
        x = rng_matrix(45, 45, dtype)
        with laid_out(comm, h := x + x.conj().T, number) as A:
            check_eigh(A, h, 3, which=which)
    repeated = np.diag(np.r_[np.full(3, 5.0), np.full(3, -5.0), np.linspace(0, 4, 39)])
    with laid_out(comm, repeated) as A:  # hundreds of thin products
        check_eigh(A, repeated, 4, which=which)
        assert np.allclose(linalg.eigh(A, k=45)[0], np.sort(np.diag(repeated)))
        with pytest.raises(LinAlgError, match="were not found in 1 step"):
            linalg.eigh(A, k=3, steps=1)
