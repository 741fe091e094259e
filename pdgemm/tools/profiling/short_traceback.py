"""The text of an exception as its user needs it: the error, and the user's own lines.

Frames of this package, of other installed packages and of the standard library are left out.  Where such a frame
raised an exception that this package does not raise on purpose, the innermost frame is kept: the mistake may be there.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from itertools import groupby, takewhile
from os import sep
from traceback import FrameSummary, TracebackException

from pdgemm.errors import PdgemmError
from pdgemm.support.agreement import raised_on
from pdgemm.support.source_lines import of_package, of_user

MOST = 10  # the most lines of the user; of more lines, those in the middle are left out


def short(error: BaseException) -> str:
    """Return the exception in one line, then the user's lines; then the exception that caused it, in the same form."""
    return "\n".join(_lines(TracebackException.from_exception(error, compact=True), error))


def whole(error: BaseException) -> str:
    """Return the exception as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()


def _lines(trace: TracebackException, error: BaseException) -> Iterator[str]:
    """Yield the lines of an error: its type and message, and the lines of the user's program that led to it."""
    *where, what = "".join(trace.format_exception_only()).rstrip().split("\n")
    if not isinstance(error, SyntaxError):  # its text begins with the faulty line
        where, what = [], "\n".join([*where, what])
    yield what
    runs = [[*run] for _, run in groupby(_of_user(trace.stack, error), key=lambda x: (x.filename, x.lineno))]
    if len(runs) > MOST:
        yield from _located(runs[:2])
        yield f"  ... {len(runs) - MOST} lines ..."
        runs = runs[2 - MOST :]
    yield from _located(runs)
    yield from where
    before, word = (trace.__cause__, error.__cause__), "caused by"
    if before[1] is None and not error.__suppress_context__:
        before, word = (trace.__context__, error.__context__), "while handling"
    if before[0] is not None and before[1] is not None:
        first, *rest = _lines(before[0], before[1])
        yield f"{word} {first}"
        yield from rest


def _of_user(frames: list[FrameSummary], error: BaseException) -> list[FrameSummary]:
    """Return the frames of the user's own files, and the innermost frame where the mistake may be there."""
    frames = [x for x in frames if not x.filename.startswith("<frozen") and not _runs_scripts(x)]
    if raised_on(error):  # deeper frames differ among the ranks; the message names the fault
        frames = [*takewhile(lambda x: not of_package(x.filename), frames)]
    own = [x for x in frames if of_user(x.filename)]
    if not own:  # the user may run an installed program
        own = [x for x in frames if not of_package(x.filename)]
    if frames and frames[-1] not in own and not raised_on(error) and not isinstance(error, PdgemmError):
        own.append(frames[-1])
    return own


def _runs_scripts(frame: FrameSummary) -> bool:
    return frame.filename.endswith((f"{sep}runpy.py", f"mpi4py{sep}run.py", f"cli{sep}script.py"))


def _located(runs: list[list[FrameSummary]]) -> Iterator[str]:
    for frame, *more in runs:
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        if frame.line:
            yield f"    {frame.line}"
        if more:
            yield f"    ({1 + len(more)} calls of this line, one inside the other)"
