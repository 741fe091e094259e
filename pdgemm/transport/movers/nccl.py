"""The mover `nccl`: NCCL sends in the copy stream; products wait for panels on the device, and the host does not wait.

Words and messages are counted as for MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array, of
from pdgemm.transport.movers.pipeline import RingShift, flat
from pdgemm.transport.movers.ring import pieces


def nccl(comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Recorder) -> None:
    """Enqueue a broadcast of x from root, which later products wait for; words are counted as by `ibcast`."""
    device = of(x)
    assert device is not None
    with recorder.phase("pack"):
        device.broadcast(comm, x, root)
    if comm.rank == root:
        recorder.traffic.sent(x.size, copies=comm.size - 1)
    else:
        recorder.traffic.received(x.size)


class NcclShift(RingShift):
    """Shifts blocks around a ring of ranks by NCCL."""

    def start(self, to: int, source: int, shapes: Sequence[tuple[int, int]]) -> None:
        if self._comm.size == 1:
            return
        recorder, device, at = self._recorder, of(self._buffers), 0
        assert device is not None
        recorder.order_copies_after_products()  # these products have read the last block in this buffer
        for panel in self._held if self._initial else ():
            self._pack(panel, at)
            at += panel.array.size
            panel.arriving = [*recorder.record_copies()]
        self._coming, self._initial = [panel for panel, _ in self._next_panels(shapes)], False
        blocks = self._held, self._coming
        sends, receives = ([x for panel in panels for x in pieces(flat(panel.array))] for panels in blocks)
        with recorder.phase("pack"):
            device.exchange(self._comm, [(x, to) for x in sends], [(x, source) for x in receives])
        for panel in self._coming:
            panel.arriving = [*recorder.record_copies()]
        for x in sends:
            recorder.traffic.sent(x.size)
        for x in receives:
            recorder.traffic.received(x.size)

    def panel(self, number: int) -> Array:
        """Return a panel of the block in use; the products that follow wait for its arrival."""
        panel = self._held[number]
        for arrival in panel.arriving:
            arrival.Wait()
        panel.arriving = []
        return panel.array


def nccl_reduce(comm: MPI.Comm, panel: Array, root: int, slot: Any, recorder: Recorder) -> None:
    """Enqueue the sum of the contiguous panels of all ranks into root's panel; it is complete when the slot is free."""
    device, x = of(panel), flat(panel)
    assert device is not None
    recorder.order_copies_after_products()
    with recorder.phase("pack"):
        device.reduce(comm, [(x, x, root)])
    slot.users += recorder.record_copies()
    if comm.rank != root:
        recorder.traffic.sent(x.size)
    for _ in range(comm.size - 1 if comm.rank == root else 0):
        recorder.traffic.received(x.size)


def nccl_reduce_scatter(comm: MPI.Comm, packed: Array, mine: Array, counts: list[int], recorder: Recorder) -> list[Any]:
    """Enqueue mine := the sum of all partial sums for this rank; `packed` has a part for each rank, in rank order.

    Returns the requests that products wait for before they read `mine`, or rewrite the buffers.
    """
    device, starts = of(packed), np.cumsum([0, *counts]).tolist()
    assert device is not None
    for arrival in recorder.record_copies():  # later products may rewrite the sums that were packed
        arrival.Wait()
    parts = ((packed[starts[rank] : starts[rank + 1]], rank) for rank, words in enumerate(counts) if words)
    with recorder.phase("pack"):
        device.reduce(comm, [(part, mine if rank == comm.rank else part, rank) for part, rank in parts])
    return [*recorder.record_copies()]
