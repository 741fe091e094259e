"""Functions of linear algebra whose arguments overlap, or differ among the ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError

pytestmark = pytest.mark.mpi


def test_what_overlaps_or_differs_raises_on_all_ranks(comm: Any) -> None:
    grid, first = ProcessGrid(comm), comm.rank == 0
    a = np.random.default_rng(1).standard_normal((12, 12)) + 12 * np.eye(12)
    A = DistMatrix.from_global(a + 1j * a.T, grid=grid, block=2)
    S = DistMatrix.from_global(a @ a.T, grid=grid, block=2)
    b = np.ones(12)
    for B in (S, S.T, S[:, 2:5]):
        with pytest.raises(ArgumentError, match="shares memory"):
            linalg.solve(S, B, overwrite_a=True)
    M = DistMatrix.from_global(np.c_[a, b], grid=grid, block=2)
    X = linalg.solve(M[:, :12], M[:, 12:], overwrite_a=True, overwrite_b=True)  # beside each other
    assert np.allclose(a @ X.allgather()[:, 0], b)
    with pytest.raises(ArgumentError, match="pivots must be 12 row numbers below 12"):
        linalg.lu_solve((S, b), b)
    with pytest.raises(DTypeError, match="factors must be an LU"):
        linalg.lu_solve((S, b, b), S)  # type: ignore[arg-type]
    if comm.size == 1:
        return
    for call in (
        lambda: linalg.gram(S, uplo="L" if first else "full"),
        lambda: linalg.solve(S, S.copy(), assume_a="pos", overwrite_b=first),
        lambda: linalg.solve(S, b if first else S, refine=True),
        lambda: linalg.solve(S, b + first, refine=True),
        lambda: linalg.solve(S, b + first, assume_a="diagonal"),
        lambda: linalg.solve(A, A.H.T if first else A),
        lambda: linalg.solve_triangular(A.H if first else A.T, b),
        lambda: linalg.cholesky(A.H.T if first else A),
        lambda: linalg.lu_factor(A.H.T if first else A),
        lambda: linalg.ldl(A.H.T if first else A),
        lambda: linalg.solve(S, b, assume_a="sym" if first else "her"),
    ):
        with pytest.raises(ArgumentError, match="different arguments"):
            call()


def test_the_power_0_of_nan_is_the_identity(comm: Any) -> None:
    A = DistMatrix.from_global(np.full((5, 5), np.nan), grid=ProcessGrid(comm), block=2)
    assert np.array_equal(linalg.matrix_power(A, 0).allgather(), np.eye(5))


def test_nan_is_not_positive_definite(comm: Any) -> None:
    """NaN in the triangle that is read, on the diagonal or beside it."""
    with ProcessGrid(comm) as grid:
        for at in ((4, 4), (9, 3)):
            S = 12 * np.eye(12)
            S[at] = np.nan
            with pytest.raises(LinAlgError, match=rf"its leading minor of order {at[0] + 1} is not"):
                linalg.cholesky(DistMatrix.from_global(S, grid=grid, block=2))


def test_bad_arguments_raise_on_all_ranks(comm: Any) -> None:
    grid = ProcessGrid(comm)
    S = DistMatrix.from_global(np.eye(6) + 0.1, grid=grid, block=2)
    T, W = S[:, :4], S.astype("float16")
    absent = comm.rank == comm.size - 1
    somewhere: Any = None if absent else S  # a matrix on the other ranks
    factors: Any = None if absent else linalg.LU(S, np.arange(6), 0)
    some: Any = np.array(["gen", "N"])
    real, whole = "must be a real number", "is a whole number"
    calls: list[tuple[type[Exception], str, Any]] = [
        *((ArgumentError, real, lambda x=x: linalg.norm(S, 2, tolerance=x)) for x in ("a", np.nan, -1, True, 10**400)),
        *((ArgumentError, real, lambda x=x: linalg.cond(S, tolerance=x)) for x in (0, 1j, [1])),
        *((ArgumentError, real, lambda x=x: linalg.eigh(S, tolerance=x)) for x in ("a", -1.0, np.inf)),
        *((ArgumentError, real, lambda x=x: linalg.lstsq(S, S, rcond=x)) for x in ("x", np.nan)),
        *((ArgumentError, "coefficients", lambda x=x: linalg.newton_schulz(S, coefficients=x)) for x in ("abc", [1])),
        (ArgumentError, "coefficients", lambda: linalg.newton_schulz(S, coefficients=(1, 2, np.nan))),
        *((ArgumentError, whole, lambda x=x: linalg.svd(S, x)) for x in (1.5, True, "k")),
        *((ArgumentError, "must be >=", lambda n=n: linalg.svd(S, 2, **{n: -1})) for n in ("steps", "oversample")),
        (ArgumentError, "epsilon must be", lambda: linalg.newton_schulz(S, epsilon=-1)),
        *((ArgumentError, "cond is known for", lambda p=p: linalg.cond(S, p)) for p in (True, np.ones(2))),
        (ArgumentError, "norm .True. is not one of", lambda: linalg.norm(S, True)),
        (ArgumentError, "k = 9 is more than the 6", lambda: linalg.svd(S, 9)),
        *((ArgumentError, real, lambda x=x: linalg.svd(S, 2, tolerance=x)) for x in ("a", 0, np.inf)),
        (ArgumentError, "full_matrices=True", lambda: linalg.svd(S, 2, full_matrices=True)),
        (ArgumentError, "seed must be <=", lambda: linalg.svd(S, 2, seed=2**64)),
        (ArgumentError, "assume_a 'some' is", lambda: linalg.solve(S, S, assume_a="some")),
        (ArgumentError, "k = 7 is more", lambda: linalg.eigh(S, k=7)),
        (ArgumentError, "trans", lambda: linalg.lu_solve(linalg.lu_factor(S), S, trans="X")),  # type: ignore[arg-type]
        *((ArgumentError, "is not one of", call) for call in (  # arrays and numbers are no names
            lambda: linalg.solve(S, S, assume_a=some), lambda: linalg.inv(S, assume_a=some),
            lambda: linalg.cond(S, assume_a=some), lambda: linalg.sqrtm(S, assume_a=some),
            lambda: linalg.matrix_sign(S, assume_a=some), lambda: linalg.eigh(S, which=some),
            lambda: linalg.qr(S, mode=some), lambda: linalg.qr(S, method=some), lambda: linalg.gram(S, uplo=some),
            lambda: linalg.herk(1, S, uplo=some), lambda: linalg.solve_triangular(S, S, side=some),
            lambda: linalg.trmm(S, S, side=some), lambda: DistMatrix.random((3, 3), kind=some, grid=grid),
            lambda: DistMatrix.zeros((3, 3), grid=grid, order=some), lambda: np.linalg.eigh(S, some),
        )),
        *((ArgumentError, 'trans is "N", "T" or "C"', lambda f=f: f(S, S, trans=some)) for f in (
            linalg.solve_triangular, linalg.trmm, linalg.matvec,
        )),
        (DTypeError, "A must be a DistMatrix", lambda: linalg.matvec(somewhere, S[:, :1])),
        (LayoutError, "one column of that length", lambda: linalg.matvec(S, S)),
        (LayoutError, "array of shape", lambda: linalg.matvec(S, np.ones(5))),
        (DTypeError, "^", lambda: linalg.matvec(S, "text" if absent else np.ones(6), trans="C")),
        (DTypeError, "B must be a DistMatrix", lambda: linalg.kron(S, "text")),
        (DTypeError, "A must be a DistMatrix", lambda: linalg.kron(somewhere, S)),
        (ArgumentError, "is a whole number", lambda: linalg.matrix_power(S, 1.5)),
        (DTypeError, "float16", lambda: linalg.expm(W)),
        *((LayoutError, "must be square", lambda f=f: f(T)) for f in (linalg.expm, linalg.sqrtm, linalg.det)),
        (DTypeError, "float16", lambda: linalg.herk(1, W)),
        (ArgumentError, "unknown options: color", lambda: linalg.herk(1, S, color=1)),
        (DTypeError, "alpha", lambda: linalg.herk(1j, S)),
        *((LayoutError, "6 columns", lambda f=f: f(S, T, side="R")) for f in (linalg.solve_triangular, linalg.trmm)),
        *((LayoutError, "must be square", lambda f=f: f(T, S)) for f in (linalg.solve_triangular, linalg.trmm)),
        *((LayoutError, "must be square", lambda f=f: f(T)) for f in (linalg.cholesky, linalg.eigh, linalg.inv)),
        *((LayoutError, "must be square", lambda f=f: f(T)) for f in (linalg.ldl, linalg.inertia)),
        *((DTypeError, "float16", lambda f=f: f(W)) for f in (linalg.cholesky, linalg.lu_factor, linalg.qr)),
        (DTypeError, "^L must be a DistMatrix", lambda: linalg.cho_solve((3, True), S)),  # type: ignore[arg-type]
        (DTypeError, "A must be a DistMatrix", lambda: linalg.solve(somewhere, S)),
        (DTypeError, "A must be a DistMatrix", lambda: linalg.lstsq(somewhere, S)),
        (DTypeError, "A must be a DistMatrix", lambda: linalg.solve_triangular(somewhere, S)),
        (DTypeError, "factors must be an LU", lambda: linalg.lu_solve(factors, S)),
        (DTypeError, "factors must be an LDL", lambda: linalg.ldl_solve(factors, S)),
    ]  # fmt: skip
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    values = np.linalg.svd(S.allgather())[1]
    assert np.allclose(linalg.svd(S, 2, seed=2**64 - 1)[1], values[:2])
    assert linalg.lstsq(DistMatrix.zeros((6, 6), grid=grid), S, rcond=-1)[2] == 0
    assert linalg.matrix_sign(DistMatrix.zeros((0, 0), grid=grid)).shape == (0, 0)
    assert linalg.norm(S, np.int64(1)) == linalg.norm(S, 1)
    assert linalg.norm(S, np.int64(2)) == linalg.norm(S, 2) == linalg.norm(S, np.float32(2))


@pytest.mark.parametrize(("dtype", "scales"), [("d", (1e-310, 1e-300, 1e300)), ("F", (1e-40, 1e-36, 1e36))])
def test_nothing_overflows_between(comm: Any, dtype: str, scales: tuple[float, ...]) -> None:
    """Of matrices whose elements are near the ends of the range of their type."""
    x, rng = np.random.default_rng(1).standard_normal((12, 8)), 1e-9 if dtype == "d" else 1e-3
    s = x.T @ x + np.eye(8)
    root = np.linalg.cholesky(s)
    values, kappa = np.linalg.svd(x)[1], np.linalg.cond(s)
    solution = np.linalg.lstsq(x, x[:, 0] + np.arange(12), rcond=None)[0]
    with ProcessGrid(comm) as grid:
        for scale in scales:
            X, S = (DistMatrix.from_global((y * scale).astype(dtype), grid=grid, block=3) for y in (x, s))
            b = ((x[:, 0] + np.arange(12)) * scale).astype(dtype)
            U, H = linalg.polar(X)
            up = np.sqrt(scale)
            for found, expected in [
                (linalg.norm(X, 2) / scale, values[0]),
                *((linalg.cond(S, p), np.linalg.cond(s, p)) for p in (2, 1)),
                (linalg.cond(S, assume_a="pos"), kappa),
                (linalg.svd(X)[1] / scale, values),
                (linalg.svd(X, 3)[1] / scale, values[:3]),
                (linalg.eigh(S)[0] / scale, np.linalg.eigvalsh(s)),
                (linalg.lstsq(X, b)[0], solution),
                (linalg.cholesky(S).allgather() / up, root),
                ((linalg.sqrtm(S).allgather() / up) @ (linalg.sqrtm(S).allgather() / up), s),
                (linalg.matrix_sign(S).allgather(), np.eye(8)),
                (U.allgather() @ (H.allgather().astype(np.result_type(dtype, float)) / scale), x),
            ]:
                assert np.abs(np.asarray(found) - expected).max() <= rng * np.abs(expected).max()


def test_operands_are_taken_as_by_the_product(comm: Any) -> None:
    """Arrays and lists that are on every rank beside a matrix, and integers, of which NumPy makes float64."""
    with ProcessGrid(comm) as grid:
        whole = np.random.default_rng(5).integers(-9, 9, (4, 4)) + 30 * np.eye(4, dtype=int)
        spd, b = whole @ whole.T, np.arange(8).reshape(4, 2)
        integers, M, S = (DistMatrix.from_global(x, grid=grid) for x in (whole, whole.astype(float), spd))
        lower, expected = np.tril(whole), np.linalg.solve(whole, b)
        for A, X in itertools.product((integers, M), (b, b.tolist(), b.astype("f"), b[:, 0], b[:, 0].tolist())):
            solved = linalg.solve(A, X), np.linalg.solve(A, X), linalg.lu_solve(linalg.lu_factor(A), X)
            for found in (*solved, linalg.lstsq(A, X)[0], linalg.solve(A, X, refine=True)):
                found = found.allgather() if isinstance(found, DistMatrix) else found
                assert found.dtype == np.float64 and np.allclose(found, expected if np.ndim(X) == 2 else expected[:, 0])
        for found, right in (
            (linalg.solve(whole, DistMatrix.from_global(b, grid=grid)), expected),
            (linalg.solve(integers, B=b.tolist()), expected),
            (linalg.cho_solve(linalg.cholesky(S), b), np.linalg.solve(spd, b)),
            (linalg.ldl_solve(linalg.ldl(S), b), np.linalg.solve(spd, b)),
            (linalg.solve_triangular(M, b, lower=True), np.linalg.solve(lower, b)),
            (linalg.trmm(M, b, lower=True), lower @ b),
            (linalg.eigh(S, np.eye(4))[1], linalg.eigh(S)[1].allgather()),
            (linalg.inv(integers), np.linalg.inv(whole)),
            (linalg.matrix_power(M, -2), np.linalg.matrix_power(whole.astype(float), -2)),
            (linalg.kron(integers, b), np.kron(whole, b)),
            (np.kron(b.tolist(), M), np.kron(b, whole)),
            (M @ b, whole @ b),
            (integers @ M, whole @ whole),
            (np.inner(M, b.T.tolist()), whole @ b),
            (np.einsum("ji,jk->ik", b.tolist(), M), b.T @ whole),
        ):
            assert found.dtype == right.dtype or found.dtype == np.float64
            assert np.allclose(found.allgather(), right)
        assert linalg.kron(integers, b).dtype == int and linalg.det(integers) == pytest.approx(np.linalg.det(whole))
        with pytest.raises(DTypeError, match=r"A has dtype int64.* convert it with A.astype\(float\)"):
            integers @ integers
        for bad in ([[1, 2], [3]], np.ones((4, 2, 2))):
            with pytest.raises((DTypeError, ValueError, LayoutError)):
                linalg.solve(M, bad)
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different"):
                linalg.solve(M, b + comm.rank)
            with pytest.raises(ArgumentError, match="different"):
                linalg.solve(M, b if comm.rank else S)
