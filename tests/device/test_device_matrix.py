"""Matrices on a device: creation, inspection, redistribution and errors; and the probe of CUDA-aware MPI."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_arrays import FakeArray
from fake_device import fake_device
from fake_memory import WatchedComm
from problems import TOLERANCE, gemm_error

from pdgemm import (
    Batch,
    DistMatrix,
    Plan,
    ProcessGrid,
    matmul_batched,
    matmul_grouped,
    pdgemm,
    plan,
    plan_grouped,
    redistribute,
    verify,
)
from pdgemm.devices import gpu_aware_mpi
from pdgemm.errors import ArgumentError, DeviceError
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.device import Reach
from pdgemm.schedules.collectives.collective import Collective, even_parts
from pdgemm.transport.collectives import carry_out

pytestmark = pytest.mark.mpi
STAGED, AWARE, ALONE = Reach("shared", staged=True), Reach("shared", staged=False), Reach("", staged=True)


def test_collectives_of_arrays_on_a_device(comm: Any) -> None:
    """Arrays are staged through the host, and results are on the device."""
    with ProcessGrid(comm, (comm.size, 1)) as grid, fake_device("late", reach=STAGED):
        A = DistMatrix.random((comm.size, 11), grid=grid, seed=1, device="fake")
        x, counted = A.local.reshape(-1), Traffic()
        ring = Collective("all_reduce", "ring", tuple(range(comm.size)), even_parts(len(x), comm.size), A.dtype)
        wanted = A.sum(axis=0)
        carry_out(ring, comm, [x], counted)
        assert np.allclose(A.to_host().local, wanted, rtol=1e-14)
        assert counted == ring.traffic(comm.rank)


def test_rows_are_selected_and_sorted_on_the_device(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        x = np.random.default_rng(0).standard_normal((13, 9))
        for reach in (STAGED, AWARE, ALONE):
            with fake_device("late", reach=reach) as device:
                A = DistMatrix.from_global(x, grid=grid, block=3, device="fake")
                for key in ([5, 0, 5, 12], slice(None, None, -2), np.ix_([7, 1], [8, 0, 3])):
                    made = A[key]
                    assert made.device == "fake" and np.array_equal(made.allgather(), x[key])
                    assert made.report.counted == made.report.predicted
                B, y = A.copy(), x.copy()
                B[[4, 1]], y[[4, 1]] = A[2:4], x[2:4]
                assert np.array_equal(B.allgather(), y)
                assert np.array_equal(np.sort(B, axis=0).allgather(), np.sort(y, axis=0))
                assert str(A.shape[0]) in str(A) and "<svg" in A._repr_html_()
                assert device.races == []


def test_matrices_are_copied_to_the_device_and_back(comm: Any) -> None:
    with fake_device() as device, ProcessGrid(comm) as grid:
        made: dict[str, Any] = {"grid": grid, "block": 3}
        A = DistMatrix.random((13, 9), dtype="complex64", order="F", **made)
        there = A.to_device("fake")
        assert (there.device, A.device, there.shared) == ("fake", "host", A.shared)
        assert isinstance(there.local, FakeArray)
        assert "on fake" in repr(there) or "fake" not in device.name
        assert there.to_device("fake") is there
        assert A.to_host() is A
        for here, moved in ((A, there), (A.T, there.T), (A.H, there.H), (A[2:9, 1:], there[2:9, 1:])):
            back = moved.to_host()
            assert np.array_equal(back.local, here.local)
            assert np.allclose([back.norm(), moved.norm()], here.norm(), rtol=1e-12)  # other strides, other rounding
            assert np.array_equal(moved.allgather(), here.allgather())
            assert moved.allclose(here.copy().to_device("fake"))
        whole, expected = there.to_global(), A.to_global()
        assert comm.rank or np.array_equal(whole, expected)
        assert np.array_equal(there.astype("complex128").to_host().local, A.local)
        for root in (None, 0):
            x = np.arange(70.0).reshape(7, 10)
            given = x if root is None or comm.rank == root else None
            dealt = DistMatrix.from_global(given, root=root, device="fake", **made)
            assert np.array_equal(dealt.allgather(), x)
        adopted = DistMatrix.from_local(there.local, A.shape, **made)
        assert adopted.local is there.local
        assert (adopted.order, adopted.device, adopted.shared) == ("F", "fake", comm.size == 1 or there.shared)
        there[1:3, 2:5] = 7
        assert (there.allgather()[1:3, 2:5] == 7).all()
        B = DistMatrix.random((9, 5), dtype="complex64", device="fake", **made)
        C = there @ B
        assert C.device == "fake"
        assert verify(C, 1, there, B).passed
        summary = str(C.report.summary())
        assert "mover" in summary
        assert "on fake" in summary
        assert not device.races


def test_redistribution(comm: Any) -> None:
    for reach in (STAGED, AWARE, ALONE, Reach("", staged=False)):
        with fake_device("transfer first", reach=reach) as device, ProcessGrid(comm) as grid:
            X = DistMatrix.random((31, 23), grid=grid, block=(3, 4), dtype="complex64", device="fake")
            Y = DistMatrix.random((23, 31), grid=grid, block=5, dtype="complex128", order="F", device="fake")
            x, y = X.allgather(), Y.allgather()
            redistribute(X.H, Y, alpha=2j, beta=-1)
            assert np.allclose(Y.allgather(), 2j * x.conj().T - y)
            redistribute(X, Y.T, alpha=0, beta=3)
            assert np.allclose(Y.allgather(), 3 * (2j * x.conj().T - y))
            Z = X.redistribute(block=2, memory_limit=4000)
            assert np.array_equal(Z.allgather(), x)
            assert Z.report.counted == Z.report.predicted
            assert Z.report.extra_bytes == Z.report.predicted_extra_bytes
            assert bool(Z.report.counted.words_read) == bool(
                X.shared and reach.reads and Z.report.counted.words_received
            )
            assert not device.races


def test_a_product_again_and_again_leaves_nothing_behind(comm: Any) -> None:
    with fake_device("compute first", reach=STAGED) as device, ProcessGrid(comm) as grid:
        A, B = (DistMatrix.random((12, 12), grid=grid, block=2, seed=s, device="fake") for s in (1, 2))
        C = DistMatrix.zeros((12, 12), grid=grid, block=5, device="fake")
        planned = plan(A, B, C, beta=1, mover="staged")
        assert Plan.from_json(planned.to_json()) == planned
        assert planned.problem.device == "fake"
        product, reference = planned.prepare(A, B, C), np.zeros((12, 12))
        for _ in range(5):
            product(beta=1)
            reference += A.allgather() @ B.allgather()
            assert np.allclose(C.allgather(), reference)
        on_host = [x.to_host() for x in (A, B, C)]
        with pytest.raises(DeviceError, match="the plan was made for matrices on fake, these are on host"):
            planned.execute(*on_host)
        assert not device.races


def test_managed_memory_is_staged(comm: Any) -> None:
    """MPI is not given the address of managed memory, on any rank."""
    with fake_device(reach=AWARE) as device, ProcessGrid(comm) as grid:
        x = DistMatrix.random((12, 12), grid=grid, device="fake")
        alone = device.to_device(x.to_host().local)  # not in shared memory: its elements have to be sent
        alone.managed = comm.rank == comm.size - 1
        A = DistMatrix.from_local(alone, (12, 12), grid=grid)
        assert not A.mpi_addressable
        assert comm.size == 1 or not A.shared
        assert not A.T[1:].mpi_addressable
        assert x.mpi_addressable
        C = pdgemm(1, A.T[1:], x, mover="staged")
        assert np.allclose(C.allgather(), x.allgather().T[1:] @ x.allgather())
        assert comm.size == 1 or C.report.mover == "staged"
        moved = A.redistribute(source=(0, grid.shape[1] - 1))  # whole local arrays: MPI could send them unpacked
        assert np.array_equal(moved.allgather(), x.allgather())
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="a matrix is in managed memory"):
                pdgemm(1, A, x, mover="mpi")
        assert not device.races


def test_elementwise_functions_and_reversed_ranks(comm: Any) -> None:
    """New matrices report their true memory order, so that algorithms send blocks without packing."""
    with fake_device(reach=ALONE) as device, ProcessGrid(comm, (1, comm.size)) as grid:
        A, B = (DistMatrix.random((12, 12), grid=grid, seed=s, order="F", device="fake") for s in (1, 2))
        X = np.array(2.0) * A + B
        X -= 1
        x, b = 2 * A.allgather() + B.allgather() - 1, B.allgather()
        for algorithm in ("cannon", "summa"):
            C = pdgemm(1, X, B, algorithm=algorithm, shape=grid.shape)
            assert np.allclose(C.allgather(), x @ b)
        with ProcessGrid(comm, (1, comm.size), ranks=range(comm.size)[::-1]) as other:
            assert np.array_equal(X.redistribute(grid=other).allgather(), X.allgather())
        assert not device.races


def test_bad_input_is_the_same_on_all_ranks(comm: Any) -> None:
    with fake_device(reach=ALONE), ProcessGrid(comm) as grid:
        A = DistMatrix.random((6, 6), grid=grid)
        D, first = A.to_device("fake"), "fake" if comm.rank else "host"
        local = np.zeros(A.local.shape) if comm.rank else D.local
        wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (DeviceError, "A on host, B on fake: copy them with to_device", lambda: pdgemm(1, A, D)),
            (DeviceError, "A on fake, B on fake, C on host", lambda: pdgemm(1, D, D, 0, A)),
            (DeviceError, "X is on fake, out on host", lambda: D.redistribute(A)),
            (DeviceError, "device 'gpu' is not one of host, cuda", lambda: A.to_device("gpu")),
        ]
        if comm.size > 1:
            differ = "called with different arguments"
            wrong += [
                (ArgumentError, "mover 'staged' is for matrices on a device", lambda: pdgemm(1, A, A, mover="staged")),
                (ArgumentError, "'ipc' requires ranks that share memory", lambda: pdgemm(1, D, D, mover="ipc")),
                (ArgumentError, "mover 'nccl' requires", lambda: pdgemm(1, D, D, mover="nccl")),
                (ArgumentError, differ, lambda: DistMatrix.empty((4, 4), grid=grid, device=first)),
                (ArgumentError, differ, lambda: A.to_device(first)),
                (ArgumentError, differ, lambda: DistMatrix.from_local(local, (6, 6), grid=grid)),
            ]
            for mover in ("mpi", "ring", "ibcast"):
                text = f"mover '{mover}' passes pointers to device memory to MPI"
                wrong.append((ArgumentError, text, partial(pdgemm, 1, D, D, mover=mover)))
        for kind, text, call in wrong:
            with pytest.raises(kind, match=text):
                call()
        assert gemm_error(pdgemm(1, D, D).allgather(), 1, D.allgather(), D.allgather()) <= TOLERANCE


class Liar(WatchedComm):
    """An MPI library that claims to accept device pointers, and damages large broadcasts."""

    def Ibcast(self, buf: Any, root: int = 0) -> Any:
        request = super().Ibcast(buf, root)
        request.Wait()
        if buf.size > 1000 and self.rank != root:
            buf.x[-1] += 1
        return request


def test_the_probe_tests_device_pointers(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDGEMM_GPU_AWARE", raising=False)
    monkeypatch.setattr(gpu_aware_mpi, "_SIDE", 16)
    with fake_device() as device:
        watched = WatchedComm(comm, device)
        for says, expected in (("yes", (True, "self-test passed")), ("no", (False, "reports no support"))):
            monkeypatch.setattr(gpu_aware_mpi, "support_reported", lambda says=says: says)
            aware, why = gpu_aware_mpi.gpu_aware(watched, device)
            assert (aware, expected[1] in why) == (expected[0], True)
        monkeypatch.setattr(gpu_aware_mpi, "support_reported", lambda: "unknown")
        for survives in (True, False):
            monkeypatch.setattr(gpu_aware_mpi, "_child_survives", lambda survives=survives: survives)
            assert gpu_aware_mpi.gpu_aware(watched, device)[0] == survives
        monkeypatch.setattr(gpu_aware_mpi, "support_reported", lambda: "yes")
        if comm.size > 1:
            aware, why = gpu_aware_mpi.gpu_aware(Liar(comm, device), device)
            assert (aware, why) == (False, "its self-test failed on rank 1: 8192 bytes were broadcast changed")
        monkeypatch.setenv("PDGEMM_GPU_AWARE", "no")
        assert gpu_aware_mpi.gpu_aware(watched, device) == (False, "PDGEMM_GPU_AWARE=no")
        if comm.rank == comm.size - 1:
            monkeypatch.setenv("PDGEMM_GPU_AWARE", "perhaps")
        with pytest.raises(ArgumentError, match="PDGEMM_GPU_AWARE must be yes or no, got 'perhaps'"):
            gpu_aware_mpi.gpu_aware(watched, device)
        assert not device.races


def test_batches(comm: Any) -> None:
    """Stacks and lists of matrices on a device: types, operations, scalars, and errors."""
    rng = np.random.default_rng(comm.rank)
    with fake_device() as device:

        def batch(arrays: Any) -> Any:
            if isinstance(arrays, list):
                return Batch.from_local([device.to_device(x, "C") for x in arrays], comm)
            return Batch.from_local(device.to_device(arrays, "C"), comm)

        for dtype in ("float64", "complex64", "bfloat16", "int8"):
            into = {"bfloat16": "float32", "int8": "int32"}.get(dtype, dtype)
            a, b, c = (rng.integers(-9, 9, (5, *shape)) for shape in ((4, 6), (6, 3), (4, 3)))
            a, b, c = a.astype(dtype), b.astype(dtype), c.astype(into)
            expected = [2 * (x.astype(into) @ y.astype(into)) - z for x, y, z in zip(a, b, c)]
            for high in (4, 4 - comm.rank % 2):  # on all ranks the same shape, or not
                operands = [a, b, c] if high == 4 else [[x[:high] for x in a], list(b), [x[:high] for x in c]]
                A, B, C = map(batch, operands)
                assert A.device is device
                assert matmul_batched(A, B, C, alpha=2, beta=-1) is C
                found = C.items.x if isinstance(C.items, FakeArray) else [x.x for x in C.items]
                assert all(np.array_equal(x, y[:high]) for x, y in zip(found, expected))
            made = matmul_batched(batch(b), batch(a), transa="C", transb="C")
            whole = made.to_global()
            if whole is not None:
                assert np.array_equal(whole[0], (b.conj().swapaxes(1, 2) @ a.conj().swapaxes(1, 2))[0].astype(into))
        scaled = matmul_batched(batch(a), batch(b), batch(c), alpha=0, beta=3)
        assert np.array_equal(scaled.items.x, 3 * c)
        on_host = Batch.from_local(b, comm)
        with pytest.raises(DeviceError, match="A and B are on different devices"):
            matmul_batched(batch(a), on_host)
        assert not device.races


def test_grouped_products(comm: Any) -> None:
    """Rows are sent to the ranks of their groups and back, in every way of sending; bad input is refused."""
    rng = np.random.default_rng(0)
    x, w, y = (rng.integers(-9, 9, shape) * 1.0 for shape in ((23, 6), (5, 6, 4), (46, 4)))
    groups, owner = rng.integers(-1, 5, (23, 2)), rng.integers(0, comm.size, 5)
    product = np.array([x[i // 2] @ w[g] if g >= 0 else 0 * w[0, 0] for i, g in enumerate(groups.ravel())])
    gradient = [x[np.flatnonzero(groups.ravel() == g) // 2].T @ y[groups.ravel() == g] for g in range(5)]
    with ProcessGrid(comm) as grid:
        for reach in (STAGED, AWARE, ALONE):
            with fake_device("late", reach=reach) as device:
                W = Batch.from_global(w, comm, owner)
                W = Batch(device.to_device(W.items, "C"), W.shapes, W.owner, W.dtype, comm, device)
                X = DistMatrix.from_global(x, grid=grid, block=3, device="fake")
                routing = plan_grouped(X, groups[X.indices()[0]], W)
                for beta in (0, 2):
                    Y = DistMatrix.from_global(y if beta else y * np.nan, grid=grid, block=4, device="fake")
                    assert matmul_grouped(X, W, routing, Y, alpha=3, beta=beta) is Y
                    assert np.array_equal(Y.allgather(), 3 * product + (2 * y if beta else 0))
                    assert Y.report.as_predicted
                new = matmul_grouped(X, W, routing)
                assert new.device == "fake" and np.array_equal(new.allgather(), product)
                Y[...] = y
                dW = matmul_batched(routing.to_groups(X), routing.to_groups(Y), transa="T").to_global()
                assert dW is None or all(np.array_equal(one, other) for one, other in zip(dW, gradient))
                back = routing.to_rows(routing.to_groups(X)).allgather()
                assert np.array_equal(back, np.where(groups.ravel()[:, None] >= 0, np.repeat(x, 2, axis=0), 0))
                with pytest.raises(DeviceError, match="X and W are on different devices"):
                    matmul_grouped(X.to_host(), W, routing)
                with pytest.raises(DeviceError, match="copy one with to_device"):
                    routing.to_rows(routing.to_groups(X), DistMatrix.from_global(np.zeros((46, 6)), grid=grid))
                assert device.races == []


def test_rows_of_copies_are_aligned_like_those_of_matrices(comm: Any) -> None:
    with fake_device(), ProcessGrid(comm) as grid:
        A = DistMatrix.random((75 * comm.size, 67 * comm.size), grid=grid, dtype="float32", device="fake")
        for x in (A, A.copy(), A.T.copy(), A.astype("bfloat16"), abs(A.astype("bfloat16")), A.astype("complex64").imag,
                  np.where(A > 0.5, A, 0)):  # fmt: skip
            assert max(x.stored.strides) % 16 == 0 and min(x.stored.strides) == x.itemsize  # type: ignore[attr-defined]
