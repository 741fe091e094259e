"""ScaLAPACK's interface: the standard PBLAS semantics, argument numbers, and C updated in place and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from problems import grid_shapes

pytestmark = pytest.mark.mpi

GUARD = -77.5
SIZES = [(22, 23, 24), (5, 14, 9), (11, 11, 11), (3, 3, 3)]
STARTS = [1, 5, 7, 11, 12]
WHOLE = [31, 32, 35]


@pytest.fixture(scope="module")
def contexts(comm: Any) -> Iterator[list[int]]:
    """Every shape, row by row and column by column; one that leaves a process out."""
    from pdgemm import scalapack

    made = [scalapack.blacs_gridinit(comm, *shape, order) for shape in grid_shapes(comm.size) for order in "RC"]
    if comm.size > 2:
        made.append(scalapack.blacs_gridinit(comm, 1, comm.size - 1))
    yield made
    for ictxt in made:
        scalapack.blacs_gridexit(ictxt)


class Global:
    """A matrix as ScaLAPACK sees it: a local array with guards and a gap below each column, and a descriptor."""

    def __init__(self, values: np.ndarray, ictxt: int, blocks: tuple[int, int], sources: tuple[int, int]) -> None:
        from pdgemm import scalapack
        from pdgemm.grids.distribution import Distribution

        pr, pc, i, j = scalapack.blacs_gridinfo(ictxt)
        layout = Distribution.over((pr, pc), values.shape, blocks, sources)
        self.here = np.ix_(layout.rows.indices(i), layout.cols.indices(j))
        rows, cols = layout.local_shape((i, j))
        self.inside = slice(rows), slice(cols)
        self.desc = scalapack.descinit(*values.shape, *blocks, *sources, ictxt, rows + 3)
        self.values = values
        self.local = self.dealt(values, np.full((rows + 3, cols + 1), GUARD, values.dtype, order="F"))
        self.before = self.local.copy(order="F")

    def dealt(self, values: np.ndarray, around: np.ndarray) -> np.ndarray:
        """The local array of a matrix of these values; what lies around it is taken from `around`."""
        local = around.copy(order="F")
        local[self.inside] = values[self.here]
        return local


def random(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, shape) + (1j * rng.uniform(-1, 1, shape) if dtype in "FD" else 0)
    return values.astype(dtype)


def op(x: np.ndarray, trans: str) -> np.ndarray:
    return {"N": x, "T": x.T, "C": x.conj().T}[trans]


@pytest.mark.parametrize("dtype", "sdcz")
def test_the_standard_semantics(comm: Any, contexts: list[int], dtype: str) -> None:
    """error = max |C - Cref| / (eps (|alpha| |A| |B| + |beta| |C|)) <= 16, as in the PBLAS tests."""
    from pdgemm import scalapack

    char = {"s": "f", "d": "d", "c": "F", "z": "D"}[dtype]
    routine = getattr(scalapack, f"p{dtype}gemm")
    alphas = [2, 3] + ([2 - 1j] if char in "FD" else [])
    rng = np.random.default_rng(7)
    sizes = SIZES if dtype == "d" else SIZES[:1]
    cases = list(itertools.product(contexts, sizes, "NTC", "NTC"))
    for ictxt, (m, n, k), ta, tb in cases[:: 1 + (comm.size > 4)]:  # of nine pairs every other: each in some context
        alpha, beta = (rng.choice(choices).item() for choices in (alphas, [0, 1, 3]))
        matrices, windows = [], []
        for extents in [(m, k) if ta == "N" else (k, m), (k, n) if tb == "N" else (n, k), (m, n)]:
            whole = int(rng.choice(WHOLE))
            home = ictxt if len(matrices) == 2 or rng.random() < 0.5 else int(rng.choice(contexts))
            pr, pc = scalapack.blacs_gridinfo(home)[:2]
            values = random((whole, whole), char, whole + len(matrices))
            matrices.append(Global(values, home, tuple(rng.integers(1, 7, 2).tolist()), (whole % pr, (whole + 1) % pc)))
            first = [min(start, whole - extent + 1) for start, extent in zip(rng.choice(STARTS, 2).tolist(), extents)]
            windows.append(tuple(slice(at - 1, at - 1 + extent) for at, extent in zip(first, extents)))
        A, B, C = matrices
        descs = [x.desc.copy() for x in matrices]
        inside = np.zeros(C.values.shape, bool)
        inside[windows[2]] = True
        if beta == 0:
            C.local[...] = C.dealt(np.where(inside, np.nan, C.values), C.before)
        a, b, c = ((x.local, *(s.start + 1 for s in window), x.desc) for x, window in zip(matrices, windows))
        routine(ta, tb, m, n, k, alpha, *a, *b, beta, *c)

        wide = np.result_type(char, np.float64)
        sub_a, sub_b, sub_c = (x.values[window].astype(wide) for x, window in zip(matrices, windows))
        sub_a, sub_b = op(sub_a, ta), op(sub_b, tb)
        reference, scale = C.values.astype(wide), np.zeros(C.values.shape)
        reference[windows[2]] = alpha * (sub_a @ sub_b) + beta * sub_c
        scale[windows[2]] = abs(alpha) * (abs(sub_a) @ abs(sub_b)) + abs(beta) * abs(sub_c)
        error = np.abs(C.local - C.dealt(reference.astype(char), C.before))
        assert (error <= 16 * np.finfo(char).eps * C.dealt(scale, np.zeros(C.local.shape))).all()
        outside = ~C.dealt(inside, np.zeros(C.local.shape, bool))
        assert np.array_equal(C.local[outside], C.before[outside])  # bit by bit, gaps and guards too
        for x, desc in zip(matrices, descs):
            assert np.array_equal(x.desc, desc)
        for x in (A, B):
            assert np.array_equal(x.local, x.before)


def test_transposition_and_redistribution(comm: Any, contexts: list[int]) -> None:
    from pdgemm import scalapack

    for number, (m, n, _) in enumerate(SIZES):
        ictxt, other = contexts[number % len(contexts)], contexts[-1 - number % len(contexts)]
        for name, char in (("pstran", "f"), ("pdtran", "d"), ("pctranu", "F"), ("pztranu", "D"), ("pztranc", "D")):
            A, C = (Global(random((35, 35), char, s), x, (4, 3), (0, 0)) for s, x in ((1, ictxt), (2, other)))
            getattr(scalapack, name)(m, n, 2, A.local, 5, 7, A.desc, 3, C.local, 11, 12, C.desc)
            expected = C.values.copy()
            part = A.values[4 : 4 + n, 6 : 6 + m].T
            expected[10 : 10 + m, 11 : 11 + n] *= 3
            expected[10 : 10 + m, 11 : 11 + n] += 2 * (part.conj() if name == "pztranc" else part)
            assert np.allclose(C.local, C.dealt(expected, C.before), rtol=1e-6)
        for name, char in (("psgemr2d", "f"), ("pdgemr2d", "d"), ("pcgemr2d", "F"), ("pzgemr2d", "D")):
            A, B = (Global(random((35, 35), char, s), x, (5, 2), (0, 0)) for s, x in ((1, ictxt), (2, other)))
            getattr(scalapack, name)(m, n, A.local, 1, 11, A.desc, B.local, 12, 5, B.desc, contexts[0])
            expected = B.values.copy()
            expected[11 : 11 + m, 4 : 4 + n] = A.values[:m, 10 : 10 + n]
            assert np.array_equal(B.local, B.dealt(expected, B.before))


def test_one_dimensional_local_arrays(comm: Any, contexts: list[int]) -> None:
    """As a Fortran or C program would hand them over."""
    from pdgemm import scalapack

    A, B, C = (Global(random((12, 12), "d", s), contexts[0], (3, 2), (0, 0)) for s in (1, 2, 3))
    flat = [x.local.ravel(order="F") for x in (A, B, C)]
    a, b, c = ((y, 1, 1, x.desc) for x, y in zip((A, B, C), flat))
    scalapack.pdgemm("N", "N", 12, 12, 12, 1.0, *a, *b, 0.0, *c)
    found = flat[2].reshape(C.local.shape, order="F")
    assert np.allclose(found, C.dealt(A.values @ B.values, C.before))


def test_contexts_and_descriptors(comm: Any) -> None:
    from pdgemm import ProcessGrid, scalapack

    row = scalapack.blacs_gridinit(comm, 1, comm.size)
    assert scalapack.blacs_gridinfo(row) == (1, comm.size, 0, comm.rank)
    assert scalapack.blacs_gridinfo(-1) == (-1, -1, -1, -1)
    with ProcessGrid(comm) as grid:
        mine = scalapack.context(grid)
        assert scalapack.blacs_gridinfo(mine) == (*grid.shape, *grid.coords)
    if comm.size == 6:
        by_column = scalapack.blacs_gridinit(comm, 2, 3, "C")
        assert scalapack.blacs_gridinfo(by_column)[2:] == (comm.rank % 2, comm.rank // 2)
        scalapack.blacs_gridexit(by_column)
    if comm.size > 1:
        smaller = scalapack.blacs_gridinit(comm, 1, comm.size - 1)
        outside = scalapack.blacs_gridinfo(smaller)[2:] == (-1, -1)
        assert outside == (comm.rank == comm.size - 1)
        scalapack.blacs_gridexit(smaller)
    with pytest.raises(ValueError, match="needs 100 processes"):
        scalapack.blacs_gridinit(comm, 10, 10)
    with pytest.raises(ValueError, match="not a context"):
        scalapack.blacs_gridexit(10**6)
    assert [scalapack.numroc(10, 3, p, 1, 2) for p in (0, 1)] == [4, 6]
    desc = scalapack.descinit(7, 5, 2, 3, 0, 0, row, 9)
    assert desc.tolist() == [1, row, 7, 5, 2, 3, 0, 0, 9]
    good: list[Any] = [7, 5, 2, 3, 0, 0, row, 9]
    for at, bad in [(0, -1), (1, -2), (2, 0), (3, 0), (4, 1), (5, comm.size), (6, 10**6), (7, 1)]:
        arguments = [*good[:at], bad, *good[at + 1 :]]
        with pytest.raises(scalapack.IllegalArgument, match="DESCINIT") as caught:
            scalapack.descinit(*arguments)
        assert caught.value.info == -(at + 2)
    scalapack.blacs_gridexit(row)


def test_every_argument_out_of_range_is_named_by_its_number(comm: Any, contexts: list[int]) -> None:
    from pdgemm import scalapack

    A, B, C = (Global(random((12, 12), "d", s), contexts[0], (3, 2), (0, 0)) for s in (1, 2, 3))
    good: list[Any] = ["N", "N", 6, 5, 4, 1.0, A.local, 1, 1, A.desc, B.local, 2, 2, B.desc, 0.0, C.local, 3, 3, C.desc]
    frozen = C.local.copy(order="F")
    frozen.flags.writeable = False

    def entry(at: int, value: int) -> np.ndarray:
        desc = A.desc.copy()
        desc[at] = value
        return desc

    cases: list[tuple[int, Any, int]] = [
        (1, "X", -1), (2, 3, -2), (3, -1, -3), (4, -1, -4), (5, -2, -5), (6, "a", -6), (6, 1j, -6),
        (7, A.local.astype("f"), -7), (7, np.ascontiguousarray(A.local[:, :1]).repeat(40, 1), -7), (7, [1.0], -7),
        (8, 0, -8), (8, 8, -8), (9, 0, -9), (9, 10, -9), (10, "desc", -10), (10, A.desc[:8], -10),
        (3, 6.0, -3), (8, "1", -8),
        (12, 10, -12), (13, 9, -13), (15, None, -15), (16, frozen, -16), (16, A.local, -16), (17, 8, -17), (18, 9, -18),
        (10, entry(0, 2), -1001), (10, entry(1, 10**6), -1002), (10, entry(2, -1), -1003), (10, entry(3, -1), -1004),
        (10, entry(4, 0), -1005), (10, entry(5, 0), -1006), (10, entry(6, 99), -1007), (10, entry(7, -1), -1008),
        (10, entry(8, 0), -1009), (14, entry(4, 0), -1405), (19, entry(8, 0), -1909),
    ]  # fmt: skip
    for number, value, info in cases:
        arguments = [*good[: number - 1], value, *good[number:]]
        with pytest.raises(scalapack.IllegalArgument, match=f"PDGEMM.*parameter number {number}") as caught:
            scalapack.pdgemm(*arguments)
        assert caught.value.info == info, (number, value, str(caught.value))
        assert len(set(comm.allgather(str(caught.value)))) == 1
    # on one process only: all hear of it
    if comm.size > 1:
        m = -1 if comm.rank == 1 else 6
        with pytest.raises(scalapack.IllegalArgument, match=rf"number 3 .*\[rank 1 of {comm.size}\]"):
            scalapack.pdgemm("N", "N", m, *good[3:])
        with pytest.raises(ValueError, match="different arguments"):
            scalapack.pdgemm("N", "N", 6, 5, 4, float(comm.rank), *good[6:])
        with pytest.raises(ValueError, match="different arguments"):
            scalapack.pdgemm("N", "N", 6, 5, 3 + (comm.rank == 0), *good[5:])
    for name, arguments, info in (
        ("pdtran", [-1, 2, 1.0, A.local, 1, 1, A.desc, 0.0, C.local, 1, 1, C.desc], -1),
        ("pdtran", [2, 2, 1.0, A.local, 12, 1, A.desc, 0.0, C.local, 1, 1, C.desc], -5),
        ("pdgemr2d", [2, 2, A.local, 1, 12, A.desc, C.local, 1, 1, C.desc, contexts[0]], -5),
        ("pdgemr2d", [2, 2, A.local, 1, 1, A.desc, C.local, 1, 1, C.desc, 10**6], -11),
    ):
        with pytest.raises(scalapack.IllegalArgument) as caught:
            getattr(scalapack, name)(*arguments)
        assert caught.value.info == info
    assert np.array_equal(C.local, C.before)
