"""A shift sends a panel to one neighbour and receives the next panel from another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES


def send(comm: MPI.Comm, panel: Any, to: int, recorder: Recorder, tag: int = 0) -> list[Any]:
    """Start sending a panel; return the requests after which it may be rewritten.

    panel : flat and contiguous; an empty panel is not sent, a large panel in pieces of LARGEST_MESSAGE_BYTES.
    tag : if panels may be sent in any order, the panel's own tag among the panels in flight.
    """
    recorder.synchronize_copies()
    leaving = []
    for piece in pieces(wire(panel)):
        leaving.append(comm.Isend(piece, dest=to, tag=tag))
        recorder.traffic.sent(piece.size)
    return leaving


def receive(comm: MPI.Comm, panel: Any, source: int, recorder: Recorder, tag: int = 0) -> list[Any]:
    """Start receiving a panel that `send` sends; return the requests after which it may be read."""
    coming = pieces(wire(panel))
    return [recorder.coming("shift", piece, comm.Irecv(piece, source=source, tag=tag)) for piece in coming]


def pieces(x: Any) -> Iterator[Any]:
    """Return the pieces of an array that are sent as one message each; an empty array has no piece."""
    words = LARGEST_MESSAGE_BYTES // x.itemsize
    return (x[start : start + words] for start in range(0, x.size, words))
