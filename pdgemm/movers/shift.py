"""A shift sends a panel to one neighbour and receives the next from another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from pdgemm.arrays.dtypes import wire
from pdgemm.instrument.recorder import Recorder
from pdgemm.model.formulas import LARGEST_MESSAGE_BYTES


def shift(
    comm: MPI.Comm, held: Any, to: int, coming: Any, source: int, recorder: Recorder
) -> tuple[list[Any], list[Any]]:
    """Start sending the array `held` to rank `to` and receiving `coming` from `source`.

    held, coming : flat and contiguous; empty arrays are not sent, large ones in pieces of LARGEST_MESSAGE_BYTES.
    Returns the requests after which `coming` may be read, and those after which `held` may be rewritten.
    """
    arriving, leaving = [], []
    recorder.synchronize_copies()
    for piece in _pieces(wire(coming)):
        arriving.append(recorder.coming("shift", piece, comm.Irecv(piece, source=source)))
    for piece in _pieces(wire(held)):
        leaving.append(comm.Isend(piece, dest=to))
        recorder.traffic.sent(piece.size)
    return arriving, leaving


def _pieces(x: Any) -> Iterator[Any]:
    """Return the pieces of an array that are sent as one message each."""
    words = LARGEST_MESSAGE_BYTES // x.itemsize
    return (x[start : start + words] for start in range(0, x.size, words))
