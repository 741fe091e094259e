"""An algorithm registered by the tests: the 3D all-gather of Agarwal et al., IBM J. Res. Dev. 39(5), 1995.

On a Pr x Pc x c grid each layer has a share of the inner indices.  In a layer A is gathered along grid rows and B along
grid columns; each rank forms one product; and the parts of C are reduce-scattered over the layers.

    layer l, 2 x 2      | B1 B2 |         what the rank at (i, j) holds before:   A_il^j of A_il, B_lj^i of B_lj
                     A1 | 11 12 |         gathers:                                A_il, B_lj
                     A2 | 21 22 |         adds up over l and keeps:               C_ij^l of sum_l A_il B_lj

Outside of this module only `allgather_3d_registered` is used: it registers the schedule, an entry and the executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Layout, listed
from pdgemm.planning.algorithm_registry import ALGORITHMS, Algorithm, register_algorithm
from pdgemm.planning.problem import Problem, lay_out
from pdgemm.planning.search.grid_search import GridCandidate
from pdgemm.schedules.products.product import Product, alike, on_ranks, scaled
from pdgemm.schedules.products.reduction import Reduction
from pdgemm.schedules.rounds import COLS, ROWS, Round, broadcast, counts_of, products
from pdgemm.schedules.schedule import Buffers, RankMap
from pdgemm.schedules.steps import one_run

if TYPE_CHECKING:
    from pdgemm.algorithms.products.executor import Call, Notify
    from pdgemm.instrument.recorder import Recorder


# ------------------------------------------------------------------ the schedule
@dataclass(frozen=True)
class AllGather3D(Product):
    """The schedule.  A is on a Pr x (c Pc) grid, B on (c Pr) x Pc, C on (Pr c) x Pc, each part contiguous.

    rank_map : the ranks, layer by layer, row by row.
    layers : c.
    rows   : rows of C that are reduced at a time.
    """

    rank_map: tuple[int, ...]
    layers: int
    rows: int
    algorithm = "allgather_3d"

    @cached_property
    def grid(self) -> RankMap:
        shape = self.A.distribution.rows.parts, self.B.distribution.cols.parts
        return RankMap.of_layers(shape, self.rank_map, self.layers)

    @cached_property
    def reduction(self) -> Reduction:
        rows, cols = self.A.distribution.rows, self.B.distribution.cols
        return Reduction(rows, cols, self.rank_map, self.C, self.accumulate, self.rows, "")

    @cached_property
    def inner(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of inner indices in each part of A, and of B: a row for each layer."""
        a, b = counts_of(self.A.distribution.cols), counts_of(self.B.distribution.rows)
        return a.reshape(self.layers, -1), b.reshape(self.layers, -1)

    @property
    def turns(self) -> int:
        return self.reduction.turns(None)

    def at(self, rank: int) -> tuple[int, int, int]:
        """Return layer, row and column of a rank."""
        (pr, pc), where = self.grid.shape, self.rank_map.index(rank)
        return where // (pr * pc), where // pc % pr, where % pc

    def fits(self, size: int) -> bool:
        a, b, c = (x.distribution for x in (self.A, self.B, self.C))
        (pr, pc), layers = self.grid.shape, self.layers
        if layers < 1 or not on_ranks(self.rank_map, (pr, pc, layers), size) or not alike(b.cols, c.cols):
            return False
        dealt = (a.cols.parts, b.rows.parts, c.rows.parts) == (layers * pc, layers * pr, layers * pr)
        whole = one_run(a.cols) and one_run(b.rows) and one_run(a.rows) and one_run(c.rows)
        begin = {(x.source, x.skip) for x in (a.cols, b.rows, a.rows, c.rows)} == {(0, 0)}
        shares = a.cols.block * pc == b.rows.block * pr and c.rows.block * layers == a.rows.block
        there = (self.A.rank_map, self.B.rank_map, self.C.rank_map) == _places(self.rank_map, pr, pc, layers)
        return dealt and whole and begin and shares and there

    def rounds(self) -> Iterator[Round]:
        """Yield two rounds: broadcasts of A in rows and of B in columns with the product; the reduction over layers."""
        if not self.mnk[2]:
            return
        (pr, pc), (a, b) = self.grid.shape, self.inner
        ranks = np.array(self.rank_map).reshape(self.layers, pr, pc)
        high, wide = counts_of(self.A.distribution.rows), counts_of(self.B.distribution.cols)
        moves = []
        for layer, grid in enumerate(ranks):
            for j in range(pc):
                moves += broadcast("ibcast", grid, j, high * a[layer, j], self.A.dtype.itemsize, ROWS)
            for i in range(pr):
                moves += broadcast("ibcast", grid.T, i, wide * b[layer, i], self.B.dtype.itemsize, COLS)
        yield Round(moves, products(ranks, high[:, None], wide[None, :], a.sum(axis=1)[:, None, None]))
        yield Round(self.reduction.messages(), hidden=False)

    def scaled(self, share: float) -> Self:
        rows = scaled(min(self.rows, max(1, self.reduction.shape(None)[0])), share)
        return replace(self, width=scaled(min(self.width, max(1, self.widest)), share), rows=rows)

    @property
    def of_a(self) -> Layout:
        """The layout of the gathered A: the parts one after another, each in Fortran order."""
        return replace(self.A, order="F")

    @property
    def of_b(self) -> Layout:
        return replace(self.B, order="C")

    def buffers(self, rank: int | None) -> Buffers:
        rows, cols = self.reduction.shape(rank)
        deep = self.inner[0].sum(axis=1)
        k = int(deep.max()) if rank is None else int(deep[self.at(rank)[0]]) if rank in self.rank_map else 0
        reduction = self.reduction.buffers(rank)
        return reduction | {
            "a row of A": (rows * k, self.A.dtype),
            "a column of B": (k * cols, self.B.dtype),
            **self.arithmetic.buffers((rows, cols, min(self.width, k)), self.of_a, self.of_b, "C"),
            "partial C": (rows * cols, self.accumulate),
            "update": self.arithmetic.update(reduction["own part of C"][0]),
        }

    def copied(self, rank: int) -> int:
        """Return bytes copied: A and B are packed; the sum is written, sorted by rank, and a share is added to C."""
        (rows, cols), (own_rows, own_cols) = self.reduction.shape(rank), self.C.local_shape(rank)
        packed = self.A.local_bytes(rank) + self.B.local_bytes(rank)
        return packed + (2 * rows * cols + own_rows * own_cols) * self.accumulate.itemsize


def _places(rank_map: tuple[int, ...], pr: int, pc: int, c: int) -> tuple[tuple[int, ...], ...]:
    """Return the rank maps of A, of B and of C."""
    row_by_row = listed(np.array(rank_map).reshape(c, pr, pc).transpose(1, 0, 2))
    return row_by_row, rank_map, row_by_row


# ------------------------------------------------------------------ the entry
def _new_grid(problem: Problem, candidate: GridCandidate) -> Product:
    pr, pc, c = candidate.partition.pr, candidate.partition.pc, candidate.partition.layers
    m, n, k = problem.mnk
    share, high = lcm(pr, pc), max(1, -(-m // (pr * c)))
    deep = max(1, -(-k // (c * share)))  # inner indices of a part; a layer has `share` times as many
    rows, wide = BlockCyclic(m, high * c, pr), BlockCyclic.even(n, pc)
    a, b = BlockCyclic(k, deep * share // pc, c * pc), BlockCyclic(k, deep * share // pr, c * pr)
    rank_map = problem.rank_map[: pr * pc * c]
    at_a, at_b, at_c = _places(rank_map, pr, pc, c)
    laid = lay_out(problem, (rows, a, at_a), (b, wide, at_b), (BlockCyclic(m, high, pr * c), wide, at_c))
    reduced = problem.reduced_rows(rows.largest, wide.largest, "shared")  # nothing overlaps with the reduction
    return AllGather3D(*laid, 0, "allgather", rank_map, c, reduced, compute=problem.compute)


ENTRY = Algorithm(
    "allgather_3d",
    AllGather3D,
    "allgather_3d:AllGather3DExecutor",
    words="as 2.5D",
    memory="a row of A and a column of B",
    good_for="a test",
    takes=lambda pr, pc, c, ranks: pr * pc * c <= ranks,
    needs="it takes Pr x Pc x layers <= {ranks}",
    new_grid=_new_grid,
    layers="any",
    moves_by=("allgather",),
    devices=False,
)


# ------------------------------------------------------------------ the executor
class AllGather3DExecutor:
    """C := alpha A B + beta C by one all-gather along rows, one along columns, one product and one reduce-scatter.

    Cost per rank on q x q x c, P = q^2 c: 2mnk/P flops; (mk + kn)(q - 1)/P + mn (c - 1)/P words in.
    """

    def __init__(self, call: Call[AllGather3D]) -> None:
        self._call = call

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        from pdgemm.algorithms.products.accumulator import Accumulator
        from pdgemm.algorithms.products.layer_sums import LayerSums
        from pdgemm.local.arrays.elementwise import Combine, paired, scale
        from pdgemm.transport.store import store

        call = self._call
        product, grid, workspace = call.product, call.grid, call.workspace
        to_c = Combine(1, beta, paired(workspace["update"]))
        if not product.mnk[2]:
            store(call.C, None, to_c)
            return
        if grid.idle:
            return
        rank = grid.comm.rank
        layer, *_ = product.at(rank)
        (rows, cols), (a, b) = product.reduction.shape(rank), product.inner
        k = int(a[layer].sum())
        row = workspace["a row of A"].reshape(k, rows).T
        column = workspace["a column of B"].reshape(k, cols)
        gather(grid.row, row.T, call.A.T, a[layer], recorder)
        gather(grid.col, column, call.B, b[layer], recorder)
        sums = workspace["partial C"].reshape(rows, cols)
        with recorder.phase("compute"):
            if k:
                Accumulator(call, 0, sums).add_wide(row, column)  # C_ij^l = A_il B_lj
            else:
                scale(0, sums)
        reduction = LayerSums(call, product.reduction, grid.depth)
        reduction.begin(to_c, recorder)
        for window in product.reduction.windows(rank):
            reduction.add(sums, window)
        reduction.finish()
        notify(1, 1)


def gather(comm: Any, whole: np.ndarray, part: np.ndarray, counts: np.ndarray, recorder: Recorder) -> None:
    """Gather the parts of all ranks in `whole`, one after another, `counts` rows of each.  Collective over comm."""
    from mpi4py import MPI

    from pdgemm.local.arrays.dtypes import wire

    starts, wide = np.cumsum(counts) - counts, whole.shape[1]
    with recorder.phase("pack"):
        whole[starts[comm.rank] :][: counts[comm.rank]] = part
    for other, words in enumerate((counts * wide).tolist()):
        if other == comm.rank and words:
            recorder.traffic.sent(words, comm.size - 1)
        elif words:
            recorder.traffic.received(words)
    if comm.size > 1 and wide:
        with recorder.phase("wait"):
            lying = [wire(whole.reshape(-1)), ((counts * wide).tolist(), (starts * wide).tolist())]
            comm.Allgatherv(MPI.IN_PLACE, lying)


# ------------------------------------------------------------------ its registration
@contextmanager
def allgather_3d_registered() -> Iterator[None]:
    """Register the algorithm in the enclosed block only."""
    from pdgemm.planning.planner import best_plan

    best_plan.cache_clear()
    register_algorithm(ENTRY)
    try:
        yield
    finally:
        del ALGORITHMS[ENTRY.name]
        best_plan.cache_clear()


@pytest.fixture(name="allgather_3d")
def _allgather_3d() -> Iterator[None]:
    with allgather_3d_registered():
        yield
