"""Messages in flight: a rank tests them while it multiplies, and waits for them."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

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
    """

    def __init__(self, recorder: Recorder | None = None, between_nodes: bool = False) -> None:
        self._recorder, self._coming = recorder or Recorder(), list[list[Arrival]]()
        self._between_nodes = between_nodes

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

    def complete(self) -> None:
        """Wait for all transfers that are tracked."""
        for group in [*self._coming]:
            self.wait(group)

    def poll(self) -> None:
        """Test which transfers have arrived, and let MPI make progress with the other receives and with sends."""
        self._progress()

    def _progress(self) -> None:
        MPI.COMM_SELF.Iprobe()
        if self._coming:
            for group in self._coming:
                _remove_complete(group)
            self._forget()

    def wait(self, group: list[Arrival]) -> None:
        """Wait until all transfers of a group are complete."""
        if group:
            with self._recorder.phase("wait"), Wait():
                if self._between_nodes:
                    poll_until(lambda: not _remove_complete(group), self._progress)
                for arrival in group:
                    arrival.Wait()
            group.clear()
            self._forget()

    def _forget(self) -> None:
        before, self._coming = self._coming, [group for group in self._coming if group]
        if before and not self._coming:
            seconds = self._recorder.seconds
            waited = seconds.get("wait", 0.0) - self._waited
            seconds["hidden"] = seconds.get("hidden", 0.0) + perf_counter() - self._since - waited


def _remove_complete(group: list[Arrival]) -> list[Arrival]:
    """Remove the complete transfers at the start of a group, and return the group."""
    while group and group[0].Test():
        del group[0]
    return group
