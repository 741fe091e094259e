"""Tensors on simulated devices: functions, views, contractions, words and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_tensors import KINDS, check_einsums, check_indexing, check_tensors, check_views
from device_ways import WAYS
from fake_device import SCHEDULES, fake_device

from pdgemm import DistTensor, ProcessGrid, einsum
from pdgemm.devices.streams import DeviceRecorder
from pdgemm.errors import DeviceError
from pdgemm.io import hdf5, npy
from pdgemm.planning.tensors import contractions, einsum_plan
from pdgemm.planning.tensors.expression import parsed
from pdgemm.tensors.einsum_residual import verify_einsum

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(1, 2, 4)]


@contextmanager
def simulated(comm: Any, schedule: str = "late", way: str = "shared") -> Iterator[Any]:
    """Simulate a device, and make a grid of it."""
    own = comm.Dup()  # facts about a device are cached with the grids of a communicator
    with fake_device(schedule, reach=WAYS[way][0]) as device, ProcessGrid(own) as grid:
        yield device, grid
    own.Free()


def test_functions(comm: Any) -> None:
    for dtype, way, schedule in zip(KINDS, ("shared", "ipc", "ring"), SCHEDULES):
        with simulated(comm, schedule, way) as (device, grid):
            check_tensors(grid, "fake", dtype)
            check_views(grid, "fake")
            check_indexing(grid, "fake")
        assert not device.races


def test_contractions(comm: Any) -> None:
    """The words are those of the plan, whichever way messages take."""
    ways = [*WAYS][:: 2 if comm.size > 2 else 1]
    for way, schedule, dtype in zip(ways, cycle(SCHEDULES), cycle(KINDS)):
        with simulated(comm, schedule, way) as (device, grid):
            check_einsums(grid, "fake", dtype)
        assert not device.races


def test_one_product_after_the_other(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose products are divided among all ranks."""
    every = contractions._candidates
    monkeypatch.setattr(contractions, "_candidates", lambda *x: (y for y in every(*x) if y.way == contractions.PRODUCT))
    caches = contractions.contraction, einsum_plan._plan
    for cache in caches:
        cache.cache_clear()
    a, b = (np.random.default_rng(0).standard_normal(shape) for shape in ((3, 8, 5), (3, 5, 7)))
    for schedule in SCHEDULES:
        with simulated(comm, schedule) as (device, grid):
            A, B = (DistTensor.from_global(x, grid=grid, device="fake") for x in (a, b))
            C = einsum("bij,bjk->kbi", A, B, alpha=2)
            assert np.allclose(C.allgather(), 2 * np.einsum("bij,bjk->kbi", a, b))
        assert not device.races
    for cache in caches:
        cache.cache_clear()


def test_a_move_waits_for_the_work_before_it(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, messages are sent, and memory is read, before a copy or a sum is complete."""
    if comm.size == 1:
        return
    monkeypatch.setattr(DeviceRecorder, "begin", lambda recorder: None)
    x = np.arange(60.0).reshape(3, 4, 5)
    for way in ("shared", "ring"):
        with simulated(comm, "late", way) as (device, grid):
            A = DistTensor.from_global(x, grid=grid, device="fake", rows=(0, 1, 2))
            A.matrix([2, 1, 0])
            copied, device.races[:] = any(comm.allgather(bool(device.races))), []
            A.sum(0, keepdims=True)
            added = any(comm.allgather(bool(device.races)))
        assert copied and added, way


def test_files_and_the_check_of_a_result(comm: Any, tmp_path: Path) -> None:
    folder, x = Path(comm.bcast(str(tmp_path))), np.arange(120.0).reshape(6, 5, 4)
    with simulated(comm) as (device, grid):
        A = DistTensor.from_global(x, grid=grid, device="fake").transpose(2, 0, 1)
        hdf5.save(folder / "a.h5", "x", A)
        npy.save(folder / "a.npy", A)
        for B in (
            hdf5.load(folder / "a.h5", "x", grid, device="fake"),
            npy.load(folder / "a.npy", grid, device="fake"),
        ):
            assert B.device == "fake" and np.array_equal(B.allgather(), x.transpose(2, 0, 1))
        C = einsum("kij,kil->jl", A, A)
        expression, _ = parsed("kij,kil->jl", (A, A))
        assert verify_einsum(expression, (A, A), C).passed
        C.unfolding.fill(0)
        assert not verify_einsum(expression, (A, A), C).passed
        assert not device.races


def test_tensors_in_different_memories(comm: Any) -> None:
    with simulated(comm) as (_, grid):
        A, B = (DistTensor.zeros((3, 4, 2), grid=grid, device=where) for where in ("fake", "host"))
        for name, act in (
            ("einsum ijk,ijk->i", lambda: einsum("ijk,ijk->i", A, B)),
            ("add", lambda: A + B[0]),
            ("concatenate", lambda: np.concatenate([A, B])),
        ):
            with pytest.raises(DeviceError, match=f"{name} of arrays on fake and host: use to_device"):
                act()
        assert not (A + B.to_device("fake")).allgather().any()


def test_the_simulated_array_refuses_what_cupy_refuses() -> None:
    with fake_device("late") as device:
        x, y = device.to_device(np.arange(24.0).reshape(2, 3, 4)), device.to_device(np.zeros((4, 3)))
        for wrong in (
            lambda: x.transpose(tuple(np.argsort([2, 1, 0]))),
            lambda: x.__setitem__(0, np.zeros((3, 4))),
            lambda: x[np.arange(2)],
            lambda: x.transpose(2, 1, 0).reshape(-1),
        ):
            with pytest.raises(AssertionError):
                wrong()
        y[...] = x.transpose(2, 1, 0)[..., 1]
        assert not y.x.any()  # the assignment has only been started
        assert np.array_equal(y.get(), x.get()[1].T)
        assert np.array_equal(np.sum(x, axis=(0, 2), keepdims=True).get(), x.get().sum((0, 2), keepdims=True))
