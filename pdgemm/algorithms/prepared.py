"""Prepared products: the views, communicators and executor of a plan, which are set up once, and the runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np

from pdgemm.algorithms.epilogue import Epilogue, EpilogueRun
from pdgemm.algorithms.plan_workspace import Workspace
from pdgemm.algorithms.product_options import OperandScales
from pdgemm.algorithms.product_report import report_of
from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.algorithms.products.executor import Call, Executor, executor_of
from pdgemm.algorithms.products.strips import strips_of
from pdgemm.algorithms.protection.repetition import protected
from pdgemm.algorithms.protection.row_checksums import RowChecksums
from pdgemm.algorithms.redistribution import move_report
from pdgemm.algorithms.transport_choice import mover_and_access
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError, MappingError
from pdgemm.grids.layout import Layout
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.log import INFO, LOG, log_plan
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.run_report import MoveReport
from pdgemm.instrument.spans import HOST
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device
from pdgemm.local.arrays.elementwise import CONVERT, Combine
from pdgemm.matrix.argument_checks import as_scalar
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.planner import explain, plan_product
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.schedules.mover_registry import AUTO, MOVERS, NCCL
from pdgemm.schedules.products import Product
from pdgemm.schedules.products.scales import strip_name
from pdgemm.schedules.staircase import Staircase
from pdgemm.support.agreement import GuardedCallback, agree, check_not_freed, together
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.packed_exchange import exchange, kept_if_it_fails

T = TypeVar("T")
SMALL = 1 << 14  # bytes of buffers that an executor may keep until C is formed again
FEW = 64  # panels that such an executor may keep, with a kilobyte of views each


class Prepared:
    """Computes a planned product C := alpha A B + beta C any number of times; made by `Plan.prepare`.

    Buffers, views, communicators and BLAS calls are set up once and kept as long as this object.  A, B and C are kept
    as long, too: their elements may change between calls, but not their addresses.
    """

    def __init__(
        self,
        plan: ProductPlan,
        alpha: Any,
        A: DistMatrix,
        B: DistMatrix,
        C: DistMatrix,
        workspace: Workspace,
        mirrored: bool = False,
        epilogue: Epilogue | None = None,
        scales: tuple[OperandScales | None, OperandScales | None] = (None, None),
        names: tuple[str, str] = ("A", "B"),
    ) -> None:
        self._scales = {strip_name(name): x.matrix.stored for name, x in zip("AB", scales) if x}
        self._alpha, self._matrices, self._mirrored = alpha, (A, B, C), mirrored  # B is A^H or A^T
        self._names = names
        self._result, self._epilogue, self.traffic = C, epilogue, Traffic()
        self._use(plan, workspace)

    def _use(self, plan: ProductPlan, workspace: Workspace) -> None:
        """Take a plan and its buffers."""
        self.plan, self._workspace, self._bytes = plan, workspace, workspace.nbytes
        self._moves = dict(plan.moves)
        self._end = EpilogueRun(self._epilogue, plan, self._result, workspace) if self._epilogue else None
        if self._end:
            self._matrices = *self._matrices[:2], self._end.sums
        self._grid: ProcessGrid | None = None  # the grid, peers, call and executor are set by `set_up` or the first run
        self._peers: NodeArrays | None = None
        self._call: Call[Product]
        self._multiply: Executor
        if LOG.isEnabledFor(INFO):
            mover = plan.product.transport
            how = f"{mover}, {MOVERS[mover].summary}" if mover in MOVERS else mover
            log_plan(self._matrices[0].grid.comm.rank, plan, how, partial(explain, plan), workspace.sizes)

    def set_up(self) -> Prepared:
        """Do the one-time work of the first run in advance, and return this object.  Collective over the grid.

        This creates communicators, also those of NCCL, maps memory of other GPUs, and compiles common kernels.
        """
        self._repeated_if_unmapped(self._meet)
        call, comm, device = self._call, self._matrices[0].grid.comm, devices.of(self._call.C)
        if device is None:
            return self
        with together(comm) as description:  # device memory may be full on some ranks
            description.append("the first calls of a prepared product")
            if not call.grid.idle and call.C.size and call.A.shape[1]:
                once = recorder_of(call.C)
                with once.phase("compute"):
                    _first_calls(call, device)
                once.finish()
        lines = (call.grid.row, call.grid.col, call.grid.depth) if call.product.nccl and not call.grid.idle else ()
        for line in (*lines, *[comm] * any(move.nccl for move in self._moves.values())):
            if line.size > 1:
                device.exchange(line, [], [])
        return self

    def __call__(self, beta: complex = 0, *, check: bool = True) -> DistMatrix:
        """Compute C := alpha A B + beta C from the current elements, and return C.  Collective over the grid.

        beta  : 0, or any number if the plan was made for a nonzero beta.
        check : False skips the allreduce that makes all ranks raise the same exception.
        """
        start = perf_counter()
        with together(self._matrices[0].grid.comm, check) as description:
            for matrix in self._matrices:
                check_not_freed(matrix.grid.comm)
            beta = beta_of(beta, self._result, self.plan)
            description += [f"a prepared product, beta={beta}", self.plan.description]
            description += [self._epilogue.described()] if self._epilogue else []
        return self.run(beta, start)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a prepared product has buffers and communicators of this process and cannot be copied or pickled: "
            "keep its plan, and prepare it again, plan.prepare(A, B, C)"
        )

    def run(
        self,
        beta: Any,
        start: float,
        progress: Callable[[int, int], object] | None = None,
        agreed: bool = False,
    ) -> DistMatrix:
        """Compute C, its epilogue included, and set its report.  Arguments: `_run`."""
        if self._end is None:
            return self._multiplied(beta, start, progress, agreed)
        self._end.begin(beta)
        self._multiplied(beta, start, progress, agreed)
        return self._end.end()

    def _multiplied(
        self, beta: Any, start: float, progress: Callable[[int, int], object] | None, agreed: bool
    ) -> DistMatrix:
        """Compute the sums, and compare them with their checksums if the plan protects them.  Arguments: `_run`."""
        problem, C, comm = self.plan.problem, self._matrices[2], self._matrices[0].grid.comm
        if not problem.protect:
            return self._repeated_if_unmapped(partial(self._run, beta, start, progress, agreed))
        buffers = self._workspace.checks
        checks = RowChecksums(self._alpha, self._matrices, beta, buffers, problem.accumulate, problem.compute)
        entry = buffers["C on entry"].reshape(C.stored.shape, order=C.order) if "C on entry" in buffers else None
        run, planned = partial(self._run, beta, start, progress, agreed), self.plan.checks(comm.rank)
        outcome, report = protected(run, C, checks, problem.protect == "repair", planned, entry), C._report
        C.report = lambda: report().changed(checks=outcome)
        return C

    def _repeated_if_unmapped(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, by another plan where ranks cannot map each other's memory.  Collective."""
        try:
            return work()
        except MappingError:  # nothing has been written to C yet
            A, B, C = self._matrices
            plan = sent_instead(self.plan, A, B, C)
            if plan is self.plan:
                raise
        with together(A.grid.comm) as description:
            description.append(plan.description)
            workspace = Workspace(plan, A, B)
        begun = self._end and self._end.beta
        self._use(plan, workspace)
        if self._end and begun is not None:
            self._end.begin(begun)
        return work()

    def _run(
        self,
        beta: Any,
        start: float,
        progress: Callable[[int, int], object] | None = None,
        agreed: bool = False,
    ) -> DistMatrix:
        """Redistribute A and B where necessary, multiply, redistribute C back, and set its report.

        start    : the time at which the call began.
        agreed   : all ranks know that some rank passed `progress`; an exception of `progress` is raised on all ranks.
        """
        (A, B, C), workspace, plan, moves = self._matrices, self._workspace, self.plan, self._moves
        comm, reports, trace = A.grid.comm, list[Callable[[], MoveReport]](), spans.active()
        if trace:
            trace.add((HOST, "plan", start, perf_counter()))
        recorder, notify = recorder_of(C.stored), GuardedCallback(progress)
        recorder.hold(self._bytes)

        def move(name: str, x: Array, beta: Any, y: Array, within: Staircase | None = None) -> None:
            own = recorder_of(x)
            with spans.timed("redistribute", x.nbytes) as taken:
                exchange(1, x, beta, y, moves[name], workspace.messages[name], A.grid, own, within)
                own.finish()
            own.hold(workspace.messages[name].nbytes)
            recorder.traffic += own.traffic
            reports.append(partial(move_report, name, moves[name], A.grid, own, taken.seconds))

        with np.errstate(all="ignore"), kept_if_it_fails(workspace, A.stored, B.stored, C.stored):
            sources = {"A": A.stored, "B": B.stored, **self._scales, **(self._end.sources if self._end else {})}
            for name, x in sources.items():
                if name in workspace.copies:
                    move(name, x, 0, workspace.copies[name])
                elif name in workspace.staged:
                    with recorder.phase("pack"):
                        CONVERT(workspace.staged[name], x)
                    recorder.synchronize_copies()
            with recorder.phase("sync"):
                self._meet()
            self._multiply(0 if "C" in moves else beta, recorder, notify)
            recorder.finish()
            if self._peers:
                with recorder.phase("sync"):
                    self._peers.sync()
            if "C" in moves:
                move("C", workspace.copies["C"], beta, C.stored, plan.kept(comm.rank))
        device = devices.of(C.stored)
        sharing = device.reach(A.grid).sharing if device else 1
        self.traffic = recorder.traffic
        end = perf_counter()
        report = partial(report_of, plan, A.grid, C.grid.coords, recorder, end - start, reports, sharing, self._names)
        C.report = report
        if LOG.isEnabledFor(INFO) and not comm.rank:
            LOG.info("%s", report())
        if trace:
            trace.add((HOST, "pdgemm", start, end, 0, lambda: report().as_dict()))
        if agreed:
            agree(comm, notify.error)
        elif notify.error is not None:
            raise notify.error
        return C

    def _meet(self) -> None:
        """Wait until A and B may be read in place on all ranks of the node; set up the executor if its grid is new."""
        (A, B, C), workspace, product = self._matrices, self._workspace, self.plan.product
        grid = _grid(product, A.grid, B.grid, C.grid)
        if grid is self._grid:
            if self._peers:
                self._peers.sync()
            return
        arrays = {"A": A.stored, "B": B.stored, "C": C.stored} | workspace.copies | workspace.staged
        a, b, c = (arrays[name] for name in "ABC")
        if self.plan.transposed:
            a, b, c = b.T, a.T, c.T
        self._grid, self._peers = grid, None
        if product.shared:
            operands = {"A": (a, product.A), "B": (b, product.B)}
            exposed: dict[str, tuple[Array, Layout | None]] = {name: operands[name] for name in product.exposed}
            exposed |= {name: (workspace.product[name], None) for name in product.exposed_buffers}
            self._peers = NodeArrays(A.grid, **exposed)
        transfers = Transfers(between_nodes=grid.ranks_per_node is not None)
        buffers, mirrored = workspace.product, self._mirrored
        call = self._call = Call(
            self._alpha, a, b, c, product, grid, buffers, self._peers, transfers, mirrored=mirrored,
            scales=strips_of(self.plan, A.grid.comm.rank, workspace.copies),
        )  # fmt: skip
        in_place = (product.in_place or A.grid.size == 1) and not (
            workspace.copies or workspace.staged or product.exposed_buffers
        )
        if in_place and self._bytes <= SMALL and product.panels <= FEW:
            lying = self._peers and self._peers.lying
            key = (product, self._alpha, grid, lying, mirrored)  # the key keeps the grid, so that no other has its id
            self._multiply = _same_again(key, call, A, B, C)
        else:
            self._multiply = executor_of(call)


class _LastRun(NamedTuple):
    key: tuple[Any, ...]
    arrays: tuple[Array, Array, Array]
    run: Executor
    watched: list[ref[DistMatrix]]  # C forgets the executor when one of these matrices is freed


def _same_again(key: tuple[Any, ...], call: Call[Product], A: DistMatrix, B: DistMatrix, C: DistMatrix) -> Executor:
    """Return the last executor that formed C if the calls differ only in their buffers, else a new executor.  Local.

    key : all values that an executor depends on, except the addresses of its matrices.
    """
    last, arrays, owner = C.last_run, (call.A, call.B, call.C), ref(C)
    if last and last.key == key and all(map(_same_place, last.arrays, arrays)):
        return last.run

    def forget(_: object) -> None:
        if (matrix := owner()) is not None:
            matrix.last_run = None

    run = executor_of(call)
    C.last_run = _LastRun(key, arrays, run, [ref(x, forget) for x in (A, B)])
    return run


def _same_place(x: Array, y: Array) -> bool:
    """Do two arrays of the same shape have the same address and the same strides?"""
    return x is y or (devices.address(x), x.strides) == (devices.address(y), y.strides)


def sent_instead(plan: ProductPlan, A: DistMatrix, B: DistMatrix, C: DistMatrix) -> ProductPlan:
    """Return the best plan for ranks that send what they would have read; the same plan if its mover was requested."""
    problem = plan.problem
    if not problem.shared or problem.mover != AUTO:
        return plan
    mover, reach = mover_and_access(AUTO, False, A, B, C)
    staged = reach.staged and mover != NCCL.name
    sent = replace(problem, mover=mover, staged=staged, shared=False, outside_node_memory=(), nodes=())
    return plan_product(sent)


def _first_calls(call: Call[Product], device: Device) -> None:
    """Convert, multiply and add one element in the types of a product: first calls load or compile kernels."""
    A, B, sums, C = (
        device.empty((1, 1), x) for x in (call.A.dtype, call.B.dtype, call.product.accumulate, call.C.dtype)
    )
    first = Accumulator(call.alpha, 0, sums, call.product, call.workspace)
    for _ in range(2):  # the second time with beta = 1
        first.add(A, B)
    for beta in (0, 1, 2) if C.dtype != sums.dtype else ():
        Combine(1, beta)(C, sums)
    for dtype in {A.dtype, B.dtype, call.product.panel_dtype, sums.dtype, *map(np.dtype, (np.int32, np.int64))}:
        panel = device.empty((2, 2), dtype)
        CONVERT(device.empty((2, 2), dtype), panel.T)  # a transposition, which no copy engine does
        Combine(1, 1)(panel, panel)


def _grid(product: Product, *grids: ProcessGrid) -> ProcessGrid:
    """Return the grid of a product: one of the matrices' grids if it matches, else a cached work grid."""
    if not product.on_grid:
        return grids[0]
    wanted = product.grid.shape, product.grid.layers, product.grid.ranks
    for grid in grids:
        for seen in (grid, grid.T):
            if seen.comm is grids[0].comm and (seen.shape, seen.layers, seen.rank_map) == wanted:
                return seen
    return grids[0].work_grid(*wanted)


def beta_of(beta: Any, C: DistMatrix, plan: ProductPlan) -> Any:
    """Return beta as a number of C's kind.  Raises ArgumentError if beta is not 0 and the plan does not read C."""
    beta = as_scalar(beta, C.dtype, "beta")
    if beta != 0 and plan.problem.beta_is_zero and any(name == "C" for name, _ in plan.moves):
        raise ArgumentError(f"beta = {beta}, but the plan was made for beta = 0: plan(..., beta=1)")
    if beta != 0 and plan.problem.beta_is_zero and plan.problem.protect:
        raise ArgumentError(f"beta = {beta}, but the plan's checksums are for beta = 0: plan(..., beta=1)")
    return beta
