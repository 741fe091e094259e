"""Matrices near the ends of the type's range: results equal those near 1, scaled; determinants out of the range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from factored import positive_definite, rng_matrix
from powers_of_two import UNITS, times
from problems import DTYPES, grid_shapes
from tiers import everything

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError

pytestmark = [
    pytest.mark.mpi, pytest.mark.on_ranks(1, 2), pytest.mark.filterwarnings("error", "ignore::ResourceWarning"),
]  # fmt: skip
N, M = 12, 30
# even exponents of 2 (Cholesky factors: half), from subnormal numbers, 1e-320, to 1e308
EXPONENTS = {8: (-1064, -1040, -1022, -600, 600, 1000, 1020), 4: (-140, -130, -124, -60, 60, 110, 124)}


class Problem(NamedTuple):
    """Matrices: general A, definite S, tall T; right-hand sides: B and its first column b for A and S, C for T."""

    A: Any
    S: Any
    T: Any
    B: Any
    C: Any
    b: np.ndarray


class Function(NamedTuple):
    """A function of a problem, and for each result its power p: a problem times s has the result times s^p."""

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
    "ranks": Function(lambda la, p: (float(la.matrix_rank(p.A)), np.array(la.inertia(np.tril(p.A)), float)), (0, 0)),
    "norm": Function(lambda la, p: [la.norm(p.A, kind) for kind in (2, 1, np.inf, "fro")], (1, 1, 1, 1)),
    "cond": Function(lambda la, p: [*(la.cond(p.A, x) for x in (2, 1)), la.cond(p.S, assume_a="pos")], (0, 0, 0)),
}  # fmt: skip


def product(factors: Any) -> np.ndarray:
    """Return U V^H, which does not depend on the signs of singular vectors."""
    U, _, Vh = factors
    whole: np.ndarray = U.allgather() @ Vh.allgather()
    return whole


def problem(grid: Any, dtype: Any, left: int, right: int, near_one: bool = False) -> Problem:
    """Return matrices of about 2^left, and right-hand sides of about 2^right, rounded to the type.

    near_one : after the rounding, multiply by 2^-left and 2^-right.
    """
    general, definite = rng_matrix(N, N, dtype) + 4 * np.eye(N, dtype=dtype), positive_definite(N, dtype)
    lefts = general, definite, rng_matrix(M, N, dtype)
    rights = rng_matrix(N, 3, dtype, seed=1), rng_matrix(M, 3, dtype, seed=2)
    arrays = [(x, left) for x in lefts] + [(x, right) for x in rights]
    rounded = [times(times(x, e), -e if near_one else 0) for x, e in arrays]
    A, S, T, B, C = (DistMatrix.from_global(x, grid=grid, block=4) for x in rounded)
    return Problem(A, S, T, B, C, np.ascontiguousarray(rounded[3][:, 0]))


def exponents_of(dtype: Any, every: int) -> Sequence[int]:
    """Return the EXPONENTS of the type: all with --all, otherwise one of `every`."""
    return EXPONENTS[np.finfo(dtype).dtype.itemsize][:: 1 if everything() else every]


def results(function: Function, p: Problem) -> list[np.ndarray]:
    return [x.allgather() if hasattr(x, "allgather") else np.asarray(x) for x in function.call(linalg, p)]


def check(got: Any, near_one: Any, exponent: int, dtype: Any) -> None:
    """Check `got` = 2^exponent `near_one` up to UNITS n eps and n spacings of subnormal numbers, or both are infinite.

    dtype : the type of the matrices; norms may be of a wider type.
    """
    kind = np.finfo(dtype)
    with np.errstate(all="ignore"):
        expected = times(near_one, exponent)
        spacing = float(np.ldexp(float(kind.smallest_subnormal), -exponent))
    finite = np.isfinite(expected)
    assert not np.isfinite(np.asarray(got)[~finite]).any()
    x, y = (times(np.where(finite, z, 0), -4) for z in (got, expected))  # |z| does not overflow
    error, size = np.abs(times(x - y, -exponent)).max(), float(np.abs(times(near_one, -4)).max())
    assert error <= N * (UNITS * float(kind.eps) * size + spacing), (error, size, exponent)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_table(comm: Any, name: str) -> None:
    """Each of FUNCTIONS with each scale and type, without a warning; the arguments are unchanged.

    On several ranks a function is tested with one type and two scales.
    """
    function, turn, all_of_it = FUNCTIONS[name], list(FUNCTIONS).index(name), comm.size == 1 or everything()
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        for dtype in DTYPES if all_of_it else DTYPES[turn % 4 :][:1]:
            for exponent in exponents_of(dtype, 2 if all_of_it else 6):
                at_the_end, near_one = (problem(grid, dtype, exponent, exponent, one) for one in (False, True))
                before = at_the_end.T.allgather()
                got, expected = (results(function, p) for p in (at_the_end, near_one))
                for x, y, power in zip(got, expected, function.powers, strict=True):
                    check(x, y, int(power * exponent), dtype)
                assert np.array_equal(at_the_end.T.allgather(), before)


@pytest.mark.parametrize("name", ["solve", "solve pos", "solve upper", "solve_triangular", "cho_solve", "lstsq"])
def test_extreme_right_sides(comm: Any, name: str) -> None:
    """Matrices near 1 with right-hand sides near the ends of the range."""
    function, powers = FUNCTIONS[name], (1, 2, 0) if name == "lstsq" else (1, 1)
    with ProcessGrid(comm, grid_shapes(comm.size)[0]) as grid:
        for exponent in exponents_of("float64", 6):
            problems = (problem(grid, "float64", 0, exponent, near_one) for near_one in (False, True))
            for x, y, power in zip(*(results(function, p) for p in problems), powers):
                check(x, y, power * exponent, "float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_at_the_ends(comm: Any, dtype: Any) -> None:
    """`lu_solve` with subnormal or huge factors, as an LU and as SciPy's pair."""
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        for exponent in exponents_of(dtype, 6):
            p, near_one = (problem(grid, dtype, exponent, exponent, one) for one in (False, True))
            factors = linalg.lu_factor(p.A)
            whole = factors.LU.allgather()
            known = DistMatrix.from_global(np.tril(whole, -1) + times(np.triu(whole), -exponent), grid=grid, block=4)
            for trans in ("N", "T", "C"):
                expected = linalg.lu_solve((known, factors.pivots), near_one.B, trans=trans).allgather()
                for some in (factors, (factors.LU, factors.pivots)):
                    check(linalg.lu_solve(some, p.B, trans=trans).allgather(), expected, 0, dtype)
            assert np.array_equal(factors.LU.allgather(), whole)


def test_plans_nan_and_infinity(comm: Any) -> None:
    """Near the ends of the range, words are as planned; zeros, NaN and infinity are preserved."""
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        p = problem(grid, "float64", -1040, -1040)
        cases: Any = (
            (linalg.cholesky, (p.S,), {}), (linalg.solve_triangular, (p.S, p.B), {}),
            (linalg.householder_qr, (p.T,), {}), (linalg.solve, (p.S, p.B), {"assume_a": "pos"}),
        )  # fmt: skip
        for function, arguments, how in cases:
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
        # -1/3 of the smallest number is 0
        assert linalg.lu_factor(DistMatrix.from_global(few, grid=grid)).zero_pivot == 2


def test_overflow_is_infinite(comm: Any) -> None:
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
    with ProcessGrid(comm) as grid:

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
        assert abs(linalg.det(A) - np.linalg.det(wide)) <= UNITS * 40 * eps * abs(np.linalg.det(wide))
        sign, logarithm = linalg.slogdet(A * np.asarray(large, np.finfo(dtype).dtype))
        expected = np.linalg.slogdet(wide)
        assert abs(sign - expected.sign) <= 100 * 40 * eps
        assert np.isclose(logarithm, expected.logabsdet + 40 * np.log(large), rtol=100 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_largest_size(comm: Any, dtype: str) -> None:
    """Real and imaginary parts just below the largest number: norms and moduli overflow."""
    exponent = int(np.finfo(dtype).maxexp) - 2
    x = rng_matrix(N, N, dtype) + 4 * np.eye(N, dtype=dtype)
    largest = float(np.abs(x.view(x.real.dtype)).max())
    x = (x / x.real.dtype.type(largest) * x.real.dtype.type(3.99)).astype(dtype)
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        A, near_one = (DistMatrix.from_global(times(x, e), grid=grid, block=4) for e in (exponent, 0))
        assert np.isfinite(A.allgather()).all()
        for name in ("eigh of the largest", "matrix_sign", "newton_schulz", "polar", "svd", "pinv", "ranks"):
            function = FUNCTIONS[name]
            got, expected = (results(function, Problem(y, y, y, y, y, np.ones(0))) for y in (A, near_one))
            for one, other, power in zip(got, expected, function.powers, strict=True):
                check(one, other, int(power * exponent), dtype)
        check(linalg.sqrtm(A).allgather(), linalg.sqrtm(near_one).allgather(), exponent // 2, dtype)
        assert linalg.norm(A, 2) > float(np.finfo(dtype).max)
        if dtype == "complex64":  # 130 squarings; double precision needs 1030
            assert not linalg.expm(A * -np.eye(N, dtype=dtype)).allgather().any()
        A[N - 1, 0] = np.nan
        for refuse in (linalg.eigh, linalg.sqrtm, linalg.matrix_sign, linalg.polar, linalg.newton_schulz, linalg.svd,
                       linalg.svdvals, linalg.pinv, linalg.matrix_rank, linalg.expm):  # fmt: skip
            with pytest.raises(LinAlgError, match=r"\(12 x 12 on a . x . grid\) contains NaN or infinity"):
                refuse(A)
