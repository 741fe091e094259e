"""ScaLAPACK's triangular solves and products, factorisations and solves: right, and only results are written."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from problems import op
from scalapack_arrays import (
    LETTERS,
    ON_RANKS,
    Global,
    assert_refused,
    assert_unchanged,
    changed,
    gathered,
    info,
    placed,
    positive,
    random,
    room,
    triangle,
)

from pdgemm import scalapack

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("letter", ON_RANKS)
def test_triangular_solves_and_products(comm: Any, contexts: list[int], letter: str) -> None:
    """|op(A) X - alpha B| <= 3 n eps |A| |X|, |C - alpha op(A) B| <= 3 n eps |A| |B|: Higham 2002, 8.5 and 3.5."""
    char, rng = LETTERS[letter], np.random.default_rng(5)
    cases = list(itertools.product("LR", "LU", "NTC", "NU"))
    for number, (side, uplo, trans, diag) in enumerate(cases[:: 2 if letter == "z" else 5]):
        m, n = ((17, 23), (23, 6), (1, 5))[number % 3]
        order = m if side == "L" else n
        stored = random((order, order), char, number) / order + 2 * np.eye(order, dtype=char)
        T = np.where(triangle(order, uplo), stored, 0).astype("D")
        if diag == "U":
            np.fill_diagonal(T, 1)
            np.fill_diagonal(stored, np.nan)
        stored[~triangle(order, uplo)] = np.nan
        alpha = [2, 0.5, 2 - 1j][number % 3] if letter in "cz" else [2, 0.5, 1][number % 3]
        given = random((m, n), char, 100 + number)
        for name in ("trsm", "trmm"):
            A, _, a = placed(stored.astype(char), np.nan, contexts, rng)
            B, there, b = placed(given, 7, contexts, rng)
            getattr(scalapack, f"p{letter}{name}")(side, uplo, trans, diag, m, n, alpha, *a, *b)
            found, t = gathered(comm, B, there), op(T, trans)
            left, right = (t @ found if side == "L" else found @ t), alpha * given
            if name == "trmm":
                left, right = found, alpha * (t @ given if side == "L" else given @ t)
            scale = np.linalg.norm(T, 1) * max(np.linalg.norm(found, 1), np.linalg.norm(right, 1))
            assert np.linalg.norm(left - right, 1) <= 3 * order * np.finfo(char).eps * scale, (name, side, uplo, trans)
            assert_unchanged(B, there)
            assert A.local.tobytes() == A.before.tobytes()


@pytest.mark.parametrize("name", ["pssyrk", "pdsyrk", "pcsyrk", "pzsyrk", "pcherk", "pzherk"])
def test_one_triangle_of_a_product(comm: Any, contexts: list[int], name: str) -> None:
    """The error is at most 16 eps (|alpha| |A| |A| + |beta| |C|), as for products; the other triangle is unchanged."""
    char, rng, other = LETTERS[name[1]], np.random.default_rng(4), "C" if name.endswith("herk") else "T"
    for uplo, trans, (n, k, beta) in itertools.product("LU", ("N", other), ((21, 13, 3), (5, 18, 0))):
        values, alpha = random((n, k), char, n), 2 if other == "C" or char in "fd" else 2 - 1j
        given, inside = random((n, n), char, 7), triangle(n, uplo)
        wide = values.astype("D")
        A, _, a = placed(values if trans == "N" else op(values, other), np.nan, contexts, rng)
        C, there, c = placed(np.where(inside, given if beta else np.nan, 7).astype(char), 7, contexts, rng)
        if other == "C":
            given[np.diag_indices(n)] = given.diagonal().real  # imaginary parts of the diagonal are not read
        getattr(scalapack, name)(uplo, trans, n, k, alpha, *a, beta, *c)
        expected = alpha * (wide @ op(wide, other)) + beta * given
        scale = abs(alpha) * (abs(wide) @ abs(wide).T) + abs(beta) * abs(given)
        difference = abs(gathered(comm, C, there) - expected)
        assert (difference <= 16 * np.finfo(char).eps * scale)[inside].all(), (uplo, trans, n, k)
        assert_unchanged(C, there, inside)
        assert A.local.tobytes() == A.before.tobytes()


@pytest.mark.parametrize("name", ["pdsyr2k", "pcsyr2k", "pzher2k"])
def test_one_triangle_of_two_products(comm: Any, contexts: list[int], name: str) -> None:
    """As SciPy's BLAS, to 32 eps (|alpha| (|A| |B| + |B| |A|) + |beta| |C|); the other triangle is unchanged."""
    char, rng, other = LETTERS[name[1]], np.random.default_rng(4), "C" if "her" in name else "T"
    blas = scipy.linalg.blas.get_blas_funcs(name[2:], dtype=char)
    for uplo, trans, (n, k, beta) in itertools.product("LU", ("N", other), ((21, 13, 3), (5, 18, 0))):
        shape, alpha = (n, k) if trans == "N" else (k, n), 2 - 1j if char in "FD" else 2
        given, inside, values = random((n, n), char, 7), triangle(n, uplo), [random(shape, char, x) for x in (n, k)]
        A, _, a = placed(values[0], np.nan, contexts, rng)
        B, _, b = placed(values[1], np.nan, contexts, rng)
        C, there, c = placed(np.where(inside, given if beta else np.nan, 7).astype(char), 7, contexts, rng)
        getattr(scalapack, name)(uplo, trans, n, k, alpha, *a, *b, beta, *c)
        expected = blas(alpha, *values, beta=beta, c=given, trans="NTC".index(trans), lower=uplo == "L")
        x, y = (abs(op(value, trans)) for value in values)
        scale = abs(alpha) * (x @ y.T + y @ x.T) + abs(beta) * abs(given)
        difference = abs(gathered(comm, C, there) - expected)
        assert (difference <= 32 * np.finfo(char).eps * scale)[inside].all(), (uplo, trans, n, k)
        assert_unchanged(C, there, inside)
        assert all(x.local.tobytes() == x.before.tobytes() for x in (A, B))


@pytest.mark.parametrize("name", ["pssymm", "pzsymm", "pchemm"])
def test_products_with_one_triangle(comm: Any, contexts: list[int], name: str) -> None:
    """As SciPy's BLAS, to 32 eps (|alpha| |A| |B| + |beta| |C|); the other triangle of A, and C for beta 0, are NaN."""
    char, rng = LETTERS[name[1]], np.random.default_rng(4)
    blas = scipy.linalg.blas.get_blas_funcs(name[2:], dtype=char)
    for side, uplo, (m, n, beta) in itertools.product("LR", "LU", ((21, 13, 3), (5, 18, 0))):
        order, alpha = m if side == "L" else n, 2 - 1j if char in "FD" else 2
        stored, values, given = random((order, order), char, 7), random((m, n), char, 1), random((m, n), char, 2)
        A, _, a = placed(np.where(triangle(order, uplo), stored, np.nan).astype(char), np.nan, contexts, rng)
        B, _, b = placed(values, np.nan, contexts, rng)
        C, there, c = placed(given if beta else np.full_like(given, np.nan), 7, contexts, rng)
        getattr(scalapack, name)(side, uplo, m, n, alpha, *a, *b, beta, *c)
        expected = blas(alpha, stored, values, beta=beta, c=given, side=side == "R", lower=uplo == "L")
        half = np.where(triangle(order, uplo), abs(stored), 0)
        size = half + half.T
        scale = abs(alpha) * (size @ abs(values) if side == "L" else abs(values) @ size) + abs(beta) * abs(given)
        assert (abs(gathered(comm, C, there) - expected) <= 32 * np.finfo(char).eps * scale).all(), (side, uplo, m, n)
        assert_unchanged(C, there)
        assert all(x.local.tobytes() == x.before.tobytes() for x in (A, B))


@pytest.mark.parametrize("letter", ON_RANKS)
def test_cholesky(comm: Any, contexts: list[int], letter: str) -> None:
    """|A - L L^H| <= 3 n eps |A|, |A X - B| <= 3 n eps |A| |X|, as SLATE's tests.  Only one triangle is used."""
    char, rng = LETTERS[letter], np.random.default_rng(6)
    routine = {name: getattr(scalapack, f"p{letter}{name}") for name in ("potrf", "potrs", "posv")}
    for uplo, n, nrhs in [*itertools.product("LU", (1, 40), (3,)), ("l", 40, 0)]:
        matrix, given = positive(n, char, n), random((n, nrhs), char, 3)
        inside = triangle(n, uplo.upper())
        half = np.where(inside, matrix, np.nan).astype(char)
        for together in (False, True):
            A, here, a = placed(half, np.nan, contexts, rng)
            B, there, b = placed(given, 7, contexts, rng)
            if together:
                assert routine["posv"](uplo, n, nrhs, *a, *b) == 0
            else:
                assert routine["potrf"](uplo, n, *a) == 0
                assert routine["potrs"](uplo, n, nrhs, *a, *b) == 0
            assert_unchanged(A, here, inside)
            assert_unchanged(B, there)
            F, X = np.where(inside, gathered(comm, A, here), 0), gathered(comm, B, there)
            L = F if uplo.upper() == "L" else F.conj().T
            eps, size = 3 * n * np.finfo(char).eps, np.linalg.norm(matrix, 1)
            assert np.linalg.norm(L @ L.conj().T - matrix, 1) <= eps * size
            if nrhs:
                assert np.linalg.norm(matrix @ X - given, 1) <= eps * size * np.linalg.norm(X, 1)


def test_matrices_that_are_not_positive_definite(comm: Any, contexts: list[int]) -> None:
    """INFO is the order of the minor that is not positive, plus N for an eigenproblem; all matrices are unchanged."""
    rng = np.random.default_rng(8)
    for at, uplo in ((1, "L"), (14, "U"), (30, "L")):
        matrix = positive(30, "d", 1)
        matrix[at - 1, at - 1] = -1
        several = matrix, random((30, 2), "d", 2), positive(30, "d", 2)
        (A, _, a), (B, _, b), (H, _, h) = (placed(x, 7, contexts, rng) for x in several)
        w = np.full(30, -9.0)
        assert scalapack.pdpotrf(uplo, 30, *a) == scalapack.pdposv(uplo, 30, 2, *a, *b) == at
        assert scalapack.pdsygvd(1, "V", uplo, 30, *h, *a, w) == 30 + at
        assert all(np.array_equal(X.local, X.before) for X in (A, B, H)) and (w == -9).all()


@pytest.mark.parametrize("letter", ON_RANKS)
def test_lu(comm: Any, contexts: list[int], letter: str) -> None:
    """|P A - L U| <= 3 n eps |A|, and |A X - B| <= 3 n eps |A| |X|, as SLATE's tests; pivots equal LAPACK's."""
    char, rng = LETTERS[letter], np.random.default_rng(11)
    routine = {name: getattr(scalapack, f"p{letter}{name}") for name in ("getrf", "getrs", "gesv")}
    shapes = ((31, 31), "N"), ((31, 31), "T"), ((31, 31), "C"), ((17, 24), "N"), ((24, 9), "N"), ((1, 1), "T")
    for (m, n), trans in shapes if letter == "d" else shapes[2:4]:
        matrix, given = random((m, n), char, m + n), random((n, 3), char, 3)
        A, here, a = placed(matrix, 7, contexts, rng)
        ipiv, eps = room(A), 3 * max(m, n) * np.finfo(char).eps
        assert routine["getrf"](m, n, *a, ipiv) == 0
        assert_unchanged(A, here)
        F, h = gathered(comm, A, here), min(m, n)
        pivots, order, mine = scipy.linalg.lu_factor(matrix)[1] + here[0].start + 1, np.arange(m), A.here[0].ravel()
        with_pivots = (mine >= here[0].start) & (mine < here[0].start + h)
        assert np.array_equal(ipiv[: len(mine)][with_pivots], pivots[mine[with_pivots] - here[0].start])
        assert (ipiv[: len(mine)][~with_pivots] == -9).all() and (ipiv[len(mine) :] == -9).all()
        for at, other in enumerate(pivots - here[0].start - 1):
            order[[at, other]] = order[[other, at]]
        L, U = np.tril(F[:, :h], -1) + np.eye(m, h), np.triu(F[:h])
        assert np.linalg.norm(matrix[order] - L @ U, 1) <= eps * np.linalg.norm(matrix, 1)
        if m != n:
            continue
        B, there, b = placed(given, 7, contexts, rng)
        assert routine["getrs"](trans, n, 3, *a, ipiv, *b) == 0
        again, _, c = placed(matrix, 7, contexts, rng)
        D, at, d = placed(given, 7, contexts, rng)
        assert routine["gesv"](n, 3, *c, room(again), *d) == 0
        for X, window, M in ((B, there, op(matrix, trans)), (D, at, matrix)):
            assert_unchanged(X, window)
            x = gathered(comm, X, window)
            assert np.linalg.norm(M @ x - given, 1) <= eps * np.linalg.norm(M, 1) * np.linalg.norm(x, 1)


@pytest.mark.parametrize("letter", ON_RANKS)
def test_inverses(comm: Any, contexts: list[int], letter: str) -> None:
    """|I - A X| <= 30 n eps |A| |X|, as LAPACK's xGET03 and xPOT03.  Of a triangular matrix, one triangle is used."""
    char, rng = LETTERS[letter], np.random.default_rng(21)
    routine = {name: getattr(scalapack, f"p{letter}{name}") for name in ("getrf", "getri", "potrf", "potri")}
    for n, uplo in ((1, "L"), (31, "U"), (31, "L")):
        general, definite, inside = random((n, n), char, n), positive(n, char, n), triangle(n, uplo)
        A, here, a = placed(general, 7, contexts, rng)
        B, there, b = placed(np.where(inside, definite, np.nan).astype(char), np.nan, contexts, rng)
        ipiv = room(A)
        assert routine["getrf"](n, n, *a, ipiv) == routine["potrf"](uplo, n, *b) == 0
        pivots = ipiv.copy()
        assert routine["getri"](n, *a, ipiv) == routine["potri"](uplo, n, *b) == 0
        assert np.array_equal(ipiv, pivots)
        assert_unchanged(A, here)
        assert_unchanged(B, there, inside)
        half = np.where(inside, gathered(comm, B, there), 0)
        assert not half.diagonal().imag.any()
        whole = half + half.conj().T - np.diag(half.diagonal())
        for M, X in ((general, gathered(comm, A, here)), (definite, whole)):
            scale = n * np.finfo(char).eps * np.linalg.norm(M, 1) * np.linalg.norm(X, 1)
            assert np.linalg.norm(np.eye(n) - M @ X, 1) <= 30 * scale, (n, uplo)


def test_singular_factors_have_no_inverse(comm: Any, contexts: list[int]) -> None:
    """INFO is the position of the zero on the diagonal, the factors are unchanged, and bad arguments are numbered."""
    factors = random((20, 20), "d", 1)
    factors[12, 12] = factors[15, 15] = 0
    A = Global(factors, contexts[0], (4, 3))
    ipiv = room(A)
    ipiv[: len(A.here[0])] = A.here[0].ravel() + 1  # no rows are exchanged
    a = A.local, 1, 1, A.desc
    assert scalapack.pdgetri(20, *a, ipiv) == scalapack.pdpotri("L", 20, *a) == scalapack.pdpotri("U", 20, *a) == 13
    assert scalapack.pdgetri(0, *a, ipiv) == scalapack.pdpotri("L", 0, *a) == 0
    assert np.array_equal(A.local, A.before)
    frozen = A.local.copy(order="F")
    frozen.flags.writeable = False
    for function, good, wrong in (
        (scalapack.pdgetri, [6, *a, ipiv], {1: -1, 2: frozen, 3: 16, 4: 0, 5: A.desc[:8], 6: ipiv * 1.0}),
        (scalapack.pdgetri, [20, *a, ipiv], {6: ipiv + 20}),
        (scalapack.pdpotri, ["U", 6, *a], {1: "X", 2: -1, 3: frozen, 4: 16, 5: 0, 6: [1]}),
    ):
        assert_refused(function, good, wrong)
    assert np.array_equal(A.local, A.before)


def test_singular_matrices_and_invalid_pivots(comm: Any, contexts: list[int]) -> None:
    matrix = random((20, 20), "d", 1)
    matrix[:, 12] = 0
    A, B = (Global(x, contexts[0], (4, 3)) for x in (matrix, random((20, 2), "d", 2)))
    a, b, ipiv = (A.local, 1, 1, A.desc), (B.local, 1, 1, B.desc), room(A)
    for n, nrhs in ((0, 2), (20, 0), (20, 2)):
        assert scalapack.pdgesv(n, nrhs, *a, ipiv, *b) == (13 if n else 0)
    assert scalapack.pdgetrf(0, 5, *a, ipiv) == scalapack.pdgetrs("N", 20, 0, *a, ipiv, *b) == 0
    assert np.array_equal(B.local, B.before)
    frozen = ipiv.copy()
    frozen.flags.writeable = False
    for function, good, wrong in (
        (scalapack.pdgetrf, [6, 5, *a, ipiv], {1: -1, 2: 2.5, 3: None, 4: 16, 5: 17, 6: 0, 7: frozen}),
        (scalapack.pdgetrf, [6, 5, *a, ipiv], {7: None}),
        (scalapack.pdgetrf, [6, 5, *a, ipiv], {7: ipiv * 1.0}),
        (scalapack.pdgetrs, ["N", 6, 2, *a, ipiv, *b], {1: 0, 2: -1, 3: -1, 5: 16, 8: ipiv[None], 9: A.local}),
        (scalapack.pdgetrs, ["N", 20, 2, *a, ipiv, *b], {8: ipiv + 20}),
        (scalapack.pdgesv, [6, 2, *a, ipiv, *b], {1: -1, 2: -1, 4: 0, 7: frozen, 8: A.local, 9: 16, 10: 2}),
    ):  # fmt: skip
        for number, value in wrong.items():
            assert info(function, *changed(good, **{f"_{number}": value})) == -number, (function, number)


@pytest.mark.parametrize("letter", ON_RANKS)
def test_qr(comm: Any, contexts: list[int], letter: str) -> None:
    """R, reflectors and tau equal LAPACK's geqrf, Q its orgqr; multiplied from both sides, |Q R - A| <= 3 n eps |A|."""
    char, rng = LETTERS[letter], np.random.default_rng(12)
    form, apply = ("ungqr", "unmqr") if letter in "cz" else ("orgqr", "ormqr")
    routine = {x: getattr(scalapack, f"p{letter}{x}") for x in ("geqrf", form, apply)}
    cases = list(zip(((31, 31), (17, 24), (140, 9), (1, 1)), "NCNC" if letter in "cz" else "NTNT"))
    for (m, n), trans in cases if letter == "d" else cases[:2]:
        matrix, h, eps = random((m, n), char, m + n), min(m, n), 3 * max(m, n) * np.finfo(char).eps
        A, here, a = placed(matrix, 7, contexts, rng)
        tau = np.full(A.local.shape[1], -9, char)
        assert routine["geqrf"](m, n, *a, tau) == 0
        assert_unchanged(A, here)
        F = gathered(comm, A, here)
        (expected, factors), R = scipy.linalg.qr(matrix, mode="raw")
        assert np.abs(F - expected).max() <= 10 * eps * np.linalg.norm(matrix)
        columns, start = A.here[1].ravel(), here[1].start
        mine = (columns >= start) & (columns < start + h)
        assert np.abs(tau[: len(columns)][mine] - factors[columns[mine] - start]).max(initial=0) <= 10 * eps
        assert (tau[: len(columns)][~mine] == -9).all() and (tau[len(columns) :] == -9).all()
        Q = scipy.linalg.qr(matrix, mode="full")[0]
        for side, given in (("L", random((m, 5), char, 3)), ("R", random((4, m), char, 4))):
            C, there, c = placed(given, 7, contexts, rng)
            assert routine[apply](side, trans, *given.shape, h, *a, tau, *c) == 0
            found, q = gathered(comm, C, there), op(Q, trans)
            assert np.abs(found - (q @ given if side == "L" else given @ q)).max() <= 10 * eps * np.linalg.norm(given)
            assert_unchanged(C, there)
        assert routine[form](m, h, h, *a, tau) == 0
        q = gathered(comm, A, here)[:, :h]
        assert np.linalg.norm(q.conj().T @ q - np.eye(h), 1) <= eps
        assert np.linalg.norm(q @ np.triu(R) - matrix, 1) <= 10 * eps * np.linalg.norm(matrix, 1)
    A = Global(random((9, 9), char, 1), contexts[0], (4, 3))
    good = [6, 5, A.local, 1, 1, A.desc, np.zeros(12, char)]
    assert_refused(routine["geqrf"], good, {1: -1, 2: 2.5, 3: None, 4: 16, 5: 17, 6: 0, 7: np.zeros(12, "i")})
    assert info(routine[form], 3, 4, 2, *good[2:]) == -2 and info(routine[form], 5, 4, 5, *good[2:]) == -3
    assert info(routine[apply], "L", "X", 6, 2, 2, *good[2:], *good[2:6]) == -2
    assert routine["geqrf"](0, 5, *good[2:]) == routine[form](5, 0, 0, *good[2:]) == 0


@pytest.mark.parametrize("letter", ON_RANKS)
def test_qr_with_column_pivoting(comm: Any, contexts: list[int], letter: str) -> None:
    """Up to 64 columns, pivots equal LAPACK's geqp3; |A P - Q R| <= 3 n eps |A|, with Q by p?ormqr."""
    char, rng = LETTERS[letter], np.random.default_rng(21)
    factor, apply = (getattr(scalapack, f"p{letter}{x}") for x in ("geqpf", "unmqr" if letter in "cz" else "ormqr"))
    shapes = (31, 31), (17, 24), (140, 9), (1, 1), (70, 150), (9, 0)
    for m, n in shapes if letter == "d" else shapes[:2]:
        h, eps = min(m, n), 3 * max(m, n) * np.finfo(char).eps
        matrix = (random((m, n), char, m + n) * 2.0 ** rng.integers(-3, 4, n)).astype(char)
        A, here, a = placed(matrix, 7, contexts, rng)
        ipiv, tau = np.full(A.local.shape[1], -9), np.full(A.local.shape[1], -9, char)
        assert factor(m, n, *a, ipiv, tau) == 0
        assert_unchanged(A, here)
        columns, start = A.here[1].ravel(), here[1].start
        order = np.zeros(n, int)
        for where, values in comm.allgather((columns, ipiv[: len(columns)])):  # ipiv is equal in all rows of the grid
            mine = (where >= start) & (where < start + n)
            before = order[where[mine] - start]
            assert (values[~mine] == -9).all() and ((before == 0) | (before == values[mine])).all()
            order[where[mine] - start] = values[mine]
        assert (ipiv[len(columns) :] == -9).all()
        with_tau = (columns >= start) & (columns < start + h)
        assert (np.delete(tau, np.flatnonzero(with_tau)) == -9).all()
        order -= start + 1
        assert np.array_equal(np.sort(order), np.arange(n))
        if not h:
            continue
        R = np.triu(gathered(comm, A, here))[:h]
        C, there, c = placed(np.pad(R, ((0, m - h), (0, 0))), 7, contexts, rng)
        assert apply("L", "N", m, n, h, *a, tau, *c) == 0
        assert np.linalg.norm(gathered(comm, C, there) - matrix[:, order], 1) <= eps * np.linalg.norm(matrix, 1)
        expected = scipy.linalg.qr(matrix, mode="r", pivoting=True)
        if n <= min(m, 64):
            assert np.array_equal(order, expected[1]), (m, n)
        sizes, largest = abs(R.diagonal()), abs(expected[0].diagonal())
        assert (sizes >= largest / 4).all() and (sizes <= 4 * largest).all(), (m, n)
    A = Global(random((9, 9), char, 1), contexts[0], (4, 3))
    ipiv, tau = np.zeros(12, int), np.zeros(12, char)
    good = [6, 5, A.local, 1, 1, A.desc, ipiv, tau]
    assert_refused(factor, good, {1: -1, 2: 2.5, 3: None, 4: 16, 5: 17, 6: 0, 7: tau, 8: ipiv})
    short = np.zeros(max(0, A.inside[1].stop - 1), int)  # too short, if this process has the last columns
    assert info(factor, 9, 9, A.local, 1, 1, A.desc, short, tau) == -7
    assert factor(0, 5, *good[2:]) == factor(5, 0, *good[2:]) == 0
    assert np.array_equal(A.local, A.before) and not ipiv.any() and not tau.any()


def test_where_alpha_is_0_nothing_is_read(comm: Any, contexts: list[int]) -> None:
    rng = np.random.default_rng(9)
    for name in ("pdtrsm", "pdtrmm"):
        a = placed(np.full((6, 6), np.nan), 7, contexts, rng)[2]
        B, there, b = placed(np.full((6, 4), np.nan), 7, contexts, rng)
        getattr(scalapack, name)("L", "U", "N", "N", 6, 4, 0.0, *a, *b)
        assert not gathered(comm, B, there).any()


def test_illegal_arguments_of_solves(comm: Any, contexts: list[int]) -> None:
    """INFO numbers the arguments as ScaLAPACK does; an empty system leaves everything unchanged."""
    A, B, D = (Global(random((12, 12), "d", s), contexts[0], (3, 2)) for s in (1, 2, 3))
    a, b, d = (A.local, 1, 2, A.desc), (B.local, 2, 1, B.desc), (D.local, 1, 1, D.desc)
    for function, good, wrong in (
        (scalapack.pdtrsm, ["L", "U", "N", "N", 6, 5, 1.0, *a, *b], {
            1: "X", 2: "N", 3: "L", 4: 1, 5: -1, 6: 2.5, 7: 1j, 8: None, 9: 8, 10: 0, 11: 7, 12: A.local, 13: 8, 14: 9,
        }),
        (scalapack.pdsyrk, ["L", "N", 6, 5, 1.0, *a, 0.0, *b], {
            1: "X", 2: "X", 3: -1, 4: -1, 5: "a", 6: [1], 7: 8, 8: 9, 9: 1, 10: 1j, 11: A.local, 12: 8, 13: 8, 14: [0],
        }),
        (scalapack.pdsyr2k, ["L", "N", 6, 5, 1.0, *a, *b, 0.0, *d], {
            1: "X", 2: "X", 3: -1, 4: -1, 5: "a", 6: [1], 7: 8, 10: [1], 13: 9, 14: 1j, 15: B.local, 18: [0],
        }),
        (scalapack.pdsymm, ["R", "L", 6, 5, 1.0, *a, *b, 0.0, *d], {
            1: "X", 2: "X", 3: -1, 4: -1, 5: "a", 6: [1], 7: 9, 10: [1], 13: 9, 14: 1j, 15: B.local, 18: [0],
        }),
        (scalapack.pdtrmm, ["R", "L", "T", "U", 6, 5, 1.0, *a, *b], {2: "", 5: -1, 9: 9, 15: [1]}),
        (scalapack.pdpotrf, ["L", 6, *a], {1: "X", 2: -1, 3: [1.0], 4: 8, 5: 8, 6: A.desc[:8]}),
        (scalapack.pdpotrs, ["U", 6, 3, *a, *b], {1: 0, 2: -2, 3: -1, 5: 8, 6: 0, 8: A.local, 9: 8, 10: 11}),
        (scalapack.pdposv, ["U", 6, 3, *a, *b], {1: 0, 2: -2, 3: -1, 4: A.local.astype("f"), 7: 1, 8: A.local}),
    ):  # fmt: skip
        assert_refused(function, good, wrong)
    bad = A.desc.copy()
    bad[4] = 0
    assert info(scalapack.pdpotrf, "L", 6, *a[:3], bad) == -605
    assert info(scalapack.pdtrsm, "L", "U", "N", "N", 6, 5, 1.0, *a[:3], bad, *b) == -1105
    frozen = A.local.copy(order="F")
    frozen.flags.writeable = False
    assert info(scalapack.pdpotrf, "L", 6, frozen, *a[1:]) == -3
    assert info(scalapack.pdposv, "L", 6, 3, frozen, *a[1:], *b) == -4
    if comm.size > 1:
        with pytest.raises(ValueError, match="different arguments"):
            scalapack.pdpotrs("LU"[comm.rank % 2], 6, 3, *a, *b)
    assert scalapack.pdpotrf("L", 0, A.local, 99, 99, A.desc) == 0
    assert scalapack.pdposv("L", 0, 3, A.local, 99, 99, A.desc, B.local, 1, 1, B.desc) == 0
    scalapack.pdtrsm("L", "L", "N", "N", 0, 3, 1.0, A.local, 99, 99, A.desc, B.local, 1, 1, B.desc)
    assert np.array_equal(B.local, B.before)
