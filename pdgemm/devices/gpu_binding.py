"""Which GPU a rank uses: it follows from the node-local rank, which launchers export before MPI is initialised.

A GPU-aware MPI library uses the GPU that is current when MPI is initialised; so `choose` may be called before
mpi4py.MPI is imported, and is called, at the latest, for the first matrix on a GPU.
"""

from __future__ import annotations

import ctypes
from functools import cache

from pdgemm.errors import DeviceError
from pdgemm.support import launcher


def choose() -> int | None:
    """Make the GPU of this rank the current one, and return its number, or None if there is none.  Local.

    A rank that sees one GPU (CUDA_VISIBLE_DEVICES) uses that one.  Otherwise the ranks of a node use its GPUs in order,
    and share them if there are more ranks than GPUs.  A GPU other than the first that is current already is kept.
    """
    count, driver = visible(), _driver()
    if not count or driver is None:
        return None
    context, device = ctypes.c_void_p(), ctypes.c_int()
    current = driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value
    if current and driver.cuCtxGetDevice(ctypes.byref(device)) == 0 and device.value:
        return device.value
    rank, size = launcher.local_rank() or (0, 0)
    number = share(rank, size, count)
    for call, error in (
        ("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), number)),
        ("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)),
        ("cuCtxSetCurrent", driver.cuCtxSetCurrent(context)),
    ):
        if error:
            raise DeviceError(
                f"GPU {number} of {count} cannot be used: {call} returned error {error} (busy, or in exclusive mode?)"
            )
    return number


def share(rank: int, size: int, count: int) -> int:
    """Return the GPU of one of `size` ranks on a node with `count` GPUs; size is 0 where it is unknown."""
    return rank % count if size <= count else min(count - 1, rank * count // size)


@cache
def visible() -> int:
    """Return the number of CUDA devices that the driver shows to this process."""
    driver = _driver()
    if driver is None:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
