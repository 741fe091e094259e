"""Functions of matrices, norms, singular values and eigenvalues against NumPy and SciPy on the whole matrix."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from math import factorial
from sys import modules
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import rng_matrix, wide, with_singular_values
from fake_device import fake_device
from layouts import matrices_in_turn
from problems import TOLERANCE, gemm_error
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, GridError, LayoutError, LinAlgError

pytestmark = pytest.mark.mpi
TYPES = ("float32", "float64", "complex64", "complex128")


@contextmanager
def laid_out(comm: Any, whole: np.ndarray, turn: int = 0) -> Iterator[Any]:
    """A matrix in one of the layouts, in turn."""
    with closing(matrices_in_turn(comm, whole)) as layouts:
        A = next(islice(layouts, 3 * turn % (5 if comm.size == 1 else 13), None))
        yield A
        assert np.array_equal(A.allgather(), whole, equal_nan=True)  # no function changes its argument


def drawn(shape: tuple[int, int], dtype: str, seed: int = 0) -> np.ndarray:
    return rng_matrix(*shape, dtype, seed)


def eps(x: Any) -> float:
    return float(np.finfo(x.dtype).eps)


def same_on_all(comm: Any, found: Any) -> None:
    assert len(set(comm.allgather(np.asarray(found).tobytes()))) == 1


def muon(G: np.ndarray, steps: int, triples: Any) -> np.ndarray:
    X = G / (np.linalg.norm(G) + 1e-7)
    for a, b, c in np.broadcast_to(triples, (steps, 3)):
        S = X @ X.conj().T
        X = a * X + (b * S + c * S @ S) @ X
    return X


@pytest.mark.parametrize(("dtype", "shape"), in_turn(TYPES, [(9, 23), (23, 9), (1, 5)]))
def test_newton_schulz(comm: Any, dtype: str, shape: tuple[int, int]) -> None:
    G = drawn(shape, dtype)
    with laid_out(comm, G, TYPES.index(dtype)) as A:
        X = linalg.newton_schulz(A)
        assert np.abs(X.allgather() - muon(wide(G), 5, (3.4445, -4.7750, 2.0315))).max() <= 200 * eps(G)
        assert X.same_layout(A) and X.report.counted == X.report.predicted and X.report.products == 15
        polar = linalg.newton_schulz(A, 30, coefficients=(15 / 8, -10 / 8, 3 / 8)).allgather()
        assert np.abs(polar - scipy.linalg.polar(wide(G))[0]).max() <= 100 * eps(G)


def test_newton_schulz_takes_16_bits_zeros_and_other_coefficients(comm: Any) -> None:
    G = drawn((6, 8), "float32")
    triples = [(3.0, -3.2, 1.2), (1.875, -1.25, 0.375)]
    with laid_out(comm, G) as A:
        X = linalg.newton_schulz(A.astype("bfloat16"), 2, coefficients=triples)
        assert X.dtype == "bfloat16" and np.abs(X.allgather().astype("f4") - muon(G, 2, triples)).max() < 0.05
        assert not linalg.newton_schulz(A * 0).allgather().any()
        assert linalg.newton_schulz(A[:0, :], 2).shape == (0, 8)
        with pytest.raises(ArgumentError, match=r"one triple for each of 3 steps, got shape \(2, 3\)"):
            linalg.newton_schulz(A, 3, coefficients=triples)
        with pytest.raises(LinAlgError, match="contains NaN or infinity"):
            linalg.newton_schulz(A * np.nan)


@pytest.mark.parametrize("dtype", TYPES)
def test_matrix_power(comm: Any, dtype: str) -> None:
    x = drawn((11, 11), dtype) / 3
    with laid_out(comm, x, TYPES.index(dtype)) as A:
        for n in (0, 1, 3, 13):
            X = linalg.matrix_power(A, n)
            exact = np.linalg.matrix_power(wide(x), n)
            bound = max(n, 1) * 11 * eps(x) * np.linalg.matrix_power(np.abs(wide(x)), n).max()
            assert np.abs(X.allgather() - exact).max() <= bound * (n > 1)
            assert X.same_layout(A) and X.report.products == max(0, n.bit_length() + n.bit_count() - 2)
        assert np.array_equal(np.linalg.matrix_power(A, 3).allgather(), linalg.matrix_power(A, 3).allgather())


@pytest.mark.parametrize(("size", "dtype"), in_turn([0, 1e-3, 0.3, 3, 40], TYPES, 1))
def test_expm(comm: Any, size: float, dtype: str) -> None:
    """Against SciPy in double precision; the condition number of e^A is at least |A|, and for normal A that."""
    x = drawn((13, 13), dtype)
    x = (x - x.conj().T if size > 3 else x) * np.asarray(size / np.linalg.norm(x, 1), x.real.dtype)
    exact = scipy.linalg.expm(wide(x))
    with laid_out(comm, x, TYPES.index(dtype)) as A:
        X = linalg.expm(A)
        error = np.linalg.norm(X.allgather() - exact) / np.linalg.norm(exact)
        assert error <= 13 * eps(x) * max(1, size) and X.report.counted == X.report.predicted
        assert X.report.products == (3 if size <= (0.58 if eps(x) > 1e-10 else 0.049) else 5 + X.report.steps)


def test_expm_of_matrices_far_from_normal(comm: Any) -> None:
    """Scaling follows |A^2|^(1/2), not |A|: the classic example of what too many squarings lose."""
    cases = [np.array([[1, 1e6], [0, -1]]), np.diag(np.full(5, 1e8), 1), np.triu(np.ones((7, 7))) * 3, np.zeros((0, 0))]
    for x in cases:
        exact = scipy.linalg.expm(x)
        with laid_out(comm, x) as A:
            X = linalg.expm(A)
            assert np.abs(X.allgather() - exact).max(initial=0) <= 1e3 * 2.3e-16 * np.abs(exact).max(initial=0)
            assert X.report.steps <= 8 or x.shape == (6, 6)
    i = np.arange(9)
    for size in (1.09, 2.18, 4.36):  # just below 2^s theta, where one more squaring begins; against e^A's series
        series = np.array([sum(size ** (k + 9 * j) / factorial(k + 9 * j) for j in range(12)) for k in i])
        exact = series[(i[:, None] - i) % 9]
        with laid_out(comm, size * np.roll(np.eye(9), 1, axis=0)) as A:  # of which all powers have their full norms
            assert np.linalg.norm(linalg.expm(A).allgather() - exact) <= 9 * eps(exact) * size * np.linalg.norm(exact)


@pytest.mark.parametrize(("dtype", "shape"), in_turn(TYPES, [(13, 8), (8, 29), (1, 9)]))
def test_norms(comm: Any, dtype: str, shape: tuple[int, int]) -> None:
    x = drawn(shape, dtype)
    with laid_out(comm, x, TYPES.index(dtype)) as A:
        for kind in (None, "fro", "nuc", 1, -1, np.inf, -np.inf, 2, -2):
            found, expected = linalg.norm(A, kind), np.linalg.norm(wide(x), kind)
            close = 1e-6 if eps(x) > 1e-10 else 1e-10
            least = 30 * 29 * eps(x) * np.linalg.norm(x) if kind == -2 else 0  # singular values have absolute errors
            assert np.isclose(found, expected, rtol=close, atol=least)
            assert np.linalg.norm(A, kind) == found == (A.norm() if kind is None else A.norm(kind))
            same_on_all(comm, found)
        assert linalg.norm(A, "max") == A.norm("max")


def test_norms_of_few_elements(comm: Any) -> None:
    """Of zeros, of NaN and infinity, and of no elements, of which there is no least sum, as in NumPy."""
    kinds: tuple[Any, ...] = ("fro", "nuc", 1, -1, np.inf, -np.inf, 2, -2)
    with ProcessGrid(comm) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        zero, largest = DistMatrix.zeros((5, 3), grid=grid, block=2), float(np.finfo(float).max)
        assert [linalg.norm(zero, kind) for kind in kinds] == [0] * 8
        assert np.isnan([linalg.norm(zero * np.nan, kind) for kind in kinds]).all()
        A = zero.copy()
        A[1, 2] = np.inf
        assert [linalg.norm(A, kind) for kind in ("fro", 1, -1, np.inf, -np.inf)] == [np.inf, np.inf, 0, np.inf, 0]
        assert np.isnan([linalg.norm(A, kind) for kind in ("nuc", 2, -2)]).all()
        D = DistMatrix.eye(3, grid=grid, block=1) * largest
        assert linalg.norm(D, "nuc") == np.inf and linalg.norm(D, -2) == linalg.norm(D, -1) == largest
        for wrong in ((zero[:0, :], -np.inf), (zero[:, :0], -1), (zero[:0, :], -2)):
            with pytest.raises(ArgumentError, match="least of some sums|smallest singular value"):
                linalg.norm(*wrong)
        for none, kind in ((zero[:0, :], 2), (zero[:0, :], -1), (zero[:, :0], -np.inf), (zero[:, :0], "nuc")):
            assert linalg.norm(none, kind) == 0


def test_two_norms_that_are_hard(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        spectra: list[Any] = [[3, 3, 3 * (1 - 1e-9), *np.linspace(2.9, 0, 27)], [1] * 30, 2.0 ** -np.arange(30)]
        for values in spectra:
            A = DistMatrix.from_global(with_singular_values(40, 30, np.array(values), "float64"), grid=grid, block=7)
            assert abs(linalg.norm(A, 2) / max(values) - 1) <= 1e-9
            assert abs(linalg.norm(A * 1e300, 2) / max(values) / 1e300 - 1) <= 1e-9  # squares would overflow
            assert linalg.norm(A, 2, tolerance=0.1) <= max(values) * (1 + 1e-14)
        H = scipy.linalg.hilbert(25)
        assert np.isclose(linalg.norm(DistMatrix.from_global(H, grid=grid), 2), np.linalg.norm(H, 2), rtol=1e-12)
        with pytest.raises(ArgumentError, match="not one of"):
            linalg.norm(A, 3)


def test_condition_numbers(comm: Any) -> None:
    for dtype in TYPES:
        x = drawn((15, 15), dtype) + 3 * np.eye(15, dtype=dtype)
        with laid_out(comm, x, TYPES.index(dtype)) as A:
            for p in (1, np.inf):
                found = linalg.cond(A, p)
                assert np.linalg.cond(wide(x), p) / 3.1 <= found <= np.linalg.cond(wide(x), p) * 1.001
                same_on_all(comm, found)
            assert np.isclose(linalg.cond(A), np.linalg.cond(wide(x)), rtol=0.03)
            for p in ("fro", -1, -np.inf, -2):
                expected = np.linalg.cond(wide(x), p)
                assert np.isclose(linalg.cond(A, p), expected, rtol=1000 * eps(x))
                assert np.linalg.cond(A, p) == linalg.cond(A, p)
        for y in (drawn((15, 6), dtype), drawn((7, 16), dtype)):
            with laid_out(comm, y, TYPES.index(dtype)) as A:
                for p in (None, 2, -2):
                    assert np.isclose(linalg.cond(A, p), np.linalg.cond(wide(y), p), rtol=1000 * eps(x))
                with pytest.raises(LayoutError, match="must be square"):
                    linalg.cond(A, "fro")
    singular = np.diag([2.0, 1, 0])
    infinite, nan = np.where(singular > 1, np.inf, singular), np.full((3, 3), np.nan)
    for y, expected in ((singular, np.inf), (singular * 0, np.inf), (nan, np.nan), (infinite, np.inf)):
        with laid_out(comm, y) as A:  # as NumPy's, where its SVD does not raise LinAlgError
            for p in (1, -1, np.inf, -np.inf, "fro", None, 2):
                assert np.array_equal(linalg.cond(A, p), expected, equal_nan=True), (y, p)
            assert np.array_equal(linalg.cond(A, -2), 0 if y is singular else expected, equal_nan=True)
    h = scipy.linalg.hilbert(9)
    with laid_out(comm, h) as A:
        found = [linalg.cond(A, p, assume_a="pos") for p in (1, 2)]
        assert np.allclose(found, [np.linalg.cond(h, p) for p in (1, 2)], rtol=0.03)
        assert linalg.cond(A * 0) == np.inf or np.isnan(linalg.cond(A * 0))
    x = np.linalg.inv([[-1.0, 2, -2], [0, 2, -2], [0, 0, 1]])  # Hager's steps end at 1, its norm is 5
    with laid_out(comm, x) as A:
        assert linalg.cond(A, 1) >= 3.7 * np.linalg.norm(x, 1)


@pytest.mark.parametrize("dtype", TYPES)
def test_kron(comm: Any, dtype: str) -> None:
    x, y = drawn((7, 5), dtype), drawn((3, 4), "float64", 1)
    with laid_out(comm, x, TYPES.index(dtype)) as A, laid_out(comm, y, 2) as B:
        for first, second, exact in (
            (A, B, np.kron(x, y)),
            (B.T, A, np.kron(y.T, x)),
            (A.H, B, np.kron(x.conj().T, y)),
        ):
            found = linalg.kron(first, second)
            assert np.array_equal(found.allgather(), exact) and found.dtype == exact.dtype
            assert found.report.counted == found.report.predicted
            lacks = second.size - second.stored.size
            assert found.report.counted.words_received == lacks
        assert np.array_equal(np.kron(A, B).allgather(), np.kron(x, y))
        assert linalg.kron(A[:0, :], B).shape == (0, 20) and linalg.kron(A, B[:, :0]).shape == (21, 0)


def test_products_with_vectors(comm: Any) -> None:
    x, v, w = drawn((7, 5), "complex128"), drawn((5, 1), "complex128")[:, 0], drawn((7, 1), "float64")[:, 0]
    with laid_out(comm, x) as A:
        for trans, exact in (("N", x @ v), ("T", x.T @ w), ("C", x.conj().T @ w)):
            given = v if trans == "N" else w
            assert np.allclose(linalg.matvec(A, given, trans=trans), exact)  # type: ignore[arg-type]
            column = DistMatrix.from_global(given[:, None], grid=A.grid)
            assert np.allclose(linalg.matvec(A, column, trans=trans).allgather()[:, 0], exact)  # type: ignore[arg-type]
        assert np.array_equal(linalg.outer(w, v, grid=A.grid, block=2).allgather(), np.outer(w, v))
        assert np.array_equal(
            linalg.outer(DistMatrix.from_global(w[:, None], grid=A.grid), v).allgather(), np.outer(w, v)
        )
        with pytest.raises(GridError, match="takes the grid"):
            linalg.outer(w, v)


def orthogonality(Q: np.ndarray) -> float:
    """|Q^H Q - I|_F / (eps sqrt(n))."""
    n = Q.shape[1]
    return float(np.linalg.norm(wide(Q).conj().T @ wide(Q) - np.eye(n)) / (eps(Q) * np.sqrt(max(n, 1))))


def test_all_singular_values(comm: Any) -> None:
    for number, shape in enumerate([(23, 6), (6, 23), (1, 1), (0, 4), (4, 0)]):
        x = drawn(shape, "complex128")
        with laid_out(comm, x, number) as A:
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
        for seed in range(4):  # where no value after the k-th is seen
            U, s, Vh = linalg.svd(A, 1, oversample=0, seed=seed)
            assert abs(s[0] - 3) <= 3 * U.report.facts["bound"]
        with pytest.raises(LinAlgError, match="contains NaN or infinity"):
            linalg.svd(A * np.inf, 3)


SHAPES = [(15, 15), (22, 15), (15, 22)]
SINGULAR_VALUES = [
    np.linspace(1, 2, 15),
    np.logspace(0, -3, 15),
    np.logspace(0, -15, 15),
    np.r_[np.ones(9), np.zeros(6)],
    np.r_[np.ones(8), np.full(7, 1e-9)],
]


def check_polar(A: Any, x: np.ndarray) -> None:
    """|U^H U - I| <= 10 eps sqrt(n), |A - U H|_F <= 100 eps |A|_F: the weights of QDWH are at most 100."""
    U, H = linalg.polar(A)
    u, h = wide(U.allgather()), wide(H.allgather())
    assert orthogonality((u if x.shape[0] >= x.shape[1] else u.conj().T).astype(x.dtype)) <= 10
    assert np.linalg.norm(x - u @ h) <= 100 * eps(x) * np.linalg.norm(x)
    assert np.array_equal(h, h.conj().T)
    assert min(np.linalg.eigvalsh(h), default=0) >= -100 * eps(x) * np.linalg.norm(x)
    assert U.report.counted == U.report.predicted and U.report.facts["orthogonality"] <= 10 * eps(x) * max(x.shape)


@pytest.mark.parametrize(("dtype", "shape"), in_turn(TYPES, SHAPES))
def test_polar(comm: Any, dtype: str, shape: tuple[int, int]) -> None:
    turn = 5 * SHAPES.index(shape) + TYPES.index(dtype)
    for number in (turn % 5, (turn + 2) % 5):
        values = SINGULAR_VALUES[number]
        x = with_singular_values(*shape, values, dtype)
        with laid_out(comm, x, number + TYPES.index(dtype)) as A:
            check_polar(A, x)


@pytest.mark.on_ranks(1)
def test_polar_of_nasty_matrices(comm: Any) -> None:
    kahan = 0.9 ** np.arange(18)[:, None] * (np.eye(18) - 0.4 * np.triu(np.ones((18, 18)), 1))
    graded = np.diag(10.0 ** -np.arange(0, 18)) @ drawn((18, 18), "float64")
    hole = drawn((9, 9), "float64")
    hole[:, 3] = 0
    cases = [kahan * 1e-290, graded, graded.T, hole, scipy.linalg.hilbert(14), np.eye(4), -np.ones((1, 1))]
    cases += [np.zeros((4, 3)), np.zeros((5, 0)), np.zeros((0, 5))]
    for number, x in enumerate(cases):
        with laid_out(comm, x, number) as A:
            check_polar(A, x)


@pytest.mark.parametrize("dtype", TYPES)
def test_sign_and_square_root(comm: Any, dtype: str) -> None:
    x, n = drawn((14, 14), dtype), 14
    h = x + x.conj().T
    w, V = np.linalg.eigh(wide(h))
    positive = x @ x.conj().T + np.eye(n, dtype=dtype) / 4
    apart = x + 12 * np.eye(n, dtype=dtype)
    with laid_out(comm, h, TYPES.index(dtype)) as A:
        for assumed in ("her", "gen") if dtype in ("float64", "complex64") else ("her",):
            S = linalg.matrix_sign(A, assume_a=assumed)  # type: ignore[arg-type]
            assert np.abs(S.allgather() - (V * np.sign(w)) @ V.conj().T).max() <= 100 * eps(x) * max(abs(w)) / min(
                abs(w)
            )
            assert S.report.facts["residual"] <= n * eps(x) and S.same_layout(A)
    for whole, assumed in ((positive, "pos"), (apart, "gen")):
        exact = scipy.linalg.sqrtm(wide(whole))
        with laid_out(comm, whole, TYPES.index(dtype)) as A:
            X = linalg.sqrtm(A, assume_a=assumed)  # type: ignore[arg-type]
            bound = 100 * eps(x) * np.linalg.cond(wide(whole)) ** 0.5 * np.abs(exact).max()
            assert np.abs(X.allgather() - exact).max() <= bound
            assert X.report.facts["residual"] <= 10 * n * eps(x) and X.same_layout(A)


def test_no_sign_and_no_square_root(comm: Any) -> None:
    turned = np.array([[0.0, 1], [-1, 0]])
    with laid_out(comm, turned) as A:
        with pytest.raises(LinAlgError):
            linalg.matrix_sign(A)
        with pytest.raises(LinAlgError):
            linalg.sqrtm(A @ A)
        with pytest.raises(LinAlgError, match="not positive definite"):
            linalg.sqrtm(A @ A, assume_a="pos")


def check_eigh(A: Any, x: np.ndarray, k: int | None = None, **options: Any) -> Any:
    """Residuals <= 10 n eps |A|_F for all and the tolerance for some; eigenvalues as LAPACK's to n eps |A|."""
    w, V = linalg.eigh(A, k=k, **options)
    v, n, size = wide(V.allgather()), len(x), np.linalg.norm(x) or 1
    full = wide(x)
    tolerance = 2e-5 if eps(x) > 1e-10 else 2e-10
    assert np.linalg.norm(full @ v - v * w) <= (10 * n * eps(x) if k is None else tolerance) * size
    assert orthogonality(v.astype(x.dtype)) <= (30 if k is None else 60)  # restarts rotate the basis of Lanczos
    exact = np.linalg.eigvalsh(full)
    exact = exact if k is None else exact[:k] if options.get("which") == "smallest" else exact[n - k :]
    assert np.abs(w - exact).max(initial=0) <= (n * eps(x) if k is None else tolerance) * size
    return V


@pytest.mark.parametrize("dtype", TYPES)
def test_eigh(comm: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn((26, 26), dtype)
    h = x + x.conj().T
    with laid_out(comm, h[:23, :23], TYPES.index(dtype)) as A:
        check_eigh(A, h[:23, :23])  # on one rank
        check_eigh(np.tril(A), h[:23, :23])  # the other triangle is not read
        check_eigh(np.triu(A), h[:23, :23], lower=False)
    monkeypatch.setattr(modules["pdgemm.linalg.eigen.division"], "SMALL", 20)
    with laid_out(comm, h, TYPES.index(dtype)) as A:
        assert check_eigh(A, h).report.steps >= 1


@pytest.mark.on_ranks(1)
def test_eigh_of_nasty_matrices(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules["pdgemm.linalg.eigen.division"], "SMALL", 12)
    cases = [np.eye(20), np.diag(np.arange(16.0) % 3), np.zeros((13, 13)), scipy.linalg.hilbert(16)]
    cases += [np.diag(np.r_[np.ones(9), 1 + 1e-14 * np.arange(9)]), np.zeros((0, 0)), np.eye(1) * 3]
    for number, x in enumerate(cases):
        with laid_out(comm, (x + x.T) / 2, number) as A:
            check_eigh(A, (x + x.T) / 2)


@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_some_eigenvalues(comm: Any, which: str) -> None:
    for number, dtype in enumerate(TYPES[which == "smallest" :: 2]):
        x = drawn((45, 45), dtype)
        with laid_out(comm, h := x + x.conj().T, number) as A:
            check_eigh(A, h, 3, which=which)
    repeated = np.diag(np.r_[np.full(3, 5.0), np.full(3, -5.0), np.linspace(0, 4, 39)])
    with laid_out(comm, repeated) as A:  # hundreds of thin products
        check_eigh(A, repeated, 4, which=which)
        assert np.allclose(linalg.eigh(A, k=45)[0], np.sort(np.diag(repeated)))
        with pytest.raises(LinAlgError, match="were not found in 1 step"):
            linalg.eigh(A, k=3, steps=1)


def test_functions_on_a_device(comm: Any) -> None:
    x = drawn((12, 12), "float64")
    with ProcessGrid(comm) as grid, fake_device("late") as device:
        A = DistMatrix.from_global(x, grid=grid, block=3, device="fake")
        assert np.abs(linalg.newton_schulz(A).allgather() - muon(x, 5, (3.4445, -4.7750, 2.0315))).max() < 1e-13
        assert np.allclose(linalg.expm(A).allgather(), scipy.linalg.expm(x))
        assert np.array_equal(linalg.kron(A, A).allgather(), np.kron(x, x))
        assert np.isclose(linalg.norm(A, 2), np.linalg.norm(x, 2))
        assert gemm_error(linalg.matrix_power(A, 2).allgather(), 1, x, x) <= TOLERANCE
        assert not device.races
