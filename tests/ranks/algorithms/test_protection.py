"""Flipped bits are found wherever they occur, correct products pass, and repeated products have the same bits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from flips import changed_after_the_product
from problems import DTYPES, NASTY, grid_shapes, nasty
from tiers import everything, in_turn, square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan
from pdgemm.algorithms import prepared, redistribution
from pdgemm.algorithms.protection import checksum
from pdgemm.algorithms.protection.row_checksums import weights
from pdgemm.errors import ArgumentError, CorruptionError, MemoryLimitError

pytestmark = pytest.mark.mpi
ALGORITHMS = ("summa", "stationary_a", "stationary_b", "cannon", "2.5d", "inner", "row", "column")
N = 96
CERTAIN = 10.0  # in units of tau: larger changes are always found, whatever the rounding errors


def flip(array: np.ndarray, bit: int, at: int) -> None:
    """Flip a bit of one element of an array, also of a view."""
    i, j = divmod(at % array.size, array.shape[1])
    item = np.array(array[i, j]).reshape(1)
    words = item.view(f"u{min(8, item.itemsize)}")
    words[bit // (8 * words.itemsize) % words.size] ^= words.dtype.type(1 << bit % (8 * words.itemsize))
    array[i, j] = item[0]


def flip_on(C: Any, here: bool, bit: int | None) -> None:
    if here and C.local.size and bit is not None:
        flip(C.local, bit, 7 * bit + 3)


def tau(A: np.ndarray, B: np.ndarray, dtype: str) -> np.ndarray:
    """Return the threshold of rounding errors in the rows of C x, as the package computes it."""
    wide = 8**0.5 if np.dtype(dtype).kind == "c" else 1
    unit = np.finfo(dtype).eps / 2
    size = (abs(A.real.astype("d")) + abs(A.imag.astype("d"))) @ np.linalg.norm(B.astype("D"), axis=1)
    return np.asarray(wide * unit * (7 / 3 * (A.shape[1] + B.shape[1])) ** 0.5 * size)


def operands(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(5)
    parts = [r.normal(size=(N, N)) + (1j * r.normal(size=(N, N)) if dtype[0] == "c" else 0) for _ in "AB"]
    return parts[0].astype(dtype), parts[1].astype(dtype)


def bits(dtype: str) -> list[int]:
    """Return numbers of bits: all with --all, otherwise some of mantissa and exponent, and the sign."""
    width = 8 * np.dtype(dtype).itemsize
    if everything():
        return list(range(width))
    real = width // (2 if np.dtype(dtype).kind == "c" else 1)
    mantissa = np.finfo(dtype).nmant
    return [mantissa // 2, mantissa - 3, mantissa - 1, mantissa + 3, real - 2, real - 1]


@square_grid
@pytest.mark.parametrize(("algorithm", "dtype"), in_turn(ALGORITHMS, DTYPES))
def test_flips_above_the_threshold_are_found_and_repaired(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], algorithm: str, dtype: str
) -> None:
    """Flips in all bits; the result has the bits of an undisturbed product, and the message names a rank."""
    a, b = operands(dtype)
    factors, error = weights(np.arange(N)), tau(a, b, dtype)
    shape = grid_shapes(comm.size)[len(grid_shapes(comm.size)) // 2]
    if algorithm == "2.5d" and comm.size == 1:
        pytest.skip("one rank has no layers")
    hits = 0
    with ProcessGrid(comm, shape) as grid:
        A, B = (DistMatrix.from_global(x, grid=grid, block=8) for x in (a, b))

        def product(flipped: int | None = None, rank: int = 0, **more: Any) -> Any:
            C = DistMatrix.empty((N, N), grid=grid, block=8, dtype=dtype)
            with monkeypatch.context() as patch:
                changed_after_the_product(patch, lambda C: flip_on(C, comm.rank == rank, flipped))
                return pdgemm(1.0, A, B, 0, C, algorithm=algorithm, panel_width=16, **more)

        right = product().to_global()
        for number, bit in enumerate(bits(dtype)):
            rank = number % comm.size
            wrong, C = product(bit, rank).to_global(), product(bit, rank, protect="repair")
            repeats, said, again = C.report.checks.repeats, capfd.readouterr().err, C.to_global()
            if comm.rank == 0:
                with np.errstate(all="ignore"):
                    change = np.abs((wrong.astype("D") - right) @ factors)
                    far = ~(change <= CERTAIN * error).all()
                hits += repeats
                assert not far or repeats == 1, (bit, rank)
                assert np.array_equal(again, right, equal_nan=True) or not repeats
                shown = (
                    r"\d+ of 96 rows of C differ .*; the product is repeated\n.* a bit has flipped on rank \d .*; C is"
                )
                assert not repeats or re.search(shown, said), said
    assert comm.rank or hits


def test_a_flip_on_the_way_to_another_layout_is_repaired(comm: Any, monkeypatch: pytest.MonkeyPatch, grid: Any) -> None:
    """If a bit flips while a matrix is redistributed, the repetition redistributes the matrices again."""
    a, b = operands("float64")
    A, B = (DistMatrix.from_global(x, grid=grid, block=y) for x, y in ((a, 24), (b, 8)))
    asked: Any = {"algorithm": "summa", "shape": (1, comm.size)}
    right = pdgemm(1, A, B, **asked).allgather()
    exchange, left = prepared.exchange, [1]

    def damaged(alpha: Any, x: Any, beta: Any, y: Any, *more: Any) -> None:
        exchange(alpha, x, beta, y, *more)
        if y.size and left[0]:
            left[0] -= 1
            flip(y, 62, 14)

    monkeypatch.setattr(prepared, "exchange", damaged)
    C = pdgemm(1, A, B, protect="repair", **asked)
    assert C.report.checks.repeats == (comm.allreduce(left[0]) < comm.size)
    assert np.array_equal(C.allgather(), right)


@pytest.mark.parametrize(("dtype", "beta"), in_turn(DTYPES, [0, -0.5]))
def test_a_permanent_fault_raises_on_all_ranks(
    comm: Any, monkeypatch: pytest.MonkeyPatch, grid: Any, dtype: str, beta: float
) -> None:
    """With "repair" after four runs, with "detect" after the first.  Repetitions start from C on entry."""
    a, b = operands(dtype)
    bit = np.finfo(dtype).nmant + 2
    A, B, C0 = (DistMatrix.from_global(x, grid=grid, block=16) for x in (a, b, a - b))

    def product(times: int, rank: int = comm.size - 1, **more: Any) -> Any:
        with monkeypatch.context() as patch:
            changed_after_the_product(patch, lambda C: flip_on(C, comm.rank == rank, bit), times)
            return pdgemm(1.5, A, B, beta, C0.copy(), **more)

    right = product(0).to_global()
    again = r"on rank \d.*: 4 products differ.*: take that node out|twice with the same bits: the error is reproducible"
    for protect, times, said in (
        ("detect", 1, r"rows of C differ .*, by more than rounding errors; protect='repair' would have repeated"),
        ("repair", 99, again),
    ):
        with pytest.raises(CorruptionError, match=said) as raised:
            product(times, protect=protect)
        assert comm.allgather(str(raised.value)) == [str(raised.value)] * comm.size
        assert "products differ" not in str(raised.value) or f"rank {comm.size - 1} on " in str(raised.value)
    C = product(1, rank=0, protect="repair")
    assert C.report.checks.repeats == 1
    repaired = C.to_global()
    assert comm.rank or np.array_equal(repaired, right)


@pytest.mark.parametrize("which", ["A", "B"])
def test_an_operand_that_changes_in_memory_raises(
    comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """A repetition cannot repair a changed operand; the error names the rank."""
    a, b = operands("float64")
    run = prepared.Prepared._run
    A, B = (DistMatrix.from_global(x, grid=grid, block=16) for x in (a, b))

    def damaged(self: Any, *arguments: Any) -> Any:
        if comm.rank == comm.size - 1:
            flip({"A": A, "B": B}[which].local, 58, 100)
        comm.Barrier()
        return run(self, *arguments)

    monkeypatch.setattr(prepared.Prepared, "_run", damaged)
    where = rf"^{which} on rank {comm.size - 1} on .* changed in memory while it was multiplied .*read it again"
    for protect in ("detect", "repair"):
        with pytest.raises(CorruptionError, match=where):
            pdgemm(1.0, A, B, protect=protect)


@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "int8"])
def test_clean_products_pass(comm: Any, grid: Any, dtype: str) -> None:
    """Products of matrices of all kinds pass without a repetition."""
    kinds = [x for x in NASTY if dtype not in ("float16", "int8") or x in ("normal", "integers", "sparse", "uniform")]
    for number in range(60 if everything() else 8):
        of_a, of_b = kinds[number % len(kinds)], kinds[(number // 3) % len(kinds)]
        m, n, k = ((70, 90, 400), (300, 20, 30), (65, 300, 100), (5, 7, 900))[number % 4]
        a, b = nasty(of_a, (m, k), dtype, number), nasty(of_b, (k, n), dtype, number + 1)
        A, B = (DistMatrix.from_global(x, grid=grid, block=13) for x in (a, b))
        beta = (0, 2)[number % 2]
        C = DistMatrix.from_function(lambda i, j: i - j + 0 * i, (m, n), grid=grid) if beta else None
        C = None if C is None else C.astype("int32" if dtype == "int8" else dtype)
        C = pdgemm(1, A, B, beta, C, protect="repair")
        assert C.report.checks.repeats == 0 and C.report.as_predicted, (of_a, of_b, m, n, k)
        assert C.report.checks.counted == C.report.checks.predicted


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_products_that_hold_nan_pass(comm: Any, grid: Any, value: float) -> None:
    """NaN or infinity in A, in B, or in C on entry; also overflow."""
    a, b = operands("float64")
    for which in range(4):
        x = [a.copy(), b.copy(), a + b]
        if which < 3:
            x[which][3, 7] = value
        else:
            x[0] *= 1e200
            x[1] *= 1e200
        A, B, C0 = (DistMatrix.from_global(y, grid=grid, block=16) for y in x)
        C = pdgemm(1.0, A, B, 1.0, C0, protect="detect")
        assert C.report.checks.repeats == 0
    A, B = (DistMatrix.from_global(y, grid=grid, block=16) for y in (np.full_like(a, value), b))
    C = pdgemm(0.0, A, B, 2.0, DistMatrix.from_global(a, grid=grid), protect="repair")  # A is not read
    found = C.to_global()
    assert comm.rank or np.array_equal(found, 2 * a)


def test_words_and_memory_of_protection_are_planned(comm: Any, grid: Any) -> None:
    """Words, all-reduces and bytes are planned, and within the memory limit; without protection they are 0."""
    A, B, C = (DistMatrix.random(x, grid=grid, block=16) for x in ((70, 50), (50, 60), (70, 60)))
    bare = plan(A, B, C, beta=1)
    for protect, copy in (("detect", 0), ("repair", C.local.nbytes)):
        found = plan(A, B, C, beta=1, protect=protect, algorithm="summa")
        assert "\nchecksums: 312 words in 5 allreduces, " in found.explain()
        assert found.protection
        checks = found.protection.cost(comm.rank)
        assert (checks.words, checks.allreduces) == (50 + 120 + 70 + 70 + 2, 5)
        rows = sum(x.local.shape[0] for x in (A, B, C))
        assert checks.bytes == 8 * (50 + rows + 70 + 120 + 70) + copy
        found.execute(A, B, C, beta=1)
        assert C.report.checks.counted == checks and C.report.as_predicted
        with pytest.raises(MemoryLimitError):
            plan(A, B, C, beta=1, protect=protect, algorithm="summa", memory_limit=checks.bytes - 1)
    assert "checksums" not in bare.explain() and plan(A, B, C, beta=1).extra_bytes(0) == bare.extra_bytes(0)
    assert pdgemm(1, A, B, 1, C).report.checks is None
    with pytest.raises(ArgumentError, match="protect 'all' is not one of detect, repair"):
        pdgemm(1, A, B, protect="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "int8"])
def test_redistributed_matrices_have_their_bits(
    comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], dtype: str
) -> None:
    """A flipped bit in a message is detected, and the exchange is repeated; a flip in X itself is an error."""
    x = (10 * operands("complex128" if dtype[0] == "c" else "float64")[0]).astype(dtype)
    exchange, planned = redistribution.exchange, {"bit": -1, "times": 0, "of": 1}

    def damaged(alpha: Any, X: Any, beta: Any, Y: Any, *more: Any) -> None:
        here = planned["times"] > 0 and comm.rank == comm.size - 1
        planned["times"] -= 1
        if here and not planned["of"]:
            flip(X, planned["bit"], 5)
        comm.Barrier()  # other ranks read X in place after the flip
        exchange(alpha, X, beta, Y, *more)
        if here and planned["of"]:
            flip(Y, planned["bit"], 5)

    monkeypatch.setattr(redistribution, "exchange", damaged)
    X = DistMatrix.from_global(x, grid=grid, block=16)
    for bit in range(0, 8 * x.itemsize, 1 if everything() else 11):
        planned |= {"bit": bit, "times": 1}
        for view, right in ((X, x), (X.T, x.T)) if bit % 2 else ((X.H, x.conj().T),):
            planned["times"] = 1
            Y = view.redistribute(block=7, protect="repair")
            found = Y.to_global()
            assert comm.rank or np.array_equal(found, right)
            assert comm.rank or "the redistribution is repeated" in capfd.readouterr().err
    for protect, times, of in (("detect", 1, 1), ("repair", 99, 1), ("repair", 1, 0)):
        planned |= {"bit": 3, "times": times, "of": of}
        with pytest.raises(CorruptionError, match="was redistributed, and its elements have changed"):
            X.redistribute(block=7, protect=protect)
        planned |= {"times": 0}
    with pytest.raises(ArgumentError, match="protect compares bits"):
        X.redistribute(alpha=2, protect="detect")


EXTREMES: list[tuple[str, dict[str, Any], float, float, float, int]] = [  # type, options, A, B, alpha, k
    ("float16", {}, 1e3, 1e3, 1, 40),  # C overflows
    ("float16", {}, 1e-4, 1e-4, 1, 7),  # C is subnormal
    ("float32", {"compute_type": "float16"}, 1e6, 1, 1, 40),  # operands overflow
    ("float32", {"compute_type": "float16"}, 1e-9, 1, 1, 40),  # operands underflow
    ("float32", {"compute_type": "bfloat16"}, 3, 1, 1, 40),
    ("float64", {}, 1e-170, 1, 1, 40),
    ("float64", {}, 1e-170, 1e-170, 1, 40),
    ("float32", {}, 1e-22, 1e-22, 1e20, 40),
    ("float32", {}, 1e-20, 1e-20, 1, 40),  # products are subnormal
    ("float64", {}, 1e160, 1, 1, 40),
    ("float64", {}, 1e160, 1e160, 1e300, 40),
    ("complex64", {}, 1e20, 1e20, 1, 40),
]
BEYOND = (0, 2, 10, 11)


@pytest.mark.parametrize(("case", "constant"), in_turn(range(len(EXTREMES)), [False, True, True]))
def test_overflow_and_underflow_are_no_flips(
    comm: Any, grid: Any, capfd: pytest.CaptureFixture[str], case: int, constant: bool
) -> None:
    """Overflow and underflow in the sums, in C's type, and in the type to which operands are rounded."""
    checksum._say_unknown.cache_clear()
    dtype, options, of_a, of_b, alpha, k = EXTREMES[case]
    r = np.random.default_rng(case)
    with np.errstate(all="ignore"):
        a, b = ((np.ones(x) if constant else r.uniform(-1, 1, x)) for x in ((90, k), (k, 70)))
        a, b = (a * of_a).astype(dtype), (b * of_b).astype(dtype)
    A, B = (DistMatrix.from_global(x, grid=grid, block=16) for x in (a, b))
    modes: list[Any] = ["detect", "repair"]
    for first, protect in zip((True, False), modes):
        C = pdgemm(alpha, A, B, protect=protect, **options)
        checks: Any = C.report.checks
        assert checks.repeats == 0
        assert checks.unknown == 90 * (case in BEYOND)  # otherwise rows are compared
        lines = capfd.readouterr().err
        assert comm.rank or ("90 of 90 rows of C could not be compared" in lines) == (checks.unknown > 0 and first)


def test_a_plan_for_beta_0_has_no_checksums_of_c(comm: Any) -> None:
    """Executed with another beta, the plan raises an error on all ranks, including ranks without rows of C."""
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        A, B, C = (DistMatrix.random((5, 5), grid=grid, block=8) for _ in "ABC")
        found = plan(A, B, C, protect="detect")
        with pytest.raises(ArgumentError, match="the plan's checksums are for beta = 0"):
            found.execute(A, B, C, beta=1)
        with pytest.raises(ArgumentError, match="the plan's checksums are for beta = 0"):
            found.prepare(A, B, C)(1)
        found.execute(A, B, C, alpha=0)
        checks: Any = C.report.checks
        assert checks.repeats == 0 and not C.local.any()
