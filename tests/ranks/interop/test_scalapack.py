"""ScaLAPACK's interface: the semantics of PBLAS, argument numbers in INFO, and only the submatrix of C is written."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from problems import op
from scalapack_arrays import LETTERS, SIZES, Global, assert_unchanged, changed, gathered, info, placed, random
from tiers import everything, square_grid

from pdgemm import ProcessGrid, scalapack

pytestmark = pytest.mark.mpi


@square_grid
@pytest.mark.parametrize("dtype", LETTERS)
def test_the_standard_semantics(comm: Any, contexts: list[int], dtype: str) -> None:
    """max |C - Cref| / (eps (|alpha| |A| |B| + |beta| |C|)) <= 16, as in the PBLAS tests."""
    char, rng = LETTERS[dtype], np.random.default_rng(7)
    alphas = [2, 3] + [2 - 1j] * (char in "FD")
    cases = list(itertools.product(contexts, SIZES if dtype == "d" else SIZES[:1], "NTC", "NTC"))
    step = 1 if comm.size <= 2 else 2 if everything() else 20  # no multiple of 3: all nine pairs (ta, tb) occur
    for number, (ictxt, (m, n, k), ta, tb) in enumerate(cases[::step]):
        alpha, beta = (rng.choice(choices).item() for choices in (alphas, [0, 1, 3]))
        shapes = (m, k) if ta == "N" else (k, m), (k, n) if tb == "N" else (n, k), (m, n)
        values = [random(shape, char, 3 * number + at) for at, shape in enumerate(shapes)]
        homes = [*contexts, *[ictxt] * len(contexts)]  # half of the draws: the context of C
        (A, _, a), (B, _, b) = (placed(x, 7, homes, rng) for x in values[:2])
        C, there, c = placed(values[2] if beta else np.full_like(values[2], np.nan), 7, [ictxt], rng)
        descs = [X.desc.copy() for X in (A, B, C)]
        getattr(scalapack, f"p{dtype}gemm")(ta, tb, m, n, k, alpha, *a, *b, beta, *c)

        x, y, z = (value.astype("D") for value in values)
        x, y, z = op(x, ta), op(y, tb), beta * z
        scale = abs(alpha) * (abs(x) @ abs(y)) + abs(z)
        assert (abs(gathered(comm, C, there) - alpha * (x @ y) - z) <= 16 * np.finfo(char).eps * scale).all()
        assert_unchanged(C, there)
        assert all(np.array_equal(X.desc, desc) for X, desc in zip((A, B, C), descs))
        assert np.array_equal(A.local, A.before) and np.array_equal(B.local, B.before)


@square_grid
def test_transposition_and_redistribution(comm: Any, contexts: list[int]) -> None:
    for number, (m, n, _) in enumerate(SIZES):
        ictxt, other = contexts[number % len(contexts)], contexts[-1 - number % len(contexts)]
        for name, char in (("pstran", "f"), ("pdtran", "d"), ("pctranu", "F"), ("pztranu", "D"), ("pztranc", "D")):
            A = Global(random((35, 35), char, 1), ictxt, (4, 3))
            C = Global(random((35, 35), char, 2), other, (4, 3), first=(7, 1))
            getattr(scalapack, name)(m, n, 2, A.local, 5, 7, A.desc, 3, C.local, 11, 12, C.desc)
            expected = C.values.copy()
            part = A.values[4 : 4 + n, 6 : 6 + m].T
            expected[10 : 10 + m, 11 : 11 + n] *= 3
            expected[10 : 10 + m, 11 : 11 + n] += 2 * (part.conj() if name == "pztranc" else part)
            assert np.allclose(C.local, C.dealt(expected, C.before), rtol=1e-6)
        for name, char in [(f"p{letter}gemr2d", char) for letter, char in zip("siidcz", ["f", "i4", "i8", *"dFD"])]:
            values = [(100 * random((35, 35), "d", seed)).astype(char) for seed in (1, 2)]
            A, B = Global(values[0], ictxt, (5, 2), first=(3, 9)), Global(values[1], other, (5, 2))
            getattr(scalapack, name)(m, n, A.local, 1, 11, A.desc, B.local, 12, 5, B.desc, contexts[0])
            expected = B.values.copy()
            expected[11 : 11 + m, 4 : 4 + n] = A.values[:m, 10 : 10 + n]
            assert np.array_equal(B.local, B.dealt(expected, B.before))


@square_grid
def test_contexts_and_descriptors(comm: Any, grid: Any) -> None:
    row = scalapack.blacs_gridinit(comm, 1, comm.size)
    assert scalapack.blacs_gridinfo(row) == (1, comm.size, 0, comm.rank)
    assert scalapack.blacs_gridinfo(-1) == (-1, -1, -1, -1)
    mine = scalapack.context(grid)
    assert scalapack.blacs_gridinfo(mine) == (*grid.shape, *grid.coords)
    if comm.size == 4:
        by_column = scalapack.blacs_gridinit(comm, 2, 2, "C")
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
    wrong = [(good, *x) for x in enumerate([-1, -2, 0, 0, 1, comm.size, 10**6, 1])]
    wrong += [([8] * 8, *x) for x in enumerate([2.5, "7", None, 10**30, -(10**30)])]  # any value that is no int32
    for arguments, at, bad in wrong:
        with pytest.raises(scalapack.IllegalArgument, match="DESCINIT") as caught:
            scalapack.descinit(*changed(arguments, **{f"_{at + 1}": bad}))
        assert caught.value.info == -(at + 2)
    scalapack.blacs_gridexit(row)


def test_every_argument_out_of_range_is_named_by_its_number(comm: Any, contexts: list[int]) -> None:
    good, (A, _, C) = good_arguments(contexts)
    frozen = C.local.copy(order="F")
    frozen.flags.writeable = False

    def entry(at: int, value: int) -> np.ndarray:
        return with_entries(A.desc, **{f"_{at + 1}": value})

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
    for number, value, code in cases:
        with pytest.raises(scalapack.IllegalArgument, match=f"PDGEMM.*parameter number {number}") as caught:
            scalapack.pdgemm(*changed(good, **{f"_{number}": value}))
        assert caught.value.info == code, (number, value, str(caught.value))
        assert len(set(comm.allgather(str(caught.value)))) == 1
    # wrong on one process only: all raise
    if comm.size > 1:
        m = -1 if comm.rank == 1 else 6
        with pytest.raises(scalapack.IllegalArgument, match=rf"number 3 .*\[rank 1 of {comm.size}\]"):
            scalapack.pdgemm("N", "N", m, *good[3:])
        with pytest.raises(ValueError, match="different arguments"):
            scalapack.pdgemm("N", "N", 6, 5, 4, float(comm.rank), *good[6:])
        with pytest.raises(ValueError, match="different arguments"):
            scalapack.pdgemm("N", "N", 6, 5, 3 + (comm.rank == 0), *good[5:])
    I, J = (Global(C.values.astype(x), contexts[0], (3, 2)) for x in ("i4", "i8"))  # integers are not converted
    for name, arguments, code in (
        ("pigemr2d", [5, 6, I.local, 1, 1, I.desc, J.local, 2, 2, J.desc, contexts[0]], -7),
        ("pigemr2d", [5, 6, I.local, 1, 1, I.desc, C.local, 2, 2, C.desc, contexts[0]], -7),
        ("pdtran", [-1, 2, 1.0, A.local, 1, 1, A.desc, 0.0, C.local, 1, 1, C.desc], -1),
        ("pdtran", [2, 2, 1.0, A.local, 12, 1, A.desc, 0.0, C.local, 1, 1, C.desc], -5),
        ("pdgemr2d", [2, 2, A.local, 1, 12, A.desc, C.local, 1, 1, C.desc, contexts[0]], -5),
        ("pdgemr2d", [2, 2, A.local, 1, 1, A.desc, C.local, 1, 1, C.desc, 10**6], -11),
    ):
        assert info(getattr(scalapack, name), *arguments) == code
    assert np.array_equal(C.local, C.before) and np.array_equal(J.local, J.before)


def good_arguments(contexts: list[int], first: tuple[int, int] | None = None) -> tuple[list[Any], list[Global]]:
    """Return the arguments of a 6 x 4 by 4 x 5 product in 12 x 12 matrices.   first : A has a descriptor of type 2."""
    A, B, C = (
        Global(random((12, 12), "d", s), contexts[0], (3, 2), first=f) for s, f in ((1, first), (2, None), (3, None))
    )
    a, b, c = ((x.local, at, at, x.desc) for at, x in enumerate((A, B, C), 1))
    return ["N", "N", 6, 5, 4, 1.0, *a, *b, 0.0, *c], [A, B, C]


def with_entries(desc: np.ndarray, **entries: int) -> np.ndarray:
    """Return the descriptor with some entries replaced: _5 = ... replaces the fifth."""
    return np.array(changed(desc.tolist(), **entries))


def test_an_empty_submatrix_may_begin_anywhere(comm: Any, contexts: list[int]) -> None:
    """An empty submatrix may begin outside of its matrix, which may be empty, too; other arguments are checked."""
    good, (A, _, C) = good_arguments(contexts)
    empty = with_entries(A.desc, _3=0, _4=0, _9=1)
    nothing: dict[str, Any]
    for nothing in ({"_3": 0}, {"_4": 0}, {"_5": 0, "_15": 1.0}):
        i, j, desc = ("_8", "_9", "_10") if "_4" not in nothing else ("_12", "_13", "_14")
        outside, hollow = {i: 99, j: 99}, {desc: empty}
        result = {"_17": 99, "_18": 13, "_19": empty} if "_5" not in nothing else {}
        for more in (outside, hollow, outside | hollow, result):
            assert info(scalapack.pdgemm, *changed(good, **nothing, **more)) == 0, (nothing, more)
    assert np.array_equal(C.local, C.before)
    assert info(scalapack.pdgemm, *changed(good, _5=0, _8=99, _10=empty, _12=99, _15=3.0)) == 0
    expected = C.values.copy()
    expected[2:8, 2:7] *= 3
    assert np.array_equal(C.local, C.dealt(expected, C.before))
    wrong: dict[str, Any]
    for wrong, found in (
        ({"_8": 0}, -8), ({"_9": -1}, -9), ({"_12": 10}, -12), ({"_10": with_entries(A.desc, _5=0)}, -1005),
        ({"_10": with_entries(A.desc, _9=0)}, -1009), ({"_10": with_entries(A.desc, _4=-1)}, -1004), ({"_7": None}, -7),
    ):  # fmt: skip
        assert info(scalapack.pdgemm, *changed(good, _3=0, **wrong)) == found, wrong
    assert info(scalapack.pdgemm, *changed(good, _10=empty)) == -1003  # sub(A) is not empty: M_ is checked first
    for m, n in ((0, 3), (3, 0)):
        assert info(scalapack.pdtran, m, n, 1.0, A.local, 99, 1, A.desc, 2.0, C.local, 1, 99, C.desc) == 0
        assert info(scalapack.pdgemr2d, m, n, A.local, 1, 99, empty, None, 0, -1, "", contexts[0]) == 0
    assert np.array_equal(C.local, C.dealt(expected, C.before))


def test_local_arrays_may_end_after_the_submatrix(comm: Any, contexts: list[int]) -> None:
    """LLD_ may be 1 on a process without columns, and columns after the submatrix may be missing."""
    row = contexts[0]
    column_of = scalapack.blacs_gridinfo(row)[3]
    A, B = (Global(random((9, 3), "d", s), row, (2, 3)) for s in (1, 2))
    a, b = A.local, B.local
    if column_of > 0:
        A.desc[8] = B.desc[8] = 1
        a, b = np.zeros((1, 0)), np.zeros(0)
    C = Global(random((9, 9), "d", 3), row, (2, 2))
    scalapack.pdgemm("N", "T", 9, 9, 3, 1.0, a, 1, 1, A.desc, b, 1, 1, B.desc, 0.0, C.local, 1, 1, C.desc)
    assert np.allclose(C.local, C.dealt(A.values @ B.values.T, C.before))
    with pytest.raises(scalapack.IllegalArgument, match=r"LLD_ is 1, must be at least 9") as caught:  # unlike PDGEMM
        scalapack.descinit(9, 3, 2, 3, 0, 0, row, 1)
    assert caught.value.info == -9
    used = sum(int(g) < 5 for g in C.here[1].ravel())
    for cut in (C.local[:, :used], C.local.ravel(order="F")[: C.local.shape[0] * used]):
        c, whole = (cut.copy(order="F"), 1, 1, C.desc), (C.local, 1, 1, C.desc)
        scalapack.pdgemm("N", "N", 9, 5, 3, 1.0, a, 1, 1, A.desc, *whole, 0.0, *c)
        assert info(scalapack.pdtran, 9, 9, 1.0, *whole, 1.0, *c) == -9


def test_descriptors_of_type_2(comm: Any, contexts: list[int]) -> None:
    """INFO counts the entries of a type 2 descriptor; the first block may have any size."""
    good, (A, *_) = good_arguments(contexts, first=(5, 1))
    assert A.desc.tolist() == [2, contexts[0], 12, 12, 5, 1, 3, 2, 0, 0, A.local.shape[0]]
    assert info(scalapack.pdgemm, *good) == 0
    for entry, value in enumerate((3, 10**6, 0, -1, 0, 0, 0, -3, 99, -1, 0), 1):
        assert info(scalapack.pdgemm, *changed(good, _10=with_entries(A.desc, **{f"_{entry}": value}))) == -1000 - entry
        if entry > 1:
            numbers = [10, 2, 3, 4, 5, 6, 7, 8, 9, 11]  # entries 2 to 11 are these arguments of DESCINIT2
            given = with_entries(A.desc, **{f"_{entry}": value}).tolist()
            arguments = [*given[2:10], given[1], given[10]]
            assert info(scalapack.descinit2, *arguments) == (-numbers[entry - 2] if (entry, value) != (3, 0) else 0)
    long = np.append(A.desc, [7, 7])  # the array may be longer, as in C programs
    assert info(scalapack.pdgemm, *changed(good, _10=long)) == 0
    assert info(scalapack.pdgemm, *changed(good, _10=A.desc[:10])) == -1001


def test_the_first_wrong_argument_is_named(comm: Any, contexts: list[int]) -> None:
    good, (A, *_) = good_arguments(contexts)
    for more, found in (
        ({"_19": "", "_16": None, "_15": "", "_12": 0, "_10": "", "_9": 0, "_8": 0, "_6": "", "_4": -1, "_2": ""}, -2),
        ({"_10": with_entries(A.desc, _5=0), "_8": 99}, -8),
        ({"_10": with_entries(A.desc, _2=-1, _3=-1), "_8": 99}, -1002),
        ({"_15": None, "_10": with_entries(A.desc, _8=1000)}, -1008),
        ({"_10": with_entries(A.desc, _7=-1)}, -1007),  # RSRC_ = -1: copies on every grid row
        ({"_6": 10**400}, -6),
        ({"_10": [[1], [2, 3]]}, -10),
        ({"_10": ["1"] * 9}, -10),
        ({"_10": [1, contexts[0], 10**30, 12, 3, 2, 0, 0, 12]}, -10),
        ({"_3": np.uint8(255), "_8": np.uint8(2)}, -8),  # 255 + 2 would overflow to 1 in eight bits
        ({"_3": np.int32(2**31 - 1), "_17": np.int32(2**31 - 1)}, -8),
    ):
        assert info(scalapack.pdgemm, *changed(good, **more)) == found, more
        if comm.size > 1:  # wrong on one process only
            here = changed(good, **more) if comm.rank == comm.size - 1 else good
            assert info(scalapack.pdgemm, *here) == found, more


def test_arguments_as_a_fortran_program_hands_them_over(comm: Any, contexts: list[int]) -> None:
    """Scalars may be arrays of one element, and local arrays may have one dimension."""
    good, (A, B, C) = good_arguments(contexts)
    expected = C.values.copy()
    expected[2:8, 2:7] = 2 * A.values[:6, :4] @ B.values[1:5, 1:6] + 3 * expected[2:8, 2:7]
    flat = [X.local.flatten(order="F") for X in (A, B, C)]
    extents = [np.array(x) for x in good[2:5]]
    for alpha, beta, (a, b, c) in (
        (np.array(2.0), np.array([3]), (A.local, B.local, C.local)),
        (np.array([[2]]), np.array(3.0, "f"), flat),
    ):
        scalapack.pdgemm("n", "n", *extents, alpha, a, *good[7:10], b, *good[11:14], beta, c, *good[16:])
        assert np.allclose(c.reshape(C.local.shape, order="F"), C.dealt(expected, C.before))
    for bad in (np.array([2.0, 2.0]), np.array([]), np.array(1j), np.array("2"), np.array(None)):
        assert info(scalapack.pdgemm, *changed(good, _15=bad)) == -15


@pytest.mark.mpi(min_size=2)
@square_grid
def test_processes_outside_of_a_context(comm: Any) -> None:
    """A is on the first half of the processes, B on the last half; descriptors are invalid on other processes."""
    world = scalapack.blacs_gridinit(comm, comm.size, 1)
    half = (comm.size + 1) // 2  # of an odd number, the middle process has both
    homes = []
    for members in (range(half), range(comm.size - half, comm.size)):
        within = comm.Split(0 if comm.rank in members else 1)
        homes.append(scalapack.blacs_gridinit(within, 1, half) if comm.rank in members else -1)
    mixed = scalapack.blacs_gridinit(comm, 1, half)  # a context of all processes; some pass -1
    values = [random((11, 13), "d", seed) for seed in (1, 2)]
    garbage = [7, -1, -7, 2**40, 0, -3, 99, -1, 0]

    def sub(number: int, ictxt: int, i: int, j: int) -> tuple[Any, ...]:
        if ictxt == -1:
            return None, "?", 1.5, garbage
        X = Global(values[number], ictxt, (2, 3), first=(4, 1) if number else None)
        return X.local, i, j, X.desc, X

    outside = comm.rank >= half
    for a_home, b_home in ((homes[0], homes[1]), (homes[1], -1 if outside else mixed), (mixed, homes[0])):
        A, B = sub(0, a_home, 2, 3), sub(1, b_home, 5, 1)
        scalapack.pdgemr2d(6, 9, *A[:4], *B[:4], world)
        if b_home != -1:
            expected = values[1].copy()
            expected[4:10, :9] = values[0][1:7, 2:11]
            assert np.array_equal(B[4].local, B[4].dealt(expected, B[4].before))
        assert info(scalapack.pdgemr2d, 6, 0, *A[:4], *B[:4], world) == 0
    A, B = sub(0, homes[0], 2, 3)[:4], sub(1, homes[1], 5, 1)[:4]
    absent = None, 0, 0, garbage
    for a, b, ictxt, found in (
        (absent, B, world, -602),
        (A, absent, world, -1002),
        (absent if comm.rank == 0 else sub(0, mixed, 1, 1)[:4], B, world, -602),
        ((*A[:1], 7, *A[2:]), B, world, -4),
        (A, ((B[0], B[1] + 1, *B[2:]) if B[0] is not None and comm.rank == comm.size - 1 else B), world, 0),
    ):
        if found:
            assert info(scalapack.pdgemr2d, 6, 9, *a, *b, ictxt) == found
        elif half > 1:
            with pytest.raises(ValueError, match="different arguments"):
                scalapack.pdgemr2d(6, 9, *a, *b, ictxt)
    if homes[0] != -1:  # a context of some processes, as that of all
        with pytest.raises(scalapack.IllegalArgument, match="must include all processes") as caught:
            scalapack.pdgemr2d(6, 9, *sub(0, world, 1, 1)[:4], *sub(1, homes[0], 1, 1)[:4], homes[0])
        assert caught.value.info == -11
    for ictxt in {world, mixed, *homes} - {-1}:
        scalapack.blacs_gridexit(ictxt)


@pytest.mark.mpi(min_size=2)
def test_a_wrong_context_on_one_process_raises_on_all(comm: Any) -> None:
    """One process passes a context of another communicator, or an invalid one: all processes raise together."""
    double = comm.Dup()
    made = [scalapack.blacs_gridinit(x, 1, comm.size) for x in (comm, double)]
    made.append(scalapack.blacs_gridinit(double, comm.size, 1))
    values = random((8, 8), "d", 1)

    def ends(function: Any, *arguments: Any) -> str:
        try:
            function(*arguments)
        except ValueError as error:
            assert isinstance(error, scalapack.IllegalArgument) or "different arguments" in str(error)
            return str(error)
        return ""

    for one, two, three in ((0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 1), (2, 1, 0)):
        homes = made[one], made[two], made[three]
        A, B, C = (Global(values, home, (2, 3)) for home in homes)
        for at, bad in [(at, bad) for at in range(3) for bad in (-7, *made) if bad != homes[at]] + [(3, -7)]:
            descs = [x.desc.copy() for x in (A, B, C)]
            for desc in descs[at : at + 1] if at < 3 else descs:  # in all three descriptors
                desc[1] = desc[1] if comm.rank else bad
            a, b, c = ((x.local, 1, 1, desc) for x, desc in zip((A, B, C), descs))
            for function, arguments in (
                (scalapack.pdgemm, ("N", "N", 8, 8, 8, 1.0, *a, *b, 0.0, *c)),
                (scalapack.pdtran, (8, 8, 1.0, *a, 0.0, *c)),
                (scalapack.pdgemr2d, (8, 8, *a, *c, made[1])),
                (scalapack.pdgemr2d, (8, 8, *a, *c, made[1] if comm.rank else bad)),
            ):
                said = set(comm.allgather(ends(function, *arguments)))
                assert len(said) == 1
                has_it = at != 1 or function is scalapack.pdgemm  # only pdgemm has B
                assert said != {""} or bad != -7 or not has_it
    for ictxt in made[::-1]:
        scalapack.blacs_gridexit(ictxt)
        assert scalapack.blacs_gridinfo(ictxt) == (-1, -1, -1, -1)


def test_invalid_contexts(comm: Any) -> None:
    grid = ProcessGrid(comm)
    ictxt = scalapack.context(grid)
    desc = scalapack.descinit(4, 4, 1, 1, 0, 0, ictxt, 4)
    grid.free()
    assert scalapack.blacs_gridinfo(ictxt) == (-1, -1, -1, -1)
    with pytest.raises(ValueError, match="not a context"):
        scalapack.blacs_gridexit(ictxt)
    x = np.ones((4, 4), order="F")
    assert info(scalapack.pdtran, 4, 4, 1.0, x, 1, 1, desc, 0.0, x.copy("F"), 1, 1, desc) == -702
    for shape in ((comm.size + (comm.rank == 0), 1), (0, 5), (-1, -1), (10**9, 10**9), (1.0, 1)):
        with pytest.raises(ValueError, match="needs|positive|pair|different arguments"):
            scalapack.blacs_gridinit(comm, *shape)
