"""What all algorithms have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from pdgemm.arrays import dtypes
from pdgemm.blas.local_gemm import conjugates
from pdgemm.grids.layout import Layout, positions
from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.model.formulas import MESSAGE_BYTES, gemm_flops
from pdgemm.model.machine import Machine
from pdgemm.schedules.rounds import READ as READ
from pdgemm.schedules.rounds import Round
from pdgemm.support.remembered import remembered

SLAB = 1 << 16  # elements that are rounded or added to C at a time
Buffers = dict[str, tuple[int, np.dtype]]  # name: words, type


@dataclass(frozen=True)
class Placed:
    """A process grid as a value: which rank is at (layer, i, j)."""

    shape: tuple[int, int]
    layers: int
    place: tuple[int, ...]  # layer by layer, row by row

    def layer(self, number: int) -> tuple[int, ...]:
        """The ranks of one layer, row by row."""
        plane = self.shape[0] * self.shape[1]
        return self.place[number * plane : (number + 1) * plane]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Distances between the numbers of neighbours along a row, a column and the layers."""
        pr, pc = self.shape

        def distance(step: int, parts: int) -> int:
            return abs(self.place[step] - self.place[0]) if parts > 1 else 1

        return distance(1, pc), distance(pc, pr), distance(pr * pc, self.layers)

    def layer_of(self, rank: int) -> int:
        """-1 for a rank that has no place."""
        at = self._at.get(rank)
        return -1 if at is None else at // (self.shape[0] * self.shape[1])

    @cached_property
    def _at(self) -> dict[int, int]:
        return positions(self.place)


@dataclass(frozen=True)
class Product:
    """C := alpha A B + beta C by one algorithm, on layouts that fit it.

    accumulate : the type in which products are added up.
    width      : no panel is wider.
    lookahead  : panels in flight behind the one in use.
    mover      : how panels travel.
    device     : where the matrices live; "": on the host.
    compute    : what BLAS may round operands to: "float16", "bfloat16" or "tf32"; "": nothing.
    staged     : messages go through memory of the host, which MPI reads and writes.
    """

    A: Layout
    B: Layout
    C: Layout
    accumulate: np.dtype
    width: int
    lookahead: int
    mover: str
    device: str = field(default="", kw_only=True)
    staged: bool = field(default=False, kw_only=True)
    compute: str = field(default="", kw_only=True)
    algorithm: ClassVar[str]

    @property
    def mnk(self) -> tuple[int, int, int]:
        return *self.C.distribution.shape, self.A.distribution.cols.n

    @cached_property
    def grid(self) -> Placed:
        """The grid whose rows, columns and layers the panels travel along."""
        return Placed(self.C.distribution.grid_shape, 1, self.C.place)

    @property
    def flops(self) -> int:
        """Of all ranks together."""
        return gemm_flops(*self.mnk, complex_=self.accumulate.kind == "c")

    @property
    def panel_dtype(self) -> np.dtype:
        """The type in which BLAS sees panels: int8 numbers are multiplied as float32, exactly.

        A device's BLAS takes 16-bit numbers and adds up in float32.
        """
        if self.device and self.compute in dtypes.HALF_NAMES:
            return np.dtype(self.compute)
        if self.device and self.accumulate == np.float32 and self.A.dtype == self.B.dtype in dtypes.HALVES:
            return self.A.dtype
        return self.accumulate if self.accumulate in dtypes.BLAS else np.dtype(np.float32)

    @property
    def rounded(self) -> np.dtype | None:
        """The type that the host rounds operands to, which its BLAS does not take."""
        return np.dtype(self.compute) if self.compute in dtypes.HALF_NAMES and not self.device else None

    @property
    def update_dtype(self) -> np.dtype:
        """The type in which sums are added to C."""
        return dtypes.arithmetic(self.accumulate, self.C.dtype)

    @property
    def sums_in_c(self) -> bool:
        """Are products added up in C itself?"""
        return self.C.dtype == self.accumulate

    def converts(self, operand: Layout, order: str) -> bool:
        """Does each panel need a second buffer: for another type, or for a conjugate that BLAS cannot form?

        order : memory order of what the products are accumulated in.
        """
        stuck = operand.conjugated and not conjugates(operand.order, order)
        return stuck or self.rounded is not None or operand.dtype != self.panel_dtype

    @property
    def total_words(self) -> int:
        """Words that all ranks together send."""
        raise NotImplementedError

    def rounds(self) -> Iterator[Round]:
        """What all ranks do, round by round."""
        raise NotImplementedError

    @property
    def events(self) -> int:
        """Messages and products of a rank, about."""
        return self.panels

    def transfers(self, rank: int) -> list[Transfer]:
        """What a rank sends and receives, by direction."""
        raise NotImplementedError

    def traffic(self, rank: int) -> Traffic:
        """Words and messages of a rank."""
        return sum((transfer.traffic for transfer in self.transfers(rank)), Traffic())

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        """Rows, columns and inner indices that a rank multiplies."""
        raise NotImplementedError

    def seconds(self, machine: Machine, rank: int) -> float:
        """By the model: steps of a transfer and a product, in part at the same time; then what cannot be hidden."""
        m, n, k = self.local_shape(rank)
        moving, first, after = 0.0, 0.0, 0.0
        for x in self.transfers(rank):
            # BLAS reads in place as it reads what is this rank's own
            in_place = 0 if self.fetched else x.traffic.words_read
            words, messages = x.traffic.words_received - in_place, x.traffic.messages_received
            taken = machine.transfer(x.kind, words, messages, x.itemsize, x.stride, x.length)
            if x.after:
                after += taken
            else:
                moving += taken
                first += taken / max(1, self.panels) * (machine.hops(x.kind, x.length) - 1)
        computing = machine.multiply(self.panel_dtype, (m, n, k), self.at_once(m, n, k))
        pipeline = machine.pipeline(computing, moving, self.panels, self.lookahead > 0, self.at_hand)
        return self.memory_seconds(machine, rank) + after + first + pipeline

    def memory_seconds(self, machine: Machine, rank: int) -> float:
        """For new memory, and for what is copied from one place to another."""
        return self.extra_bytes(rank) / machine.fresh + self.copied(rank) / machine.copy

    @property
    def carried(self) -> str:
        """How panels travel, in a word."""
        return "staged" if self.staged and self.mover in ("ring", "shift", "reduce_scatter") else self.mover

    @property
    def shared(self) -> bool:
        """Is anything read in the memory of the other ranks of a node, where it lies?"""
        return self.mover in READ

    @property
    def fetched(self) -> bool:
        """Is what is read there copied first, and not multiplied where it lies?"""
        return self.mover == "ipc"

    @property
    def ahead(self) -> int:
        """Panels in flight behind the one in use."""
        return min(self.lookahead, self.slots - 1)

    @property
    def slots(self) -> int:
        """Panels held at once."""
        return 1

    @property
    def spare(self) -> int:
        """Slots beyond those of panels in use and in flight: a device multiplies what the host is done with."""
        return 1 if self.device else 0

    @property
    def in_place(self) -> bool:
        """Are all of them on this node?"""
        return self.shared

    @property
    def stays(self) -> bool:
        """Has each rank all that it multiplies?"""
        return False

    @property
    def lends(self) -> str:
        """Those of A and B that the ranks of a node read in each other's memory."""
        return "AB" if self.shared else ""

    @property
    def lent_buffers(self) -> tuple[str, ...]:
        """The buffers that they read there."""
        return ()

    @property
    def at_hand(self) -> bool:
        """Is all there that the first step needs?"""
        return self.in_place

    def at_once(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """The sizes of one of the products that make up a rank's m x n x k."""
        return m, n, min(k, self.product_width)

    def copied(self, rank: int) -> int:
        """Bytes that a rank packs, copies or adds up beside its products."""
        rows, cols = self.C.local_shape(rank)
        return 0 if self.sums_in_c else rows * cols * self.accumulate.itemsize

    def buffers(self, rank: int | None) -> Buffers:
        """What a rank allocates beyond A, B and C."""
        raise NotImplementedError

    def staging(self, rank: int | None) -> Buffers:
        """What it allocates on the host beside them, where messages are staged."""
        raise NotImplementedError

    def staged_buffers(self, rank: int | None) -> Buffers:
        return self.staging(rank) if self.staged and not self.shared else {}

    def scaled(self, share: float) -> Self:
        """With panels of a share of their width, from 1 as it is to 0, with buffers as small as can be."""
        return replace(self, width=scaled(min(self.width, self.widest), share))

    def whole(self) -> Self:
        """With panels as wide as can be if that needs no more room, as where none of them travel."""
        wide = replace(self, width=max(self.width, self.mnk[2]))
        return wide if (self.in_place or self.stays) and wide.extra_bytes(None) <= self.extra_bytes(None) else self

    @property
    def widest(self) -> int:
        """Inner indices of the widest panel."""
        raise NotImplementedError

    @property
    def product_width(self) -> int:
        """Inner indices that are multiplied at once."""
        return self.widest

    @property
    def panels(self) -> int:
        """Steps of the busiest rank."""
        raise NotImplementedError

    @remembered
    def extra_bytes(self, rank: int | None) -> int:
        """All of these together."""
        buffers = [*self.buffers(rank).values(), *self.staged_buffers(rank).values()]
        return sum(words * dtype.itemsize for words, dtype in buffers)

    def _update(self, words: int) -> tuple[int, np.dtype]:
        """Room in which so many sums are rounded, or added to C."""
        return 0 if self.device else 2 * min(words, SLAB), self.update_dtype

    def _exact(self, rows: int, cols: int) -> int:
        """32-bit numbers in which int8 products are formed, and made integers, before they are added up."""
        at_once = rows * cols if self.device else 2 * min(SLAB, rows * cols)
        return 0 if self.accumulate in dtypes.BLAS else at_once

    def _message_width(self, width: int, *sides: tuple[int, np.dtype]) -> int:
        """The width at which no panel of that many words across, `sides`, is too large for a message."""
        if self.in_place or self.stays:
            return width
        longest = max(1, *(words * dtype.itemsize for words, dtype in sides))
        return max(1, min(width, MESSAGE_BYTES // longest))


def scaled(size: int, share: float) -> int:
    """A share of a size, at least 1."""
    return max(1, int(size * share))
