"""Algorithms that share out the inner dimension, and add up the parts of C in the end; as values.

`Layered` : 2.5D and 3D, layers of ranks of which each multiplies its inner indices by SUMMA or Cannon.
`Inner`   : each rank is a layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Self

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Transfer
from pdgemm.schedules.cannon_product import Cannon
from pdgemm.schedules.product import Buffers, Placed, Product, scaled
from pdgemm.schedules.reduction import Reduction
from pdgemm.schedules.rounds import Round, one_each
from pdgemm.schedules.summa_product import Summa


@dataclass(frozen=True)
class Inner(Product):
    """Each rank multiplies its inner indices; the partial products are reduced and scattered to C.

    A lies in columns and B in rows, the same inner indices on the same ranks; C anywhere.
    rows : rows of C that are reduced at a time.
    size : ranks of the communicator.
    """

    rows: int
    size: int
    algorithm = "inner"

    @cached_property
    def grid(self) -> Placed:
        """All ranks of the communicator, each a layer."""
        return Placed((1, 1), self.size, tuple(range(self.size)))

    @cached_property
    def reduction(self) -> Reduction:
        m, n, _ = self.mnk
        everyone = (tuple(range(self.size)),)
        blocks = BlockCyclic.even(m, 1), BlockCyclic.even(n, 1)
        return Reduction(*blocks, everyone, self.C, self.accumulate, self.rows, self.shared, self.device)

    @property
    def lends(self) -> str:
        return ""

    @property
    def lent_buffers(self) -> tuple[str, ...]:
        return ("sums",) if self.shared else ()

    @property
    def panels(self) -> int:
        return len(self.windows)

    @property
    def widest(self) -> int:
        return self.A.distribution.cols.largest

    @property
    def total_words(self) -> int:
        return self.reduction.total_words if self.mnk[2] else 0

    def scaled(self, share: float) -> Self:
        rows = scaled(min(self.rows, max(1, self.mnk[0])), share)
        return replace(self, width=scaled(min(self.width, max(1, self.widest)), share), rows=rows)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Rows of C that are computed and reduced together."""
        return self.reduction.windows(0) if self.mnk[2] else []

    def rounds(self) -> Iterator[Round]:
        """One product, whose sums are then added up."""
        high, n = sum(hi - lo for lo, hi in self.windows), self.mnk[1]
        if self.windows:
            yield Round([], (high, n, np.array([self.A.local_shape(rank)[1] for rank in range(self.size)])))
            yield Round(self.reduction.messages(), hidden=False)

    @property
    def events(self) -> int:
        return self.panels + self.size * self.reduction.turns(None)

    def transfers(self, rank: int) -> list[Transfer]:
        if not self.mnk[2]:
            return []
        traffic = self.reduction.traffic(rank)
        return [Transfer("reduce", traffic, self.accumulate.itemsize, 1, self.size, after=True)]

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        m, n, _ = self.mnk
        return m, n, self.A.local_shape(rank)[1]

    def copied(self, rank: int) -> int:
        """The sum is written, put in the order of ranks or read by them, and a share of it is added to C."""
        m, n, _ = self.mnk
        rows, cols = self.C.local_shape(rank)
        return (2 * m * n + rows * cols) * self.accumulate.itemsize

    def staging(self, rank: int | None) -> Buffers:
        return self.reduction.staging(rank) if self.windows else {}

    def buffers(self, rank: int | None) -> Buffers:
        n = self.mnk[1]
        k_loc = min(self.width, self.A.local_shape(rank)[1])
        high = max((hi - lo for lo, hi in self.windows), default=0)
        reduction = (
            self.reduction.buffers(rank)
            if high
            else dict.fromkeys(["in the order of ranks", "mine", "another's"], (0, self.accumulate))
        )
        return reduction | {
            "converted A": (self.converts(self.A, "C") * k_loc * high, self.panel_dtype),
            "converted B": (self.converts(self.B, "C") * k_loc * n, self.panel_dtype),
            "sums": (high * n, self.accumulate),
            "update": self._update(reduction["mine"][0]),
            "exact": (self._exact(high, n), self.panel_dtype),
        }


@dataclass(frozen=True)
class Layered(Product):
    """Layers of Pr x Pc ranks, each multiplying its inner indices; then C is added up along `depth`.

    A lies on Pr x (c Pc) ranks and B on (c Pr) x Pc, the inner indices of a layer on its ranks, as the algorithm
    `inside` wants them there; each element of block (i, j) of C lies on one of the c ranks at (i, j).

    place  : the ranks, layer by layer, row by row.
    layers : c.
    inside : "summa" or "cannon".
    rows   : rows of C that are reduced at a time.
    """

    place: tuple[int, ...]
    layers: int
    inside: str
    rows: int
    nodes: tuple[int, ...] = ()  # of each rank, where panels are read in place but not all ranks are on one node
    algorithm = "2.5d"

    @property
    def in_place(self) -> bool:
        return self.shared and not self.nodes

    @property
    def lent_buffers(self) -> tuple[str, ...]:
        return self.each_layer[0].lent_buffers or (("partial C",) if self.in_place else ())

    @cached_property
    def grid(self) -> Placed:
        return Placed((self.A.distribution.rows.parts, self.B.distribution.cols.parts), self.layers, self.place)

    @cached_property
    def each_layer(self) -> tuple[Summa | Cannon, ...]:
        return tuple(self._layer(number) for number in range(self.layers))

    def layer(self, rank: int | None) -> Summa | Cannon:
        """The product of a rank's layer; rank None: the one with most inner indices."""
        return self.each_layer[0 if rank is None else max(0, self.grid.layer_of(rank))]

    def _layer(self, number: int) -> Summa | Cannon:
        """Block x of the inner indices belongs to layer x mod c, and in it to column (x / c) mod Pc of A."""
        a, b, c = self.A.distribution, self.B.distribution, self.layers
        pr, pc = self.grid.shape
        block = a.cols.block  # and of b.rows
        k = BlockCyclic(a.cols.n, block, c).count(number)
        place_a = tuple(self.A.rank(i, x * c + number) for i in range(pr) for x in range(pc))
        place_b = tuple(self.B.rank(x * c + number, j) for x in range(pr) for j in range(pc))
        A = replace(self.A, distribution=Distribution(a.rows, BlockCyclic(k, block, pc)), place=place_a)
        B = replace(self.B, distribution=Distribution(BlockCyclic(k, block, pr), b.cols), place=place_b)
        C = Layout(Distribution(a.rows, b.cols), self.grid.layer(number), self.accumulate)
        there: dict[str, Any] = {"device": self.device, "staged": self.staged, "compute": self.compute}
        if self.inside == "cannon":
            return Cannon(A, B, C, self.accumulate, self.width, 1, "shift", **there)
        return Summa(A, B, C, self.accumulate, self.width, self.lookahead, self.mover, self.nodes, **there)

    @cached_property
    def reduction(self) -> Reduction:
        plane = len(self.place) // self.layers
        groups = tuple(self.place[at::plane] for at in range(plane))
        rows, cols = self.A.distribution.rows, self.B.distribution.cols
        return Reduction(rows, cols, groups, self.C, self.accumulate, self.rows, self.in_place, self.device)

    @property
    def panels(self) -> int:
        return self.layer(None).panels

    @property
    def widest(self) -> int:
        return self.layer(None).widest

    @property
    def total_words(self) -> int:
        inside = sum(layer.total_words for layer in self.each_layer)
        return inside + (self.reduction.total_words if self.mnk[2] else 0)

    @property
    def product_width(self) -> int:
        return self.layer(None).product_width

    def scaled(self, share: float) -> Self:
        rows = scaled(min(self.rows, max(1, self.reduction.shape(None)[0])), share)
        return replace(self, width=scaled(min(self.width, max(1, self.widest)), share), rows=rows)

    def rounds(self) -> Iterator[Round]:
        """Those of all layers side by side, then the sums of C over the layers."""
        if not self.mnk[2]:
            return
        layers = [layer.rounds() for layer in self.each_layer]
        for together in zip_longest(*layers, fillvalue=Round()):
            ranks = max(self.place) + 1
            m, n, k = (sum(one_each(one.work[x], ranks) for one in together) for x in range(3))
            yield Round([x for one in together for x in one.messages], (m, n, k))
        yield Round(self.reduction.messages(), hidden=False)

    @property
    def events(self) -> int:
        return self.panels + self.layers * self.reduction.turns(None)

    def transfers(self, rank: int) -> list[Transfer]:
        if self.grid.layer_of(rank) < 0 or not self.mnk[2]:
            return []
        stride, traffic = self.grid.strides[2], self.reduction.traffic(rank)
        added = Transfer("reduce", traffic, self.accumulate.itemsize, stride, self.layers, after=True)
        return [*self.layer(rank).transfers(rank), added]

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        return self.layer(rank).local_shape(rank)

    @property
    def at_hand(self) -> bool:
        return self.inside == "cannon"

    def copied(self, rank: int) -> int:
        """The sum of a block is written, put in the order of ranks or read by them, and a share of it is added to C."""
        (rows, cols), (own_rows, own_cols) = self.reduction.shape(rank), self.C.local_shape(rank)
        return self.layer(rank).copied(rank) + (2 * rows * cols + own_rows * own_cols) * self.accumulate.itemsize

    def staging(self, rank: int | None) -> Buffers:
        return _most([layer.staging(rank) for layer in self._to_count(rank)]) | self.reduction.staging(rank)

    def _to_count(self, rank: int | None) -> list[Summa | Cannon]:
        """Layers that differ, or that of a rank: one with fewer inner indices may have wider panels."""
        return list({x.mnk[2]: x for x in self.each_layer}.values()) if rank is None else [self.layer(rank)]

    def buffers(self, rank: int | None) -> Buffers:
        rows, cols = self.reduction.shape(rank)
        reduction = self.reduction.buffers(rank)
        return (
            _most([layer.buffers(rank) for layer in self._to_count(rank)])
            | reduction
            | {"partial C": (rows * cols, self.accumulate), "update": self._update(reduction["mine"][0])}
        )


def _most(buffers: list[Buffers]) -> Buffers:
    return {name: (max(x[name][0] for x in buffers), dtype) for name, (_, dtype) in buffers[0].items()}
