"""Through memory of the host: for an MPI library that does not take pointers to a device's.

Copies run beside the products, in a stream of their own; what has arrived on the host is passed on from there.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pdgemm.arrays.device import Pinned, of
from pdgemm.arrays.dtypes import wire
from pdgemm.instrument.recorder import Then
from pdgemm.movers.shift import pieces


class Staged:
    """The mover of one panel: a ring of ranks, each with room for it on the host.

    room : as many words as the panel has, free as long as the slot is.   recorder : a device's.
    """

    def __init__(self, room: Pinned) -> None:
        self._room = room

    def __call__(self, comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Any) -> None:
        room, tag, device = self._room, slot.tag, of(x)
        assert device is not None
        me, last = comm.rank, (root - 1) % comm.size

        def forward() -> None:
            if me != last:
                recorder.traffic.sent(x.size)
                slot.users.append(comm.Isend(wire(room.host), dest=(me + 1) % comm.size, tag=tag).Wait)

        def take() -> None:
            forward()
            with recorder.phase("pack"):
                device.copy(x, room.device)
            recorder.hold_products()

        if me == root:
            to_room(room, x, recorder)
            slot.arrivals.append(Then(recorder.copied(), forward))
        else:
            request = recorder.coming("ring", x, comm.Irecv(wire(room.host), source=(me - 1) % comm.size, tag=tag))
            slot.arrivals.append(Then(request, take))


def to_room(room: Pinned, x: Any, recorder: Any) -> None:
    """Begin to copy a contiguous x to the host."""
    device = of(x)
    assert device is not None
    with recorder.phase("pack"):
        device.copy(room.device, x)


def staged_shift(
    comm: MPI.Comm, held: Pinned, to: int, coming: Pinned, block: Any, source: int, recorder: Any
) -> tuple[list[Any], list[Any]]:
    """`shift.shift` of what lies on the host as well: from `held` there, to `coming` there and to `block`."""
    device, requests, leaving = of(block), list[Any](), list[Any]()
    assert device is not None
    recorder.settle()
    for piece in pieces(wire(coming.host)):
        requests.append(recorder.coming("shift", piece, comm.Irecv(piece, source=source)))
    for piece in pieces(wire(held.host)):
        leaving.append(comm.Isend(piece, dest=to))
        recorder.traffic.sent(piece.size)

    def take() -> None:
        with recorder.phase("pack"):
            device.copy(block, coming.device)
        recorder.hold_products()

    if requests:
        requests[-1] = Then(requests[-1], take)
    return requests, leaving
