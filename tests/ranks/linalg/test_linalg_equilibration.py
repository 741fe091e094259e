"""Matrices whose rows and columns are scaled over the range of the type: results are as accurate as without scales."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.linalg
from factored import positive_definite, rng_matrix
from powers_of_two import UNITS, times
from problems import DTYPES, grid_shapes
from tiers import everything

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.linalg.factors.solve import STRUCTURES
from pdgemm.linalg.ranges import EQUILIBRATED

pytestmark = [
    pytest.mark.mpi, pytest.mark.on_ranks(1, 2), pytest.mark.filterwarnings("error", "ignore::ResourceWarning"),
]  # fmt: skip
PARTS, DRAWN = range(50 if everything() else 1), 8  # matrices per type: len(PARTS) * DRAWN


class Scaled(NamedTuple):
    """A matrix A = 2^rows M 2^cols, exactly, and its parts."""

    A: np.ndarray
    M: np.ndarray
    rows: np.ndarray
    cols: np.ndarray


def powers_of(rng: np.random.Generator, n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Draw exponents for rows and columns with which elements near 1 stay, or nearly stay, in the range of the type."""
    kind = np.finfo(dtype)
    low, high = int(kind.minexp) + int(kind.nmant), int(kind.maxexp) - 8
    share = rng.choice([0.0, 0.5, 1.0])  # share of the range for rows; columns have the rest
    rows, cols = (
        rng.integers(low, high, n, endpoint=True) if rng.random() < 0.5 else rng.choice([low, high], n)
        for _ in range(2)
    )
    return np.trunc(share * rows).astype(int), np.trunc((1 - share) * cols).astype(int)


def drawn(rng: np.random.Generator, dtype: Any) -> Scaled:
    n = int(rng.integers(1, 9))
    M = rng_matrix(n, n, dtype, seed=int(rng.integers(1 << 30)))
    shape = rng.choice(["dense", "integers", "sparse", "band", "triangle", "near singular", "singular"])
    if shape == "integers":
        M = np.rint(2 * M).astype(dtype)
    elif shape == "sparse":
        M = M * (rng.random((n, n)) < 0.5)
    elif shape == "band":
        M = np.triu(np.tril(M, 1), -1)
    elif shape == "triangle":
        M = np.tril(M)[rng.permutation(n)][:, rng.permutation(n)]
    elif shape == "near singular":
        M[:, -1] = M[:, 0] + (M[:, -1] * 16 * np.finfo(dtype).eps).astype(dtype) if n > 1 else M[:, 0]
    elif shape == "singular":
        M[:, -1] = M[:, 0] if n > 1 else 0
    rows, cols = powers_of(rng, n, dtype)
    return Scaled(times(M, rows, cols), M, rows, cols)


def accurate_determinant(M: np.ndarray) -> np.clongdouble:
    """Return the determinant, by elimination in numbers of 64 bits with a far larger range of exponents."""
    x, result = M.astype(np.clongdouble), np.clongdouble(1)
    for k in range(len(x)):
        at = k + int(np.argmax(np.abs(x[k:, k])))
        if x[at, k] == 0:
            return np.clongdouble(0)
        x[[k, at]] = x[[at, k]]
        result *= x[k, k] * (1 if at == k else -1)
        x[k + 1 :, k:] -= np.outer(x[k + 1 :, k] / x[k, k], x[k, k:])
    return result


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_determinants_of_drawn_matrices(comm: Any, dtype: Any, part: int) -> None:
    """Determinants are accurate to the condition of the scaled matrix, or all ranks warn.

    At most one warning is needless, for an M with zeros.
    """
    rng, kind = np.random.default_rng([comm.size, part]), np.finfo(dtype)
    eps, needless = float(kind.eps), 0
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        for number in range(DRAWN):
            x = drawn(rng, dtype)
            n, A = len(x.A), DistMatrix.from_global(x.A, grid=grid, block=3)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                sign, logarithm = linalg.slogdet(A)
                det = linalg.det(A) if number % 4 == 0 else None
            assert len({*comm.allgather((str(sign), str(logarithm), len(warned)))}) == 1
            assert np.array_equal(A.allgather(), x.A)
            if warned:
                needless += bool(np.linalg.cond(x.M.astype("D")) * eps < 0.01)
                assert not needless or not x.M.all(), (number, x)
                continue
            scale, _ = EQUILIBRATED.exponent(comm, A, {}, {})
            kappa = float(np.linalg.cond(times(x.M, x.rows - scale.rows, x.cols - scale.cols).astype("D")))
            exact = accurate_determinant(x.M)
            if exact == 0:
                assert ((sign, logarithm) == (0, -np.inf) and not det) or kappa * eps > 0.01, (number, x)
                continue
            shift = int((x.rows + x.cols).sum())
            ratio = complex(sign) * np.exp(float(logarithm) - shift * np.log(2)) / complex(exact)
            limit = UNITS * n * eps * kappa
            assert abs(ratio - 1) <= limit + 4 * eps * abs(float(logarithm)), (number, x, ratio, kappa)
            if det is not None and kind.minexp < shift + np.log2(np.abs(exact)) < kind.maxexp - 2:
                near = times(np.array([det]), np.array([-(shift // 2)])), np.array([shift // 2 - shift])
                assert abs(complex(times(*near)[0]) / complex(exact) - 1) <= limit, (number, x, det, kappa)
    assert needless <= 1


def test_a_zero_pivot_of_products_that_underflow(comm: Any) -> None:
    """The determinant is -t^2 y, but t y is 0 in float32: a warning.  Without underflow the determinant 0 is exact."""
    t = y = 1e-30
    x = np.array([[1, 1, 0, 0], [1, 1, t, 0], [0, t, 0, 1], [0, 0, 1, y]], "f4")
    with ProcessGrid(comm) as grid:
        with pytest.raises(scipy.linalg.LinAlgWarning, match="may not be 0"):
            linalg.slogdet(DistMatrix.from_global(x, grid=grid, block=2))
        for singular in (np.ones((4, 4), "f4"), np.diag(np.array([1e-30, 0], "f4"))):
            assert linalg.slogdet(DistMatrix.from_global(singular, grid=grid, block=2)) == (0, -np.inf)


def well(kind: str, n: int, dtype: Any) -> np.ndarray:
    """Return a well-conditioned matrix with the structure `kind`, a value of `assume_a`."""
    general, definite = rng_matrix(n, n, dtype, seed=1), positive_definite(n, dtype)
    matrices: dict[str, np.ndarray] = {
        "gen": general, "sym": general + general.T, "her": general + general.conj().T, "pos": definite,
        "lower triangular": np.tril(definite), "upper triangular": np.triu(definite),
        "diagonal": np.diag(definite.diagonal()),
    }  # fmt: skip
    return matrices[kind]


@pytest.mark.parametrize("dtype", DTYPES)
def test_solutions_and_inverses(comm: Any, dtype: Any) -> None:
    """For 2^rows M 2^cols, results are as accurate as for M, without a warning, also for scaled right-hand sides."""
    rng, n, kind = np.random.default_rng(5), 12, np.finfo(dtype)
    end, refinable = int(kind.maxexp) * 3 // 8 - 4, np.dtype(dtype).char in "dD"
    with ProcessGrid(comm, grid_shapes(comm.size)[0]) as grid, warnings.catch_warnings():
        for how, transposed, refine in itertools.product(STRUCTURES, (False, True), (False, True)[: 1 + refinable]):
            if refine and how != "gen":
                continue
            # a diagonal matrix is not scaled, and warned of by its condition, as in SciPy
            warnings.simplefilter("ignore" if how == "diagonal" else "error")
            M = well(how, n, dtype)
            rows, cols, right = (rng.integers(-end, end, k) for k in (n, n, 3))
            cols = cols if how == "gen" or "triangular" in how else rows
            A = DistMatrix.from_global(times(M, rows, cols), grid=grid, block=3)
            wide, b = M.astype("D"), rng_matrix(n, 3, dtype, seed=2)
            kappa, inverse = float(np.linalg.cond(wide)), np.linalg.inv(wide)
            exact = np.linalg.solve(wide.T if transposed else wide, b.astype("D"))
            first, last = (cols, rows) if transposed else (rows, cols)
            B = times(b, first, right)
            told: Any = {"assume_a": how, "lower": True, "transposed": transposed, "refine": refine}
            X = linalg.solve(A, DistMatrix.from_global(B, grid=grid, block=2), **told)
            report: Any = X.report
            assert report.counted == report.predicted and (how == "diagonal" or report.rcond > 0.1 / (n * kappa))
            limit = UNITS * n * float(kind.eps) * kappa
            error = np.abs(times(X.allgather(), last, -right) - exact).max(axis=0)
            assert (error <= limit * np.abs(exact).max(axis=0)).all(), (how, told, error)
            x = linalg.solve(A, np.ascontiguousarray(B[:, 0]), **told)
            assert np.abs(times(x, last - right[0]) - exact[:, 0]).max() <= limit * np.abs(exact[:, 0]).max()
            Y = times(linalg.inv(A, assume_a=how, lower=True).allgather(), cols, rows)
            assert np.abs(Y - inverse).max() <= limit * np.abs(inverse).max(), how
            assert np.array_equal(A.allgather(), times(M, rows, cols))


def test_rows_that_mislead_pivoting(comm: Any) -> None:
    """Unscaled, the first row would be the pivot row and lose digits; the result is right, as by LAPACK's gesvx."""
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(np.array([[10, 1e20], [1, 1]]), grid=grid, block=1)
        assert np.allclose(linalg.solve(A, np.array([1e20, 2])), [1, 1], rtol=1e-15)


@pytest.mark.parametrize("how", ["gen", "pos"])
def test_condition_numbers(comm: Any, how: Any) -> None:
    """For matrices with scaled rows, or rows and columns, whose multipliers underflow in the matrix's type."""
    n = 6
    rows = np.where(np.arange(n) % 2, -90, 90) // (2 if how == "pos" else 1)
    cols = rows if how == "pos" else 0 * rows
    M = well(how, n, "float32")
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(times(M, rows, cols), grid=grid, block=2)
        exact = np.linalg.norm(times(M, rows, cols).astype(float), 2)
        exact *= np.linalg.norm(times(np.linalg.inv(M.astype(float)), -cols, -rows), 2)
        assert np.isclose(linalg.cond(A, assume_a=how), exact, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "most", "least"), [("d", 1e300, 1e-30), ("f", 1e30, 1e-10)])
def test_no_element_is_lost_by_scaling(comm: Any, dtype: str, most: float, least: float) -> None:
    """A triangle whose scaled diagonal would underflow; a right-hand side that would be zero in single precision."""
    with ProcessGrid(comm) as grid, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        A = DistMatrix.from_global(np.array([[1, most, least], [0, least, most], [0, 0, 1]], dtype), grid=grid)
        first = np.array([1, 0, 0], dtype)
        assert linalg.det(A) == pytest.approx(least, rel=1e-6)
        for how in ({}, {"assume_a": "upper triangular"}):
            assert np.array_equal(linalg.solve(A, first, **how), first)
        if dtype == "d":
            D = DistMatrix.from_global(np.diag([1e130, 1e-60]), grid=grid)
            assert np.allclose(linalg.solve(D, np.array([1e-80, 1.0]), refine=True), [1e-210, 1e60], rtol=1e-14, atol=0)
