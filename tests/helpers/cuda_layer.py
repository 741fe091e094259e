"""The tests of `pdgemm.devices`: on a real GPU (test_gpu.py), and on CuPy without one (test_cuda_layer.py)."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from checked_product import check
from device_elements import (
    FLOATING,
    KINDS,
    LAYOUTS,
    check_extremes,
    check_functions,
    check_products,
    check_reductions,
    elements,
    two_matrices,
)
from factored import EPS, norm, positive_definite, relative, rng_matrix, wide
from problems import DTYPES, accepted

from pdgemm.planning.algorithm_registry import families

ALL = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32")


class CudaLayer:
    """Kernels, cuBLAS, every mover, memory."""

    OPS: ClassVar = [a + b for a in "NTC" for b in "NTC"]

    @pytest.mark.parametrize("source", ALL)
    def test_combine(self, cuda: Any, source: str) -> None:
        """Y := alpha op(X) + beta Y against NumPy, of strided views and of rows and columns without a pattern."""
        from pdgemm.local.arrays.dtypes import can_convert

        for target in map(np.dtype, ALL):
            if can_convert(np.dtype(source), target):
                combined(cuda, np.dtype(source), target)

    @pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
    def test_infinity_times_one(self, cuda: Any, dtype: str) -> None:
        """No factor 1 + 0i makes a NaN of an infinity, as on the host; nor is C read where beta is 0."""
        from pdgemm.local.arrays.elementwise import Combine

        x, y = np.array([[np.inf, 1, -np.inf]], dtype), np.array([[1, np.inf, 2]], dtype)
        for alpha, beta, value in ((1, 1, [[np.inf, np.inf, -np.inf]]), (1, 0, x), (0, 1, y)):
            X, Y = cuda.to_device(x, "C"), cuda.to_device(y if beta else y * np.nan, "C")
            cuda.combine(Combine(alpha, beta), Y, X)
            assert np.array_equal(cuda.to_host(Y), np.array(value, dtype))

    @pytest.mark.parametrize("algorithm", families())
    def test_every_mover(self, comm: Any, movers: list[str], algorithm: str) -> None:
        from pdgemm import ProcessGrid

        orders = ["".join(x) for x in itertools.product("CF", repeat=3)]
        cases = [x for x in accepted(comm.size) if x[0] == algorithm]
        if not cases:
            pytest.skip("one rank has no layers")
        with ProcessGrid(comm) as grid:
            for number, (mover, op) in enumerate(itertools.product(movers, self.OPS)):
                name, shape, layers = cases[number % len(cases)]
                options: dict[str, Any] = {"block": (None, 4, (2, 3))[number % 3], "orders": orders[number % 8]}
                options |= {"dtype": DTYPES[number % 4], "alpha": 2, "beta": number % 2, "device": "cuda"}
                check(grid, (93, 119, 122), name, shape, layers, ops=op, mover=mover, **options)

    def test_sixteen_bits_and_whole_numbers(self, comm: Any, movers: list[str]) -> None:
        from pdgemm import DistMatrix, ProcessGrid, pdgemm

        rng = np.random.default_rng(3)
        a, b = rng.integers(-100, 100, (120, 401)), rng.integers(-100, 100, (401, 90))
        with ProcessGrid(comm) as grid:
            for mover, (dtype, into) in itertools.product(
                movers, [("int8", "int32"), ("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
            ):
                A, B = (DistMatrix.from_global(x.astype(dtype), grid=grid, block=30, device="cuda") for x in (a, b))
                C = DistMatrix.empty((120, 90), grid=grid, dtype=into, device="cuda")
                pdgemm(1, A, B, 0, C, mover=mover)
                error = np.abs(C.allgather().astype(float) - a @ b)
                assert error.max() <= (0 if into != "bfloat16" else 2.0**-8 * np.abs(a @ b).max())

    def test_memory(self, comm: Any) -> None:
        """Nothing is left allocated after 100 products, and none takes more than its plan says."""
        import cupy

        from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan

        pool = cupy.get_default_memory_pool()
        with ProcessGrid(comm) as grid:
            A, B, C = (DistMatrix.random((700, 700), grid=grid, block=64, seed=s, device="cuda") for s in range(3))
            pdgemm(1, A, B, 0, C)
            comm.Barrier()  # no other rank has them mapped
            pool.free_all_blocks()
            used, total = pool.used_bytes(), pool.total_bytes()
            for _ in range(100):
                pdgemm(1, A, B, 0, C)
            assert pool.used_bytes() == used
            rounding = 512 * 16  # of the pool, for each buffer
            assert pool.total_bytes() - total <= plan(A, B, C).extra_bytes(comm.rank) + rounding

    def test_too_much_is_asked_for(self, comm: Any) -> None:
        from pdgemm import DistMatrix, ProcessGrid
        from pdgemm.errors import OutOfMemoryError

        with ProcessGrid(comm) as grid, pytest.raises(OutOfMemoryError, match="cannot allocate .* bytes on GPU"):
            DistMatrix.empty((1 << 21, 1 << 21), grid=grid, device="cuda")

    def test_managed_memory_is_staged(self, comm: Any) -> None:
        import cupy

        from pdgemm import DistMatrix, ProcessGrid, pdgemm

        with ProcessGrid(comm) as grid:
            shape = DistMatrix.zeros((50, 50), grid=grid).local.shape
            with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
                local = cupy.ones(shape)
            A = DistMatrix.from_local(local, (50, 50), grid=grid)
            assert not A.mpi_addressable
            C = pdgemm(1, A, A)
            assert (C.allgather() == 50).all()
            assert comm.size == 1 or C.report.mover in ("staged", "shared", "ipc")

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
    def test_batches(self, comm: Any, cuda: Any, dtype: str) -> None:
        """Stacks are one call of cuBLAS, in either order and conjugated; other sequences a call for each."""
        from pdgemm import Batch, matmul_batched

        rng = np.random.default_rng(comm.rank)
        a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((3, 20, 7), (3, 7, 12)))
        c = rng.integers(-9, 9, (3, 20, 12)).astype("float32" if dtype == "float16" else dtype)
        if c.dtype.kind == "c":
            a, b = a + 2j * a[::-1], b * (1 - 1j)
        A, B, C = (Batch.from_local(cuda.to_device(x.astype(y.dtype), "C"), comm) for x, y in ((a, a), (b, b), (c, c)))
        T = Batch.from_local([cuda.to_device(x.conj().T.astype(a.dtype), "F") for x in a], comm)
        for left, trans in ((A, "N"), (T, "C")):
            matmul_batched(left, B, C, alpha=2, beta=-1, transa=trans)
            c = (2 * (a.astype(c.dtype) @ b.astype(c.dtype)) - c).astype(c.dtype)
            assert np.array_equal([cuda.to_host(x) for x in C.items], c)  # whole numbers, all exact

    def test_matrices(self, comm: Any, cuda: Any) -> None:
        """What is made on the device, brought there, moved to another layout and combined is what the host has."""
        from pdgemm import DistMatrix, ProcessGrid, verify

        rng = np.random.default_rng(7)
        x, y = rng.standard_normal((2, 41, 29))
        with ProcessGrid(comm) as grid:
            X, Y = (DistMatrix.from_global(v, grid=grid, block=(4, 3), device="cuda") for v in (x, y))
            assert np.array_equal(X.to_host().allgather(), x)
            assert np.array_equal(DistMatrix.from_global(y, grid=grid).to_device("cuda").allgather(), y)
            Z = 2 * X - Y
            Z += 1
            assert np.array_equal(Z.allgather(), 2 * x - y + 1)
            moved = Z.T.redistribute(block=5, order="F", dtype="float32")
            assert np.array_equal(moved.allgather(), (2 * x - y + 1).T.astype("float32"))
            part = X[3:30, 2:].redistribute(block=(2, 7))
            assert np.array_equal(part.allgather(), x[3:30, 2:])
            part.redistribute(Y[3:30, 2:], alpha=-1, beta=3)
            y[3:30, 2:] = 3 * y[3:30, 2:] - x[3:30, 2:]
            assert np.array_equal(Y.allgather(), y)
            assert np.isclose(X.norm(), np.linalg.norm(x))
            assert verify(X.T @ Y, 1, X.T, Y).passed
            columns = cuda.to_device(X.to_host().local, "F")
            adopted = DistMatrix.from_local(columns, x.shape, grid=grid, block=(4, 3))
            assert adopted.order == "F"
            assert np.array_equal(adopted.allgather(), x)

    @pytest.mark.parametrize("dtype", KINDS)
    def test_reductions(self, comm: Any, cuda: Any, dtype: str, monkeypatch: Any) -> None:
        """Every reduction along each axis, of several slabs, against NumPy within the documented error."""
        from pdgemm import DistMatrix, ProcessGrid
        from pdgemm.local.arrays import folds

        with ProcessGrid(comm) as grid:
            for number, (shape, block) in enumerate(LAYOUTS):
                monkeypatch.setattr(folds, "ON_DEVICE", 2000 if number % 2 else 1 << 24)
                how: dict[str, Any] = {"grid": grid, "block": block, "order": "CF"[(number + KINDS.index(dtype)) % 2]}
                x = elements(shape, dtype)
                A = DistMatrix.from_global(x, device="cuda", **how)
                check_reductions(A, DistMatrix.from_global(x, **how), x)
                check_products(A, x)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_reductions_of_extreme_elements(self, comm: Any, cuda: Any, dtype: str) -> None:
        from pdgemm import ProcessGrid

        with ProcessGrid(comm) as grid:
            check_extremes(grid, dtype, "cuda")

    @pytest.mark.parametrize("dtype", KINDS)
    def test_functions_of_elements(self, comm: Any, cuda: Any, dtype: str) -> None:
        """Comparisons, where, isclose, round and others, of matrices in the same and in different layouts."""
        from pdgemm import DistMatrix, ProcessGrid

        with ProcessGrid(comm) as grid:
            for number, (shape, block) in enumerate(LAYOUTS):
                x, y = two_matrices(shape, dtype)
                A = DistMatrix.from_global(x, grid=grid, block=block, order="CF"[number % 2], device="cuda")
                B = DistMatrix.from_global(y, grid=grid, block=5, device="cuda")
                check_functions(A, B, x, y)

    def test_a_product_keeps_its_operands(self, comm: Any, cuda: Any) -> None:
        """A prepared call of cuBLAS has addresses, which keep nothing alive."""
        C = cuda.empty((64, 64), "float64")
        ones = np.ones((64, 64))
        multiply = cuda.multiply(2.0, cuda.to_device(ones, "C"), cuda.to_device(ones, "F"), C, False, False, tf32=False)
        others = [cuda.to_device(0 * ones, "C") for _ in range(4)]
        multiply(0)
        multiply(1)
        assert (cuda.to_host(C) == 256).all()
        assert len(others) == 4

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_factors_and_triangles(self, comm: Any, cuda: Any, dtype: str) -> None:
        """cuBLAS solves with a triangle as BLAS does; a matrix is factored where ranks reach each other's memory."""
        from pdgemm import DistMatrix, ProcessGrid, linalg
        from pdgemm.local.blas.local_lapack import trsm

        S, b = positive_definite(70, dtype), rng_matrix(70, 20, dtype)
        for order, lower, trans, unit, side in itertools.product("CF", (True, False), "NTC", (False, True), "LR"):
            how: Any = {"lower": lower, "trans": trans, "unit": unit, "side": side, "alpha": 2}
            given, x = (
                np.asarray(S[:20, :20], order=order),
                np.array(b[:20] if side == "L" else b.T[:, :20], order=order),
            )
            on_device = cuda.to_device(x, order)
            trsm(cuda.to_device(given, order), on_device, **how)
            trsm(given, x, **how)
            assert np.allclose(cuda.to_host(on_device), x, rtol=1e-3)
        with ProcessGrid(comm) as grid:
            A, B = (DistMatrix.from_global(x, grid=grid, block=8, device="cuda") for x in (S, b))
            reach = cuda.reach(grid)
            if comm.size > 1 and reach.staged and reach.reads != "shared":
                pytest.skip("MPI takes no pointers, and ranks do not share a GPU")
            X = linalg.cho_solve(linalg.cholesky(A), B).allgather()
            assert relative(wide(b) - wide(S) @ X, norm(S) * norm(X), dtype, 70) <= EPS


def combined(cuda: Any, source: np.dtype, target: np.dtype) -> None:
    from pdgemm.grids.index_map import IndexMap
    from pdgemm.local.arrays.dtypes import arithmetic
    from pdgemm.local.arrays.elementwise import Combine

    rng = np.random.default_rng(1)
    x, y = (10 * rng.standard_normal((23, 31)) for _ in range(2))
    x, y = x.astype(source), y.astype(target)
    if source.kind == "c":
        x.imag = rng.standard_normal(x.shape)
    wide = np.dtype(np.int64) if target.kind == "i" else arithmetic(source, target)
    eps = 0.0 if target.kind == "i" else float(max(np.finfo(wide).eps, _eps(target)))
    scattered = np.array([0, 1, 4, 5, 9, 11, 17, 20])
    runs = IndexMap(scattered, np.flip(22 - scattered), np.ones(len(scattered), int))
    for (alpha, beta), conjugated in itertools.product([(1, 0), (2, 3), (0, 2), (0, 0), (-1, 1)], [False, True]):
        how = Combine(alpha, beta, None, conjugated)
        value = alpha * (x.conj() if conjugated else x).astype(wide) + beta * y.astype(wide)
        for order in "CF":
            X, Y = cuda.to_device(x, order), cuda.to_device(y, "C")
            cuda.combine(how, Y[2:, ::3], X[2:, ::3])
            found = cuda.to_host(Y)
            assert np.abs(found[2:, ::3].astype(wide) - value[2:, ::3]).max() <= 4 * eps * 100
            assert np.array_equal(found[:2], y[:2])
            Y = cuda.to_device(y, "C")
            cuda.combine_blocks(how, Y, X, runs, runs)
            expected = y.astype(wide)
            at, to = np.ix_(runs.source, runs.source), np.ix_(runs.target, runs.target)
            expected[to] = alpha * (x.conj() if conjugated else x).astype(wide)[at] + beta * y.astype(wide)[to]
            assert np.abs(cuda.to_host(Y).astype(wide) - expected).max() <= 4 * eps * 100


def _eps(dtype: np.dtype) -> float:
    from pdgemm.local.arrays.dtypes import eps

    return eps(dtype)
