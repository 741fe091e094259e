"""Calibration of GPUs: `calibrate` has to find the times of a device with known times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_arrays import FakeArray
from fake_cupy import fake_cupy
from fake_device import FakeDevice, fake_device
from fake_memory import FakeMemory
from mpi4py import MPI
from tiers import everything

from pdgemm import Machine, ProcessGrid, plan
from pdgemm.local.arrays.device import Reach
from pdgemm.planning.machines.machine import load_machine, machine_at_hand, touched
from pdgemm.planning.question import Question
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.tools.calibrate import calibrate, place

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

SIZES = place.Sizes(
    side=256, widths=(16, 64, 256), times=2, copied=256, touched=1 << 14, words=1 << 12, moved=32, beside=(256, 256)
)
RATES = {16: 2e11, 64: 8e11, 256: 1e12}  # flop/s of float64 by the least extent of a product; other types by MULTIPLES
MULTIPLES = {"float32": 2, "float64": 1, "complex64": 2, "complex128": 1, "float16": 8, "bfloat16": 4}
COPY, FRESH, BUS, OVERLAP = 2e12, 3e11, 5e10, 0.7
MESSAGE, NCCL, PEER = (5e-6, 2e-10), (2e-5, 1e-11), (3e-6, 5e-12)  # latency (s) and s/byte


class KnownGpu(FakeDevice):
    """A device whose clock counts only products, copies and messages.

    The fraction OVERLAP of the shorter of computing and moving is hidden.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.computing = self.moving = self.now = 0.0

    def seconds(self) -> float:
        self.now += self.computing + self.moving - OVERLAP * min(self.computing, self.moving)
        self.computing = self.moving = 0.0
        return self.now

    def message(self, x: Any, writes: bool, what: str, request: MPI.Request | None) -> None:
        super().message(x, writes, what, request)
        self.moving += writes * _by(MESSAGE, x.nbytes)

    def _launch(self, what: str, reads: Sequence[Any], writes: Sequence[Any], act: Callable[[], object]) -> None:
        super()._launch(what, reads, writes, act)
        nbytes = sum(x.nbytes for x in writes)
        if what == "product":
            (m, n), k = writes[0].shape, reads[0].shape[1]
            rate = np.interp(min(m, n, k), [*RATES], [*RATES.values()]) * MULTIPLES[str(writes[0].dtype)]
            copied = touched((m, n, k), (m, n, k)) * writes[0].itemsize / COPY
            self.computing += gemm_flops(m, n, k, writes[0].dtype.kind == "c") / rate + copied
        elif what in ("broadcast", "exchange"):
            self.moving += bool(writes) * _by(NCCL, nbytes)
        elif what == "copy":
            self.moving += nbytes / BUS
        elif any(hasattr(x, "peer") for x in reads):
            self.moving += _by(PEER, nbytes)
        elif what in ("combine", "blocks"):
            self.moving += nbytes / (COPY if reads else FRESH)


def _by(link: tuple[float, float], nbytes: int) -> float:
    return link[0] + nbytes * link[1]


@pytest.fixture(name="known")
def known_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeDevice], None]:
    array = FakeMemory.array

    def of_a_peer(self: FakeMemory, *args: Any) -> FakeArray:
        found = array(self, *args)
        found.peer = True  # type: ignore[attr-defined]
        return found

    def use(device: Any) -> None:
        monkeypatch.setattr("pdgemm.tools.calibrate.GPUS", SIZES)
        monkeypatch.setattr(FakeMemory, "array", of_a_peer)
        monkeypatch.setattr(place, "perf_counter", device.seconds)

    return use


def near(found: float, expected: float) -> bool:
    return abs(found - expected) <= 0.1 * expected


WAYS = {
    "messages": Reach("", staged=False),
    "staged": Reach("", staged=True),
    "nccl": Reach("", staged=True, nccl=True),
    "ipc": Reach("ipc", staged=False),
}


@pytest.mark.on_ranks(1, 3)
@pytest.mark.parametrize("way", WAYS if everything() else ["nccl", "ipc"])
def test_a_known_machine_is_found(comm: Any, known: Any, way: str) -> None:
    """Rates, bandwidths, links and overlap are within 10% of known ones; packing and staging are part of messages."""
    with fake_device(kind=KnownGpu, reach=WAYS[way]) as device:
        known(device)
        found = calibrate(comm, device="fake")
    assert not device.races
    assert found.device == "cuda" and found.staged == WAYS[way].staged
    assert set(found.gamma) == set(MULTIPLES)
    for (dtype, multiple), (width, rate) in product(MULTIPLES.items(), RATES.items()):
        assert near(found.gamma[dtype][width], rate * multiple), (dtype, width)
    assert near(found.copy_bandwidth, COPY)
    assert near(found.first_touch_bandwidth, FRESH)
    if comm.size == 1:
        assert found.intra == machine_at_hand(gpus=True, staged=found.staged).intra
        return
    assert near(found.overlap, OVERLAP)
    others, staged = comm.size - 1, WAYS[way].staged
    bus = staged / BUS
    bytes_of = {
        "ring": MESSAGE[1] + bus * (1 + 1 / others),  # a copy of each received part, and one of the own part
        "shift": MESSAGE[1] + 2 * bus,
        "reduce": MESSAGE[1] + bus * comm.size / others + (1 + 1 / others) / COPY,
        "exchange": (NCCL[1] if way == "nccl" else MESSAGE[1]) + (2 + 1 / others) / COPY,  # kernels pack
    }
    for kind, beta in bytes_of.items():
        assert near(found.intra[kind].beta, beta), kind
    for kind in ("ring", "shift", "reduce", "exchange"):
        assert near(found.intra[kind].alpha, MESSAGE[0]), kind
    assert ("nccl" in found.intra) == (way == "nccl") and ("ipc" in found.intra) == (way == "ipc")
    if way == "nccl":
        assert near(found.intra["nccl"].beta, NCCL[1]) and near(found.intra["nccl"].alpha, NCCL[0])
    if way == "ipc":
        assert near(found.intra["ipc"].beta, PEER[1] + 1 / (COPY * others))
        assert near(found.intra["ipc"].alpha, PEER[0])


@pytest.mark.on_ranks(4)
def test_links_between_nodes_are_those_of_their_first_ranks(
    comm: Any, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.size < 4:
        pytest.skip("two nodes of two ranks")
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    with fake_device(kind=KnownGpu, reach=WAYS["nccl"]) as device:
        known(device)
        found = calibrate(comm, device="fake")
    assert not device.races
    assert found.ranks_per_node == 2
    assert near(found.inter["nccl"].beta, NCCL[1]) and near(found.intra["nccl"].beta, NCCL[1])
    assert near(found.inter["shift"].beta, MESSAGE[1] + 2 / BUS)


@pytest.mark.on_ranks(1, 2)
@pytest.mark.parametrize(("aware", "nccl"), [("no", "yes"), ("yes", "no")])
def test_gpus_are_measured_through_cupy(
    comm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, aware: str, nccl: str
) -> None:
    """On simulated CuPy, `calibrate` measures by CuPy's calls; plans for these GPUs use only the measured figures."""
    monkeypatch.setenv("PDGEMM_NCCL", nccl)
    small = SIZES._replace(side=64, copied=64, words=256, beside=(64, 64))
    path = comm.bcast(tmp_path / "machine.json")
    with fake_cupy(comm.size, aware):
        monkeypatch.setattr("pdgemm.tools.calibrate.GPUS", small)
        found = calibrate(comm, device="cuda")
        with ProcessGrid(comm) as grid:
            from pdgemm import DistMatrix

            if comm.rank == 0:
                path.write_text(found.as_json())
            comm.Barrier()
            monkeypatch.setenv("PDGEMM_MACHINE", f"{path}:")
            machine_at_hand.cache_clear()
            try:
                on_gpu, on_host = (DistMatrix.eye(8, grid=grid, device=device) for device in ("cuda", "host"))
                assert plan(on_gpu, on_gpu).problem.machine.name == found.name
                assert plan(on_host, on_host).problem.machine.name == Machine().name
            finally:
                machine_at_hand.cache_clear()
    assert load_machine(path) == found
    assert found.staged == (aware == "no" and comm.size > 1)
    asked = Question(1000, 1000, 1000, 4, machine=found).problem
    assert (asked.device == "cuda" and asked.staged == found.staged) or asked.shared or asked.nccl
