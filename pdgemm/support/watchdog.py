"""The watchdog names a rank for which the other ranks wait in vain, and ends a job that can never continue.

Every collective function begins with a check (`agreement.together`).  Ranks that call it with different arguments, or
call different functions, all raise an exception in the check.  Two cases remain: a rank that never reaches the check,
because it raised an exception alone, left the program, skipped the check, or is still computing; and a rank that stops
in the middle of a function, where the other ranks wait for its panels, its part of a sum or its file.  `waits` records
each of these waits.  When a wait has lasted for PDGEMM_WATCHDOG seconds (60), the watchdog thread of the waiting rank
asks the watchdog threads of the other ranks where their ranks are, and prints one line.

No line is printed while a rank is at work in a function of the package, however long the other ranks wait for this
rank.  A rank is at work if it computes, reads or writes, or if its own waits come to an end.

The job is ended (MPI_Abort, exit code 3) where the wait can never end: a rank has left the program, or called the
function with check=False, or no rank of the job is computing.  A rank may compute in the user's program for any time,
and a stopped rank, which does not answer, may be continued: in these cases, and where all ranks wait for messages, the
job is ended only if PDGEMM_WATCHDOG is set.  PDGEMM_WATCHDOG=0 switches the watchdog off.

Before a rank has waited that long, the watchdog sends nothing, except that each rank that leaves the program sends one
message to the next rank, which can then report the departure.
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
from pdgemm.support import waits
from pdgemm.support.json_input import Seconds, variable
from pdgemm.support.launcher import survives_ranks
from pdgemm.support.source_lines import of_package, of_user
from pdgemm.support.text import printable, ranks_text
from pdgemm.support.waits import CheckCounter, Stillness, Wait, namespace, process

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE = 60.0  # seconds
CODE = 3  # exit code of a job that is ended
_QUESTION, _ANSWER, _GOODBYE = 32001, 32002, 32003  # tags
_STAGGER = 0.1  # seconds by which a rank asks later than the rank before it: a rank that was asked prints nothing
_ANSWER_SECONDS = 5.0  # time in which the other ranks must answer
_POLL = 0.01  # seconds


@dataclass(frozen=True)
class _State:
    """The answer of a rank: the last checks that it reached and skipped, and the activity of its main thread."""

    reached: int
    unchecked: int
    waiting: bool  # it has waited in a check for long, and no other thread of its process can compute
    still: float  # seconds without progress in a function of the package; -1: outside of the package
    place: str
    ended: tuple[int, ...]  # ranks of MPI.COMM_WORLD that have sent this rank a goodbye


_using_mpi = threading.Lock()
_thread: threading.Thread | None = None
_closed = False
_process = 0
_sent: list[Any] = []  # requests of messages in flight
_ended = set[int]()  # ranks of MPI.COMM_WORLD that have sent this rank a goodbye
_stillness = Stillness()
_all_waited: list[Wait] = []  # the last wait of this rank in which all ranks were seen to wait


def seconds() -> tuple[float, bool]:
    """Return the seconds of a wait without a report, and whether the job then ends anyway.  Raises ArgumentError."""
    limit = variable("PDGEMM_WATCHDOG", Seconds, "a number of seconds, 0: never")
    return (PATIENCE, False) if limit is None else (limit, True)


def watched(comm: MPI.Comm) -> MPI.Intracomm:
    """Return the caller's communicator, and start the watchdog, which then reports long waits on it.  Local.

    Raises GridError where `comm` is no intracommunicator, on this rank alone: without it the ranks cannot agree.
    """
    global _thread, _process
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise GridError(f"comm must be an intracommunicator of this rank, such as MPI.COMM_WORLD, got {comm!r}")
    with suppress(ArgumentError):  # the first grid raises this error, on all ranks
        if _thread is None and not _closed and seconds()[0]:
            _process = os.getpid()
            _thread = threading.Thread(target=_watch, daemon=True, name="pdgemm watchdog")
            _thread.start()
            atexit.register(farewell)
            # for a program that calls MPI_Finalize itself: MPI_Finalize first deletes the attributes of MPI.COMM_SELF
            MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: farewell()), True)
    return comm


def answer_questions(comm: MPI.Intracomm) -> None:
    """Let ranks that wait on a communicator of the package ask the other ranks.  Collective over `comm`.

    The ranks ask over a duplicate, because a receive on `comm` may match any tag.  If any rank has no watchdog, no rank
    is asked.
    """
    from mpi4py import MPI

    waits.agreements.pop(comm.handle, None)  # of a communicator that was freed
    if comm.size > 1:
        watching, *processes = zip(*comm.allgather((_thread is not None, namespace(), os.getpid())))
        if all(watching):
            waits.counters[comm.handle] = CheckCounter(MPI.Intracomm(comm.Dup()), [*zip(*processes)])


def unregister(comm: MPI.Intracomm) -> MPI.Intracomm | None:
    """Ask no more ranks of `comm`, which is about to be freed; return the duplicate for the caller to free, too."""
    with _using_mpi:
        counter = waits.forget_counter(comm)
        return counter.comm if counter else None


def _watch() -> None:
    """Run as the watchdog thread: answer the other ranks, and call `_look` when this rank has waited for long."""
    from mpi4py import MPI

    limit, bounded = seconds()
    interval = min(1.0, max(0.01, limit / 10))
    looks, due = 0, limit
    while True:
        sleep(interval)
        with _using_mpi:
            if _closed:
                return
            _stillness.look(2 * interval)
            _answer()
            waiting, still = _stillness.wait, _stillness.seconds
            if not still:
                looks, due = 0, limit
            if waiting and still > due + _STAGGER * _rank(waiting) and (waiting.check or _place()[1]):
                looks += 1
                due = limit * 2**looks
                with suppress(MPI.Exception):  # a rank failed meanwhile: see `failures`
                    if not _look(waiting, bounded, looks):
                        looks, due = looks - 1, still + limit / 2


def _rank(waiting: Wait) -> int:
    comm = waiting.comm or (waiting.counter.comm if waiting.counter else None)
    return comm.rank if comm else 0


def _look(waiting: Wait, bounded: bool, looks: int) -> bool:
    """Print which ranks are missing, and end the job if it must end; a rank that a lower rank has asked does neither.

    Returns False where there is nothing to report, because a rank is at work.
    """
    counter = waiting.counter
    comm = waiting.comm if counter is None else counter.comm
    if counter is None or not _threads_may_call_mpi():  # on the caller's own communicator nothing may be sent
        if not waiting.check or comm is None:  # some rank may be at work, but cannot be asked
            return False
        # no rank knows which others wait: the first two ranks print, because one of them may be the missing one
        text, never, quiet = "some rank did not join", False, comm.rank > 1
    elif monotonic() - counter.last_question < seconds()[0] and not (bounded and looks > 1):
        return True
    else:
        text, never = _missing_ranks(counter, waiting)
        quiet = False
    if not text:
        return False
    over = never or bounded
    if waiting is not waits.current or (quiet and not (bounded and looks > 1)):
        return True
    assert comm is not None
    end = "the job is ended" if over else "PDGEMM_WATCHDOG=SECONDS would end the job"
    where = f"rank {comm.rank} of {comm.size} has waited {_stillness.seconds:.0f} s in {_place()[0]}"
    line = printable(f"pdgemm: {where}: {text}; {end}\n").encode(errors="replace")
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line)
    if over:
        end_job(CODE)
    return True


def end_job(code: int) -> None:
    """End all ranks with this exit code, after half a second in which launchers forward the printed lines."""
    from mpi4py import MPI

    sleep(0.5)
    if survives_ranks() and MPI.COMM_WORLD.Get_failed().size:
        os._exit(code)  # MPI_Abort may hang then, or end the job with 0; the other ranks notice this end
    MPI.COMM_WORLD.Abort(code)


def _missing_ranks(counter: CheckCounter, waiting: Wait) -> tuple[str, bool]:
    """Ask the other ranks; return a text with the missing ranks and their places, and whether they can never join.

    The text is empty where a rank is at work in the package, or where all ranks are seen to wait for the first time.
    """
    from mpi4py import MPI

    comm, number = counter.comm, counter.reached
    states, stopped, silent, at_work = _ask(counter)
    ended = _ended.union(*(state.ended for state in states.values()))
    world = MPI.Group.Translate_ranks(comm.group, [*range(comm.size)], MPI.COMM_WORLD.group)
    left = [rank for rank in range(comm.size) if world[rank] in ended]
    silent = [rank for rank in silent if rank not in left]
    passed = [rank for rank, state in states.items() if waiting.check and state.unchecked >= number]
    behind = {rank: state for rank, state in states.items() if state.reached < number}
    parts = [f"{ranks_text(left)} left the program"] if left else []
    parts += [f"rank {rank} is stopped (kill -CONT {counter.processes[rank][1]} lets it go on)" for rank in stopped]
    parts += [f"{ranks_text(silent)} gave no answer"] if silent else []
    if not parts and not passed:
        others = behind if waiting.check else states  # if this rank is in a check, ranks in this check wait, too
        if at_work or any(0 <= state.still < seconds()[0] / 2 for state in others.values()):
            return "", False
        if not any(state.still < 0 for state in behind.values()) and waiting not in _all_waited:
            _all_waited[:] = [waiting]  # a process that was stopped may be about to go on
            return "", False
    parts += [f"rank {rank} did not join, it is in {state.place}" for rank, state in behind.items()]
    if passed:
        parts.append(f"{ranks_text(passed)} went on with check=False")
    if not parts:
        parts = [f"rank {rank} is in {state.place}" for rank, state in states.items()]
    text = "; ".join(parts[:4]) or "all ranks have come"
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    all_answered = comm.size == MPI.COMM_WORLD.size and not silent and not stopped and _waits_for_long()
    stuck = all_answered and bool(behind) and all(state.waiting for state in behind.values())
    return text + more, bool(left or passed or stuck)


def _waits_for_long() -> bool:
    """Return whether the only thread of this process has waited in a check for long, for ranks of MPI.COMM_WORLD."""
    from mpi4py import MPI

    waiting = waits.current
    others = (x for x in threading.enumerate() if x is not threading.main_thread())
    if waiting is None or waiting is not _stillness.wait or not waiting.check or not all(x.daemon for x in others):
        return False
    if waiting.comm is None or _stillness.seconds < seconds()[0]:
        return False
    ranks = MPI.Group.Translate_ranks(waiting.comm.group, [*range(waiting.comm.size)], MPI.COMM_WORLD.group)
    return MPI.UNDEFINED not in ranks


def _ask(counter: CheckCounter) -> tuple[dict[int, _State], list[int], list[int], bool]:
    """Ask the other ranks; return the states of the ranks that answer in time, the stopped ranks, and the silent ranks.

    Return last whether a rank gave no answer because it computes and does not release the interpreter lock.
    """
    from mpi4py import MPI

    comm, states, question = counter.comm, dict[int, _State](), counter.reached
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    stopped = list[int]()
    _sent.extend(comm.isend(question, rank, _QUESTION) for rank in others)
    status = MPI.Status()
    for turn in range(round(_ANSWER_SECONDS / _POLL)):  # turns, no clock: this process may be stopped meanwhile
        _answer()
        while comm.Iprobe(tag=_ANSWER, status=status):
            answered, state = comm.recv(source=status.source, tag=_ANSWER)
            if answered == question:
                states[status.source] = _State(**state)
        silent = [rank for rank in others if rank not in states]
        if turn % 50 == 49:
            stopped = [rank for rank in silent if process(*counter.processes[rank])[0] in ("T", "t")]
        if len(silent) == len(stopped):
            break
        sleep(_POLL)
    silent = [rank for rank in silent if rank not in stopped]
    before = [process(*counter.processes[rank])[1] for rank in silent]
    sleep(0.5 if silent else 0)
    computing = [rank for rank, used in zip(silent, before) if process(*counter.processes[rank])[1] > used]
    return dict(sorted(states.items())), stopped, [x for x in silent if x not in computing], bool(computing)


def _answer() -> None:
    """Receive the goodbyes of ranks that have left, and answer the questions of ranks that ask where this rank is."""
    from mpi4py import MPI

    if not _threads_may_call_mpi():
        return
    status, _sent[:] = MPI.Status(), [request for request in _sent if not _complete(request)]
    for handle, counter in [*waits.counters.items()]:
        comm = counter.comm
        try:
            while comm.Iprobe(tag=_GOODBYE, status=status):
                _ended.add(comm.recv(source=status.source, tag=_GOODBYE))
            while comm.Iprobe(tag=_QUESTION, status=status):
                question = comm.recv(source=status.source, tag=_QUESTION)
                if question == counter.reached and status.source < comm.rank:
                    counter.last_question = monotonic()
                place, inside = _place()
                still = _stillness.seconds if inside else -1.0
                state = _State(counter.reached, counter.unchecked, _waits_for_long(), still, place, tuple(_ended))
                _sent.append(comm.isend((question, asdict(state)), status.source, _ANSWER))
        except MPI.Exception:  # a rank failed, and the communicator cannot be used any more: see `failures`
            waits.counters.pop(handle, None)


def _complete(request: MPI.Request) -> bool:
    """Return whether a message has been sent, or can never be sent because a rank failed."""
    from mpi4py import MPI

    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def _threads_may_call_mpi() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _place() -> tuple[str, bool]:
    """Return the place of the main thread: the line of the user's program, and the function of pdgemm that it called.

    Return also whether the thread is in a function of pdgemm, and not in a user's function that pdgemm has called.
    """
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    function, outside, within = "", "", False
    while frame:
        code, line = frame.f_code, frame.f_lineno
        if of_package(code.co_filename):
            if code.co_filename != waits.__file__:  # else the user's program calls MPI on a communicator of pdgemm
                function, within = function if outside else f" ({code.co_qualname})", True
        elif of_user(code.co_filename):
            return f"{code.co_filename}:{line}{function}", within
        else:  # NumPy's operators, which call pdgemm; or an installed program
            outside = outside or f"{code.co_filename}:{line}{function}"
        frame = frame.f_back
    return outside or "an unknown place", within


def farewell() -> None:
    """Tell the next rank of each communicator that this rank leaves the program; the next rank tells ranks that ask."""
    global _closed
    from mpi4py import MPI

    if _closed or os.getpid() != _process or MPI.Is_finalized():
        return
    with _using_mpi:
        _closed = True
    if _threads_may_call_mpi():
        me = MPI.COMM_WORLD.rank
        for comm in (counter.comm for counter in waits.counters.values()):
            with suppress(MPI.Exception):  # the next rank has failed
                _sent.append(comm.isend(me, (comm.rank + 1) % comm.size, _GOODBYE))
