"""Mesh: the ranks of a communicator that train a model together, and their lines along each axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, DTypeError, GridError, MeshError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.local.arrays.arguments import as_whole
from pdgemm.parallel.dropped_messages import drop_messages, last_tag
from pdgemm.parallel.line_checks import AFTER_FAILURES, CALL, LineChecks
from pdgemm.schedules.collectives.collective import Collective, sum_of_array, sum_of_numbers
from pdgemm.schedules.training.mesh_shape import AXES, MeshShape
from pdgemm.support import failures, watchdog
from pdgemm.support.agreement import agree, check_not_freed, together
from pdgemm.support.memory_left import keep_freed_memory
from pdgemm.support.text import counted
from pdgemm.transport.collectives import prepared_collective
from pdgemm.transport.movers.arrivals import Arrival, Transfers

_SUMS = 0  # the message tag of sums


class Mesh:
    """A mesh of all ranks of a communicator.  Collective over `comm`.

    ::

        mesh = Mesh(dp=-1)                 # all ranks work on different samples
        mesh = Mesh(comm, dp=2, tp=4)      # 8 ranks: tp varies fastest, then cp, dp, pp

    comm : intracommunicator, by default MPI.COMM_WORLD.
    dp, cp, tp, pp, ep : the sizes, see `MeshShape`; one of dp, cp, tp and pp may be -1: as many ranks as there are.

    shape   : the `MeshShape`; `str(mesh.shape)` draws it.
    traffic : words and messages of this rank so far, by kind: "gradients", "parameters", "decisions" ...
    transfers : the collectives in progress.  A collective has several steps, so a rank that waits for one lets all
        others go on, for which other ranks may wait.
    workspaces : plans and buffers that layers share.

    The process keeps the memory that a step frees, for the next one: `pdgemm.support.memory_left.keep_freed_memory`.

    Raises MeshError on all ranks, before any rank communicates further, where the sizes do not multiply to the ranks or
    differ between ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm | None = None, *, dp: int = 1, cp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1
    ) -> None:
        base = watchdog.watched(MPI.COMM_WORLD if comm is None else comm)
        with together(base) as arguments:
            shape = _shape(base.size, {"dp": dp, "cp": cp, "tp": tp, "pp": pp}, ep)
            arguments += ["Mesh", shape.sizes, shape.ep]
        keep_freed_memory()  # of a step, which the next one takes again
        self.grid = ProcessGrid(base, shape=(1, base.size))
        self.shape = replace(shape, nodes=self.grid.nodes)
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.recorder = Recorder()
        self._lines, self._checks = dict[tuple[str, ...], ProcessGrid](), dict[int, LineChecks]()
        self.transfers = Transfers(self.recorder, True, lambda: whole.look())
        whole = self._checked(self.grid, failures.tracked(MPI.Intracomm(self.grid.comm.Dup())))
        self._tags = 1 + CALL  # of all messages but those of pipelines, from below
        self._step = 0  # tags of a step of the largest pipeline, from above
        self.workspaces: dict[Any, Any] = {}
        self._summed = set[Any]()  # the shapes and types of `all_reduce` on which the ranks have agreed

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of all ranks of the mesh."""
        return self.grid.comm

    @property
    def rank(self) -> int:
        return self.grid.rank

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis, or along several joined by "+", see `MeshShape`."""
        return self.shape.index(axis, self.rank)

    def length(self, axis: str) -> int:
        """Return the number of ranks of this rank's line along an axis."""
        return self.shape.length(axis, self.rank)

    def line(self, axis: str) -> ProcessGrid:
        """Return this rank's line along an axis as a 1 x d grid, whose rank is `index(axis)`.

        Collective over the line when it is called for an axis for the first time: other lines need not take part.
        Layers, buckets and optimizers call it when they are made; a rank in a first call looks for no errors of others.
        """
        if (axes := self.shape.axes(axis)) not in self._lines:
            if (ranks := self.shape.line(axis, self.rank)) == (*range(self.shape.size),):
                self._lines[axes] = self.grid
                return self.grid
            whole, members = self.checks(self.grid), self.comm.group.Incl(ranks)
            part = failures.tracked(MPI.Intracomm(self.comm.Create_group(members)))
            members.Free()
            self._lines[axes] = ProcessGrid(part, shape=(1, part.size))
            self._checked(self._lines[axes], part, whole)
        return self._lines[axes]

    def _checked(self, line: ProcessGrid, messages: MPI.Intracomm, whole: LineChecks | None = None) -> LineChecks:
        """Return the checks of a new line.  Local."""
        self._checks[line.comm.handle] = checks = LineChecks(line.comm, messages, self.transfers, whole)
        return checks

    def sum(self, *numbers: Any, axis: str = "dp", kind: str = "decisions") -> list[Any]:
        """Return the float64 sums of numbers and arrays over this rank's line.  Collective over it; one all-reduce.

        numbers : each a number, or an array of the same shape on all ranks; together they are small.
        axis    : of the line, or several joined by "+".   kind : of `traffic`, as which their words count.

        The result is the same to the bit on all ranks: decisions that all take depend on such numbers alone.  For large
        arrays there is `all_reduce`.  The ranks agree on shapes when they are new; what is no number on one rank, and
        shapes that differ then, raise an exception on all ranks of the line.
        """
        line = self.line(axis)
        with self.checks(line).checked(self._summed, compare=False) as arguments:
            values = [np.asarray(x, np.float64) for x in numbers]
            x = np.concatenate([np.zeros(0), *(value.ravel() for value in values)])
            arguments += ["Mesh.sum", axis, *(value.shape for value in values)]
        self._carried_out(sum_of_numbers(x.size, line.size), x, line, kind)
        ends = np.cumsum([value.size for value in values])
        sums = [x[end - value.size : end].reshape(value.shape) for value, end in zip(values, ends)]
        return [total if total.ndim else float(total) for total in sums]

    def all_reduce(self, x: np.ndarray, *, axis: str = "dp", kind: str = "sums") -> np.ndarray:
        """Return the sum of large arrays over this rank's line, in their own type.  Collective over it.

        x    : array of integers, real or complex numbers of NumPy, of the same shape and type on all ranks of the line.
        axis : of the line, or several joined by "+".   kind : of `traffic`, as which its words count.

        The result is the same to the bit on all ranks.  That of integers is exact modulo 2^bits, so it is also the same
        however its addends are divided among ranks; whether it can overflow is for the caller to know.
        Cost: of n words on d ranks 2 (d - 1)/d n come in for a rank, exactly (d - 2) w + n where it sums w of them,
        in 2 (d - 1) messages (`sum_of_array`); the ranks agree on each new shape and type once, in four words, and
        compare those that are known in a sum of one word.
        Raises ArgumentError or DTypeError on all ranks of the line.
        """
        line = self.line(axis)
        with self.checks(line).checked(self._summed) as arguments:
            if not isinstance(x, np.ndarray):
                raise ArgumentError(f"x of all_reduce is an array of NumPy, got {type(x).__name__} on rank {self.rank}")
            if x.dtype.kind not in "iufc":
                raise DTypeError(f"all_reduce sums integers and NumPy's floats, got {x.dtype} on rank {self.rank}")
            arguments += ["all_reduce", axis, kind, x.shape, x.dtype]
            total = x.copy(order="C")
        self._carried_out(sum_of_array(x.size, line.size, x.dtype), total.reshape(-1), line, kind)
        return total

    def _carried_out(self, collective: Collective, x: np.ndarray, line: ProcessGrid, kind: str) -> None:
        """Carry out a collective of a vector on a line; while this rank waits, all its other transfers go on."""
        checks = self.checks(line)
        start = prepared_collective(collective, checks.messages, x, checks.tag(_SUMS))
        self.transfers.wait([start(self.traffic[kind])], checks.look)

    def checks(self, line: ProcessGrid) -> LineChecks:
        """Return the checks of a line of this mesh, and the communicator of its messages.  Local."""
        check_not_freed(line.comm)
        if self.transfers.interrupted:
            raise GridError("messages of a step that was interrupted may be left: free the mesh, and make another one")
        return self._checks[line.comm.handle]

    def wait(self, group: list[Arrival], line: ProcessGrid) -> None:
        """Wait for collectives of a line, or raise what another rank of the line has called this one to raise."""
        self.transfers.wait(group, self.checks(line).look)

    @contextmanager
    def raised_together(self) -> Iterator[None]:
        """Return a block whose exception on one rank is raised on all ranks.

        ::

            with mesh.raised_together():
                ...                       # a step: passes, and optimizer.step

        Without an exception it costs nothing.  The other ranks raise it where they next wait for messages of a layer, a
        pipeline, of gradients or of a sum: so all of them come to such a place, as in a step they do.  What was on its
        way is lost; after `Buckets.clear` on all ranks buckets, and layers and pipelines at once, can be used again.

        KeyboardInterrupt is raised on its rank alone.  After one in a block, or in a wait, the mesh can only be freed:
        to use it raises GridError, as messages that are left could be taken for those of the next step.
        """
        checks = self.checks(self.grid)
        try:
            with checks.raised_together():
                yield
        except KeyboardInterrupt:
            self.transfers.interrupted = True
            raise

    def tags(self, number: int) -> range:
        """Return message tags that no other collective in progress on a line of this mesh has.  Local.

        All ranks of the mesh ask for the same numbers in the same order, and raise GridError together, see `step_tags`.
        """
        self._least_step_tag(self._tags + number, self._step)
        self._tags += number
        return range(self._tags - number, self._tags)

    def step_tags(self, number: int) -> range:
        """Return message tags of a step of a pipeline.  Local; the first time all ranks ask for the same number.

        Steps and pipelines have the same tags, as a rank begins a step when it has received all messages of the one
        before, and messages of one rank do not overtake one another.  After each failure they have others, as messages
        may be left: by the number of failures, which is the same on all ranks, and not by that of the steps, which some
        ranks have not begun.
        Raises GridError on all ranks where MPI has no more tags.
        """
        step = max(self._step, number)
        first, self._step = self._least_step_tag(self._tags, step), step
        return range(first, first + number)

    def _least_step_tag(self, dealt: int, step: int) -> int:
        """Return the first of the tags of a step.  Raises GridError where those dealt out from below come to it."""
        last, failures = last_tag(), self.checks(self.grid).failures
        if (first := last - AFTER_FAILURES - step * (failures + 1)) < dealt:
            raise GridError(
                f"MPI's largest message tag is {last}, and a mesh needs {last + dealt - first}: {dealt} for buckets, "
                f"{AFTER_FAILURES} for sums after failures, and {step} for a step of a pipeline, with as many after "
                f"each of {counted(failures, 'failure')}: free the mesh, and make another one"
            )
        return first

    def free(self) -> None:
        """Free the communicators.  Collective; a second call does nothing.

        What is in progress is completed first.  After an exception that all ranks have raised together, or an interrupt
        of all ranks, it is dropped, and so is what has been sent and not received.  To wait for something dropped
        raises GridError.  Where another rank raises an exception meanwhile (`raised_together`), this rank raises it,
        too, and nothing is freed.
        """
        checks = [*self._checks.values()]
        if checks:
            if not self._fails():
                self.transfers.complete()
            left = [*self.transfers.abandon(), *(request for x in checks for request in x.sent)]
            drop_messages([x.messages for x in checks], left)
            self._checks.clear()
        for line in self._lines.values():
            line.free()  # that of all ranks is the grid, and a second call does nothing
        for x in checks:
            failures.free_communicator(x.messages)
        self._lines.clear()
        self.workspaces.clear()
        self.grid.free()

    def _fails(self) -> bool:
        """Return whether a step has failed, or has ended before all ranks had begun the same transfers.  Collective."""
        with (agreed := together(self.comm)):
            agreed.flag = self.transfers.left or any(x.failures for x in self._checks.values())
        if agreed.flag:
            return True
        lines = [self._lines[axes] for axes in sorted(self._lines)]  # in the same order on all ranks
        grids = [*(line for line in lines if line is not self.grid), self.grid]
        checks = [self._checks[line.comm.handle] for line in grids]
        uneven = [agree(x.comm, flag=x.started) for x in checks] != [x.started for x in checks]
        return bool(agree(self.comm, flag=uneven))

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.free()

    def __repr__(self) -> str:
        return f"Mesh({self.shape.sizes})"


def _shape(size: int, sizes: dict[str, Any], ep: Any) -> MeshShape:
    """Return the shape of a mesh of `size` ranks, in which one size may be -1.  Raises MeshError."""
    sizes = {axis: as_whole(n, axis, -1) for axis, n in sizes.items()}
    open_axes = [axis for axis, n in sizes.items() if n == -1]
    if len(open_axes) > 1:
        raise MeshError(f"one axis of a mesh may be -1, got {' and '.join(open_axes)}")
    others = prod(n for n in sizes.values() if n != -1)
    if open_axes and others > 0:
        sizes[open_axes[0]] = size // others
    shape = MeshShape(**sizes, ep=as_whole(ep, "ep"))
    if shape.size != size:
        product = " x ".join(f"{axis} {sizes[axis]}" for axis in reversed(AXES) if sizes[axis] > 1) or "1"
        raise MeshError(f"{product} = {shape.size} on {size} ranks: the sizes of a mesh multiply to the ranks")
    return shape
