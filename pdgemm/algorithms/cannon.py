"""Cannon's algorithm: L. E. Cannon, thesis, Montana State University, 1969; on Pr x Pc grids where Pr divides Pc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdgemm.algorithms.accumulator import Accumulator, Room, add_sums
from pdgemm.arrays.device import Array
from pdgemm.arrays.elementwise import scale
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.movers.pipeline import Conveyor, Transfers
from pdgemm.schedules import Cannon
from pdgemm.schedules.steps import cannon_neighbours


def cannon(
    alpha: Any,
    A: Array,
    B: Array,
    beta: Any,
    C: Array,
    plan: Cannon,
    grid: ProcessGrid,
    room: Room,
    recorder: Recorder,
    notify: Callable[[int, int], object],
    near: None = None,
) -> None:
    """C := alpha A B + beta C by Cannon's algorithm.  Collective over the grid.

    A, B : this rank's blocks of A (m, k) and B (k, n), which lie skewed as `plan` says; not changed.
    C    : this rank's block of C (m, n), overwritten, not read where beta is 0.
    room : the buffers of the plan.   recorder : takes seconds, words and messages.   notify : hears of each step;
        must not raise.

    Cost per rank on q x q: 2mnk/q^2 flops; (mk + kn)(q - 1)/q^2 words in 2(q - 1) messages, after those that skew;
    extra memory 2(mk + kn)/q^2 words.  On q x tq the same with tq for q along the rows.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """
    if grid.idle:
        return
    rank = grid.comm.rank
    steps, (width_a, width_b) = plan.steps(rank), plan.widths
    if not steps:
        scale(beta, C)
        return
    (i, j), (m_loc, n_loc) = grid.coords, C.shape
    pr, pc = grid.shape
    t = pc // pr
    sums = C if plan.sums_in_c else room["sums"].reshape((m_loc, n_loc), order=plan.C.order)
    transfers = Transfers(recorder)
    staged_a, staged_b = room.get("staged A"), room.get("staged B")
    poll = transfers.poll if grid.ranks_per_node and not plan.device else None
    products = Accumulator(alpha, beta if sums is C else 0, sums, plan, room, poll)
    with (
        Conveyor(grid.row, A, plan.A.order, room["panels of A"], plan.slots, recorder, transfers, staged_a) as left,
        Conveyor(grid.col, B, plan.B.order, room["panels of B"], plan.slots, recorder, transfers, staged_b) as up,
    ):
        for number, step in enumerate(steps):
            if number + 1 < len(steps):
                width = int(width_a[steps[number + 1].a])
                left.start(*cannon_neighbours(grid.shape, j, number), (m_loc, width))
            if number % t == 0 and number + t < len(steps):
                height = int(width_b[steps[number + t].b])
                up.start((i - 1) % pr, (i + 1) % pr, (height, n_loc))
            first = step.a // pr * plan.A.distribution.cols.block  # of the rows of B held
            with recorder.phase("compute"):
                products.add_wide(left.held, up.held[first : first + int(width_a[step.a])])  # C_ij += A_ik B_kj
            left.advance()
            if number % t == t - 1:
                up.advance()
            notify(number + 1, len(steps))
    if sums is not C:
        with recorder.phase("compute"):
            add_sums(sums, beta, C, room["update"])
