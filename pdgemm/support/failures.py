"""Ranks that fail: a thread of every rank sees it, and wakes the rank from whatever it waits for.

MPI's fault tolerance (ULFM: Bland, Bouteiller, Herault, Bosilca & Dongarra, 2013) reports a failed rank to those that
wait for it, and to nobody else: a rank that waits for one that has gone to recover waits for ever.  So every rank looks
for failures itself, in a thread, and where there is one it revokes all communicators of the package on this rank.
After that each of their operations, those in progress too, raises MPI.Exception: no loop has to look.

While nothing is guarded, all functions do nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeVar

from pdgemm.errors import PdgemmError
from pdgemm.support.launcher import survives_ranks
from pdgemm.support.waits import watched_calls
from pdgemm.support.watchdog import CODE

if TYPE_CHECKING:
    from mpi4py import MPI

    AnyComm = TypeVar("AnyComm", bound=MPI.Comm)

_LOOK = 0.02  # seconds between two looks, so that a failure costs no more than that
_CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
# Of the time in which ranks are to recover: then one ends that has not come to the others; the first of them later, so
# that, where all hang, it is the last one and ends with the exit code.
_SHARES = (2 / 3, 5 / 6)

_using = threading.Lock()  # held where communicators are revoked, so that none is freed meanwhile
_known = list["MPI.Comm"]()  # the first one is that of all ranks
_patience = [60.0]
_seen: list[float] = []  # the time at which this rank heard of a failure from which it has not recovered
_agreeing: list[bool] = []
_process: list[int] = []
_thread: list[threading.Thread] = []


def why_not() -> str:
    """Why a rank that fails takes this job along; "" where the other ranks can go on."""
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    if vendor != "Open MPI":
        return f"{vendor} cannot go on after a rank fails; Open MPI can, from version 5.0 on: mpirun --with-ft ulfm"
    if not survives_ranks():
        return "the job was not started by mpirun --with-ft ulfm"
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return "MPI was initialised without MPI_THREAD_MULTIPLE"
    return ""


def guard(comm: MPI.Intracomm, patience: float) -> None:
    """From now on the communicators are `comm` and those that are made of it; earlier ones are forgotten.  Local.

    patience : seconds after which a rank that has heard of a failure ends, with exit code 3, unless this function is
        called again.  A rank that is not `agreeing` hangs, or computes for long: it ends after two thirds of that time,
        so that the others can go on without it.  0: ranks end at once, and nothing is revoked.
    """
    from mpi4py import MPI

    with _using:
        _known[:], _patience[:], _seen[:] = [comm], [patience], []
    if not _thread:
        _process.append(os.getpid())
        _thread.append(threading.Thread(target=_watch, daemon=True, name="pdgemm failures"))
        _thread[0].start()
        atexit.register(_rest)
        # where a program calls MPI_Finalize itself, which begins with the attributes of this communicator
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: _rest()), True)


def guarded() -> bool:
    """Does this rank go on when another fails?"""
    return bool(_known) and _patience[0] > 0


@contextmanager
def agreeing() -> Iterator[None]:
    """In this block a rank waits for the others, to agree with them: another one may hang, but not this one.  Local."""
    _agreeing.append(True)
    try:
        yield
    finally:
        _agreeing.clear()


def stop_looking() -> None:
    """Look for failures no more.  Local."""
    with _using:
        _known.clear()
        _seen.clear()


def end_with_others(error: BaseException | None = None) -> None:
    """From now on this rank ends when another one fails; at once, if one has.  Local.

    error : an exception that may be of a failure of which the thread has not heard yet.
    """
    with _using:
        _patience[:] = [0.0]
        if is_of_failure(error):
            _notice()
    if _seen:
        sleep(50 * _LOOK)  # until the thread ends the process


def _rest() -> None:
    """Look once more, and then no more, because MPI_Finalize begins; but not in a forked process."""
    if os.getpid() != _process[0]:
        return
    with _using:
        _look()
        _known.clear()
    _finalize_without_fence()


def tracked(comm: AnyComm) -> AnyComm:
    """Return a communicator that was just made: its calls are waits, and it is revoked with the others.  Local."""
    comm = watched_calls(comm)
    with _using:
        if _known and comm:
            _known.append(comm)
            if _seen:
                _revoke(comm)
    return comm


def free_communicator(comm: MPI.Comm) -> None:
    """Free a communicator.  Collective over it."""
    with _using:
        _known[:] = [x for x in _known if x is not comm]
    comm.Free()


def revoke() -> None:
    """End all operations of all ranks on the known communicators, and those that begin later, by an exception.

    The other ranks do the same when they hear of it.
    """
    with _using:
        _notice()


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """The ranks of a communicator of which this rank knows that they have failed.  Local."""
    from mpi4py import MPI

    gone = comm.Get_failed()
    return list(MPI.Group.Translate_ranks(gone, [*range(gone.size)], comm.Get_group()))


def is_of_failure(error: BaseException | None) -> bool:
    """Was an exception raised because a rank failed, or because another rank heard of it?"""
    from mpi4py import MPI

    classes = {getattr(MPI, name, MPI.ERR_UNKNOWN) for name in _CLASSES}
    while error is not None and not isinstance(error, PdgemmError):
        if isinstance(error, MPI.Exception) and error.Get_error_class() in classes:
            return True
        error = error.__cause__ or error.__context__
    return False


def _watch() -> None:
    while True:
        sleep(_LOOK if guarded() else 10 * _LOOK)
        with _using:
            _look()


def _look() -> None:
    """See whether a rank has failed, and end this one where it has not recovered in time."""
    from mpi4py import MPI

    if not _known:
        return
    comm, gone = _known[0], list[int]()
    with suppress(MPI.Exception):
        MPI.COMM_SELF.Iprobe()  # MPI hears of failures while it is called
        gone = failed_ranks(comm)
        if gone or comm.Is_revoked():
            _notice()
    if not _seen:
        return
    first = comm.rank == min({*range(comm.size)} - {*gone})
    limit = _patience[0] * (1 if _agreeing else _SHARES[first])
    if monotonic() - _seen[0] < limit:
        return
    late = f", and has not recovered from it within {limit:g} s" if limit else ""
    text = f"pdgemm: rank {MPI.COMM_WORLD.rank} ends, because another rank has failed{late}\n"
    with suppress(OSError, ValueError):  # the launcher may have ended
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
    if limit and not _agreeing and len(gone) < comm.size - 1:  # the others may go on without it
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(CODE)


def _notice() -> None:
    if _known and not _seen:
        _seen.append(monotonic())
        for comm in _known if _patience[0] else ():
            _revoke(comm)


def _revoke(comm: MPI.Comm) -> None:
    from mpi4py import MPI

    with suppress(MPI.Exception):
        if comm and not comm.Is_revoked():
            comm.Revoke()


def _finalize_without_fence() -> None:
    """Let MPI_Finalize not wait for ranks that have failed.  Local.

    Under fault tolerance Open MPI's has a barrier of the ranks that are left, and then one of all ranks in PMIx, which
    never ends, once in a few times (ompi issue #11404).  The variable is that of its parameter `async_mpi_finalize`,
    which leaves out the second one.  It is read when MPI starts, and again whenever its tools interface is initialised.
    """
    from mpi4py import MPI

    with suppress(OSError, ValueError):
        ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize").value = True
