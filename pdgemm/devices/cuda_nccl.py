"""NCCL: one NCCL communicator for each MPI communicator that is used with NCCL, and a test whether NCCL works."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.devices.gpu_aware_mpi import yes_or_no
from pdgemm.errors import DeviceError
from pdgemm.local.arrays.device import Array, Device
from pdgemm.support.agreement import together

with warnings.catch_warnings():  # CuPy warns if NCCL is not installed; `available` says so, too
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl as libnccl

_BYTES, _SUM = 1, 0  # ncclUint8, ncclSum
# by dtype.char: the ncclDataType, and the number of its words in an element
_TYPES = {"i": (2, 1), "q": (4, 1), "l": (4, 1), "f": (7, 1), "d": (8, 1), "F": (7, 2), "D": (8, 2)}
_PATIENCE = 60.0  # seconds after which an attempt to use NCCL is abandoned


def wanted(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks have NCCL, and PDGEMM_NCCL does not say no.  Collective over comm."""
    said = yes_or_no("PDGEMM_NCCL", comm)
    return comm.allreduce(said is not False and bool(libnccl.available), MPI.LAND)


def nccl_arrives(comm: MPI.Intracomm, device: Device) -> bool:
    """Return whether an NCCL broadcast from rank 0 arrives on all ranks in time.  Collective over comm.

    With a wrong interface, or behind a firewall, NCCL waits without end: so NCCL is tried in a thread, which is left
    behind if it does not return.
    """
    x = _in_time(comm, device, lambda: device.to_device(np.full(1000, comm.rank + 7, np.int64), "C"))
    if x is None:
        return False
    with together(comm):
        unique = _or_error(libnccl.get_unique_id) if comm.rank == 0 else None
    unique = comm.bcast(unique)
    communicator = _in_time(comm, device, lambda: libnccl.NcclCommunicator(comm.size, unique, comm.rank))
    if communicator is None:
        return False
    comm.Set_attr(_KEY, communicator)

    def arrives() -> bool | None:
        nccl_broadcast(comm, x, 0, device)
        return bool((device.to_host(x) == 7).all()) or None

    if _in_time(comm, device, arrives) is None:
        with suppress(Exception):  # of this rank alone
            communicator.abort()  # ends the broadcast; to destroy the communicator would wait for it
        comm.Delete_attr(_KEY)
        return False
    return True


def _in_time(comm: MPI.Intracomm, device: Device, attempt: Callable[[], Any]) -> Any:
    """Return the result of an attempt on this rank; None on all ranks if one rank has no result in time."""
    results = list[Any]()

    def run() -> None:
        with suppress(RuntimeError, OSError, MemoryError):  # NcclError, CUDARuntimeError: perhaps on this rank only
            device.use()
            results.append(attempt())

    thread = Thread(target=run, name="NCCL", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    late = comm.allreduce(thread.is_alive(), MPI.LOR)
    if late and comm.rank == 0:
        text = f"NCCL did not start within {_PATIENCE:.0f} s and is not used: is NCCL_SOCKET_IFNAME a fast network's? "
        warnings.warn(text + "PDGEMM_NCCL=no saves the attempt", RuntimeWarning, stacklevel=2)
    worked = comm.allreduce(not late and bool(results) and results[0] is not None, MPI.LAND)
    return results[0] if worked else None


def nccl_broadcast(comm: MPI.Comm, x: Array, root: int, device: Device) -> None:
    """Enqueue a broadcast of x from root.  Collective over comm, in the same order on all ranks."""
    nccl_communicator(comm).bcast(x.data.ptr, x.nbytes, _BYTES, root, _pointer(device))


def nccl_exchange(
    comm: MPI.Comm, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]], device: Device
) -> None:
    """Enqueue messages that are sent and received together; two ranks list their messages in the same order."""
    communicator, stream = nccl_communicator(comm), _pointer(device)
    with _group():
        for x, peer in sends:
            communicator.send(x.data.ptr, x.nbytes, _BYTES, peer, stream)
        for x, peer in receives:
            communicator.recv(x.data.ptr, x.nbytes, _BYTES, peer, stream)


def nccl_reductions(comm: MPI.Comm, parts: Sequence[tuple[Array, Array, int]], device: Device) -> None:
    """Enqueue reductions, each of one part per rank to a total on a root.  Collective over comm, in the same order."""
    communicator, stream = nccl_communicator(comm), _pointer(device)
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


def nccl_communicator(comm: MPI.Comm) -> Any:
    """Return the NCCL communicator of the same ranks, which the first call creates.  Collective over comm.

    Raises DeviceError on all ranks if it cannot be created.
    """
    communicator: Any = comm.Get_attr(_KEY)
    if communicator is None:
        with together(comm):
            unique = _or_error(libnccl.get_unique_id) if comm.rank == 0 else None
        unique = comm.bcast(unique)
        with together(comm):
            communicator = _or_error(libnccl.NcclCommunicator, comm.size, unique, comm.rank)
        comm.Set_attr(_KEY, communicator)
    return communicator


def _or_error(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except (RuntimeError, OSError) as bad:  # NcclError is a RuntimeError
        raise DeviceError(f"NCCL cannot be used: {bad}") from None


def _destroy(comm: MPI.Comm, keyval: int, communicator: Any) -> None:
    communicator.destroy()


_KEY = MPI.Comm.Create_keyval(delete_fn=_destroy)
