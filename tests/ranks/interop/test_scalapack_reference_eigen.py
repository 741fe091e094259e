"""Eigenproblems, SVD, pivoted QR and inverses against ScaLAPACK itself, as in test_scalapack_reference.py."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from scalapack_arrays import LETTERS, Global, changed, fortran, gathered, random, with_context
from tiers import square_grid

from pdgemm import scalapack

pytestmark = [pytest.mark.mpi, square_grid]
N = 22


class Sides:
    """A matrix in square blocks on a context of ours and one of theirs, and the arguments of both."""

    def __init__(self, values: np.ndarray, grid: tuple[int, int], block: int, at: int = 1) -> None:
        self.matrix = Global(values, grid[0], (block, block))
        self.mine, self.other = (self.matrix.local.copy(order="F") for _ in range(2))
        self.ours = [self.mine, at, at, self.matrix.desc]
        self.theirs = [self.other, at, at, with_context(self.matrix.desc, grid[1])]

    def whole(self, comm: Any, local: np.ndarray) -> np.ndarray:
        """The matrix of which this is the local array."""
        self.matrix.local[...] = local
        return gathered(comm, self.matrix, np.s_[:, :])

    def difference(self) -> float:
        """The largest |X1 - X2| of all elements, those around sub(A) included, which both leave as they are."""
        return float(np.abs(self.mine - self.other).max())


def hermitian(n: int, char: str) -> np.ndarray:
    x = random((n, n), char, 3)
    return (x + x.conj().T).astype(char)


def workspaces(letter: str) -> list[Any]:
    """work and lwork, for complex types rwork and lrwork, iwork and liwork: more than enough."""
    size = 20_000
    real = [np.zeros(size, LETTERS[letter]), size]
    if letter in "cz":
        real += [np.zeros(size, np.zeros(0, LETTERS[letter]).real.dtype), size]
    return [*real, np.zeros(size, np.intc), size]


def both(reference: ctypes.CDLL, letter: str, ending: str) -> tuple[Any, Any]:
    name = f"p{letter}{'he' if letter in 'cz' else 'sy'}{ending}"
    return getattr(scalapack, name), getattr(reference, f"{name}_")


@pytest.mark.parametrize("letter", LETTERS)
def test_all_eigenvalues(comm: Any, reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """To 30 n eps |A|; the cosine of the angle of their vector and ours is 1."""
    char = LETTERS[letter]
    H, (ours, theirs) = hermitian(N, char), both(reference, letter, "evd")
    eps = 30 * N * np.finfo(char).eps * np.linalg.norm(H, 2)
    for grid, uplo, block in itertools.product(grids, "LU", (3, 5)):
        A, Z = Sides(H, grid, block), Sides(np.zeros((N, N), char), grid, block)
        w, values = (np.zeros(N, np.zeros(0, char).real.dtype) for _ in range(2))
        info = np.full(1, -9, np.intc)
        assert ours("V", uplo, N, *A.ours, w, *Z.ours) == 0
        fortran(theirs, "V", uplo, N, *A.theirs, values, *Z.theirs, *workspaces(letter), info)
        assert info[0] == 0
        assert abs(w - values).max() <= eps, (grid, uplo, block)
        V, U = (Z.whole(comm, local) for local in (Z.mine, Z.other))
        gap = np.diff(values).min()
        assert abs(abs((V.conj() * U).sum(axis=0)) - 1).max() <= eps / gap, (grid, uplo, block)


@pytest.mark.parametrize("letter", LETTERS)
def test_part_of_the_spectrum(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """M and NZ, eigenvalues to 30 n eps |A|, and the columns of Z beyond NZ, which are zero before and after."""
    char = LETTERS[letter]
    H, (ours, theirs), real = hermitian(N, char), both(reference, letter, "evr"), np.zeros(0, char).real.dtype
    exact, eps = np.linalg.eigvalsh(H), 30 * N * np.finfo(char).eps * np.linalg.norm(H, 2)
    low, high = ((exact[at] + exact[at + 1]) / 2 for at in (4, 15))
    cases = itertools.product(grids, "LU", (("A", 0, 0, 0, 0), ("V", low, high, 0, 0), ("I", 0, 0, 3, 9)), "VN")
    for grid, uplo, (kind, vl, vu, il, iu), jobz in itertools.islice(cases, 0, None, 1 if letter in "dz" else 5):
        A, Z = Sides(H, grid, 4), Sides(np.zeros((N, N), char), grid, 4)
        ends = np.array(vl, real), np.array(vu, real)
        w, values, info, m, nz = np.zeros(N, real), np.zeros(N, real), *np.full((3, 1), -9, np.intc)
        counts = ours(jobz, kind, uplo, N, *A.ours, *map(float, ends), il, iu, w, *Z.ours)
        options = jobz, kind, uplo, N, *A.theirs, *ends, il, iu, m, nz, values, *Z.theirs, *workspaces(letter), info
        fortran(theirs, *options)
        assert counts == (info[0], m[0], nz[0] if jobz == "V" else 0), (grid, uplo, kind)
        assert counts[1] == {"A": N, "V": 11, "I": 7}[kind]
        assert abs(w - values)[: m[0]].max() <= eps, (grid, uplo, kind)


@pytest.mark.parametrize("letter", LETTERS)
def test_singular_values(comm: Any, reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """To 30 n eps |A|; the cosine of the angle of their vector and ours is 1, and U and V are turned alike."""
    char, real = LETTERS[letter], np.zeros(0, LETTERS[letter]).real.dtype
    ours, theirs = getattr(scalapack, f"p{letter}gesvd"), getattr(reference, f"p{letter}gesvd_")
    for grid, (m, n), block, jobs in itertools.product(grids, ((N, N), (N, 13), (13, N)), (3, 5), ("VV", "NN", "VN")):
        whole, k = random((m, n), char, 4), min(m, n)
        A, U, V = (Sides(x, grid, block) for x in (whole, np.zeros((m, k), char), np.zeros((k, n), char)))
        s, values, info = np.zeros(k, real), np.zeros(k, real), np.full(1, -9, np.intc)
        assert ours(*jobs, m, n, *A.ours, s, *U.ours, *V.ours) == 0
        work = workspaces(letter)[: 4 if letter in "cz" else 2]
        work = work[:3] if letter in "cz" else work  # rwork has no length
        fortran(theirs, *jobs, m, n, *A.theirs, values, *U.theirs, *V.theirs, *work, info)
        assert info[0] == 0
        eps = 30 * N * np.finfo(char).eps * np.linalg.norm(whole, 2)
        assert abs(s - values).max() <= eps, (grid, m, n, block, jobs)
        turns = []
        for X, axis, job in ((U, 0, jobs[0]), (V, 1, jobs[1])):
            mine, other = (X.whole(comm, local) for local in (X.mine, X.other))
            if job == "N":
                assert not mine.any()
                continue
            turns.append((mine.conj() * other).sum(axis=axis))
            assert abs(abs(turns[-1]) - 1).max() <= eps / abs(np.diff(values)).min(), (grid, m, n, block, jobs)
        assert len(turns) < 2 or abs(turns[0] - turns[1].conj()).max() <= eps / abs(np.diff(values)).min()


@pytest.mark.parametrize("letter", LETTERS)
def test_qr_with_column_pivoting(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """The same ipiv, R, reflectors and tau, of submatrices, where there are no more columns than rows and than 64."""
    char = LETTERS[letter]
    ours, theirs = getattr(scalapack, f"p{letter}geqpf"), getattr(reference, f"p{letter}geqpf_")
    for grid, (m, n), block in itertools.product(grids, ((N, N), (N, 9)), (3, 5)):
        whole = random((m + block, n + block), char, 6)
        A = Sides(whole, grid, block, block + 1)
        length = A.mine.shape[1]
        (ipiv, pivots), info = np.full((2, length), -9, np.intc), np.full(1, -9, np.intc)
        tau, factors = (np.full(length, -9, char) for _ in range(2))
        assert ours(m, n, *A.ours, ipiv, tau) == 0
        work = workspaces(letter)[: 4 if letter in "cz" else 2]
        fortran(theirs, m, n, *A.theirs, pivots, factors, *work, info)
        assert info[0] == 0
        assert np.array_equal(ipiv, pivots), (grid, m, n, block)
        eps = 100 * N * np.finfo(char).eps
        assert A.difference() <= eps and abs(tau - factors).max() <= eps, (grid, m, n, block)


@pytest.mark.parametrize("letter", LETTERS)
def test_inverses(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """Elements to 30 n eps cond(A) |A^-1|, with the factors and pivots of theirs; INFO of singular factors."""
    char = LETTERS[letter]
    x = random((N, N), char, 5)
    definite = (x @ x.conj().T / N + 2 * np.eye(N)).astype(char)
    for grid, block, singular in itertools.product(grids, (3, 5), (False, True)):
        ipiv, info = np.zeros(2 * N, np.intc), np.full(1, -9, np.intc)
        for name, M, options in (("ge", x, []), ("po", definite, ["L"]), ("po", definite, ["U"])):
            pivots, work = ([ipiv], workspaces("d" if letter in "dz" else "s")) if name == "ge" else ([], [])
            work = [np.zeros(20_000, char), *work[1:]] if work else []
            whole = np.full((N + block, N + block), 7, char)
            whole[block:, block:] = M
            A = Sides(whole, grid, block, block + 1)
            sizes = [N, N] if name == "ge" else [*options, N]
            fortran(getattr(reference, f"p{letter}{name}trf_"), *sizes, *A.theirs, *pivots, info)
            assert info[0] == 0
            rows, cols = (x.ravel() for x in A.matrix.here)
            if singular:
                A.other[: len(rows), : len(cols)][(rows[:, None] == block + 12) & (cols == block + 12)] = 0
            A.mine[...] = A.other
            found = getattr(scalapack, f"p{letter}{name}tri")(*sizes[-len(options) - 1 :], *A.ours, *pivots)
            fortran(
                getattr(reference, f"p{letter}{name}tri_"), *sizes[-len(options) - 1 :], *A.theirs, *pivots, *work, info
            )
            assert found == info[0] == (13 if singular else 0), (grid, block, name)
            if not singular:
                eps = 30 * N * np.finfo(char).eps * np.linalg.cond(M) * np.linalg.norm(np.linalg.inv(M), 2)
                assert A.difference() <= eps, (grid, block, name)


def test_two_matrices(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """Eigenvalues of p?sygvx, and INFO as LAPACK has it where theirs says that B is not positive definite."""
    H, x = hermitian(N, "d"), random((N, N), "d", 5)
    P = x @ x.T / N + np.eye(N)
    eps = 30 * N * np.finfo(float).eps * np.linalg.norm(H, 2) * np.linalg.cond(P) * max(1, np.linalg.norm(P, 2))
    for grid, kind, uplo in itertools.product(grids, (1, 2, 3), "LU"):
        A, B, Z = (Sides(values, grid, 4) for values in (H, P, np.zeros((N, N))))
        w, values, info, m, nz = np.zeros(N), np.zeros(N), *np.full((3, 1), -9, np.intc)
        assert scalapack.pdsygvd(kind, "V", uplo, N, *A.ours, *B.ours, w) == 0
        clusters = np.zeros(N, np.intc), np.zeros(200, np.intc), np.zeros(100)
        fortran(
            reference.pdsygvx_, kind, "N", "A", uplo, N, *A.theirs, *B.theirs, 0.0, 0.0, 0, 0, 0.0, m, nz, values, 0.0,
            *Z.theirs, *workspaces("d"), *clusters, info,
        )  # fmt: skip
        assert info[0] == 0 and m[0] == N
        assert abs(w - values).max() <= eps, (grid, kind, uplo)


def test_illegal_arguments(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """INFO of calls with one illegal argument.

    But for the arguments of Z in PDSYEVR, which counts them 2 too high: its DESCZ, number 19, is number 21 there; for
    rows and columns outside of A and Z: it names entry M_ or N_ of the descriptor, and we the first row or column; for
    IA = 0 in PDPOTRI, which blames JA, and MB_ = 0, by which it divides; and for N = -1 in PDGESVD, which blames JOBU.
    """
    seen = set()
    for grid in grids:
        A, Z, V = (Sides(x, grid, 4) for x in (hermitian(8, "d"), *np.zeros((2, 8, 8))))
        w, ipiv, counts = np.zeros(8), np.zeros(20, np.intc), [np.zeros(1, np.intc), np.zeros(1, np.intc)]
        bad = []
        for entry, value in ((2, -1), (3, 0), (4, 0), (5, -1), (6, 99), (7, 99), (8, 0)):
            bad.append(A.ours[3].copy())
            bad[-1][entry] = value
        evd, evr, svd = ["V", "L", 8], ["V", "I", "L", 8], ["V", "V", 8, 8]
        for name, before, between, vector, wrong in (
            ("pdsyevd", evd, [], [w], {
                1: ["X"], 2: ["X"], 3: [-1], 5: [0], 6: [0], 7: bad, 10: [0], 11: [0], 12: bad,
            }),
            ("pdsyevr", evr, [0.0, 1.0, 2, 4], [w], {
                1: ["X"], 2: ["X"], 3: ["X"], 4: [-1], 6: [0], 7: [0], 8: bad, 11: [0, 9], 12: [1, 9],
            }),
            ("pdsyevr", ["V", "V", "L", 8], [0.0, 1.0, 0, 0], [w], {10: [0.0, -1.0]}),
            ("pdgetri", [8], [], [ipiv], {1: [-1], 3: [0], 4: [0], 5: bad}),
            ("pdpotri", ["L", 8], [], [], {1: ["X"], 2: [-1], 5: [0], 6: bad[:2]}),
            ("pdgeqpf", [8, 8], [], [ipiv, np.zeros(20)], {1: [-1], 2: [-1], 4: [0], 5: [0], 6: bad}),
            ("pdgesvd", svd, [], [w], {
                1: ["X"], 2: ["X"], 3: [-1], 6: [0], 7: [0], 8: bad, 11: [0], 12: [0], 13: bad, 15: [0],
                16: [0], 17: bad,
            }),
        ):  # fmt: skip
            ours, theirs = [*before, *A.ours, *between], [*before, *A.theirs, *between]
            vectors = [Z] if "sy" in name else [Z, V] if name == "pdgesvd" else []
            ours += [*vector, *itertools.chain(*(X.ours for X in vectors))]
            theirs += [*(counts if name == "pdsyevr" else []), *vector, *itertools.chain(*(X.theirs for X in vectors))]
            theirs += workspaces("d")[: {"pdpotri": 0, "pdgeqpf": 2, "pdgesvd": 2}.get(name, 4)]
            for number, value in ((number, value) for number, values in wrong.items() for value in values):
                info, other = np.full(1, -9, np.intc), value
                if isinstance(value, np.ndarray):
                    other = with_context(value, grid[1])
                fortran(getattr(reference, f"{name}_"), *changed(theirs, **{f"_{number}": other}), info)
                with pytest.raises(scalapack.IllegalArgument) as caught:
                    getattr(scalapack, name)(*changed(ours, **{f"_{number}": value}))
                assert caught.value.info == info[0], (name, number, value)
                seen.add((name, caught.value.info))
    assert len(seen) >= 65
    reference._gfortran_flush_i4(None)  # messages, into what the test has captured
