"""Checks of arguments in a step: a sum of one word where nothing is wrong, and else an exception on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel.dropped_messages import last_tag
from pdgemm.schedules.collectives.collective import sum_of_numbers
from pdgemm.support.agreement import agree, raised_on, together
from pdgemm.support.waits import this_rank
from pdgemm.transport.collectives import prepared_collective
from pdgemm.transport.movers.arrivals import Transfers

_MEET, _AGREE, CALL = 3, 4, 5  # message tags of meetings and calls; collectives of a mesh have others
_CALLS, _LEAVES = 0, 1  # kinds of calls: to an agreement of the line, and from the line to one of the whole mesh
_ROUND = 2500  # failures, after which the tags of the first one are used again
AFTER_FAILURES = (CALL + 1) * _ROUND  # tags that are set apart, below the largest one


class LineChecks:
    """The checks of a line of a mesh.

    A rank whose arguments are wrong, or used for the first time, *calls* the other ranks of its line to `agree`.  A
    rank that waits for a collective of the line looks for calls, and joins: so all ranks raise the same exception.
    Arguments that are known are compared by checksums, in a sum of one word, as other ranks may come with other ones.

    A call has the number of its agreement, and the number of checks since the agreement before.  A rank that has come
    to the agreement by itself takes no notice, and one that waits in an earlier check joins when it comes to that one.
    After an exception of all ranks of the mesh, calls from before it count no more, and checks are counted anew.

    comm     : that of the line, on which the ranks agree.
    messages : another communicator of the same ranks, on which calls and all other messages of steps travel: those that
               an exception leaves behind match no receive of a product or of a file.
    transfers : those of the mesh, which go on while a rank waits here.
    whole    : the checks of the whole mesh, whose calls a rank that waits on any line joins, too; None: these are they.

    Before ranks wait where they look for no calls, they meet (`meet`, `assemble`).  A rank that joins an agreement of
    the whole mesh tells its lines to which meeting it has not come: those who wait in this one leave it, too.
    """

    def __init__(
        self, comm: MPI.Intracomm, messages: MPI.Intracomm, transfers: Transfers, whole: LineChecks | None = None
    ) -> None:
        self.comm, self.messages, self._whole, self.sent = comm, messages, whole, list[MPI.Request]()
        self._transfers, self._lines = transfers, list[LineChecks]()
        self._calls, self._since, self._passed = list[tuple[int, int, int]](), (-1, -1), 0
        self._meetings, self._agreeing = (0, 0), False  # how often ranks had failed, and the meetings since then
        self._left = list[tuple[int, int, int]]()  # the calls to the whole mesh's agreements for which ranks have left
        if whole:
            whole._lines.append(self)
        self.last: list[object] = []  # the arguments of the last check
        self.started = 0  # collectives that go on while this rank computes
        self.guarded = 0  # the blocks of `raised_together` in which this rank is

    def checked(self, known: set[Any], compare: bool = True) -> _Checked:
        """Return a block as `together`; the ranks agree only where a rank fails, or has arguments that are not known.

        known : the arguments on which the ranks have agreed; those of the block are added.
        compare : compare known arguments, too.
        """
        return _Checked(self, known, compare)

    @contextmanager
    def raised_together(self) -> Iterator[None]:
        """Raise an exception of the block, which may communicate, on all ranks."""
        begun, since = self.passed(1), self._so_far
        self.guarded += 1
        try:
            yield
        except Exception as error:
            if raised_on(error) != self.comm.size:
                self.call(begun if since == self._so_far else 0)  # ranks behind join when they are in the block
                self.agree(error)
            raise
        finally:
            self.guarded -= 1

    def call(self, checks: int) -> None:
        """Call the other ranks to the agreement that this rank enters next.  Local.

        checks : how many the others must have come to before they join.
        """
        self._send(_CALLS, *self._so_far, checks)

    def agree(self, error: Exception | None = None, description: str = "") -> None:
        """Agree as `agreement.agree`."""
        self.assemble()
        agree(self.comm, error, description)

    def assemble(self) -> None:
        """Wait until all ranks of the line have come to its next agreement; those of the whole mesh all come."""
        for line in self._lines:
            line._send(_LEAVES, self._agreements, line._met + 1, line._agreements + line._agreeing)
        if self._whole:
            self._agreeing = True
            try:
                self._wait_for_all(_AGREE, Traffic(), self._receive)
            finally:
                self._agreeing = False

    def meet(self, traffic: Traffic | None = None, number: float = 0.0) -> float:
        """Wait until all ranks of the line have come here, on all of them, or raise an exception on all.  Collective.

        Then ranks may wait for one another without looking for calls.   traffic : counts the one word that is summed.
        Returns the sum of the numbers of all ranks.
        """
        self._meetings = self.failures, self._met + 1
        return self._wait_for_all(_MEET, traffic or Traffic(), self._look_on_line, number)

    def differ(self, description: str) -> bool:
        """Have the ranks of the line come here with different arguments?  Collective."""
        rank, size = self.comm.rank, self.comm.size
        return size > 1 and self.meet(None, zero_if_equal(crc32(description.encode()), rank, size)) != 0

    def look(self) -> None:
        """Join an agreement to which another rank has called, and raise its exception."""
        self._look_on_line()
        if self._whole:
            self._whole.look()

    def _wait_for_all(self, tag: int, traffic: Traffic, look: Callable[[], object], number: float = 0.0) -> float:
        """Return the sum of a number over the line.

        Where this wait ends on one rank it has to end on all, as that rank goes on to where it looks for no calls.  So
        ranks leave it for the whole mesh only where one has left before it came to it: then it ends on no rank.
        """

        def looks() -> None:
            look()
            if self._whole:
                at, before = self._whole._agreements, self._agreements if self._agreeing else self._met
                self._left = [x for x in self._left if x[0] >= at]
                if any(x[0] == at and x[1 + self._agreeing] == before for x in self._left):
                    self._whole.look()

        total = np.array([number])
        start = prepared_collective(sum_of_numbers(1, self.comm.size), self.messages, total, self.tag(tag))
        self._transfers.wait([start(traffic)], looks)
        return float(total[0])

    @property
    def _met(self) -> int:
        """The number of meetings since the last failure."""
        failures, meetings = self._meetings
        return meetings if failures == self.failures else 0

    def _look_on_line(self) -> None:
        self._receive()
        while self._calls:
            at = self._so_far
            self._calls = [x for x in self._calls if x[0] >= at[0] and x[1] >= at[1]]
            if not any(x[:2] == at and x[2] <= self.passed() for x in self._calls):
                break
            self.agree(description=", ".join(map(str, self.last)))

    def _receive(self) -> None:
        status = MPI.Status()
        while self.messages.Iprobe(MPI.ANY_SOURCE, CALL, status):
            self.messages.Recv(numbers := np.empty(4, int), status.source, CALL)
            kind, first, second, third = map(int, numbers)
            (self._left if kind == _LEAVES else self._calls).append((first, second, third))

    def _send(self, *numbers: int) -> None:
        """Send all others of the line a call: `_CALLS` with agreements, failures and checks, or `_LEAVES`.

        A rank that leaves sends the agreement of the whole mesh, and the next meeting and agreement of the line.
        """
        message, others = np.array(numbers), (rank for rank in range(self.comm.size) if rank != self.comm.rank)
        self.sent = [x for x in self.sent if not x.Test()] + [self.messages.Isend(message, x, CALL) for x in others]

    @property
    def _agreements(self) -> int:
        return this_rank.counters[self.comm.handle].agreed

    def passed(self, more: int = 0) -> int:
        """Return the number of checks since the last agreement or failure, after adding to it."""
        if self._since != self._so_far:
            self._since, self._passed = self._so_far, 0
        self._passed += more
        return self._passed

    @property
    def _so_far(self) -> tuple[int, int]:
        """The agreements of the line, and the failures of the line and of the mesh."""
        return self._agreements, self.failures

    @property
    def failures(self) -> int:
        """How often all ranks of the line, or of the mesh, have raised an exception together."""
        return this_rank.counters[self.comm.handle].raised + (self._whole.failures if self._whole else 0)

    def tag(self, tag: int) -> int:
        """Return a message tag, from 0 to CALL, which is another one after each failure, when messages may be left."""
        failures = self.failures
        return last_tag() - 1 - (CALL + 1) * (failures % _ROUND) - tag if failures else tag


class _Checked(together):
    """The block of `LineChecks.checked`."""

    __slots__ = ("_checks", "_compare", "_known")

    def __init__(self, checks: LineChecks, known: set[Any], compare: bool) -> None:
        super().__init__(checks.comm)
        self._checks, self._known, self._compare = checks, known, compare

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        passed = self._checks.passed(1)
        arguments = self._checks.last = self._arguments if error is None else ["a call that failed"]
        known = error is None and (key := tuple(arguments)) in self._known
        if known and not (self._compare and self._checks.differ(", ".join(map(str, arguments)))):
            return
        if self._comm.size > 1 and (error is None or isinstance(error, Exception)):
            self._checks.call(passed)
            self._checks.assemble()
        super().__exit__(kind, error, trace)
        if error is None:
            self._known.add(key)


def zero_if_equal(number: int, rank: int, size: int) -> float:
    """Return what a rank adds to a sum over all ranks that is 0 where their numbers, of 32 bits, are equal.  Local."""
    return float(number if rank else number * (1 - size))
