"""Agreement of ranks: an error on one rank is raised on all ranks, and so is a difference between their arguments.

A warning is issued on all ranks as well (`warn_together`), so that all ranks continue in the same way.

A rank that raises an exception alone leaves the other ranks waiting in their next communication.  So every collective
function checks its arguments inside a `with together(comm)` block before it communicates; where an exception cannot be
raised inside such a block, `agree` takes it as an argument.  After this check all ranks raise, or none.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from pdgemm.errors import ArgumentError, GridError, OutOfMemoryError, PdgemmError
from pdgemm.support import launcher
from pdgemm.support.source_lines import of_user
from pdgemm.support.text import ranks_text
from pdgemm.support.waits import Wait, this_rank

if TYPE_CHECKING:
    from mpi4py import MPI


class together:
    """A block that may fail on some ranks only and does not communicate; its exception is raised on all ranks.

    ::

        with together(grid.comm) as arguments:
            n = as_whole(n, "n")                    # an exception on one rank is raised on all
            arguments += ["the name of the function", n]

    The items of the list describe the call.  They must be the same on all ranks, otherwise all ranks raise
    ArgumentError, which shows ranks and their arguments.  Collective over `comm`; one allreduce of 4 words.

    check : False where the caller guarantees equal arguments without errors: nothing is compared, and an exception is
            raised only on this rank.  It may be set to True in the block, on all ranks.
    flag  : set it in the block to True or a number; after the block it is the maximum over all ranks.
    later : where this rank has no exception, the next agreement over `comm` compares the arguments of this block, too.
            The caller sends nothing before that one, and calls `agree_if_later` where there may be none.
    """

    __slots__ = ("_arguments", "_comm", "_later", "check", "flag")

    def __init__(self, comm: MPI.Comm, check: bool = True, later: bool = False) -> None:
        self._comm, self.check, self._later = comm, check, later
        self._arguments, self.flag = list[object](), int(False)

    def __enter__(self) -> list[object]:
        check_not_freed(self._comm)
        return self._arguments

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.check:
            this_rank.count_check(self._comm, check=False)
        elif error is None or isinstance(error, Exception):
            description = ""
            if error is None and self._comm.size > 1:
                try:
                    description = ", ".join(map(str, self._arguments))
                except Exception as bad:  # Python converts no integer of more than 4300 digits
                    error = ArgumentError(f"an argument cannot be written: {bad}")
            if self._later and error is None and self._comm.size > 1:
                this_rank.counters[self._comm.handle].later += f"{description}, "
            else:
                self.flag = agree(self._comm, error, description, self.flag)


def agree(comm: MPI.Comm, error: BaseException | None = None, description: str = "", flag: int = False) -> int:
    """Raise the same exception on all ranks if any rank has one.  Collective over `comm`; one allreduce of 4 words.

    error       : the exception of this rank, or None.  The exception of the lowest failing rank is raised; its message
                  names all ranks that failed.
    description : the arguments of this rank as text; ArgumentError is raised where the text differs among the ranks.
                  Addresses, as in "<function f at 0x7f>", are left out.  Long texts cost no more.
    flag        : True, or a number; the result is the maximum over all ranks.
    """
    from mpi4py import MPI

    check_not_freed(comm)
    if comm.size == 1 and error is None:
        return flag
    counter = this_rank.counters[comm.handle]
    description, counter.later = counter.later + description, ""
    description = _ADDRESS.sub("", description)
    digest = int.from_bytes(hashlib.blake2b(description.encode(errors="surrogatepass"), digest_size=7).digest(), "big")
    lowest = np.array([comm.size if error is None else comm.rank, digest, -digest, -flag])
    this_rank.count_check(comm, check=True)
    with Wait(comm, check=True):
        comm.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    first = int(lowest[0])
    if first < comm.size:
        failed = [rank for rank, bad in enumerate(comm.allgather(error is not None)) if bad]
        mine = _sendable(error, failed, comm.size) if comm.rank == first else None
        raised = comm.bcast(mine, root=first)
        if mine is not None and not isinstance(mine, PdgemmError):  # other ranks do not have its traceback
            raised = mine
        raise _of_all(comm, raised) from None
    if lowest[1] != -lowest[2]:
        raise _of_all(comm, ArgumentError(_disagreement(comm.allgather(description))))
    return -int(lowest[3])


def agree_if_later(comm: MPI.Comm) -> None:
    """Compare the arguments of a block `together(comm, later=True)`, if no agreement has compared them.  Collective."""
    if this_rank.counters[comm.handle].later:
        agree(comm)


def described_elements(*arrays: np.ndarray) -> str:
    """Return a checksum as text, by which ranks compare arrays that must be equal; the memory order does not matter.

    Local; it reads the elements once, and copies at most 1 MiB of the elements, or one row, at a time.
    """
    checksum = 0
    for array in map(np.atleast_1d, arrays):
        lines = max(1, (1 << 20) // max(1, array.nbytes // max(1, len(array))))
        for start in range(0, len(array), lines):
            some = np.ascontiguousarray(array[start : start + lines])
            checksum = crc32(some.reshape(-1).view(np.uint8).data, checksum)
    return f"elements of checksum {checksum}"


def raised_on(error: BaseException) -> int:
    """Return on how many ranks a check raised this exception; 0 for an exception that only this rank raised."""
    return int(getattr(error, _MARK, 0))


def _of_all(comm: MPI.Comm, error: BaseException) -> BaseException:
    """Mark an exception that all ranks of a communicator raise, and return the exception."""
    setattr(error, _MARK, comm.size)
    this_rank.counters[comm.handle].raised += 1
    return error


def check_not_freed(comm: MPI.Comm) -> None:
    """Raise GridError where the communicator was freed.  Local: all ranks freed it, so all ranks raise."""
    if not comm:
        raise GridError("the process grid has been freed; its communicators and its matrices are no longer valid")


_MARK = "_pdgemm_raised_on"
_ON_ALL_RANKS = "_pdgemm_on_all_ranks"
_MOST = 4  # different calls that a message shows
_ARGUMENTS = 5  # arguments of each call that a message shows
_ADDRESS = re.compile(r" at 0x[0-9a-f]+\b")
_TUPLE = re.compile(r"[(\[][^()\[\]]*[)\]]")  # a tuple or a list


def warn_together(comm: MPI.Comm, message: str) -> None:
    """Warn on all ranks of a communicator, at the line of the user's program that made the call.  Collective.

    The category is `scipy.linalg.LinAlgWarning`.  All ranks warn, because a program that records warnings may branch on
    them.  Where a filter of any rank turns the warning into an exception, the exception is raised on all ranks.
    """
    from scipy.linalg import LinAlgWarning

    warning = LinAlgWarning(message)
    setattr(warning, _ON_ALL_RANKS, True)
    with together(comm):
        warnings.warn(warning, stacklevel=_level())


def _level() -> int:
    """Return the `stacklevel` of the innermost line of the user's program, counted from the caller of this function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and not of_user(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def print_once(say: Callable[[str], object] | None = None) -> None:
    """Let only rank 0 of the job print the warnings of `warn_together`; other warnings are printed as before.

    say : function that prints the text of a warning; by default Python prints the text and the line of the program.
    Programs that record warnings (`warnings.catch_warnings`) still get the warnings on all ranks.
    """
    show: Any = warnings.showwarning

    def once(message: Any, *where: Any, **how: Any) -> None:
        if not hasattr(message, _ON_ALL_RANKS):
            show(message, *where, **how)
        elif launcher.launched_rank() == 0:
            say(str(message)) if say else show(message, *where, **how)

    warnings.showwarning = once


class GuardedCallback:
    """A user's callback that is not called again after its first exception, which `error` then holds.

    An exception in the middle of a collective operation would leave the other ranks waiting; an exception on all ranks
    would leave messages that the next operation would receive.  So any exception, also KeyboardInterrupt, is raised at
    the end of the operation.
    """

    def __init__(self, callback: Callable[[int, int], object] | None) -> None:
        self._callback = callback
        self.error: BaseException | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._callback is not None and self.error is None:
            try:
                self._callback(done, total)
            except BaseException as bad:
                self.error = bad


def _sendable(error: BaseException | None, failed: list[int], size: int) -> BaseException:
    """Return the error in the form that is sent to other ranks: it can be pickled, and names the ranks that failed."""
    assert error is not None
    if isinstance(error, MemoryError) and not isinstance(error, PdgemmError):
        error = OutOfMemoryError(str(error) or "out of memory")
    where = f" [{ranks_text(failed)} of {size}]" if len(failed) < size else ""
    if line := _place(error):  # other ranks have no traceback with this line
        error.add_note(line)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of some library that cannot be pickled
        error = PdgemmError(f"{type(error).__name__}: {error}")
    if isinstance(error, PdgemmError) and len(error.args) == 1:
        error.args = (f"{error.args[0]}{where}",)
    elif where:
        error.add_note(where.strip())
    return error


def _place(error: BaseException) -> str:
    """Return the line that raised an exception: of the user's code or, for a mistake in the package, of the package."""
    frames = traceback.extract_tb(error.__traceback__)  # the traceback begins inside the package
    called = [x for x in frames if of_user(x.filename) and x.line]
    if not called and (not frames or isinstance(error, PdgemmError) or (frames[-1].line or "").startswith("raise")):
        return ""
    where = (called or frames)[-1]
    return f"raised in {where.filename}, line {where.lineno}, in {where.name}"


def _disagreement(descriptions: list[str]) -> str:
    """Return a message that shows, for each group of ranks, the arguments in which the groups differ.

    The text after a line break in a description is shown only where the texts before the line breaks are equal.
    """
    if len({text.partition("\n")[0] for text in descriptions}) > 1:
        descriptions = [text.partition("\n")[0] for text in descriptions]
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        groups.setdefault(text.replace("\n", ", "), []).append(rank)
    parts = [_arguments(text) for text in groups]
    same = _common_items(parts)
    alike = _common_items([part[same:][::-1] for part in parts])
    differ = [[*part[: min(same, 1)], *part[same : len(part) - alike]] for part in parts]  # with the function's name
    cut = (", ".join([*items[:_ARGUMENTS], *["..."] * (len(items) > _ARGUMENTS)]) for items in differ)
    calls = [f"{ranks_text(ranks)}: {text}" for text, ranks in zip(cut, groups.values())]
    more = f"; and {len(calls) - _MOST} others" if len(calls) > _MOST else ""
    return f"the ranks were called with different arguments: {'; '.join(calls[:_MOST])}{more}"


def _arguments(text: str) -> list[str]:
    """Divide a description into its arguments; commas within a tuple or a list do not divide it."""
    kept = _TUPLE.sub(lambda match: match[0].replace(", ", ",\0"), text)
    return [argument.replace("\0", " ") for argument in kept.split(", ")]


def _common_items(parts: list[list[str]]) -> int:
    """Return the length of the common beginning of all lists."""
    return next((n for n, items in enumerate(zip(*parts)) if len({*items}) > 1), min(map(len, parts)))
