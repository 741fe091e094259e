"""The schedule of a product: the base of the schedules of all algorithms for products."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import ClassVar, Literal, Self

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Layout
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.alignment import aligned_words
from pdgemm.local.arrays.emulation import EMULATIONS, Emulation
from pdgemm.local.blas.local_gemm import conjugates, padded
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES, gemm_flops
from pdgemm.schedules.mover_registry import MOVERS, NCCL, RING, STAGED, reads
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.schedules.staircase import LEAST, ON_DEVICE, Staircase, TriangleName
from pdgemm.support.remembered import remembered

Collective = Literal["", "allgather", "reduce_scatter"]
SLAB = 1 << 16  # elements that are rounded or added to C at a time
TILE = 1 << 18  # elements of C that are formed from slices at a time: BLAS is slower on smaller tiles


@dataclass(frozen=True)
class Product(Schedule):
    """C := alpha A B + beta C by one algorithm, on layouts that fit it.

    accumulate : the type in which products are accumulated.
    width      : width of the widest panel.
    lookahead  : number of panels in flight behind the one in use.
    mover      : name of the mover of the panels.
    nodes      : the node of each rank, where panels are read in place and the ranks are on several nodes; else ().
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
    on_grid: ClassVar[bool] = True  # False: the product runs on all ranks, on no grid of its own

    @cached_property
    def mnk(self) -> tuple[int, int, int]:
        return *self.C.distribution.shape, self.A.distribution.cols.n

    @cached_property
    def grid(self) -> RankMap:
        """The process grid; panels are sent along its rows and columns, and sums through its layers."""
        return RankMap.of_layers(self.C.distribution.grid_shape, self.C.rank_map)

    @property
    def collective(self) -> Collective:
        """The one collective of the product: an all-gather of A or B, or a reduce-scatter of C; "": any other."""
        return ""

    @cached_property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        m, n, k = self.mnk
        area = m * (m + 1) // 2 if self.triangle else m * n
        return gemm_flops(1, area, k, complex_=self.accumulate.kind == "c")

    @remembered
    def kept(self, rank: int) -> Staircase | None:
        """Return the elements of a rank's local part of C that lie in the triangle; None: all of C is computed."""
        (i, j), c = self.C.coords(rank), self.C.distribution
        return Staircase.of(self.triangle, c.rows.indices(i), c.cols.indices(j)) if self.triangle else None

    def formed(self, rank: int) -> Staircase | None:
        """Return the elements that a rank computes of its block of sums of C; None: all elements."""
        return self.kept(rank)

    @remembered
    def share(self, rank: int) -> float:
        """Return the fraction of the elements of a rank's m x n block that the rank computes."""
        if not self.triangle:
            return 1.0
        m, n, _ = self.local_shape(rank)
        formed = self.formed(rank) if m * n else None
        return 1.0 if formed is None else formed.area / (m * n)

    @cached_property
    def shares(self) -> np.ndarray | float:
        """The `share` of each rank, for a `WorkPiece`; 1.0 where all ranks compute whole blocks."""
        if not self.triangle:
            return 1.0
        return np.array([self.share(rank) for rank in range(1 + max(self.grid.ranks))])

    @cached_property
    def panel_dtype(self) -> np.dtype:
        """The type of panels that are passed to BLAS: int8 elements are multiplied as float32 on the host, exactly.

        The BLAS of a device takes 16-bit elements and accumulates in float32, and int8 and accumulates in int32.
        """
        if self.integers_on_device:
            return np.dtype(np.int8)
        if self.emulation:
            return np.dtype(np.float32)
        if self.device and self.compute in dtypes.HALF_NAMES:
            return np.dtype(self.compute)
        if self.device and self.accumulate == np.float32 and self.A.dtype == self.B.dtype in dtypes.NARROW:
            return self.A.dtype
        return self.accumulate if self.accumulate in dtypes.BLAS else np.dtype(np.float32)

    @property
    def integers_on_device(self) -> bool:
        """Are int8 panels multiplied by a device, from padded copies?  See `local_gemm.multiply_integers`."""
        return bool(self.device) and self.accumulate not in dtypes.BLAS

    @cached_property
    def rounded(self) -> np.dtype | None:
        """The type to which operands are rounded on the host, where BLAS does not take this type; None: no rounding."""
        return np.dtype(self.compute) if self.compute in dtypes.HALF_NAMES and not self.device else None

    @cached_property
    def emulation(self) -> Emulation | None:
        """How operands are cut into slices that BLAS multiplies exactly; None: BLAS multiplies whole numbers."""
        return EMULATIONS.get(self.compute)

    @property
    def blas_products(self) -> int:
        return self.emulation.products if self.emulation else 1

    @cached_property
    def wants_alignment(self) -> bool:
        """Does a device multiply panels faster where rows begin at multiples of 16 bytes?  See docs/gpu-measured.md."""
        fast = (*dtypes.NARROW, np.dtype(np.float64))
        return bool(self.device) and (self.panel_dtype in fast or self.compute == "tf32")

    @cached_property
    def sums_in_c(self) -> bool:
        """Are products accumulated in C itself?"""
        return self.C.dtype == self.accumulate

    def converts(self, operand: Layout, order: str) -> bool:
        """Does each panel need a second buffer: for another type, or for a conjugate that BLAS cannot form?

        order : memory order of the array in which products are accumulated.
        """
        unsupported = operand.conjugated and not conjugates(operand.order, order)
        changed = self.rounded is not None or self.emulation is not None
        return unsupported or changed or operand.dtype != self.panel_dtype

    @property
    def last_rank(self) -> int:
        return max(*self.grid.ranks, *self.A.rank_map, *self.B.rank_map, *self.C.rank_map)

    @property
    def events(self) -> int:
        return self.panels

    def reach(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the indices of A (of B) that ranks multiply: by part of its rows, and by part of its columns.

        Here each rank multiplies all inner indices.  A rank's inner indices ascend.
        """
        (rows, cols), k = self._own(name), np.arange(self.mnk[2])
        return (rows, [k] * len(cols)) if name == "A" else ([k] * len(rows), cols)

    def _own(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the rows of each part of A's (of B's) rows, and the columns of each part of its columns."""
        x = getattr(self, name).distribution
        rows, cols = ([dim.indices(part) for part in range(dim.parts)] for dim in (x.rows, x.cols))
        return rows, cols

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        """Return the extents (m, n, k) of the product of a rank; by default k is divided into the rank's steps."""
        return self.tally.local_shape(rank)

    @cached_property
    def transport(self) -> str:
        """The name of the transport of the panels."""
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

    @property
    def ahead(self) -> int:
        """The number of panels in flight behind the one in use."""
        return min(self.lookahead, self.slots - 1)

    @cached_property
    def slots(self) -> int:
        """The number of panels held at once."""
        return 1

    @property
    def spare(self) -> int:
        """The number of slots beyond those in use and in flight: a device may still read a panel that the host left."""
        return 1 if self.device else 0

    @cached_property
    def in_place(self) -> bool:
        """Are panels read in place, with all ranks on one node?"""
        return self.shared and not self.nodes

    @property
    def nothing_travels(self) -> bool:
        """Does each rank hold all elements that it multiplies?"""
        return False

    @property
    def exposed(self) -> tuple[str, ...]:
        """The names of the operands that the ranks of a node read in each other's memory."""
        return ("A", "B") if self.shared else ()

    @property
    def first_panel_is_local(self) -> bool:
        """Does each rank hold the panels of its first step?"""
        return self.in_place

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

    @cached_property
    def sums_follow(self) -> bool:
        """Are partial sums of C sent while the last panel is multiplied, and not before?"""
        return False

    def staging(self, rank: int | None) -> Buffers:
        """Return the further buffers of a rank on the host, where messages are staged in host memory."""
        return {}

    def staged_buffers(self, rank: int | None) -> Buffers:
        return self.staging(rank) if self.staged and not self.shared else {}

    def scaled(self, share: float) -> Self:
        """Return the product with panels of `share` times their width: 1 changes none, 0 makes the buffers smallest."""
        return replace(self, width=scaled(min(self.width, self.widest), share))

    def whole(self) -> Self:
        """Return the product with the widest panels if these need no more memory, for instance if none are sent."""
        if not (self.in_place or self.nothing_travels):
            return self
        wide = replace(self, width=max(self.width, self.mnk[2]))
        return wide if wide.extra_bytes(None) <= self.extra_bytes(None) else self

    @property
    def product_width(self) -> int:
        """The number of inner indices of one BLAS call."""
        return self.widest

    @property
    def panels(self) -> int:
        """The number of steps of the busiest rank."""
        return self.tally.steps

    def _update(self, words: int) -> tuple[int, np.dtype]:
        """Return size and type of the workspace in which `words` sums are rounded, or added to C."""
        return 0 if self.device else 2 * min(words, SLAB), self._sum_dtype

    @cached_property
    def _sum_dtype(self) -> np.dtype:
        """The type in which products are added to C."""
        return dtypes.arithmetic(self.accumulate, self.C.dtype)

    def _local_buffers(self, m: int, n: int, k: int, convert: tuple[bool, bool]) -> Buffers:
        """Return the buffers of local products: converted panels of A and B, and int8 products before they are added.

        m, n, k : extents of the largest product.   convert : does each panel of A, and of B, need a second buffer?
        """
        if self.emulation:
            return self._slice_buffers(self.emulation, m, n, k)
        exact = 0 if self.accumulate in dtypes.BLAS else 2 * min(SLAB, m * n)  # the products, and as integers
        convert_a, convert_b = convert
        if self.integers_on_device:
            m, n, k = map(padded, (m, n, k))
            exact, convert_a, convert_b = m * n, True, True
        left, right = (self.held(m, k, self.A.order, self.panel_dtype), self.held(k, n, self.B.order, self.panel_dtype))
        return {
            "converted A": (convert_a * left, self.panel_dtype),
            "converted B": (convert_b * right, self.panel_dtype),
            "exact": (exact, np.dtype(np.int32) if self.integers_on_device else self.panel_dtype),
        }

    def _slice_buffers(self, how: Emulation, m: int, n: int, k: int) -> Buffers:
        """Return the buffers of `slices.SliceBuffers`."""
        tile, most = min(TILE, m * n), min(TILE, max(m * n, m * k, k * n))
        return {
            "converted A": (how.slices * m * k, self.panel_dtype),
            "converted B": (how.slices * k * n, self.panel_dtype),
            "exact": (tile, self.panel_dtype),
            "sums of slices": (most, how.sums_dtype),
            "exponents": (how.scaled * (m + n), np.dtype(np.int32)),
        }

    def held(self, rows: int, cols: int, order: str, dtype: np.dtype) -> int:
        """Return the words of memory of an array that does not travel, whose rows a device aligns."""
        return aligned_words(rows, cols, order, dtype.itemsize) if self.device else rows * cols

    def _corner(self, rows: int, cols: int) -> dict[str, tuple[int, np.dtype]]:
        """Return the buffer of a product that the diagonal crosses, of which one triangle is written to C."""
        return {"corner": (min(rows * cols, self.corner_side**2), self.accumulate)} if self.triangle else {}

    @property
    def corner_side(self) -> int:
        """Rows and columns of the largest tile of C that the diagonal crosses."""
        return ON_DEVICE if self.device else LEAST

    def _message_width(self, width: int, *sides: tuple[int, np.dtype]) -> int:
        """Return the width at which a panel fits in one message.   sides : words across a panel, and element type."""
        if self.in_place or self.nothing_travels:
            return width
        longest = max(1, *(words * dtype.itemsize for words, dtype in sides))
        return max(1, min(width, LARGEST_MESSAGE_BYTES // longest))


def on_ranks(rank_map: tuple[int, ...], shape: tuple[int, ...], size: int) -> bool:
    """Does each position of the grid have a rank of its own, one of `size` ranks?"""
    return len({*rank_map}) == len(rank_map) == prod(shape) and 0 <= min(rank_map) <= max(rank_map) < size


def alike(one: BlockCyclic, other: BlockCyclic) -> bool:
    """Do both distributions assign the same indices to the same parts?"""
    return one.canonical == other.canonical


def scaled(size: int, share: float) -> int:
    """Return `share` times `size`, at least 1."""
    return max(1, int(size * share))
