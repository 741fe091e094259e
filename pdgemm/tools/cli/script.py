"""`python -m pdgemm script.py`: run a script on all ranks, print its error once, and end all ranks with one exit code.

A rank whose script ends, or raises an uncaught exception, meets the other ranks in a collective call.  Where all
ranks come, rank 0 prints their exceptions, each text once, and all ranks exit with the highest exit code of any rank.
Where a rank has failed and the other ranks do not come, these would wait for the failed rank in their next
communication: the failed rank prints its exception, and ends the job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import log2
from pathlib import Path
from threading import Thread
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import mpi4py
from mpi4py.run import run_command_line

from pdgemm.errors import PdgemmError
from pdgemm.support import agreement, failures, launcher, watchdog
from pdgemm.support.agreement import raised_on
from pdgemm.support.text import printable, ranks_text
from pdgemm.tools.cli.commands import COMMANDS, code_of, line_of
from pdgemm.tools.profiling.short_traceback import short, whole

if TYPE_CHECKING:
    from mpi4py import MPI

ALONE = 2.0  # seconds for which a failed rank waits for the other ranks, which may raise the same exception
STARTING = 10.0  # the same where this rank has not loaded MPI, which takes seconds to start on a busy machine
TOGETHER = 20.0  # the same for an exception that a check raised on all ranks, and that a rank may have caught
MOST = 3  # the most different exceptions that are printed
_TAG = 32004


class End(NamedTuple):
    """The end of a script on one rank."""

    code: int = 0
    verb: str = ""  # "raised", "failed:", "left:" or "left with"
    text: str = ""
    raised_on: int = 0  # the number of ranks on which a check raised the exception


def is_script(words: Sequence[str]) -> bool:
    """Return whether the words are a script and its arguments; the name of a command is never a script."""
    first = [word for word in words[:2] if word != "--debug"][:1]
    if not first or first[0] in COMMANDS:
        return False
    return first[0] in ("-", "-c", "-m") or (
        not first[0].startswith("-") and (first[0].endswith(".py") or Path(first[0]).exists())
    )


def run_script(words: Sequence[str]) -> None:
    """Run `SCRIPT`, `-m MODULE`, `-c PROGRAM` or `-` with its arguments, and exit.

    --debug before the script : print tracebacks as Python does.
    """
    debug = words[0] == "--debug"
    words = words[debug:]
    if words[0] in ("-c", "-m") and len(words) < 2:
        sys.exit(f"pdgemm: error: {words[0]} takes {'a program' if words[0] == '-c' else 'the name of a module'}")
    process = os.getpid()
    end = _run(words, debug)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream is closed, or missing
            stream.flush()
    if os.getpid() != process:  # the script has forked this process, which is not a rank
        _say(end, "")
        sys.exit(end.code)
    sys.exit(_leave(end))


def _run(words: Sequence[str], debug: bool) -> End:
    """Run a user's program, and return its end."""
    agreement.print_once()
    try:
        run_command_line([*words])
    except SystemExit as left:
        code = left.code
        if code is None or isinstance(code, int):
            return End((code or 0) & 0xFF)
        if isinstance(code, PdgemmError):  # sys.exit(error): it ends as it does in a command
            return End(code_of(code), "failed:", line_of(code), raised_on(code))
        return End(1, "left:", str(code))
    except BaseException as error:
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        return End(code, "raised", (whole if debug else short)(error), raised_on(error))
    return End()


def _leave(end: End) -> int:
    """Meet the other ranks, and return the exit code.  Collective over the job, unless a rank fails alone."""
    mpi = _running_mpi()
    rank = mpi.COMM_WORLD.rank if mpi else launcher.launched_rank()
    size = mpi.COMM_WORLD.size if mpi else launcher.launched_size()
    if mpi and launcher.survives_ranks():
        size -= len(failures.failed_ranks(mpi.COMM_WORLD))
    if size == 1 or not (mpi or end.code):
        _say(end, "")
        return end.code
    met: MPI.Intracomm | None = None
    if not end.code:
        watchdog.of_process.stop()  # so that ranks that wait for this rank learn of its end
        met = _meeting()
    elif "mpi4py.MPI" not in sys.modules:
        # a launcher may end the job where another rank has left without MPI
        signal.signal(signal.SIGTERM, lambda *_: _alone(end, rank, size))
        met = _meeting_within(STARTING)
    elif mpi and mpi.Query_thread() >= mpi.THREAD_SERIALIZED:
        met = _meeting_within(TOGETHER if end.raised_on == size else ALONE)
    if met is not None:
        return _together(met, end)
    # where several ranks fail, they print at different times: the first one ends the job before the next one prints
    sleep(log2(1 + rank))
    _alone(end, rank, size)


def _running_mpi() -> Any:
    """Return the module MPI, or None where the script has not initialised MPI, or has finalised it."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _alone(end: End, rank: int, size: int) -> NoReturn:
    """Print the exception of this rank, and end the job."""
    _say(end if end.text else end._replace(verb="left with", text=f"exit code {end.code}"), f"Rank {rank} of {size}")
    if _running_mpi():
        _print("The other ranks went on and would wait for it: the job is ended.")
        watchdog.end_job(end.code)
    os._exit(end.code)  # a thread may be inside MPI_Init


def _meeting() -> MPI.Intracomm:
    """Return a new communicator of all ranks that have not failed, without disturbing the messages of the program."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if launcher.survives_ranks():  # some of the ranks may have failed by now: see `pdgemm.resilient`
        return MPI.Intracomm(world.Shrink())
    return world.Create_group(world.Get_group(), _TAG)


def _meeting_within(seconds: float) -> MPI.Intracomm | None:
    """Return the communicator of `_meeting`, or None where a rank does not come in time or MPI cannot be used.

    Initialises MPI where the script has not.  mpi4py would hold Python's global lock meanwhile: forever, where another
    rank never initialises MPI.
    """
    meetings = list["MPI.Intracomm"]()

    def meet() -> None:
        with suppress(Exception):  # no MPI library, or one that a failure has damaged
            mpi4py.rc(initialize=False, finalize=True)
            from mpi4py import MPI

            if not MPI.Is_initialized():
                ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
            meetings.append(_meeting())

    thread = Thread(target=meet, daemon=True)
    thread.start()
    thread.join(seconds)
    return meetings[0] if meetings else None


def _together(comm: MPI.Intracomm, end: End) -> int:
    """Print the exceptions of all ranks on rank 0, and return the highest exit code.  Collective."""
    ends = comm.gather(end)
    if ends is not None:
        groups: dict[End, list[int]] = {}
        for rank, one in enumerate(ends):
            if one.text:
                groups.setdefault(one, []).append(rank)
        for one, ranks in [*groups.items()][:MOST]:
            _say(one, _named(ranks, comm.size))
        if len(groups) > MOST:
            others = sum(map(len, [*groups.values()][MOST:]))
            _print(f"and {others} more of {comm.size} ranks failed, in other ways")
    return int(comm.bcast(max(one.code for one in ends) if ends else None))


def _named(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return "Both ranks" if size == 2 else f"All {size} ranks"
    return f"{ranks_text(ranks).capitalize()} of {size}"


def _say(end: End, who: str) -> None:
    if end.text:
        _print(f"{who} {end.verb} {end.text}" if who else end.text)


def _print(text: str) -> None:
    """Print to standard error, or nothing where it is closed: an exception here would keep the other ranks waiting."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr or sys.__stderr__, flush=True)
