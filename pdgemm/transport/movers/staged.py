"""The mover `staged` sends panels through pinned host memory, for MPI libraries that are not GPU-aware.

Copies overlap with products in streams of their own; a panel is forwarded from the host memory in which it arrives.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pdgemm.instrument.recorder import Then
from pdgemm.local.arrays.device import Pinned, of
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.mover_registry import RING
from pdgemm.transport.movers.shift import receive


class Staged:
    """Broadcasts one panel around a ring of ranks, each of which has a pinned host buffer for it.

    staging : a buffer of the size of the panel, free when the slot is free.   recorder : the recorder of a device.
    """

    def __init__(self, staging: Pinned) -> None:
        self._staging = staging

    def __call__(self, comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Any) -> None:
        staging, tag, device = self._staging, slot.tag, of(x)
        assert device is not None
        me, last = comm.rank, (root - 1) % comm.size

        def forward() -> None:
            if me != last:
                recorder.traffic.sent(x.size)
                slot.users.append(comm.Isend(wire(staging.host), dest=(me + 1) % comm.size, tag=tag))

        def take() -> None:
            forward()
            with recorder.phase("upload"):
                device.copy(x, staging.device)
            recorder.hold_products()

        if me == root:
            to_staging(staging, x, recorder)
            slot.arrivals.append(Then(recorder.copied(), forward))
        else:
            request = recorder.coming(
                RING.name, x, comm.Irecv(wire(staging.host), source=(me - 1) % comm.size, tag=tag)
            )
            slot.arrivals.append(Then(request, take))


def to_staging(staging: Pinned, x: Any, recorder: Any) -> None:
    """Start copying a contiguous x to the pinned host buffer `staging`."""
    device = of(x)
    assert device is not None
    with recorder.phase("pack"):
        device.copy(staging.device, x)


def staged_receive(comm: MPI.Comm, staging: Pinned, panel: Any, source: int, recorder: Any, tag: int = 0) -> list[Any]:
    """Start receiving a panel as `shift.receive` does, into a host buffer, and copy it from there to `panel`."""
    device = of(panel)
    assert device is not None
    requests = receive(comm, staging.host, source, recorder, tag)

    def take() -> None:
        with recorder.phase("upload"):
            device.copy(panel, staging.device)
        recorder.hold_products()

    if requests:
        requests[-1] = Then(requests[-1], take)
    return requests
