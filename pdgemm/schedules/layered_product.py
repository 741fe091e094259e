"""Algorithms that share out the inner dimension, and add up the parts of C in the end; as values.

`Layered` : 2.5D and 3D, layers of ranks of which each multiplies its inner indices by SUMMA or Cannon.
`Inner`   : each rank is a layer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.index_map import IndexMap, index_maps
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.model.formulas import MESSAGE_BYTES, reduce_scatter_traffic
from pdgemm.schedules.cannon_product import Cannon
from pdgemm.schedules.product import SLAB, Buffers, Placed, Product, scaled
from pdgemm.schedules.summa_product import Summa


@dataclass(frozen=True)
class Reduction:
    """Blocks of C of which each rank of a group has a part of the sum, added up and scattered to C.

    rows, cols : how C is cut into blocks.
    groups     : the ranks that add up block (i, j), row by row; the elements of the block are theirs in C.
    high       : rows of a block that are reduced at a time.
    read       : the parts are read where they lie, nothing is sent.
    """

    rows: BlockCyclic
    cols: BlockCyclic
    groups: tuple[tuple[int, ...], ...]
    C: Layout
    dtype: np.dtype
    high: int
    read: bool
    device: str = ""

    def at(self, rank: int) -> tuple[int, int] | None:
        """The block that a rank works on."""
        return self._blocks.get(rank)

    @cached_property
    def _blocks(self) -> dict[int, tuple[int, int]]:
        return {rank: divmod(at, self.cols.parts) for at, group in enumerate(self.groups) for rank in group}

    def group(self, i: int, j: int) -> tuple[int, ...]:
        return self.groups[i * self.cols.parts + j]

    def shape(self, rank: int | None) -> tuple[int, int]:
        """Rows and columns of a rank's block; rank None: of the largest."""
        if rank is None:
            return self.rows.largest, self.cols.largest
        at = self.at(rank)
        return (0, 0) if at is None else (self.rows.count(at[0]), self.cols.count(at[1]))

    def windows(self, rank: int | None) -> list[tuple[int, int]]:
        """Rows of a block that are reduced together."""
        (rows, cols), high = self.shape(rank), self._at_once(rank)
        return [(lo, min(rows, lo + high)) for lo in range(0, rows, high)] if cols else []

    def turns(self, rank: int | None) -> int:
        """How many windows those are."""
        rows, cols = self.shape(rank)
        return -(-rows // self._at_once(rank)) if cols else 0

    def _at_once(self, rank: int | None) -> int:
        """Rows of a window."""
        return max(1, min(self.high, MESSAGE_BYTES // (max(1, self.shape(rank)[1]) * self.dtype.itemsize)))

    def rows_to(self, i: int) -> dict[int, IndexMap]:
        """The rows of block i that each part of C's rows takes."""
        return _shared(self.rows, self.C.distribution.rows, i)

    def cols_to(self, j: int) -> dict[int, IndexMap]:
        return _shared(self.cols, self.C.distribution.cols, j)

    def counts(self, i: int, j: int, window: tuple[int, int]) -> np.ndarray:
        """Words of the window of block (i, j) that go to each rank of its group."""
        group = {rank: number for number, rank in enumerate(self.group(i, j))}
        counts = np.zeros(len(group), np.int64)
        wide = {to_j: index_map.size for to_j, index_map in self.cols_to(j).items()}
        for to_i, index_map in self.rows_to(i).items():
            high = index_map.count_below(window[1]) - index_map.count_below(window[0])
            for to_j, columns in wide.items() if high else ():
                counts[group[self.C.rank(to_i, to_j)]] += high * columns
        return counts

    def traffic(self, rank: int) -> Traffic:
        at = self.at(rank)
        if at is None:
            return Traffic()
        number, counts = self.group(*at).index(rank), [self.counts(*at, window) for window in self.windows(rank)]
        if not self.read:
            return sum((reduce_scatter_traffic(words, number) for words in counts), Traffic())
        traffic = Traffic()
        traffic.read(sum(int(words[number]) for words in counts) * (len(self.group(*at)) - 1))
        return traffic

    def buffers(self, rank: int | None) -> Buffers:
        cols = self.shape(rank)[1]
        high = max((hi - lo for lo, hi in self.windows(rank)), default=0)
        mine = min(high * cols, self._largest_share) if rank is None else self._most(rank)
        return {
            "in the order of ranks": (0 if self.read else high * cols, self.dtype),
            "mine": (mine, self.dtype),
            "another's": (self._another(mine, rank), self.dtype),
        }

    def staging(self, rank: int | None) -> Buffers:
        buffers = self.buffers(rank)
        return {"staged C": buffers["in the order of ranks"], "staged part of C": buffers["mine"]}

    def _another(self, mine: int, rank: int | None) -> int:
        """What of the part of another rank is copied before it is added."""
        if self.device:
            return 0 if self.read else mine
        return min(mine, max(SLAB, self.C.local_shape(rank)[1])) * self.read

    def _most(self, rank: int) -> int:
        at = self.at(rank)
        if at is None:
            return 0
        number = self.group(*at).index(rank)
        return max((int(self.counts(*at, window)[number]) for window in self.windows(rank)), default=0)

    @property
    def _largest_share(self) -> int:
        rows, cols = self.C.local_shape(None)
        return rows * cols

    @property
    def total_words(self) -> int:
        return sum(
            self.rows.count(i) * self.cols.count(j) * (len(self.group(i, j)) - 1)
            for i in range(self.rows.parts)
            for j in range(self.cols.parts)
        )


@lru_cache(maxsize=16)
def _shared(blocks: BlockCyclic, C: BlockCyclic, part: int) -> dict[int, IndexMap]:
    return dict(index_maps(blocks, C, part))


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
