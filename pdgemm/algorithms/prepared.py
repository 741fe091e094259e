"""Prepared products: the views, communicators and executor of a plan are set up once, and the plan runs many times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from pdgemm.algorithms.epilogue import Epilogue, EpilogueRun
from pdgemm.algorithms.plan_workspace import Workspace
from pdgemm.algorithms.product_options import Operands
from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.algorithms.products.executor import Call, Executor, executor_of
from pdgemm.algorithms.products.strips import NO_STRIPS, strips_of
from pdgemm.algorithms.protection.checksum import protected
from pdgemm.algorithms.protection.row_checksums import RowChecksums
from pdgemm.algorithms.redistribution import move_report
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError
from pdgemm.grids.layout import Layout
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.log import INFO, LOG, log_plan
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.instrument.report import Report
from pdgemm.instrument.run_report import RunReport
from pdgemm.instrument.spans import HOST
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device
from pdgemm.local.arrays.elementwise import CONVERT, Combine
from pdgemm.local.blas.threads import multiplier, threads
from pdgemm.matrix.argument_checks import as_scalar
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import AnyName
from pdgemm.planning.planner import explain
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.schedules.mover_registry import MOVERS
from pdgemm.schedules.products import Product
from pdgemm.schedules.products.scales import strip_name
from pdgemm.schedules.staircase import Staircase
from pdgemm.support.agreement import GuardedCallback, agree, check_not_freed, together
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.packed_exchange import exchange, kept_if_it_fails

SMALL = 1 << 14  # most bytes of the buffers of an executor that is cached until C is formed again
FEW = 64  # most panels of such an executor, which has about a kilobyte of views for each panel


class Prepared:
    """Computes a planned product C := alpha A B + beta C any number of times; made by `Plan.prepare`.

    Buffers, views, communicators and BLAS calls are set up once and live as long as this object, which also holds
    references to A, B and C: their elements may change between calls, but not their addresses.
    """

    def __init__(
        self,
        plan: ProductPlan,
        alpha: Any,
        operands: Operands,
        workspace: Workspace,
        epilogue: Epilogue | None = None,
    ) -> None:
        """Take a plan and its buffers, and set up views, communicators and executor.  Collective over the grid.

        Raises MappingError on all ranks if a rank cannot map the GPU memory of another rank.
        """
        A, B, C, *_ = operands
        self.plan, self._alpha, self._operands, self._workspace = plan, alpha, operands, workspace
        self._bytes, self._epilogue, self.traffic = workspace.nbytes, epilogue, Traffic()
        self._end = EpilogueRun(epilogue, plan, C, workspace) if epilogue else None
        self._matrices = A, B, self._end.sums if self._end else C
        self._moves = dict(plan.moves)
        self._grid: ProcessGrid | None = None
        self._peers: NodeArrays | None = None
        self._call: Call[Product]
        self._multiply: Executor
        if LOG.isEnabledFor(INFO):
            mover = plan.product.transport.name
            how = f"{mover}, {MOVERS[mover].summary}" if mover in MOVERS else mover
            log_plan(A.grid.comm.rank, plan, how, partial(explain, plan), workspace.sizes)
        self._connect()
        self._synchronized = True  # for a `run` that follows directly; `__call__` synchronises again

    def warm_up(self) -> Prepared:
        """Create the communicators of NCCL, compile common kernels, and return this object.  Collective."""
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
        start, self._synchronized = perf_counter(), False
        with together(self._matrices[0].grid.comm, check) as description:
            for matrix in self._matrices:
                check_not_freed(matrix.grid.comm)
            beta = beta_of(beta, self._operands.C, self.plan)
            description += [f"a prepared product, beta={beta}", self.plan.description]
            description += [self._epilogue.described()] if self._epilogue else []
        return self.run(beta, start)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a prepared product has buffers and communicators of this process and cannot be copied or pickled: "
            "save its plan, and prepare it again, plan.prepare(A, B, C)"
        )

    def run(
        self,
        beta: Any,
        start: float,
        progress: Callable[[int, int], object] | None = None,
        agreed: bool = False,
    ) -> DistMatrix:
        """Compute C, its epilogue included, and set its report.

        start    : the time at which the call began.
        agreed   : all ranks know that some rank passed `progress`; an exception of `progress` is raised on all ranks.
        """
        notify, comm, C = GuardedCallback(progress), self._matrices[0].grid.comm, self._operands.C
        if self._end:
            self._end.begin(beta)
        multiply = self._protected if self.plan.protection else self._run
        report = multiply(beta, start, notify)
        C.report = report = self._end.end(report) if self._end else report
        if LOG.isEnabledFor(INFO) and not comm.rank:
            LOG.info("%s", report())
        if agreed:
            agree(comm, notify.error)
        elif notify.error is not None:
            raise notify.error
        return C

    def _protected(self, beta: Any, start: float, notify: GuardedCallback) -> Callable[[], Report]:
        """Multiply, and compare the sums with their checksums.  Collective; arguments and result are as in `_run`."""
        problem, protection, (A, _, C) = self.plan.problem, self.plan.protection, self._matrices
        assert protection
        checks = RowChecksums(
            self._alpha, self._matrices, beta, self._workspace.checks, problem.accumulate, problem.compute
        )
        reports, planned = list[Callable[[], Report]](), protection.cost(A.grid.comm.rank)
        outcome = protected(
            lambda: reports.append(self._run(beta, start, notify)), C, checks, problem.protect == "repair", planned
        )
        return lambda: reports[-1]().changed(checks=outcome)

    def _run(self, beta: Any, start: float, notify: GuardedCallback) -> Callable[[], Report]:
        """Redistribute A and B if necessary, multiply, redistribute C back; return a function that makes the report."""
        (A, B, C), workspace, plan, moves = self._matrices, self._workspace, self.plan, self._moves
        comm, reports, trace = A.grid.comm, list[Callable[[], RunReport]](), spans.active()
        if trace:
            trace.add((HOST, "plan", start, perf_counter()))
        recorder = recorder_of(C.stored)
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
            if workspace.copies or workspace.staged:
                for name, x in self._sources().items():
                    if name in workspace.copies:
                        move(name, x, 0, workspace.copies[name])
                    elif name in workspace.staged:
                        with recorder.phase("pack"):
                            CONVERT(workspace.staged[name], x)
                        recorder.synchronize_copies()
                self._synchronized = False
            if not self._synchronized:
                with recorder.phase("sync"):
                    self._connect()
            self._synchronized = False
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
        report = partial(
            _report, plan, A.grid, C.grid.coords, recorder, end - start, reports, sharing, self._operands.names
        )  # this function refers to neither matrices nor buffers
        if trace:
            trace.add((HOST, "pdgemm", start, end, 0, lambda: report().as_dict()))
        return report

    def _sources(self) -> dict[str, Array]:
        """Return the arrays that are redistributed before the product, by name, as this rank stores them."""
        A, B, _ = self._matrices
        scales = {strip_name(name): x.matrix.stored for name, x in zip("AB", self._operands.scales) if x}
        return {"A": A.stored, "B": B.stored, **scales, **(self._end.sources if self._end else {})}

    def _connect(self) -> None:
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
        self._grid, self._peers, mirrored = grid, None, self._operands.mirrored
        if product.transport.shared:
            operands = {"A": (a, product.A), "B": (b, product.B)}
            exposed: dict[str, tuple[Array, Layout | None]] = {name: operands[name] for name in product.exposed}
            exposed |= {name: (workspace.product[name], None) for name in product.exposed_buffers}
            if device := devices.of(a):
                device.current_stream().synchronize()  # kernels of the caller may still write to A and B
            self._peers = NodeArrays(A.grid, **exposed)
        transfers = Transfers(between_nodes=grid.ranks_per_node is not None)
        call = self._call = Call(
            self._alpha, a, b, c, product, grid, workspace.product, self._peers, transfers, mirrored=mirrored,
            scales=strips_of(self.plan, A.grid.comm.rank, workspace.copies),
        )  # fmt: skip
        in_place = (product.transport.in_place or A.grid.size == 1) and not (
            workspace.copies or workspace.staged or product.exposed_buffers
        )
        if in_place and self._bytes <= SMALL and product.panels <= FEW:
            lying = self._peers and self._peers.lying
            key = (product, self._alpha, grid, lying, mirrored)  # it holds the grid, so that no new grid gets its id
            self._multiply = _same_again(key, call, A, B, C)
        else:
            self._multiply = executor_of(call)


def _report(
    plan: ProductPlan,
    grid: ProcessGrid,
    coords: tuple[int, int],
    recorder: Recorder,
    seconds: float,
    moves: list[Callable[[], RunReport]],
    sharing: int,
    names: tuple[str, str],
) -> Report:
    """Return the report of a run.   moves : functions that return the reports of the redistributions.

    coords : this rank's position in the grid of C.   names : the names of op(A) and op(B).
    """
    product, ending = plan.product, plan.problem.ending
    result = ending.dtype if ending else plan.problem.C.dtype
    return Report.of_work(
        recorder,
        [plan],
        grid,
        seconds,
        algorithm=AnyName(plan.algorithm),
        inside=plan.inside,
        collective=plan.collective,
        mover=product.transport.name,
        device=product.device,
        threads=threads(),
        blas=multiplier(),
        ranks_per_device=sharing,
        compute=product.compute,
        checks=None,
        grid=plan.shape[:2],
        layers=plan.shape[2],
        mnk=plan.mnk,
        operands=names,
        dtype=str(product.accumulate),
        epilogue=ending.text if ending else "",
        result_dtype="" if result == product.accumulate else str(result),
        panels=product.panels,
        panel_width=product.widest,
        lookahead=product.lookahead,
        coords=coords,
        predicted_seconds=plan.seconds,
        lower_bound_words=plan.lower_bound_words,
        moves=tuple(move() for move in moves),
    )


class _LastRun(NamedTuple):
    key: tuple[Any, ...]
    arrays: tuple[Array, Array, Array]
    run: Executor
    watched: list[ref[DistMatrix]]  # C forgets the executor when one of these matrices is freed


def _same_again(key: tuple[Any, ...], call: Call[Product], A: DistMatrix, B: DistMatrix, C: DistMatrix) -> Executor:
    """Return the executor that last computed C if it can be used again, else a new executor.  Local.

    It can be used again if `key` and the addresses of the matrices are the same; buffers may differ.
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


def _first_calls(call: Call[Product], device: Device) -> None:
    """Convert, multiply and add one element in the types of a product: first calls load or compile kernels."""
    A, B, sums, C = (
        device.empty((1, 1), x) for x in (call.A.dtype, call.B.dtype, call.product.accumulate, call.C.dtype)
    )
    first = Accumulator(call, 0, sums, scales=NO_STRIPS)
    for _ in range(2):  # the second time with beta = 1
        first.add(A, B)
    for beta in (0, 1, 2) if C.dtype != sums.dtype else ():
        Combine(1, beta)(C, sums)
    for dtype in {A.dtype, B.dtype, call.product.panel_dtype, sums.dtype, *map(np.dtype, (np.int32, np.int64))}:
        panel = device.empty((2, 2), dtype)
        CONVERT(device.empty((2, 2), dtype), panel.T)  # transposes, which takes a kernel instead of a copy engine
        Combine(1, 1)(panel, panel)


def _grid(product: Product, *grids: ProcessGrid) -> ProcessGrid:
    """Return the grid of a product: one of the matrices' grids if it matches, else a cached work grid."""
    if not product.on_grid:
        return grids[0]
    wanted = product.grid.shape, product.grid.layers, product.grid.ranks
    for grid in grids:
        for seen in (grid, grid.T):
            if seen.connected and seen.comm is grids[0].comm and (seen.shape, seen.layers, seen.rank_map) == wanted:
                return seen
    return grids[0].work_grid(*wanted)


def beta_of(beta: Any, C: DistMatrix, plan: ProductPlan) -> Any:
    """Return beta as a number of C's kind.  Raises ArgumentError if beta is not 0 and the plan does not read C."""
    beta = as_scalar(beta, C.dtype, "beta")
    if beta != 0 and plan.needs_beta_zero:
        what = "plan's checksums are" if plan.protection else "plan was made"
        raise ArgumentError(f"beta = {beta}, but the {what} for beta = 0: plan(..., beta=1)")
    return beta
