"""ScaLAPACK's eigenproblems and singular values: within LAPACK's bounds; only one triangle is read and written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
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
    triangle,
)

from pdgemm import scalapack
from pdgemm.errors import LinAlgError

pytestmark = pytest.mark.mpi


def named(letter: str, ending: str) -> Any:
    """Return the name pdsyevd, pzheevd and so on."""
    return getattr(scalapack, f"p{letter}{'he' if letter in 'cz' else 'sy'}{ending}")


def hermitian(n: int, char: str, seed: int) -> np.ndarray:
    x = random((n, n), char, seed)
    return (x + x.conj().T).astype(char)


def values(char: str, n: int) -> np.ndarray:
    """Return an array for n eigenvalues and two more elements, filled with -9."""
    return np.full(n + 2, -9, np.zeros(0, char).real.dtype)


def are_pairs(H: np.ndarray, w: np.ndarray, V: np.ndarray, about: object) -> None:
    """Check |H V - V diag(w)| <= 30 n eps |H| and |V^H V - I| <= 30 n eps, as LAPACK's tests of xSYEVD."""
    n, eps = len(H), np.finfo(V.dtype).eps
    assert np.linalg.norm(H @ V - V * w, 1) <= 30 * n * eps * np.linalg.norm(H, 1), about
    assert np.linalg.norm(V.conj().T @ V - np.eye(len(w)), 1) <= 30 * n * eps, about


@pytest.mark.parametrize("letter", ON_RANKS)
def test_all_eigenvalues(comm: Any, contexts: list[int], letter: str) -> None:
    char, rng = LETTERS[letter], np.random.default_rng(17)
    for uplo, n in (("U", 1), ("L", 31), ("U", 31), ("l", 200))[: 4 if letter == "d" else 3]:
        H, inside = hermitian(n, char, n), triangle(n, uplo.upper())
        A, _, a = placed(np.where(inside, H, np.nan).astype(char), np.nan, contexts, rng)
        Z, there, z = placed(np.full((n, n), np.nan, char), 7, contexts, rng)
        w, alone = values(char, n), values(char, n)
        assert named(letter, "evd")("V", uplo, n, *a, w, *z) == 0
        assert named(letter, "evd")("N", uplo, n, *a, alone, None, None, None, None) == 0
        bound = 30 * n * np.finfo(char).eps * np.linalg.norm(H, 2)
        for each in (w, alone):
            assert abs(each[:n] - np.linalg.eigvalsh(H)).max() <= bound and (each[n:] == -9).all()
            assert all(np.array_equal(each, other) for other in comm.allgather(each))
        are_pairs(H, w[:n], gathered(comm, Z, there), (uplo, n))
        assert_unchanged(Z, there)
        assert A.local.tobytes() == A.before.tobytes()


@pytest.mark.parametrize("letter", ON_RANKS)
def test_part_of_the_spectrum(comm: Any, contexts: list[int], letter: str) -> None:
    """INFO, M and NZ are right; columns of Z beyond NZ and entries of w beyond M are unchanged."""
    char, rng = LETTERS[letter], np.random.default_rng(18)
    for number, n in enumerate((1, 24) if letter == "d" else (24,)):
        uplo, H = "LU"[number % 2], hermitian(n, char, n)
        exact = np.linalg.eigvalsh(H)
        middle = (exact[n // 3] + exact[n // 3 + 1]) / 2 if n > 1 else exact[0] - 1
        A, _, a = placed(np.where(triangle(n, uplo), H, np.nan).astype(char), np.nan, contexts, rng)
        for options, part in (
            (("A", None, None, None, None), slice(n)),
            (("V", middle, np.inf, None, None), slice(n // 3 + 1 if n > 1 else 0, n)),
            (("V", exact[-1] + 1, exact[-1] + 2, 0, 0), slice(0)),
            (("I", None, None, n // 2 + 1, n), slice(n // 2, n)),
            (("i", 0, 0, 1, 1), slice(1)),
        ):
            Z, there, z = placed(np.full((n, n), 5, char), 7, contexts, rng)
            w, alone, expected = values(char, n), values(char, n), exact[part]
            m, kind = len(expected), options[0]
            assert named(letter, "evr")("V", kind, uplo, n, *a, *options[1:], w, *z) == (0, m, m)
            assert named(letter, "evr")("N", kind, uplo, n, *a, *options[1:], alone, *[None] * 4) == (0, m, 0)
            bound = 30 * n * np.finfo(char).eps * np.linalg.norm(H, 2)
            for each in (w, alone):
                assert abs(each[:m] - expected).max(initial=0) <= bound and (each[m:] == -9).all(), options
            are_pairs(H, w[:m], gathered(comm, Z, there)[:, :m], options)
            chosen = np.zeros((n, n), bool)
            chosen[:, :m] = True
            assert_unchanged(Z, there, chosen)
        assert A.local.tobytes() == A.before.tobytes()


@pytest.mark.parametrize("letter", ON_RANKS)
def test_two_matrices(comm: Any, contexts: list[int], letter: str) -> None:
    """Eigenvalues equal LAPACK's xSYGVD; sub(A) holds V, and a triangle of sub(B) the factor of p?potrf."""
    char, rng = LETTERS[letter], np.random.default_rng(19)
    for kind, uplo, n in ((1, "L", 19), (2, "U", 19), (3, "L", 19), (np.int32(1), "U", 1)):
        H, P, inside = hermitian(n, char, n), positive(n, char, 2), triangle(n, uplo)
        (A, here, a), (B, _, b) = (
            placed(np.where(inside, x, np.nan).astype(char), np.nan, contexts, rng) for x in (H, P)
        )
        alone, w, kept = values(char, n), values(char, n), B.local.copy(order="F")
        assert named(letter, "gvd")(kind, "N", uplo, n, *a, *b, alone) == 0
        assert A.local.tobytes() == A.before.tobytes()
        factor = B.local.copy(order="F")
        B.local[...] = kept
        assert named(letter, "gvd")(kind, "V", uplo, n, *a, *b, w) == 0
        assert factor.tobytes() == B.local.tobytes()
        B.local[...] = kept
        assert getattr(scalapack, f"p{letter}potrf")(uplo, n, *b) == 0
        assert factor.tobytes() == B.local.tobytes()
        exact, V = scipy.linalg.eigvalsh(H, P, type=int(kind)), gathered(comm, A, here)
        scale = np.linalg.norm(H, 1) * (np.linalg.norm(np.linalg.inv(P), 1) if kind == 1 else np.linalg.norm(P, 1))
        bound = 30 * n * np.finfo(char).eps * np.linalg.cond(P, 1) * scale
        for each in (w, alone):
            assert abs(each[:n] - exact).max() <= bound and (each[n:] == -9).all(), (kind, uplo)
        left, right = ((H @ V, P @ V * w[:n]), (H @ (P @ V), V * w[:n]), (P @ (H @ V), V * w[:n]))[int(kind) - 1]
        assert np.linalg.norm(left - right, 1) <= bound * np.linalg.norm(P, 1) * np.linalg.norm(V, 1), (kind, uplo)
        metric = np.linalg.inv(P) if kind == 3 else P
        apart = np.linalg.norm(V.conj().T @ metric @ V - np.eye(n), 1)
        assert apart <= 30 * n * np.finfo(char).eps * np.linalg.cond(P, 1), (kind, uplo)
        assert_unchanged(A, here)


@pytest.mark.parametrize("letter", ON_RANKS)
def test_singular_values(comm: Any, contexts: list[int], letter: str) -> None:
    """|A - U S V^H| <= 30 n eps |A|, U^H U = V^H V = I, as LAPACK's xGESVD tests; only requested arrays are written."""
    char, rng = LETTERS[letter], np.random.default_rng(22)
    function, eps = getattr(scalapack, f"p{letter}gesvd"), float(np.finfo(char).eps)
    shapes = (24, 24), (31, 7), (9, 40), (1, 1), (0, 4)
    for (m, n), jobs in zip(shapes if letter == "d" else shapes[1:2], ("VV", "vV", "VV", "NV", "VV")):
        k, matrix = min(m, n), random((m, n), char, m + n)
        A, _, a = placed(matrix, 7, contexts, rng)
        for jobu, jobvt in (jobs, "NN", "VN", "nV"):
            U, left, u = placed(np.full((m, k), np.nan, char), 7, contexts, rng)
            V, right, vt = placed(np.full((k, n), np.nan, char), 7, contexts, rng)
            s = values(char, k)
            with_u, with_v = jobu in "vV", jobvt in "vV"
            arguments = *(u if with_u else [None] * 4), *(vt if with_v else [None] * 4)
            assert function(jobu, jobvt, m, n, *a, s, *arguments) == 0
            exact = np.linalg.svd(matrix, compute_uv=False)
            assert abs(s[:k] - exact).max(initial=0) <= 30 * max(m, n) * eps * max(exact, default=0)
            assert (s[k:] == -9).all() and all(np.array_equal(s, other) for other in comm.allgather(s))
            for X, window, wanted in ((U, left, with_u), (V, right, with_v)):
                assert_unchanged(X, window, wanted)
            if not (k and with_u and with_v):
                continue
            P, Qh = gathered(comm, U, left), gathered(comm, V, right)
            bound = 30 * max(m, n) * eps
            assert np.linalg.norm(matrix - P * s[:k] @ Qh, 1) <= bound * np.linalg.norm(matrix, 1), (m, n)
            for gram in (P.conj().T @ P, Qh @ Qh.conj().T):
                assert np.linalg.norm(gram - np.eye(k), 1) <= bound, (m, n)
        assert A.local.tobytes() == A.before.tobytes()


def test_illegal_arguments(comm: Any, contexts: list[int]) -> None:
    """INFO numbers the arguments as ScaLAPACK does, and for p?sygvd as LAPACK does.

    If vectors are not requested, their arguments are ignored.
    """
    A, Z, V = (Global(hermitian(12, "d", s), contexts[0], (3, 2)) for s in (1, 2, 3))
    a, z, vt, w = (A.local, 1, 2, A.desc), (Z.local, 2, 1, Z.desc), (V.local, 2, 1, V.desc), values("d", 6)
    frozen, short, single = w.copy(), w[:5], w.astype("f")
    frozen.flags.writeable = False
    evd, evr = ["V", "L", 6, *a, w, *z], ["V", "I", "L", 6, *a, 0.0, 1.0, 2, 4, w, *z]
    svd = ["V", "V", 6, 4, *a, w, *z, *vt]
    for function, good, wrong in (
        (scalapack.pdsyevd, evd, {
            1: "A", 2: "X", 3: -1, 4: None, 5: 8, 6: 0, 7: [1], 8: short, 9: A.local, 10: 8, 11: 8, 12: A.desc[:8],
        }),
        (scalapack.pdsyevd, ["N", "L", 6, *a, w, *[None] * 4], {3: 2.5, 8: frozen}),
        (scalapack.pdsyevr, evr, {
            1: 0, 2: "X", 3: "N", 4: -1, 5: a, 6: 8, 7: 0, 8: [0], 11: 0, 12: 1, 15: single, 16: A.local, 17: 8,
            18: 0, 19: [1],
        }),
        (scalapack.pdsyevr, evr, {11: 7, 12: 7, 15: w.tolist()}),
        (scalapack.pdsyevr, changed(evr, _2="V"), {9: "a", 10: 0.0}),
        (scalapack.pdsyevr, changed(evr, _2="V"), {9: 1j, 10: np.nan}),
        (scalapack.pdsygvd, [1, "V", "L", 6, *a, *z, w], {
            1: 4, 2: "X", 3: "N", 4: -1, 5: frozen, 6: 8, 7: 8, 8: [1], 9: A.local, 10: 8, 11: 0, 12: [1], 13: short,
        }),
        (scalapack.pdsygvd, [1, "N", "L", 6, *a, *z, w], {1: 1.0}),
        (scalapack.pdgesvd, svd, {
            1: "A", 2: "X", 3: -1, 4: 2.5, 5: None, 6: 8, 7: 0, 8: [1], 9: w[:3], 10: A.local, 11: 8, 12: 10,
            13: A.desc[:8], 14: Z.local, 15: 10, 16: 0, 17: [0],
        }),
        (scalapack.pdgesvd, svd, {9: frozen}),
    ):  # fmt: skip
        assert_refused(function, good, wrong, 2 * (function is scalapack.pdsyevr))  # M and NZ are returned
    assert all(np.array_equal(X.local, X.before) for X in (A, Z, V)) and (w == -9).all()
    bad = A.desc.copy()
    bad[4] = 0
    for function, good, number in (
        *((scalapack.pdsyevd, evd, number) for number in (7, 12)),
        *((scalapack.pdgesvd, svd, number) for number in (8, 13, 17)),
    ):
        assert info(function, *changed(good, **{f"_{number}": bad})) == -100 * number - 5
    assert info(scalapack.pdsyevr, *evr[:-1], bad) == -1905
    if comm.size > 1:
        with pytest.raises(ValueError, match="different arguments"):
            scalapack.pdsyevr(*changed(evr, _12=4 + comm.rank % 2))
        with pytest.raises(ValueError, match="different arguments"):
            scalapack.pdgesvd("NV"[comm.rank % 2], *svd[1:])
    with pytest.raises(LinAlgError, match="NaN"):
        scalapack.pdgesvd("V", "V", 6, 4, np.full_like(A.local, np.nan), *a[1:], w, *z, *vt)
    with pytest.raises(LinAlgError, match="NaN"):
        scalapack.pdsyevd("V", "L", 6, np.full_like(A.local, np.nan), 1, 1, A.desc, w, *z)
    assert scalapack.pdgesvd("V", "V", 0, 4, A.local, 99, 99, A.desc, w, *z, *vt) == 0
    assert scalapack.pdsyevd("V", "L", 0, A.local, 99, 99, A.desc, w, Z.local, 99, 99, Z.desc) == 0
    assert scalapack.pdsyevr("V", "V", "L", 0, *a, 2, 1, 0, 0, w, *z) == (0, 0, 0)
    assert scalapack.pdsyevr("V", "I", "L", 0, *a, 2, 1, 1, 0, w, *z) == (0, 0, 0)
    assert scalapack.pdsygvd(1, "V", "L", 0, *a, *z, w) == 0
    assert all(np.array_equal(X.local, X.before) for X in (A, Z, V))
