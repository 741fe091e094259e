"""`python -m pdgemm script.py`: run a script on all ranks; an error is printed once, and ends all ranks.

A rank that fails cannot just leave, because the other ranks would wait for it in their next communication: it prints
its error and ends the job.  Where several ranks fail, the lowest of them prints, and the others wait for it meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import log2
from pathlib import Path
from time import sleep
from traceback import TracebackException
from typing import Any, NoReturn

from mpi4py.run import run_command_line

from pdgemm.errors import PdgemmError
from pdgemm.support import agreement, launcher, watchdog
from pdgemm.support.source_lines import of_package, of_user
from pdgemm.support.text import echo
from pdgemm.tools.cli.commands import COMMANDS, code_of, line_of

HEAD_START = 2.0  # seconds for which rank 1 waits for rank 0 to end the job; higher ranks wait longer
_PROCESS = os.getpid()


def is_script(words: Sequence[str]) -> bool:
    """Return whether the words are a script and its arguments; the name of a command is never a script."""
    first, *others = words[words[:1] == ["--debug"] :] or [""]
    if first in ("-c", "-m"):
        return bool(others)
    return first == "-" or (
        not first.startswith("-") and first not in ("", *COMMANDS) and (first.endswith(".py") or Path(first).exists())
    )


def run_script(words: Sequence[str]) -> NoReturn:
    """Run `SCRIPT`, `-m MODULE`, `-c PROGRAM` or `-` with its arguments, and exit.

    --debug before the script : print tracebacks as Python does.
    """
    debug = words[0] == "--debug"
    agreement.print_once()
    try:
        run_command_line([*words[debug:]])
    except SystemExit as left:
        _leave(left.code)
    except BaseException as error:
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        _fail(code, traceback_text(error, debug), f"raised {type(error).__name__}", agreement.raised_on(error))
    sys.exit()


def traceback_text(error: BaseException, whole: bool = False) -> str:
    """Return the traceback of an exception.   whole : with the lines of this package and of installed packages.

    The innermost line of another package is shown in any case: the mistake may be there.
    """
    trace = TracebackException.from_exception(error, compact=True)
    chain: TracebackException | None = trace
    while chain and not whole:
        last = [x for x in chain.stack[-1:] if not (of_package(x.filename) or x.filename.startswith("<frozen"))]
        chain.stack[:] = [x for x in chain.stack if of_user(x.filename) or x in last]
        chain = chain.__cause__ or chain.__context__
    return "".join(trace.format()).rstrip()


def _leave(code: Any) -> None:
    """End the job as the script's `sys.exit(code)` requests: with a number, a text, or an exception of this package."""
    if isinstance(code, PdgemmError):  # the script ends as a command does
        _fail(code_of(code), line_of(code), "failed", agreement.raised_on(code))
    elif isinstance(code, int) and code & 0xFF:
        _fail(code & 0xFF, "", f"left with exit code {code & 0xFF}")
    elif not isinstance(code, int | None):
        text = ""
        with suppress(Exception):  # str() of the object may fail
            text = str(code)
        _fail(1, text, "left")


def _fail(code: int, text: str, what: str, raised_on: int = 0) -> NoReturn:
    """Print the error of this rank, and end all ranks.   raised_on : number of ranks on which a check raised it."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi and (not mpi.Is_initialized() or mpi.Is_finalized()):
        mpi = None
    rank = mpi.COMM_WORLD.rank if mpi else launcher.launched_rank()
    size = mpi.COMM_WORLD.size if mpi else launcher.launched_size()
    if os.getpid() != _PROCESS:
        rank, size = 0, 1  # the script has forked this process, which is not a rank
    if size > 1:
        who = f"All {size} ranks" if raised_on == size else f"Rank {rank} of {size}"
        text = f"{who} {what}:\n{text}" if text else f"{who} {what}"
    with suppress(OSError, ValueError, AttributeError):  # standard output is closed, or missing
        sys.stdout.flush()
    sleep(HEAD_START * log2(1 + rank))
    with suppress(OSError, ValueError):  # standard error is closed: the other ranks must be ended all the same
        if text:
            echo(text, err=True)
    if mpi and size > 1:
        watchdog.end_job(code)
    sys.exit(code)
