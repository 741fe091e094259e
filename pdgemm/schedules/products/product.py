"""The schedule of a product: the base of the schedules of all algorithms for products."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import ClassVar, Literal, Self

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Layout
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES, gemm_flops
from pdgemm.schedules.mover_registry import MOVERS, NCCL, RING, STAGED, reads
from pdgemm.schedules.products.arithmetic import Arithmetic
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.schedules.staircase import Staircase, Triangle, TriangleName, in_triangle
from pdgemm.support.members import remembered

Collective = Literal["", "allgather", "reduce_scatter"]
PANELS_STAGED = {"staged A": "panels of A", "staged B": "panels of B"}
shared_arithmetic = lru_cache(maxsize=64)(Arithmetic)


@dataclass(frozen=True)
class PanelTransport:
    """The transport of the panels of a product.   mover, nodes, staged, nccl : as in `Product`."""

    mover: str
    nodes: tuple[int, ...]
    staged: bool
    nccl: bool

    @cached_property
    def name(self) -> str:
        """The name by which reports show the transport."""
        if self.nccl:
            return NCCL.name
        through_host = self.staged and self.mover in (RING.name, "shift", "reduce_scatter")
        return STAGED.name if through_host else self.mover

    @cached_property
    def shared(self) -> bool:
        """Do ranks of a node read each other's memory?"""
        return reads(self.mover)

    @cached_property
    def fetched(self) -> bool:
        """Are panels of other ranks copied before they are multiplied, and not multiplied in place?"""
        return self.mover in MOVERS and MOVERS[self.mover].by == "copying"

    @cached_property
    def in_place(self) -> bool:
        """Are panels read in place, with all ranks on one node?"""
        return self.shared and not self.nodes


shared_transport = lru_cache(maxsize=64)(PanelTransport)


@dataclass(frozen=True)
class Product(Schedule):
    """C := alpha A B + beta C by one algorithm, on layouts that fit it.

    accumulate : the type in which products are accumulated.
    width      : width of the widest panel.
    lookahead  : number of panels in flight while an earlier panel is in use.
    mover      : name of the mover of the panels.
    nodes      : the node of each rank if panels are read in place and the ranks are on several nodes; otherwise ().
    device     : the device that holds the matrices; "": the host.
    triangle   : "L" or "U": only this triangle of C, with the diagonal, is computed, read and written; "": all of C.
    compute    : the type to which BLAS may round operands: "float16", "bfloat16" or "tf32", or the name of an
        `emulation`; "": no rounding.
    staged     : messages are staged in host memory, which MPI reads and writes.
    nccl       : NCCL sends all messages, in the order of the copy stream.
    """

    A: Layout
    B: Layout
    C: Layout
    accumulate: np.dtype
    width: int
    lookahead: int
    mover: str
    nodes: tuple[int, ...] = field(default=(), kw_only=True)
    device: str = field(default="", kw_only=True)
    staged: bool = field(default=False, kw_only=True)
    nccl: bool = field(default=False, kw_only=True)
    compute: str = field(default="", kw_only=True)
    triangle: TriangleName = field(default="", kw_only=True)
    on_grid: ClassVar[bool] = True  # False: the product runs on all ranks, without a process grid
    sums_follow: ClassVar[bool] = False  # are partial sums of C sent while the last panel is multiplied, not before?
    staged_names: ClassVar[dict[str, str]] = {}  # by buffer on the host: the buffer of the product that it stages

    @cached_property
    def mnk(self) -> tuple[int, int, int]:
        return *self.C.distribution.shape, self.A.distribution.cols.n

    @cached_property
    def grid(self) -> RankMap:
        """The process grid; panels are sent along its rows and columns, and sums through its layers."""
        return RankMap.of_layers(self.C.distribution.grid_shape, self.C.rank_map)

    @property
    def collective(self) -> Collective:
        """The collective, if it is the only one of the product; "" for other products.

        "allgather" of A or B, or "reduce_scatter" of C.
        """
        return ""

    @cached_property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        m, n, k = self.mnk
        area = m * (m + 1) // 2 if self.triangle else m * n
        return gemm_flops(1, area, k, complex_=self.accumulate.kind == "c")

    @remembered
    def kept(self, rank: int) -> Staircase | None:
        """Return the elements of a rank's local part of C that are in the triangle; None: all of C is computed."""
        return in_triangle(self.triangle, self.C, rank)

    @cached_property
    def formed(self) -> Triangle:
        """The elements that each rank computes of its block of C: all, or those in the triangle."""
        return Triangle(self.triangle, self.grid, self.A.distribution.rows, self.B.distribution.cols)

    @cached_property
    def arithmetic(self) -> Arithmetic:
        return shared_arithmetic((self.A.dtype, self.B.dtype, self.C.dtype), self.accumulate, self.compute, self.device)

    @cached_property
    def transport(self) -> PanelTransport:
        return shared_transport(self.mover, self.nodes, self.staged, self.nccl)

    @property
    def panel_dtype(self) -> np.dtype:
        return self.arithmetic.panel_dtype

    @property
    def blas_products(self) -> int:
        digits = self.arithmetic.digits
        return self.arithmetic.emulation.products if self.arithmetic.emulation else digits * (digits + 1) // 2

    @cached_property
    def sums_in_c(self) -> bool:
        """Are products accumulated in C itself?"""
        return self.C.dtype == self.accumulate

    @property
    def events(self) -> int:
        return self.panels

    def reach(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the indices of A (or B) that ranks multiply: an array for each part of its rows, and of its columns.

        In this base class each rank multiplies all inner indices.  The inner indices of a rank are ascending.
        """
        (rows, cols), k = indices_of_parts(getattr(self, name)), np.arange(self.mnk[2])
        return (rows, [k] * len(cols)) if name == "A" else ([k] * len(rows), cols)

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        """Return the extents (m, n, k) of the product of a rank; by default k is divided into the rank's steps."""
        return self.tally.local_shape(rank)

    @property
    def ahead(self) -> int:
        """The number of panels in flight while an earlier panel is in use."""
        return min(self.lookahead, self.slots - 1)

    @cached_property
    def slots(self) -> int:
        """The number of panels held at once."""
        return 1

    @property
    def spare(self) -> int:
        """The number of further slots: one on a device, because a kernel may still read the previous panel."""
        return 1 if self.device else 0

    @cached_property
    def nothing_travels(self) -> bool:
        """Does each rank hold all elements that it multiplies?"""
        return False

    @cached_property
    def exposed(self) -> tuple[str, ...]:
        """The names of the operands that the ranks of a node read in each other's memory."""
        return ("A", "B") if self.transport.shared else ()

    @property
    def first_panel_is_local(self) -> bool:
        """Does each rank hold the panels of its first step?"""
        return self.transport.in_place

    def block_mnk(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """Return the extents of one BLAS call; several calls make up a rank's m x n x k product."""
        return m, n, min(k, self.product_width)

    def copied(self, rank: int) -> int:
        rows, cols = self.C.local_shape(rank)
        return 0 if self.sums_in_c else rows * cols * self.accumulate.itemsize

    def fits(self, size: int) -> bool:
        """Do the layouts fit the algorithm on `size` ranks?"""
        raise NotImplementedError

    @property
    def turns(self) -> int:
        """The number of pieces in which partial sums of C are reduced at the end."""
        return 0

    def staged_buffers(self, rank: int | None) -> Buffers:
        if not self.staged or self.transport.shared:
            return {}
        buffers, (pr, pc) = self.buffers(rank), self.grid.shape
        ranks = {"panels of A": pc, "panels of B": pr}  # number of ranks among which these panels are sent
        return {
            name: (0 if ranks.get(staged) == 1 else buffers[staged][0], buffers[staged][1])
            for name, staged in self.staged_names.items()
        }

    def scaled(self, share: float) -> Self:
        """Return the product with panels of `share` times their width: 1 leaves them, 0 gives the smallest buffers."""
        return replace(self, width=scaled(min(self.width, self.widest), share))

    def whole(self) -> Self:
        """Return the product with the widest panels, or itself if these need more memory.

        They need no more memory, for instance, if no panels are sent.
        """
        if self.width >= self.mnk[2] or not (self.transport.in_place or self.nothing_travels):
            return self
        wide = replace(self, width=self.mnk[2])
        return wide if wide.extra_bytes(None) <= self.extra_bytes(None) else self

    @property
    def product_width(self) -> int:
        """The number of inner indices of one BLAS call."""
        return self.widest

    @property
    def panels(self) -> int:
        """The number of steps of the busiest rank."""
        return self.tally.steps

    def _sums_of_block(self, m_loc: int, n_loc: int) -> Buffers:
        """Return the buffers of the sums of a block of C, where products are not accumulated in C itself."""
        in_c = self.sums_in_c or not self.mnk[2]
        sums = 0 if in_c else self.arithmetic.held(m_loc, n_loc, self.C.order, self.accumulate)
        return {"sums": (sums, self.accumulate), "update": self.arithmetic.update(sums)}

    def _message_width(self, width: int, *sides: tuple[int, np.dtype]) -> int:
        """Return the largest width, at most `width`, at which panels fit in one message.

        sides : for each kind of panel, the words of a panel of width 1, and the element type.
        """
        if self.transport.in_place or self.nothing_travels:
            return width
        longest = max(1, *(words * dtype.itemsize for words, dtype in sides))
        return max(1, min(width, LARGEST_MESSAGE_BYTES // longest))


def on_ranks(rank_map: tuple[int, ...], shape: tuple[int, ...], size: int) -> bool:
    """Does each position of the grid have a different rank, one of `size` ranks?"""
    return len({*rank_map}) == len(rank_map) == prod(shape) and 0 <= min(rank_map) <= max(rank_map) < size


def alike(one: BlockCyclic, other: BlockCyclic) -> bool:
    """Do both distributions assign the same indices to the same parts?"""
    return one.canonical == other.canonical


def indices_of_parts(layout: Layout) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the rows of each part of a matrix's rows, and the columns of each part of its columns."""
    x = layout.distribution
    rows, cols = ([dim.indices(part) for part in range(dim.parts)] for dim in (x.rows, x.cols))
    return rows, cols


def scaled(size: int, share: float) -> int:
    """Return `share` times `size`, at least 1."""
    return max(1, int(size * share))
