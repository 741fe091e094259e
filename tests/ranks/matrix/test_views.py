"""Transposes and submatrices as views, and typical uses of them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import tiers
from problems import TOLERANCE, gemm_error, grid_shapes

from pdgemm import DistMatrix, ProcessGrid, pdgemm, verify
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.planning import planner
from pdgemm.schedules.products import arithmetic

pytestmark = pytest.mark.mpi


def numbers(shape: tuple[int, int], dtype: str = "complex128", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    return (x if dtype.startswith("complex") else x.real).astype(dtype)


@tiers.square_grid
def test_views_of_views_equal_numpys(comm: Any) -> None:
    x = numbers((23, 17))
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(x, grid=grid, block=(3, 2), source=(shape[0] - 1, 0))
            for made, expected in [
                (A.T, x.T),
                (A.H, x.conj().T),
                (A.H.T, x.conj()),
                (A.H.H, x),
                (A[4:20, 3:16], x[4:20, 3:16]),
                (A[4:20, 3:16][2:9, 1:].T, x[4:20, 3:16][2:9, 1:].T),
                (A.T[2:, 5:6], x.T[2:, 5:6]),
                (A.H[2:11][:, 5:], x.conj().T[2:11][:, 5:]),
                (A[-5:, :-3], x[-5:, :-3]),
                (A[9:4, 99:], x[9:4, 99:]),
                (A[:, 3:3], x[:, 3:3]),
            ]:
                assert made.shape == expected.shape
                assert np.array_equal(made.allgather(), expected)
                whole = made.to_global()
                assert whole is None or np.array_equal(whole, expected)
                assert np.array_equal(made.copy().allgather(), expected)
                assert np.isclose(made.norm(1), np.abs(expected).sum(axis=0).max(initial=0))
                assert np.isclose(made.norm(), np.linalg.norm(expected))
                assert np.array_equal((2 * made).allgather(), 2 * expected)
                rows, cols = made.indices()
                assert np.array_equal(made.local, expected[np.ix_(rows, cols)])
                if not made.conjugated and made.local.size:
                    assert np.shares_memory(made.local, A.local)
            with pytest.raises(ValueError, match="read-only"):
                A.H.local[...] = 0


def test_a_product_of_transposes_into_a_transpose_moves_nothing(grid: Any) -> None:
    a, b = numbers((9, 14), "float64", 1), numbers((11, 9), "float64", 2)
    A, B = DistMatrix.from_global(a, grid=grid, block=2), DistMatrix.from_global(b, grid=grid, block=2)
    C = DistMatrix.empty((11, 14), grid=grid, block=2)
    pdgemm(1, A, B, 0, C.T, transa="T", transb="T")
    assert gemm_error(C.allgather(), 1, b, a) <= TOLERANCE
    out = pdgemm(1, A.T, B.T, 0, C.T)
    assert out.report is not None
    assert out.report.moves == ()


def test_a_product_has_the_memory_order_of_both_operands(grid: Any) -> None:
    """Fortran order if both operands have it, on the grid where they were created; otherwise C order."""
    for orders, expected in (("CC", "C"), ("CF", "C"), ("FC", "C"), ("FF", "F")):
        A, B = (DistMatrix.random((9, 9), grid=grid, order=order, seed=s) for s, order in enumerate(orders))
        assert (A @ B).order == (A.T @ B.T).order == expected


def test_tall_and_skinny(comm: Any) -> None:
    """A^T A takes local products and one reduction, a product of row panels none; no matrix is redistributed."""
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        a, b = numbers((4000, 7), "float64", 1), numbers((7, 5), "float64", 2)
        A, B = DistMatrix.from_global(a, grid=grid, block=(64, 7)), DistMatrix.from_global(b, grid=grid)
        C = A.T @ A
        assert gemm_error(C.allgather(), 1, a.T, a) <= TOLERANCE
        assert C.report.moves == ()
        if comm.size > 1:
            assert C.report.algorithm == "inner"
            assert C.report.counted.words_received == C.local.size * (comm.size - 1)
        D = A @ B
        assert gemm_error(D.allgather(), 1, a, b) <= TOLERANCE
        assert D.report.algorithm in ("summa", "cannon")
        assert D.report.moves == ()
        assert D.report.counted.words_received == b.size - B.local.size  # only the small matrix is received, once


@pytest.mark.mpi(min_size=3)
@tiers.square_grid
def test_idle_ranks_take_part_and_hold_nothing(comm: Any) -> None:
    with ProcessGrid(comm, (1, 2), ranks=[2, 0]) as few, ProcessGrid(comm) as all_ranks:
        a, b = numbers((10, 8), "float64", 1), numbers((8, 6), "float64", 2)
        A, B = DistMatrix.from_global(a, grid=few, block=3), DistMatrix.from_global(b, grid=all_ranks, block=2)
        assert (A.local.size > 0) == (comm.rank in (0, 2))
        for C in (A @ B, (B.T @ A.T).T):
            assert gemm_error(C.allgather(), 1, a, b) <= TOLERANCE
            assert verify(C, 1, A, B).passed
        assert (A @ B).grid is few
        again = DistMatrix.from_global(a if comm.rank == 1 else None, grid=few, root=1)
        assert again.allclose(DistMatrix.from_global(a, grid=few))
        assert A.allclose(A.redistribute(grid=all_ranks, block=1).redistribute(grid=few, block=3))
        for kind in ("fro", 1, np.inf, "max"):
            assert np.isclose(A.norm(kind), np.abs(a).max() if kind == "max" else np.linalg.norm(a, kind))
        assert few.coords == ((0, [2, 0].index(comm.rank)) if comm.rank in (0, 2) else (-1, -1))


# ------------------------------------------------------------------ faults of other systems
def test_rows_of_column_major_arrays(comm: Any) -> None:
    with ProcessGrid(comm, (1, comm.size)) as grid:
        x = numbers((5, 7))
        X = DistMatrix.from_global(x, grid=grid)
        cols = DistMatrix.empty((1, 5), grid=grid, order="F").local.shape[1]
        C = DistMatrix.from_local(np.zeros((4, cols), "D", order="F")[:1], (1, 5), grid=grid)
        assert C.order == "F" or all(comm.allgather(cols <= 1))
        row = DistMatrix.from_global(x[:1], grid=grid)
        pdgemm(1, row, X.H, 0, C)
        assert gemm_error(C.allgather(), 1, x[:1], x.conj().T) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_sums_are_rounded_in_pieces_of_any_shape(grid: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planner.best_plan.cache_clear()
    monkeypatch.setattr(arithmetic, "SLAB", 8)
    a, b = (np.round(numbers(shape, "float64", 1) * 3) for shape in ((50, 3), (3, 20)))
    for m, n, order, algorithm in tiers.pairs((1, 50), (1, 2, 20), "CF", ("summa", "inner", "stationary_a", "cannon")):
        A, B = (DistMatrix.from_global(x.astype(dtype), grid=grid, block=4) for x in (a[:m], b[:, :n]))
        into = {"float16": "float16", "int8": "int32", "float64": "float32"}[dtype]
        C = DistMatrix.empty((m, n), grid=grid, dtype=into, order=order)
        pdgemm(1, A, B, 0, C, algorithm=algorithm)
        assert np.array_equal(C.allgather(), a[:m] @ b[:, :n])
    planner.best_plan.cache_clear()


# ------------------------------------------------------------------ memory
@tiers.square_grid
@pytest.mark.parametrize(("dtype", "order"), tiers.in_turn(["float64", "float16", "int8", "complex128"], "CF"))
def test_memory_equals_the_plan(comm: Any, grid: Any, dtype: str, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hidden copies: allocations of NumPy and in shared memory equal the report's, except for short arrays."""
    empty, shared = NodeMemory.empty, [0]

    def counted(*args: Any) -> np.ndarray:
        array = empty(*args)
        shared[0] += array.nbytes
        return array

    def peak(work: Any) -> int:
        work()  # plans are cached after the first call
        shared[0] = 0
        tracemalloc.start()
        work()
        bytes_ = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return bytes_ + shared[0]

    monkeypatch.setattr(NodeMemory, "empty", counted)

    n = 500
    allowed = 100_000 + (
        8 * np.getbufsize() if dtype == "int8" else 0
    )  # bytes for Python objects, row indices, and NumPy's buffer of casts
    with ProcessGrid(comm, (comm.size, 1)) as other:
        A = DistMatrix.zeros((n, n), grid=grid, block=7, dtype=dtype, order=order)
        B = DistMatrix.zeros((n, n), grid=other, block=(5, 64), dtype=dtype)
        C = DistMatrix.zeros((n, n), grid=grid, block=7, dtype="int32" if dtype == "int8" else dtype, order=order)
        inside, outside = A[3:400, 2:300], B[100:398, 5:200]
        into = C[1:398, 2:197]
        for out, work in [
            (C, lambda: pdgemm(1, A, A, 2, C)),
            (C, lambda: pdgemm(1, A, A.H, 2, C)),
            (C, lambda: pdgemm(2, A, B, 0, C)),
            (C, lambda: pdgemm(1, A, B, 1, C, algorithm="inner", memory_limit=3 << 20)),
            (into, lambda: pdgemm(1, inside, outside, 1, into)),
            (C, lambda: A.T.redistribute(C)),
            (C, lambda: B.redistribute(C, alpha=2, beta=1, memory_limit=1 << 18)),
        ]:
            hidden = comm.allgather(peak(work) - out.report.extra_bytes)  # gathered, so that all ranks fail or none
            assert min(hidden) >= -1000
            assert max(hidden) <= allowed, out.report


# ------------------------------------------------------------------ types
@pytest.mark.parametrize("algorithm", ["summa", "inner"])
def test_sixteen_bit_products_are_added_up_in_32(comm: Any, algorithm: str) -> None:
    """The sum 1 + 2^-11 + 2^-11 + ... is right: in 16 bits each addend would be lost by rounding."""
    for dtype in ("float16", "bfloat16"):
        with ProcessGrid(comm) as grid:
            k = 2048
            row = DistMatrix.from_function(lambda i, j: np.where(j == 0, 1.0, 2.0**-11), (1, k), grid=grid, dtype=dtype)
            col = DistMatrix.zeros((k, 1), grid=grid, dtype=dtype) + np.dtype(dtype).type(1)
            C = pdgemm(1, row, col, algorithm=algorithm, panel_width=64)
            assert C.dtype == dtype
            assert C.report.dtype == "float32"
            assert C.allgather() == np.array(1 + 2047 / 2048).astype(dtype)
            # one panel of A and B is converted at a time, never the whole matrix
            if algorithm == "summa" and comm.size == 1:
                assert C.report.extra_bytes <= 64 * 2 * 4 + 3 * 4


def test_accumulate_dtype(grid: Any) -> None:
    a = numbers((6, 3000), "float32", 1) + 100
    A = DistMatrix.from_global(a, grid=grid, block=(2, 100))
    exact = a.astype("d") @ a.astype("d").T
    single, double = pdgemm(1, A, A.T), pdgemm(1, A, A.T, accumulate_dtype="float64")
    assert double.dtype == "float32"
    assert double.report.dtype == "float64"
    assert np.array_equal(double.allgather(), exact.astype("f"))
    assert np.abs(single.allgather() - exact).max() > np.abs(double.allgather() - exact).max()
    wide = pdgemm(1, A, A.T, 0, DistMatrix.empty((6, 6), grid=grid), accumulate_dtype="float32")
    assert wide.dtype == "float64"
    assert verify(wide, 1, A, A.T, accumulate_dtype="float32").passed
    assert not verify(wide, 1, A, A.T).passed
    mixed = A @ A.T.astype("complex128")
    assert mixed.dtype == "complex128"
    assert gemm_error(mixed.allgather(), 1, a, a.T) <= TOLERANCE


def test_without_the_check_nothing_is_compared(grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, C = DistMatrix.random((20, 20), grid=grid), DistMatrix.empty((20, 20), grid=grid)
    expected = pdgemm(1, A, A)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("an allreduce")

    monkeypatch.setattr("pdgemm.support.agreement.agree", refuse)
    with pytest.raises(AssertionError, match="an allreduce"):
        pdgemm(1, A, A, 0, C)
    pdgemm(1, A, A, 0, C, check=False)
    A.redistribute(C, beta=1, alpha=-1, check=False)
    monkeypatch.undo()
    assert (C + A).allclose(expected)
    with pytest.raises(ValueError, match="inner dimensions"):
        pdgemm(1, A, A[3:, :], check=False)


@tiers.every_grid
def test_assignments_within_shared_memory_equal_numpys(comm: Any) -> None:
    """Random windows, steps, lists and transposes of a matrix are assigned to other parts of it."""
    rng = np.random.default_rng(3)

    def keys(n: int, count: int) -> Any:
        start, step = int(rng.integers(0, n - count + 1)), int(rng.choice([-1, 1, 2]))
        if step == 2 and start + 2 * count <= n:
            return slice(start, start + 2 * count, 2)
        if step == -1:
            return slice(start + count - 1, start - 1 if start else None, -1)
        return slice(start, start + count) if rng.random() < 0.8 else rng.permutation(n)[:count]

    shapes = grid_shapes(comm.size)
    for number in range(tiers.examples(45 if comm.size <= 4 else 15)):
        m = int(rng.integers(3, 9))
        shape, dtype = shapes[number % len(shapes)], "dDfi"[number % 4]
        height, width = rng.integers(1, m, 2)
        to, of = [(keys(m, height), keys(m, width)) for _ in range(2)]
        turned = number % 3 == 0 and height == width
        whole = (rng.standard_normal((m, m)) * 9).astype(dtype)
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(whole, grid=grid, block=(1 + number % 3, 2))
            expected = whole.copy()
            to, of = [np.ix_(*x) if all(isinstance(y, np.ndarray) for y in x) else x for x in (to, of)]
            expected[to] = (whole.conj().T if turned else whole)[of]
            A[to] = (A.H if turned else A)[of]
            assert np.array_equal(A.allgather(), expected), (shape, m, to, of, turned)
            A[...] = A.T
            A[1:] = A[:-1]
            A[:, :-1] = A[:, 1:]
            A[1:] += A[:-1]
            np.add(A, A.T, out=A)
            expected = expected.T.copy()
            expected[1:] = expected[:-1].copy()
            expected[:, :-1] = expected[:, 1:].copy()
            expected[1:] += expected[:-1].copy()
            assert np.allclose(A.allgather(), expected + expected.T, rtol=0, atol=0)
