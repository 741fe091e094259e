"""Statistics, checksums, residuals, assignments and Kronecker products of matrices on a device, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_device import SCHEDULES, fake_device

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm, verify
from pdgemm.algorithms.protection import checksum
from pdgemm.algorithms.statistics import percentiles, sorting
from pdgemm.linalg.functions import matrix_functions
from pdgemm.local.arrays import elementwise, folds

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

KINDS = ("float64", "float32", "float16", "bfloat16", "int8", "int32", "bool")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use slabs and pieces of so few elements that the matrices of these tests have several of each."""
    for module in (folds, percentiles, sorting, matrix_functions):
        monkeypatch.setattr(module, "ON_DEVICE", 40)
    monkeypatch.setattr(checksum, "_ON_DEVICE", 40)
    monkeypatch.setattr(elementwise, "_PIECE", 128)


def drawn(dtype: str, with_nan: bool = False) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((13, 8)) * 5
    x[3] = x[4]  # equal elements
    if with_nan:
        x[2, 3] = x[7, 1] = np.nan
        x[:, 6] = np.nan
    whole = (x > 0 if dtype == "bool" else x).astype(dtype)
    if dtype == "float64":
        whole[0, 0], whole[1, 1], whole[2, 2] = -0.0, np.inf, -np.inf
    return whole


def matrices(grid: Any, whole: np.ndarray) -> Iterator[tuple[Any, Any]]:
    """Yield matrices on the device in each schedule, in both orders, and a view."""
    for number, schedule in enumerate(SCHEDULES):
        with fake_device(schedule) as device:
            if number == 2:
                A = DistMatrix.from_global(np.pad(whole, 1).T, grid=grid, block=2, device="fake")[1:-1, 1:-1].T
            else:
                A = DistMatrix.from_global(whole, grid=grid, block=(3, 2), order="CF"[number], device="fake")
            device.copied.clear()
            yield A, device
            assert not device.races


def same(result: Any, expected: Any, rtol: float = 0.0) -> None:
    """Check that shape, type and elements equal NumPy's, words are as planned, and matrices are on the device."""
    if hasattr(result, "allgather"):
        assert result.device == "fake"
        assert result.report is None or result.report.counted == result.report.predicted
        result = result.allgather()
    result, expected = np.asarray(result), np.asarray(expected)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    wide = expected.dtype if expected.dtype.kind in "biuc" else np.float64
    assert np.allclose(result.astype(wide), expected.astype(wide), rtol, rtol, equal_nan=True)


def float32(x: np.ndarray) -> np.ndarray:
    """Convert bfloat16 to float32, in which it is compared with NumPy's functions."""
    return x.astype(np.float32) if x.dtype.kind == "V" else x


@pytest.mark.parametrize("dtype", KINDS)
def test_statistics(comm: Any, dtype: str) -> None:
    """Sorts, sums, percentiles and histograms equal those of the host."""
    with ProcessGrid(comm) as grid:
        for with_nan in (False, True)[: 2 if dtype[:2] in ("fl", "bf") else 1]:
            whole = drawn(dtype, with_nan)
            x = float32(whole)
            rtol = {"bfloat16": 4e-2, "float16": 4e-2, "float32": 1e-6}.get(dtype, 1e-14)

            def rounded(y: Any, whole: np.ndarray = whole, x: np.ndarray = x) -> np.ndarray:
                return np.asarray(y) if x is whole else np.asarray(y).astype(whole.dtype)

            for A, _ in matrices(grid, whole):
                for axis in (0, 1):
                    same(np.sort(A, axis=axis), np.sort(x, axis=axis).astype(whole.dtype))
                    same(np.cumsum(A, axis=axis), rounded(np.cumsum(x, axis=axis)), rtol)
                same(np.sort(A, axis=None), np.sort(x, axis=None)[:, None].astype(whole.dtype))
                for axis in (None, 0, 1):
                    same(np.median(A, axis=axis), rounded(np.median(x, axis=axis)), rtol)
                    same(np.nanmedian(A, axis), rounded(np.nanmedian(x, axis)), rtol)
                    if dtype != "bool":
                        q = [0, 12.5, 77.7, 100]
                        same(np.percentile(A, q, axis), rounded(np.percentile(x, q, axis)), rtol)
                        same(np.nanquantile(A, 0.3, axis), rounded(np.nanquantile(x, 0.3, axis)), rtol)
                for options in ({"range": (-1, 2)}, {"bins": [-3, 0, 0.5, 2]}, {"bins": 7, "range": (-3, 3)}):
                    counted = x.astype({"bool": np.uint8, "float16": np.float32}.get(dtype, x.dtype))
                    for result, expected in zip(np.histogram(A, **options), np.histogram(counted, **options)):
                        same(result, expected)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "complex64", "bfloat16", "int8"])
def test_checksums_residuals_and_kronecker_products(comm: Any, dtype: str) -> None:
    with ProcessGrid(comm) as grid:
        real = drawn("float32" if dtype != "int8" else "int8")
        whole = real.astype(dtype) * (1 + 2j if dtype[0] == "c" else 1)
        small = np.arange(6).reshape(2, 3).astype(whole.dtype)
        for A, device in matrices(grid, whole):
            host = DistMatrix.from_global(whole, grid=grid)
            assert A.checksum() == host.checksum() and A.T.checksum() == host.T.checksum()
            C = pdgemm(1, A.H, A)
            for X, Y in ((A.H, A), (A.H.to_host(), A.to_host())):
                assert verify(C, 1, X, Y).passed
                assert not verify(C, 2, X, Y).passed
            B = DistMatrix.from_global(small, grid=grid, block=1, device="fake")
            device.copied.clear()
            K = linalg.kron(A, B)
            assert sum(device.copied) <= B.local.nbytes
            same(K, np.kron(float32(whole), float32(small)).astype(whole.dtype))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int32", "complex64"])
def test_elements_are_set_on_the_device(comm: Any, dtype: str) -> None:
    """Indexed by masks, lists, slices and arrays; nothing is copied to the host."""
    whole = drawn("float64")[:, :6].astype(dtype) if dtype != "int32" else np.arange(78).reshape(13, 6).astype(dtype)
    whole[~np.isfinite(whole.astype(complex))] = 1
    with ProcessGrid(comm) as grid:
        for A, device in matrices(grid, whole):
            x = whole.copy()
            A[A != 3], x[x != 3] = 5, 5
            A[np.arange(78).reshape(13, 6) % 7 == 2], x[np.arange(78).reshape(13, 6) % 7 == 2] = 2, 2
            A[[5, 1, 5]], x[[5, 1, 5]] = np.arange(18).reshape(3, 6), np.arange(18).reshape(3, 6)
            A[:, [True, False] * 3], x[:, [True, False] * 3] = 7, 7
            A[::3, 1:4], x[::3, 1:4] = np.arange(3), np.arange(3)
            A[2:9, 1:], x[2:9, 1:] = np.arange(7)[:, None], np.arange(7)[:, None]
            A[4, 2], x[4, 2] = 9, 9
            assert not device.copied
            same(A, x)


def test_blocks_of_a_matrix_on_a_device(comm: Any) -> None:
    """Blocks on the device stay there; only the requested parts of a matrix are copied to the host."""
    whole = drawn("float64")
    with ProcessGrid(comm) as grid:
        for A, device in matrices(grid, whole):
            assert np.array_equal(A.to_blocks((1, 5), (0, 8)), whole[1:5])
            first, second = A.to_blocks([(3, 4 + comm.rank), (0, 0)], [(1, 2), (0, 0)])
            assert np.array_equal(first, whole[3 : 4 + comm.rank, 1:2]) and not second.size
            assert sum(device.copied) <= 8 * (32 + comm.size)
            device.copied.clear()
            mine = device.to_device(np.full((comm.rank, 3), comm.rank, np.float32))
            B = DistMatrix.from_blocks(mine, grid=grid, axis=0, device="fake") if comm.size > 1 else A
            assert not device.copied
            each = np.repeat(np.arange(comm.size, dtype=np.float32), np.arange(comm.size))
            if comm.size > 1:
                same(B, np.tile(each[:, None], 3))
            block: Any = np.full((2, 1), float(comm.rank))  # on the device of some ranks only
            block = device.to_device(block) if comm.rank % 2 else block
            C = DistMatrix.from_blocks(block, grid=grid, axis=1, device="fake")
            same(C, np.tile(np.arange(comm.size), (2, 1)) * 1.0)


@pytest.mark.parametrize("dtype", [*KINDS, "complex64"])
def test_every_piece_between_host_and_device(comm: Any, dtype: str) -> None:
    """A whole matrix is copied to the device and back, in any memory order, in pieces of a few elements."""
    for shape in ((13, 8), (1, 97), (97, 1), (0, 5), (3, 50)):
        whole = (np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)
        with ProcessGrid(comm) as grid:
            for number, schedule in enumerate(SCHEDULES):
                with fake_device(schedule) as device:
                    host = DistMatrix.from_global(whole, grid=grid, block=2, order="CF"[number % 2])
                    A = host.to_device("fake")
                    for view, part in ((A, whole), (A.T, whole.T), (A[1:, 1:], whole[1:, 1:])):
                        assert np.array_equal(view.allgather(), part) and np.array_equal(
                            view.to_host().allgather(), part
                        )
                        gathered = view.to_global()
                        assert comm.rank or np.array_equal(gathered, part)
                    A[...] = whole[::-1]
                    assert np.array_equal(A.allgather(), whole[::-1])
                    assert not device.races
