"""Flipped bits are found beside very large or small rows, and in functions; no rank is named without proof."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from flips import changed_after_the_product, larger
from problems import DTYPES

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.algorithms.protection import checksum, row_checksums
from pdgemm.algorithms.protection.row_checksums import weights
from pdgemm.errors import ArgumentError, CorruptionError

pytestmark = pytest.mark.mpi
M, N, K = 70, 60, 50
MODES: tuple[Any, ...] = ("detect", "repair")
# n for which weights of +1 and -1, by the sign of the weights in use, add up to 0
CANCELLING = (
    2, 4, 6, 8, 24, 394, 396, 398, 402, 404, 406, 458, 464, 468, 470, 472, 488, 490, 750, 1424, 1426, 1434, 1486, 1488,
)  # fmt: skip


def normal(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray:
    r = np.random.default_rng(seed)
    return (r.normal(size=shape) + (1j * r.normal(size=shape) if dtype[0] == "c" else 0)).astype(dtype)


def times_1000(C: Any, row: int, col: int) -> None:
    rows, cols = C.indices()
    C.local[np.ix_(rows == row, cols == col)] *= 1000


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def sizes(kind: str, dtype: str) -> Arrays:
    """Return A, B and C on entry with rows or columns of very different magnitude."""
    double = dtype in ("float64", "complex128")
    real = np.finfo(dtype).dtype.type
    tiny, least, huge = (1e-160, 5e-324, 1e140) if double else (1e-25, 1e-45, 1e15)
    a, b, c = (normal(x, dtype, i) for i, x in enumerate(((M, K), (K, N), (M, N))))
    if kind == "a row of B is tiny":
        b[3] *= real(tiny)
    elif kind == "a row of B is subnormal":
        b[3] = real(least)
    elif kind == "a column of B is tiny":
        b[:, 3] *= real(tiny)
    elif kind == "a row of A is tiny":
        a[3] *= real(tiny)
    elif kind == "a column of A is tiny":
        a[:, 3] *= real(tiny)
    elif kind == "A is tiny":
        a *= real(tiny * 1e10)
    elif kind == "A and B are small":
        a, b = a * real(tiny**0.5), b * real(tiny**0.5)
    elif kind == "C on entry is tiny":
        return a * real(tiny), b, c * real(tiny)
    elif kind == "rows of C on entry are tiny":
        c[3::2] *= real(tiny)
        return a, b, c
    elif kind == "a row of A is huge":
        a[3] *= real(huge)
    elif kind == "a row of B is huge, and not read":
        b[3], a[:, 3] = b[3] * real(huge), 0
    elif kind == "all sizes":
        a, b = (x * (10.0 ** (np.arange(len(x)) % 29 - 14)).astype(real)[:, None] for x in (a, b))
    elif kind == "a row of A is NaN":
        a[9] = np.nan
    return a, b, None


KINDS = (
    "a row of B is tiny", "a row of B is subnormal", "a column of B is tiny", "a row of A is tiny",
    "a column of A is tiny", "A is tiny", "A and B are small", "C on entry is tiny", "rows of C on entry are tiny",
    "a row of A is huge", "a row of B is huge, and not read", "all sizes", "a row of A is NaN",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_large_changes_are_found_beside_rows_of_any_size(
    comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """An element is multiplied by 1000, in a typical row, or in row 3, which has another magnitude."""
    for dtype in DTYPES[KINDS.index(kind) % 2 :: 2]:
        a, b, c = sizes(kind, dtype)
        A, B = (DistMatrix.from_global(x, grid=grid, block=16) for x in (a, b))
        C0 = None if c is None else DistMatrix.from_global(c, grid=grid, block=16)

        def run(protect: Any, A: Any = A, B: Any = B, C0: Any = C0) -> Any:
            return pdgemm(1, A, B, int(C0 is not None), None if C0 is None else C0.copy(), protect=protect)

        checksum._say_unknown.cache_clear()
        right = run("repair")
        checks, unknown = right.report.checks, int(kind == "a row of A is NaN")
        said = capfd.readouterr().err
        assert checks.repeats == 0 and checks.unknown == unknown and checks.counted == checks.predicted
        assert comm.rank or ("1 of 70 rows of C could not be compared" in said) == bool(unknown)
        elements = right.allgather()
        for row, protect in product((3, 5), MODES):
            where = row, int(np.argmax(np.abs(elements[row])))
            with monkeypatch.context() as patch:
                changed_after_the_product(patch, lambda C, at=where: times_1000(C, *at), 1)
                if protect == "detect":
                    with pytest.raises(CorruptionError, match=f"1 of 70 rows of C differ .* row {row} first"):
                        run(protect)
                    continue
                made = run(protect)
            assert made.report.checks.repeats == 1, (dtype, where)
            assert np.array_equal(made.allgather(), elements, equal_nan=True)


def test_panels_of_a_are_compared_where_rows_of_b_are_constant(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rows of B are constant, an error in A is equal in all columns of a rank; weights with sum 0 would hide it."""
    ready, left = Accumulator.prepared, [0]

    def prepared(self: Any, A: Any, B: Any, *_: Any) -> Any:
        multiply = ready(self, A, B)

        def work() -> None:
            if not (left[0] and A.size and B.size):
                multiply()
                return
            left[0] -= 1
            right = A.copy()
            A[0, 0] = -8 * A[0, 0] - 16  # a wrong panel; restored below, because it may be a view
            multiply()
            A[...] = right

        return work

    monkeypatch.setattr(Accumulator, "prepared", prepared)
    shape = (1, comm.size)
    with ProcessGrid(comm, shape) as grid:
        for number, n in enumerate(CANCELLING):
            dtype = (*DTYPES, "int8")[number % 5]
            a = np.arange(1, 13).reshape(4, 3).astype(dtype)
            A = DistMatrix.from_global(a, grid=grid)
            B = DistMatrix.from_function(lambda i, j: i + 1 + 0 * j, (3, comm.size * n), grid=grid, dtype=dtype)
            left[0] = int(comm.rank == number % comm.size)
            with pytest.raises(CorruptionError, match="1 of 4 rows of C differ"):
                pdgemm(1, A, B, algorithm="summa", mover="ibcast", protect="detect")
            assert left[0] == 0


def test_weights_of_a_rank_never_cancel() -> None:
    """The weights of a rank's columns never add up to 0, for n up to 4000 on 1 to 9 ranks; weights of +-1 would."""
    some = weights(np.arange(4000))
    assert ((np.abs(some) >= 1) & (np.abs(some) < 2) & (some.astype(np.float32) == some)).all()
    odd = weights(np.arange(4000), exact=True)
    assert (odd % 2 == 1).all() and odd.max() < 2**32
    for exact, sums in ((False, some), (True, odd)):
        sums = np.concatenate([sums[:1] * 0, np.cumsum(sums)])
        if not exact:
            assert not [n for n in CANCELLING if np.cumsum(np.sign(some))[n - 1]]
        for ranks in range(1, 10):
            n = np.arange(ranks, 4001)[:, None]
            ends = np.minimum(-(-n // ranks) * np.arange(ranks + 1), n)
            columns, total = np.diff(ends, axis=1), np.diff(sums[ends], axis=1)
            far = total % 2**18 != 0 if exact else np.abs(total) > 1e-5 * np.sqrt(columns)  # int8: |a b| <= 2^14
            assert (far | (columns == 0)).all()


def test_large_rounding_errors_are_not_reported_as_flips(
    comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a row exceeds its threshold in two runs with the same bits, no flip is reported; with other bits, one is."""
    monkeypatch.setattr(row_checksums, "SHARP", 8.0)  # a sharper threshold, 0.2 tau

    def shifted(C: Any, by: float) -> None:
        rows, cols = C.indices()
        C.local[np.ix_(rows == 5, cols == 7)] += C.dtype.type(by)

    A, B = (DistMatrix.from_global(normal(x, "float64", 1), grid=grid) for x in ((2 * M, K), (K, N)))
    right = pdgemm(1, A, B).allgather()
    tau = 2.0**-53 * (7 / 3 * (N + K)) ** 0.5 * float(abs(A.allgather()[5]) @ np.linalg.norm(B.allgather(), axis=1))
    tau /= abs(float(row_checksums.weights(np.arange(N))[7]))
    for times, by in ((9, 4 * tau), (1, 4 * tau), (9, 1e3 * tau)):
        with monkeypatch.context() as patch:
            changed_after_the_product(patch, lambda C, by=by: shifted(C, by), times)
            if by > 100 * tau:
                with pytest.raises(CorruptionError) as raised:
                    pdgemm(1, A, B, protect="repair")
                assert re.search(r"twice with the same bits", str(raised.value))
                assert "flipped" not in str(raised.value)
            else:
                C = pdgemm(1, A, B, protect="repair")
                assert C.report.checks.repeats == 1
                assert (C.allgather() == right).all() == (times == 1)
        first, *more = capfd.readouterr().err.splitlines() or [""]
        if comm.rank == 0:
            expected = "pdgemm: 1 of 140 rows of C differ from their checksums, row 5 first; the product is repeated"
            assert first == expected
            flipped = re.search(r"other bits: a bit has flipped on rank \d+ on \S+; C is", "".join(more))
            assert bool(flipped) == (times == 1) and ("rank" in "".join(more)) == (times == 1)
            assert ("the same bits: no bit has flipped" in "".join(more)) == (times == 9 and by < 100 * tau)


# ------------------------------------------------------------------ functions of matrices
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "svd": lambda la, A, **more: la.svd(A, 4, oversample=2, **more)[0],
    "eigh": lambda la, A, **more: la.eigh(A, k=2, tolerance=1e-9, **more)[1],
    "polar": lambda la, A, **more: la.polar(A, **more)[0],
    "matrix_sign": lambda la, A, **more: la.matrix_sign(A, **more),
    "sqrtm": lambda la, A, **more: la.sqrtm(A, **more),
    "sqrtm pos": lambda la, A, **more: la.sqrtm(A, assume_a="pos", **more),
    "expm": lambda la, A, **more: la.expm(A, **more),
    "matrix_power": lambda la, A, **more: la.matrix_power(A, 7, **more),
    "newton_schulz": lambda la, A, **more: la.newton_schulz(A, **more),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_inside_are_compared_and_repeated(
    comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After a flip, "repair" has the bits of an undisturbed run, and "detect" raises; comparisons are counted."""
    x = np.random.default_rng(3).normal(size=(36, 36))
    a = x @ x.T / 36 + np.eye(36)
    A, function = DistMatrix.from_global(a, grid=grid), FUNCTIONS[name]

    def run(protect: Any) -> tuple[np.ndarray, Any]:
        result = function(linalg, A, protect=protect)
        return result.allgather(), result.report

    right, report = run(None)
    assert report.checks is None and "compared" not in str(report)
    found, report = run("repair")
    checks = report.checks
    assert np.array_equal(found, right) and checks.counted == checks.predicted and not checks.repeats
    assert checks.counted.allreduces >= 5 * report.products
    assert "factorisations, solves and redistributions were not compared" in str(report)
    with monkeypatch.context() as patch:
        changed_after_the_product(patch, larger, after=1)
        found, report = run("repair")
        assert np.array_equal(found, right) and report.checks.repeats == 1
        changed_after_the_product(patch, larger, after=1)
        with pytest.raises(CorruptionError, match="rows of C differ"):
            run("detect")
    with pytest.raises(ArgumentError, match="protect 'all' is not one of"):
        run("all")


def test_parts_of_products_are_not_compared(comm: Any, grid: Any) -> None:
    """For a triangle of a product, or a factorisation, `protect=` is an error on all ranks."""
    A: Any = DistMatrix.random((18, 8), grid=grid)
    more: Any = {"protect": "detect"}
    for call in (lambda: linalg.herk(1, A, **more), lambda: linalg.gram(A, **more), lambda: linalg.svd(A, **more)):
        with pytest.raises(ArgumentError, match="protect"):
            call()
