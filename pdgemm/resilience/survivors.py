"""`resilient`: a program continues with fewer ranks when a rank is killed, from matrices that are still in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple, Self

from mpi4py import MPI

from pdgemm.errors import ArgumentError, GridError, PdgemmError
from pdgemm.grids.node_memory import abandon
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.resilience.kept_state import KeptState
from pdgemm.support import failures, watchdog
from pdgemm.support.agreement import agree, raised_on, together
from pdgemm.support.files import say
from pdgemm.support.text import counted, ranks_text
from pdgemm.support.waits import Wait

_DONE, _ALIKE = 1, 2  # bits; ranks agree on the bits that all ranks have set
_IN_VAIN = 3  # the most consecutive recoveries in which no rank has failed


class Recovery(NamedTuple):
    """The record of a recovery after ranks failed.

    lost    : the ranks that failed, in the numbering of the first communicator.
    ranks   : the number of surviving ranks.
    memory  : True: the matrices were still in memory; False: the matrices were created again.
    words   : elements that this rank received in the recovery.
    seconds : from the end of the step that failed to the beginning of the next step.
    """

    lost: tuple[int, ...]
    ranks: int
    memory: bool
    words: int
    seconds: float


class resilient:
    """A `with` block in which the surviving ranks continue when a rank is killed.  Collective over `comm`.

    ::

        def make(grid):                                 # called first, and again where a matrix is lost
            return {"A": hdf5.load("a.h5", "A", grid=grid), "X": DistMatrix.eye(1000, grid=grid), "k": 0}

        def step(state):                                # creates new matrices, and changes no matrix of its argument
            return {**state, "X": state["A"] @ state["X"], "k": state["k"] + 1}

        with pdgemm.resilient() as r:
            state = r.run(make, step, lambda state: state["k"] == 10)

    comm     : intracommunicator, by default MPI.COMM_WORLD.  It is duplicated.
    grid     : a function that creates a process grid over a communicator.  It is called again after each failure, with
               a communicator of fewer ranks.
    patience : seconds from a failure until surviving ranks have agreed which step to repeat, or end with exit code 3.
               A rank whose step has not ended after two thirds of this time, because it hangs or computes for so long,
               is ended, and the other ranks continue without it.

    `r.comm` and `r.grid` have the surviving ranks; `r.recoveries` is the list of the `Recovery` records.

    The class needs Open MPI 5 and `mpirun --with-ft ulfm`.  Otherwise `r.why_not` says why the class has no effect,
    rank 0 prints this reason, and a rank that is killed ends the whole job.  After the block a rank that is killed ends
    the job, too, with exit code 3.

    Cost without a failure: after each step two allreduces and an agreement (MPI_Comm_agree) of all ranks, and an
    allgather of three words per matrix on each node.  Matrices outside of node-shared memory are copied to this memory:
    results of elementwise functions and of `copy`.  No other matrix is copied.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        grid: Callable[[MPI.Intracomm], ProcessGrid] = ProcessGrid,
        patience: float = 60.0,
    ) -> None:
        self.comm = watchdog.watched(MPI.COMM_WORLD if comm is None else comm)
        self._grid_of, self._patience = grid, patience
        self.why_not = failures.why_not()
        self.recoveries: list[Recovery] = []
        self._inside = False  # inside the `with` block
        self._error: BaseException | None = None  # the exception that ended the last step on this rank
        self._in_vain = 0  # number of consecutive recoveries until now in which no rank had failed

    def __enter__(self) -> Self:
        nested = failures.detector.guards()
        if not self.why_not and failures.failed_ranks(self.comm):  # known to all surviving ranks
            raise GridError(
                "ranks of this communicator have failed; r.comm of the previous block has the surviving ranks"
            )
        if not (self.why_not or nested):
            failures.detector.guard(self.comm, 0)
        try:
            with together(self.comm) as arguments:
                if not (isinstance(self._patience, (int, float)) and self._patience > 0):
                    raise ArgumentError(f"patience must be a positive number of seconds, got {self._patience!r}")
                if nested:
                    raise GridError("blocks of pdgemm.resilient cannot be nested")
                arguments += ["resilient", f"patience={self._patience}", self.why_not]
            self.comm = self.comm.Dup()
        except MPI.Exception as bad:
            failures.detector.end_with_others(bad)
            raise
        except PdgemmError:
            if not nested:
                failures.detector.stop()
            raise
        self._first, self._inside = self.comm.Get_group(), True
        if not self.why_not:
            failures.detector.guard(self.comm, self._patience)
        elif not self.comm.rank:
            say(f"warning: a rank that is killed ends this job: {self.why_not}")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside = False
        failures.detector.end_with_others(error)

    @cached_property
    def grid(self) -> ProcessGrid:
        """The process grid of the surviving ranks.  Collective at its first use, and at the first after a failure."""
        return self._grid_of(self.comm)

    def run(
        self,
        make: Callable[[ProcessGrid], Mapping[str, Any]],
        step: Callable[[dict[str, Any]], Mapping[str, Any]],
        done: Callable[[dict[str, Any]], object] | None = None,
    ) -> dict[str, Any]:
        """Return the last state of make(grid), step(state), step(state), ...  Collective over `comm`.

        make : creates the first state on a grid.  `make` is called again, on the new grid, where the memory of a failed
               rank is lost, too; if `make` loads files that `step` has saved, little work is repeated.
        step : returns the next state.  A step takes effect when it has returned on all ranks; else the surviving ranks
               repeat the step from the same state.  So a step may replace a file, but not append to a file.
        done : returns whether a state is the last one, the same on all ranks.  By default there is one step.

        A state is a dict of matrices, on `grid` or other grids of its communicator, and of values that are equal on all
        ranks.  Its matrices are read-only in `step`: for C := A B + C, compute `pdgemm(1, A, B, 1, C.copy())`.
        Arrays, lists, dicts, sets and random generators are copied for each step; other objects must not be changed.

        When ranks fail, the surviving ranks create a new grid.  The matrices of a failed rank are read from the memory
        that it shares with its node, if a rank of the node survives, and each matrix is redistributed once, with the
        same block sizes, the first block at position (0, 0).  If any matrix is lost, `make` creates all matrices again.

        If no rank has failed, an exception on any rank is raised on all ranks.  After an exception on only one rank,
        matrices cannot be used any more.  (If the class has no effect, exceptions are raised as without it.)
        """
        if not self._inside:
            raise GridError("r.run(...) must be called inside the block `with pdgemm.resilient() as r:`")
        kept: KeptState | None = None
        while kept is None or not kept.last:
            following = self._attempt(partial(self._next, kept, make, step, done))
            kept = self._recovered(kept, make, done) if following is None else following
        return kept.handed_over()

    def _next(self, kept: KeptState | None, make: Any, step: Any, done: Any) -> KeptState:
        """Return the state after `kept`, or the first state where `kept` is None.  Collective."""
        if kept is None:
            return KeptState(make(self.grid), self.grid, done or (lambda state: False), not self.why_not)
        with kept.read_only() as state:
            return KeptState(step(state), self.grid, done or (lambda state: True), not self.why_not)

    def _attempt(self, work: Callable[[], KeptState]) -> KeptState | None:
        """Return the state of `work`; None if not all ranks completed it.  Raises an exception that all raised."""
        if self.why_not:
            return work()
        self._error, state, bits = None, None, 0
        try:
            state, bits = work(), _DONE | _ALIKE
        except BaseException as bad:  # SystemExit, too: the other ranks would wait for this rank
            self._error = bad
            if raised_on(bad) == self.comm.size:
                bits = _ALIKE
            else:
                failures.detector.revoke()
        agreed = self._agree(bits)
        if agreed & _ALIKE and not agreed & _DONE:
            self._raise()
        return state if agreed & _DONE else None

    def _agree(self, bits: int) -> int:
        """Return the bits that all ranks have set, or 0 where a rank has failed.  Collective; the same on all ranks."""
        with failures.detector.agreeing(), Wait():
            while True:
                try:
                    return int(self.comm.Agree(bits))
                except MPI.Exception as bad:  # on all ranks: a rank has failed, which not all ranks knew
                    if not failures.is_of_failure(bad):
                        raise
                    self.comm.Ack_failed()
                    bits = 0

    def _raise(self) -> None:
        """Raise the lowest rank's exception on all ranks; exceptions due to a failed rank do not count.  Collective."""
        error = None if failures.is_of_failure(self._error) else self._error
        if error is None or isinstance(error, Exception):
            agree(self.comm, error)
            return
        with suppress(PdgemmError):
            agree(self.comm, PdgemmError(f"a rank was ended by {type(error).__name__}: {error}"))
        raise error  # SystemExit, or KeyboardInterrupt

    def _recovered(self, kept: KeptState | None, make: Any, done: Any) -> KeptState:
        """Return the state from which the surviving ranks continue.  Collective over these ranks."""
        start, state, lost = perf_counter(), None, list[int]()
        while state is None:
            lost += self._shrink()
            state = self._attempt(partial(self._again, kept, make, done))
        abandon(MPI.Group.Translate_ranks(self._first, lost, MPI.COMM_WORLD.Get_group()))
        if not lost:
            return state
        memory = state.inherited_words is not None
        recovery = Recovery(tuple(lost), self.comm.size, memory, state.inherited_words or 0, perf_counter() - start)
        self.recoveries.append(recovery)
        if not self.comm.rank:
            source = "with the matrices that are in memory" if memory else "with matrices that are made again"
            left = counted(self.comm.size, "rank")
            gone = f"{ranks_text(sorted(lost))} of {self._first.size} failed"
            say(f"{gone}: {left} left, going on after {recovery.seconds:.2f} s {source}")
        return state

    def _again(self, kept: KeptState | None, make: Any, done: Any) -> KeptState:
        """Return the same state on the new grid, or the first state if a matrix is lost.  Collective."""
        state = None if kept is None else kept.inherited(self.grid)
        return self._next(None, make, None, done) if state is None else state

    def _shrink(self) -> list[int]:
        """Replace the communicator by one of the surviving ranks; return the failed ranks of the first communicator.

        If no rank has failed, raises the exception that ended the last step, on all ranks.
        """
        with failures.detector.agreeing(), Wait():
            shrunk = self.comm.Shrink()
        before, self.comm = self.comm.Get_group(), MPI.Intracomm(shrunk)
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        failures.detector.guard(self.comm, self._patience)
        if "grid" in self.__dict__:
            watchdog.of_process.unregister(self.__dict__.pop("grid").comm)
        gone = MPI.Group.Difference(before, self.comm.Get_group())
        if gone.size:
            self._in_vain = 0
            return [*MPI.Group.Translate_ranks(gone, [*range(gone.size)], self._first)]
        with suppress(MPI.Exception):  # another rank may fail in this call
            self._raise()
        self._in_vain += 1  # no rank has an exception if MPI reported one failure twice
        if self._in_vain > _IN_VAIN:
            raise GridError(
                f"no rank fails, and yet the step fails: {self._error}.  Does it use MPI.COMM_WORLD, or a grid or a "
                "matrix from before a failure?  r.comm and the matrices of the state have the surviving ranks"
            )
        return []
