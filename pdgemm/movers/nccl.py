"""The mover `nccl` broadcasts panels by NCCL in the copy stream, without waiting or progress on the host."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pdgemm.arrays.device import of
from pdgemm.instrument.recorder import Recorder


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
