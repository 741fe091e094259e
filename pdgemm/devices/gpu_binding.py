"""Which GPU a rank uses: by its number among the ranks of its node, which launchers tell before MPI is there.

A library of MPI that knows of GPUs takes the one that is current when it starts; so `choose` may be called before
mpi4py.MPI is imported, and is called, at the latest, for the first matrix on a GPU.
"""

from __future__ import annotations

import ctypes
from functools import cache

from pdgemm.errors import DeviceError
from pdgemm.support import launcher


def choose() -> int | None:
    """Make the GPU of this rank the current one, and return its number; None where there is none.  Local.

    Where a task sees one GPU (CUDA_VISIBLE_DEVICES), it is that.  Else ranks take GPUs in order, and share them where
    there are more ranks.  A GPU that is current already, other than the first, stays.
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
    for step, said in (
        ("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), number)),
        ("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)),
        ("cuCtxSetCurrent", driver.cuCtxSetCurrent(context)),
    ):
        if said:
            raise DeviceError(
                f"GPU {number} of {count} cannot be used: {step} says {said} (busy, or in exclusive mode?)"
            )
    return number


def share(rank: int, size: int, count: int) -> int:
    """The GPU of a rank among `size` of a node with `count` GPUs; size 0: not known."""
    return rank % count if size <= count else min(count - 1, rank * count // size)


@cache
def visible() -> int:
    """Number of CUDA devices that the driver shows to this process."""
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
