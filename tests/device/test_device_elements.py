"""Reductions, broadcasting and NumPy's functions of matrices on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_elements import (
    KINDS,
    check_functions,
    check_products,
    check_reductions,
    elements,
    layouts,
    two_matrices,
)
from fake_device import SCHEDULES, fake_device
from problems import grid_shapes

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.local.arrays import folds
from pdgemm.local.arrays.elementwise import close

pytestmark = pytest.mark.mpi


def test_elements_of_matrices_on_a_device(comm: Any) -> None:
    x, row = np.random.default_rng(0).standard_normal((13, 8)), np.arange(8.0)
    with fake_device() as device, ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(x, grid=grid, block=(2, 3), device="fake")
        square = DistMatrix.from_global(x[:8], grid=grid, device="fake")
        for axis in (None, 0, 1):
            kept = A.max(axis, keepdims=True)
            assert kept.device == "fake" and np.array_equal(kept.allgather(), x.max(axis, keepdims=True))
        assert np.array_equal((A - row).allgather(), x - row)
        assert np.array_equal((A * A[2:3, :]).allgather(), x * x[2:3])
        assert np.array_equal((square + square.T).allgather(), x[:8] + x[:8].T)
        assert np.allclose((A @ x.T[:, :2]).allgather(), x @ x.T[:, :2])
        assert np.array_equal(A[3], x[3]) and A[3, 2] == x[3, 2]
        x[4, 1], x[2, 5] = np.inf, np.nan  # lost if multiplied by 0
        X = DistMatrix.from_global(x, grid=grid, block=(2, 3), order="F", device="fake")
        for k in (-20, -1, 0, 2):
            assert np.array_equal(np.triu(X, k).allgather(), np.triu(x, k), equal_nan=True)
            assert np.array_equal(np.tril(X.T, k).allgather(), np.tril(x.T, k), equal_nan=True)
        x = A.allgather()
        assert np.array_equal(np.vstack((A, A)).allgather(), np.vstack((x, x)))
        assert not np.ones_like(A).allgather().sum() - A.size
        with pytest.raises(TypeError, match=r"numpy.spacing is not available .* on a device .*A.to_host\(\)"):
            np.spacing(A)
    assert not device.races


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use slabs of so few elements that the matrices of these tests have several slabs."""
    monkeypatch.setattr(folds, "ON_DEVICE", 2000)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_reduction_and_its_copies_to_the_host(comm: Any, dtype: str) -> None:
    """No copy to the host is larger than a row or a column of the local array."""
    for number, (shape, block) in layouts(dtype, comm.size):
        x, schedule = elements(shape, dtype), [*SCHEDULES][number % 3]
        how: dict[str, Any] = {"block": block, "order": "CF"[(number + KINDS.index(dtype)) % 2]}
        with fake_device(schedule) as device, ProcessGrid(comm, grid_shapes(comm.size)[-(number % 2)]) as grid:
            host, A = (DistMatrix.from_global(x, grid=grid, device=where, **how) for where in ("host", "fake"))
            device.copied.clear()
            check_reductions(A, host, x)
            check_products(A, x)
            assert 0 < max(device.copied, default=1) <= 16 * max(A.local.shape)
            if number == 0 and dtype in ("bfloat16", "complex64"):  # views, which are not contiguous, or conjugated
                check_reductions(A[3:, 2:-1], host[3:, 2:-1], x[3:, 2:-1])
                check_reductions(A.H, host.H, x.conj().T)
                check_products(A.T[1:], x.T[1:])
            assert not device.races


@pytest.mark.parametrize("dtype", KINDS)
def test_functions_of_elements(comm: Any, dtype: str) -> None:
    """To the host are copied only elements for the comparison, and one scalar for each test of all elements."""
    for number, (shape, block) in layouts(dtype, comm.size):
        x, y = two_matrices(shape, dtype)
        with fake_device([*SCHEDULES][number % 3]) as device, ProcessGrid(comm) as grid:
            made: dict[str, Any] = {"grid": grid, "device": "fake"}
            A = DistMatrix.from_global(x, block=block, order="CF"[number % 2], **made)
            B, C = (DistMatrix.from_global(y, block=b, **made) for b in (5, block))
            check_functions(A, B, x, y)
            device.copied.clear()
            A + C, A * A, A != C, np.where(A != C, A, C), np.isclose(A, C), np.nan_to_num(A)
            assert not device.copied
            A.allclose(C), np.allclose(A, C), np.array_equal(A, C)
            assert max(device.copied, default=0) <= 16 * max(A.local.shape)
            assert not device.races


def test_the_simulated_array_refuses_what_cupy_refuses() -> None:
    """It refuses host arrays as operands, functions that CuPy lacks, and functions with other results in CuPy."""
    with fake_device() as device:
        x = device.to_device(np.ones((3, 4)))
        for mixed in (lambda: x + np.ones(4), lambda: np.where(x > 0, x, np.ones(4)), lambda: x @ np.ones(4)):
            with pytest.raises(TypeError, match="no arrays of the host"):
                mixed()
        for unknown in (np.add.reduce, np.spacing):
            with pytest.raises(TypeError, match="returned NotImplemented"):
                unknown(x)
        for different in (np.argmin, np.argmax, np.nansum, np.median, bool):
            with pytest.raises(AssertionError):
                different(x)
        assert np.array_equal(np.sum(x, axis=0).get(), 3 * np.ones(4))
        assert device.copied == [32]
        assert not device.races


@pytest.mark.parametrize("dtype", KINDS)
def test_close_on_the_host_is_numpys(dtype: str) -> None:
    with np.errstate(all="ignore"):
        for other in KINDS:
            if {dtype, other} >= {"float16", "bfloat16"}:
                continue  # NumPy does not combine these types
            (x, _), (y, _) = two_matrices((37, 23), dtype), two_matrices((37, 23), other)
            for a, b in ((x, y), (x, y[:1]), (x, 1), (x, True), (x, 1.5), (2j, y), (x, np.int8(-128))):
                for how in ((1e-5, 1e-8, False), (0.0, 0.5, True), (np.float32(0.3), 0, True)):
                    assert np.array_equal(close(a, b, *how), np.isclose(a, b, *how)), (other, how)
