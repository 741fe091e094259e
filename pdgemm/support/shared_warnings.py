"""Warnings that all ranks are given, so that none goes another way than the others, and that are printed once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdgemm.support import launcher
from pdgemm.support.agreement import together
from pdgemm.support.source_lines import of_user

if TYPE_CHECKING:
    from mpi4py import MPI

_MARK = "_pdgemm_on_all_ranks"


def warn_together(comm: MPI.Comm, message: str) -> None:
    """Warn on all ranks of a communicator, at the line of the user's program that called.  Collective.

    The category is `scipy.linalg.LinAlgWarning`.  All ranks warn, because a program that records warnings may go on as
    these say.  Where a filter of any rank makes the warning an exception, it is raised on all ranks.
    """
    from scipy.linalg import LinAlgWarning

    warning = LinAlgWarning(message)
    setattr(warning, _MARK, True)
    with together(comm):
        warnings.warn(warning, stacklevel=_level())


def _level() -> int:
    """Return the `stacklevel` of the first line of the user's program, as the caller of this function counts."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and not of_user(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def print_once(say: Callable[[str], object] | None = None) -> None:
    """Let rank 0 of the job alone print warnings of all ranks; other warnings are printed as before.

    say : prints the text of one, by default as Python does, with the line.
    Programs that record warnings get them on all ranks, as `warnings.catch_warnings` prints none.
    """
    show: Any = warnings.showwarning

    def once(message: Any, *where: Any, **how: Any) -> None:
        if not hasattr(message, _MARK):
            show(message, *where, **how)
        elif launcher.rank() == 0:
            say(str(message)) if say else show(message, *where, **how)

    warnings.showwarning = once
