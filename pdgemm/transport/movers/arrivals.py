"""Messages in flight: a rank tests them while it multiplies, and waits for them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.support.waits import Wait, poll_until


class Arrival(Protocol):
    """A transfer of a part of a panel, received or sent: an MPI request, or a request followed by an action."""

    def Test(self) -> bool: ...
    def Wait(self) -> object: ...


class Transfers:
    """Tracks the messages in flight to this rank, in groups that arrive in order.

    MPI makes progress only inside its calls, and a rank forwards a panel only after it has seen the panel arrive;
    `poll` does both in the middle of a product.  The time in which messages were in flight and this rank did not wait
    for them is recorded as "hidden".

    between_nodes : while a rank waits for one group, it also tests all other messages.
    look : is called while a rank waits, if `between_nodes`; an exception that it raises ends the wait, and the
        transfers of the group are not tested any more.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        between_nodes: bool = False,
        look: Callable[[], object] = MPI.COMM_SELF.Iprobe,
    ) -> None:
        self._recorder, self._coming = recorder or Recorder(), list[list[Arrival]]()
        self._between_nodes, self._look, self._left = between_nodes, look, list[list[Arrival]]()
        self.interrupted = False  # by KeyboardInterrupt, of which other ranks are not informed

    def used(self, recorder: Recorder) -> Transfers:
        """Return this object, with `recorder` for a new run; each user of the object calls this method in each run."""
        if recorder is not self._recorder:
            self._recorder, self._coming = recorder, []  # an exception may have left groups in flight
        return self

    def expect(self, group: list[Arrival]) -> None:
        """Track a group of started transfers; transfers that are complete are removed from the list `group`."""
        if group:
            if not self._coming:
                self._since, self._waited = perf_counter(), self._recorder.seconds.get("wait", 0.0)
            self._coming.append(group)

    @property
    def in_flight(self) -> bool:
        """Are any tracked transfers not yet known to be complete?"""
        return bool(self._coming)

    @property
    def left(self) -> bool:
        """Are there transfers whose wait has ended with an exception?"""
        return bool(self._left)

    def leave(self, group: list[Arrival]) -> None:
        """Stop tracking a group that may never arrive; its arrays are retained, as MPI may still use them."""
        self._left.append([*group])
        self._coming = [x for x in self._coming if x is not group]

    def complete(self) -> None:
        """Wait for all transfers that are tracked."""
        for group in [*self._coming]:
            self.wait(group)

    def abandon(self) -> list[Arrival]:
        """Stop tracking all transfers, and return each transfer that was tracked or left, once.

        A transfer that was left may be tracked again; a request must not be passed to MPI twice.
        """
        groups = [*self._coming, *self._left]
        self._coming, self._left = [], []
        return [*{id(arrival): arrival for group in groups for arrival in group}.values()]

    def poll(self) -> None:
        """Test which transfers have arrived, and let MPI make progress with the other receives and with sends."""
        self._progress()

    def wait(self, group: list[Arrival], look: Callable[[], object] | None = None) -> None:
        """Wait until all transfers of a group are complete.   look : replaces `look` of this object."""
        if group:
            with self._recorder.phase("wait"), Wait():
                if self._between_nodes:
                    self._poll_until(group, look or self._look)
                for arrival in group:
                    arrival.Wait()
            group.clear()
            self._forget()

    def _poll_until(self, group: list[Arrival], look: Callable[[], object]) -> None:
        """Wait until a group is complete, and test all other groups meanwhile."""

        def meanwhile() -> None:
            look()
            self._progress()

        try:
            poll_until(lambda: not _remove_complete(group), meanwhile)
        except BaseException as error:  # also an interrupt: MPI may still use the arrays
            self.leave(group)
            self.interrupted = self.interrupted or isinstance(error, KeyboardInterrupt)
            raise

    def _progress(self) -> None:
        MPI.COMM_SELF.Iprobe()
        if self._coming:
            for group in self._coming:
                _remove_complete(group)
            self._forget()

    def _forget(self) -> None:
        before, self._coming = self._coming, [group for group in self._coming if group]
        if before and not self._coming:
            seconds = self._recorder.seconds
            waited = seconds.get("wait", 0.0) - self._waited
            seconds["hidden"] = seconds.get("hidden", 0.0) + perf_counter() - self._since - waited


def abandoned(arrival: Any) -> list[MPI.Request]:
    """Cancel a transfer: return its pending MPI requests."""
    requests: list[MPI.Request] = [arrival] if isinstance(arrival, MPI.Request) else arrival.abandon()
    return [request for request in requests if request]


def _remove_complete(group: list[Arrival]) -> list[Arrival]:
    """Remove the complete transfers at the start of a group, and return the group."""
    while group and group[0].Test():
        del group[0]
    return group
