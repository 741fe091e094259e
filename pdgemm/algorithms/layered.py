"""Algorithms that split the inner dimension: 2.5D and 3D over layers of ranks, the inner product over single ranks.

Solomonik & Demmel, Euro-Par 2011; Agarwal et al., IBM J. Res. Dev. 39(5), 1995.
"""

from __future__ import annotations

from typing import Any

from pdgemm.algorithms.accumulator import Accumulator
from pdgemm.algorithms.executor import Call, Notify, executor_of
from pdgemm.algorithms.layer_sums import add_up, own_and_exposed
from pdgemm.algorithms.store import store
from pdgemm.arrays.elementwise import Combine, paired, scale
from pdgemm.instrument.recorder import Recorder
from pdgemm.schedules import Inner, Layered


class LayeredExecutor:
    """Computes C := alpha A B + beta C on a Pr x Pc x c grid: each layer multiplies 1/c of k, then layers are reduced.

    A and B are distributed over the ranks of all layers as given by `product`: a layer needs 1/c of each, so they are
    not replicated.  C is any part of block (i, j).

    Cost per rank on q x q x c, P = q^2 c: 2mnk/P flops; (mk + kn)(q - 1)/P + mn (c - 1)/P words in; extra memory
    that of the product of a layer, mn/q^2 words for partial sums, and small buffers.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """

    def __init__(self, call: Call[Layered]) -> None:
        plan, grid, self._call = call.product, call.grid, call
        self._exposed = call.peers if plan.reduction.read else None
        if grid.idle or not plan.mnk[2]:
            return
        layer = plan.layer(grid.comm.rank)
        self._sums = call.workspace["partial C"].reshape(layer.C.local_shape(grid.comm.rank))
        peers = call.peers if layer.shared else None
        self._layer = executor_of(Call(call.alpha, call.A, call.B, self._sums, layer, grid, call.workspace, peers))

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call, exposed = self._call, self._exposed
        plan, rank = call.product, call.grid.comm.rank
        to_c = Combine(1, beta, paired(call.workspace["update"]))
        if not plan.mnk[2]:
            store(call.C, None, to_c)
        elif call.grid.idle:
            if exposed:
                exposed.sync()  # collective over the node
        else:
            self._layer(0, recorder, notify)
            parts = own_and_exposed("partial C", self._sums, plan.reduction, rank, exposed, recorder)
            for window in plan.reduction.windows(rank):
                here = [x[slice(*window)] for x in parts]
                add_up(here, to_c, call.C, window, plan.reduction, call.grid.depth, rank, call.workspace, recorder)


class InnerExecutor:
    """Computes C := alpha A B + beta C where each rank holds columns of A, the same rows of B, and any part of C.

    Cost per rank: 2mnk/P flops; mn(P - 1)/P words in and out, independent of k, read in place or by one
    reduce-scatter, for every `product.rows` rows of C; extra memory 2 n product.rows words and small buffers.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """

    def __init__(self, call: Call[Inner]) -> None:
        self._call = call

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call = self._call
        A, C, plan, comm, workspace, peers = call.A, call.C, call.product, call.grid.comm, call.workspace, call.peers
        n, to_c = plan.mnk[1], Combine(1, beta, paired(workspace["update"]))
        if not plan.windows:
            store(C, None, to_c)
        for done, (lo, hi) in enumerate(plan.windows, 1):
            if peers and done > 1:
                with recorder.phase("sync"):
                    recorder.finish()
                    peers.sync()  # until the last partial sums have been read
            sums = workspace["sums"][: (hi - lo) * n].reshape(hi - lo, n)
            with recorder.phase("compute"):
                if A.shape[1]:
                    Accumulator(call.alpha, 0, sums, plan, workspace).add_wide(A[lo:hi], call.B)
                else:
                    scale(0, sums)
            parts = own_and_exposed("sums", sums, plan.reduction, comm.rank, peers, recorder)
            add_up(parts, to_c, C, (lo, hi), plan.reduction, comm, comm.rank, workspace, recorder)
            notify(done, len(plan.windows))
