"""Matrices at the ends of the range of numbers against the same problem near 1, and those scaled over all of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.linalg
from factored import positive_definite, rng_matrix
from problems import DTYPES, grid_shapes
from tiers import everything

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError
from pdgemm.linalg.factors.solve import STRUCTURES
from pdgemm.linalg.ranges import EQUILIBRATED

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(1, 2)]
N, M = 12, 30
# even exponents of 2, so that Cholesky factors have exponents, too: from subnormal numbers, 1e-320, to 1e308
EXPONENTS = {8: (-1064, -1040, -1022, -600, 600, 1000, 1020), 4: (-140, -130, -124, -60, 60, 110, 124)}
BOUND = 30  # in units of n eps, or n eps cond, as in LAPACK's tests


class Problem(NamedTuple):
    """Matrices and vectors: general, definite, tall and a right-hand side for the first two, and one for the tall."""

    A: Any
    S: Any
    T: Any
    B: Any
    C: Any
    b: np.ndarray


class Function(NamedTuple):
    """A function of a problem, and for each result the power of the scale by which it is multiplied."""

    call: Callable[[Any, Problem], Sequence[Any]]
    powers: tuple[float, ...]


FUNCTIONS: dict[str, Function] = {
    "lu": Function(lambda la, p: la.lu(p.A)[1:], (0, 1)),
    "lu_factor": Function(lambda la, p: (np.triu(la.lu_factor(p.A).LU.allgather()),), (1,)),
    "solve": Function(lambda la, p: (la.solve(p.A, p.B, overwrite_b=True), la.solve(p.A, p.b)), (0, 0)),
    "solve transposed": Function(lambda la, p: (la.solve(p.A, p.B, transposed=True, overwrite_a=True),), (0,)),
    "solve refined": Function(lambda la, p: (la.solve(p.A, p.B, refine=p.A.dtype in ("d", "D")),), (0,)),
    "solve pos": Function(lambda la, p: (la.solve(p.S, p.B, assume_a="pos"),), (0,)),
    "solve upper": Function(lambda la, p: (la.solve(p.S, p.B, assume_a="upper triangular"),), (0,)),
    "solve diagonal": Function(lambda la, p: (la.solve(p.S, p.B, assume_a="diagonal"),), (0,)),
    "solve_triangular": Function(
        lambda la, p: (la.solve_triangular(p.S, p.B), la.solve_triangular(p.S, p.b, lower=True, trans="C")), (0, 0)
    ),
    "inv": Function(lambda la, p: (la.inv(p.A), la.inv(p.S, assume_a="pos")), (-1, -1)),
    "inv_triangular": Function(lambda la, p: (la.inv_triangular(p.S, lower=True),), (-1,)),
    "cholesky": Function(lambda la, p: (la.cholesky(p.S), la.cho_factor(p.S)[0]), (0.5, 0.5)),
    "cho_solve": Function(
        lambda la, p: (la.cho_solve(la.cholesky(p.S), p.B), la.cho_solve(la.cho_factor(p.S), p.b)), (0, 0)
    ),
    "qr auto": Function(lambda la, p: la.qr(p.T), (0, 1)),
    "qr cholesky": Function(lambda la, p: la.qr(p.T, method="cholesky"), (0, 1)),
    "qr tsqr": Function(lambda la, p: la.qr(p.T, method="tsqr"), (0, 1)),
    "qr householder": Function(lambda la, p: la.qr(p.T, method="householder"), (0, 1)),
    "qr wide": Function(lambda la, p: la.qr(p.T.T), (0, 1)),
    "householder_qr": Function(lambda la, p: la.householder_qr(p.T), (0, 1)),
    "lstsq": Function(lambda la, p: [la.lstsq(p.T, p.C)[i] for i in (0, 1, 3)], (0, 2, 1)),
    "polar": Function(lambda la, p: la.polar(p.T), (0, 1)),
    "svd": Function(lambda la, p: [product(la.svd(p.T)), la.svd(p.T)[1], la.svdvals(p.T)], (0, 1, 1)),
    "svd of some": Function(lambda la, p: (la.svd(p.T, k=2)[1],), (1,)),
    "eigh": Function(lambda la, p: (la.eigh(p.S)[0],), (1,)),
    "eigh of the largest": Function(
        lambda la, p: (la.eigh(np.tril(p.A))[0], la.eigvalsh(np.triu(p.A), lower=False)), (1, 1)
    ),
    "eigh of two": Function(
        lambda la, p: [la.eigh(x, p.S, subset_by_value=(0.5, 9))[0] for x in (np.tril(p.A), p.S)], (0, 0)
    ),
    "sqrtm": Function(lambda la, p: (la.sqrtm(p.A), la.sqrtm(p.S, assume_a="pos")), (0.5, 0.5)),
    "matrix_sign": Function(lambda la, p: (la.matrix_sign(p.A), la.matrix_sign(p.A, assume_a="her")), (0, 0)),
    "newton_schulz": Function(lambda la, p: (la.newton_schulz(p.A, epsilon=0.0),), (0,)),
    "pinv": Function(lambda la, p: (la.pinv(p.A), la.pinv(p.T)), (-1, -1)),
    "ranks": Function(lambda la, p: (float(la.matrix_rank(p.A)), np.array(la.inertia(p.A), float)), (0, 0)),
    "norm": Function(lambda la, p: [la.norm(p.A, kind) for kind in (2, 1, np.inf, "fro")], (1, 1, 1, 1)),
    "cond": Function(lambda la, p: [*(la.cond(p.A, x) for x in (2, 1)), la.cond(p.S, assume_a="pos")], (0, 0, 0)),
}  # fmt: skip


def product(factors: Any) -> np.ndarray:
    """U V^H, which does not depend on the signs of singular vectors."""
    U, _, Vh = factors
    whole: np.ndarray = U.allgather() @ Vh.allgather()
    return whole


def times(x: Any, rows: Any, cols: Any = 0) -> Any:
    """2^(rows_i + cols_j) x_ij, rounded once."""
    x = np.asarray(x)
    powers = np.add.outer(rows, np.atleast_1d(cols)) if x.ndim == 2 else rows
    if x.dtype.kind != "c":
        return np.ldexp(x, powers).astype(x.dtype)
    result = np.empty_like(x)
    result.real, result.imag = np.ldexp(x.real, powers), np.ldexp(x.imag, powers)
    return result


def problem(grid: Any, dtype: Any, left: int, right: int, near_one: bool = False) -> Problem:
    """Matrices of about 2^left, and right-hand sides of about 2^right, in numbers of the type.

    near_one : all are multiplied by 2^-left and 2^-right after they were rounded.
    """
    general, definite = rng_matrix(N, N, dtype) + 4 * np.eye(N, dtype=dtype), positive_definite(N, dtype)
    lefts = general, definite, rng_matrix(M, N, dtype)
    rights = rng_matrix(N, 3, dtype, seed=1), rng_matrix(M, 3, dtype, seed=2)
    arrays = [(x, left) for x in lefts] + [(x, right) for x in rights]
    rounded = [times(times(x, e), -e if near_one else 0) for x, e in arrays]
    matrices = [DistMatrix.from_global(x, grid=grid, block=4) for x in rounded]
    A, S, T, B, C = matrices
    return Problem(A, S, T, B, C, np.ascontiguousarray(rounded[3][:, 0]))


def results(linalg: Any, function: Function, p: Problem) -> list[np.ndarray]:
    return [x.allgather() if hasattr(x, "allgather") else np.asarray(x) for x in function.call(linalg, p)]


def check(got: Any, near_one: Any, exponent: int, dtype: Any) -> None:
    """`got` is 2^exponent `near_one` up to BOUND n eps and to n distances of subnormal numbers; infinite if that is.

    dtype : of the matrices; norms have more digits.
    """
    kind = np.finfo(dtype)
    with np.errstate(all="ignore"):
        expected = times(near_one, exponent)
        spacing = float(np.ldexp(float(kind.smallest_subnormal), -exponent))
    finite = np.isfinite(expected)
    assert not np.isfinite(np.asarray(got)[~finite]).any()
    x, y = (times(np.where(finite, z, 0), -4) for z in (got, expected))  # of which no |z| overflows
    error, size = np.abs(times(x - y, -exponent)).max(), float(np.abs(times(near_one, -4)).max())
    assert error <= N * (BOUND * float(kind.eps) * size + spacing), (error, size, exponent)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_table(comm: Any, name: str) -> None:
    """Each function x each scale x each type, without a warning; the arguments are as before.

    On several ranks a function is tested with one of the types, and with two of the scales.
    """
    function, turn, all_of_it = FUNCTIONS[name], list(FUNCTIONS).index(name), comm.size == 1 or everything()
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in DTYPES if all_of_it else DTYPES[turn % 4 :][:1]:
            exponents = EXPONENTS[np.finfo(dtype).dtype.itemsize]
            for exponent in exponents if everything() else exponents[:: 2 if all_of_it else 6]:
                at_the_end, near_one = (problem(grid, dtype, exponent, exponent, one) for one in (False, True))
                before = at_the_end.T.allgather()
                got, expected = (results(linalg, function, p) for p in (at_the_end, near_one))
                for x, y, power in zip(got, expected, function.powers, strict=True):
                    check(x, y, int(power * exponent), dtype)
                assert np.array_equal(at_the_end.T.allgather(), before)


@pytest.mark.parametrize("name", ["solve", "solve pos", "solve upper", "solve_triangular", "cho_solve", "lstsq"])
def test_right_sides_alone(comm: Any, name: str) -> None:
    """Matrices near 1 with right-hand sides at the ends of the range."""
    function, powers = FUNCTIONS[name], (1, 2, 0) if name == "lstsq" else (1, 1)
    with ProcessGrid(comm, grid_shapes(comm.size)[0]) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        for exponent in EXPONENTS[8] if everything() else EXPONENTS[8][::6]:
            got, expected = (
                results(linalg, function, problem(grid, "float64", 0, exponent, one)) for one in (False, True)
            )
            for x, y, power in zip(got, expected, powers):
                check(x, y, power * exponent, "float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_at_the_ends(comm: Any, dtype: Any) -> None:
    """`lu_solve` with factors below the smallest normal number, as they are stored, and as SciPy's pair."""
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        exponents = EXPONENTS[np.finfo(dtype).dtype.itemsize]
        for exponent in exponents if everything() else exponents[::6]:
            p, near_one = (problem(grid, dtype, exponent, exponent, one) for one in (False, True))
            factors = linalg.lu_factor(p.A)
            whole = factors.LU.allgather()
            known = DistMatrix.from_global(np.tril(whole, -1) + times(np.triu(whole), -exponent), grid=grid, block=4)
            for trans in ("N", "T", "C"):
                expected = linalg.lu_solve((known, factors.pivots), near_one.B, trans=trans).allgather()
                for some in (factors, (factors.LU, factors.pivots)):
                    check(linalg.lu_solve(some, p.B, trans=trans).allgather(), expected, 0, dtype)
            assert np.array_equal(factors.LU.allgather(), whole)


def test_plans_and_what_is_not_finite(comm: Any) -> None:
    """Words are as planned at the ends of the range, too; zeros, NaN and infinity stay what they are."""
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        p = problem(grid, "float64", -1040, -1040)
        for function, *arguments in (
            (linalg.cholesky, p.S),
            (linalg.solve_triangular, p.S, p.B),
            (linalg.householder_qr, p.T),
            (linalg.solve, p.S, p.B, "pos"),
        ):
            how: dict[str, Any] = {"assume_a": arguments.pop()} if isinstance(arguments[-1], str) else {}
            made: Any = function(*arguments, **how)
            report: Any = (made if isinstance(made, DistMatrix) else made[0]).report
            assert report.counted == report.predicted
            assert linalg.plan(function, *arguments, **how).traffic(comm.rank) == report.counted
        for wrong in (np.nan, np.inf):
            A = p.A.copy()
            A[N - 1, N - 1] = wrong
            assert not np.isfinite(linalg.lu_factor(A).LU.allgather()[-1, -1])
        zero = p.A * 0
        assert linalg.lu_factor(zero).zero_pivot == 1 and not linalg.qr(zero)[1].allgather().any()
        assert linalg.lu_factor(zero[:0, :]).zero_pivot == 0
        few = np.array([[3.0, 1], [1, 0]]) * np.finfo(float).smallest_subnormal
        assert linalg.lu_factor(DistMatrix.from_global(few, grid=grid)).zero_pivot == 2  # -1/3 is not a number there


def test_what_overflows_is_infinite(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A = DistMatrix.eye(5, grid=grid) * 2.0**-1060
        assert np.array_equal(np.diag(linalg.inv(A).allgather()), np.full(5, np.inf))
        for solved in (linalg.solve(A, np.ones(5)), linalg.cho_solve(A, np.ones(5))):
            assert np.array_equal(solved, np.full(5, np.inf))
        x, residuals, rank, s = linalg.lstsq(A[:, :2], np.full(5, 1e300))
        assert np.isinf(x).all() and np.isinf(residuals).all() and rank == 2 and np.array_equal(s, [2.0**-1060] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_determinants(comm: Any, dtype: Any) -> None:
    """Determinants whose partial products overflow and underflow, and of singular matrices."""
    large = 2.0 ** (600 if np.finfo(dtype).eps < 1e-10 else 80)
    phase = 1j if np.dtype(dtype).kind == "c" else 1
    with ProcessGrid(comm) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")

        def both(*diagonal: Any) -> Any:
            A = DistMatrix.from_global(np.diag(np.array(diagonal, dtype)), grid=grid, block=2)
            sign, logarithm = linalg.slogdet(A)
            assert sign.dtype == dtype and logarithm.dtype == np.finfo(dtype).dtype
            det = linalg.det(A)
            assert det.dtype == dtype and len({*comm.allgather(str((det, sign, logarithm)))}) == 1
            return det, sign, logarithm

        assert both(large, large, 1 / large, 1 / large) == (1, 1, 0)
        assert both(1 / large, 1 / large, large, large, -3)[:2] == (-3, -1)
        for diagonal, limit, phase_of, power in (
            ((large * phase, large), np.inf, phase, 2), ((-1 / large, phase / large), 0, -phase, -2),
        ):  # fmt: skip
            det, sign, logarithm = both(*diagonal)
            assert abs(det) == limit and sign == phase_of and np.isclose(logarithm, power * np.log(large))
        for singular in ((large, large, 0), (0, large, large), (1 / large, 0), (0, 0)):
            assert both(*singular) == (0, 0, -np.inf)
        least, most = float(np.finfo(dtype).smallest_subnormal), float(np.finfo(dtype).max)
        assert both(least)[0] == least and both(most)[0] == np.dtype(dtype).type(most)
        assert both(least, most)[0] == np.dtype(dtype).type(least * most)
        assert np.isnan(both(np.nan, 1)[0]) and linalg.det(DistMatrix.zeros((0, 0), grid=grid, dtype=dtype)) == 1
        assert linalg.det(DistMatrix.from_global(np.ones((6, 6), dtype), grid=grid, block=2)) == 0
        x = rng_matrix(40, 40, dtype)
        A, eps = DistMatrix.from_global(x, grid=grid, block=8), float(np.finfo(dtype).eps)
        wide = x.astype(np.result_type(dtype, float))
        assert abs(linalg.det(A) - np.linalg.det(wide)) <= BOUND * 40 * eps * abs(np.linalg.det(wide))
        sign, logarithm = linalg.slogdet(A * np.asarray(large, np.finfo(dtype).dtype))
        expected = np.linalg.slogdet(wide)
        assert abs(sign - expected.sign) <= 100 * 40 * eps
        assert np.isclose(logarithm, expected.logabsdet + 40 * np.log(large), rtol=100 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_largest_size(comm: Any, dtype: str) -> None:
    """Real and imaginary parts just below the largest number: norms overflow, and so do moduli."""
    exponent = int(np.finfo(dtype).maxexp) - 2
    x = rng_matrix(N, N, dtype) + 4 * np.eye(N, dtype=dtype)
    largest = float(np.abs(x.view(x.real.dtype)).max())
    x = (x / x.real.dtype.type(largest) * x.real.dtype.type(3.99)).astype(dtype)
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        A, near_one = (DistMatrix.from_global(times(x, e), grid=grid, block=4) for e in (exponent, 0))
        assert np.isfinite(A.allgather()).all()
        for name in ("eigh of the largest", "matrix_sign", "newton_schulz", "polar", "svd", "pinv", "ranks"):
            function = FUNCTIONS[name]
            got, expected = (results(linalg, function, Problem(y, y, y, y, y, np.ones(0))) for y in (A, near_one))
            for one, other, power in zip(got, expected, function.powers, strict=True):
                check(one, other, int(power * exponent), dtype)
        check(linalg.sqrtm(A).allgather(), linalg.sqrtm(near_one).allgather(), exponent // 2, dtype)
        assert linalg.norm(A, 2) > float(np.finfo(dtype).max)
        if dtype == "complex64":  # of 130 squarings, not of 1030
            assert not linalg.expm(A * -np.eye(N, dtype=dtype)).allgather().any()
        A[N - 1, 0] = np.nan
        for refuse in (linalg.eigh, linalg.sqrtm, linalg.matrix_sign, linalg.polar, linalg.newton_schulz, linalg.svd,
                       linalg.svdvals, linalg.pinv, linalg.matrix_rank, linalg.expm):  # fmt: skip
            with pytest.raises(LinAlgError, match=r"\(12 x 12 on a . x . grid\) contains NaN or infinity"):
                refuse(A)


PARTS, DRAWN = range(50 if everything() else 1), 8  # of each type: so many times so many matrices, with --all 2,000


class Scaled(NamedTuple):
    """A = 2^rows M 2^cols, exactly."""

    A: np.ndarray
    M: np.ndarray
    rows: np.ndarray
    cols: np.ndarray


def powers_of(rng: np.random.Generator, n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Powers of rows and columns for which elements near 1 stay in range, and reach to near both ends."""
    kind = np.finfo(dtype)
    low, high = int(kind.minexp) + int(kind.nmant), int(kind.maxexp) - 8
    share = rng.choice([0.0, 0.5, 1.0])  # of the range, for rows; columns have the other part
    rows = rng.integers(low, high, n, endpoint=True) if rng.random() < 0.5 else rng.choice([low, high], n)
    cols = rng.integers(low, high, n, endpoint=True) if rng.random() < 0.5 else rng.choice([low, high], n)
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
    """By elimination, in numbers of 64 bits, whose range is far larger."""
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
    """Right to the condition of the scaled matrix, or all ranks warn: where M has digits to spare and zeros, once."""
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
            limit = BOUND * n * eps * kappa
            assert abs(ratio - 1) <= limit + 4 * eps * abs(float(logarithm)), (number, x, ratio, kappa)
            if det is not None and kind.minexp < shift + np.log2(np.abs(exact)) < kind.maxexp - 2:
                near = times(np.array([det]), np.array([-(shift // 2)])), np.array([shift // 2 - shift])
                assert abs(complex(times(*near)[0]) / complex(exact) - 1) <= limit, (number, x, det, kappa)
    assert needless <= 1


def test_a_zero_pivot_of_products_that_underflow(comm: Any) -> None:
    """The determinant is -t^2 y, but t y is 0 in float32; where nothing underflows, a zero is a zero."""
    t = y = 1e-30
    x = np.array([[1, 1, 0, 0], [1, 1, t, 0], [0, t, 0, 1], [0, 0, 1, y]], "f4")
    with ProcessGrid(comm) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(scipy.linalg.LinAlgWarning, match="may not be 0"):
            linalg.slogdet(DistMatrix.from_global(x, grid=grid, block=2))
        for singular in (np.ones((4, 4), "f4"), np.diag(np.array([1e-30, 0], "f4"))):
            assert linalg.slogdet(DistMatrix.from_global(singular, grid=grid, block=2)) == (0, -np.inf)


def well(kind: str, n: int, dtype: Any) -> np.ndarray:
    """A well-conditioned matrix of a structure."""
    general, definite = rng_matrix(n, n, dtype, seed=1), positive_definite(n, dtype)
    matrices: dict[str, np.ndarray] = {
        "gen": general, "sym": general + general.T, "her": general + general.conj().T, "pos": definite,
        "lower triangular": np.tril(definite), "upper triangular": np.triu(definite),
        "diagonal": np.diag(definite.diagonal()),
    }  # fmt: skip
    return matrices[kind]


@pytest.mark.parametrize("dtype", DTYPES)
def test_solutions_and_inverses(comm: Any, dtype: Any) -> None:
    """Of 2^rows M 2^cols: as accurate as of M, without a warning; columns of right-hand sides lie far apart, too."""
    rng, n, kind = np.random.default_rng(5), 12, np.finfo(dtype)
    end, refinable = int(kind.maxexp) * 3 // 8 - 4, np.dtype(dtype).char in "dD"
    with ProcessGrid(comm, grid_shapes(comm.size)[0]) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        for how, transposed, refine in itertools.product(STRUCTURES, (False, True), (False, True)[: 1 + refinable]):
            if refine and how != "gen":
                continue
            warnings.simplefilter(
                "ignore" if how == "diagonal" else "error"
            )  # whose condition is that of A, as SciPy's
            M = well(how, n, dtype)
            rows, cols, right = (rng.integers(-end, end, k) for k in (n, n, 3))
            cols = cols if how == "gen" or "triangular" in how else rows
            A = DistMatrix.from_global(times(M, rows, cols), grid=grid, block=3)
            wide, kappa = M.astype("D"), float(np.linalg.cond(M.astype("D")))
            b = rng_matrix(n, 3, dtype, seed=2)
            exact = np.linalg.solve(wide.T if transposed else wide, b.astype("D"))
            first, last = (cols, rows) if transposed else (rows, cols)
            B = times(b, first, right)
            told: Any = {"assume_a": how, "lower": True, "transposed": transposed, "refine": refine}
            X = linalg.solve(A, DistMatrix.from_global(B, grid=grid, block=2), **told)
            report: Any = X.report
            assert report.counted == report.predicted and (how == "diagonal" or report.rcond > 0.1 / (n * kappa))
            limit = BOUND * n * float(kind.eps) * kappa
            error = np.abs(times(X.allgather(), last, -right) - exact).max(axis=0)
            assert (error <= limit * np.abs(exact).max(axis=0)).all(), (how, told, error)
            x = linalg.solve(A, np.ascontiguousarray(B[:, 0]), **told)
            assert np.abs(times(x, last - right[0]) - exact[:, 0]).max() <= limit * np.abs(exact[:, 0]).max()
            inverse = times(linalg.inv(A, assume_a=how, lower=True).allgather(), cols, rows)
            assert np.abs(inverse - np.linalg.inv(wide)).max() <= limit * np.abs(np.linalg.inv(wide)).max(), how
            assert np.array_equal(A.allgather(), times(M, rows, cols))


def test_rows_of_which_pivoting_is_misled(comm: Any) -> None:
    """One large element makes the first row the pivot row, whose other elements are then lost: as LAPACK's gesvx."""
    x, b = np.array([[10, 1e20], [1, 1]]), np.array([1e20, 2])
    with ProcessGrid(comm) as grid:
        assert np.allclose(linalg.solve(DistMatrix.from_global(x, grid=grid, block=1), b), [1, 1], rtol=1e-15)


@pytest.mark.parametrize("how", ["gen", "pos"])
def test_condition_numbers(comm: Any, how: Any) -> None:
    """Of rows, or of rows and columns, of which multipliers underflow in the type of the matrix."""
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
    """Of a triangle whose diagonal would underflow, and of a right side that is zero in single precision."""
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
