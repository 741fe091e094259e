"""The schedules of algorithms that divide the inner dimension, and reduce partial sums of C at the end.

`Layered` is 2.5D and 3D: each layer of ranks multiplies over its inner indices by SUMMA or Cannon's algorithm.
In `Inner` each rank is a layer.
"""

from __future__ import annotations

from abc import abstractmethod
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
from pdgemm.schedules.products.product import PANELS_STAGED, Product, alike, indices_of_parts, on_ranks, scaled
from pdgemm.schedules.products.reduction import Reduction, Window, height
from pdgemm.schedules.products.summa_product import Summa
from pdgemm.schedules.rounds import Messages, Round, WorkPiece, one_each
from pdgemm.schedules.schedule import Buffers, RankMap
from pdgemm.support.members import remembered

SUMS_STAGED = {"staged C": "packed C", "staged part of C": "own part of C"}


class ReducedProduct(Product):
    """The base of products whose partial sums of C are reduced over layers.

    rows : number of rows of C that are reduced at a time; a field of each such product.
    """

    rows: int

    @cached_property
    @abstractmethod
    def reduction(self) -> Reduction:
        """The reduction of the partial sums."""

    def reduced(self, rows: BlockCyclic, cols: BlockCyclic, reads: bool) -> Reduction:
        """Return the reduction of blocks of these rows and columns.   reads : partial sums are read in place."""
        return Reduction(
            rows, cols, self.grid.ranks, self.C, self.accumulate, self.rows, self.mover * reads, self.device,
            self.triangle,
        )  # fmt: skip

    @property
    def turns(self) -> int:
        return self.reduction.turns(None)

    @property
    def events(self) -> int:
        return self.panels + self.grid.layers * self.reduction.turns(None)

    def scaled(self, share: float) -> Self:
        rows: Any = {"rows": scaled(min(self.rows, max(1, self.reduction.shape(None)[0])), share)}
        return replace(super().scaled(share), **rows)

    def transfers(self, rank: int) -> list[Transfer]:
        return self.reduction.transfers(rank) if self.mnk[2] else []

    def copied(self, rank: int) -> int:
        """Return the bytes of partial sums, written and then packed or read, and of reduced sums added to C."""
        (rows, cols), (own_rows, own_cols) = self.reduction.shape(rank), self.C.local_shape(rank)
        return (2 * rows * cols + own_rows * own_cols) * self.accumulate.itemsize


@dataclass(frozen=True)
class Inner(ReducedProduct):
    """Each rank multiplies over its local inner indices; a reduce-scatter adds up the partial sums of C.

    A is distributed by columns and B by rows, the same inner indices on the same ranks; C has any layout.
    size : number of ranks of the communicator.
    """

    rows: int
    size: int
    algorithm = "inner"
    on_grid = False
    staged_names = SUMS_STAGED
    collective = "reduce_scatter"
    exposed = ()
    first_panel_is_local = True

    def fits(self, size: int) -> bool:
        a, b = self.A.distribution, self.B.distribution
        inner_fits = alike(a.cols, b.rows) and a.rows.parts == b.cols.parts == 1
        return inner_fits and self.A.rank_map == self.B.rank_map and self.size == size

    @cached_property
    def grid(self) -> RankMap:
        """The process grid of all ranks of the communicator, each of which is a layer."""
        return RankMap.of_layers((1, 1), tuple(range(self.size)), self.size)

    @cached_property
    def reduction(self) -> Reduction:
        m, n, _ = self.mnk
        return self.reduced(BlockCyclic.even(m, 1), BlockCyclic.even(n, 1), reads=self.transport.shared)

    @property
    def exposed_buffers(self) -> tuple[str, ...]:
        return ("sums",) if self.transport.shared else ()

    @property
    def panels(self) -> int:
        return self.reduction.turns(0) if self.mnk[2] else 0

    @property
    def widest(self) -> int:
        return self.A.distribution.cols.largest

    @property
    def windows(self) -> list[Window]:
        """The windows of C: ranges of rows that are computed and reduced together."""
        return self.reduction.windows(0) if self.mnk[2] else []

    def owners(self, window: Window) -> list[int] | None:
        """Return the owner of each range of a window; None if sums are not formed and sent owner by owner."""
        sent_by_host = self.size > 1 and not self.transport.shared and not self.device
        return self.reduction.owners(0, window) if sent_by_host else None

    def rounds(self) -> Iterator[Round]:
        """Yield a product for each window of C; its partial sums are reduced during the product of the next window."""
        n, k_loc = self.mnk[1], np.array([self.A.local_shape(rank)[1] for rank in range(self.size)])
        sums: list[Messages] = []  # messages of the previous window
        for turn, window in enumerate(self.windows):
            work = WorkPiece((height(window), n, k_loc), share=self.formed.share(0))
            yield Round(sums, [work], hidden=not self.transport.shared)
            sums = self.reduction.messages(slice(turn, turn + 1))
        yield Round(sums, hidden=False)

    def reach(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return indices_of_parts(getattr(self, name))

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        m, n, _ = self.mnk
        return m, n, self.A.local_shape(rank)[1]

    def buffers(self, rank: int | None) -> Buffers:
        n, k_loc = self.mnk[1], min(self.width, self.A.local_shape(rank)[1])
        m_loc = self.reduction.highest(rank) if self.mnk[2] else 0
        reduction = self.reduction.buffers(rank)
        if not m_loc:
            reduction = {name: (0, dtype) for name, (_, dtype) in reduction.items()}
        return {
            **reduction,
            **self.arithmetic.buffers((m_loc, n, k_loc), self.A, self.B, "C", self.triangle),
            "sums": (m_loc * n, self.accumulate),
            "update": self.arithmetic.update(reduction["own part of C"][0]),
        }


@dataclass(frozen=True)
class Layered(ReducedProduct):
    """Each layer of Pr x Pc ranks multiplies over its inner indices; the partial sums of C are reduced over the layers.

    A is on Pr x (c Pc) ranks and B on (c Pr) x Pc ranks: each layer holds its inner indices, in the layouts that the
    algorithm `inside` needs.  Each element of block (i, j) of C is on one of the c ranks at position (i, j).

    rank_map : the ranks of the grid positions, layer by layer, row by row.
    layers : number c of layers.
    inside : algorithm of a layer, "summa" or "cannon".
    """

    rank_map: tuple[int, ...]
    layers: int
    inside: str
    rows: int
    algorithm = "2.5d"
    sums_follow = True
    staged_names = PANELS_STAGED | SUMS_STAGED

    def fits(self, size: int) -> bool:
        """Are there ranks for all layers, and is each element of C on a rank that has a partial sum of it?"""
        C, a, b, c = self.C, *(x.distribution for x in (self.A, self.B, self.C))
        pr, pc, layers = a.rows.parts, b.cols.parts, self.layers
        inner_fits = (a.cols.parts, b.rows.parts) == (layers * pc, layers * pr) and a.cols.block == b.rows.block
        if layers < 1 or not inner_fits or not on_ranks(self.rank_map, (pr, pc, layers), size):
            return False
        depth = [{*self.rank_map[at :: pr * pc]} for at in range(pr * pc)]
        rows, cols = np.argwhere(overlap_counts(a.rows, c.rows)), np.argwhere(overlap_counts(b.cols, c.cols))
        held = all(C.rank(to_i, to_j) in depth[i * pc + j] for i, to_i in rows.tolist() for j, to_j in cols.tolist())
        return held and all(layer.fits(size) for layer in self.each_layer)

    @cached_property
    def nothing_travels(self) -> bool:
        return self.grid.shape == (1, 1)

    @property
    def exposed_buffers(self) -> tuple[str, ...]:
        return self.layer(None).exposed_buffers + (("partial C",) if self.transport.in_place else ())

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
        return self.reduced(self.A.distribution.rows, self.B.distribution.cols, reads=self.transport.in_place)

    @property
    def panels(self) -> int:
        return max(layer.panels for layer in self._to_count(None))

    @property
    def widest(self) -> int:
        return max(layer.widest for layer in self._to_count(None))

    @property
    def product_width(self) -> int:
        return max(layer.product_width for layer in self._to_count(None))

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds of all layers at the same time; C is reduced during the last product and after it."""
        if not self.mnk[2]:
            return
        layers = [layer.rounds() for layer in self.each_layer]
        for together in zip_longest(*layers, fillvalue=Round()):
            ranks = max(self.rank_map) + 1
            pieces = [piece for one in together for piece in one.work]  # a rank has work only in its layer's piece
            m, n, k = (sum(one_each(piece.extents[x], ranks) for piece in pieces) for x in range(3))
            yield Round([x for one in together for x in one.moves], [WorkPiece((m, n, k), share=self.formed.shares)])
        yield from self.reduction.rounds()

    def transfers(self, rank: int) -> list[Transfer]:
        if self.grid.layer_of(rank) < 0 or not self.mnk[2]:
            return []
        return self.layer(rank).transfers(rank) + super().transfers(rank)

    def reach(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        rows, cols = indices_of_parts(getattr(self, name))
        (pr, pc), layers = self.grid.shape, [self._inner.indices(x) for x in range(self.layers)]
        return (rows, layers * pc) if name == "A" else (layers * pr, cols)

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        return self.layer(rank).local_shape(rank)

    @property
    def first_panel_is_local(self) -> bool:
        return self.inside == "cannon"

    def copied(self, rank: int) -> int:
        """Return the bytes that are copied in the product of the rank's layer, and for the partial sums."""
        return self.layer(rank).copied(rank) + super().copied(rank)

    def _to_count(self, rank: int | None) -> list[Summa | Cannon]:
        """Return the product of a rank's layer; for rank None, of one layer of each size.

        All sizes count, because a smaller layer may have wider panels.
        """
        if rank is not None:
            return [self.layer(rank)]
        inner = self._inner
        return list(map(self._layer, {inner.count(x): x for x in range(self.layers)}.values()))

    def buffers(self, rank: int | None) -> Buffers:
        rows, cols = self.reduction.shape(rank)
        layers, reduction = [layer.buffers(rank) for layer in self._to_count(rank)], self.reduction.buffers(rank)
        return {
            **{name: (max(x[name][0] for x in layers), dtype) for name, (_, dtype) in layers[0].items()},
            **reduction,
            "partial C": (rows * cols, self.accumulate),
            "update": self.arithmetic.update(reduction["own part of C"][0]),
        }
