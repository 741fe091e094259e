"""Ranks that fail: a thread of every rank detects failures, and interrupts all waits of its rank.

MPI's fault tolerance (ULFM: Bland, Bouteiller, Herault, Bosilca & Dongarra, 2013) reports a failed rank only to ranks
that wait for it.  If one of these ranks leaves to recover, a rank that waits for it waits for ever.  So a thread of
every rank polls for failures and, after a failure, revokes all communicators of the package on this rank.  After that
each operation on these communicators, also an operation in progress, raises MPI.Exception: loops need not poll.

Before `detector.guard` is called for the first time, no failure is detected and no communicator is revoked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeVar

from pdgemm.errors import PdgemmError
from pdgemm.support.files import write_line
from pdgemm.support.launcher import survives_ranks
from pdgemm.support.waits import watched_calls
from pdgemm.support.watchdog import CODE, before_finalize

if TYPE_CHECKING:
    from mpi4py import MPI

    AnyComm = TypeVar("AnyComm", bound=MPI.Comm)

_LOOK = 0.02  # seconds between two polls: a failure is detected within this time
_CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
# Shares of the patience after which a rank ends that has not joined the recovery.  The second share is for the first
# surviving rank: where all ranks hang, this rank ends last, with exit code 3.
_SHARES = (2 / 3, 5 / 6)


def why_not() -> str:
    """Return the reason why a rank that fails ends the whole job; "" where the other ranks can continue."""
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    if vendor != "Open MPI":
        return f"{vendor} cannot continue after a rank fails; Open MPI can, from version 5.0 on: mpirun --with-ft ulfm"
    if not survives_ranks():
        return "the job was not started by mpirun --with-ft ulfm"
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return "MPI was initialised without MPI_THREAD_MULTIPLE"
    return ""


def tracked(comm: AnyComm) -> AnyComm:
    """Register and return a new communicator: blocking calls count as waits; a failure revokes it.  Local."""
    comm = watched_calls(comm)
    detector.add(comm)
    return comm


def free_communicator(comm: MPI.Comm) -> None:
    """Free a communicator.  Collective over it."""
    detector.remove(comm)
    comm.Free()


@contextmanager
def node_leaders(comm: MPI.Comm, node: MPI.Comm) -> Iterator[MPI.Comm]:
    """Provide a communicator of the first ranks of all nodes; other ranks get a null one.  Collective over `comm`."""
    from mpi4py import MPI

    leaders = tracked(comm.Split(0 if node.rank == 0 else MPI.UNDEFINED, comm.rank))
    yield leaders
    if leaders:
        free_communicator(leaders)


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of a communicator that have failed, as far as this rank knows.  Local."""
    from mpi4py import MPI

    gone = comm.Get_failed()
    return list(MPI.Group.Translate_ranks(gone, [*range(gone.size)], comm.Get_group()))


def is_of_failure(error: BaseException | None) -> bool:
    """Return whether an exception was raised because a rank failed, or because a communicator was revoked."""
    from mpi4py import MPI

    classes = {getattr(MPI, name, MPI.ERR_UNKNOWN) for name in _CLASSES}
    while error is not None and not isinstance(error, PdgemmError):
        if isinstance(error, MPI.Exception) and error.Get_error_class() in classes:
            return True
        error = error.__cause__ or error.__context__
    return False


class FailureDetector:
    """The thread that polls for failed ranks, and the communicators that it then revokes."""

    def __init__(self) -> None:
        self._using = threading.Lock()  # held while communicators are revoked, so that none is freed meanwhile
        self._comms = list["MPI.Comm"]()  # communicators to revoke; the first one has all ranks
        self._patience = 60.0
        self._detected: float | None = None  # the time of a failure from which this rank has not recovered
        self._agreeing = False
        self._thread: threading.Thread | None = None

    def guard(self, comm: MPI.Intracomm, patience: float) -> None:
        """Guard `comm` and all communicators that are created from now on; forget earlier communicators.  Local.

        patience : seconds from the detection of a failure until this rank ends, with exit code 3, unless this function
            is called again.  A rank that is not `agreeing` hangs, or computes for long: it is killed after two thirds
            of this time, so that the others can continue without it.  0: ranks end at once, and nothing is revoked.
        """
        with self._using:
            self._comms, self._patience, self._detected = [comm], patience, None
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="pdgemm failures")
            self._thread.start()
            before_finalize(self._rest)

    def guards(self) -> bool:
        """Return whether this rank continues when another rank fails."""
        return bool(self._comms) and self._patience > 0

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Run a block in which this rank waits to agree with others, and does not count as a hanging rank.  Local."""
        self._agreeing = True
        try:
            yield
        finally:
            self._agreeing = False

    def stop(self) -> None:
        """Stop the detection of failures.  Local."""
        with self._using:
            self._comms, self._detected = [], None

    def end_with_others(self, error: BaseException | None = None) -> None:
        """Let this rank end when another rank fails, and end it at once if a rank has failed already.  Local.

        error : an exception that may be caused by a failure that the thread has not detected yet.
        """
        with self._using:
            self._patience = 0.0
            if is_of_failure(error):
                self._notice()
        if self._detected is not None:
            sleep(50 * _LOOK)  # until the thread ends the process

    def add(self, comm: MPI.Comm) -> None:
        """Register a new communicator, which is revoked when a failure is detected, or now if one was.  Local."""
        with self._using:
            if self._comms and comm:
                self._comms.append(comm)
                if self._detected is not None:
                    _revoke(comm)

    def remove(self, comm: MPI.Comm) -> None:
        """Forget a communicator that is about to be freed.  Local."""
        with self._using:
            self._comms = [x for x in self._comms if x is not comm]

    def revoke(self) -> None:
        """Revoke all communicators: operations in progress and later operations on them raise an exception.

        The other ranks revoke their communicators when they detect the revocation.
        """
        with self._using:
            self._notice()

    def _rest(self) -> None:
        """Poll for failures for the last time, because MPI_Finalize begins; do nothing in a forked process."""
        if self._thread is None or not self._thread.is_alive():
            return
        with self._using:
            self._look()
            self._comms = []
        _finalize_without_fence()

    def _watch(self) -> None:
        while True:
            sleep(_LOOK if self.guards() else 10 * _LOOK)
            with self._using:
                self._look()

    def _look(self) -> None:
        """Detect failed ranks, and end this rank where it has not recovered from a failure in time."""
        from mpi4py import MPI

        if not self._comms:
            return
        comm, gone = self._comms[0], list[int]()
        with suppress(MPI.Exception):
            MPI.COMM_SELF.Iprobe()  # MPI detects failures while it is called
            gone = failed_ranks(comm)
            if gone or comm.Is_revoked():
                self._notice()
        if self._detected is None:
            return
        first = comm.rank == min({*range(comm.size)} - {*gone})
        limit = self._patience * (1 if self._agreeing else _SHARES[first])
        if monotonic() - self._detected < limit:
            return
        late = f", and this rank has not recovered within {limit:g} s" if limit else ""
        write_line(f"pdgemm: rank {MPI.COMM_WORLD.rank} ends, because another rank has failed{late}")
        if limit and not self._agreeing and len(gone) < comm.size - 1:  # the others may continue without this rank
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(CODE)

    def _notice(self) -> None:
        if self._comms and self._detected is None:
            self._detected = monotonic()
            for comm in self._comms if self._patience else ():
                _revoke(comm)


def _revoke(comm: MPI.Comm) -> None:
    from mpi4py import MPI

    with suppress(MPI.Exception):
        if comm and not comm.Is_revoked():
            comm.Revoke()


def _finalize_without_fence() -> None:
    """Prevent MPI_Finalize from waiting for failed ranks.  Local.

    Under fault tolerance Open MPI's MPI_Finalize has a barrier of the surviving ranks, and then a barrier of all ranks
    in PMIx, which once in a few times never ends (ompi issue #11404).  This function sets the variable of Open MPI's
    parameter `async_mpi_finalize`, which leaves out the second barrier.  Open MPI reads the parameter when MPI
    starts, and again whenever MPI's tools interface is initialised.
    """
    from mpi4py import MPI

    with suppress(OSError, ValueError):
        ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize").value = True


detector = FailureDetector()  # the detector of this process; its thread starts when `guard` is called
