"""Signals are messages without words, between ranks of a node that read each other's memory."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder


def signal(comm: MPI.Comm, to: int, recorder: Recorder, tag: int) -> MPI.Request:
    """Start sending a signal, which is counted as a message of no words."""
    recorder.traffic.sent(0)
    return comm.Isend(np.empty(0, np.uint8), dest=to, tag=tag)


def signal_from(comm: MPI.Comm, source: int, recorder: Recorder, tag: int) -> MPI.Request:
    """Return the request that completes with a signal from `source`."""
    recorder.traffic.received(0)
    return comm.Irecv(np.empty(0, np.uint8), source=source, tag=tag)
