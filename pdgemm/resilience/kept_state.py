"""KeptState: the matrices from which a step of a program starts, and their places in the shared memory of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, GridError, NodeMemoryError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array
from pdgemm.matrix.batch import Batch
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.exchanges.exchange import plan_inheritance
from pdgemm.support.agreement import agree, together
from pdgemm.transport.exchange_buffers import ExchangeBuffers
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.packed_exchange import exchange, kept_if_it_fails

_COPIED = (np.ndarray, np.random.Generator, bytearray, list, dict, set)  # values that a step may change in place


class KeptState:
    """A state of a program; other ranks of the node can read the matrices of a failed rank.  Collective over the grid.

    values : the values by name.   last : function that returns whether the state is the last one.
    readable : matrices outside of node-shared memory are copied to this memory, if they fit.
    inherited_words : elements that this rank received when the state was moved from another grid; None: it was not.
    Raises ArgumentError or GridError on all ranks.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        grid: ProcessGrid,
        last: Callable[[dict[str, Any]], object],
        readable: bool = True,
        inherited_words: int | None = None,
    ) -> None:
        self.grid, self.inherited_words = grid, inherited_words
        with (agreed := together(grid.comm)) as arguments:
            self.state = _checked(values, grid)
            self._matrices = {name: x for name, x in self.state.items() if isinstance(x, DistMatrix)}
            private = {name: x for name, x in self._matrices.items() if not x.shared and not devices.of(x.stored)}
            copies = {name: _in_node_memory(x, grid) for name, x in private.items() if readable and grid.size > 1}
            self._matrices |= copies
            self.state |= copies
            arguments += ["the state", *self.state, *(x.layout_in(grid) for x in self._matrices.values())]
            agreed.flag = not all(_is_readable(x.stored, grid) for x in self._matrices.values())
        self._lost = bool(agreed.flag)  # True: matrices of a rank that fails cannot be read
        for x in copies.values():
            x.shared = not self._lost
        if self._matrices and not self._lost:
            exposed = {name: (x.stored, x.layout_in(grid)) for name, x in self._matrices.items()}
            self._near = NodeArrays(grid, **exposed)
        with self.read_only() as state:
            self.last = bool(last(state))
        agree(grid.comm, None, f"a state, the last: {self.last}")

    @contextmanager
    def read_only(self) -> Iterator[dict[str, Any]]:
        """Yield a copy of the state; inside the `with` block its matrices are read-only, except on devices.  Local."""
        arrays = [x.stored for x in self._matrices.values() if devices.writeable(x.stored) and not devices.of(x.stored)]
        try:
            for x in arrays:
                x.flags.writeable = False
            yield {name: deepcopy(x) if isinstance(x, _COPIED) else x for name, x in self.state.items()}
        finally:
            for x in arrays:
                x.flags.writeable = True

    def handed_over(self) -> dict[str, Any]:
        """Return the state; its matrices, and views of them made inside `read_only`, are writeable again.  Local."""
        for x in self._matrices.values():
            with suppress(ValueError, AttributeError):  # read-only memory
                x.stored.flags.writeable = True
        return self.state

    def inherited(self, grid: ProcessGrid) -> KeptState | None:
        """Return the same state on a grid of the surviving ranks; None where a matrix is lost.  Collective over `grid`.

        Each array of a failed rank is read by a surviving rank of the same node.
        """
        comm, ranks = grid.comm, range(self.grid.size)
        holders = MPI.Group.Translate_ranks(self.grid.comm.Get_group(), [*ranks], comm.Get_group())
        left = [rank for rank in ranks if holders[rank] != MPI.UNDEFINED]
        gone = [rank for rank in ranks if holders[rank] == MPI.UNDEFINED]
        for number, rank in enumerate(gone):
            near = [x for x in left if self.grid.nodes[x] == self.grid.nodes[rank]]
            if near:
                holders[rank] = holders[near[number % len(near)]]
        if self._lost or MPI.UNDEFINED in holders:
            return None
        self.grid.memory.fence()
        recorder = Recorder()
        moved = {name: self._moved(name, x, grid, tuple(holders), recorder) for name, x in self._matrices.items()}
        words = recorder.traffic.words_received
        return KeptState(self.state | moved, grid, lambda state: self.last, inherited_words=words)

    def _moved(
        self, name: str, x: DistMatrix, grid: ProcessGrid, holders: tuple[int, ...], recorder: Recorder
    ) -> DistMatrix:
        """Return a matrix on another grid, with the same block sizes."""
        comm = grid.comm
        moved = DistMatrix.empty(x.shape, grid=grid, block=x.block, dtype=x.dtype, order=x.order, device=x.device)
        with together(comm):
            source = replace(x.layout_in(self.grid), conjugated=False)
            plan = plan_inheritance(source, moved.layout_in(grid), comm.size, holders)
            buffers = ExchangeBuffers(plan, comm.rank)
            arrays = [self._near(name, rank) for rank in plan.held(comm.rank)]
        with kept_if_it_fails((buffers, moved)), np.errstate(all="ignore"):
            exchange(1, arrays, 0, moved.stored, plan, buffers, grid, recorder)
        moved.conjugated = x.conjugated
        return moved


def _is_readable(x: Array, grid: ProcessGrid) -> bool:
    """Return whether the other ranks of the node can read an array of this rank; True for an empty one."""
    return not x.size or (not devices.of(x) and grid.memory.lies_here(x))


def _in_node_memory(x: DistMatrix, grid: ProcessGrid) -> DistMatrix:
    """Return a copy that the ranks of the node can read; the matrix itself where the copy does not fit.  Local."""
    try:
        local = grid.memory.empty(x.stored.shape, x.dtype, x.order)
    except NodeMemoryError:
        return x
    local[...] = x.stored
    copy = type(x)(local, x.grid, x.distribution, x.order, x.conjugated)
    copy.report = x.later_report
    return copy


def _checked(values: Any, grid: ProcessGrid) -> dict[str, Any]:
    """Return a state as a dict.  Raises ArgumentError or GridError where one of its matrices could not be inherited."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ArgumentError(f"a state must be a dict of names and values, got {type(values).__name__}")
    for name, x in values.items():
        if not isinstance(x, DistMatrix) and _has_matrices(x):
            raise ArgumentError(f"each matrix of a state must have its own name, but {name!r} is a {type(x).__name__}")
        if isinstance(x, DistMatrix) and x.grid.comm is not grid.comm:
            raise GridError(f"{name!r} is on {x.grid!r}, which is of another communicator than {grid!r}")
    return dict(values)


def _has_matrices(x: Any) -> bool:
    """Return whether a value is a matrix or a batch, or contains one."""
    inside = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple, set)) else ()
    if is_dataclass(x) and not isinstance(x, type):
        inside = vars(x).values() if hasattr(x, "__dict__") else ()
    return isinstance(x, (DistMatrix, Batch)) or any(map(_has_matrices, inside))
