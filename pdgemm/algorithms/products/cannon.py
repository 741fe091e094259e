"""Cannon's algorithm: L. E. Cannon, thesis, Montana State University, 1969; on Pr x Pc grids where Pr divides Pc."""

from __future__ import annotations

from functools import partial
from typing import Any

from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.algorithms.products.executor import Call, Notify
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.schedules.products import Cannon
from pdgemm.schedules.steps import cannon_neighbours
from pdgemm.transport.movers.nccl import NcclShift
from pdgemm.transport.movers.panel_views import held_panel
from pdgemm.transport.movers.pipeline import Neighbours, PullShift, RingShift
from pdgemm.transport.store import store


class CannonExecutor:
    """Computes C := alpha A B + beta C by Cannon's algorithm.

    A and B are in the skewed layouts of `product`.

    Cost per rank on q x q: 2mnk/q^2 flops; (mk + kn)(q - 1)/q^2 words in 2(q - 1) messages, after the initial skew;
    extra memory 2(mk + kn)/q^2 words.  On q x tq the same, with tq in place of q along the grid rows.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's type.
    """

    def __init__(self, call: Call[Cannon]) -> None:
        self._call = call

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call = self._call
        A, B, C, plan, grid, workspace = call.A, call.B, call.C, call.product, call.grid, call.workspace
        if grid.idle:
            return
        rank = grid.comm.rank
        steps = plan.steps(rank)
        if not steps:
            call.multiply_c(beta, recorder)
            return
        (i, j), (m_loc, n_loc) = grid.coords, C.shape
        pr, pc = grid.shape
        t = pc // pr
        sums = C if plan.sums_in_c else held_panel(m_loc, plan.C.order, n_loc, workspace["sums"])
        call.transfers.used(recorder)
        products = Accumulator(call, beta if sums is C else 0, sums, plan.formed.of(rank))
        with (
            _ring(call, "A", [A[:, lo:hi] for lo, hi in plan.cuts(steps[0].a)], recorder) as left,
            _ring(call, "B", [B[lo:hi] for lo, hi in plan.cuts_of_b(steps[0].b)], recorder) as up,
        ):
            for number, step in enumerate(steps):
                of_a, of_b = plan.cuts(step.a), plan.cuts_of_b(step.b)
                if number + 1 < len(steps):
                    widths = [hi - lo for lo, hi in plan.cuts(steps[number + 1].a)]
                    left.start(*cannon_neighbours(grid.shape, j, number), [(m_loc, width) for width in widths])
                if number % t == 0 and number + t < len(steps):
                    heights = [hi - lo for lo, hi in plan.cuts_of_b(steps[number + t].b)]
                    up.start((i - 1) % pr, (i + 1) % pr, [(height, n_loc) for height in heights])
                first = step.a // pr * plan.A.distribution.cols.block  # row of B's block at which A's block begins
                inner = plan.A.distribution.cols.indices(step.a)
                panels = (
                    (*_panels(left, up, x, (first + lo, first + hi), of_b), inner[lo:hi])
                    for x, (lo, hi) in enumerate(of_a)
                )
                if call.windows and number + 1 == len(steps):
                    products.add_by_windows([*panels], call.windows, call.completed, recorder)
                else:
                    for a, b, some in panels:
                        with recorder.phase("compute"):
                            products.add_wide(a, b, some)  # C_ij += A_ik B_kj
                left.advance()
                if number % t == t - 1:
                    up.advance()
                notify(number + 1, len(steps))
        if sums is not C:
            with recorder.phase("compute"):
                store(C, sums, call.to_c(beta), within=plan.kept(rank))


def _ring(call: Call[Cannon], name: str, panels: list[Array], recorder: Recorder) -> RingShift:
    """Return the ring that shifts the blocks of A, or of B.   panels : the panels of this rank's first block."""
    plan, grid, peers, buffers = call.product, call.grid, call.peers, f"panels of {name}"
    (i, j), in_row = grid.coords, name == "A"
    line, order = (grid.row, plan.A.order) if in_row else (grid.col, plan.B.order)
    arguments = line, panels, order, call.workspace[buffers], plan.slots, recorder, call.transfers
    if not peers:
        shift = NcclShift if plan.nccl else RingShift
        return shift(*arguments, call.workspace.get(f"staged {name}"))

    def rank_of(q: int) -> int:
        return plan.C.rank(i, q) if in_row else plan.C.rank(q, j)

    block, of_buffers = (partial(lambda array, q: peers(array, rank_of(q)), array) for array in (name, buffers))
    return PullShift(*arguments, near=Neighbours(block, of_buffers, peers.memory.fence, int(in_row)))


def _panels(
    left: RingShift, up: RingShift, number: int, inner: tuple[int, int], of_b: list[tuple[int, int]]
) -> tuple[Array, Array]:
    """Wait for this panel of the current block of A and the rows `inner` of the current block of B; return both."""
    lo, hi = inner
    y = next(y for y, (_, end) in enumerate(of_b) if hi <= end)
    return left.panel(number), up.panel(y)[lo - of_b[y][0] : hi - of_b[y][0]]
