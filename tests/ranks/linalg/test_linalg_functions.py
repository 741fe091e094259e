"""Powers, exponentials, norms, condition numbers and products, compared with NumPy's and SciPy's."""

from __future__ import annotations

import warnings
from math import factorial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import eps_of, rng_matrix, wide, with_singular_values
from fake_device import fake_device
from layouts import laid_out
from problems import DTYPES, TOLERANCE, gemm_error
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, GridError, LayoutError

pytestmark = pytest.mark.mpi
USUAL = (3.4445, -4.7750, 2.0315)  # coefficients of Muon


def same_on_all(comm: Any, found: Any) -> None:
    assert len(set(comm.allgather(np.asarray(found).tobytes()))) == 1


def muon(G: np.ndarray, steps: int, triples: Any) -> np.ndarray:
    X = G / (np.linalg.norm(G) + 1e-7)
    for a, b, c in np.broadcast_to(triples, (steps, 3)):
        S = X @ X.conj().T
        X = a * X + (b * S + c * S @ S) @ X
    return X


@pytest.mark.parametrize(("dtype", "shape"), in_turn(DTYPES, [(9, 23), (23, 9), (1, 5)]))
def test_newton_schulz(comm: Any, dtype: str, shape: tuple[int, int]) -> None:
    G = rng_matrix(*shape, dtype)
    with laid_out(comm, G) as A:
        X = linalg.newton_schulz(A)
        assert np.abs(X.allgather() - muon(wide(G), 5, USUAL)).max() <= 200 * eps_of(G)
        assert X.same_layout(A) and X.report.counted == X.report.predicted and X.report.products == 15
        polar = linalg.newton_schulz(A, 30, coefficients=(15 / 8, -10 / 8, 3 / 8)).allgather()
        assert np.abs(polar - scipy.linalg.polar(wide(G))[0]).max() <= 100 * eps_of(G)


def test_newton_schulz_takes_16_bits_zeros_and_other_coefficients(comm: Any) -> None:
    G = rng_matrix(6, 8, "float32")
    triples = [(3.0, -3.2, 1.2), (1.875, -1.25, 0.375)]
    with laid_out(comm, G) as A:
        X = linalg.newton_schulz(A.astype("bfloat16"), 2, coefficients=triples)
        assert X.dtype == "bfloat16" and np.abs(X.allgather().astype("f4") - muon(G, 2, triples)).max() < 0.05
        assert not linalg.newton_schulz(A * 0).allgather().any()
        assert linalg.newton_schulz(A[:0, :], 2).shape == (0, 8)
        with pytest.raises(ArgumentError, match=r"one triple for each of 3 steps, got shape \(2, 3\)"):
            linalg.newton_schulz(A, 3, coefficients=triples)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_power(comm: Any, dtype: str) -> None:
    x = rng_matrix(11, 11, dtype) / 3
    with laid_out(comm, x) as A:
        for n in (0, 1, 3, 13):
            X = linalg.matrix_power(A, n)
            exact = np.linalg.matrix_power(wide(x), n)
            bound = max(n, 1) * 11 * eps_of(x) * np.linalg.matrix_power(np.abs(wide(x)), n).max()
            assert np.abs(X.allgather() - exact).max() <= bound * (n > 1)
            assert X.same_layout(A) and X.report.products == max(0, n.bit_length() + n.bit_count() - 2)
        assert np.array_equal(np.linalg.matrix_power(A, 3).allgather(), linalg.matrix_power(A, 3).allgather())


@pytest.mark.parametrize(("size", "dtype"), in_turn([0, 1e-3, 0.3, 3, 40], DTYPES, 1))
def test_expm(comm: Any, size: float, dtype: str) -> None:
    """Compared with SciPy in double precision; the condition number is at least |A|, and |A| for normal A."""
    x = rng_matrix(13, 13, dtype)
    x = (x - x.conj().T if size > 3 else x) * np.asarray(size / np.linalg.norm(x, 1), x.real.dtype)
    exact = scipy.linalg.expm(wide(x))
    with laid_out(comm, x) as A:
        X = linalg.expm(A)
        error = np.linalg.norm(X.allgather() - exact) / np.linalg.norm(exact)
        assert error <= 13 * eps_of(x) * max(1, size) and X.report.counted == X.report.predicted
        assert X.report.products == (3 if size <= (0.58 if eps_of(x) > 1e-10 else 0.049) else 5 + X.report.steps)


def test_expm_of_matrices_far_from_normal(comm: Any) -> None:
    """The number of squarings depends on |A^2|^(1/2), not on |A|, which would be too many (the classic examples)."""
    cases = [np.array([[1, 1e6], [0, -1]]), np.diag(np.full(5, 1e8), 1), np.triu(np.ones((7, 7))) * 3, np.zeros((0, 0))]
    for x in cases:
        exact = scipy.linalg.expm(x)
        with laid_out(comm, x) as A:
            X = linalg.expm(A)
            assert np.abs(X.allgather() - exact).max(initial=0) <= 1e3 * 2.3e-16 * np.abs(exact).max(initial=0)
            assert X.report.steps <= 8 or x.shape == (6, 6)
    i = np.arange(9)
    for size in (1.09, 2.18, 4.36):  # just below 2^s theta, where the number of squarings grows
        series = np.array([sum(size ** (k + 9 * j) / factorial(k + 9 * j) for j in range(12)) for k in i])
        exact = series[(i[:, None] - i) % 9]
        with laid_out(comm, size * np.roll(np.eye(9), 1, axis=0)) as A:  # powers have large norms, too
            assert np.linalg.norm(linalg.expm(A).allgather() - exact) <= 9 * eps_of(exact) * size * np.linalg.norm(
                exact
            )


@pytest.mark.parametrize(("dtype", "shape"), in_turn(DTYPES, [(13, 8), (8, 29), (1, 9)]))
def test_norms(comm: Any, dtype: str, shape: tuple[int, int]) -> None:
    x = rng_matrix(*shape, dtype)
    with laid_out(comm, x) as A:
        for kind in (None, "fro", "nuc", 1, -1, np.inf, -np.inf, 2, -2):
            found, close = linalg.norm(A, kind), 1e-6 if eps_of(x) > 1e-10 else 1e-10
            least = 30 * 29 * eps_of(x) * np.linalg.norm(x) if kind == -2 else 0  # absolute error of singular values
            assert np.isclose(found, np.linalg.norm(wide(x), kind), rtol=close, atol=least)
            assert np.linalg.norm(A, kind) == found == (A.norm() if kind is None else A.norm(kind))
            same_on_all(comm, found)
        assert linalg.norm(A, "max") == A.norm("max")


def test_norms_of_few_elements(comm: Any) -> None:
    """Zeros, NaN and infinity; and no elements, for which the least sum is not defined, as in NumPy."""
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
            with pytest.raises(ArgumentError, match="minimum of sums|smallest singular value"):
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
    for dtype in DTYPES:
        x = rng_matrix(15, 15, dtype) + 3 * np.eye(15, dtype=dtype)
        with laid_out(comm, x) as A:
            for p in (1, np.inf):
                found, exact = linalg.cond(A, p), np.linalg.cond(wide(x), p)
                assert exact / 3.1 <= found <= exact * 1.001
                same_on_all(comm, found)
            assert np.isclose(linalg.cond(A), np.linalg.cond(wide(x)), rtol=0.03)
            for p in ("fro", -1, -np.inf, -2):
                found = linalg.cond(A, p)
                assert np.isclose(found, np.linalg.cond(wide(x), p), rtol=1000 * eps_of(x))
                assert np.linalg.cond(A, p) == found
        for y in (rng_matrix(15, 6, dtype), rng_matrix(7, 16, dtype)):
            with laid_out(comm, y) as A:
                for p in (None, 2, -2):
                    assert np.isclose(linalg.cond(A, p), np.linalg.cond(wide(y), p), rtol=1000 * eps_of(x))
                with pytest.raises(LayoutError, match="must be square"):
                    linalg.cond(A, "fro")


def test_condition_numbers_that_are_infinite_or_hard_to_estimate(comm: Any) -> None:
    singular = np.diag([2.0, 1, 0])
    infinite, nan = np.where(singular > 1, np.inf, singular), np.full((3, 3), np.nan)
    for y, expected in ((singular, np.inf), (singular * 0, np.inf), (nan, np.nan), (infinite, np.inf)):
        with laid_out(comm, y) as A:  # equal to NumPy's, unless its SVD raises LinAlgError
            for p in (1, -1, np.inf, -np.inf, "fro", None, 2):
                assert np.array_equal(linalg.cond(A, p), expected, equal_nan=True), (y, p)
            assert np.array_equal(linalg.cond(A, -2), 0 if y is singular else expected, equal_nan=True)
    h = scipy.linalg.hilbert(9)
    with laid_out(comm, h) as A:
        found = [linalg.cond(A, p, assume_a="pos") for p in (1, 2)]
        assert np.allclose(found, [np.linalg.cond(h, p) for p in (1, 2)], rtol=0.03)
    x = np.linalg.inv([[-1.0, 2, -2], [0, 2, -2], [0, 0, 1]])  # Hager's estimate ends at 1; the norm is 5
    with laid_out(comm, x) as A:
        assert linalg.cond(A, 1) >= 3.7 * np.linalg.norm(x, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kron(comm: Any, dtype: str) -> None:
    x, y = rng_matrix(7, 5, dtype), rng_matrix(3, 4, "float64", 1)
    with laid_out(comm, x) as A, laid_out(comm, y, 2) as B:
        for first, second, exact in (
            (A, B, np.kron(x, y)),
            (B.T, A, np.kron(y.T, x)),
            (A.H, B, np.kron(x.conj().T, y)),
        ):
            found = linalg.kron(first, second)
            assert np.array_equal(found.allgather(), exact) and found.dtype == exact.dtype
            assert found.report.counted == found.report.predicted
            assert found.report.counted.words_received == second.size - second.stored.size  # elements of other ranks
        assert np.array_equal(np.kron(A, B).allgather(), np.kron(x, y))
        assert linalg.kron(A[:0, :], B).shape == (0, 20) and linalg.kron(A, B[:, :0]).shape == (21, 0)


def test_products_with_vectors(comm: Any) -> None:
    x, v, w = rng_matrix(7, 5, "complex128"), rng_matrix(5, 1, "complex128")[:, 0], rng_matrix(7, 1, "float64")[:, 0]
    with laid_out(comm, x) as A:
        ways: Any = (("N", v, x @ v), ("T", w, x.T @ w), ("C", w, x.conj().T @ w))
        for trans, vector, exact in ways:
            column = DistMatrix.from_global(vector[:, None], grid=A.grid)
            assert np.allclose(linalg.matvec(A, vector, trans=trans), exact)
            assert np.allclose(linalg.matvec(A, column, trans=trans).allgather()[:, 0], exact)
        for left, how in ((w, {"grid": A.grid, "block": 2}), (DistMatrix.from_global(w[:, None], grid=A.grid), {})):
            assert np.array_equal(linalg.outer(left, v, **how).allgather(), np.outer(w, v))
        with pytest.raises(GridError, match="takes the grid"):
            linalg.outer(w, v)


def test_functions_on_a_device(comm: Any) -> None:
    x = rng_matrix(12, 12, "float64")
    with ProcessGrid(comm) as grid, fake_device("late") as device:
        A = DistMatrix.from_global(x, grid=grid, block=3, device="fake")
        assert np.abs(linalg.newton_schulz(A).allgather() - muon(x, 5, USUAL)).max() < 1e-13
        assert np.allclose(linalg.expm(A).allgather(), scipy.linalg.expm(x))
        assert np.array_equal(linalg.kron(A, A).allgather(), np.kron(x, x))
        assert np.isclose(linalg.norm(A, 2), np.linalg.norm(x, 2))
        assert gemm_error(linalg.matrix_power(A, 2).allgather(), 1, x, x) <= TOLERANCE
        assert not device.races
