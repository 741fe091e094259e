"""Arguments of `pdgemm.linalg`: overlapping, inconsistent or invalid ones, and names of NumPy and SciPy."""

from __future__ import annotations

import itertools
import re
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import rng_matrix
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError
from pdgemm.matrix import numpy_functions

pytestmark = pytest.mark.mpi


def test_overlapping_or_different_arguments_raise_on_all_ranks(comm: Any) -> None:
    grid, first = ProcessGrid(comm), comm.rank == 0
    a = np.random.default_rng(1).standard_normal((12, 12)) + 12 * np.eye(12)
    A = DistMatrix.from_global(a + 1j * a.T, grid=grid, block=2)
    S = DistMatrix.from_global(a @ a.T, grid=grid, block=2)
    b = np.ones(12)
    for B in (S, S.T, S[:, 2:5]):
        with pytest.raises(ArgumentError, match="shares memory"):
            linalg.solve(S, B, overwrite_a=True)
    M = DistMatrix.from_global(np.c_[a, b], grid=grid, block=2)
    X = linalg.solve(M[:, :12], M[:, 12:], overwrite_a=True, overwrite_b=True)  # disjoint columns of M are accepted
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
        lambda: linalg.solve(S, b, assume_a="sym" if first else "her"),
        lambda: linalg.cholesky(S, lower=first),
        lambda: linalg.lu_factor(S, overwrite_a=first),
        lambda: linalg.householder_qr(S, want_q=first),
        lambda: linalg.qr(S, method="tsqr" if first else "auto"),
        lambda: linalg.qr(S, pivoting=first),
        lambda: linalg.lstsq(S, b + first),
        lambda: linalg.solve_triangular(S, b + first),
        lambda: linalg.matrix_power(S, 2 + first),
        lambda: linalg.eigh(S, subset_by_index=(comm.rank, comm.rank + 1)),
        lambda: linalg.plan("cholesky", S, lower=first),
    ):
        with pytest.raises(ArgumentError, match="differ"):
            call()


def test_bad_arguments_raise_on_all_ranks(comm: Any) -> None:
    grid = ProcessGrid(comm)
    S = DistMatrix.from_global(np.eye(6) + 0.1, grid=grid, block=2)
    T, W = S[:, :4], S.astype("float16")
    absent = comm.rank == comm.size - 1
    somewhere: Any = None if absent else S  # None on one rank, a matrix on the others
    factors: Any = None if absent else linalg.LU(S, np.arange(6), 0)
    some: Any = np.array(["gen", "N"])
    array: Any = np.eye(3)
    lu = linalg.lu_factor(S)
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
        *((ArgumentError, "p must be None, 1, -1, 2", lambda p=p: linalg.cond(S, p)) for p in (True, np.ones(2))),
        (ArgumentError, "norm .True. is not one of", lambda: linalg.norm(S, True)),
        (ArgumentError, "k = 9 is more than the 6", lambda: linalg.svd(S, 9)),
        *((ArgumentError, real, lambda x=x: linalg.svd(S, 2, tolerance=x)) for x in ("a", 0, np.inf)),
        (ArgumentError, "full_matrices=True", lambda: linalg.svd(S, 2, full_matrices=True)),
        (ArgumentError, "seed must be <=", lambda: linalg.svd(S, 2, seed=2**64)),
        (ArgumentError, "assume_a 'some' is", lambda: linalg.solve(S, S, assume_a="some")),
        (ArgumentError, "k = 7 is more", lambda: linalg.eigh(S, k=7)),
        *((ArgumentError, "is not one of", call) for call in (  # arrays and numbers are not names
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
        *((DTypeError, "A must be a DistMatrix", call) for call in (
            lambda: linalg.matvec(somewhere, S[:, :1]), lambda: linalg.kron(somewhere, S),
            lambda: linalg.solve(somewhere, S), lambda: linalg.lstsq(somewhere, S),
            lambda: linalg.solve_triangular(somewhere, S), lambda: linalg.plan("cholesky", array),
        )),
        *((DTypeError, "A must be a DistMatrix", lambda f=f: f(array)) for f in (
            linalg.polar, linalg.svd, linalg.cholesky, linalg.householder_qr, linalg.inertia, linalg.qr,
        )),
        (LayoutError, "so x must be .* x 1, but it is", lambda: linalg.matvec(S, S)),
        (LayoutError, "array of shape", lambda: linalg.matvec(S, np.ones(5))),
        (DTypeError, "^", lambda: linalg.matvec(S, "text" if absent else np.ones(6), trans="C")),
        (DTypeError, "B must be a DistMatrix", lambda: linalg.kron(S, "text")),
        (ArgumentError, "is a whole number", lambda: linalg.matrix_power(S, 1.5)),
        (ArgumentError, "unknown options: color", lambda: linalg.herk(1, S, color=1)),
        (DTypeError, "alpha", lambda: linalg.herk(1j, S)),
        *((LayoutError, "6 columns", lambda f=f: f(S, T, side="R")) for f in (linalg.solve_triangular, linalg.trmm)),
        *((LayoutError, "must be square", lambda f=f: f(T, S)) for f in (linalg.solve_triangular, linalg.trmm)),
        (DTypeError, "^L must be a DistMatrix", lambda: linalg.cho_solve((3, True), S)),  # type: ignore[arg-type]
        (DTypeError, "factors must be an LU", lambda: linalg.lu_solve(factors, S)),
        *((LayoutError, "A must be square, but it is 6 x 4", lambda f=f: f(T)) for f in (
            linalg.expm, linalg.sqrtm, linalg.det, linalg.cholesky, linalg.eigh, linalg.inv, linalg.inertia,
            linalg.matrix_sign, lambda x: linalg.cond(x, 1), lambda x: linalg.matrix_power(x, 2),
        )),
        (LayoutError, "factors.LU must be square", lambda: linalg.lu_solve(linalg.lu_factor(T), S)),
        *((DTypeError, "float16", lambda f=f: f(W)) for f in (
            linalg.cholesky, linalg.lu_factor, linalg.qr, linalg.expm, linalg.polar, linalg.svd,
            linalg.inertia, linalg.householder_qr, lambda x: linalg.herk(1, x), lambda x: linalg.lstsq(x, S),
            lambda x: linalg.qr(x, pivoting=True),
        )),
        *((LayoutError, "A is 6 x 6, so B must have 6", lambda f=f, b=b: f(b)) for b in (T.H, np.ones(3)) for f in (
            lambda b: linalg.solve(S, b), lambda b: linalg.solve_triangular(S, b), lambda b: linalg.lstsq(S, b),
            lambda b: linalg.lu_solve(lu, b), lambda b: linalg.plan(linalg.trmm, S, b),
        )),
        *((DTypeError, "B must be a DistMatrix, or an array", lambda f=f: f(S, "text")) for f in (
            linalg.solve, linalg.lstsq, linalg.solve_triangular,
        )),
        (ArgumentError, 'trans is "N", "T" or "C"', lambda: linalg.lu_solve(lu, S, trans="X")),  # type: ignore[arg-type]
        *((ArgumentError, "shares memory", call) for call in (
            lambda: linalg.solve(S, S, overwrite_b=True), lambda: linalg.lu_solve(lu, lu.LU, overwrite_b=True),
        )),
        *((ArgumentError, "pivoting=True takes", lambda m=m: linalg.qr(S, pivoting=True, method=m)) for m in (
            "tsqr", "cholesky",
        )),
        *((ArgumentError, "mode 'full' is not", lambda p=p: linalg.qr(S, mode="full", pivoting=p)) for p in (0, 1)),
        (ArgumentError, "method 'svd' is not one of auto, ", lambda: linalg.qr(S, method="svd")),
        (ArgumentError, "lapack_driver 'gelss' is not", lambda: linalg.lstsq(S, S, lapack_driver="gelss")),
        *((DTypeError, "refine=True is for general matrices of float64", call) for call in (
            lambda: linalg.solve(S.astype("f"), S, refine=True),
            lambda: linalg.solve(S, S, refine=True, assume_a="pos"),
        )),
    ]  # fmt: skip
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    values = np.linalg.svd(S.allgather())[1]
    assert np.allclose(linalg.svd(S, 2, seed=2**64 - 1)[1], values[:2])
    assert linalg.lstsq(DistMatrix.zeros((6, 6), grid=grid), S, rcond=-1)[2] == 0
    assert linalg.matrix_sign(DistMatrix.zeros((0, 0), grid=grid)).shape == (0, 0)
    assert np.array_equal(linalg.matrix_power(S * np.nan, 0).allgather(), np.eye(6))
    assert linalg.norm(S, np.int64(1)) == linalg.norm(S, 1)
    assert linalg.norm(S, np.int64(2)) == linalg.norm(S, 2) == linalg.norm(S, np.float32(2))


def test_operands_are_taken_as_by_the_product(comm: Any) -> None:
    """With a matrix, arrays and lists (equal on every rank) are accepted; integers are converted to float64."""
    with ProcessGrid(comm) as grid:
        whole = np.random.default_rng(5).integers(-9, 9, (4, 4)) + 30 * np.eye(4, dtype=int)
        spd, b = whole @ whole.T, np.arange(8).reshape(4, 2)
        integers, M, S = (DistMatrix.from_global(x, grid=grid) for x in (whole, whole.astype(float), spd))
        lower, expected = np.tril(whole), np.linalg.solve(whole, b)
        for A, X in itertools.product((integers, M), (b, b.tolist(), b.astype("f"), b.astype("F"), b[:, 0].tolist())):
            solved = linalg.solve(A, X), np.linalg.solve(A, X), linalg.lu_solve(linalg.lu_factor(A), X)
            for found in (*solved, linalg.lstsq(A, X)[0], linalg.solve(A, X, refine=True)):
                found = found.allgather() if isinstance(found, DistMatrix) else found
                assert found.dtype == np.result_type(np.asarray(X), float)
                assert np.allclose(found, expected if np.ndim(X) == 2 else expected[:, 0])
        for found, right in (
            (linalg.solve(whole, DistMatrix.from_global(b, grid=grid)), expected),
            (linalg.solve(integers, B=b.tolist()), expected),
            (linalg.cho_solve(linalg.cholesky(S), b), np.linalg.solve(spd, b)),
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
        ):
            assert found.dtype == right.dtype or found.dtype == np.float64
            assert np.allclose(found.allgather(), right)
        assert linalg.kron(integers, b).dtype == int and linalg.det(integers) == pytest.approx(np.linalg.det(whole))
        assert np.array_equal((integers @ integers).allgather(), whole @ whole)
        with pytest.raises(DTypeError, match=r"A has dtype bool.* convert it with A.astype\(float\)"):
            (integers > 0) @ (integers > 0)
        for bad in ([[1, 2], [3]], np.ones((4, 2, 2))):
            with pytest.raises((DTypeError, ValueError, LayoutError)):
                linalg.solve(M, bad)
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different"):
                linalg.solve(M, b + comm.rank)
            with pytest.raises(ArgumentError, match="different"):
                linalg.solve(M, b if comm.rank else S)


def test_functions_named_like_scipys_and_numpys(comm: Any) -> None:
    rng = np.random.default_rng(2)
    x, b = rng.standard_normal((9, 9)) + 1j * rng.standard_normal((9, 9)), np.arange(9) + 1j
    h, low = x @ x.conj().T + np.eye(9), x[:, :3] @ x[:3, :6]
    with ProcessGrid(comm) as grid:
        A, H, L = (DistMatrix.from_global(np.ascontiguousarray(y), grid=grid, block=2) for y in (x, h, low))
        functions: Any = np.linalg
        for of in (linalg, functions):
            assert np.allclose(of.svdvals(L), scipy.linalg.svdvals(low))
            assert np.allclose(of.eigvalsh(H), scipy.linalg.eigvalsh(h))
            assert of.matrix_rank(L) == of.matrix_rank(L.T) == 3 == np.linalg.matrix_rank(low)
            assert of.matrix_rank(A, 4.0) == np.linalg.matrix_rank(x, 4.0)
            assert np.allclose(of.pinv(L).allgather(), scipy.linalg.pinv(low))
            assert np.allclose(of.pinv(L.T).allgather(), scipy.linalg.pinv(low.T))
            U, s, Vh = of.svd(A, full_matrices=False)
            assert np.allclose((U * s @ Vh).allgather(), x) and len(of.svd(A[:5], full_matrices=True)) == 3
        assert np.allclose(linalg.pinv(A, atol=1.5).allgather(), scipy.linalg.pinv(x, atol=1.5, rtol=0), atol=1e-10)
        upper = DistMatrix.from_global(np.triu(h) + np.tril(x, -1), grid=grid)
        assert np.allclose(linalg.eigvalsh(upper, lower=False), scipy.linalg.eigvalsh(h))
        empty = L[:0]
        assert linalg.svdvals(empty).shape == (0,) and linalg.matrix_rank(empty) == 0
        assert linalg.pinv(empty).shape == (6, 0)
        w, V = functions.eigh(H, UPLO="U")
        assert np.allclose((V * w @ V.H).allgather(), h)
        assert np.isclose(functions.cond(A, 1), linalg.cond(A, 1))
        assert np.isclose(functions.matrix_norm(A, ord=2), np.linalg.norm(x, 2))
        for lower in (False, True):
            pair = linalg.cho_factor(H, lower=lower)
            assert np.allclose(linalg.cho_solve(pair, b), np.linalg.solve(h, b)) and pair[1] is lower
        lu, piv = linalg.lu_factor(A)
        exact, pivots = scipy.linalg.lu_factor(x)
        assert np.allclose(lu.allgather(), exact) and np.array_equal(piv, pivots)
        for trans in ("N", "T", "C"):
            solved = linalg.lu_solve((lu, piv), b, trans=trans)  # type: ignore[arg-type]
            assert np.array_equal(solved, linalg.lu_solve(linalg.lu_factor(A), b, trans=trans))  # type: ignore[arg-type]
        with pytest.raises(LinAlgError, match="pivot 4 of 5 is zero"):
            linalg.lu_solve((*linalg.lu_factor(DistMatrix.from_global(np.diag([1.0, 1, 1, 0, 1]), grid=grid)),), b[:5])
        for wrong in (piv[:-1], piv - 9, piv.astype(float), None):
            with pytest.raises(ArgumentError, match="pivots must be 9 row numbers below 9"):
                linalg.lu_solve((lu, wrong), b)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="tol or rtol, not both"):
            linalg.matrix_rank(A, 1.0, rtol=1.0)
        with pytest.raises(ArgumentError, match="rtol must be a real number"):
            linalg.pinv(A, rtol=np.nan)


def test_rank_and_pseudoinverse_of_any_shape(comm: Any) -> None:
    """Wide and tall matrices, of every rank, one row, one column, zeros: results equal NumPy's and SciPy's."""
    with ProcessGrid(comm) as grid:
        shapes = ((12, 7, 7), (7, 12, 7), (7, 12, 3), (9, 9, 5), (1, 8, 1), (8, 1, 1), (1, 1, 1), (5, 6, 0))
        for (m, n, rank), dtype in in_turn(shapes, "fdFD"):
            whole = (rng_matrix(m, rank, dtype, 1) @ rng_matrix(rank, n, dtype, 2)).astype(dtype)
            A = DistMatrix.from_global(whole, grid=grid, block=(2, 3))
            assert linalg.matrix_rank(A) == np.linalg.matrix_rank(whole) == rank
            X, expected = linalg.pinv(A), scipy.linalg.pinv(whole)
            assert X.shape == (n, m) and X.dtype == dtype
            condition = np.linalg.norm(whole, 2) * np.linalg.norm(expected, 2)
            bound = 30 * max(m, n) * np.finfo(dtype).eps * condition * (np.linalg.norm(expected, 2) or 1)
            assert np.linalg.norm(X.allgather() - expected, 2) <= bound
        assert linalg.matrix_rank(A, rtol=0) == 0 and linalg.matrix_rank(A + 1, 1e3) == 0


def test_functions_named_in_messages_exist(comm: Any) -> None:
    advice = numpy_functions._INSTEAD.values()
    names = sorted({*re.findall(r"\b(?:pdgemm|numpy|hdf5)(?:\.\w+)+", " ".join(advice))})
    assert "pdgemm.linalg.solve" in names and "hdf5.save" in names
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(np.eye(4) * 2, grid=grid)
        for name in names:
            module = "pdgemm.io" if name.startswith("hdf5") else name.split(".")[0]
            if module != "numpy":
                import_module(".".join(["pdgemm.io.hdf5"] if module == "pdgemm.io" else name.split(".")[:-1]))
            function = attrgetter(name.removeprefix("pdgemm.").removeprefix("numpy."))(import_module(module))
            assert callable(function), name
            if name.startswith("pdgemm.linalg"):
                assert function(*([A] * (1 + ("solve" in name)))) is not None
        for attribute in re.findall(r"\bA\.(\w+)", " ".join(advice)):
            assert hasattr(A, attribute), attribute
