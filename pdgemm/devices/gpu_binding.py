"""The choice of the GPU of a rank by its node-local rank, which launchers export before MPI is initialised.

A GPU-aware MPI library uses the GPU that is current when MPI is initialised; so `choose` may be called before
mpi4py.MPI is imported, and is called, at the latest, for the first matrix on a GPU.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from os import sched_getaffinity
from pathlib import Path
from typing import Any

from pdgemm.errors import DeviceError
from pdgemm.support import launcher

PCI = Path("/sys/bus/pci/devices")


def choose() -> int | None:
    """Make the GPU of this rank the current one, and return its number, or None if there is none.  Local.

    A rank that sees one GPU (CUDA_VISIBLE_DEVICES) uses this GPU.  Otherwise the ranks of a node use its GPUs in order,
    and share them if there are more ranks than GPUs.  If this GPU is not next to the rank's processors, but exactly one
    GPU is, the rank uses that GPU; if several are, it prints a warning and uses the first choice.  A GPU that is
    already current, except GPU 0, is used without a choice.
    """
    count, cuda = visible(), driver()
    if not count:
        return None
    context, device = ctypes.c_void_p(), ctypes.c_int()
    current = cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value
    if current and cuda.cuCtxGetDevice(ctypes.byref(device)) == 0 and device.value:
        return device.value
    rank, size = launcher.local_rank() or (0, 0)
    number = nearest(share(rank, size, count), [_processors(number) for number in range(count)], sched_getaffinity(0))
    for call, error in (
        ("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), number)),
        ("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)),
        ("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context)),
    ):
        if error:
            raise DeviceError(
                f"GPU {number} of {count} cannot be used: {call} returned error {error} (busy, or in exclusive mode?)"
            )
    return number


def share(rank: int, size: int, count: int) -> int:
    """Return the GPU of one of `size` ranks on a node with `count` GPUs; size is 0 where it is unknown."""
    return rank % count if size <= count else min(count - 1, rank * count // size)


def nearest(number: int, processors: list[set[int]], mine: set[int]) -> int:
    """Return the number of the GPU that this rank uses.

    This is `number`, unless that GPU is not next to the rank's processors and exactly one other GPU is.
    processors : for each GPU, the processors next to it.   mine : the rank's processors.
    Messages and staged copies through the link between sockets are half as fast.
    """
    near = [gpu for gpu, there in enumerate(processors) if there & mine]
    if number in near or not near or not processors[number]:
        return number
    if len(near) == 1:
        return near[0]
    warnings.warn(
        f"GPU {number} is not next to this rank's processors, {near} are: bind each rank to the processors next to its "
        "GPU (srun --gpu-bind=closest), or set CUDA_VISIBLE_DEVICES",
        RuntimeWarning,
        stacklevel=3,
    )
    return number


def _processors(number: int) -> set[int]:
    """Return the processors next to a GPU; an empty set where the system does not report them."""
    name = ctypes.create_string_buffer(32)
    if driver().cuDeviceGetPCIBusId(name, len(name), number):
        return set()
    try:
        listed = (PCI / name.value.decode().lower() / "local_cpulist").read_text()
    except OSError:
        return set()
    ends = [[int(x) for x in part.split("-")] for part in listed.split(",") if part.strip()]
    return {cpu for end in ends for cpu in range(end[0], end[-1] + 1)}


@cache
def visible() -> int:
    """Return the number of CUDA devices that the driver shows to this process."""
    cuda, count = driver(), ctypes.c_int(0)
    return count.value if cuda and cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


@cache
def driver() -> Any:
    """Return the library of the CUDA driver; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
