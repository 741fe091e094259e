"""The watchdog names a rank for which the other ranks wait in vain, and ends a job that can never go on.

Every collective function begins with a check (`agreement.together`).  Ranks that call it with different arguments, or
call different functions, all raise an exception there.  What remains is a rank that never reaches the check: it raised
an exception alone, left the program, skipped the check, or is still computing.  After PDGEMM_WATCHDOG seconds (60) a
thread of a waiting rank asks the same thread of the other ranks where they are, and prints one line.

It ends the job (MPI_Abort, exit code 3) where the check can never complete: a rank has left the program, or called the
function with check=False, or no rank of the job is computing.  A rank that is computing may take as long as it likes;
only where PDGEMM_WATCHDOG is set the job ends in any case.  PDGEMM_WATCHDOG=0 switches the watchdog off.

Before a rank has waited that long nothing is sent, except one message of each rank that leaves the program, to the next
rank, which can report it then.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

from pdgemm.errors import ArgumentError, GridError
from pdgemm.support import agreement
from pdgemm.support.agreement import CheckCounter, Wait
from pdgemm.support.json_input import Seconds, variable
from pdgemm.support.launcher import survives_ranks
from pdgemm.support.source_lines import of_package, of_user
from pdgemm.support.text import ranks_text

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE = 60.0  # seconds
CODE = 3  # exit code of a job that is ended
_QUESTION, _ANSWER, _GOODBYE = 32001, 32002, 32003  # tags
_STAGGER = 0.1  # seconds by which a rank asks later than the rank before it: a rank that was asked prints nothing
_ANSWER_SECONDS = 5.0  # within which the other ranks answer


@dataclass(frozen=True)
class _State:
    """The answer of a rank: the last check that it reached and skipped, and what its main thread does."""

    reached: int
    unchecked: int
    waiting: bool  # for long, and no other thread of its process computes
    place: str
    ended: tuple[int, ...]  # ranks of MPI.COMM_WORLD that told this rank that they left


_using_mpi = threading.Lock()
_thread: threading.Thread | None = None
_closed = False
_process = 0
_sent: list[Any] = []  # requests
_ended = set[int]()  # ranks of MPI.COMM_WORLD
_asked: dict[int, int] = {}  # by the handle of a communicator, the last check after which a lower rank asked


def seconds() -> tuple[float, bool]:
    """Return for how long a rank waits in silence, and whether the job ends then in any case.  Raises ArgumentError."""
    asked = variable("PDGEMM_WATCHDOG", Seconds, "a number of seconds, 0: never")
    return (PATIENCE, False) if asked is None else (asked, True)


def watched(comm: MPI.Comm) -> MPI.Intracomm:
    """Return the caller's communicator, and start the watchdog, which then reports long waits on it.  Local.

    Raises GridError where it is no intracommunicator: on this rank alone, because there are no ranks to agree with.
    """
    global _thread, _process
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise GridError(f"comm must be an intracommunicator of this rank, such as MPI.COMM_WORLD, got {comm!r}")
    with suppress(ArgumentError):  # which the first grid raises, on all ranks
        if _thread is None and not _closed and seconds()[0]:
            _process = os.getpid()
            _thread = threading.Thread(target=_watch, daemon=True, name="pdgemm watchdog")
            _thread.start()
            atexit.register(farewell)
            # where a program calls MPI_Finalize itself, which begins with the attributes of this communicator
            MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: farewell()), True)
    return comm


def register(comm: MPI.Intracomm) -> None:
    """Let ranks that wait on this communicator of pdgemm's own ask the others over it.  Called on all its ranks."""
    if comm.size > 1 and _thread is not None:
        agreement.counters[comm.handle] = CheckCounter(comm)


def unregister(comm: MPI.Intracomm) -> None:
    """Send no more messages on this communicator, which is about to be freed."""
    with _using_mpi:
        agreement.counters.pop(comm.handle, None)
        _asked.pop(comm.handle, None)


def _watch() -> None:
    """Run in a thread of its own: answer the other ranks, and look when this rank has waited for long."""
    from mpi4py import MPI

    limit, bounded = seconds()
    looks, last = 0, None
    while True:
        sleep(min(1.0, max(0.01, limit / 10)))
        with _using_mpi:
            if _closed:
                return
            _answer()
            waiting = agreement.waiting
            if waiting is not last:
                looks, last = 0, waiting
            if waiting and monotonic() - waiting.since > limit * 2**looks + _STAGGER * waiting.comm.rank:
                looks += 1
                with suppress(MPI.Exception):  # a rank failed meanwhile: see `failures`
                    _look(waiting, bounded, looks)


def _look(waiting: Wait, bounded: bool, looks: int) -> None:
    """Print which ranks are missing, and end the job if it is to end; a rank that was asked leaves both to others."""
    since, comm, counter = waiting
    if counter is None or not _threads_may_call_mpi():  # on the caller's own communicator nothing may be sent
        # no rank knows which others wait: the first two ranks print, because one of them may be the missing one
        text, never, quiet = "some rank did not join", False, comm.rank > 1
    elif _asked.get(comm.handle) == counter.reached:
        text, never, quiet = "some rank did not join", False, True
    else:
        text, never = _missing_ranks(counter)
        quiet = False
    over = never or bounded
    if waiting is not agreement.waiting or (quiet and not (bounded and looks > 1)):
        return
    end = "the job is ended" if over else "PDGEMM_WATCHDOG=SECONDS would end the job"
    where = f"rank {comm.rank} of {comm.size} has waited {monotonic() - since:.0f} s in {_place()}"
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"pdgemm: {where}: {text}; {end}\n".encode())
    if over:
        end_job(CODE)


def end_job(code: int) -> None:
    """End all ranks with this exit code, after half a second in which launchers pass on what was printed."""
    from mpi4py import MPI

    sleep(0.5)
    if survives_ranks() and MPI.COMM_WORLD.Get_failed().size:
        os._exit(code)  # MPI_Abort may hang then, or end the job with 0; the other ranks hear of this one
    MPI.COMM_WORLD.Abort(code)


def _missing_ranks(counter: CheckCounter) -> tuple[str, bool]:
    """Ask the other ranks, and return which are missing and where they are, and whether they can never come."""
    from mpi4py import MPI

    comm, number = counter.comm, counter.reached
    states = _ask(counter)
    ended = _ended.union(*(state.ended for state in states.values()))
    world = MPI.Group.Translate_ranks(comm.group, [*range(comm.size)], MPI.COMM_WORLD.group)
    left = [rank for rank in range(comm.size) if world[rank] in ended]
    silent = [rank for rank in range(comm.size) if rank not in (comm.rank, *states, *left)]
    passed = [rank for rank, state in states.items() if state.unchecked >= number]
    missing = {rank: state for rank, state in states.items() if state.reached < number}
    parts = [f"{ranks_text(left)} left the program"] if left else []
    parts += [f"rank {rank} did not join, it is in {state.place}" for rank, state in missing.items()]
    if silent:
        parts.append(f"{ranks_text(silent)} gave no answer")
    if passed:
        parts.append(f"{ranks_text(passed)} went on with check=False")
    text = "; ".join(parts[:4]) or "all ranks have come"
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    all_answered = comm.size == MPI.COMM_WORLD.size and not silent and _waits_for_long()
    stuck = all_answered and bool(missing) and all(state.waiting for state in missing.values())
    return text + more, bool(left or passed or stuck)


def _waits_for_long() -> bool:
    """Has the only thread of this process waited for long, and only for ranks that were started with this job?"""
    from mpi4py import MPI

    waiting = agreement.waiting
    others = (x for x in threading.enumerate() if x is not threading.main_thread())
    if waiting is None or monotonic() - waiting.since < seconds()[0] or not all(x.daemon for x in others):
        return False
    ranks = MPI.Group.Translate_ranks(waiting.comm.group, [*range(waiting.comm.size)], MPI.COMM_WORLD.group)
    return MPI.UNDEFINED not in ranks


def _ask(counter: CheckCounter) -> dict[int, _State]:
    """Return the states of those other ranks that answer in time."""
    from mpi4py import MPI

    comm, states, question = counter.comm, dict[int, _State](), counter.reached
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    _sent.extend(comm.isend(question, rank, _QUESTION) for rank in others)
    end, status = monotonic() + _ANSWER_SECONDS, MPI.Status()
    while len(states) < len(others) and monotonic() < end:
        _answer()
        while comm.Iprobe(tag=_ANSWER, status=status):
            asked, state = comm.recv(source=status.source, tag=_ANSWER)
            if asked == question:
                states[status.source] = _State(**state)
        sleep(0.01)
    return dict(sorted(states.items()))


def _answer() -> None:
    """Receive which ranks have left, and tell the ranks that ask where this rank is."""
    from mpi4py import MPI

    if not _threads_may_call_mpi():
        return
    status, _sent[:] = MPI.Status(), [request for request in _sent if not _complete(request)]
    for handle, counter in [*agreement.counters.items()]:
        comm = counter.comm
        try:
            while comm.Iprobe(tag=_GOODBYE, status=status):
                _ended.add(comm.recv(source=status.source, tag=_GOODBYE))
            while comm.Iprobe(tag=_QUESTION, status=status):
                question = comm.recv(source=status.source, tag=_QUESTION)
                if question == counter.reached and status.source < comm.rank:
                    _asked[handle] = question
                state = _State(counter.reached, counter.unchecked, _waits_for_long(), _place(), tuple(_ended))
                _sent.append(comm.isend((question, asdict(state)), status.source, _ANSWER))
        except MPI.Exception:  # a rank failed, and the communicator is of no more use: see `failures`
            agreement.counters.pop(handle, None)


def _complete(request: MPI.Request) -> bool:
    """Has a message left, or can it leave no more?"""
    from mpi4py import MPI

    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def _threads_may_call_mpi() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _place() -> str:
    """Return where the main thread is: the line of the user's program, and the function of pdgemm that it called."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    inside, outside = "", ""
    while frame:
        code, line = frame.f_code, frame.f_lineno
        if of_package(code.co_filename):
            inside = inside if outside else f" ({code.co_qualname})"
        elif of_user(code.co_filename):
            return f"{code.co_filename}:{line}{inside}"
        else:  # NumPy's operators, which call pdgemm; or a program that is installed
            outside = outside or f"{code.co_filename}:{line}{inside}"
        frame = frame.f_back
    return outside or "an unknown place"


def farewell() -> None:
    """Tell the next rank of each communicator that this rank leaves the program; that rank tells those that ask."""
    global _closed
    from mpi4py import MPI

    if _closed or os.getpid() != _process or MPI.Is_finalized():
        return
    with _using_mpi:
        _closed = True
    if _threads_may_call_mpi():
        me = MPI.COMM_WORLD.rank
        for comm in (counter.comm for counter in agreement.counters.values()):
            with suppress(MPI.Exception):  # where that rank has failed
                _sent.append(comm.isend(me, (comm.rank + 1) % comm.size, _GOODBYE))
