"""Routing: rows of a matrix are sent to the ranks that own the rows' groups, and results are sent back.

In a mixture of experts, a row is a token, and its group is the expert that processes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.redistribution import between_nodes, timed_exchange, transfer_ways
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, GridError, LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.index_map import IndexPairs, identity, merged
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.run_report import RunReport, report_of_move
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device
from pdgemm.local.arrays.dtypes import can_convert
from pdgemm.local.arrays.elementwise import CONVERT, Combine, scale
from pdgemm.matrix.argument_checks import as_scalar, check_matrices, check_result, communicator
from pdgemm.matrix.batch import Batch
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import all_shared, new_array, shared_or_sent
from pdgemm.schedules.exchanges.exchange import RoutedRows, plan_routed
from pdgemm.support.agreement import described_elements, together
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.exchange_buffers import ExchangeBuffers
from pdgemm.transport.packed_exchange import repeated_if_unmapped

Owners = Batch | Sequence[int] | np.ndarray


def plan_grouped(X: DistMatrix, groups: Any, owner: Owners) -> Routing:
    """Return the routing of the rows of X to the ranks that own the rows' groups.  Collective over the grid of X.

    X      : DistMatrix (m, d) in any layout; its elements are not read.
    groups : integers, (local rows of X) or (local rows, k): the group, or the k groups, of each row that this rank
             holds; -1 for none.  Ranks that hold the same rows pass the same groups.
    owner  : a Batch, or an integer array that is the same on all ranks: the rank that owns each group.

    Cost: every rank receives 4mk bytes, in one all-gather; memory for about 50mk bytes on every rank.
    Raises LayoutError, DTypeError, GridError or ArgumentError on every rank.
    """
    comm = communicator(X=X)
    with together(comm) as arguments:
        check_matrices(X=X)
        owners = checked_owners(owner, X)
        mine = _checked_groups(groups, X, len(owners))
        choices = mine.shape[1]
        arguments += ["plan_grouped", X.distribution, choices, described_elements(owners)]
        rows, parts = X.distribution.rows, X.distribution.cols.parts
        layout = Distribution(rows, BlockCyclic(choices, choices, parts))
        held = mine if X.grid.coords[1] <= 0 else mine[:, :0]
        own = DistMatrix(np.ascontiguousarray(held), X.grid, layout)
    every = own.allgather()
    with together(comm) as arguments:
        if not np.array_equal(every[rows.indices(X.grid.coords[0])], mine):
            raise ArgumentError("ranks that hold the same rows have passed different groups")
    return Routing(X, every, owners)


def checked_owners(owner: Owners, X: DistMatrix) -> np.ndarray:
    """Return the owner of each group.  Raises GridError or LayoutError, only on this rank."""
    comm = X.grid.comm
    if isinstance(owner, Batch):
        if MPI.Comm.Compare(owner.comm, comm) not in (MPI.IDENT, MPI.CONGRUENT):
            raise GridError(f"X and W are over different ranks: X is on {X.grid!r}, W over {owner.comm.size} ranks")
        owner = owner.owner
    owners = np.asarray(owner)
    if owners.ndim != 1 or not np.isin(owners, range(comm.size)).all():
        raise LayoutError(f"owner must be a list of ranks below {comm.size}, one for each group; got {owner}")
    return owners.astype(np.intp)


def _checked_groups(groups: Any, X: DistMatrix, number: int) -> np.ndarray:
    """Return the groups of this rank's rows, (local rows, k).  Raises only on this rank."""
    mine, rows = np.asarray(groups), X.stored.shape[0]
    where = f"for the {rows} rows of {X.distribution} that rank {X.grid.rank} of the {X.grid} grid holds"
    if mine.ndim not in (1, 2) or len(mine) != rows or 0 in mine.shape[1:]:
        raise LayoutError(f"groups must have shape ({rows},) or ({rows}, k) {where}, got {mine.shape}")
    if mine.dtype.kind not in "iu" and mine.size:
        raise DTypeError(f"groups must be integers {where}, got {mine.dtype}")
    outside = mine[(mine < -1) | (mine >= number)]
    if outside.size:
        raise ArgumentError(f"groups must be 0 to {number - 1}, or -1 for none, {where}, got {outside[0]}")
    return (mine if mine.ndim == 2 else mine[:, None]).astype(np.int32)


class Routing:
    """The assignment of rows to groups, and the exchanges of the rows with the groups' owners; see `plan_grouped`.

    sizes   : (groups), the number of rows of each group.   owner : (groups), the rank of each group.
    rows    : the number m of rows of the matrix.   choices : the number k of groups of each row.

    The owner of a group receives its rows in the order of the matrix.  With k > 1 a result has mk rows:
    row ik + j belongs to the j-th group of row i.  In the default layout these k rows are on the rank of row i.
    A routing may be used any number of times, as in forward and backward passes; it caches its planned exchanges.
    """

    def __init__(self, X: DistMatrix, groups: np.ndarray, owner: np.ndarray) -> None:
        """Make the routing from all groups (m, k), equal on all ranks.  Local; `plan_grouped` has checked them."""
        self.grid, self.owner, (self.rows, self.choices) = X.grid, owner, groups.shape
        self._layout, numbers = X.distribution, groups.ravel()
        turn = np.argsort(np.argsort(owner, kind="stable"))  # the place of each group: the groups of rank 0 are first
        chosen = np.flatnonzero(numbers >= 0)
        self._chosen = chosen[np.argsort(turn[numbers[chosen]], kind="stable")]  # in the order of places
        self.sizes = np.bincount(numbers[chosen], minlength=len(owner))
        owner.flags.writeable = self.sizes.flags.writeable = False
        self.counts = tuple(np.bincount(owner, self.sizes, X.grid.size).astype(int).tolist())  # rows of each rank
        self._no_group = np.flatnonzero(numbers < 0)
        places = np.arange(len(chosen))
        self._pairs = {  # key: the number of rows of the matrix, and the direction
            (self.rows * self.choices, False): IndexPairs(places, self._chosen),
            (self.rows, True): IndexPairs(self._chosen // self.choices, places),
            (self.rows * self.choices, True): IndexPairs(self._chosen, places),
        }
        self._plans: dict[object, RoutedRows] = {}

    def __repr__(self) -> str:
        most, total = self.sizes.max(initial=0), len(self._chosen)
        return (
            f"Routing({self.rows} rows, {self.choices} each of {len(self.owner)} groups; {total} rows are sent, "
            f"at most {most} in a group and {max(self.counts)} on a rank)"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a Routing has the grid of its matrix and cannot be pickled: pickle the groups")

    @property
    def imbalance(self) -> float:
        """The number of rows of the rank that gets the most rows, divided by the mean number over all ranks."""
        return max(self.counts) * self.grid.size / max(1, sum(self.counts))

    @repeated_if_unmapped
    def to_groups(self, X: DistMatrix, *, check: bool = True) -> Batch:
        """Return the rows of X by group: item g is (sizes[g], d), on the owner of g.  Collective over the grid.

        X : DistMatrix of any layout over the same ranks.  (m, d): each row is sent to its k groups.  (mk, d): row
            ik + j is sent to the j-th group of row i.

        The items are copies, whose elements may be changed; `.report` has the words that were sent.
        Cost per rank: each row is sent once to each of its groups on other ranks, packed, in one exchange.
        """
        start, comm = perf_counter(), communicator(X=X)

        def set_up(by_nodes: bool) -> tuple[Array, RoutedTransfer]:
            with (agreement := together(comm, check)) as arguments:
                check_matrices(X=X)
                rows = self.new_rows(X.shape[1], X.dtype, devices.of(X.stored))
                transfer = RoutedTransfer(self, X, rows, True, X.shared, by_nodes, agreement)
                arguments += ["to_groups", transfer.plan.description]
            return rows, transfer

        rows, transfer = shared_or_sent(comm, set_up)
        recorder = transfer()
        batch = self.batch_of(rows)
        batch.report = self._move_report(transfer, recorder, start)
        return batch

    @repeated_if_unmapped
    def to_rows(
        self, batch: Batch, Y: DistMatrix | None = None, *, beta: complex = 0, check: bool = True
    ) -> DistMatrix:
        """Compute Y := R + beta Y: the j-th group of row i returns row ik + j of R.  Collective over the grid.

        batch : item g is (sizes[g], n), on the owner of g.
        Y     : DistMatrix (mk, n) in any layout over the same ranks, overwritten; not read if beta is 0.  Rows without
                a group become beta Y.  None: Y is allocated; its row ik + j is on the ranks of row i of the
                matrix that `plan_grouped` was called with.

        Returns Y; `Y.report` has the words that were sent.  Cost: as `to_groups`.  If this rank's items are not
        contiguous parts of one array on the host, they are first copied into one array.
        """
        start, comm, new_result = perf_counter(), self.grid.comm, Y is None
        with together(comm, check) as arguments:
            self._check_batch(batch)
            width = int(batch.shapes[:, 1].max(initial=0)) if Y is None or len(batch) else Y.shape[1]
            if Y is None:
                beta, Y = 0, self.new_result(width, batch.dtype, batch.device)
            check_matrices(Y=Y)
            rows = self._rows_of(batch, width)
            arguments += ["to_rows", width, batch.dtype]
        transfer = self.transfer_to(Y, rows, beta, new_result, check)
        Y.report = self._move_report(transfer, transfer(), start)
        return Y

    # ------------------------------------------------------------------ shared by both directions and grouped products
    def new_rows(self, width: int, dtype: np.dtype, device: Device | None) -> Array:
        """Allocate an array for the rows of all groups of this rank, where other ranks can read it.  Local."""
        shape = self.counts[self.grid.rank], width
        if device is None and self.grid.memory.alone:
            return devices.own_memory(device).empty(shape, dtype)  # it reuses freed memory, whose pages are mapped
        return new_array(shape, dtype, "C", self.grid, device)

    def new_result(self, width: int, dtype: np.dtype, device: Device | None) -> DistMatrix:
        """Allocate a result (mk, width): row ik + j is on the ranks of row i of the routed matrix.  Local."""
        rows, k = self._layout.rows, self.choices
        rows = BlockCyclic(rows.n * k, rows.block * k, rows.parts, rows.source, rows.skip * k)
        layout = Distribution(rows, self._layout.cols.resized(width))
        return DistMatrix(
            new_array(layout.local_shape(self.grid.coords), dtype, "C", self.grid, device), self.grid, layout
        )

    def batch_of(self, rows: Array) -> Batch:
        """Return the batch whose items are this rank's groups in the array `rows`, one below the other.  Local."""
        shapes = np.stack([self.sizes, np.full(len(self.sizes), rows.shape[1])], axis=1)
        ends = np.cumsum([0, *self.sizes[self.owner == self.grid.rank]]).tolist()
        items: Any = [rows[start:stop] for start, stop in pairwise(ends)]
        if len({*self.sizes.tolist()}) == 1:
            items = rows.reshape(len(items), int(self.sizes[0]), rows.shape[1])
        elif not len(self.sizes):
            items = rows.reshape(0, 0, 0)
        return Batch(items, shapes, self.owner, rows.dtype, self.grid.comm, devices.of(rows))

    def transfer_to(self, Y: DistMatrix, rows: Array, beta: Any, new_result: bool, check: bool) -> RoutedTransfer:
        """Return the transfer Y := R + beta Y of `to_rows`.  Collective.

        rows : an array from `new_rows`, with the rows of this rank's groups.

        new_result : Y was allocated for this transfer.
        """
        shared = all_shared(rows, self.grid)

        def set_up(by_nodes: bool) -> RoutedTransfer:
            with (agreement := together(self.grid.comm, check)) as arguments:
                transfer = RoutedTransfer(self, Y, rows, False, shared, by_nodes, agreement, beta)
                arguments += ["to_rows", transfer.plan.description, f"beta={transfer.beta}"]
            return transfer

        transfer = shared_or_sent(self.grid.comm, set_up)
        if new_result:
            Y.shared = all_shared(Y.stored, Y.grid)
        return transfer

    def plan(
        self, X: DistMatrix, inward: bool, shared: bool, by_nodes: bool, copies_only: bool, dtype: np.dtype
    ) -> RoutedRows:
        """Return the plan of the exchange of the rows of X: to the groups (`inward`), or back.  Local.

        shared : ranks can read each other's source arrays.   by_nodes : two nodes may exchange one message.
        copies_only : beta is 0.   dtype : the type of the groups' rows.
        """
        pairs = self._pairs.get((X.shape[0], inward))
        if pairs is None:
            rows = " or ".join(str(m) for m in {self.rows * (1 if inward else self.choices), self.rows * self.choices})
            raise LayoutError(f"{'X' if inward else 'Y'} needs {rows} rows, got {X.distribution} on a {X.grid} grid")
        ways = transfer_ways(devices.of(X.stored), self.grid, shared, X.mpi_addressable)
        key = X.layout_in(self.grid), inward, pairs, by_nodes, copies_only, dtype, ways
        if key not in self._plans:
            direct = plan_routed(key[0], pairs, self.counts, inward, copies_only, dtype, *ways)
            self._plans[key] = between_nodes(direct, self.grid, by_nodes)
        return self._plans[key]

    def scale_others(self, Y: DistMatrix, beta: Any) -> None:
        """Compute Y[i] := beta Y[i] for all rows i without a group.  Local."""
        dimension, part = Y.distribution.rows, Y.layout_in(self.grid).coords(self.grid.rank)[0]
        local = dimension.to_local(self._no_group[dimension.owner(self._no_group) == part])
        if not len(local) or beta == 1 or not Y.stored.size:
            return
        lines = merged(local, local, np.ones(len(local), np.int64))
        if devices.of(Y.stored):
            copy_blocks(Y.stored, Y.stored, lines, identity(Y.stored.shape[1]), Combine(0, beta))
            return
        for first, length in zip(lines.target.tolist(), lines.lengths.tolist()):
            scale(beta, Y.stored[first : first + length])

    def _check_batch(self, batch: Any) -> None:
        if not isinstance(batch, Batch):
            raise DTypeError(f"batch must be a Batch, got {type(batch).__name__}")
        if not np.array_equal(batch.owner, self.owner) or not np.array_equal(batch.shapes[:, 0], self.sizes):
            raise LayoutError(f"the owners and the rows of {batch!r} do not match the groups of {self!r}")
        if len({*batch.shapes[:, 1].tolist()}) > 1:
            raise LayoutError(f"the rows of all groups must have the same length, got {batch!r}")

    def _rows_of(self, batch: Batch, width: int) -> Array:
        """Return the items of a batch as one array: a view if they are one array on the host, else a copy."""
        items = batch.items
        if isinstance(items, np.ndarray) and items.flags.c_contiguous:
            return items.reshape(-1, width) if items.size else items.reshape(self.counts[self.grid.rank], width)
        rows = self.new_rows(width, batch.dtype, batch.device)
        for item, place in zip(items, self.batch_of(rows).items):
            CONVERT(place, item)
        return rows

    def _move_report(self, transfer: RoutedTransfer, recorder: Recorder, start: float) -> RunReport:
        plan = transfer.plan
        ends = [str(plan.target if plan.inward else plan.source), f"{len(self.owner)} groups"]
        source, target = ends if not plan.inward else ends[::-1]
        seconds = perf_counter() - start
        return report_of_move(recorder, [plan], self.grid, seconds, name="rows", source=source, target=target)


class RoutedTransfer:
    """A planned exchange of rows, with its buffers: to the groups, or back, Y := R + beta Y with the returned rows R.

    X : the matrix.   rows : the rows of this rank's groups, from `Routing.new_rows`.
    shared, by_nodes : as in `Routing.plan`.   agreement : the block in which the caller makes the transfer.
    """

    def __init__(
        self, routing: Routing, X: DistMatrix, rows: Array, inward: bool, shared: bool, by_nodes: bool,
        agreement: together, beta: Any = 0,
    ) -> None:  # fmt: skip
        if devices.of(X.stored) is not devices.of(rows):
            where = devices.name_of(rows)
            raise DeviceError(f"the matrix is on {X.device}, rows of groups are on {where}: copy one with to_device")
        if not inward:
            check_result("Y", X, {})
            beta = as_scalar(beta, X.dtype, "beta")
            if X.shape[1] != rows.shape[1]:
                raise LayoutError(f"Y is {X.distribution}, but the rows of groups have {rows.shape[1]} elements")
            if not can_convert(rows.dtype, X.dtype):
                raise DTypeError(f"{rows.dtype} elements cannot become {X.dtype}")
        self.beta, self._routing, self._matrix, self._rows = beta, routing, X, rows
        self.plan = routing.plan(X, inward, shared, by_nodes, beta == 0, rows.dtype)
        agreement.check |= bool(self.plan.nodes)  # a rank may lack memory that the ranks of a node share
        self._buffers = ExchangeBuffers(self.plan, routing.grid.rank, devices.of(rows), routing.grid.memory)

    def __call__(self) -> Recorder:
        """Carry out the exchange; return the recorder of words and seconds.  Collective."""
        plan, buffers, grid, rows, X = self.plan, self._buffers, self._routing.grid, self._rows, self._matrix

        def scale_others(recorder: Recorder) -> None:
            if not plan.inward:
                with recorder.phase("pack"):
                    self._routing.scale_others(X, self.beta)

        source, target = (X.stored, rows) if plan.inward else (rows, X.stored)
        recorder = timed_exchange("redistribute", 1, source, self.beta, target, plan, buffers, grid, scale_others)
        recorder.hold(rows.nbytes)
        return recorder
