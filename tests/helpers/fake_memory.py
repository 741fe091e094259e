"""Ranks on simulated devices: memory that the ranks of a node share, signals, and watched communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_arrays import FakeArray, spoilt
from fake_streams import Access, Clock, Races, Shown, told
from mpi4py import MPI
from numpy.lib.array_utils import byte_bounds

from pdgemm.grids.node_memory import NodeMemory


class FakeMemory:
    """Device memory that all ranks of a node access; here shared memory of the host."""

    def __init__(self, memory: NodeMemory, device: Races) -> None:
        self._memory, self._device = memory, device
        self.node, self.alone, self.window, self.size = memory.node, memory.alone, memory.window, memory.size
        self.fence, self.failed = memory.fence, False
        parts = [np.frombuffer(part, np.uint8) for part in (self.window.parts if self.window else [])]
        self._bounds = [byte_bounds(part) for part in parts]

    def show(self, x: Access, clock: Clock) -> Shown | None:
        """Return the record of an access for other ranks; None if the memory is not shared."""
        start, stop = byte_bounds(x.x)
        for part, (first, last) in enumerate(self._bounds):
            if first <= start and stop <= last:
                seen = x.writes, x.who, x.tick, told(x)
                where = start - first, stop - first, x.x.shape, x.x.strides, x.x.itemsize
                return Shown(part, *where, seen, dict(clock))
        return None

    def shown(self, x: Shown) -> np.ndarray:
        assert self.window is not None
        return np.ndarray(x.shape, f"V{x.itemsize}", self.window.parts[x.part], x.start, x.strides)

    def gather(self, words: np.ndarray) -> np.ndarray:
        self._device.met(self)
        return self._memory.gather(words)

    def map_all(self, places: object) -> None:
        self._memory.map_all(places)

    def sync(self) -> None:
        """Synchronise the ranks of the node; pending or unordered conflicting accesses to shared memory are races."""
        self._device.met(self)
        self._memory.sync()

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> FakeArray:
        return FakeArray(spoilt(self._memory.empty(shape, dtype, order)), self._device)

    def where(self, x: FakeArray) -> list[int]:
        return self._memory.where(x.x)

    def lies_here(self, x: FakeArray) -> bool:
        return self._memory.lies_here(x.x)

    def array(self, rank: int, shape: Sequence[int], dtype: np.dtype, where: list[int], strides: Any) -> FakeArray:
        assert rank != self.node.rank, "no rank maps its own memory"
        return FakeArray(self._memory.array(rank, shape, dtype, where, strides), self._device)


class FakeSignal:
    """The request of a received signal: on completion the host's clock is joined with the sender's."""

    def __init__(self, device: Races, request: MPI.Request) -> None:
        self._device, self._request = device, request

    def Test(self) -> bool:
        arrived, clock = self._request.test()
        self._device.host_sees(clock or {})
        return bool(arrived)

    def Wait(self) -> None:
        self._device.host_sees(self._request.wait() or {})


def _is_signal(buf: Any) -> bool:
    return isinstance(buf, np.ndarray) and buf.dtype == np.uint8 and not buf.size


class WatchedComm(MPI.Intracomm):
    """A communicator that reports to the device which memory MPI reads and writes, with the request that ends this."""

    device: Any = None  # for a duplicate that is not watched yet

    def __new__(cls, comm: MPI.Comm | None = None, device: Races | None = None) -> WatchedComm:
        made = super().__new__(cls, comm)
        made.device = getattr(comm, "device", None) if device is None else device
        return made

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        if _is_signal(buf):
            return super().isend(self.device.clock, dest, tag)
        request = super().Isend(buf, dest, tag)
        self.device.message(buf, False, "send", request)
        return request

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        if _is_signal(buf):
            return FakeSignal(self.device, super().irecv(source=source, tag=tag))
        request = super().Irecv(buf, source, tag)
        self.device.message(buf, True, "receive", request)
        return request

    def Ibcast(self, buf: Any, root: int = 0) -> MPI.Request:
        request = super().Ibcast(buf, root)
        self.device.message(buf, self.rank != root, "broadcast", request)
        return request

    def Split(self, color: int = 0, key: int = 0) -> WatchedComm:
        return WatchedComm(super().Split(color, key), self.device)

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("no blocking or reducing call of MPI with arrays of the device")

    Reduce = Ireduce = Reduce_scatter = _refuse
