"""Cannon's algorithm with blocks copied from neighbours' device memory; both of its signals are needed."""

from __future__ import annotations

from typing import Any

import pytest
from fake_device import fake_device
from mpi4py import MPI
from tiers import square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.local.arrays.device import Reach
from pdgemm.transport.movers import pipeline

pytestmark = pytest.mark.mpi


def outcome(comm: Any, shape: tuple[int, int], lookahead: int) -> list[str]:
    """Return the races that all ranks report in two products."""
    with fake_device(reach=Reach("ipc")) as device, ProcessGrid(comm) as grid:
        A, B, C = (DistMatrix.random((36, 36), grid=grid, seed=s, device="fake") for s in range(3))
        for _ in range(2):
            pdgemm(1, A, B, 0, C, algorithm="cannon", shape=shape, lookahead=lookahead, panel_width=3)
        return [race for races in comm.allgather(device.races) for race in races]


@square_grid
@pytest.mark.parametrize("lookahead", [0, 3])
def test_blocks_are_copied_beside_products(comm: Any, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy after a signal starts and ends while a product is still in its stream."""
    if comm.size < 4:
        pytest.skip("fewer blocks than buffers")
    beside, wait = list[bool](), pipeline._Copied.Wait

    def watched(self: Any) -> None:
        compute = self._copy.func.__self__._recorder.compute
        wait(self)
        beside.append(compute.finished < compute.begun)

    monkeypatch.setattr(pipeline._Copied, "Wait", watched)
    assert outcome(comm, (1, comm.size), lookahead) == []
    assert beside
    assert all(beside)


@pytest.mark.on_ranks(6)
@pytest.mark.parametrize("lookahead", [1, 2])
def test_both_signals_are_needed(comm: Any, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not wait for a signal has a race: it reads a block too early, or overwrites it too early."""
    if comm.size < 6:
        pytest.skip("fewer blocks than buffers and two")
    assert outcome(comm, (1, comm.size), lookahead) == []
    wait_for, kept = pipeline.signal_from, list[Any]()
    for left_out in (pipeline._ready, pipeline._copied):
        tags = [left_out(number) for number in range(20)]

        def unheeded(comm: Any, source: int, recorder: Any, tag: int, tags: list[int] = tags) -> Any:
            kept.append(wait_for(comm, source, recorder, tag))
            return MPI.REQUEST_NULL if tag in tags else kept[-1]

        monkeypatch.setattr(pipeline, "signal_from", unheeded)
        assert outcome(comm, (1, comm.size), lookahead), left_out
