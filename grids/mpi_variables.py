"""Control variables of Open MPI, set at run time by MPI's tools interface (MPI_T), which mpi4py does not offer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

_LEVELS = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)  # 0 to 3 in Open MPI


@contextmanager
def ucx_says_nothing() -> Iterator[None]:
    """Run the block with the messages of UCX switched off.  Local.

    Where UCX finds no usable network, as in containers and on most personal computers, the Open MPI of PyPI prints an
    error on each rank that creates a window, even a window of shared memory, for which UCX is not used.  Where the user
    has set how much UCX prints, the user's setting stays.
    """
    name = b"opal_common_ucx_verbose"
    before = None if f"OMPI_MCA_{name.decode()}" in os.environ else _exchange(name, -1)
    try:
        yield
    finally:
        if before is not None:
            _exchange(name, before)


def _exchange(name: bytes, value: int) -> int | None:
    """Set a control variable of one integer, and return its old value; None where the variable cannot be set."""
    if MPI.get_vendor()[0] != "Open MPI":
        return None
    try:
        library = ctypes.CDLL(MPI.__file__)
        level = _LEVELS.index(MPI.Query_thread())  # Open MPI would take a lower level for all of MPI
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
