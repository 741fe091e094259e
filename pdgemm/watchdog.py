"""A rank that waits at a meeting for one that does not come says so, and ends what can never go on.

Every collective function begins with a meeting (`errors.check_together`).  Ranks that call it with different
arguments, or call different functions, meet there and all raise.  What is left is a rank that does not come: it raised
an exception alone, left the program, skipped the check, or is at work on something else.  After PDGEMM_WATCHDOG seconds
(60) a thread of a waiting rank asks those of the others where they are, and prints one line.

It ends the job (MPI_Abort, exit code 3) where the meeting can never take place: a rank has left the program, or called
the function with check=False, or no rank of the job is at work.  A rank that is at work may take as long as it likes;
only where PDGEMM_WATCHDOG is set the job ends in any case.  PDGEMM_WATCHDOG=0: nobody watches.

Nothing is sent before somebody has waited that long.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

from pdgemm import errors
from pdgemm.errors import Meetings, ranks_text
from pdgemm.reading import Seconds, variable

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE = 60.0  # seconds
CODE = 3  # exit code of a job that is ended
_QUESTION, _ANSWER = 32001, 32002  # tags
_TURN = 0.1  # seconds that a rank leaves to the rank before it to ask; who was asked keeps quiet
_ANSWERS = 5.0  # seconds to answer in
_HERE = f"{Path(__file__).parent}{os.sep}"


@dataclass(frozen=True)
class _State:
    """What a rank answers."""

    joined: int
    unchecked: int
    waiting: bool  # for long, in a meeting
    ended: bool
    place: str


_using_mpi = threading.Lock()
_thread: threading.Thread | None = None
_closed = False
_process = 0
_sent: list[Any] = []


def seconds() -> tuple[float, bool]:
    """How long to wait in silence, and whether the job ends then in any case.  Raises ArgumentError."""
    asked = variable("PDGEMM_WATCHDOG", Seconds, "a number of seconds, 0: never")
    return (PATIENCE, False) if asked is None else (asked, True)


def watch(comm: MPI.Intracomm) -> None:
    """From now on ranks that wait on this communicator, the library's own, ask for the others.  On all of them."""
    global _thread, _process
    if comm.size == 1 or not seconds()[0]:
        return
    errors.meetings[comm.handle] = Meetings(comm)
    if _thread is None and not _closed:
        from mpi4py import MPI

        _process = os.getpid()
        _thread = threading.Thread(target=_watch, daemon=True, name="pdgemm watchdog")
        _thread.start()
        atexit.register(_farewell)
        # where a program calls MPI_Finalize itself, which begins with the attributes of this communicator
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: _farewell()), True)


def forget(comm: MPI.Intracomm) -> None:
    """The communicator is about to be freed."""
    with _using_mpi:
        errors.meetings.pop(comm.handle, None)


def _watch() -> None:
    limit, bounded = seconds()
    looks, last = 0, None
    while True:
        sleep(min(1.0, limit / 10))
        with _using_mpi:
            if _closed:
                return
            _answer()
            waiting = errors.waiting
            if waiting is not last:
                looks, last = 0, waiting
            if waiting and monotonic() - waiting[0] > limit * 2**looks + _TURN * waiting[1].rank:
                looks += 1
                _look(waiting, bounded, looks)


def _look(waiting: tuple[float, MPI.Comm, Meetings | None], bounded: bool, looks: int) -> None:
    """Say who is missing, and end the job if it is to end.  A rank that was asked leaves both to the one that asks."""
    from mpi4py import MPI

    since, comm, meetings = waiting
    if meetings is None or not _allowed():  # the caller's own communicator, on which nothing may be sent
        text, never, quiet = "not all ranks have come", False, comm.rank > 1
    elif meetings.asked == meetings.joined:
        text, never, quiet = "not all ranks have come", False, True
    else:
        text, never = _found(meetings)
        quiet = False
    over = never or bounded
    if waiting is not errors.waiting or (quiet and not (bounded and looks > 1)):
        return
    end = "the job is ended" if over else "PDGEMM_WATCHDOG=SECONDS would end the job"
    where = f"rank {comm.rank} of {comm.size} has waited {monotonic() - since:.0f} s in {_place()}"
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"pdgemm: {where}: {text}; {end}\n".encode())
    if over:
        sleep(0.5)  # for launchers to hand the line on
        MPI.COMM_WORLD.Abort(CODE)


def _found(meetings: Meetings) -> tuple[str, bool]:
    """Who is missing and where, and whether they can never come."""
    from mpi4py import MPI

    comm, number = meetings.comm, meetings.joined
    states = _ask(meetings)
    silent = [rank for rank in range(comm.size) if rank != comm.rank and rank not in states]
    passed = [rank for rank, state in states.items() if state.unchecked >= number]
    missing = {rank: state for rank, state in states.items() if state.joined < number}
    parts = [f"rank {rank} did not join, it is in {state.place}" for rank, state in missing.items()]
    if silent:
        parts.append(f"{ranks_text(silent)} gave no answer")
    if passed:
        parts.append(f"{ranks_text(passed)} went on with check=False")
    at_work = silent or not all(state.waiting for state in missing.values())
    stuck = bool(missing) and not at_work and comm.size == MPI.COMM_WORLD.size
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    return ("; ".join(parts[:4]) or "all ranks have come") + more, stuck or bool(passed) or any(
        x.ended for x in missing.values()
    )


def _ask(meetings: Meetings) -> dict[int, _State]:
    """The states of the other ranks, of those who answer in time."""
    from mpi4py import MPI

    comm, states, question = meetings.comm, dict[int, _State](), meetings.joined
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    _sent.extend(comm.isend(question, rank, _QUESTION) for rank in others)
    end, status = monotonic() + _ANSWERS, MPI.Status()
    while len(states) < len(others) and monotonic() < end:
        _answer()
        while comm.Iprobe(tag=_ANSWER, status=status):
            asked, state = comm.recv(source=status.source, tag=_ANSWER)
            if asked == question:
                states[status.source] = _State(**state)
        sleep(0.01)
    return dict(sorted(states.items()))


def _answer(ended: bool = False) -> None:
    """Tell those who ask where this rank is."""
    from mpi4py import MPI

    if not _allowed():
        return
    status, _sent[:] = MPI.Status(), [request for request in _sent if not request.Test()]
    for meetings in [*errors.meetings.values()]:
        while meetings.comm.Iprobe(tag=_QUESTION, status=status):
            question = meetings.comm.recv(source=status.source, tag=_QUESTION)
            if question == meetings.joined and status.source < meetings.comm.rank:
                meetings.asked = question
            place = "no program any more: it has ended" if ended else _place()
            long = errors.waiting is not None and monotonic() - errors.waiting[0] > seconds()[0]
            state = _State(meetings.joined, meetings.unchecked, long, ended, place)
            _sent.append(meetings.comm.isend((question, asdict(state)), status.source, _ANSWER))


def _allowed() -> bool:
    """Does this MPI take calls from several threads?"""
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _place() -> str:
    """Where the main thread is: the line of the user's program, and the function of pdgemm that it is in."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = ""
    while frame and frame.f_code.co_filename.startswith(_HERE) and frame.f_back:
        inside = f" ({frame.f_code.co_qualname})"
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}{inside}" if frame else "an unknown place"


def _farewell() -> None:
    """This rank leaves the program: tell those who still wait for it, until all have left."""
    global _closed
    from mpi4py import MPI

    if _closed or os.getpid() != _process or MPI.Is_finalized():
        return
    with _using_mpi:
        _closed = True
    limit, nap = monotonic() + 2 * seconds()[0] + _ANSWERS, 1e-4
    left = [meetings.comm.Ibarrier() for meetings in errors.meetings.values()]
    while not MPI.Request.Testall(left) and monotonic() < limit:
        _answer(ended=True)
        sleep(nap)
        nap = min(2 * nap, 0.05)
