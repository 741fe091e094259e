"""The executor of triangle blocks: rows of A arrive, blocks of C are multiplied, and their sums are added to C."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.product_options import Operands
from pdgemm.devices.streams import recorder_of
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.report import Report
from pdgemm.local.arrays import device as devices
from pdgemm.local.blas.local_gemm import gemm_accumulate, prepare_square
from pdgemm.local.blas.threads import multiplier, threads
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import AnyName
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.program import stage_seconds
from pdgemm.schedules.exchanges.block_messages import EXCHANGE
from pdgemm.schedules.formulas import bound_symmetric
from pdgemm.schedules.products.triangle_blocks import TriangleBlocks
from pdgemm.schedules.staircase import Staircase
from pdgemm.support.agreement import GuardedCallback, agree
from pdgemm.transport.exchange_buffers import ExchangeBuffers
from pdgemm.transport.packed_exchange import exchange, kept_if_it_fails


class TriangleRun:
    """One run of triangle blocks; its buffers are allocated at once, before any message is sent.

    sources : op(A), and op(B) if the schedule has it, by name.   machine : that of the predicted time.
    hermitian : the products are those with A^H and B^H, and the second term has the factor conj(alpha).
    """

    def __init__(
        self, schedule: TriangleBlocks, alpha: Any, sources: dict[str, DistMatrix], operands: Operands, hermitian: bool,
        machine: Machine,
    ) -> None:  # fmt: skip
        self.schedule, self._alpha, self._sources, self._hermitian = schedule, alpha, sources, hermitian
        self._operands, self._machine, self._grid = operands, machine, operands.A.grid
        rank, empty = self._grid.comm.rank, devices.own_memory(None).empty
        rows, inner = schedule.local_shape(rank)
        self._panels = {name: empty((rows, inner), schedule.dtype) for name in sources}
        self._sums = empty((rows, rows), schedule.dtype)
        self._messages = {name: ExchangeBuffers(x, rank) for name, x in schedule.exchanges.items()}

    def run(
        self, beta: Any, start: float, progress: Callable[[int, int], object] | None = None, agreed: bool = False
    ) -> DistMatrix:
        """Compute the triangle of C and set its report; the arguments are those of `Prepared.run`.  Collective."""
        plan, C, grid, notify = self.schedule, self._operands.C, self._grid, GuardedCallback(progress)
        rank, recorder, sums = grid.comm.rank, recorder_of(C.stored), self._sums
        recorder.hold(sum(x.nbytes for x in (sums, *self._panels.values(), *self._messages.values())))

        def move(name: str, X: Any, beta: Any, Y: Any, within: Staircase | None = None) -> None:
            exchange(1, X, beta, Y, plan.exchanges[name], self._messages[name], grid, recorder, within)

        arrays = [C.stored, *(x.stored for x in self._sources.values())]
        kept, span = kept_if_it_fails(self, *arrays), spans.timed("triangle blocks", C.stored.nbytes)
        with np.errstate(all="ignore"), kept, span:
            for name, x in self._sources.items():
                move(name, x.stored, 0, [self._panels[name][slice(*at)] for at in plan.places(rank)])
            with recorder.phase("compute"):
                self._multiply(rank)
            within = Staircase.of(plan.triangle, *C.indices())
            for step, name in enumerate(plan.departures):
                pieces = [sums[slice(*x.rows), slice(*x.cols)] for _, x in plan.pieces(rank, step)]
                move(name, pieces, 1 if step else beta, C.stored, within)
        notify(1, 1)
        ends = grid, C.grid.coords, recorder, perf_counter() - start
        C.report = partial(_report, plan, *ends, self._operands.names, self._machine)
        if agreed:
            agree(grid.comm, notify.error)
        elif notify.error is not None:
            raise notify.error
        return C

    def _multiply(self, rank: int) -> None:
        """Form the blocks of this rank from its rows of A, and of B.  Local."""
        plan, A, alpha = self.schedule, self._panels["A"], self._alpha
        B, conjugate = self._panels.get("B", A), self._hermitian and plan.dtype.kind == "c"
        terms = [(alpha, A, B), (np.conj(alpha) if self._hermitian else alpha, B, A)][: len(self._panels)]
        places = plan.places(rank)
        for i, others, square in plan.blocks(rank):
            rows = slice(*places[i])
            columns = [slice(places[others[0]][0], places[others[-1]][1])] if others else []
            if square and B is A and A[rows].size:
                prepare_square(alpha, A[rows], self._sums[rows, rows], plan.triangle == "L", self._hermitian)(0)
            elif square:
                columns.append(rows)
            for cols, (term, (factor, left, right)) in product(columns, enumerate(terms)):
                gemm_accumulate(factor, left[rows], right[cols].T, term, self._sums[rows, cols], conjugate_b=conjugate)


def _report(
    plan: TriangleBlocks, grid: ProcessGrid, coords: tuple[int, int], recorder: Recorder, seconds: float,
    names: tuple[str, str], machine: Machine,
) -> Report:  # fmt: skip
    """Return the report of a run.   coords : this rank's position in the grid of C.   names : of op(A) and op(B)."""
    (n, _, k), terms, size = plan.mnk, len(plan.arrivals), grid.size
    return Report.of_work(
        recorder, [plan], grid, seconds, algorithm=AnyName(plan.algorithm), inside="", collective="", mover=EXCHANGE,
        device="", threads=threads(), blas=multiplier(), ranks_per_device=1, compute="", checks=None, lookahead=0,
        grid=(plan.plane.lines, 1), layers=plan.layers, mnk=plan.mnk, operands=names, dtype=str(plan.dtype),
        coords=coords, epilogue="", result_dtype="", panels=1, panel_width=-(-k // terms // plan.layers), moves=(),
        predicted_seconds=stage_seconds(plan, machine, size),
        lower_bound_words=bound_symmetric(n, k // terms, size, terms),
    )  # fmt: skip
