"""Products that are carried out: the memory and the views of a plan, made once, and what a run reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from pdgemm.algorithms.cannon import cannon
from pdgemm.algorithms.layered import inner, layered
from pdgemm.algorithms.redistribution import Room, exchange, kept_if_it_fails, move_report
from pdgemm.algorithms.stationary import stationary
from pdgemm.algorithms.summa import SummaRun
from pdgemm.arrays import device as devices
from pdgemm.arrays.device import Array
from pdgemm.arrays.elementwise import CONVERT
from pdgemm.blas.threads import threads
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError
from pdgemm.grids.layout import Layout
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.report import MoveReport, Report
from pdgemm.instrument.spans import HOST
from pdgemm.matrix.argument_checks import as_scalar
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.movers.node_arrays import Neighbours
from pdgemm.planning.planner import ProductPlan
from pdgemm.schedules import Cannon, Inner, Layered, Product, Stationary, Summa
from pdgemm.support.agreement import GuardedCallback, agree, check_not_freed, together

SMALL = 1 << 14  # bytes of buffers that a C may keep to be formed again
FEW = 64  # panels, of a kilobyte of views each, likewise


class Buffers:
    """All memory of one rank for a plan, allocated before anything is sent."""

    def __init__(self, plan: ProductPlan, A: DistMatrix, B: DistMatrix) -> None:
        grid, rank, device = A.grid, A.grid.comm.rank, devices.of(A.stored)
        own, lent = device or np, plan.product.lent_buffers
        shared = devices.memory(device, grid)

        def like(layout: Layout, lends: bool) -> Array:
            return (shared if lends else own).empty(layout.local_shape(rank), layout.dtype, layout.order)

        self.product: dict[str, Any] = {
            name: (shared if name in lent else own).empty((words,), dtype)
            for name, (words, dtype) in plan.buffers(rank).items()
        }
        if device:
            staged = plan.product.staged_buffers(rank).items()
            self.product |= {name: device.pinned(words, dtype) for name, (words, dtype) in staged}
        self.messages = {name: Room(move, rank, device) for name, move in plan.moves}
        self.copies = {
            name: like(*((move.source, move.shared) if name == "C" else (move.target, bool(plan.product.lends))))
            for name, move in plan.moves
        }
        self.staged = {name: like(layout, lends=True) for name, layout in plan.staged.items()}

    @property
    def nbytes(self) -> int:
        rooms: list[Any] = [*self.product.values(), *self.messages.values()]
        return sum(x.nbytes for x in [*rooms, *self.copies.values(), *self.staged.values()])


def unchecked(plan: ProductPlan, A: DistMatrix, B: DistMatrix) -> Buffers:
    """The buffers of a call with check=False: nobody can vouch for room in memory that the ranks of a node share."""
    with together(A.grid.comm, plan.needs_node_memory):
        return Buffers(plan, A, B)


class Prepared:
    """C := alpha A B + beta C as planned, to be formed again and again; made by `Plan.prepare`.

    Buffers, views, communicators and calls of BLAS are made once and kept as long as this object, and so are A, B
    and C: their elements may change between calls, but not where they lie.
    """

    def __init__(
        self, plan: ProductPlan, alpha: Any, A: DistMatrix, B: DistMatrix, C: DistMatrix, room: Buffers
    ) -> None:
        self.plan = plan
        self._alpha, self._matrices, self._room, self._bytes = alpha, (A, B, C), room, room.nbytes
        self._moves = dict(plan.moves)
        self._grid: ProcessGrid | None = None  # with the next two set up in the first run
        self._near: Neighbours | None = None
        self._multiply: Callable[[Any, Recorder, Callable[[int, int], object]], None]

    def __call__(self, beta: complex = 0, *, check: bool = True) -> DistMatrix:
        """C := alpha A B + beta C of what the matrices now hold; returns C.  Collective over the grid.

        beta  : 0, or any number if the plan was made with one.
        check : False skips the allreduce that makes all ranks raise the same exception.
        """
        start = perf_counter()
        with together(self._matrices[0].grid.comm, check) as said:
            for matrix in self._matrices:
                check_not_freed(matrix.grid.comm)
            beta = beta_of(beta, self._matrices[2], self.plan)
            said += [f"a prepared product, beta={beta}", self.plan.description]
        return self.run(beta, start)

    def run(
        self,
        beta: Any,
        start: float,
        progress: Callable[[int, int], object] | None = None,
        agreed: bool = False,
    ) -> DistMatrix:
        """Bring A and B where they fit, multiply, bring C home, report.

        start    : when the call began.
        agreed   : do all ranks know that some rank has a `progress`?  What it raises is then raised on all.
        """
        (A, B, C), room, plan, moves = self._matrices, self._room, self.plan, self._moves
        comm, reports, trace = A.grid.comm, list[MoveReport](), spans.active()
        if trace:
            trace.add((HOST, "plan", start, perf_counter()))
        recorder, notify = recorder_of(C.stored), GuardedCallback(progress)
        recorder.hold(self._bytes)

        def move(name: str, x: Array, beta: Any, y: Array) -> None:
            own = recorder_of(x)
            with spans.timed("redistribute", x.nbytes) as taken:
                exchange(1, x, beta, y, moves[name], room.messages[name], A.grid, own)
                own.finish()
            own.hold(room.messages[name].nbytes)
            recorder.traffic += own.traffic
            reports.append(move_report(name, moves[name], comm.rank, own, taken.seconds))

        with np.errstate(all="ignore"), kept_if_it_fails(room):
            for name, x in (("A", A), ("B", B)):
                if name in room.copies:
                    move(name, x.stored, 0, room.copies[name])
                elif name in room.staged:
                    with recorder.phase("pack"):
                        CONVERT(room.staged[name], x.stored)
                    recorder.settle()
            with recorder.phase("sync"):
                self._meet()
            self._multiply(0 if "C" in moves else beta, recorder, notify)
            recorder.finish()
            if self._near:
                with recorder.phase("sync"):
                    self._near.sync()
            if "C" in moves:
                move("C", room.copies["C"], beta, C.stored)
        device = devices.of(C.stored)
        sharing = device.reach(A.grid).sharing if device else 1
        end = perf_counter()
        report = partial(_report, plan, comm.rank, C.grid.coords, recorder, end - start, reports, sharing)
        C.report = report
        if trace:
            trace.add((HOST, "pdgemm", start, end, 0, lambda: report().as_dict()))
        if agreed:
            agree(comm, notify.error)
        elif notify.error is not None:
            raise notify.error
        return C

    def _meet(self) -> None:
        """Wait until A and B can be read on all ranks of the node; set up what was not, or was given up since."""
        (A, B, C), room, product = self._matrices, self._room, self.plan.product
        grid = _grid(product, A.grid, B.grid, C.grid)
        if grid is self._grid:
            if self._near:
                self._near.sync()
            return
        lying = {"A": A.stored, "B": B.stored, "C": C.stored} | room.copies | room.staged
        a, b, c = (lying[name] for name in "ABC")
        if self.plan.transposed:
            a, b, c = b.T, a.T, c.T
        self._grid, self._near = grid, None
        if product.shared:
            operands = {"A": (a, product.A), "B": (b, product.B)}
            lent: dict[str, tuple[Array, Layout | None]] = {name: operands[name] for name in product.lends}
            lent |= {name: (room.product[name], None) for name in product.lent_buffers}
            self._near = Neighbours(A.grid, **lent)
        if isinstance(product, Summa):
            make = partial(SummaRun, self._alpha, a, b, c, product, grid, room.product, self._near)
            as_it_lies = (product.in_place or A.grid.size == 1) and not (room.copies or room.staged)
            if as_it_lies and self._bytes <= SMALL and product.panels <= FEW:
                where = *((devices.address(x), x.strides) for x in (a, b, c)), self._near and self._near.lying
                self._multiply = _again((product, self._alpha, where), make, A, B, C)
            else:
                self._multiply = make()
        else:
            algorithm, alpha, near = _ALGORITHMS[type(product)], self._alpha, self._near
            # not of self: that would keep the buffers until a garbage collector comes
            self._multiply = lambda beta, recorder, notify: algorithm(
                alpha, a, b, beta, c, product, grid, room.product, recorder, notify, near
            )


def _again(key: tuple[Any, ...], make: Callable[[], SummaRun], A: DistMatrix, B: DistMatrix, C: DistMatrix) -> SummaRun:
    """Return the last run that formed C if nothing in `key` has changed since, else a new run.  Local.

    key : all that a run depends on except its buffers.
    A run refers to the memory of A, B and C.  It is kept only until one of the three matrices is freed.
    """
    last = _last_runs.get(id(C))
    if last and last.key == key:
        return last.run
    run, forget = make(), partial(_forget, id(C))
    _last_runs[id(C)] = _LastRun(key, run, [ref(matrix, forget) for matrix in (A, B, C)])
    return run


class _LastRun(NamedTuple):
    key: tuple[Any, ...]
    run: SummaRun
    watched: list[ref[DistMatrix]]  # each removes this entry when its matrix is freed


_last_runs: dict[int, _LastRun] = {}  # by the id of C: matrices cannot be keys, because their == is elementwise


def _forget(number: int, _: object) -> None:
    _last_runs.pop(number, None)


_ALGORITHMS: dict[type[Product], Callable[..., None]] = {
    Stationary: stationary,
    Cannon: cannon,
    Layered: layered,
    Inner: inner,
}


def _grid(product: Product, *grids: ProcessGrid) -> ProcessGrid:
    """The grid of a product: one of the matrices' if it is such, else one that is kept for it."""
    if isinstance(product, Inner):  # its sums run over the whole communicator
        return grids[0]
    wanted = product.grid
    for grid in grids:
        for seen in (grid, grid.T):
            if seen.comm is grids[0].comm and (seen.shape, seen.layers, seen.place) == (
                wanted.shape,
                wanted.layers,
                wanted.place,
            ):
                return seen
    return grids[0].work_grid(wanted.shape, wanted.layers, wanted.place)


def beta_of(beta: Any, C: DistMatrix, plan: ProductPlan) -> Any:
    """beta as a number of C's kind.  Raises ArgumentError where the plan reads no C."""
    beta = as_scalar(beta, C.dtype, "beta")
    if beta != 0 and plan.problem.plain and any(name == "C" for name, _ in plan.moves):
        raise ArgumentError(f"beta = {beta}, but the plan was made for beta = 0: plan(..., beta=1)")
    return beta


def _report(
    plan: ProductPlan,
    rank: int,
    coords: tuple[int, int],
    recorder: Recorder,
    seconds: float,
    moves: list[MoveReport],
    sharing: int,
) -> Report:
    product = plan.product
    return Report(
        algorithm=plan.algorithm,
        inside=plan.inside,
        mover=product.carried,
        device=product.device,
        ranks_per_device=sharing,
        compute=product.compute,
        grid=plan.shape[:2],
        layers=plan.shape[2],
        mnk=plan.mnk,
        dtype=str(product.accumulate),
        panels=product.panels,
        panel_width=product.widest,
        lookahead=product.lookahead,
        threads=threads(),
        rank=rank,
        coords=coords,
        flops=product.flops,
        seconds=seconds,
        compute_seconds=recorder.seconds.get("compute", 0.0),
        wait_seconds=recorder.seconds.get("wait", 0.0) + recorder.seconds.get("sync", 0.0),
        sync_seconds=recorder.seconds.get("sync", 0.0),
        hidden_seconds=recorder.seconds.get("hidden", 0.0),
        pack_seconds=recorder.seconds.get("pack", 0.0),
        counted=recorder.traffic,
        predicted=plan.traffic(rank),
        extra_bytes=recorder.peak_bytes,
        predicted_extra_bytes=plan.extra_bytes(rank),
        predicted_seconds=plan.seconds,
        lower_bound_words=plan.lower_bound_words,
        moves=tuple(moves),
    )
