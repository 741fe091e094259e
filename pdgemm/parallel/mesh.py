"""Mesh: the ranks of a communicator that train a model together, and their lines along each axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.local.arrays.arguments import as_whole
from pdgemm.local.arrays.folds import Parts
from pdgemm.schedules.collectives.collective import Collective, sum_of_array, sum_of_numbers
from pdgemm.schedules.training.mesh_shape import AXES, MeshShape
from pdgemm.support import failures, watchdog
from pdgemm.support.agreement import together
from pdgemm.support.members import attribute_at
from pdgemm.support.memory_left import keep_freed_memory
from pdgemm.transport.collectives import CollectiveRun, Join, all_to_all, prepared_collective
from pdgemm.transport.movers.arrivals import Arrival, Transfers

Work = Callable[[], object]


class Mesh:
    """A mesh of all ranks of a communicator.  Collective over `comm`.

    ::

        mesh = Mesh(dp=-1)                 # all ranks work on different samples
        mesh = Mesh(comm, dp=2, tp=4)      # 8 ranks: tp varies fastest, then cp, dp, pp

    comm : intracommunicator, by default MPI.COMM_WORLD.
    dp, cp, tp, pp, ep : the sizes, see `MeshShape`; one of dp, cp, tp and pp may be -1: as many ranks as there are.

    comm, rank : the communicator of all ranks of the mesh, and the number of this rank in it.
    shape   : the `MeshShape`; `str(mesh.shape)` draws it.
    traffic : words and messages of this rank so far, by kind: "gradients", "parameters", "tensor", "pipeline" ...
    transfers : the collectives in progress.  A rank that waits for one tests all others, too.

    The process keeps the memory that a step frees for the next step: `pdgemm.support.memory_left.keep_freed_memory`.
    Raises MeshError on all ranks where the sizes do not multiply to the number of ranks or differ between ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm | None = None, *, dp: int = 1, cp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1
    ) -> None:
        base = watchdog.watched(MPI.COMM_WORLD if comm is None else comm)
        with together(base) as arguments:
            shape = _shape(base.size, {"dp": dp, "cp": cp, "tp": tp, "pp": pp}, ep)
            arguments += ["Mesh", shape.sizes, shape.ep]
        keep_freed_memory()
        self.grid = ProcessGrid(base, shape=(1, base.size))
        self.shape = replace(shape, nodes=self.grid.nodes)
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.recorder = Recorder()
        self.transfers = Transfers(self.recorder, between_nodes=True)
        self._lines = dict[tuple[str, ...], Line]()
        self.is_counting = False  # whether exchanges are counted and not carried out

    comm: MPI.Intracomm = attribute_at("grid.comm")
    rank: int = attribute_at("grid.rank")

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis, or along several joined by "+", see `MeshShape`."""
        return self.shape.index(axis, self.rank)

    def length(self, axis: str) -> int:
        """Return the number of ranks of this rank's line along an axis."""
        return self.shape.length(axis, self.rank)

    def line(self, axis: str, purpose: str = "") -> Line:
        """Return this rank's line along an axis.  Collective over the line when it is called for the first time.

        purpose : lines of different purposes have communicators of their own, whose messages cannot match.
        """
        key = (*self.shape.axes(axis), purpose)
        if key not in self._lines:
            members = self.comm.group.Incl(self.shape.line(axis, self.rank))
            comm = failures.tracked(MPI.Intracomm(self.comm.Create_group(members)))
            members.Free()
            self._lines[key] = Line(self, comm)
        return self._lines[key]

    def sum(self, *numbers: float, axis: str = "pp+dp+cp+tp") -> list[float]:
        """Return the sums of numbers over this rank's line, the same bits on all ranks.  Collective; one all-reduce."""
        x = np.array(numbers, np.float64)
        line = self.line(axis)
        line.carry_out(sum_of_numbers(len(x), line.size), x, "decisions")
        return [*map(float, x)]

    @contextmanager
    def counting(self) -> Iterator[dict[str, Traffic]]:
        """Return a block in which exchanges move nothing, and only count, by formula, what they would move.

        What a rank would receive has any values.  The result is the traffic of the block by kind.
        """
        carried_out, self.traffic, self.is_counting = self.traffic, defaultdict(Traffic), True
        try:
            yield self.traffic
        finally:
            self.traffic, self.is_counting = carried_out, False

    def free(self) -> None:
        """Free the communicators.  Collective; a second call does nothing."""
        self.transfers.complete()
        for line in self._lines.values():
            failures.free_communicator(line.comm)
        self._lines.clear()
        self.grid.free()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.free()

    def __repr__(self) -> str:
        return f"Mesh({self.shape.sizes})"


class Line:
    """The ranks that differ in their index along one axis of a mesh, and the collectives of flat arrays on them.

    comm : the communicator of their messages.   rank, size : this rank's index along the axis, and their number.
    """

    def __init__(self, mesh: Mesh, comm: MPI.Intracomm) -> None:
        self.mesh, self.comm, self.rank, self.size = mesh, comm, comm.rank, comm.size
        self._next_tag = 1

    def first_tag(self, number: int) -> int:
        """Return the first of so many tags, which no other call returns; ranks call it in the same order."""
        self._next_tag += number
        return self._next_tag - number

    def start(
        self, collective: Collective, x: np.ndarray, kind: str, tag: int = 0, join: Join | None = None
    ) -> Arrival:
        """Start a collective of a flat array, and return the arrival to wait for; x must not be touched until then.

        kind : under which `mesh.traffic` counts words.
        tag  : differs from other collectives in progress on this line; 0 is that of the methods that wait.
        """
        if self.mesh.is_counting:
            self.mesh.traffic[kind] += collective.traffic(self.rank)
            return CollectiveRun(self.comm, iter(()))
        return prepared_collective(collective, self.comm, x, tag, join=join)(self.mesh.traffic[kind])

    def carry_out(
        self, collective: Collective, x: np.ndarray, kind: str, join: Join | None = None, meanwhile: Work | None = None
    ) -> None:
        """Carry out a collective of a flat array, while all other transfers of the mesh go on.

        meanwhile : a computation during the collective, which polls `mesh.transfers` and does not touch x.
        """
        group = [self.start(collective, x, kind, join=join)] if self.size > 1 and collective.words else []
        if meanwhile:
            self.mesh.transfers.expect(group)
            meanwhile()
        self.mesh.transfers.wait(group)

    def gather(self, x: np.ndarray, counts: tuple[int, ...], kind: str) -> np.ndarray:
        """Return the rows of all ranks, in the order of the line.   counts : the number of rows of each rank."""
        whole = (np.zeros if self.mesh.is_counting else np.empty)((sum(counts), *x.shape[1:]), x.dtype)
        first = sum(counts[: self.rank])
        whole[first : first + len(x)] = x
        self.carry_out(self.of_rows("all_gather", counts, whole), whole.reshape(-1), kind)
        return whole

    def reduce(self, x: np.ndarray, counts: tuple[int, ...], kind: str, meanwhile: Work | None = None) -> np.ndarray:
        """Return the sums over the line of this rank's rows of x; x is overwritten.   meanwhile : as of `carry_out`."""
        self.carry_out(self.of_rows("reduce_scatter", counts, x), x.reshape(-1), kind, meanwhile=meanwhile)
        first = sum(counts[: self.rank])
        return x[first : first + counts[self.rank]]

    def exchange(self, x: np.ndarray, counts: np.ndarray, kind: str) -> np.ndarray:
        """Send rows of x to each rank, in the order of the line, and return the rows from all ranks.

        counts : (from, to), the number of rows from each rank to each rank, the same on all ranks.
        """
        width = prod(x.shape[1:])
        collective = self.of_pairs(counts * width, x.dtype)
        rows = (np.zeros if self.mesh.is_counting else np.empty)((counts[:, self.rank].sum(), *x.shape[1:]), x.dtype)
        if self.mesh.is_counting:
            self.mesh.traffic[kind] += collective.traffic(self.rank)
            return rows
        sent, received = (
            np.split(y.reshape(-1), np.cumsum(n[:-1]) * width)
            for y, n in ((x, counts[self.rank]), (rows, counts[:, self.rank]))
        )
        counted = self.mesh.traffic[kind]
        all_to_all(collective, self.comm, sent, counted, self.mesh.transfers.wait, into=received)
        return rows

    def start_sum(self, x: np.ndarray, kind: str, tag: int) -> Arrival:
        """Start the sum of a flat array over the line, which overwrites x; arguments as of `start`."""
        return self.start(sum_of_array(x.size, self.size, x.dtype), x, kind, tag)

    def sum(self, x: np.ndarray, kind: str, join: Join | None = None, meanwhile: Work | None = None) -> np.ndarray:
        """Return the sum over the line of a contiguous array, the same bits on all ranks; x is overwritten.

        Sums of integers are exact modulo 2^bits.   meanwhile : as of `carry_out`.
        Cost: of n words on p ranks, 2 (p - 1)/p n are received; where a rank adds w of them, (p - 2) w + n exactly.
        """
        if not x.flags.c_contiguous:
            raise ArgumentError(f"a sum over ranks overwrites a contiguous array, got strides {x.strides}")
        self.carry_out(sum_of_array(x.size, self.size, x.dtype), x.reshape(-1), kind, join, meanwhile)
        return x

    def largest(self, x: np.ndarray, kind: str) -> np.ndarray:
        """Return the largest of the ranks' elements at each place of x; x is overwritten."""
        return self.sum(x, kind, _larger)

    def of_rows(self, operation: str, counts: tuple[int, ...], x: np.ndarray) -> Collective:
        """Return the collective of the rows of x, of which each rank has `counts`."""
        width = prod(x.shape[1:])
        return collective_of(operation, tuple(rows * width for rows in counts), x.dtype)

    def of_pairs(self, words: np.ndarray, dtype: np.dtype) -> Collective:
        """Return the exchange of so many words from each rank to each rank."""
        return Collective("all_to_all", "pairwise", tuple(range(self.size)), tuple(words.ravel().tolist()), dtype)


@lru_cache(4096)
def collective_of(operation: str, counts: tuple[int, ...], dtype: np.dtype, algorithm: str = "pairwise") -> Collective:
    """Return a collective on a vector that is cut into parts of `counts` words, one for each rank of a line."""
    return Collective(operation, algorithm, tuple(range(len(counts))), counts, dtype)


def _larger(x: Parts, y: Parts) -> Parts:
    return tuple(map(np.maximum, x, y))


def _shape(size: int, sizes: dict[str, Any], ep: Any) -> MeshShape:
    """Return the shape of a mesh of `size` ranks, in which one size may be -1.  Raises MeshError."""
    sizes = {axis: as_whole(n, axis, -1) for axis, n in sizes.items()}
    open_axes = [axis for axis, n in sizes.items() if n == -1]
    if len(open_axes) > 1:
        raise MeshError(f"only one size of a mesh may be -1, got {' and '.join(open_axes)}")
    known = prod(n for n in sizes.values() if n != -1)
    if open_axes and known > 0 and size % known == 0:
        sizes[open_axes[0]] = size // known
    shape = MeshShape(**sizes, ep=as_whole(ep, "ep"))
    if shape.size != size:
        text = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] != 1) or "1 rank"
        raise MeshError(f"{text} is a mesh of {shape.size} ranks, but the communicator has {size}")
    return shape
