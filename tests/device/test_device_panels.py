"""Factorisations and triangular solves on a device with delayed work: right results, no race (fake_device.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from device_ways import WAYS_OF_PANELS
from factored import EPS, forbid_replicated_triangles, norm, positive_definite, relative, rng_matrix, wide
from fake_device import SCHEDULES, fake_device
from problems import DTYPES, grid_shapes
from tiers import pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import DeviceError, OutOfMemoryError
from pdgemm.linalg.eigen import division
from pdgemm.local.arrays.device import Reach
from pdgemm.transport.panels import task

pytestmark = pytest.mark.mpi

RUNS = [*enumerate(third(pairs(WAYS_OF_PANELS, SCHEDULES, DTYPES, "CF", (True, False))))]


@pytest.fixture(params=RUNS, ids=lambda run: "-".join(map(str, run[1])))
def run(comm: Any, request: Any) -> Iterator[Any]:
    """A device and a grid, with the type, memory order and triangle of this run; grid shapes are taken in turn."""
    number, (way, schedule, dtype, order, lower) = request.param
    shapes = grid_shapes(comm.size)
    shape = shapes[number % len(shapes)]
    with fake_device(schedule, reach=WAYS_OF_PANELS[way]) as device, ProcessGrid(comm, shape) as grid:
        yield SimpleNamespace(device=device, grid=grid, dtype=dtype, order=order, lower=lower)


def operands(run: Any, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    A = DistMatrix.from_global(a, grid=run.grid, block=(8, 12), order=run.order, device="fake")
    return A, DistMatrix.from_global(b, grid=run.grid, block=5, device="fake")


@square_grid
def test_cholesky_and_solve(comm: Any, run: Any) -> None:
    n, dtype, how = 60, run.dtype, {"lower": run.lower}
    S, b = positive_definite(n, dtype), rng_matrix(n, 9, dtype)
    A, B = operands(run, S, b)
    L = linalg.cholesky(A, **how)
    X, C = linalg.cho_solve(L, B, **how), linalg.trmm(L, B, trans="C", alpha=2, **how)
    report: Any = L.report
    assert report.as_predicted and report.device == X.device == C.device == "fake"
    assert any(comm.allgather("potrf" in run.device.launches))
    assert comm.allgather(run.device.races) == [[]] * comm.size
    factor, x = wide(L.allgather()), X.allgather()
    product, size = 2 * factor.conj().T @ b, 2 * norm(factor.conj().T) * norm(b)
    assert relative(C.allgather() - product, size, dtype, n) <= EPS
    factor = factor if run.lower else factor.conj().T
    assert relative(wide(S) - factor @ factor.conj().T, norm(S), dtype, n) <= EPS
    assert relative(wide(b) - wide(S) @ x, norm(S) * norm(x), dtype, n) <= EPS


@square_grid
def test_lu_and_reflections(comm: Any, run: Any) -> None:
    n, dtype = 44, run.dtype
    x, b, tall = (rng_matrix(n, columns, dtype) for columns in (44, 9, 30))
    A, B = operands(run, x, b)
    factors = linalg.lu_factor(A)
    X = linalg.lu_solve(factors, B)
    assert np.array_equal(factors.pivots, scipy.linalg.lu_factor(x)[1])
    assert factors.report.as_predicted and factors.report.device == X.device == "fake"
    T = DistMatrix.from_global(tall, grid=run.grid, block=(12, 8), order=run.order, device="fake")
    T = T if run.lower else T.T  # or wide
    Q, R = linalg.qr(T, method="householder")
    _, S = linalg.householder_qr(T, want_q=False)
    report: Any = S.report
    assert report.as_predicted and report.device == Q.device == R.device == "fake"
    assert all(any(comm.allgather(name in run.device.launches)) for name in ("getrf", "geqrf"))
    assert comm.allgather(run.device.races) == [[]] * comm.size
    y, t, q, r = X.allgather(), T.allgather(), wide(Q.allgather()), wide(R.allgather())
    assert relative(wide(b) - wide(x) @ y, norm(x) * norm(y), dtype, n) <= EPS
    assert relative(wide(t) - q @ r, norm(t), dtype, n) <= EPS
    assert relative(q.conj().T @ q - np.eye(q.shape[1]), 1, dtype, n) <= EPS
    assert np.array_equal(A.allgather(), x) and np.array_equal(B.allgather(), b)


def test_indefinite_matrices(comm: Any, run: Any) -> None:
    """Only one triangle is read on the device."""
    n, dtype = 70, run.dtype
    x, b, how = rng_matrix(n, n, dtype), rng_matrix(n, 9, dtype), {"lower": run.lower}
    S = x + x.conj().T
    A, B = operands(run, S, b)
    X = linalg.solve(A, B, assume_a="her", **how)
    y = linalg.solve(A.H, b[:, 0], assume_a="her", **how)
    assert X.device == "fake" and comm.allgather(run.device.races) == [[]] * comm.size
    assert relative(wide(b) - wide(S) @ X.allgather(), norm(S) * norm(X.allgather()), dtype, n) <= EPS
    assert relative(wide(b[:, :1]) - wide(S) @ y[:, None], norm(S) * norm(y[:, None]), dtype, n) <= EPS


@square_grid
def test_qr_by_rows(comm: Any, run: Any) -> None:
    device, dtype, n = run.device, run.dtype, 9
    good, few = rng_matrix(70, n, dtype), rng_matrix(20, n, dtype)  # few: some ranks have less than n rows, or none
    bad = np.repeat(good[:, :1], n, axis=1)  # of rank one, for which CholeskyQR2 fails
    for x, methods in ((good, ("cholesky", "tsqr")), (few, ("tsqr",)), (bad, ("auto",))):
        A = DistMatrix.from_global(x, grid=run.grid, block=(12, 4), order=run.order, device="fake")
        for method in methods:
            device.launches.clear(), device.copied.clear()
            Q, R = linalg.qr(A, method=method)
            assert max(device.copied, default=0) <= n * n * x.itemsize
            assert method != "tsqr" or comm.allreduce("geqrf" in device.launches)
            report: Any = Q.report
            assert report.as_predicted and Q.device == R.device == "fake"
            assert report.method == ("tsqr" if method == "auto" else method)
            if method == "cholesky" and run.grid.shape[1] == 1:
                assert {"product", "triangle"} <= {*device.launches}  # on the device
            assert comm.allgather(device.races) == [[]] * comm.size
            q, r = wide(Q.allgather()), wide(R.allgather())
            assert relative(wide(x) - q @ r, norm(x), dtype, n) <= EPS
            assert relative(q.conj().T @ q - np.eye(n), 1, dtype, n) <= EPS
            assert np.array_equal(A.allgather(), x)
        U, s, Vh = linalg.svd(A)
        assert comm.allgather(device.races) == [[]] * comm.size
        assert relative(wide(x) - wide(U.allgather()) * s @ wide(Vh.allgather()), norm(x), dtype, 70) <= EPS


def test_functions_stay_on_the_device(comm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(division, "SMALL", 8)  # larger problems are divided
    x, s, b = rng_matrix(14, 14, "float64"), positive_definite(14, "float64"), rng_matrix(14, 3, "float64")
    with fake_device("late") as device, ProcessGrid(comm) as grid:
        A, S, B = (DistMatrix.from_global(y, grid=grid, block=3, device="fake") for y in (x, s, b))
        D = DistMatrix.from_global(np.diag(np.diag(s)), grid=grid, block=4, device="fake")
        _, L, U = linalg.lu(A)
        U_, sigma, Vh = linalg.svd(A, 2, oversample=0)
        w, V = linalg.eigh(S)
        Q, H = linalg.polar(A)
        expected: list[tuple[Any, np.ndarray]] = [
            (L, scipy.linalg.lu(x)[1]),
            (U, scipy.linalg.lu(x)[2]),
            (linalg.solve(A, B, refine=True), np.linalg.solve(x, b)),
            (linalg.solve(A, B, refine="gmres"), np.linalg.solve(x, b)),
            (linalg.solve(D, B, assume_a="diagonal"), b / np.diag(s)[:, None]),
            (linalg.inv(A), np.linalg.inv(x)),
            (linalg.inv(D, assume_a="diagonal"), np.diag(1 / np.diag(s))),
            (linalg.sqrtm(S), scipy.linalg.sqrtm(s)),
            (Q @ H, x),
            (V * w @ V.H, s),
            (linalg.lstsq(A[:, :5], A[:, :2])[0], np.eye(5, 2)),
        ]
        for X, y in expected:
            assert X.device == "fake"
            assert np.abs(X.allgather() - y).max() <= 1e-9 * np.abs(y).max()
        assert U_.device == Vh.device == "fake"
        assert np.allclose(sigma, np.linalg.svd(x)[1][:2])
        assert np.isclose(linalg.det(A), np.linalg.det(x)) and np.isclose(linalg.cond(A, 2), np.linalg.cond(x))
        assert comm.allgather(device.races) == [[]] * comm.size


def test_singular_vectors_are_shared_by_devices(comm: Any, monkeypatch: Any) -> None:
    """Of more than 512 values, here 8, no rank has a whole triangle; results are right, and nothing races."""
    monkeypatch.setattr(division, "SMALL", 8)
    monkeypatch.setattr("pdgemm.linalg.singular.svd.ON_ONE_RANK", 8)
    forbid_replicated_triangles(monkeypatch, 8)
    x, b = rng_matrix(20, 14), rng_matrix(20, 2)
    with fake_device("late") as device, ProcessGrid(comm) as grid:
        A, B = (DistMatrix.from_global(y, grid=grid, block=4, device="fake") for y in (x, b))
        W = A.T
        X, inverse = linalg.lstsq(A, B)[0], linalg.pinv(W)
        assert X.device == inverse.device == "fake" and X.report.as_predicted and inverse.report.as_predicted
        assert np.allclose(X.allgather(), np.linalg.lstsq(x, b)[0]) and np.allclose(
            inverse.allgather(), np.linalg.pinv(x.T)
        )
        assert np.allclose(linalg.svdvals(A), np.linalg.svdvals(x))
        assert comm.allgather(device.races) == [[]] * comm.size


def test_rows_and_columns_of_very_different_scales(comm: Any) -> None:
    """Powers of two are found and applied on the device."""
    n, x, b = 20, rng_matrix(20, 20, "c8"), rng_matrix(20, 3, "c8")
    rows, cols = 2.0 ** np.linspace(-60, 60, n), 2.0 ** np.linspace(40, -40, n)
    rows, cols = (2.0 ** np.rint(np.log2(y)) for y in (rows, cols))
    with fake_device("late", reach=next(iter(WAYS_OF_PANELS.values()))) as device, ProcessGrid(comm) as grid:
        A = DistMatrix.from_global((x * rows[:, None] * cols).astype("c8"), grid=grid, block=4, device="fake")
        B = DistMatrix.from_global((b * rows[:, None]).astype("c8"), grid=grid, block=4, device="fake")
        X, inverse, (sign, logarithm) = linalg.solve(A, B), linalg.inv(A), linalg.slogdet(A)
        assert X.device == inverse.device == "fake" and comm.allgather(device.races) == [[]] * comm.size
        expected = np.linalg.slogdet(wide(x))
        assert np.isclose(sign, expected.sign, rtol=1e-4)
        assert np.isclose(logarithm, expected.logabsdet + np.log(rows).sum() + np.log(cols).sum(), rtol=1e-5)
        assert np.allclose(X.allgather() * cols[:, None], np.linalg.solve(wide(x), b), rtol=1e-3, atol=1e-4)
        assert np.allclose(inverse.allgather() * cols[:, None] * rows, np.linalg.inv(wide(x)), rtol=1e-3, atol=1e-4)


def test_ranks_that_cannot_reach_each_other(comm: Any) -> None:
    with fake_device("late", reach=Reach("", staged=True)), ProcessGrid(comm) as grid:
        A = DistMatrix.eye(20, grid=grid, block=4, device="fake")
        Q, _ = linalg.qr(A[:, :3])  # by messages through the host
        assert Q.device == "fake" and np.array_equal(Q.allgather(), np.eye(20, 3))
        if comm.size > 1:
            with pytest.raises(DeviceError, match=r"factor it on the host, A\.to_host\(\)"):
                linalg.cholesky(A)


def test_products_on_a_device_are_not_cut_for_messages(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host cuts products to progress messages of panels; on a device products stay whole."""
    S, launches = positive_definite(50, "float64"), []
    for flops in (task.SLAB_FLOPS, 1.0):
        monkeypatch.setattr(task, "SLAB_FLOPS", flops)
        with fake_device(reach=WAYS_OF_PANELS["sent"]) as device, ProcessGrid(comm) as grid:
            A = DistMatrix.from_global(S, grid=grid, block=8, device="fake")
            device.launches.clear()
            linalg.cholesky(A)
            launches.append(device.launches.count("product"))
    assert launches[0] == launches[1]
    assert any(comm.allgather(launches[0]))


LACKING: dict[str, list[Callable[..., Any]]] = {  # by launch: functions in which this launch runs out of memory
    "potrf": [lambda linalg, A, S: linalg.cholesky(S)],
    "getrf": [lambda linalg, A, S: linalg.lu_factor(A)],
    "geqrf": [lambda linalg, A, S: linalg.householder_qr(A), lambda linalg, A, S: linalg.qr(A[:, :3], method="tsqr")],
    "triangle": [lambda linalg, A, S: linalg.solve_triangular(S, A), lambda linalg, A, S: linalg.qr(A[:, :3])],
    "product": [
        lambda linalg, A, S, method=method: linalg.qr(A[:, :3], method=method) for method in ("tsqr", "cholesky")
    ],
    "sum": [lambda linalg, A, S, axis=axis: A.var(axis) for axis in (None, 0, 1)],
    "sort": [lambda linalg, A, S: np.sort(A, axis=0), lambda linalg, A, S: np.median(A)],
}


@pytest.mark.parametrize("launch", LACKING)
def test_memory_that_one_rank_lacks(comm: Any, launch: str, monkeypatch: Any) -> None:
    """All ranks raise the error, and none hangs; the next call succeeds."""
    a, s = rng_matrix(12, 12, "float64"), positive_definite(12, "float64")
    with fake_device("late") as device, ProcessGrid(comm) as grid:
        A, S = (DistMatrix.from_global(x, grid=grid, block=3, device="fake") for x in (a, s))
        kept = device._launch

        def lacking(what: str, *args: Any) -> None:
            if what == launch and comm.rank == comm.size - 1:
                raise OutOfMemoryError("a launch lacks memory")
            kept(what, *args)

        monkeypatch.setattr(device, "_launch", lacking)
        for call in LACKING[launch]:
            with pytest.raises(OutOfMemoryError, match="a launch lacks memory"):
                call(linalg, A, S)
        monkeypatch.setattr(device, "_launch", kept)
        for call in LACKING[launch]:
            call(linalg, A, S)
        assert np.array_equal(A.allgather(), a) and np.array_equal(S.allgather(), s)
