"""ProcessGrid: Cartesian and torus communicators, in one or more layers, and the node of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.errors import GridError
from pdgemm.grids.grid_shapes import grid_shape, listed_members
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.local.blas.threads import NodeCores, oversubscribed, share_cores
from pdgemm.support import failures, watchdog
from pdgemm.support.agreement import check_not_freed, together
from pdgemm.support.failures import tracked
from pdgemm.support.json_input import Count, Size, variable
from pdgemm.support.members import attribute_at

Value = TypeVar("Value")
WORK_GRIDS = 8  # grids that are cached for later products; each has three communicators


class ProcessGrid:
    """Pr x Pc ranks, periodic in both directions.  Collective over `comm`.

    ::

        ProcessGrid(comm, shape=(2, 3)) of 6 ranks         in 2 layers, 12 ranks

                 j=0   j=1   j=2                             layer 1    6   7   8
               +-----+-----+-----+                          layer 0   9  10  11
          i=0  |  0  |  1  |  2  |  row of i=0:              0   1   2
               +-----+-----+-----+  ranks 0 1 2              3   4   5
          i=1  |  3  |  4  |  5  |                          depth of (0, 0): ranks 0 6
               +-----+-----+-----+
          col of j=1: ranks 1 4

    Periodic: the right neighbour of rank 2 is rank 0, the lower neighbour of rank 3 is rank 0.

    comm   : intracommunicator, by default MPI.COMM_WORLD.  All grids of `comm` share one duplicate of it: no message of
             a grid matches a message of the caller, and ranks that mix up two grids get an exception instead of a hang.
    shape  : (Pr, Pc) with Pr * Pc ranks; by default the most nearly square one, Pr <= Pc.
    ranks  : the ranks of `comm` at the positions of the grid, row by row; by default all ranks in order.
             Ranks that are not listed are idle: they take part in every collective call and own no elements.

    Communicators: `comm` has all ranks, also idle ranks; `row`: same i and layer; `col`: same j and layer; `depth`:
    same (i, j); `node`: ranks that share `memory`.  Without `ranks`, rank = (layer * Pr + i) * Pc + j.  `T` is the
    transposed view of the grid: the rank at (i, j) of the grid is at (j, i) of `T`.

    memory : the memory that the ranks of this rank's node share.
    shares_memory : whether the ranks of every node can read each other's matrices, and some node has several ranks.
    nodes  : the node of each rank, named by the first rank on the node.

    Communicators are a limited resource, and freeing them is collective: use the grid as a context manager or call
    `free()`; matrices on the grid cannot be used afterwards.

    Threads: the first grid of a process reduces the number of BLAS threads to the rank's share of
    the cores of its node, unless OMP_NUM_THREADS or a similar variable is set (see `pdgemm.local.blas.threads`).

    PDGEMM_RANKS_PER_NODE=n treats each n consecutive ranks of a node as a separate node.
    PDGEMM_NODE_MEMORY is the largest number of bytes that the ranks of a node share, 0 for none; by default it is half
    of the free bytes in /dev/shm.

    2.5D products make grids of several layers, copies of a Pr x Pc plane, by `work_grid`.

    Raises GridError on every rank when shape and ranks do not fit the communicator.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        shape: tuple[int, int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        if isinstance(comm, (int, tuple, list)):
            raise GridError(
                f"the first argument must be a communicator, got {comm}; the shape of a grid is shape=(Pr, Pc)"
            )
        base = watchdog.watched(MPI.COMM_WORLD if comm is None else comm)
        with (agreed := together(base)) as arguments:
            ranks_per_node = variable("PDGEMM_RANKS_PER_NODE", Count, "a positive number")
            node_bytes = variable("PDGEMM_NODE_MEMORY", Size, "a number of bytes")
            watchdog.seconds()
            agreed.flag = _shared(base) is None  # after an exception only some ranks may have the duplicate
            members = range(base.size) if ranks is None else listed_members(ranks, base.size)
            self.shape, self.layers = grid_shape(len(members), shape), 1
            arguments += ["ProcessGrid", self.shape, *([] if ranks is None else members), ranks_per_node]
        self.ranks = np.array(members).reshape(1, *self.shape)
        shared = None if agreed.flag else _shared(base)
        self._shared = shared or _Shared(base, ranks_per_node, inf if node_bytes is None else node_bytes)
        self.comm: MPI.Intracomm = self._shared.comm
        self.rank, self.size = self.comm.rank, self.comm.size
        self._connect(base, members, self.ranks.shape)
        self._shared.grids += 1

    def _connect(self, base: MPI.Intracomm, members: Sequence[int], dims: tuple[int, ...]) -> None:
        """Create the row, column and depth communicators, and this rank's coordinates.  Collective over base."""
        cart = _cart(base, members, dims)
        self.row, self.col, self.depth = (
            tracked(cart.Sub([axis == kept for axis in range(3)])) if cart else MPI.COMM_NULL for kept in (2, 1, 0)
        )
        self.connected = True
        self.layer, i, j = cart.coords if cart else (-1, -1, -1)
        self.coords = (i, j)  # (-1, -1) on idle ranks
        if cart:
            failures.free_communicator(cart)

    def work_grid(self, shape: tuple[int, int], layers: int, rank_map: tuple[int, ...]) -> ProcessGrid:
        """Return a grid of the same communicator for use inside a product: this grid, a cached grid or a new grid.

        rank_map : the ranks, layer by layer, row by row.  Collective if the grid is new.  The last WORK_GRIDS grids are
        cached until the last grid of the communicator is freed, so that a repeated product creates no communicators.
        """
        check_not_freed(self.comm)
        if self.connected and (self.shape, self.layers, self.rank_map) == (shape, layers, rank_map):
            return self
        kept, key = self._shared.work_grids, (shape, layers, rank_map)
        if key not in kept:
            grid = self.base._reshaped(shape, layers, rank_map)
            grid._connect(self.comm, rank_map, (layers, *shape))
            kept[key] = grid
            if len(kept) > WORK_GRIDS:
                kept.pop(next(iter(kept)))._disconnect()
        kept[key] = kept.pop(key)  # the most recently used is last
        return kept[key]

    def _reshaped(self, shape: tuple[int, int], layers: int, rank_map: tuple[int, ...]) -> ProcessGrid:
        """Return a grid of another shape, with the row, column and depth communicators of this one until `_connect`."""
        grid = _same(self)
        for name in ("T", "_places", "rank_map"):
            grid.__dict__.pop(name, None)
        grid.shape, grid.layers, grid.ranks = shape, layers, np.array(rank_map).reshape(layers, *shape)
        return grid

    connected = True  # whether the grid has row, column and depth communicators

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the grid that the user made, of which this grid may be a view with other or fewer positions."""
        return self.__dict__.get("_members") or self.base.rank_map

    def reshaped(self, shape: tuple[int, int], rank_map: tuple[int, ...]) -> ProcessGrid:
        """Return a grid of the same communicator for the layout of a matrix.  Local.

        It has no row, column and depth communicators: products on it use those of `work_grid`.
        """
        if (self.shape, self.layers, self.rank_map) == (shape, 1, rank_map):
            return self
        grid = self.base._reshaped(shape, 1, rank_map)
        grid._members = self.members
        if not grid.draft:
            grid.coords = grid.coords_of(self.rank)
            grid.layer = -1 if min(grid.coords) < 0 else 0
        grid.connected, grid.row, grid.col, grid.depth = False, *(MPI.COMM_NULL,) * 3
        return grid

    def _disconnect(self) -> None:
        """Free the row, column and depth communicators.  Collective."""
        for line in (self.depth, self.col, self.row):
            if line != MPI.COMM_NULL:
                failures.free_communicator(line)

    _members: tuple[int, ...]
    draft: Any = None  # on a `PlannedGrid`: the `Draft` that collects the stages instead of running them

    def expected(self, value: Value, planned: Value) -> Value:
        """Return `value`, which depends on elements of matrices; on a `PlannedGrid`, `planned`, the usual value."""
        return value

    def iterations(self, most: int, usual: int) -> int:
        """Return `most`, the limit of an iteration's steps; on a `PlannedGrid`, `usual`, the usual number of steps."""
        return most

    transposed = False  # True for a transposed view

    @property
    def base(self) -> ProcessGrid:
        """The underlying grid: this grid or, if this is a transposed view, the grid of the view."""
        return self.T if self.transposed else self

    node: MPI.Intracomm = attribute_at("_shared.node")
    cores: NodeCores = attribute_at("_shared.cores")
    memory: NodeMemory = attribute_at("_shared.memory")
    shares_memory: bool = attribute_at("_shared.shares_memory")
    nodes: tuple[int, ...] = attribute_at("_shared.nodes")

    @property
    def ranks_per_node(self) -> int | None:
        """The largest number of ranks that share memory; None where all ranks share it."""
        most = self._shared.ranks_per_node
        return most if most < self.size else None

    @property
    def idle(self) -> bool:
        """Whether this rank has no position in the grid."""
        return self.layer < 0

    @cached_property
    def T(self) -> ProcessGrid:
        """The transposed view: the same ranks and communicators with rows and columns exchanged."""
        other = _same(self)
        other.shape, other.coords = self.shape[::-1], self.coords[::-1]
        other.ranks = self.ranks.transpose(0, 2, 1)
        other.row, other.col = self.col, self.row
        other.__dict__.update(T=self, transposed=not self.transposed)
        for name in ("_places", "rank_map"):
            other.__dict__.pop(name, None)
        return other

    def rank_of(self, i: int, j: int, layer: int = 0) -> int:
        """Return the rank at grid position (i, j), with i modulo Pr and j modulo Pc."""
        return int(self.ranks[layer, i % self.shape[0], j % self.shape[1]])

    def coords_of(self, rank: int) -> tuple[int, int]:
        """Return the grid position (i, j) of a rank; (-1, -1) if the rank is idle."""
        return self._places.get(rank, (-1, -1))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {int(self.ranks[at]): at[1:] for at in np.ndindex(*self.ranks.shape)}

    @cached_property
    def rank_map(self) -> tuple[int, ...]:
        """The ranks at the positions of the grid, layer by layer, row by row."""
        return tuple(self.ranks.ravel().tolist())

    def rank_map_in(self, other: ProcessGrid, part: bool = False) -> tuple[int, ...] | None:
        """Return `rank_map` as ranks of the other grid's communicator; None if the communicators have different ranks.

        part : the communicators may have different ranks; the result is None only if the other communicator lacks a
            rank that has a position in this grid.
        Raises GridError if only one of the two grids is a `PlannedGrid`.
        """
        check_not_freed(self.comm)
        if self.comm is not other.comm:
            check_not_freed(other.comm)
        if self.draft is not other.draft:
            raise GridError("the planned function uses matrices that are not arguments: pass all of them to plan")
        relation = MPI.IDENT if self.comm is other.comm else MPI.Group.Compare(self._shared.group, other._shared.group)
        if relation == MPI.IDENT:
            return self.rank_map
        if relation == MPI.UNEQUAL and not part:
            return None
        rank_map = MPI.Group.Translate_ranks(self._shared.group, list(self.rank_map), other._shared.group)
        return None if MPI.UNDEFINED in rank_map else tuple(rank_map)

    def same_as(self, other: ProcessGrid) -> bool:
        """Return whether both grids have the same ranks at the same positions, perhaps in two communicators.  Local."""
        return self is other or (
            (self.shape, self.layers) == (other.shape, other.layers) and self.rank_map_in(other) == other.rank_map
        )

    def free(self) -> None:
        """Free the communicators.  Collective; a second call does nothing."""
        if self.comm == MPI.COMM_NULL:
            return
        self.T.comm = self.comm = MPI.COMM_NULL  # type: ignore[assignment]
        self._disconnect()
        self._shared.grids -= 1
        if not self._shared.grids:
            for grid in self._shared.work_grids.values():
                grid._disconnect()
            failures.free_communicator(self._shared.node)
            self._shared.group.Free()
            if questions := watchdog.of_process.unregister(self._shared.comm):
                questions.Free()
            failures.free_communicator(self._shared.comm)

    def __copy__(self) -> ProcessGrid:
        """Return the grid itself, which all its matrices share."""
        return self

    def __deepcopy__(self, memo: object) -> ProcessGrid:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ProcessGrid has communicators of this process and cannot be pickled: make it on every rank, "
            "ProcessGrid(comm, shape)"
        )

    def __enter__(self) -> ProcessGrid:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # an exception may be raised only on this rank; `free` is collective and would wait for the other ranks
        if kind is None:
            self.free()

    def __str__(self) -> str:
        layers = f" x {self.layers}" if self.layers > 1 else ""
        return f"{self.shape[0]} x {self.shape[1]}{layers}"

    def __repr__(self) -> str:
        if self.comm == MPI.COMM_NULL:
            return f"ProcessGrid({self}, freed)"
        at = "is idle" if self.idle else f"at {self.coords}"
        return f"ProcessGrid({self}; rank {self.rank} of {self.size} {at})"


class _Shared:
    """The duplicate of a communicator that all grids of the communicator use, and the nodes of its ranks."""

    def __init__(self, comm: MPI.Intracomm, ranks_per_node: int | None, node_bytes: float) -> None:
        """Create the duplicate, and store it as an attribute of `comm`.  Collective.

        ranks_per_node : the number of consecutive ranks that are treated as a node; None: all ranks that share memory.
        node_bytes     : the largest number of bytes that the ranks of a node share.
        """
        self.comm = tracked(comm.Dup())
        self.group = self.comm.Get_group()
        watchdog.answer_questions(self.comm)
        self.grids = 0  # number of grids that have not been freed
        self.work_grids: dict[Any, ProcessGrid] = {}
        self.node = tracked(MPI.Intracomm(self.comm.Split_type(MPI.COMM_TYPE_SHARED)))
        with together(self.comm):  # a BLAS may be missing on some nodes
            share_cores(self.node)
        more_ranks_than_cores = oversubscribed(self.node)  # on the whole node, even if PDGEMM_RANKS_PER_NODE divides it
        if ranks_per_node is not None:
            whole, self.node = self.node, tracked(MPI.Intracomm(self.node.Split(self.node.rank // ranks_per_node)))
            failures.free_communicator(whole)
        self.cores = NodeCores.of(self.node)
        self.memory = NodeMemory(self.node, node_bytes, more_ranks_than_cores)
        self.nodes = tuple(self.comm.allgather(self.node.bcast(self.comm.rank)))
        self.ranks_per_node = max(Counter(self.nodes).values())
        here = self.memory.size > 0 or self.node.size == 1
        self.shares_memory = self.comm.allreduce(here, MPI.LAND) and self.ranks_per_node > 1
        comm.Set_attr(_DUPLICATE, self)


_DUPLICATE = MPI.Comm.Create_keyval()


def _same(grid: ProcessGrid) -> ProcessGrid:
    """Return a shallow copy of a grid; the caller then changes some attributes of the copy."""
    other = object.__new__(type(grid))
    other.__dict__.update(grid.__dict__)
    return other


def _shared(comm: MPI.Intracomm) -> _Shared | None:
    """Return the duplicate that the grids of `comm` share; None if it does not exist yet, or was freed.  Local."""
    shared: Any = comm.Get_attr(_DUPLICATE)
    return shared if shared is not None and shared.grids else None


def _cart(base: MPI.Intracomm, members: Sequence[int], dims: tuple[int, ...]) -> MPI.Cartcomm | None:
    """Return the Cartesian communicator of `members`, in this order; None on other ranks."""
    if base.rank not in members:
        base.Split(MPI.UNDEFINED)
        return None
    ordered = tracked(MPI.Intracomm(base.Split(0, key=members.index(base.rank))))
    cart = tracked(ordered.Create_cart(dims, periods=(False, True, True), reorder=False))
    failures.free_communicator(ordered)
    return cart


_default: list[ProcessGrid] = []  # of `set_default_grid`
_of_all_ranks: list[ProcessGrid] = []  # after the first call of `default_grid`


def default_grid() -> ProcessGrid:
    """Return the grid of `set_default_grid`, or the most nearly square grid of all ranks.

    The grid of all ranks is created at the first call, collectively over MPI.COMM_WORLD, is reused until the end of the
    program, and created again if it was freed.  A program that continues with fewer ranks (`pdgemm.resilient`) passes
    the grid of each step itself.
    """
    for grid in (*_default, *_of_all_ranks):
        if grid.comm:
            return grid
    _of_all_ranks[:] = [ProcessGrid()]
    return _of_all_ranks[0]


def set_default_grid(grid: ProcessGrid | None) -> None:
    """Let functions that get no grid use this one, until it is freed; None: the grid of all ranks.  Local.

    All ranks set the same grid; ranks that are not in its communicator call no function without a grid.
    """
    _default[:] = [] if grid is None else [grid.base]
