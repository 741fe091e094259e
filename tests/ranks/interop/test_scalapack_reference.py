"""pdgemm.scalapack and ScaLAPACK have the same results and INFO for equal local arrays and descriptors.

Debian's library is called through ctypes.  mpi4py must use the MPI library to which Debian's ScaLAPACK is linked;
scripts/setup_parallel_hdf5.sh makes such an environment.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from scalapack_arrays import LETTERS, SIZES, STARTS, Global, changed, fortran, gridinfo, random, with_context
from tiers import everything, square_grid

from pdgemm import scalapack
from pdgemm.interop.scalapack.submatrices import SubmatrixArguments

pytestmark = [pytest.mark.mpi, square_grid]

WHOLE = range(31, 36)
BLOCKS = range(1, 7)


class Both:
    """Arguments (array, i, j, descriptor) of both libraries for a window of a random matrix in random blocks."""

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
        """Return the local array of a matrix with these values in the window and zeros elsewhere."""
        values = np.zeros(self.matrix.values.shape, sub.dtype)
        values[self.window] = sub
        return self.matrix.dealt(values, np.zeros(self.matrix.local.shape, sub.dtype))

    def erase(self) -> None:
        """Set the window to NaN: if beta is 0, sub(C) must not be read."""
        self.ours[0][self.inside] = self.theirs[0][self.inside] = np.nan

    def difference(self) -> np.ndarray:
        """Return |C1 - C2|; check that both are unchanged outside the window, bit by bit, in gaps and guards, too."""
        for local in (self.ours[0], self.theirs[0]):
            assert local[~self.inside].tobytes() == self.matrix.before[~self.inside].tobytes()
        return np.abs(self.ours[0] - self.theirs[0])


@pytest.mark.parametrize("letter", LETTERS)
def test_gemm(reference: ctypes.CDLL, grids: list[tuple[int, int]], letter: str) -> None:
    """|C1 - C2| <= 16 eps (|alpha| |A| |B| + |beta| |C|) for each element of both results."""
    char, rng = LETTERS[letter], np.random.default_rng(7)
    ours, theirs = getattr(scalapack, f"p{letter}gemm"), getattr(reference, f"p{letter}gemm_")
    alphas = [2, 3] + [2 - 1j] * (letter in "cz")
    cases = list(itertools.product(grids, SIZES if letter in "dz" else SIZES[:1], "NTC", "NTC"))
    for grid, (m, n, k), ta, tb in cases[:: 1 if everything() else 7]:  # 7: all nine pairs (ta, tb) occur
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


@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (2, 1)])
def test_tran(reference: ctypes.CDLL, grids: list[tuple[int, int]], alpha: int, beta: int) -> None:
    """Results are equal: these factors need at most one rounding."""
    rng = np.random.default_rng(8)
    for grid, (m, n, _) in itertools.product(grids, SIZES):
        A, C = Both(rng, "d", grid, (n, m)), Both(rng, "d", grid, (m, n))
        if beta == 0:
            C.erase()
        scalapack.pdtran(m, n, alpha, *A.ours, beta, *C.ours)
        fortran(reference.pdtran_, m, n, np.float64(alpha), *A.theirs, np.float64(beta), *C.theirs)
        assert (C.difference() == 0).all(), (grid, m, n)


def test_gemr2d(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """Results are equal, for copies between grids of any two shapes."""
    rng = np.random.default_rng(9)
    for one, other, (m, n, _) in itertools.product(grids, grids, SIZES):
        A, B = (Both(rng, "d", grid, (m, n), two=False) for grid in (one, other))  # the descriptor is of type 1
        B.erase()
        scalapack.pdgemr2d(m, n, *A.ours, *B.ours, grids[0][0])
        fortran(reference.pdgemr2d_, m, n, *A.theirs, *B.theirs, grids[0][1])
        assert (B.difference() == 0).all(), (one, other, m, n)


def test_info_of_bad_operands(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """INFO equals that of PB_Cchkmat for random arguments near their bounds, except RSRC_ = -1, which pdgemm refuses.

    PB_Cchkmat checks descriptors of type 2, to which PDGEMM converts those of type 1.
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
                theirs, b"PDGEMM", b"A", m, 3, k, 5, ia - 1, ja - 1, ctypes.c_void_p(array.ctypes.data), 10,
                ctypes.byref(info),
            )  # fmt: skip
            desc[1] = ours if desc[1] == theirs else -1
            sub, found = SubmatrixArguments("a", 7, local, ia, ja, desc, m, k), 0
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
    """Entries of valid descriptors, and INFO of invalid ones, are equal.

    Except for an invalid context: DESCINIT returns -6 (irsrc is not one of -1 rows), and pdgemm -8.
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
    reference._gfortran_flush_i4(None)  # flush messages of DESCINIT, which the test captures


def sides(values: np.ndarray, grid: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """Return the arguments of a matrix on a context of pdgemm, and on one of ScaLAPACK."""
    X = Global(values, grid[0], (4, 4))
    return [X.local, 1, 1, X.desc], [X.local.copy(order="F"), 1, 1, with_context(X.desc, grid[1])]


def test_illegal_arguments_of_eigenproblems(reference: ctypes.CDLL, grids: list[tuple[int, int]]) -> None:
    """INFO of calls with one illegal argument is equal, with these exceptions.

    PDSYEVR numbers the arguments of Z 2 too high: its DESCZ, argument 19, is number 21.  For rows and columns outside
    of A and Z, it names entry M_ or N_ of the descriptor, and pdgemm the first row or column.  PDPOTRI names JA if
    IA = 0, and divides by MB_ = 0.  PDGESVD names JOBU if N = -1.
    """
    seen, work = set(), [np.zeros(20_000), 20_000, np.zeros(20_000, np.intc), 20_000]
    for grid in grids:
        A, Z, V = (sides(x, grid) for x in (random((8, 8), "d", 3), *np.zeros((2, 8, 8))))
        w, ipiv, counts = np.zeros(8), np.zeros(20, np.intc), [np.zeros(1, np.intc), np.zeros(1, np.intc)]
        bad = []
        for entry, value in ((2, -1), (3, 0), (4, 0), (5, -1), (6, 99), (7, 99), (8, 0)):
            bad.append(A[0][3].copy())
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
            ours, theirs = ([*before, *side, *between] for side in A)
            vectors = [Z] if "sy" in name else [Z, V] if name == "pdgesvd" else []
            ours += [*vector, *itertools.chain(*(X[0] for X in vectors))]
            theirs += [*(counts if name == "pdsyevr" else []), *vector, *itertools.chain(*(X[1] for X in vectors))]
            theirs += work[: {"pdpotri": 0, "pdgeqpf": 2, "pdgesvd": 2}.get(name, 4)]
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
    reference._gfortran_flush_i4(None)  # flush messages, which the test captures
