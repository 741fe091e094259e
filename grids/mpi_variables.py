"""Variables of Open MPI that can be set while it runs, by MPI's tools interface, which mpi4py has not."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

_LEVELS = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)  # 0 to 3 in Open MPI


@contextmanager
def ucx_says_nothing() -> Iterator[None]:
    """Run the block without messages of UCX's.  Local.

    Where UCX finds no network that it can use, as in containers and on most machines of one's own, the Open MPI of PyPI
    prints an error on each rank that makes a window, even one of shared memory, in which UCX has no part.  Where the
    user has said how much UCX prints, it prints that.
    """
    name = b"opal_common_ucx_verbose"
    before = None if f"OMPI_MCA_{name.decode()}" in os.environ else _exchange(name, -1)
    try:
        yield
    finally:
        if before is not None:
            _exchange(name, before)


def _exchange(name: bytes, value: int) -> int | None:
    """Set a variable that is one integer, and return what it was; None where there is none that can be set."""
    if MPI.get_vendor()[0] != "Open MPI":
        return None
    try:
        library = ctypes.CDLL(MPI.__file__)
        level = _LEVELS.index(MPI.Query_thread())  # Open MPI takes a lower one for that of all of MPI
        if library.MPI_T_init_thread(level, ctypes.byref(ctypes.c_int())):
            return None
    except (OSError, AttributeError):
        return None
    at, count, handle = ctypes.c_int(-1), ctypes.c_int(0), ctypes.c_void_p()
    old, new = ctypes.c_int(0), ctypes.c_int(value)
    done = (
        not library.MPI_T_cvar_get_index(name, ctypes.byref(at))
        and not library.MPI_T_cvar_handle_alloc(at, None, ctypes.byref(handle), ctypes.byref(count))
        and count.value == 1
        and not library.MPI_T_cvar_read(handle, ctypes.byref(old))
        and not library.MPI_T_cvar_write(handle, ctypes.byref(new))
    )
    if handle:
        library.MPI_T_cvar_handle_free(ctypes.byref(handle))
    library.MPI_T_finalize()
    return old.value if done else None
