"""NCCL: one NCCL communicator for each MPI communicator that is used with NCCL, and a test whether NCCL works.

An operation of NCCL that other ranks do not take part in never ends on the device.  So the host polls while it waits
for a device (`check`): if NCCL, another rank or MPI reports an error, all NCCL communicators of this rank are aborted,
which ends their operations, and the other ranks are informed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.devices.gpu_aware_mpi import yes_or_no
from pdgemm.errors import DeviceError
from pdgemm.local.arrays.device import Array, Device
from pdgemm.support.agreement import together
from pdgemm.support.failures import free_communicator, tracked
from pdgemm.support.text import ranks_text
from pdgemm.support.waits import Wait, poll_until

with warnings.catch_warnings():  # CuPy warns if NCCL is not installed; `available` says so, too
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl as libnccl

_BYTES, _SUM = 1, 0  # ncclUint8, ncclSum
# by dtype.char: the ncclDataType, and the number of its words in an element
_TYPES = {"i": (2, 1), "q": (4, 1), "l": (4, 1), "f": (7, 1), "d": (8, 1), "F": (7, 2), "D": (8, 2)}
_PATIENCE = 60.0  # seconds after which an attempt to use NCCL is abandoned


def wanted(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks have NCCL, and PDGEMM_NCCL is not "no".  Collective over comm."""
    said = yes_or_no("PDGEMM_NCCL", comm)
    return comm.allreduce(said is not False and bool(libnccl.available), MPI.LAND)


class _NotInTimeError(DeviceError):
    """NCCL has not started in time."""


def nccl_arrives(comm: MPI.Intracomm, device: Device) -> bool:
    """Return whether an NCCL broadcast from rank 0 arrives on all ranks in time.  Collective over comm.

    With a wrong interface, or behind a firewall, NCCL waits without end.
    """
    try:
        x = _in_time(comm, device, lambda: device.to_device(np.full(1000, comm.rank + 7, np.int64), "C"))
        attached = _attached(comm, device)

        def arrives() -> None:
            nccl_broadcast(device, comm, x, 0)
            if not (device.to_host(x) == 7).all():
                raise DeviceError("a broadcast delivers wrong elements")

        try:
            _in_time(comm, device, arrives)
        except DeviceError:
            attached.abort("its trial failed")  # ends the broadcast; to destroy the communicator would wait for it
            comm.Delete_attr(_KEY)
            raise
    except DeviceError as bad:
        if isinstance(bad, _NotInTimeError) and comm.rank == 0:
            text = f"{bad} and is not used: is NCCL_SOCKET_IFNAME a fast network? PDGEMM_NCCL=no skips the attempt"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    return True


def _in_time(comm: MPI.Comm, device: Device, attempt: Callable[[], Any]) -> Any:
    """Call `attempt` on each rank, and return its result on this rank.  Collective over comm.

    NCCL is called in a thread, which is left behind if it does not return.  Raises DeviceError on all ranks if the
    attempt fails on one rank, or does not end in time, and MPI.Exception if a rank fails meanwhile.
    """
    thread, end = _Attempt(device, attempt), monotonic() + _PATIENCE
    with Wait(comm):
        poll_until(lambda: not thread.is_alive() or monotonic() > end, comm.Iprobe)
    if comm.allreduce(thread.is_alive(), MPI.LOR):
        raise _NotInTimeError(f"NCCL did not start within {_PATIENCE:.0f} s")
    with together(comm):
        if thread.error:
            raise DeviceError(f"NCCL cannot be used: {thread.error}")
    return thread.result


class _Attempt(Thread):
    """A call in a thread: its result, or its exception."""

    def __init__(self, device: Device, attempt: Callable[[], Any]) -> None:
        super().__init__(name="NCCL", daemon=True)
        self._device, self._attempt = device, attempt
        self.result: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._device.use()
            self.result = self._attempt()
        except (RuntimeError, OSError, MemoryError, KeyError, DeviceError) as bad:  # NcclError, CUDARuntimeError
            self.error = bad


def nccl_broadcast(device: Device, comm: MPI.Comm, x: Array, root: int) -> None:
    """Enqueue a broadcast of x from root.  Collective over comm, in the same order on all ranks."""
    _attached(comm, device).nccl.bcast(x.data.ptr, x.nbytes, _BYTES, root, _pointer(device))


def nccl_exchange(
    device: Device, comm: MPI.Comm, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]]
) -> None:
    """Enqueue messages that are sent and received together.

    Two ranks list the messages from one to the other in the same order.
    """
    communicator, stream = _attached(comm, device).nccl, _pointer(device)
    with _group():
        for x, peer in sends:
            communicator.send(x.data.ptr, x.nbytes, _BYTES, peer, stream)
        for x, peer in receives:
            communicator.recv(x.data.ptr, x.nbytes, _BYTES, peer, stream)


def nccl_reductions(device: Device, comm: MPI.Comm, parts: Sequence[tuple[Array, Array, int]]) -> None:
    """Enqueue reductions, each of one part per rank to a total on a root.  Collective over comm, in the same order."""
    communicator, stream = _attached(comm, device).nccl, _pointer(device)
    with _group():
        for part, total, root in parts:
            number, words = _TYPES[part.dtype.char]
            communicator.reduce(part.data.ptr, total.data.ptr, part.size * words, number, _SUM, root, stream)


@contextmanager
def _group() -> Iterator[None]:
    """Start the operations of the block as one NCCL group; the group is also closed after an exception."""
    libnccl.groupStart()
    try:
        yield
    finally:
        libnccl.groupEnd()


def _pointer(device: Device) -> int:
    stream: Any = device.current_stream()
    return int(stream.ptr)


class _Communicator:
    """The NCCL communicator of the ranks of an MPI communicator, stored as an attribute of it.  Collective.

    failure : the reason why NCCL's communicator was aborted; "" as long as it can be used.

    Failures are sent over a duplicate of `comm`, because a receive on `comm` may match any tag.
    """

    def __init__(self, comm: MPI.Comm, nccl: Any) -> None:
        self.nccl, self.failure, self._size, self._rank = nccl, "", comm.size, comm.rank
        self._ranks = MPI.Group.Translate_ranks(comm.Get_group(), [*range(comm.size)], MPI.COMM_WORLD.Get_group())
        self._notices = tracked(comm.Dup())
        _alive.append(self)

    def check(self) -> None:
        """Raise DeviceError where NCCL has failed on any rank, and MPI.Exception where a rank has failed.  Local."""
        status = MPI.Status()
        if self._notices.Iprobe(status=status):
            raise DeviceError(self._notices.recv(source=status.source))
        try:
            self.nccl.check_async_error()
        except (RuntimeError, KeyError) as bad:  # NcclError, or an error that CuPy does not know
            ranks, me = ranks_text(self._ranks), self._ranks[self._rank]
            raise DeviceError(f"NCCL fails on rank {me}, in its communicator of {ranks}: {bad}") from None

    def abort(self, reason: str) -> None:
        """Send the reason to the other ranks, and end the operations of this rank on the device.  Local."""
        self.failure = reason
        _alive.remove(self)
        with suppress(MPI.Exception):  # a rank has failed
            _sent.extend(self._notices.isend(reason, dest=rank) for rank in range(self._size) if rank != self._rank)
        with suppress(Exception):  # the operations have failed anyway
            self.nccl.abort()

    def destroy(self) -> None:
        if not self.failure:  # else messages may still arrive
            _alive.remove(self)
            self.nccl.destroy()
            free_communicator(self._notices)


_alive: list[_Communicator] = []
_sent: list[MPI.Request] = []  # messages to ranks that may never receive them
_aborts: list[str] = []  # the reason of each abort


def may_be_waiting() -> bool:
    """Return whether operations of NCCL may be in the streams of this process."""
    return bool(_alive)


def aborts() -> int:
    """Abort the NCCL communicators if necessary, and return the number of aborts on this rank so far.  Local."""
    with suppress(DeviceError, MPI.Exception):  # this rank raises them where it waits
        check()
    return len(_aborts)


def check() -> None:
    """If NCCL has failed on any rank, abort all NCCL communicators of this rank, and raise DeviceError.  Local.

    If a rank has failed, do the same, but raise MPI.Exception.
    """
    try:
        for communicator in _alive:
            communicator.check()
    except (DeviceError, MPI.Exception) as bad:
        _abort_all(str(bad))
        raise


def leave_operations(reason: str) -> None:
    """Abort all NCCL communicators of this rank, because it leaves an operation of several ranks.  Local."""
    _abort_all(f"rank {MPI.COMM_WORLD.rank} has left an operation of NCCL: {reason}")


def _abort_all(reason: str) -> None:
    communicators = [*_alive]
    for communicator in communicators:
        communicator.abort(reason)
    if communicators:
        _aborts.append(reason)


def _attached(comm: MPI.Comm, device: Device) -> _Communicator:
    """Return the NCCL communicator of the ranks of comm, which the first call creates.  Collective over comm.

    Raises DeviceError on all ranks if it cannot be created, and on this rank if it was aborted.
    """
    attached: Any = comm.Get_attr(_KEY)
    if attached is None:
        unique = comm.bcast(_in_time(comm, device, libnccl.get_unique_id if comm.rank == 0 else lambda: None))
        nccl = _in_time(comm, device, partial(libnccl.NcclCommunicator, comm.size, unique, comm.rank))
        attached = _Communicator(comm, nccl)
        comm.Set_attr(_KEY, attached)
    if attached.failure:
        raise DeviceError(f"NCCL was aborted in this grid: {attached.failure}")
    return attached


def _destroy(comm: MPI.Comm, keyval: int, attached: _Communicator) -> None:
    attached.destroy()


_KEY = MPI.Comm.Create_keyval(delete_fn=_destroy)
