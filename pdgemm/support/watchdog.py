"""A rank that waits at a meeting for one that does not come says so, and ends what can never go on.

Every collective function begins with a meeting (`errors.check_together`).  Ranks that call it with different
arguments, or call different functions, meet there and all raise.  What is left is a rank that does not come: it raised
an exception alone, left the program, skipped the check, or is at work on something else.  After PDGEMM_WATCHDOG seconds
(60) a thread of a waiting rank asks those of the others where they are, and prints one line.

It ends the job (MPI_Abort, exit code 3) where the meeting can never take place: a rank has left the program, or called
the function with check=False, or no rank of the job is at work.  A rank that is at work may take as long as it likes;
only where PDGEMM_WATCHDOG is set the job ends in any case.  PDGEMM_WATCHDOG=0: nobody watches.

Before somebody has waited that long nothing is sent, but for one message of each rank that leaves the program, to the
next rank, which can tell of it then.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

from pdgemm import errors
from pdgemm.errors import ArgumentError, GridError, Meetings, ranks_text
from pdgemm.support.json_input import Seconds, variable

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE = 60.0  # seconds
CODE = 3  # exit code of a job that is ended
_QUESTION, _ANSWER, _GOODBYE = 32001, 32002, 32003  # tags
_TURN = 0.1  # seconds that a rank leaves to the rank before it to ask; who was asked keeps quiet
_ANSWERS = 5.0  # seconds to answer in
_HERE = f"{Path(__file__).parent}{os.sep}"


@dataclass(frozen=True)
class _State:
    """What a rank answers."""

    joined: int
    unchecked: int
    waiting: bool  # for long, with nobody at work in this process
    place: str
    ended: tuple[int, ...]  # ranks of the world that said goodbye to this one


_using_mpi = threading.Lock()
_thread: threading.Thread | None = None
_closed = False
_process = 0
_sent: list[Any] = []
_ended = set[int]()  # ranks of the world


def seconds() -> tuple[float, bool]:
    """How long to wait in silence, and whether the job ends then in any case.  Raises ArgumentError."""
    asked = variable("PDGEMM_WATCHDOG", Seconds, "a number of seconds, 0: never")
    return (PATIENCE, False) if asked is None else (asked, True)


def met_on(comm: MPI.Comm) -> MPI.Intracomm:
    """A communicator that the caller gives, and a watch over waits on it.  Local.

    Raises GridError for what is none: on this rank alone, for there is nobody to agree with.
    """
    global _thread, _process
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise GridError(f"comm is an intracommunicator of this rank, got {comm!r}")
    with suppress(ArgumentError):  # which the first grid raises, on all ranks
        if _thread is None and not _closed and seconds()[0]:
            _process = os.getpid()
            _thread = threading.Thread(target=_watch, daemon=True, name="pdgemm watchdog")
            _thread.start()
            atexit.register(_farewell)
            # where a program calls MPI_Finalize itself, which begins with the attributes of this communicator
            MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: _farewell()), True)
    return comm


def watch(comm: MPI.Intracomm) -> None:
    """From now on ranks that wait on this communicator, the library's own, ask for the others.  On all of them."""
    if comm.size > 1 and _thread is not None:
        errors.meetings[comm.handle] = Meetings(comm)


def forget(comm: MPI.Intracomm) -> None:
    """The communicator is about to be freed."""
    with _using_mpi:
        errors.meetings.pop(comm.handle, None)


def _watch() -> None:
    limit, bounded = seconds()
    looks, last = 0, None
    while True:
        sleep(min(1.0, max(0.01, limit / 10)))
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
        # nobody knows who else waits: the first two ranks speak, for one of them may be the one that is missing
        text, never, quiet = "some rank did not join", False, comm.rank > 1
    elif meetings.asked == meetings.joined:
        text, never, quiet = "some rank did not join", False, True
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
    ended = _ended.union(*(state.ended for state in states.values()))
    world = MPI.Group.Translate_ranks(comm.group, [*range(comm.size)], MPI.COMM_WORLD.group)
    left = [rank for rank in range(comm.size) if world[rank] in ended]
    silent = [rank for rank in range(comm.size) if rank not in (comm.rank, *states, *left)]
    passed = [rank for rank, state in states.items() if state.unchecked >= number]
    missing = {rank: state for rank, state in states.items() if state.joined < number}
    parts = [f"{ranks_text(left)} left the program"] if left else []
    parts += [f"rank {rank} did not join, it is in {state.place}" for rank, state in missing.items()]
    if silent:
        parts.append(f"{ranks_text(silent)} gave no answer")
    if passed:
        parts.append(f"{ranks_text(passed)} went on with check=False")
    text = "; ".join(parts[:4]) or "all ranks have come"
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    everybody = comm.size == MPI.COMM_WORLD.size and not silent and _idle()
    stuck = everybody and bool(missing) and all(state.waiting for state in missing.values())
    return text + more, bool(left or passed or stuck)


def _idle() -> bool:
    """Has this process waited for long, in its only thread, and for nobody but ranks of this job's start?"""
    from mpi4py import MPI

    waiting = errors.waiting
    others = (x for x in threading.enumerate() if x is not threading.main_thread())
    if waiting is None or monotonic() - waiting[0] < seconds()[0] or not all(x.daemon for x in others):
        return False
    ranks = MPI.Group.Translate_ranks(waiting[1].group, [*range(waiting[1].size)], MPI.COMM_WORLD.group)
    return MPI.UNDEFINED not in ranks


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


def _answer() -> None:
    """Hear who has left, and tell those who ask where this rank is."""
    from mpi4py import MPI

    if not _allowed():
        return
    status, _sent[:] = MPI.Status(), [request for request in _sent if not request.Test()]
    for meetings in [*errors.meetings.values()]:
        while meetings.comm.Iprobe(tag=_GOODBYE, status=status):
            _ended.add(meetings.comm.recv(source=status.source, tag=_GOODBYE))
        while meetings.comm.Iprobe(tag=_QUESTION, status=status):
            question = meetings.comm.recv(source=status.source, tag=_QUESTION)
            if question == meetings.joined and status.source < meetings.comm.rank:
                meetings.asked = question
            state = _State(meetings.joined, meetings.unchecked, _idle(), _place(), tuple(_ended))
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
    """This rank leaves the program: it tells the next rank of each communicator, which tells who asks."""
    global _closed
    from mpi4py import MPI

    if _closed or os.getpid() != _process or MPI.Is_finalized():
        return
    with _using_mpi:
        _closed = True
    if _allowed():
        me = MPI.COMM_WORLD.rank
        for comm in (meetings.comm for meetings in errors.meetings.values()):
            _sent.append(comm.isend(me, (comm.rank + 1) % comm.size, _GOODBYE))
