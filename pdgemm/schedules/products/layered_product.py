"""The schedules of algorithms that divide the inner dimension, and reduce partial sums of C at the end.

`Layered` is 2.5D and 3D: each layer of ranks multiplies over its inner indices by SUMMA or Cannon's algorithm.
In `Inner` each rank is a layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, Self

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.index_map import overlap_counts
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Transfer
from pdgemm.schedules.products.cannon_product import Cannon
from pdgemm.schedules.products.product import Collective, Product, alike, on_ranks, scaled
from pdgemm.schedules.products.reduction import Reduction, Window, height
from pdgemm.schedules.products.summa_product import Summa
from pdgemm.schedules.rounds import Messages, Round, WorkPiece, one_each
from pdgemm.schedules.schedule import Buffers, RankMap
from pdgemm.schedules.staircase import Staircase
from pdgemm.support.remembered import remembered


@dataclass(frozen=True)
class Inner(Product):
    """Each rank multiplies over its own inner indices; a reduce-scatter adds up the partial sums of C.

    A is distributed by columns and B by rows, the same inner indices on the same ranks; C has any layout.
    rows : number of rows of C that are reduced at a time.
    size : number of ranks of the communicator.
    """

    rows: int
    size: int
    algorithm = "inner"
    on_grid = False

    def fits(self, size: int) -> bool:
        a, b = self.A.distribution, self.B.distribution
        inner_fits = alike(a.cols, b.rows) and a.rows.parts == b.cols.parts == 1
        return inner_fits and self.A.rank_map == self.B.rank_map and self.size == size

    @property
    def collective(self) -> Collective:
        return "reduce_scatter"

    @property
    def turns(self) -> int:
        return self.reduction.turns(None)

    @cached_property
    def grid(self) -> RankMap:
        """The process grid of all ranks of the communicator, each of which is a layer."""
        return RankMap.of_layers((1, 1), tuple(range(self.size)), self.size)

    @cached_property
    def reduction(self) -> Reduction:
        m, n, _ = self.mnk
        blocks = BlockCyclic.even(m, 1), BlockCyclic.even(n, 1)
        mover = self.mover * self.shared
        whole = Reduction(*blocks, self.grid.ranks, self.C, self.accumulate, self.rows, mover, self.device)
        return replace(whole, triangle=self.triangle)

    @property
    def exposed(self) -> tuple[str, ...]:
        return ()

    @property
    def exposed_buffers(self) -> tuple[str, ...]:
        return ("sums",) if self.shared else ()

    @property
    def panels(self) -> int:
        return self.reduction.turns(0) if self.mnk[2] else 0

    @property
    def widest(self) -> int:
        return self.A.distribution.cols.largest

    def scaled(self, share: float) -> Self:
        rows = scaled(min(self.rows, max(1, self.mnk[0])), share)
        return replace(self, width=scaled(min(self.width, max(1, self.widest)), share), rows=rows)

    @property
    def windows(self) -> list[Window]:
        """The windows of C: ranges of rows that are computed and reduced together."""
        return self.reduction.windows(0) if self.mnk[2] else []

    def owners(self, window: Window) -> list[int] | None:
        """Return the owner of each range of a window, if its sums are sent before the next are formed; else None."""
        sent_by_host = self.size > 1 and not self.shared and not self.device
        return self.reduction.owners(0, window) if sent_by_host else None

    def rounds(self) -> Iterator[Round]:
        """Yield a product for each window of C; its partial sums are reduced during the product of the next window."""
        n, k_loc = self.mnk[1], np.array([self.A.local_shape(rank)[1] for rank in range(self.size)])
        sums: list[Messages] = []  # of the previous window
        for turn, window in enumerate(self.windows):
            work = WorkPiece((height(window), n, k_loc), share=self.share(0))
            yield Round(sums, [work], hidden=not self.shared)
            sums = self.reduction.messages(slice(turn, turn + 1))
        yield Round(sums, hidden=False)

    @property
    def events(self) -> int:
        return self.panels + self.size * self.reduction.turns(None)

    def transfers(self, rank: int) -> list[Transfer]:
        if not self.mnk[2]:
            return []
        return self.reduction.transfers(rank)

    @property
    def first_panel_is_local(self) -> bool:
        return True

    def formed(self, rank: int) -> Staircase | None:
        return self.reduction.formed((0, 0)) if self.triangle else None

    def reach(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return self._own(name)

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        m, n, _ = self.mnk
        return m, n, self.A.local_shape(rank)[1]

    def copied(self, rank: int) -> int:
        """Return the bytes of partial sums that are written, then packed or read, and of the total, added to C."""
        m, n, _ = self.mnk
        rows, cols = self.C.local_shape(rank)
        return (2 * m * n + rows * cols) * self.accumulate.itemsize

    def staging(self, rank: int | None) -> Buffers:
        return self.reduction.staging(rank) if self.panels else {}

    def buffers(self, rank: int | None) -> Buffers:
        n = self.mnk[1]
        k_loc = min(self.width, self.A.local_shape(rank)[1])
        m_loc = self.reduction.highest(rank) if self.mnk[2] else 0
        reduction = (
            self.reduction.buffers(rank)
            if m_loc
            else dict.fromkeys(["packed C", "own part of C", "part of C of another rank"], (0, self.accumulate))
        )
        return (
            reduction
            | {
                **self._local_buffers(m_loc, n, k_loc, (self.converts(self.A, "C"), self.converts(self.B, "C"))),
                "sums": (m_loc * n, self.accumulate),
                "update": self._update(reduction["own part of C"][0]),
            }
            | self._corner(m_loc, n)
        )


@dataclass(frozen=True)
class Layered(Product):
    """Each layer of Pr x Pc ranks multiplies over its inner indices; the partial sums of C are reduced over the layers.

    A lies on Pr x (c Pc) ranks and B on (c Pr) x Pc ranks: each layer holds its inner indices, in the layouts that the
    algorithm `inside` needs.  Each element of block (i, j) of C lies on one of the c ranks at position (i, j).

    rank_map : the ranks of the grid positions, layer by layer, row by row.
    layers : number c of layers.
    inside : algorithm of a layer, "summa" or "cannon".
    rows   : number of rows of C that are reduced at a time.
    """

    rank_map: tuple[int, ...]
    layers: int
    inside: str
    rows: int
    algorithm = "2.5d"

    def fits(self, size: int) -> bool:
        """Are there ranks for all layers, and does each element of C lie on a rank that has a partial sum of it?"""
        C, a, b, c = self.C, *(x.distribution for x in (self.A, self.B, self.C))
        pr, pc, layers = a.rows.parts, b.cols.parts, self.layers
        inner_fits = (a.cols.parts, b.rows.parts) == (layers * pc, layers * pr) and a.cols.block == b.rows.block
        if layers < 1 or not inner_fits or not on_ranks(self.rank_map, (pr, pc, layers), size):
            return False
        depth = [{*self.rank_map[at :: pr * pc]} for at in range(pr * pc)]
        rows, cols = np.argwhere(overlap_counts(a.rows, c.rows)), np.argwhere(overlap_counts(b.cols, c.cols))
        held = all(C.rank(to_i, to_j) in depth[i * pc + j] for i, to_i in rows.tolist() for j, to_j in cols.tolist())
        return held and all(layer.fits(size) for layer in self.each_layer)

    @property
    def turns(self) -> int:
        return self.reduction.turns(None)

    @property
    def sums_follow(self) -> bool:
        return True

    @property
    def nothing_travels(self) -> bool:
        return self.grid.shape == (1, 1)

    @property
    def exposed_buffers(self) -> tuple[str, ...]:
        return self.layer(None).exposed_buffers + (("partial C",) if self.in_place else ())

    @cached_property
    def grid(self) -> RankMap:
        shape = self.A.distribution.rows.parts, self.B.distribution.cols.parts
        return RankMap.of_layers(shape, self.rank_map, self.layers)

    @cached_property
    def each_layer(self) -> tuple[Summa | Cannon, ...]:
        return tuple(map(self._layer, range(self.layers)))

    def layer(self, rank: int | None) -> Summa | Cannon:
        """Return the product of a rank's layer; for rank None, of the layer with the most inner indices."""
        return self._layer(0 if rank is None else max(0, self.grid.layer_of(rank)))

    @remembered
    def _layer(self, number: int) -> Summa | Cannon:
        """Return a layer's product: block x of k belongs to layer x mod c, and there to column (x / c) mod Pc of A."""
        a, b, c = self.A.distribution, self.B.distribution, self.layers
        pr, pc = self.grid.shape
        block = a.cols.block  # size of the blocks of k, in A and in B
        k = self._inner.count(number)
        place_a = self.A.rank_map[number::c]
        place_b = tuple(chain.from_iterable(self.B.rank_map[x * pc : (x + 1) * pc] for x in range(number, pr * c, c)))
        A = replace(self.A, distribution=Distribution(a.rows, BlockCyclic(k, block, pc)), rank_map=place_a)
        B = replace(self.B, distribution=Distribution(BlockCyclic(k, block, pr), b.cols), rank_map=place_b)
        C = Layout(Distribution(a.rows, b.cols), self.grid.layer(number), self.accumulate)
        there: dict[str, Any] = {
            name: getattr(self, name) for name in ("device", "staged", "nccl", "compute", "triangle")
        }
        if self.inside == "cannon":
            return Cannon(A, B, C, self.accumulate, self.width, max(1, self.lookahead), self.mover, **there)
        return Summa(A, B, C, self.accumulate, self.width, self.lookahead, self.mover, nodes=self.nodes, **there)

    @property
    def _inner(self) -> BlockCyclic:
        """The distribution of the inner indices over the layers."""
        return BlockCyclic(self.mnk[2], self.A.distribution.cols.block, self.layers)

    @cached_property
    def reduction(self) -> Reduction:
        rows, cols = self.A.distribution.rows, self.B.distribution.cols
        mover = self.mover * self.in_place
        whole = Reduction(rows, cols, self.rank_map, self.C, self.accumulate, self.rows, mover, self.device)
        return replace(whole, triangle=self.triangle)

    @property
    def panels(self) -> int:
        return max(layer.panels for layer in self._to_count(None))

    @property
    def widest(self) -> int:
        return max(layer.widest for layer in self._to_count(None))

    @property
    def product_width(self) -> int:
        return max(layer.product_width for layer in self._to_count(None))

    def scaled(self, share: float) -> Self:
        rows = scaled(min(self.rows, max(1, self.reduction.shape(None)[0])), share)
        return replace(self, width=scaled(min(self.width, max(1, self.widest)), share), rows=rows)

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds of all layers at the same time; C is reduced during the last product and after it."""
        if not self.mnk[2]:
            return
        layers = [layer.rounds() for layer in self.each_layer]
        for together in zip_longest(*layers, fillvalue=Round()):
            ranks = max(self.rank_map) + 1
            pieces = [piece for one in together for piece in one.work]  # a rank has work only in its layer's piece
            m, n, k = (sum(one_each(piece.extents[x], ranks) for piece in pieces) for x in range(3))
            yield Round([x for one in together for x in one.moves], [WorkPiece((m, n, k), share=self.shares)])
        yield from self.reduction.rounds()

    @property
    def events(self) -> int:
        return self.panels + self.layers * self.reduction.turns(None)

    def transfers(self, rank: int) -> list[Transfer]:
        if self.grid.layer_of(rank) < 0 or not self.mnk[2]:
            return []
        return [*self.layer(rank).transfers(rank), *self.reduction.transfers(rank)]

    def formed(self, rank: int) -> Staircase | None:
        return self.layer(rank).formed(rank)

    def reach(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        (rows, cols), layers = self._own(name), [self._inner.indices(x) for x in range(self.layers)]
        pr, pc = self.grid.shape
        return (rows, layers * pc) if name == "A" else (layers * pr, cols)

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        return self.layer(rank).local_shape(rank)

    @property
    def first_panel_is_local(self) -> bool:
        return self.inside == "cannon"

    def copied(self, rank: int) -> int:
        """Return the bytes of the layer, of partial sums that are written, then packed or read, and of their total."""
        (rows, cols), (own_rows, own_cols) = self.reduction.shape(rank), self.C.local_shape(rank)
        return self.layer(rank).copied(rank) + (2 * rows * cols + own_rows * own_cols) * self.accumulate.itemsize

    def staging(self, rank: int | None) -> Buffers:
        return _most([layer.staging(rank) for layer in self._to_count(rank)]) | self.reduction.staging(rank)

    def _to_count(self, rank: int | None) -> list[Summa | Cannon]:
        """Return the layer of a rank; for rank None, one layer of each size: a smaller layer may have wider panels."""
        if rank is not None:
            return [self.layer(rank)]
        return list(map(self._layer, {self._inner.count(x): x for x in range(self.layers)}.values()))

    def buffers(self, rank: int | None) -> Buffers:
        rows, cols = self.reduction.shape(rank)
        reduction = self.reduction.buffers(rank)
        return (
            _most([layer.buffers(rank) for layer in self._to_count(rank)])
            | reduction
            | {"partial C": (rows * cols, self.accumulate), "update": self._update(reduction["own part of C"][0])}
        )


def _most(buffers: list[Buffers]) -> Buffers:
    return {name: (max(x[name][0] for x in buffers), dtype) for name, (_, dtype) in buffers[0].items()}
