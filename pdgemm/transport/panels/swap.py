"""An exchange of parts of vectors among all ranks of a grid, prepared once and carried out many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder, Traffic, nothing
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.support.waits import Wait


class Swap:
    """Each call gives the other ranks the current elements of parts of this rank's buffer, and takes theirs.

    leaving, coming : messages by rank; where arrays are read in place they are empty: signals.
    arrays : by rank, the part of that rank's buffer that this rank takes, current after each call.  Where it is read in
        place, it stays so until its owner hears from this rank again.
    traffic : of one call.   fence : orders reads and writes of memory that is read in place, and signals.

    A call costs about 2 us beyond the time of its messages: these are persistent requests of MPI.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        leaving: Mapping[int, Array],
        coming: Mapping[int, Array],
        tag: int,
        arrays: dict[int, Array],
        traffic: Traffic,
        recorder: Recorder,
        fence: Callable[[], object] = nothing,
    ) -> None:
        self.arrays, self._traffic, self._recorder, self._fence, self._calls = arrays, traffic, recorder, fence, 0
        self._requests = [comm.Recv_init(wire(x), source=rank, tag=tag) for rank, x in coming.items()]
        self._requests += [comm.Send_init(wire(x), dest=rank, tag=tag) for rank, x in leaving.items()]

    def __call__(self) -> None:
        if self._requests:
            with self._recorder.phase("wait"), Wait():
                self._fence()
                MPI.Prequest.Startall(self._requests)
                MPI.Request.Waitall(self._requests)
                self._fence()
            self._calls += 1

    def free(self) -> None:
        """Free the requests, and count the traffic of all calls; the exchange cannot be repeated after that."""
        self._recorder.traffic += Traffic(*(self._calls * number for number in vars(self._traffic).values()))
        for request in self._requests:
            request.Free()
        self._requests = []
