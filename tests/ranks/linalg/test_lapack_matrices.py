"""The matrices of LAPACK's test programs: all ratios below LAPACK's thresholds, on every grid.

Without --all each type has one order and element type on a number of ranks, and on several ranks there are fewer types.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import kahan
from lapack_matrices import (
    DEFINITE,
    EIGEN,
    GENERAL,
    LEAST_SQUARES,
    LINEAR,
    RECTANGULAR,
    SYMMETRIC,
    exponent,
    glued_wilkinson,
    linear,
    norm,
    of_pairs,
    of_solution,
    of_triplets,
    of_values,
    orthogonality,
    ratio,
    rectangular,
    symmetric,
    times,
    to_one,
    uniform,
)
from problems import DTYPES, grid_shapes
from tiers import every_grid, everything, thorough

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError

pytestmark = [pytest.mark.mpi, every_grid]
ORDERS = (3, 20, 10, 1, 5, 2, 50, 0)
Ratios = Iterator[tuple[str, float]]  # what is compared, and the ratio


Cases = Iterator[tuple[int, int, str]]  # the number of a type, from 0, an order, and an element type


@pytest.fixture
def shared_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small limits, so that all ranks share the work on small matrices, in several panels, bands and leaves."""
    small = {"eigen.division.SMALL": 2, "eigen.tridiagonal_form.BAND": 4, "eigen.tridiagonal.LEAF": 5}
    small |= {"eigen.tridiagonal_form.REST": 4, "eigen.eigh.LARGE_FOR_VALUES": 12, "singular.svd.ON_ONE_RANK": 2}
    small |= {"singular.singular_values.SMALL": 2, "factors.householder.REST": 8, "factors.householder.BLOCK": 4}
    for name, value in small.items():
        monkeypatch.setattr(f"pdgemm.linalg.{name}", value)


def small_cases(comm: Any, types: int) -> Cases:
    """Yield every type with every order (with --all), with one order (on one rank), or every fourth type."""
    if everything():
        for at, order in itertools.product(range(types), range(len(ORDERS))):
            yield at, ORDERS[order], DTYPES[(at + order) % 4]
        return
    turns = range(types) if comm.size == 1 else range((comm.size + comm.size // 6) % 4, types, 4)
    for turn in turns:
        yield turn, ORDERS[(3 * turn + comm.size) % len(ORDERS)], DTYPES[(turn + comm.size) % 4]


def large_cases(comm: Any, types: int) -> Cases:
    """Yield every type with an order above all limits of LAPACK on one rank."""
    yield from ((at, 513 + at, DTYPES[at % 4]) for at in range(types))


def eigenvalues(a: np.ndarray, A: DistMatrix, turn: int) -> Ratios:
    """Yield the ratios of dsyt21 and dsyt22, and differences of values: with and without vectors, all and some."""
    n, (w, V) = len(a), linalg.eigh(A)
    values = linalg.eigvalsh(A)
    assert (np.diff(w) >= 0).all() and (np.diff(values) >= 0).all()
    yield from (("pairs", x) for x in of_pairs(a, w, V.allgather()))
    yield "values", of_values(w, values)
    yield "LAPACK's values", of_values(w, scipy.linalg.eigvalsh(a)) / max(1, n)
    if n > 2:
        lo, hi = n // 3, 2 * n // 3
        some: Any = {"subset_by_index": (lo, hi)}
        if turn % 2 and w[lo - 1] < w[lo] <= w[hi] < w[hi + 1 : hi + 2].max(initial=np.inf):
            some = {"subset_by_value": (float(w[lo - 1]), float(w[hi]))}
        part, V = linalg.eigh(A, **some)
        yield from (("subset", x) for x in of_pairs(a, part, V.allgather()))
        if "subset_by_index" in some:
            yield "values of a subset", of_values(w, np.r_[w[:lo], part, w[hi + 1 :]])


def singular_values(a: np.ndarray, A: DistMatrix, turn: int) -> Ratios:
    """Yield the ratios of dbdt01 and dort01, and differences of values with and without vectors."""
    U, s, Vh = linalg.svd(A, full_matrices=bool(turn % 2))
    values, k = linalg.svdvals(A), len(s)
    for x in (s, values):
        assert (np.diff(x) <= 0).all() and (x >= 0).all()
    u, vh = U.allgather(), Vh.allgather()
    yield from (("triplets", x) for x in of_triplets(a, u[:, :k], s, vh[:k]))
    yield from (("all vectors", orthogonality(x)) for x in (u, vh))
    yield "values", of_values(s, values)
    yield "LAPACK's values", of_values(s, scipy.linalg.svdvals(a) if a.size else s) / max(1, *a.shape)


def solutions(a: np.ndarray, call: Callable[[DistMatrix], Any], A: DistMatrix) -> Ratios:
    """Yield the ratios of dget02 and dget04 for a function that returns X, where A X = B."""
    (x,) = to_one(a)
    exact = uniform(len(a), 3, a.dtype, np.random.default_rng(len(a)))
    b = (times(a, 0) @ exact).astype(a.dtype)
    X = call(DistMatrix.from_global(b, grid=A.grid, block=3)).allgather()
    yield from (("solution", y) for y in of_solution(a, X, b, exact, np.linalg.cond(x, 1) if x.size else 1))


def inverse(a: np.ndarray, X: DistMatrix) -> Ratios:
    """Yield the ratio of dget03."""
    (x,), y = to_one(a), times(X.allgather(), exponent(a))
    yield "inverse", ratio(np.eye(len(a)) - y @ x, norm(x) * norm(y), len(a), a.dtype)


def general(a: np.ndarray, A: DistMatrix, zero: int) -> Ratios:
    """Yield the ratios of dget01 to dget04; the first zero pivot, if there is one, is that of the first zero column."""
    n, (x,), factors = len(a), to_one(a), linalg.lu_factor(A)
    lu, below = factors.LU.allgather(), np.tri(len(a), k=-1, dtype=bool)
    product = (np.where(below, lu, 0) + np.eye(n)) @ times(np.where(below, 0, lu), -exponent(a))
    yield "L U", ratio(product - x[factors.perm], norm(x), n, a.dtype)
    assert factors.zero_pivot == zero
    if zero:
        for call in (partial(linalg.solve, A, A), partial(linalg.inv, A)):
            with pytest.raises(LinAlgError, match=f"is singular: pivot {zero} of"):
                call()
        return
    yield from solutions(a, partial(linalg.solve, A), A)
    yield from solutions(a.T, partial(linalg.solve, A, transposed=True), A)
    yield from inverse(a, linalg.inv(A))


def definite(a: np.ndarray, A: DistMatrix, zero: int) -> Ratios:
    """Yield the ratios of dpot01 to dpot03; a matrix with a zero row has a minor that is not positive."""
    if zero:
        with pytest.raises(LinAlgError, match=f"its leading minor of order {zero} is not"):
            linalg.cholesky(A)
        return
    half = exponent(a) // 2
    for lower in (True, False):
        L, x = times(linalg.cholesky(A, lower=lower).allgather(), -half), times(a, -2 * half)
        yield "L L^H", ratio((L @ L.conj().T if lower else L.conj().T @ L) - x, norm(x), len(a), a.dtype)
    yield from solutions(a, partial(linalg.solve, A, assume_a="pos"), A)
    yield from inverse(a, linalg.inv(A, assume_a="pos"))


def orthogonal(a: np.ndarray, A: DistMatrix, solves: bool) -> Ratios:
    """Yield the ratios of dqrt01 and dqpt01 with every method, and of dqrt17 for least squares."""
    (m, n), (x,) = a.shape, to_one(a)
    in_order = np.arange(n)
    for Q, R, p in (
        (*linalg.qr(A), in_order), (*linalg.householder_qr(A), in_order), linalg.qr(A, pivoting=True),
        *([(*linalg.qr(A, method="tsqr"), in_order)] if m >= n else []),
    ):  # fmt: skip
        assert Q is not None
        q, r = Q.allgather(), times(R.allgather(), -exponent(a))
        yield from (("Q R", y) for y in (ratio(q @ r - x[:, p], norm(x), max(m, n), a.dtype), orthogonality(q)))
    b = uniform(m, 2, a.dtype, np.random.default_rng(m)).astype(a.dtype)
    b *= np.abs(a).max(initial=0)
    for driver in ("gelsd", "gelsy") if solves else ():
        X = linalg.lstsq(A, DistMatrix.from_global(b, grid=A.grid), lapack_driver=driver)[0]  # type: ignore[arg-type]
        (_, B), y = to_one(a, b), times(X.allgather(), 0)
        size = norm(x) * (norm(B) + norm(x) * norm(y))
        yield "least squares", ratio(x.conj().T @ (B - x @ y), size, max(m, n), a.dtype)


def check(comm: Any, turn: int, a: np.ndarray, most: float, ratios: Callable[[np.ndarray, DistMatrix], Ratios]) -> None:
    """Assert that all ratios of a matrix, in a layout and on a grid in turn, are below the threshold."""
    shapes = grid_shapes(comm.size)
    with ProcessGrid(comm, shapes[turn % len(shapes)]) as grid, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of matrices that are singular up to rounding
        A = DistMatrix.from_global(a, grid=grid, block=((3, 4), None, 5)[turn % 3], order="CF"[turn % 2])
        for what, value in ratios(a, A):
            assert value < most, (what, turn, a.shape, a.dtype)


def symmetric_matrices(comm: Any, cases: Callable[[Any, int], Cases]) -> None:
    """The 21 types of dchkst, and glued matrices of Wilkinson, in one stage or two."""
    for at, n, dtype in cases(comm, len(SYMMETRIC) + 1):
        a = symmetric(at + 1, n, dtype) if at < len(SYMMETRIC) else glued_wilkinson(n or 63, dtype)
        with pytest.MonkeyPatch.context() as limits:
            for name in ("LARGE", "LARGE_FOR_PART"):
                limits.setattr(f"pdgemm.linalg.eigen.eigh.{name}", n + (at + n) % 2)
            check(comm, at, a, EIGEN, partial(eigenvalues, turn=at))


def rectangular_matrices(comm: Any, cases: Callable[[Any, int], Cases]) -> None:
    """The 16 types of dchkbd, and Kahan's matrix."""
    for at, n, dtype in cases(comm, len(RECTANGULAR) + 1):
        m, n = [(n, n), (2 * n + 1, n), (n, n + 4)][(at + n) % 3]
        a = rectangular(at + 1, m, n, dtype) if at < len(RECTANGULAR) else kahan(n, dtype)
        check(comm, at, a, EIGEN, partial(singular_values, turn=at))


def linear_equations(comm: Any, cases: Callable[[Any, int], Cases]) -> None:
    """The 11 types of dchkge, and the 9 types of dchkpo."""
    for path, types, ratios in (("ge", GENERAL, general), ("po", DEFINITE, definite)):
        for at, n, dtype in cases(comm, len(types)):
            a, zero = linear(path, at + 1, n, n, dtype)
            check(comm, at, a, LINEAR, partial(ratios, zero=zero))


def orthogonal_factors(comm: Any, cases: Callable[[Any, int], Cases]) -> None:
    """The 8 types of dchkqr, and Kahan's matrices of several angles."""
    angles = (0.3, 1.2, 1.5)
    for at, n, dtype in cases(comm, len(LEAST_SQUARES) + len(angles)):
        m, q = [(n, n), (2 * n + 1, n), (n, n + 4)][(at + n) % 3]
        angle = at - len(LEAST_SQUARES)
        a = linear("qr", at + 1, m, q, dtype)[0] if angle < 0 else kahan(n, dtype, angles[angle])
        check(comm, at, a, LINEAR, partial(orthogonal, solves=angle < 0))


FAMILIES: list[Callable[..., None]] = [symmetric_matrices, rectangular_matrices, linear_equations, orthogonal_factors]


@pytest.mark.parametrize("family", FAMILIES)
def test_small_orders(comm: Any, family: Any, shared_by_all_ranks: None) -> None:
    family(comm, small_cases)


@thorough
@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_large_orders(comm: Any, family: Any) -> None:
    family(comm, large_cases)
