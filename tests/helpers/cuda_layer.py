"""The tests of `pdgemm.devices`: on a real GPU (test_gpu.py), and on CuPy without a GPU (test_cuda_layer.py)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, ClassVar

import device_tensors
import numpy as np
import pytest
from checked_product import check
from cuda_lapack import CudaLapack
from device_elements import (
    FLOATING,
    KINDS,
    check_extremes,
    check_functions,
    check_products,
    check_reductions,
    elements,
    layouts,
    two_matrices,
)
from problems import DTYPES, accepted

from pdgemm import Batch, DistMatrix, ProcessGrid, batched, checksum, linalg, matmul_batched, pdgemm, plan, verify
from pdgemm.algorithms.protection import checksum as sums
from pdgemm.errors import OutOfMemoryError
from pdgemm.grids.index_map import IndexMap
from pdgemm.io import hdf5, npy, pieces
from pdgemm.local.arrays import folds
from pdgemm.local.arrays.activations import ACTIVATIONS, Finish
from pdgemm.local.arrays.dtypes import arithmetic, can_convert, eps
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.matrix import distmatrix
from pdgemm.planning.algorithm_registry import families
from pdgemm.schedules.staircase import Staircase

ALL = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32")


class CudaLayer(CudaLapack):
    """Tests of kernels, cuBLAS, all movers, and memory."""

    OPS: ClassVar = [a + b for a in "NTC" for b in "NTC"]

    @pytest.mark.parametrize("source", ALL)
    def test_combine(self, cuda: Any, source: str) -> None:
        """Compare Y := alpha op(X) + beta Y with NumPy, for strided views and for irregular rows and columns."""
        for target in map(np.dtype, ALL):
            if can_convert(np.dtype(source), target):
                combined(cuda, np.dtype(source), target)

    @pytest.mark.parametrize("sums", ["float32", "float64", "complex64", "complex128"])
    def test_epilogues(self, cuda: Any, sums: str) -> None:
        """One launch has the result of the host, for biases of rows and columns, in place and into narrower types."""
        rng, real = np.random.default_rng(0), np.dtype(sums).kind != "c"
        some = [None, 2.0, *(rng.normal(size=shape).astype("float32") for shape in ((1, 9), (7, 1)))]
        for number, f in enumerate(["", *(ACTIVATIONS if real else "")] * 4):
            gradient, order = bool(f) and number % 3 == 0, "CF"[number % 2]
            s, residual = (rng.normal(size=(7, 9)).astype(dtype) for dtype in (sums, "float16"))
            aux = rng.normal(size=(7, 9)).astype("float32" if real else sums)
            operands = [some[number % 4], None if gradient else some[(number // 2) % 4], [None, residual][number % 2]]
            operands.append(aux if gradient or number % 2 else None)
            target = sums if number % 4 else "float16" if real else "complex64"
            c: np.ndarray = np.empty((7, 9), target)
            there = [cuda.to_device(x, order) if np.ndim(x) else x for x in operands]
            S = cuda.to_device(s, order)
            C = S if number % 4 == 1 else cuda.to_device(c, order)
            Finish(f, gradient, *operands)(c, s)
            Finish(f, gradient, *there)(C, S)
            error = {"float16": 4e-3, "complex128": 3e-7}.get(target, 3e-6)
            assert np.allclose(cuda.to_host(C).astype(c.dtype), c, rtol=error, atol=error)
            if operands[3] is not None:
                assert np.allclose(cuda.to_host(there[3]), aux, rtol=3e-6, atol=3e-6)

    @pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
    def test_infinity_times_one(self, cuda: Any, dtype: str) -> None:
        """The factor 1 + 0i keeps infinities, as on the host; C is not read if beta is 0."""
        x, y = np.array([[np.inf, 1, -np.inf]], dtype), np.array([[1, np.inf, 2]], dtype)
        for alpha, beta, value in ((1, 1, [[np.inf, np.inf, -np.inf]]), (1, 0, x), (0, 1, y)):
            X, Y = cuda.to_device(x, "C"), cuda.to_device(y if beta else y * np.nan, "C")
            cuda.combine(Combine(alpha, beta), Y, X)
            assert np.array_equal(cuda.to_host(Y), np.array(value, dtype))

    @pytest.mark.parametrize("dtype", [*ALL, "int8", "bool"])
    def test_elements_by_their_indices(self, grid: Any, cuda: Any, dtype: str) -> None:
        """Random numbers, a diagonal and constants have the bits of the host, whichever rank computes them."""
        kinds = {"uniform": dtype not in ("int32", "bool"), "normal": dtype not in ("int32", "int8", "bool")}
        for order, shape in itertools.product("CF", [(41, 29), (0, 3), (1, 1)]):
            how: Any = {"grid": grid, "block": (4, 3), "order": order, "dtype": dtype}
            makers = [partial(DistMatrix.random, seed=-5, kind=kind) for kind, has in kinds.items() if has]
            makers += [DistMatrix.eye, DistMatrix.ones, DistMatrix.zeros, partial(DistMatrix.full, fill_value=3)]
            for make in makers:
                here, there = make(shape, **how), make(shape, **how, device="cuda")
                assert cuda.to_host(there.local).tobytes() == here.local.tobytes()
                assert there.order == order

    @pytest.mark.parametrize("algorithm", families())
    def test_every_mover(self, grid: Any, movers: list[str], algorithm: str) -> None:
        orders = ["".join(x) for x in itertools.product("CF", repeat=3)]
        cases = [x for x in accepted(grid.size) if x[0] == algorithm]
        if not cases:
            pytest.skip("one rank has no layers")
        for number, (mover, op) in enumerate(itertools.product(movers, self.OPS)):
            name, shape, layers = cases[number % len(cases)]
            options: dict[str, Any] = {"block": (None, 4, (2, 3))[number % 3], "orders": orders[number % 8]}
            options |= {"dtype": DTYPES[number % 4], "alpha": 2, "beta": number % 2, "device": "cuda"}
            check(grid, (93, 119, 122), name, shape, layers, ops=op, mover=mover, **options)

    def test_sixteen_bits_and_whole_numbers(self, grid: Any, movers: list[str]) -> None:
        rng = np.random.default_rng(3)
        a, b = rng.integers(-100, 100, (120, 401)), rng.integers(-100, 100, (401, 90))
        for mover, (dtype, into) in itertools.product(
            movers, [("int8", "int32"), ("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
        ):
            A, B = (DistMatrix.from_global(x.astype(dtype), grid=grid, block=30, device="cuda") for x in (a, b))
            C = DistMatrix.empty((120, 90), grid=grid, dtype=into, device="cuda")
            pdgemm(1, A, B, 0, C, mover=mover)
            error = np.abs(C.allgather().astype(float) - a @ b)
            assert error.max() <= (0 if into != "bfloat16" else 2.0**-8 * np.abs(a @ b).max())

    @pytest.mark.parametrize("algorithm", families())
    def test_integer_products_equal_those_of_the_host(self, grid: Any, movers: list[str], algorithm: str) -> None:
        """Modulo 2^32, for all memory orders, alpha and beta, and views that begin at unaligned addresses."""
        cases = [x for x in accepted(grid.size) if x[0] == algorithm]
        if not cases:
            pytest.skip("one rank has no layers")
        rng = np.random.default_rng(8)
        a, b, c = (rng.integers(-128, 128, shape) for shape in ((47, 134), (134, 38), (47, 38)))
        a[0], b[:, 0], c[0] = -128, -128, 2**31 - 2
        for number, (orders, mover) in enumerate(zip(itertools.product("CF", repeat=3), itertools.cycle(movers))):
            name, shape, layers = cases[number % len(cases)]
            block, width = ((None, None), (5, 30))[number % 2]
            A, B, C = (
                DistMatrix.from_global(x.astype(dtype), grid=grid, order=order, block=block, device="cuda")
                for x, dtype, order in zip((a, b, c), ("int8", "int8", "int32"), orders)
            )
            alpha, beta, first = (1, 0, 0) if number == 0 else (3 - number, number % 3, number)
            how: Any = {"algorithm": name, "shape": shape, "layers": layers, "mover": mover, "panel_width": width}
            pdgemm(alpha, A[1:, first:], B[first:, :-1], beta, C[1:, :-1], **how)
            exact = c.copy()
            exact[1:, :-1] = alpha * a[1:, first:] @ b[first:, :-1] + beta * c[1:, :-1]
            assert np.array_equal(C.allgather(), exact.astype("int32"))

    def test_sums_of_many_whole_numbers(self, grid: Any) -> None:
        """Products with sums too large for 32 bits are split, even if wider panels are requested; modulo 2^32."""
        k = 2**17 + 300
        A = DistMatrix.full((2, k), -128, dtype="int8", grid=grid, device="cuda")
        C = pdgemm(1, A, A.T, panel_width=k, algorithm="summa")
        assert C.dtype == np.int32 and C.report.panels > 1
        assert (C.allgather() == k * 2**14 - 2**32).all()

    def test_memory(self, comm: Any) -> None:
        """After 20 products no memory remains allocated; each allocates at most the bytes of its plan."""
        import cupy

        pool = cupy.get_default_memory_pool()
        with ProcessGrid(comm) as grid:
            A, B, C = (DistMatrix.random((400, 400), grid=grid, block=64, seed=s, device="cuda") for s in range(3))
            pdgemm(1, A, B, 0, C)
            comm.Barrier()  # no other rank still reads them
            pool.free_all_blocks()
            used, total = pool.used_bytes(), pool.total_bytes()
            for _ in range(20):
                pdgemm(1, A, B, 0, C)
            assert pool.used_bytes() == used
            rounding = 512 * 16  # the pool rounds each buffer up to 512 bytes
            assert pool.total_bytes() - total <= plan(A, B, C).extra_bytes(comm.rank) + rounding

    def test_requests_beyond_the_memory(self, grid: Any) -> None:
        with pytest.raises(OutOfMemoryError, match="cannot allocate .* bytes on GPU"):
            DistMatrix.empty((1 << 21, 1 << 21), grid=grid, device="cuda")

    def test_managed_memory_is_staged(self, comm: Any) -> None:
        import cupy

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
        """A stack of matrices is one call of cuBLAS; a list of conjugated matrices is one call per matrix."""
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
            assert np.array_equal([cuda.to_host(x) for x in C.items], c)  # integers: exact

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8"])
    def test_batches_of_unequal_matrices(self, comm: Any, cuda: Any, dtype: str) -> None:
        """In both memory orders, with equal and empty extents; by grouped calls, and by a call per matrix."""
        from pdgemm.devices import grouped_gemm

        rng = np.random.default_rng(comm.rank)
        extents = [(20, 7, 12), (1, 1, 1), (5, 0, 3), (0, 4, 2), (33, 30, 1), (20, 7, 12), (1, 40, 9)]
        into = {"float16": "float32", "int8": "int32"}.get(dtype, dtype)
        a, b, c = (
            [rng.integers(-9, 9, [shape[x] for x in sides]).astype(kind) for shape in extents]
            for sides, kind in (((0, 1), dtype), ((1, 2), dtype), ((0, 2), into))
        )
        if dtype == "complex64":
            a = [x * (1 + 2j) for x in a]
        cases = (2, -1, 1 << 28, True), (1, 0, 1000, True), (3, 1, 1 << 28, False), (0, 2, 1, True)
        for alpha, beta, chunk, known in cases:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(batched, "DEVICE_CHUNK_BYTES", chunk)
                if not known:
                    patch.setattr(grouped_gemm, "takes", lambda *args: False)
                A, H, B, C = (
                    Batch.from_local([cuda.to_device(x, "CF"[number % 2]) for number, x in enumerate(some)], comm)
                    for some in (a, [x.conj().T for x in a], b, c)
                )
                for left, trans in ((A, "N"), (H, "C")):
                    before = [cuda.to_host(x) for x in C.items]
                    matmul_batched(left, B, C, alpha=alpha, beta=beta, transa=trans)
                    for x, y, old, new in zip(a, b, before, C.items):
                        assert np.array_equal(cuda.to_host(new), alpha * (x.astype(into) @ y.astype(into)) + beta * old)

    def test_matrices(self, comm: Any, cuda: Any) -> None:
        """Matrices that are created on the device, copied there, redistributed and combined equal those of the host."""
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

    def test_long_rows_are_aligned_on_a_gpu(self, grid: Any, cuda: Any) -> None:
        """Long rows begin at multiples of 16 bytes; the padding behind them is neither read nor sent."""
        for dtype, order in itertools.product(("bfloat16", "float64", "complex64"), "CF"):
            how: Any = {"grid": grid, "dtype": dtype, "order": order}
            A, H = (DistMatrix.random((387, 387), **how, device=device) for device in ("cuda", "host"))
            long, item = A.local.shape["FC".index(order)], A.local.itemsize
            unit = max(1, 16 // item)
            assert max(A.local.strides) == (-(-long // unit) * unit * item if long >= 64 else long * item)
            assert checksum(A) == checksum(H) and np.array_equal(A.allgather(), H.allgather())
            assert np.array_equal(A.to_host().local, H.local)
            moved = A.redistribute(block=50)
            assert np.array_equal(moved.allgather(), H.allgather())
            difference = (A @ A).to_host() - H @ H
            assert float(abs(difference).max()) <= 387 * 2.0 ** (-7 if dtype == "bfloat16" else -20)
        S = A + A.H + 800 * DistMatrix.eye(387, grid=grid, dtype="complex64", device="cuda")
        L = linalg.cholesky(S)
        assert float((L @ L.H - S).norm()) <= 387 * 2.0**-22 * float(S.norm())

    def test_files(self, grid: Any, cuda: Any, shared_tmp_path: Any, monkeypatch: Any) -> None:
        """Matrices are saved from and loaded to a device in pieces: the host holds at most one piece at a time."""
        copied, set_elements = list[int](), distmatrix.set_elements
        monkeypatch.setattr(distmatrix, "set_elements", lambda y, x: copied.append(y.size) or set_elements(y, x))
        monkeypatch.setattr(pieces, "ELEMENTS", 64)
        monkeypatch.setattr(sums, "_ON_DEVICE", 64)
        for dtype, order in (("float32", "C"), ("complex128", "F")):
            how: Any = {"grid": grid, "block": (4, 3), "device": "cuda"}
            A = DistMatrix.random((41, 29), dtype=dtype, order=order, **how)
            copied.clear()
            hdf5.save(shared_tmp_path / "a.h5", "x", A)
            npy.save(shared_tmp_path / "a.npy", A, order="F")
            hdf5.save_all(shared_tmp_path / "state.h5", {"x": A})
            loaded = [
                hdf5.load(shared_tmp_path / "a.h5", "x", verify=True, **how),
                hdf5.load(shared_tmp_path / "a.h5", "x", transpose=True, **how).T,
                npy.load(shared_tmp_path / "a.npy", **how),
                hdf5.load_all(shared_tmp_path / "state.h5", grid, {"x": {"device": "cuda"}}).matrices["x"],
            ]
            assert max(copied) <= 64 * grid.size
            assert {x.device for x in loaded} == {"cuda"}
            assert {checksum(x) for x in loaded} == {checksum(A), checksum(A.to_host())}
        numbers = DistMatrix.random((9, 7), dtype="int8", grid=grid, device="cuda")
        hdf5.save(shared_tmp_path / "i.h5", "x", numbers)
        loaded = hdf5.load(shared_tmp_path / "i.h5", "x", grid=grid, dtype="float32", verify=True, device="cuda")
        assert np.array_equal(loaded.allgather(), numbers.allgather())

    @pytest.mark.parametrize("dtype", KINDS)
    def test_reductions(self, grid: Any, cuda: Any, dtype: str, monkeypatch: Any) -> None:
        """Every reduction along each axis, over several slabs, agrees with NumPy within the documented error."""
        for number, (shape, block) in layouts(dtype, grid.size):
            monkeypatch.setattr(folds, "ON_DEVICE", 2000 if number % 2 else 1 << 24)
            how: dict[str, Any] = {"grid": grid, "block": block, "order": "CF"[(number + KINDS.index(dtype)) % 2]}
            x = elements(shape, dtype)
            A = DistMatrix.from_global(x, device="cuda", **how)
            check_reductions(A, DistMatrix.from_global(x, **how), x)
            check_products(A, x)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_reductions_of_extreme_elements(self, grid: Any, cuda: Any, dtype: str) -> None:
        check_extremes(grid, dtype, "cuda")

    @pytest.mark.parametrize("dtype", KINDS)
    def test_functions_of_elements(self, grid: Any, cuda: Any, dtype: str) -> None:
        """Comparisons, where, isclose, round and others, of matrices in the same and in different layouts."""
        for number, (shape, block) in layouts(dtype, grid.size):
            x, y = two_matrices(shape, dtype)
            A = DistMatrix.from_global(x, grid=grid, block=block, order="CF"[number % 2], device="cuda")
            B = DistMatrix.from_global(y, grid=grid, block=5, device="cuda")
            check_functions(A, B, x, y)

    def test_a_product_keeps_its_operands(self, cuda: Any) -> None:
        """A prepared call of cuBLAS has only addresses; the product keeps the arrays alive."""
        C = cuda.empty((64, 64), "float64")
        ones = np.ones((64, 64))
        multiply = cuda.multiply(2.0, cuda.to_device(ones, "C"), cuda.to_device(ones, "F"), C, False, False, tf32=False)
        others = [cuda.to_device(0 * ones, "C") for _ in range(4)]
        multiply(0)
        multiply(1)
        assert (cuda.to_host(C) == 256).all()
        assert len(others) == 4

    def test_triangles_are_combined_in_one_launch(self, cuda: Any) -> None:
        """Y := alpha X + beta Y in a staircase only; an array that is multiplied by 0 is not read."""
        rng = np.random.default_rng(4)
        for order, flipped, (alpha, beta) in itertools.product("CF", (False, True), ((1, 0), (2, -1), (0, 3), (1, 1))):
            x, y = rng.integers(-9, 9, (2, 13, 17)).astype(float)
            steps = Staircase(np.sort(rng.integers(0, 14 if flipped else 18, 17 if flipped else 13)), flipped)
            inside = steps.mask(13 if flipped else 17)
            X = cuda.to_device(x if alpha else x * np.nan, "C")
            Y = cuda.to_device(y if beta else np.where(inside, np.nan, y), order)
            cuda.combine_within(Combine(alpha, beta), Y, X, steps)
            assert np.array_equal(cuda.to_host(Y), np.where(inside, alpha * x + beta * y, y))

    @pytest.mark.parametrize("dtype", device_tensors.KINDS)
    def test_tensors(self, comm: Any, dtype: str) -> None:
        with ProcessGrid(comm) as grid:
            for check_all in (device_tensors.check_tensors, device_tensors.check_einsums):
                check_all(grid, "cuda", dtype)
            device_tensors.check_views(grid, "cuda")
            device_tensors.check_indexing(grid, "cuda")

    @pytest.mark.parametrize("dtype", ["float32", "complex128"])
    def test_products_with_a_triangle(self, comm: Any, dtype: str) -> None:
        rng = np.random.default_rng(5)
        a, c = rng.integers(-5, 5, (45, 23)).astype(dtype), rng.integers(-5, 5, (45, 45)).astype(dtype)
        if dtype == "complex128":
            a = a + 1j * a[::-1]
            c = c + c.conj().T
        whole = 2 * a @ a.conj().T - c
        with ProcessGrid(comm) as grid:
            for order, uplo in itertools.product("CF", "LU"):
                A, C = (DistMatrix.from_global(x, grid=grid, block=4, order=order, device="cuda") for x in (a, c))
                linalg.herk(2, A, -1, C, uplo=uplo)
                kept = np.tri(45, dtype=bool) if uplo == "L" else np.tri(45, dtype=bool).T
                assert np.array_equal(C.allgather(), np.where(kept, whole, c))


def combined(cuda: Any, source: np.dtype, target: np.dtype) -> None:
    rng = np.random.default_rng(1)
    x, y = (10 * rng.standard_normal((23, 31)) for _ in range(2))
    x, y = x.astype(source), y.astype(target)
    if source.kind == "c":
        x.imag = rng.standard_normal(x.shape)
    wide = np.dtype(np.int64) if target.kind == "i" else arithmetic(source, target)
    unit = 0.0 if target.kind == "i" else float(max(np.finfo(wide).eps, eps(target)))
    scattered = np.array([0, 1, 4, 5, 9, 11, 17, 20])
    runs = IndexMap(scattered, np.flip(22 - scattered), np.ones(len(scattered), int))
    for (alpha, beta), conjugated in itertools.product([(1, 0), (2, 3), (0, 2), (0, 0), (-1, 1)], [False, True]):
        how = Combine(alpha, beta, None, conjugated)
        value = alpha * (x.conj() if conjugated else x).astype(wide) + beta * y.astype(wide)
        for order in "CF":
            X, Y = cuda.to_device(x, order), cuda.to_device(y, "C")
            cuda.combine(how, Y[2:, ::3], X[2:, ::3])
            found = cuda.to_host(Y)
            assert np.abs(found[2:, ::3].astype(wide) - value[2:, ::3]).max() <= 400 * unit
            assert np.array_equal(found[:2], y[:2])
            Y = cuda.to_device(y, "C")
            cuda.combine_blocks(how, Y, X, runs, runs)
            expected = y.astype(wide)
            at, to = np.ix_(runs.source, runs.source), np.ix_(runs.target, runs.target)
            expected[to] = alpha * (x.conj() if conjugated else x).astype(wide)[at] + beta * y.astype(wide)[to]
            assert np.abs(cuda.to_host(Y).astype(wide) - expected).max() <= 400 * unit
