"""The watchdog names a rank for which the other ranks wait in vain, and ends a job that can never continue.

Every collective function begins with a check (`agreement.together`).  Ranks that call it with different arguments, or
call different functions, all raise an exception in the check.  Two cases remain: a rank that never reaches the check,
because it raised an exception alone, left the program, skipped the check, or is still computing; and a rank that stops
in the middle of a function, where the other ranks wait for its panels, its part of a sum or its file.  `waits` records
each of these waits.  When a wait has lasted for PDGEMM_WATCHDOG seconds (60), the watchdog thread of the waiting rank
asks the watchdog threads of the other ranks where their ranks are, and prints one line.

No line is printed while a rank is at work in a function of the package, however long the other ranks wait for this
rank.  A rank is at work if it computes, reads or writes, or if its own waits end.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic, sleep
from traceback import format_exception, walk_stack
from typing import TYPE_CHECKING, Any

from pdgemm.errors import ArgumentError, GridError
from pdgemm.support import waits
from pdgemm.support.agreement import raised_on
from pdgemm.support.files import write_line
from pdgemm.support.json_input import Seconds, variable
from pdgemm.support.launcher import survives_ranks
from pdgemm.support.source_lines import of_package, of_user
from pdgemm.support.text import ranks_text
from pdgemm.support.waits import CheckCounter, Stillness, Wait, namespace, process, this_rank

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE = 60.0  # seconds
CODE = 3  # exit code of a job that is ended
_QUESTION, _ANSWER, _GOODBYE = 32001, 32002, 32003  # tags
_STAGGER = 0.1  # seconds by which a rank asks later than the rank before it: a rank that was asked prints nothing
_ANSWER_SECONDS = 5.0  # time in which the other ranks must answer
_POLL = 0.01  # seconds
_HEAD_START = 0.3  # seconds that rank 1 waits before it ends the job; ranks 2 and 3 wait twice as long, ...
_MOST = 4  # groups of ranks that a line names


@dataclass(frozen=True)
class _State:
    """The answer of a rank that the watchdog of another rank has asked."""

    reached: int  # checks of the communicator
    skipped: int  # the number of the last check that it skipped
    still: float  # seconds without progress in a function of the package; -1: in the user's program
    place: str
    stuck: bool  # it has waited in a check for long, and no other thread of its process can compute
    left: frozenset[int]  # ranks that have told it that they leave the program


def seconds() -> tuple[float, bool]:
    """Return after how many seconds a wait is reported, and whether the job is then always ended.

    Raises ArgumentError if PDGEMM_WATCHDOG is invalid.
    """
    limit = variable("PDGEMM_WATCHDOG", Seconds, "a number of seconds, 0: never")
    return (PATIENCE, False) if limit is None else (limit, True)


def watched(comm: MPI.Comm) -> MPI.Intracomm:
    """Return the caller's communicator, and start the watchdog, which then reports long waits on it.  Local.

    Raises GridError, only on this rank, where `comm` is not an intracommunicator: without one the ranks cannot agree.
    """
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise GridError(f"comm must be an intracommunicator of this rank, such as MPI.COMM_WORLD, got {comm!r}")
    with suppress(ArgumentError):  # the first grid raises this error, on all ranks
        of_process.start(*seconds())
    return comm


def answer_questions(comm: MPI.Intracomm) -> None:
    """Let ranks that wait on a communicator of the package ask the other ranks.  Collective over `comm`.

    The ranks ask over a duplicate, because a receive on `comm` may match any tag.  If any rank has no watchdog, or its
    watchdog may not call MPI, no rank is asked.
    """
    from mpi4py import MPI

    counter = this_rank.counters[comm.handle] = CheckCounter()  # replaces the one of a freed communicator
    if comm.size > 1:
        answers = of_process.started and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        answering, *processes = zip(*comm.allgather((answers, namespace(), os.getpid())))
        if all(answering):
            counter.processes, counter.question_comm = [*zip(*processes)], MPI.Intracomm(comm.Dup())


def before_finalize(call: Callable[[], None]) -> None:
    """Let `call` be called before MPI_Finalize, once or twice.  Local."""
    from mpi4py import MPI

    atexit.register(call)
    # for a program that calls MPI_Finalize itself: MPI_Finalize first deletes the attributes of MPI.COMM_SELF
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: call()), True)


def end_job(code: int) -> None:
    """End all ranks with this exit code, after half a second in which launchers forward the printed lines."""
    from mpi4py import MPI

    sleep(0.5)
    if survives_ranks() and MPI.COMM_WORLD.Get_failed().size:
        os._exit(code)  # MPI_Abort may hang then, or end the job with 0; the other ranks notice this end
    MPI.COMM_WORLD.Abort(code)


@contextmanager
def ending_the_job(comm: MPI.Comm) -> Iterator[None]:
    """Return a block in which an exception of one rank ends the job: other ranks would wait for its messages.

    Where several ranks fail, higher ranks wait a little, so that only the lowest one prints.
    """
    try:
        yield
    except Exception as error:
        if comm.size == 1 or raised_on(error):
            raise
        sleep(_HEAD_START * comm.rank.bit_length())
        write_line(f"rank {comm.rank} of {comm.size}: {''.join(format_exception(error))}")
        end_job(1)


class Watchdog:
    """The thread that watches the waits of this rank, and answers the watchdogs of other ranks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._using_mpi = threading.Lock()  # held while the thread calls MPI: no communicator is freed meanwhile
        self._requests: list[MPI.Request] = []  # requests of messages in flight
        self._stopped = False

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self, patience: float, bounded: bool) -> None:
        """Start the thread, unless it has been started.  Local.

        patience, bounded : the results of `seconds`; patience 0: the thread is not started.
        """
        if self._thread is None and patience:
            self._patience, self._bounded, self._stillness = patience, bounded, Stillness()
            self._thread = threading.Thread(target=self._watch, daemon=True, name="pdgemm watchdog")
            self._thread.start()
            before_finalize(self.stop)

    def stop(self) -> None:
        """Stop the thread, and tell the next rank of each communicator that this rank leaves the program.  Local.

        The next rank tells ranks that ask.  Does nothing in a forked process, which has no such thread.
        """
        from mpi4py import MPI

        if self._stopped or self._thread is None or not self._thread.is_alive():
            return
        with self._using_mpi:
            self._stopped = True
        for comm in filter(None, (x.question_comm for x in this_rank.counters.values())):
            with suppress(MPI.Exception):  # the next rank has failed
                self._requests.append(comm.isend(None, (comm.rank + 1) % comm.size, _GOODBYE))

    def unregister(self, comm: MPI.Intracomm) -> MPI.Intracomm | None:
        """Stop asking ranks of `comm`, which is about to be freed; return its duplicate, to be freed, too."""
        with self._using_mpi:
            counter = this_rank.counters.pop(comm.handle, CheckCounter())
            duplicate, counter.question_comm = counter.question_comm, None
            return duplicate

    def _watch(self) -> None:
        """Answer the other ranks, and report when this rank has waited for long; each report doubles the interval."""
        from mpi4py import MPI

        interval = min(1.0, max(0.01, self._patience / 10))
        due = self._patience
        while True:
            sleep(interval)
            with self._using_mpi:
                if self._stopped:
                    return
                self._stillness.look(2 * interval)
                self._answer()
                wait, still = self._stillness.wait, self._stillness.seconds
                if not still:
                    due = self._patience
                if wait and still > due and (wait.check or _place()[1]):
                    with suppress(MPI.Exception):  # a rank failed meanwhile: see `failures`
                        counter = wait.counter
                        comm = counter.question_comm if counter else wait.comm
                        if comm and still > due + _STAGGER * comm.rank:
                            due = 2 * due if self._report(wait, counter, comm) else still + self._patience / 2

    def _report(self, wait: Wait, counter: CheckCounter | None, comm: MPI.Comm) -> bool:
        """Print which ranks are missing, and end the job if it must end.  Returns False while a rank is at work.

        Prints nothing, and does not end the job, if a lower rank in the same check has asked this rank.
        """
        still = self._stillness.seconds
        if counter is not None:
            if monotonic() - counter.questioned < self._patience + _ANSWER_SECONDS:  # a lower rank may still ask
                return True
            text, never = self._missing_ranks(counter, comm, wait.check)
        elif wait.check and (comm.rank < 2 or (self._bounded and still > 2 * self._patience)):
            # no rank knows which others wait: the first two ranks print, because one of them may be the missing one
            text, never = "some rank did not join", False
        else:
            return False
        if text and wait is this_rank.wait:
            who = f"rank {comm.rank} of {comm.size} has waited {still:.0f} s in {_place()[0]}"
            end = "the job is ended" if never or self._bounded else "PDGEMM_WATCHDOG=SECONDS would end the job"
            write_line(f"pdgemm: {who}: {text}; {end}")
            if never or self._bounded:
                end_job(CODE)
        return bool(text)

    def _missing_ranks(self, counter: CheckCounter, comm: MPI.Comm, check: bool) -> tuple[str, bool]:
        """Ask the other ranks; return a text with the missing ranks and their places, and whether they can never join.

        The text is empty where a rank is at work in the package.
        """
        from mpi4py import MPI

        used_before = [process(*x)[1] for x in counter.processes]
        states, number = self._states(counter, comm, check), counter.reached
        mine = states.pop(comm.rank)
        left = sorted(counter.left.union(*(state.left for state in states.values())))
        behind = {rank: state for rank, state in states.items() if state.reached < number}
        skipped = [rank for rank, state in states.items() if check and state.skipped >= number]
        parts, lost = [f"{ranks_text(left)} left the program"] if left else [], list[int]()
        others = behind if check else states  # if this rank is in a check, ranks in this check wait, too
        working = any(0 <= state.still < self._patience / 2 for state in others.values())
        for rank in {*range(comm.size)} - {comm.rank, *states, *left}:
            status, used = process(*counter.processes[rank])
            if status in ("T", "t"):
                parts.append(f"rank {rank} is stopped (kill -CONT {counter.processes[rank][1]} lets it go on)")
            elif used > used_before[rank]:  # it computes, and does not release the interpreter lock
                working = True
            else:
                lost.append(rank)
        parts += [f"{ranks_text(lost)} gave no answer"] if lost else []
        if working and not parts and not skipped:
            return "", False
        parts += [f"rank {rank} did not join, it is in {state.place}" for rank, state in behind.items()]
        parts += [f"{ranks_text(skipped)} went on with check=False"] if skipped else []
        parts = parts or [f"rank {rank} is in {state.place}" for rank, state in states.items()]
        more = f" and {len(parts) - _MOST} more" if len(parts) > _MOST else ""
        of_all = len(states) + 1 == comm.size == MPI.COMM_WORLD.size
        stuck = of_all and bool(behind) and all(state.stuck for state in (mine, *behind.values()))
        return "; ".join(parts[:_MOST]) + more, bool(left or skipped or stuck)

    def _states(self, counter: CheckCounter, comm: MPI.Comm, check: bool) -> dict[int, _State]:
        """Ask the other ranks; return the states of this rank and of those that answer in time, ordered by rank."""
        number, states = counter.reached, {comm.rank: self._state(counter)}
        self._requests += [
            comm.isend((number, check), rank, _QUESTION) for rank in range(comm.size) if rank != comm.rank
        ]
        for _ in range(round(_ANSWER_SECONDS / _POLL)):  # counted polls, no clock: this process may be stopped
            self._answer()
            states.update((rank, state) for rank, (of_check, state) in _received(comm, _ANSWER) if of_check == number)
            if len(states) == comm.size:
                break
            sleep(_POLL)
        return dict(sorted(states.items()))

    def _answer(self) -> None:
        """Receive the goodbyes of ranks that leave, and answer the questions of ranks that ask where this rank is."""
        from mpi4py import MPI

        for counter in [*this_rank.counters.values()]:
            with suppress(MPI.Exception):  # a rank failed, and the communicator cannot be used any more: see `failures`
                if comm := counter.question_comm:
                    counter.left.update(rank for rank, _ in _received(comm, _GOODBYE))
                    for rank, (number, check) in _received(comm, _QUESTION):
                        if check and number == counter.reached and rank < comm.rank:
                            counter.questioned = monotonic()
                        self._requests.append(comm.isend((number, self._state(counter)), rank, _ANSWER))
        with suppress(MPI.Exception):  # the request of a message to a failed rank: it is then complete
            self._requests = [x for x in self._requests if not x.Test()]

    def _state(self, counter: CheckCounter) -> _State:
        """Return where this rank is in the order of checks, and whether it can go on."""
        from mpi4py import MPI

        wait, still, (place, inside) = self._stillness.wait, self._stillness.seconds, _place()
        stuck = (
            wait is not None
            and wait is this_rank.wait
            and wait.check
            and wait.comm is not None
            and still >= self._patience
            and all(x.daemon or x is threading.main_thread() for x in threading.enumerate())
            and MPI.Group.Difference(wait.comm.group, MPI.COMM_WORLD.group).size == 0  # no ranks that were spawned
        )
        left = frozenset(counter.left)
        return _State(counter.reached, counter.skipped, still if inside else -1.0, place, stuck, left)


def _received(comm: MPI.Comm, tag: int) -> Iterator[tuple[int, Any]]:
    """Yield the messages that have arrived, each with its source."""
    from mpi4py import MPI

    status = MPI.Status()
    while comm.Iprobe(tag=tag, status=status):
        yield status.source, comm.recv(source=status.source, tag=tag)


def _place() -> tuple[str, bool]:
    """Return the place of the main thread: the line of the user's program, and the function of pdgemm that it called.

    Return also whether the thread is in a function of pdgemm, and not in a user's function that pdgemm has called.
    """
    function, outside, within = "", "", False
    innermost = sys._current_frames()[threading.main_thread().ident or 0]
    for frame, line in walk_stack(innermost):
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if of_user(file):
            return f"{file}:{line}{function}", within
        if not of_package(file):  # NumPy's operators, which call pdgemm; or an installed program
            outside = outside or f"{file}:{line}{function}"
        elif file != waits.__file__:  # else the user's program calls MPI on a communicator of pdgemm
            function, within = function if outside else f" ({name})", True
    return outside or "an unknown place", within


of_process = Watchdog()  # its thread starts with the first communicator that is watched
