"""pdgemm.scalapack against ScaLAPACK itself: copies of the same local arrays, the same descriptors, the same answers.

Debian's library, called through ctypes, in an environment whose mpi4py uses the MPI that the library is linked to:
scripts/setup_parallel_hdf5.sh makes one.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from scalapack_arrays import LETTERS, SIZES, STARTS, Global, fortran, gridinfo, random, with_context
from tiers import square_grid

from pdgemm import scalapack
from pdgemm.interop.scalapack.arguments import Sub

pytestmark = [pytest.mark.mpi, square_grid]

WHOLE = range(31, 36)
BLOCKS = range(1, 7)


class Both:
    """A window of a random matrix in random blocks: array, first row and column and descriptor, for us and for them."""

    def __init__(
        self,
        rng: np.random.Generator,
        char: str,
        grid: tuple[int, int],
        extents: tuple[int, ...],
        two: bool = True,
        whole: tuple[int, int] | None = None,
    ) -> None:
        """two : may the descriptor be of type 2?   whole : rows and columns of the matrix."""
        anywhere, blocks = (tuple(rng.choice(choices, 2).tolist()) for choices in (WHOLE, BLOCKS))
        whole = whole or anywhere
        sources = tuple(int(rng.integers(p)) for p in scalapack.blacs_gridinfo(grid[0])[:2])
        first = tuple(rng.integers(1, 15, 2).tolist()) if two and rng.random() < 0.5 else None
        self.matrix = Global(random(whole, char, int(rng.integers(1000))), grid[0], blocks, sources, first)
        starts = rng.choice(STARTS, 2).tolist()
        at = [min(start, n - extent + 1) for start, n, extent in zip(starts, whole, extents)]
        self.window = tuple(slice(start - 1, start - 1 + extent) for start, extent in zip(at, extents))
        self.sub = self.matrix.values[self.window]
        self.inside = self.local(np.ones(extents, bool))
        desc = self.matrix.desc.astype(np.intc)
        desc[1] = grid[1]
        self.ours = self.matrix.local, *at, self.matrix.desc
        self.theirs = self.matrix.local.copy(order="F"), *at, desc

    def local(self, sub: np.ndarray) -> np.ndarray:
        """The local array of a matrix with these values in the window and zeros elsewhere."""
        values = np.zeros(self.matrix.values.shape, sub.dtype)
        values[self.window] = sub
        return self.matrix.dealt(values, np.zeros(self.matrix.local.shape, sub.dtype))

    def erase(self) -> None:
        """Where beta is 0, sub(C) must not be read."""
        self.ours[0][self.inside] = self.theirs[0][self.inside] = np.nan

    def difference(self) -> np.ndarray:
        """|C1 - C2|; outside the window, gaps and guards included, both are bit by bit what they were."""
        for local in (self.ours[0], self.theirs[0]):
            assert local[~self.inside].tobytes() == self.matrix.before[~self.inside].tobytes()
        return np.abs(self.ours[0] - self.theirs[0])


@pytest.mark.parametrize("letter", LETTERS)
def test_gemm(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """|C1 - C2| <= 16 eps (|alpha| |A| |B| + |beta| |C|), element by element."""
    char, rng = LETTERS[letter], np.random.default_rng(7)
    ours, theirs = getattr(scalapack, f"p{letter}gemm"), getattr(reference, f"p{letter}gemm_")
    alphas = [2, 3] + [2 - 1j] * (letter in "cz")
    for grid, (m, n, k), ta, tb in itertools.product(grids, SIZES if letter in "dz" else SIZES[:1], "NTC", "NTC"):
        A = Both(rng, char, grid, (m, k) if ta == "N" else (k, m))
        B = Both(rng, char, grid, (k, n) if tb == "N" else (n, k))
        C = Both(rng, char, grid, (m, n))
        alpha, beta = (rng.choice(choices).astype(char) for choices in (alphas, [0, 1, 3]))
        if beta == 0:
            C.erase()
        ours(ta, tb, m, n, k, alpha, *A.ours, *B.ours, beta, *C.ours)
        fortran(theirs, ta, tb, m, n, k, alpha, *A.theirs, *B.theirs, beta, *C.theirs)
        a, b = (abs(x.sub if trans == "N" else x.sub.T) for x, trans in ((A, ta), (B, tb)))
        scale = C.local(abs(alpha) * (a @ b) + abs(beta) * abs(C.sub))
        assert (C.difference() <= 16 * np.finfo(char).eps * scale).all(), (grid, m, n, k, ta, tb, alpha, beta)
        assert not A.difference().any() and not B.difference().any()


def triangular(X: Both, uplo: str) -> np.ndarray:
    """The window with a heavy diagonal, on both sides, and its triangle."""
    X.sub = X.sub + 8 * np.eye(*X.sub.shape, dtype=X.sub.dtype)
    for local in (X.ours[0], X.theirs[0]):
        local[X.inside] = X.local(X.sub)[X.inside]
    X.matrix.before = X.ours[0].copy(order="F")
    return np.asarray(np.tril(X.sub) if uplo == "L" else np.triu(X.sub))


@pytest.mark.parametrize("letter", LETTERS)
def test_triangular_solves_and_products(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """|B1 - B2| <= 32 eps times the largest elements that meet; no more is written than by them."""
    char, rng = LETTERS[letter], np.random.default_rng(13)
    cases = list(itertools.product(grids, ("trsm", "trmm"), "LR", "LU", "NTC", "NU"))
    for grid, name, side, uplo, trans, diag in cases if letter == "z" else cases[::5]:
        m, n = SIZES[0][:2]
        order = m if side == "L" else n
        A, B = Both(rng, char, grid, (order, order)), Both(rng, char, grid, (m, n))
        triangular(A, uplo)
        alpha = np.asarray(rng.choice([2, 0.5, 2 - 1j] if letter in "cz" else [2, 0.5, 0])).astype(char)
        options = side, uplo, trans, diag, m, n, alpha
        if diag == "U":  # the matrix is then far from normal
            A.ours[0][A.inside] /= 32
            A.theirs[0][A.inside] /= 32
            A.matrix.before = A.ours[0].copy(order="F")
        getattr(scalapack, f"p{letter}{name}")(*options, *A.ours, *B.ours)
        fortran(getattr(reference, f"p{letter}{name}_"), *options, *A.theirs, *B.theirs)
        assert (B.difference() <= 32 * 16 * np.finfo(char).eps).all(), (grid, name, *options)
        assert not A.difference().any()


@pytest.mark.parametrize("name", ["pssyrk", "pdsyrk", "pcsyrk", "pzsyrk", "pcherk", "pzherk"])
def test_one_triangle_of_a_product(reference: ctypes.CDLL, grids: list[tuple[int, int]], name: str) -> None:
    """|C1 - C2| <= 16 eps (|alpha| |A| |A| + |beta| |C|), the other triangle included."""
    char, other, rng = LETTERS[name[1]], "C" if name.endswith("herk") else "T", np.random.default_rng(14)
    number = np.dtype(char).type if other == "T" else np.zeros(0, char).real.dtype.type
    for grid, uplo, trans in itertools.product(grids, "LU", ("N", other)):
        n, k, _ = SIZES[0]
        A, C = Both(rng, char, grid, (n, k) if trans == "N" else (k, n)), Both(rng, char, grid, (n, n))
        options = uplo, trans, n, k, number(2)
        getattr(scalapack, name)(*options, *A.ours, number(3), *C.ours)
        fortran(getattr(reference, f"{name}_"), *options, *A.theirs, number(3), *C.theirs)
        a = abs(A.sub if trans == "N" else A.sub.T)
        scale = C.local(2 * (a @ a.T) + 3 * abs(C.sub))
        assert (C.difference() <= 16 * np.finfo(char).eps * scale).all(), (grid, uplo, trans)


@pytest.mark.parametrize("letter", LETTERS)
def test_cholesky(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """Factors and solutions of well-conditioned matrices to 256 eps, INFO of others.

    Blocks are square, and sub(A) begins at the edge of one: ScaLAPACK takes no others.
    """
    char, rng, n, nrhs = LETTERS[letter], np.random.default_rng(15), 22, 3
    x = random((n, n), char, 5)
    good = (x @ x.conj().T / n + 2 * np.eye(n)).astype(char)
    bad = good.copy()
    bad[16, 16] = -1
    for (ours, theirs), uplo, block, values in itertools.product(grids, "LU", (3, 5), (good, bad)):
        whole, right = np.full((30, 30), 7, char), random((30, 8), char, 6)
        whole[block : block + n, block : block + n] = values
        first = tuple(int(rng.integers(p)) for p in scalapack.blacs_gridinfo(ours)[:2])
        A, B = (Global(x, ours, (block, block), first) for x in (whole, right))
        at = block + 1
        found = []
        for name, more in (("potrf", ()), ("potrs", (nrhs,)), ("posv", (nrhs,))):
            locals_ = [(X.local.copy(order="F"), X.local.copy(order="F")) for X in (A, B)]
            if name == "potrs" and values is good:
                locals_[0] = found[-1]
            elif name == "potrs":
                continue
            (mine, other), (b, c) = locals_
            said = np.zeros(1, np.intc)
            sides = [(mine, at, at, A.desc)], [(other, at, at, with_context(A.desc, theirs))]
            if more:
                sides[0].append((b, at, 1, B.desc))
                sides[1].append((c, at, 1, with_context(B.desc, theirs)))
            info = getattr(scalapack, f"p{letter}{name}")(uplo, n, *more, *itertools.chain(*sides[0]))
            fortran(getattr(reference, f"p{letter}{name}_"), uplo, n, *more, *itertools.chain(*sides[1]), said)
            assert info == said[0] == (0 if values is good else 17)
            if values is good:
                assert (abs(mine - other) <= 256 * np.finfo(char).eps).all(), (ours, uplo, block, name)
                assert (abs(b - c) <= 256 * np.finfo(char).eps).all(), (ours, uplo, block, name)
            found.append((mine, other))


@pytest.mark.parametrize("letter", LETTERS)
def test_lu(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """The same pivots in the same entries of ipiv; factors, and solutions with theirs, to 4096 eps."""
    char, rng, n, nrhs = LETTERS[letter], np.random.default_rng(16), 22, 3
    eps = 4096 * np.finfo(char).eps
    for (ours, theirs), block, singular in itertools.product(grids, (3, 5), (False, True)):
        whole, right = random((30, 30), char, 4), random((30, 8), char, 6)
        if singular:
            whole[:, block + 9] = 0  # exactly, in any order of operations
        first = tuple(int(rng.integers(p)) for p in scalapack.blacs_gridinfo(ours)[:2])
        A, B = (Global(x, ours, (block, block), first) for x in (whole, right))
        (mine, other), (b, c) = ((X.local.copy(order="F"), X.local.copy(order="F")) for X in (A, B))
        at, length = block + 1, A.local.shape[0] + block
        ipiv, pivots, info = np.full(length, -9, np.intc), np.full(length, -9, np.intc), np.zeros(1, np.intc)
        desc_a, desc_b = (with_context(X.desc, theirs) for X in (A, B))
        found = getattr(scalapack, f"p{letter}getrf")(n, n, mine, at, at, A.desc, ipiv)
        fortran(getattr(reference, f"p{letter}getrf_"), n, n, other, at, at, desc_a, pivots, info)
        assert found == info[0] == (10 if singular else 0)
        window = A.dealt(np.zeros(A.values.shape), np.zeros(A.local.shape))
        inside = np.zeros(A.values.shape)
        inside[block : block + n, block : block + n] = 1
        assert (abs(mine - other) <= eps * A.dealt(inside, window)).all(), (ours, block)
        used = slice(A.inside[0].stop)
        here = A.here[0].ravel()
        with_pivots = (here >= block) & (here < block + n)
        assert np.array_equal(ipiv[used][with_pivots], pivots[used][with_pivots]), (ours, block)
        for trans in "NTC" * (not singular):
            b[...] = c[...] = B.local
            assert (
                getattr(scalapack, f"p{letter}getrs")(trans, n, nrhs, other, at, at, A.desc, pivots, b, at, 1, B.desc)
                == 0
            )
            fortran(
                getattr(reference, f"p{letter}getrs_"),
                *(trans, n, nrhs, other, at, at, desc_a, pivots, c, at, 1, desc_b, info),
            )
            assert (abs(b - c) <= eps * max(1, abs(c).max())).all(), (ours, block, trans)


@pytest.mark.parametrize("letter", "dz")
def test_qr(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """The same R, reflectors and tau; blocks are square, as ScaLAPACK wants them."""
    char, (m, n) = LETTERS[letter], (30, 22)
    for (ours, theirs), block in itertools.product(grids, (3, 8)):
        pr, pc = scalapack.blacs_gridinfo(ours)[:2]
        at, whole = block + 1, random((m + block + 2, n + block + 2), char, block)
        A = Global(whole, ours, (block, block), (pr - 1, pc - 1))
        mine, other = A.local.copy(order="F"), A.local.copy(order="F")
        tau, factors = (np.full(A.local.shape[1], -9, char) for _ in range(2))
        work, info = np.zeros(block * (sum(whole.shape) + 2 * block), char), np.zeros(1, np.intc)
        assert getattr(scalapack, f"p{letter}geqrf")(m, n, mine, at, at, A.desc, tau) == 0
        desc = with_context(A.desc, theirs)
        fortran(getattr(reference, f"p{letter}geqrf_"), m, n, other, at, at, desc, factors, work, len(work), info)
        assert info[0] == 0
        eps = 100 * m * np.finfo(char).eps
        assert (abs(mine - other) <= eps).all() and (abs(tau - factors) <= eps).all(), (ours, block)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (2, 1)])
def test_tran(reference: ctypes.CDLL, grids: list[tuple[int, int]], alpha: int, beta: int) -> None:
    """Exactly equal, since these factors leave one rounding at most."""
    rng = np.random.default_rng(8)
    for grid, (m, n, _) in itertools.product(grids, SIZES):
        A, C = Both(rng, "d", grid, (n, m)), Both(rng, "d", grid, (m, n))
        if beta == 0:
            C.erase()
        scalapack.pdtran(m, n, alpha, *A.ours, beta, *C.ours)
        fortran(reference.pdtran_, m, n, np.float64(alpha), *A.theirs, np.float64(beta), *C.theirs)
        assert (C.difference() == 0).all(), (grid, m, n)


def test_gemr2d(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """Exactly equal, between contexts of any two shapes."""
    rng = np.random.default_rng(9)
    for one, other, (m, n, _) in itertools.product(grids, grids, SIZES):
        A, B = (Both(rng, "d", grid, (m, n), two=False) for grid in (one, other))  # of type 1 alone
        B.erase()
        scalapack.pdgemr2d(m, n, *A.ours, *B.ours, grids[0][0])
        fortran(reference.pdgemr2d_, m, n, *A.theirs, *B.theirs, grids[0][1])
        assert (B.difference() == 0).all(), (one, other, m, n)


def test_gemr2d_among_processes_that_do_not_know_of_each_other(comm: Any, reference: ctypes.CDLL) -> None:
    """A on the first processes, B on the last ones: elsewhere CTXT_ is -1, and nothing else is read."""
    half = (comm.size + 1) // 2
    world = [scalapack.blacs_gridinit(comm, 1, comm.size), new_context(reference, range(comm.size))]
    homes = []
    for members in (range(half), range(comm.size - half, comm.size)):
        within = comm.Split(0 if comm.rank in members else 1)
        ours = scalapack.blacs_gridinit(within, 1, half) if comm.rank in members else -1
        homes.append((ours, new_context(reference, members)))
    assert [theirs == -1 for _, theirs in homes] == [ours == -1 for ours, _ in homes]
    rng = np.random.default_rng(10)
    values = [(100 * random((31, 35), "d", seed)).astype(np.intc) for seed in (1, 2)]
    for one, other, (m, n, _) in itertools.product(homes, homes, SIZES):
        blocks, (i, j) = rng.integers(1, 7, (2, 2)).tolist(), rng.integers(1, 8, 2).tolist()
        ours, theirs, local = [], [], []
        for (mine, their), whole, block in zip((one, other), values, blocks):
            if mine == -1:
                absent = np.full(9, -1, np.intc)
                ours += [None, 0, 0, absent]
                theirs += [np.zeros(1, np.intc), 0, 0, absent]
            else:
                X = Global(whole, mine, block)
                local += [X.local, X.local.copy(order="F")]
                desc = X.desc.astype(np.intc)
                desc[1] = their
                ours += [local[-2], i, j, X.desc]
                theirs += [local[-1], i, j, desc]
        scalapack.pigemr2d(m, n, *ours, world[0])
        fortran(reference.pigemr2d_, m, n, *theirs, world[1])
        for here, there in zip(local[::2], local[1::2]):
            assert np.array_equal(here, there), (m, n)
    for ours, theirs in (*homes, world):
        if ours != -1:
            scalapack.blacs_gridexit(ours)
            reference.Cblacs_gridexit(theirs)


def new_context(reference: ctypes.CDLL, members: range) -> int:
    """Theirs, of some processes in a row; -1 elsewhere.  Collective over all processes."""
    ictxt, map_ = ctypes.c_int(), np.array(members, np.intc)
    reference.Cblacs_get(-1, 0, ctypes.byref(ictxt))
    reference.Cblacs_gridmap(ctypes.byref(ictxt), ctypes.c_void_p(map_.ctypes.data), 1, 1, len(members))
    return ictxt.value


def test_empty_submatrices_and_processes_without_columns(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """Outside of the matrix, LLD_ = 1, k = 0: what the reference takes we take, and C is the same."""
    rng = np.random.default_rng(11)
    for grid, (m, n, k), empty in itertools.product(grids, [(0, 5, 3), (4, 0, 3), (4, 5, 0), (4, 5, 3)], (False, True)):
        A, C = Both(rng, "d", grid, (m, k), whole=(31, 3)), Both(rng, "d", grid, (m, n))  # A: few columns
        B = Both(rng, "d", grid, (k, n))
        calls = []
        for sides in zip(*(("ours", "theirs"),) * 3):
            a, b, c = (list(getattr(x, side)) for x, side in zip((A, B, C), sides))
            for x, extents in ((a, (m, k)), (b, (k, n)), (c, (m, n))):
                desc = x[3] = x[3].copy()
                if 0 in extents:
                    x[1:3] = 99, 98
                    desc[2:4] = [0, 0] if empty else desc[2:4]
                    desc[-1] = 1
                elif not x[0][:, :-1].size:  # no columns here
                    desc[-1] = 1
            calls.append((m, n, k, np.float64(2), *a, *b, np.float64(3), *c))
        scalapack.pdgemm("N", "N", *calls[0])
        fortran(reference.pdgemm_, "N", "N", *calls[1])
        assert (C.difference() <= 1e-13).all(), (grid, m, n, k)


def test_what_is_wrong_with_an_operand(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """INFO of PB_Cchkmat for random arguments near their bounds; but for copies (RSRC_ = -1), which we refuse.

    It checks descriptors of type 2, to which PDGEMM brings those of type 1.
    """
    rng, local = np.random.default_rng(12), np.zeros(10_000)
    seen = set()
    for ours, theirs in grids:
        pr, pc = scalapack.blacs_gridinfo(ours)[:2]
        for _ in range(400):
            m, k, ia, ja = (
                rng.choice(choices).item() for choices in ([0, 1, 6], [0, 1, 6], [0, 1, 7, 99], [0, 1, 7, 99])
            )
            sizes = [rng.choice([1, 2, 3, 20]).item() for _ in range(4)]
            desc = [2, theirs, 12, 12, *sizes, int(rng.integers(pr)), int(rng.integers(pc)), 12]
            for entry in rng.choice(11, 2):
                if rng.random() < 0.5:
                    value = {0: 3, 1: -1, 2: 0, 8: pr, 9: pc, 10: rng.choice([0, 1, 3, 5])}.get(
                        entry, rng.choice([-1, 0])
                    )
                    desc[entry] = int(value)
            info = ctypes.c_int(0)
            array = np.array(desc, np.intc)
            reference.PB_Cchkmat(
                theirs,
                b"PDGEMM",
                b"A",
                m,
                3,
                k,
                5,
                ia - 1,
                ja - 1,
                ctypes.c_void_p(array.ctypes.data),
                10,
                ctypes.byref(info),
            )
            desc[1] = ours if desc[1] == theirs else -1
            sub, found = Sub("a", 7, local, ia, ja, desc, m, k), 0
            try:
                sub.check("PDGEMM", (local.dtype,))
            except scalapack.IllegalArgument as error:
                found = error.info
            assert found == info.value, (m, k, ia, ja, desc)
            seen.add(found)
    assert seen >= {0, -8, -9, *(-1000 - entry for entry in range(1, 12))}


def test_grids_and_local_sizes(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    for ours, theirs in grids:
        assert scalapack.blacs_gridinfo(ours) == gridinfo(reference, theirs)
    for n, nb, p in itertools.product((0, 1, 7, 31, 35), BLOCKS, (1, 2, 3, 4)):
        for arguments in itertools.product([n], [nb], range(p), range(p), [p]):
            assert scalapack.numroc(*arguments) == fortran(reference.numroc_, *arguments)


def test_descriptors(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """The entries of good ones, INFO of bad ones.

    But for a context that is none: DESCINIT answers -6 (row irsrc is not within -1 rows), and we -8.
    """
    for ours, theirs in grids:
        pr, pc = gridinfo(reference, theirs)[:2]
        good = [31, 35, 2, 3, pr - 1, pc - 1, theirs, 31]
        bad = [(0, -1), (1, -2), (2, 0), (3, 0), (4, -1), (4, pr), (5, -1), (5, pc), (7, 15), (7, 7), (7, 0)]
        for at, value in [(0, 31), *bad]:
            arguments = [*good[:at], value, *good[at + 1 :]]
            desc, info = np.zeros(9, np.intc), np.zeros(1, np.intc)
            fortran(reference.descinit_, desc, *arguments, info)
            arguments[6] = ours
            try:
                made, found = scalapack.descinit(*arguments), 0
            except scalapack.IllegalArgument as error:
                made, found = np.zeros(9), error.info
            assert found == info[0], (at, value)
            assert found or made.tolist() == [*desc[:1], ours, *desc[2:]]
    reference._gfortran_flush_i4(None)  # DESCINIT's messages, into what the test has captured
