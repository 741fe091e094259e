"""The mover `staged` sends panels through pinned host memory, for MPI libraries that are not GPU-aware.

Copies run in separate streams and overlap with products; a panel is forwarded from the host memory that received it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI

from pdgemm.instrument.recorder import Then
from pdgemm.local.arrays.device import Pinned, of
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.mover_registry import RING
from pdgemm.transport.movers.ring import receive, sender


class Staged:
    """Broadcasts one panel around a ring of ranks, each of which has a pinned host buffer for it.

    staging : a buffer of the size of the panel, free when the slot is free.   recorder : the recorder of a device.
    """

    def __init__(self, staging: Pinned) -> None:
        self._staging = staging

    def __call__(self, comm: MPI.Comm, x: Any, root: int, slot: Any, recorder: Any) -> None:
        staging, host = self._staging, wire(self._staging.host)
        chain = [*range(root, comm.size), *range(root)]
        forward = sender(comm, host, chain, slot, recorder)

        def take() -> None:
            forward()
            from_staging(x, staging, recorder)

        if comm.rank == root:
            to_staging(staging, x, recorder)
            slot.arrivals.append(Then(recorder.copied(), forward))
        else:
            request = comm.Irecv(host, source=(comm.rank - 1) % comm.size, tag=slot.tag)
            slot.arrivals.append(Then(recorder.coming(RING.name, x, request), take))


def to_staging(staging: Pinned, x: Any, recorder: Any) -> None:
    """Start copying a contiguous x to the pinned host buffer `staging`."""
    device = of(x)
    assert device is not None
    with recorder.phase("pack"):
        device.copy(staging.device, x)


def from_staging(x: Any, staging: Pinned, recorder: Any) -> None:
    """Start copying the pinned host buffer `staging` to a contiguous x, for which later products wait."""
    device = of(x)
    assert device is not None
    with recorder.phase("upload"):
        device.copy(x, staging.device)
    recorder.hold_products()


def staged_receive(comm: MPI.Comm, staging: Pinned, panel: Any, source: int, recorder: Any, tag: int = 0) -> list[Any]:
    """Start receiving a panel as `shift.receive` does, into a host buffer, and copy it from there to `panel`."""
    requests = receive(comm, staging.host, source, recorder, tag)
    if requests:
        requests[-1] = Then(requests[-1], partial(from_staging, panel, staging, recorder))
    return requests
