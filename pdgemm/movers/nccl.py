"""NCCL's broadcast, in the stream of copies: the host neither waits for it nor moves it on."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pdgemm.arrays.device import of
from pdgemm.instrument.recorder import Recorder


def nccl(comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Recorder) -> None:
    """Broadcast x from root; products wait for what the stream did last.  Counted as `ibcast` is."""
    device = of(x)
    assert device is not None
    with recorder.phase("pack"):
        device.broadcast(comm, x, root)
    if comm.rank == root:
        recorder.traffic.sent(x.size, copies=comm.size - 1)
    else:
        recorder.traffic.received(x.size)
