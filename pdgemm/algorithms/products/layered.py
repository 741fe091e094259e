"""Algorithms that split the inner dimension: 2.5D and 3D over layers of ranks, "inner" over all ranks.

Solomonik & Demmel, Euro-Par 2011; Agarwal et al., IBM J. Res. Dev. 39(5), 1995.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.algorithms.products.executor import Call, Notify, executor_of
from pdgemm.algorithms.products.layer_sums import LayerSums, one_behind_the_other
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import scale
from pdgemm.schedules.products import Inner, Layered
from pdgemm.schedules.products.reduction import Window, height


class LayeredExecutor:
    """Computes C := alpha A B + beta C on a Pr x Pc x c grid: each layer multiplies 1/c of k, then layers are reduced.

    A and B are distributed over the ranks of all layers, in the layouts of `product`: a layer needs 1/c of A and of B,
    so A and B are not replicated.  The rank (i, j) of a layer holds any part of block (i, j) of C.

    Cost per rank on q x q x c, P = q^2 c: 2mnk/P flops; (mk + kn)(q - 1)/P + mn (c - 1)/P words in; extra
    memory for the product of one layer, mn/q^2 words for partial sums, and small buffers.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's type.
    """

    def __init__(self, call: Call[Layered]) -> None:
        plan, grid, self._call = call.product, call.grid, call
        if grid.idle or not plan.mnk[2]:
            return
        rank = grid.comm.rank
        layer = plan.layer(rank)
        self._sums = call.workspace["partial C"].reshape(layer.C.local_shape(rank))
        self._windows = plan.reduction.windows(rank)
        self._reduction = LayerSums(call, plan.reduction, grid.depth, "partial C")
        of_any: Call[Any] = call
        of_layer = replace(
            of_any,
            C=self._sums,
            product=layer,
            peers=call.peers if layer.transport.shared else None,
            windows=() if plan.reduction.read else self._windows,
            completed=partial(self._reduction.add, self._sums),
        )
        self._layer = executor_of(of_layer)

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call = self._call
        plan = call.product
        if not plan.mnk[2]:
            call.multiply_c(beta, recorder)
        elif call.grid.idle:
            if plan.reduction.read and call.peers:
                call.peers.sync()  # collective over the node
        else:
            self._reduction.begin(call.to_c(beta), recorder)
            self._layer(0, recorder, notify)
            self._reduction.sync()
            for window in self._windows[self._reduction.done :]:  # if sums are read in place, or nothing was multiplied
                self._reduction.add(self._sums, window)
            self._reduction.finish()


class InnerExecutor:
    """Computes C := alpha A B + beta C where each rank holds columns of A, the same rows of B, and any part of C.

    Cost per rank: 2mnk/P flops; mn(P - 1)/P words in and out, independent of k; extra memory at most 4 n product.rows
    words, for windows of `product.rows` rows of C.  A window is read in place, or sent while the next one is
    multiplied; on the host, each owner's part is sent as soon as it is formed, and this rank's part is formed last.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's type.
    """

    def __init__(self, call: Call[Inner]) -> None:
        self._call = call

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call = self._call
        plan, grid, n = call.product, call.grid, call.product.mnk[1]
        if not plan.windows:
            call.multiply_c(beta, recorder)
            return
        reduction, buffer = LayerSums(call, plan.reduction, grid.comm, "sums"), call.workspace["sums"]
        products = Accumulator(call, 0, buffer, plan.formed.of(grid.comm.rank))

        def form(sums: Array, window: Window, places: list[slice], ranges: Iterable[int]) -> None:
            """Compute this rank's partial sums of some ranges of the window.   ranges : the numbers of the ranges."""
            with recorder.phase("compute"):
                for here, rows in ((places[x], slice(*window[x])) for x in ranges):
                    if call.A.shape[1]:
                        products.part(rows, sums[here]).add_wide(call.A[rows], call.B)
                    else:
                        scale(0, sums[here])

        reduction.begin(call.to_c(beta), recorder)
        for done, window in enumerate(plan.windows, 1):
            if done > 1:
                reduction.sync()  # all ranks have read the last partial sums, which are overwritten now
            sums = buffer[: height(window) * n].reshape(height(window), n)
            places, owners = one_behind_the_other(window), plan.owners(window)
            if owners:
                reduction.add_by_owner(partial(form, sums, window, places), sums, window, places, owners)
            else:
                form(sums, window, places, range(len(window)))
                reduction.sync()
                reduction.add(sums, window, places)
            notify(done, len(plan.windows))
        reduction.finish()
