"""Expected reductions and functions of elements for matrices on a device: by NumPy, in wide types."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log
from typing import Any

import numpy as np
from tiers import everything, in_turn

from pdgemm import DistMatrix
from pdgemm.local.arrays.dtypes import eps as known

KINDS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int8", "int32", "bool")
FLOATING = KINDS[:6]
LAYOUTS = (((37, 23), (4, 3)), ((1500, 2), (7, 1)), ((2, 3), (1, 1)), ((1, 300), (1, 16)))  # ragged, long and empty


def layouts(dtype: str, ranks: int) -> Iterable[tuple[int, tuple[tuple[int, int], tuple[int, int]]]]:
    """Return numbered LAYOUTS: all on one rank and with --all; otherwise two per type, one even, one odd."""
    numbers = range(len(LAYOUTS)) if everything() or ranks == 1 else ((0, 3), (1, 2))[KINDS.index(dtype) % 2]
    return [(number, LAYOUTS[number]) for number in numbers]


def elements(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Return an array of few distinct values, so that the least and the largest value occur more than once."""
    rng, kind = np.random.default_rng(sum(shape)), np.dtype(dtype)
    x = rng.integers(-9, 10, shape) / (1 if kind.kind in "iub" else 8)
    if kind.kind == "c":
        return np.asarray(x + 1j * rng.integers(-9, 10, shape) / 8, kind)
    return np.asarray(rng.random(shape) < 0.9 if dtype == "bool" else x, kind)


def two_matrices(shape: tuple[int, int], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = elements(shape, dtype), elements(shape[::-1], dtype).T.copy()
    if dtype in FLOATING[:4]:
        x[0, 0], x[-1, -1], y[-1, 0] = np.nan, np.inf, -np.inf
    return x, y


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype({"c": complex, "f": float, "V": float}.get(x.dtype.kind, np.int64))


def eps(dtype: np.dtype, sums: bool = False) -> float:
    """Return the eps of a type, 0 for integers; for sums of 16-bit types, added in float32, the eps of float32."""
    return 0.0 if dtype.kind in "iub" else known(np.float32 if sums and dtype.itemsize == 2 else dtype)


def near(result: Any, expected: Any, bound: Any, x: np.ndarray) -> bool:
    """Return whether values are equal up to `bound` and one rounding to the type of x, NaN and infinities exactly."""
    result, expected = wide(np.asarray(result)), np.asarray(expected)
    with np.errstate(invalid="ignore"):
        allowed = bound + 2 * eps(x.dtype) * np.abs(expected)
        return bool(((np.abs(result - expected) <= allowed) | np.isclose(result, expected, 0, 0, True)).all())


def check_reductions(A: Any, host: Any, x: np.ndarray) -> None:
    """Check each reduction along each axis: the value is within the documented error, and the type is the host's."""
    v, size = wide(x), np.abs(wide(x))
    for axis in (None, 0, 1):
        m = x.size if axis is None else x.shape[axis]
        unit = eps(x.dtype, sums=True) or 2.0**-52 * (x.dtype.kind in "iub")
        error = (64 * ceil(log(m, 128)) + log(m, 2)) * unit if m > 1 else 0
        with np.errstate(all="ignore"):
            sums = {"sum": v.sum(axis), "mean": v.mean(axis)}
            total = {"sum": size.sum(axis), "mean": size.mean(axis)}
            var = v.var(axis)
        for name in ("sum", "mean", "min", "max", "any", "all", "argmin", "argmax", "var", "std", "prod"):
            result, there = getattr(A, name)(axis), getattr(host, name)(axis)
            assert np.asarray(result).dtype == np.asarray(there).dtype, (name, axis)
            if name in sums:
                assert near(
                    result, sums[name], 0 if x.dtype.kind in "iub" and name == "sum" else error * total[name], x
                )
            elif name in ("var", "std"):
                assert near(result, var if name == "var" else np.sqrt(var), 99 * error * np.abs(var) + 9 * unit, x)
            elif name == "prod":
                assert np.allclose(
                    wide(np.asarray(result)), wide(np.asarray(there)), 9 * m * unit + 2 * eps(x.dtype), 0, True
                )
            else:
                with np.errstate(all="ignore"):
                    plain = v.astype(bool) if x.dtype == bool and name in ("min", "max") else v
                    assert np.array_equal(wide(np.asarray(result)), wide(np.asarray(getattr(plain, name)(axis))), True)
        for order in (0, 1, 2, np.inf, -np.inf):
            result, there = A.vector_norm(order, axis), host.vector_norm(order, axis)
            assert np.asarray(result).dtype == np.float64
            assert np.allclose(result, there, error + 4 * eps(x.dtype, sums=True), 0, True)
    for name in (1, np.inf, "fro", "max"):
        assert np.isclose(A.norm(name), host.norm(name), 1e-3 if eps(x.dtype) > 1e-6 else 1e-6, 0, True)


def check_products(A: Any, x: np.ndarray) -> None:
    """Check A v, v A, the trace and diagonals, which are exact for these values."""
    v = wide(x)
    down, across = np.arange(x.shape[0]) % 3 - 1.0, np.arange(x.shape[1]) % 3 - 1.0
    assert np.allclose(wide(A @ across), v @ across) and np.allclose(wide(down @ A), down @ v)
    for offset in (0, 1, -1, 5, -40):
        assert np.array_equal(A.diagonal(offset), x.diagonal(offset))
        assert np.array_equal(A.H.diagonal(offset), x.conj().T.diagonal(offset))
    assert np.isclose(wide(np.asarray(np.trace(A))), wide(np.asarray(np.trace(x.astype(v.dtype)))), 2 * eps(x.dtype))


def check_functions(A: Any, B: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Check where, isclose, allclose, round, nan_to_num, comparisons and ufuncs: results and types equal NumPy's."""

    def same(X: Any, z: np.ndarray) -> bool:
        """Check that two matrices are equal, of the same type, and on the same device."""
        assert (X.dtype, X.device) == (z.dtype, A.device)
        return np.array_equal(wide(X.allgather()), wide(z), equal_nan=True)

    row = x[:1]
    with np.errstate(all="ignore"):
        for ufunc in (np.add, np.multiply, np.equal, np.not_equal, np.maximum):
            assert same(ufunc(A, B), ufunc(x, y)), ufunc
            assert same(ufunc(A, 2 if x.dtype != bool else True), ufunc(x, 2 if x.dtype != bool else True)), ufunc
            assert same(ufunc(row, B), ufunc(row, y)), ufunc
        for ufunc in (np.less, np.greater_equal):
            assert same(ufunc(A, B), ufunc(x, y)), ufunc
        assert same(np.where(A != B, A, B), np.where(x != y, x, y))
        assert same(np.where(A != 0, A, row), np.where(x != 0, x, row))
        assert same(np.where(A, 1, A), np.where(x, 1, x)) and same(np.where(True, A, B), np.where(True, x, y))
        assert same(np.isclose(A, B), np.isclose(x, y)) and same(np.isclose(A, 1), np.isclose(x, 1))
        assert same(np.isclose(A, row, 0, 0.3, True), np.isclose(x, row, 0, 0.3, True))
        assert same(np.isclose(2.0, A), np.isclose(2.0, x))
        if x.dtype.kind != "b":
            assert same(np.round(A), np.round(x))
        assert same(np.nan_to_num(A, nan=3), np.nan_to_num(x, nan=3))
        clean = bool(np.isfinite(wide(x)).all())
        assert A.allclose(A) == np.allclose(A, A) == clean
        assert A.allclose(x) == clean and A.allclose(A, equal_nan=True) and np.allclose(A, A.copy(), equal_nan=True)
        assert A.allclose(B.redistribute(like=A)) == np.allclose(x, y) and A.allclose(1) == np.allclose(x, 1)
        assert A.allclose(row) == np.allclose(x, row) and A.allclose(A.to_host()) == clean
        assert np.array_equal(A, A) == clean and np.array_equal(A, A, equal_nan=True)
        assert np.array_equal(A, B) == np.array_equal(x, y)
        C = A.copy()
        C += B
        assert same(C, (x + y).astype(x.dtype))
        C[C != C] = 0


def check_extremes(grid: Any, dtype: str, device: str) -> None:
    """Check that reductions of NaN, infinities, and numbers whose squares overflow or underflow equal the host's."""
    x, kind = elements((37, 23), dtype), np.dtype(dtype)
    x[3, :7], x[9, 4], x[30:, 5], x[:, 6] = np.inf, -np.inf, np.nan, np.nan
    most = {"float16": 6e4, "float64": 1e300, "complex128": 1e300}.get(dtype, 1e37)
    large, small = (
        (elements((37, 23), dtype).astype(complex).real * factor).astype(kind) for factor in (most / 2, 1 / most)
    )
    for values, order in in_turn((x, x[:, :6], large, small), "CF"):
        host = DistMatrix.from_global(values, grid=grid, block=(4, 3), order=order)
        A = DistMatrix.from_global(values, grid=grid, block=(4, 3), order=order, device=device)
        for axis in (None, 0, 1):
            for name in ("argmin", "argmax", "min", "max", "any", "all", *(("sum", "var") if values is x else ())):
                result, there = (np.asarray(getattr(X, name)(axis)).astype(complex) for X in (A, host))
                assert np.allclose(result, there, 0 if name[:3] == "arg" else 1e-2, 0, True), (name, axis)
            for number in (1, 2, np.inf, -np.inf, 0):
                assert np.allclose(A.vector_norm(number, axis), host.vector_norm(number, axis), 1e-5, 0, True)
