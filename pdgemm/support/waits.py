"""Waits of this rank for other ranks, as the watchdog sees them, and whether a process makes progress.

The communicators of the package have a class whose blocking calls are waits (`watched_calls`); code that waits for
requests, files or windows does so inside a `with Wait()` block.  A wait reads no clock, and costs a third of a
microsecond.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from math import inf
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import monotonic, perf_counter, process_time, sleep
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

    AnyComm = TypeVar("AnyComm", bound=MPI.Comm)

_SPIN, _NAP = 2e-3, 5e-5  # seconds: `poll_until` polls for _SPIN, and then sleeps for _NAP after each poll
_WORK = 0.01  # seconds of processor time per second above which a process is at work
# fmt: off
_BLOCKING = (
    "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Alltoallw", "Barrier", "Bcast", "Create_cart",
    "Create_group", "Dup", "Exscan", "Gather", "Gatherv", "Probe", "Recv", "Reduce", "Reduce_scatter", "Scan",
    "Scatter", "Scatterv", "Send", "Sendrecv", "Split", "Split_type", "Ssend", "Sub", "allgather", "allreduce",
    "alltoall", "barrier", "bcast", "exscan", "gather", "probe", "recv", "reduce", "scan", "scatter", "send",
    "sendrecv", "ssend",
)
# fmt: on


class CheckCounter:
    """Counts the checks of a communicator (`agreement.together`, `agree`) that this rank has reached.

    It also has what the watchdog knows about the other ranks, such as those that leave the program.

    question_comm : a duplicate for the watchdog's questions, which are not waits; None: the ranks cannot be asked.
    processes : for each rank, the namespace and the number of its process; the namespace is "" where it is unknown.
    """

    __slots__ = ("agreed", "later", "left", "processes", "question_comm", "questioned", "raised", "reached", "skipped")

    def __init__(self) -> None:
        self.question_comm: MPI.Intracomm | None = None
        self.processes = list[tuple[str, int]]()
        self.reached = self.agreed = self.raised = 0  # checks, agreements among them, and checks that raised
        self.skipped = 0  # the number of the last check that this rank skipped, with check=False
        self.questioned = -inf  # time.monotonic() of the last question of a lower rank about the check reached last
        self.later = ""  # arguments that the next agreement compares
        self.left = set[int]()  # ranks that have told this rank that they leave the program


class Wait:
    """A block in which this rank waits for other ranks.  A block inside another such block has no effect.

    comm  : the communicator on which the rank waits; None: that of the last check, for example in waits for requests.
    check : True where the rank waits in a check, for ranks that may never call the function.
    """

    __slots__ = ("_outermost", "check", "comm")

    def __init__(self, comm: MPI.Comm | None = None, check: bool = False) -> None:
        self.comm, self.check = comm, check

    def __enter__(self) -> None:
        self._outermost = this_rank.wait is None
        if self._outermost:
            this_rank.wait = self

    def __exit__(self, *error: object) -> None:
        if self._outermost:
            this_rank.wait = None

    @property
    def counter(self) -> CheckCounter | None:
        """The counter of the communicator on which this rank waits; None where its ranks cannot be asked."""
        counter = None if self.comm is None else this_rank.counters.get(self.comm.handle)
        if not self.check and (counter is None or counter.question_comm is None):
            counter = this_rank.last_check
        return counter if counter and counter.question_comm else None


def poll_until(done: Callable[[], object], meanwhile: Callable[[], object] | None = None) -> None:
    """Wait until `done` returns true, and call `meanwhile` after each call that returns false."""
    start = perf_counter()
    while not done():
        if meanwhile:
            meanwhile()
        if perf_counter() - start > _SPIN:
            sleep(_NAP)


class RankWaits:
    """The present wait of this rank (None: it does not wait), and the checks that it has reached."""

    def __init__(self) -> None:
        self.wait: Wait | None = None
        self.counters = defaultdict[int, CheckCounter](CheckCounter)  # counters by communicator handle
        self.last_check: CheckCounter | None = None

    def count_check(self, comm: MPI.Comm, check: bool) -> None:
        """Count a check that this rank has reached, or, with check=False, skips."""
        counter = self.last_check = self.counters[comm.handle]
        counter.reached += 1
        if check:
            counter.agreed += 1
        else:
            counter.skipped = counter.reached


this_rank = RankWaits()


def watched_calls(comm: AnyComm) -> AnyComm:
    """Return the communicator as an object whose blocking calls are recorded as waits.  Local."""
    kind: Any = type(comm)
    return comm if hasattr(kind, _MARK) else _watched(kind)(comm)


@cache
def _watched(kind: type) -> Any:
    def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def waits(self: MPI.Comm, *args: Any, **kwargs: Any) -> Any:
            with Wait(self):
                return call(self, *args, **kwargs)

        return waits

    calls = {name: waiting(getattr(kind, name)) for name in _BLOCKING if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**calls, _MARK: True, "__doc__": kind.__doc__})


_MARK = "_pdgemm_waits"


class Stillness:
    """The seconds for which this rank has made no progress; time in which its process is stopped does not count."""

    def __init__(self) -> None:
        self.seconds, self.wait = 0.0, this_rank.wait
        self._at, self._used, self._blocks = monotonic(), process_time(), _blocks()

    def look(self, most: float) -> None:
        """Update the seconds.  A wait that continues is not progress, unless files are read or written outside a check.

        most : the largest number of seconds that are counted for the time since the last update.
        """
        now, used, wait = monotonic(), process_time(), this_rank.wait
        blocks = self._blocks if wait and wait.check else _blocks()
        step = min(now - self._at, most)
        works = wait is None and used - self._used > _WORK * step
        moved = works or wait is not self.wait or blocks != self._blocks
        self.seconds = 0.0 if moved else self.seconds + step
        self._at, self._used, self._blocks, self.wait = now, used, blocks, wait


def _blocks() -> int:
    """Return the number of blocks that this process has read from files and written to files."""
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_inblock + usage.ru_oublock


def namespace() -> str:
    """Return a text that is equal for two processes that see each other's numbers; "" where it is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return ""


def process(where: str, number: int) -> tuple[str, int]:
    """Return the state of a process ("T": stopped) and its ticks of processor time; ("", 0) if they are unknown.

    where : the namespace of the process.
    """
    with suppress(OSError, ValueError, IndexError):
        if where and where == namespace():
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            return fields[0], int(fields[11]) + int(fields[12])
    return "", 0
