"""The inner-product algorithm for a huge inner dimension: local products, then one reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.accumulator import Accumulator, Room, add_sums
from pdgemm.blockcopy import copy_blocks
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.runs import pairings
from pdgemm.local import scale
from pdgemm.products import Inner
from pdgemm.timing import Recorder


def inner(
    alpha: Any,
    A: np.ndarray,
    B: np.ndarray,
    beta: Any,
    C: np.ndarray,
    plan: Inner,
    comm: MPI.Intracomm,
    room: Room,
    recorder: Recorder,
    notify: Callable[[int, int], object],
) -> None:
    """C := alpha A B + beta C where each rank holds columns of A and the same rows of B.  Collective over comm.

    A : this rank's columns of A, (m, k_loc);  B : the same rows of B, (k_loc, n);  C : this rank's part of
        C (m, n), of any layout, overwritten, not read where beta is 0.
    room : the buffers of the plan.   recorder : takes seconds, words and messages.   notify : hears of each
        reduction; must not raise.

    Cost per rank: 2mnk/P flops; mn(P - 1)/P words in and out, independent of k, by one reduce-scatter, or one for
    every `plan.rows` rows of C; extra memory 2 n plan.rows words and a little.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """
    i = plan.C.coords(comm.rank)[0]
    n, cols = plan.mnk[1], plan.C.distribution.cols
    if not plan.windows:
        scale(beta, C)
    for done, (lo, hi) in enumerate(plan.windows, 1):
        with recorder.phase("compute"):
            sums = room["sums"][: (hi - lo) * n].reshape(hi - lo, n)
            _partial(alpha, A[lo:hi], B, sums, plan, room)
        with recorder.phase("pack"):
            counts = plan.counts((lo, hi))
            packed = room["in the order of ranks"][: sums.size]
            _by_owner(sums, packed, plan, plan.C.distribution.rows.window(lo, hi), cols, counts)
        with recorder.phase("wait"):
            mine = room["mine"][: counts[comm.rank]]
            comm.Reduce_scatter(packed, mine, counts.tolist(), MPI.SUM)
        _count(counts, comm.rank, recorder)
        with recorder.phase("compute"):
            part = C[plan.C.distribution.rows.local_window(lo, hi, i)]
            add_sums(mine.reshape(part.shape), beta, part, room["update"])
        notify(done, len(plan.windows))


def _partial(alpha: Any, A: np.ndarray, B: np.ndarray, sums: np.ndarray, plan: Inner, room: Room) -> None:
    """sums := alpha A B, this rank's share of the inner dimension; as one product where nothing is converted."""
    products = Accumulator(alpha, 0, sums, plan, room)
    k_loc = A.shape[1]
    converts = room["converted A"].size or room["converted B"].size
    width = plan.width if converts else k_loc
    for start in range(0, k_loc, max(1, width)):
        products.add(A[:, start : start + width], B[start : start + width])
    if not k_loc:
        sums[...] = 0


def _by_owner(
    sums: np.ndarray, packed: np.ndarray, plan: Inner, rows: BlockCyclic, cols: BlockCyclic, counts: np.ndarray
) -> None:
    """packed := sums, the part of each rank's C after that of the rank before."""
    starts = np.cumsum(counts) - counts
    columns = [(to_j, pairing.pack()) for to_j, pairing in pairings(BlockCyclic.even(cols.n, 1), cols, 0)]
    for to_i, high in pairings(BlockCyclic.even(rows.n, 1), rows, 0):
        for to_j, wide in columns:
            start = starts[plan.C.rank(to_i, to_j)]
            part = packed[start : start + high.size * wide.size].reshape(high.size, wide.size)
            copy_blocks(sums, part, high.pack(), wide)


def _count(counts: np.ndarray, me: int, recorder: Recorder) -> None:
    """As if every rank had sent every other one its part."""
    for rank, words in enumerate(counts.tolist()):
        if rank != me and words:
            recorder.traffic.sent(words)
        if rank != me and counts[me]:
            recorder.traffic.received(int(counts[me]))
