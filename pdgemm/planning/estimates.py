"""What a product of any size costs on any number of ranks, by formula alone: no MPI, no layouts, no list of ranks.

The figures are those of a rank with full blocks; where the grid divides the dimensions they are those of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.model.formulas import MESSAGE_BYTES, lower_bound
from pdgemm.model.machine import Machine
from pdgemm.planning.algorithm_grids import Cut, Wish
from pdgemm.planning.candidate_table import Candidate
from pdgemm.planning.candidates import REDUCED_BYTES, REDUCED_ROWS
from pdgemm.planning.grid_search import Box
from pdgemm.schedules.product import SLAB
from pdgemm.schedules.steps import panel_counts
from pdgemm.schedules.summa_product import bundle_width

_LARGEST, _MOST_RANKS = 10**12, 10**7


@dataclass(frozen=True)
class Question:
    """C (m x n) := A (m x k) B (k x n) on so many ranks.

    memory : bytes per rank for everything: its parts of A, B and C, copies, panels and messages.
    redistributed : A, B and C lie otherwise than the algorithm wants them, before and after.
    """

    m: int
    n: int
    k: int
    ranks: int
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float64))
    memory: int | None = None
    redistributed: bool = False
    algorithm: str = "auto"
    shape: tuple[int, int] | None = None
    layers: int | None = None
    lookahead: int = 1
    mover: str = "ibcast"
    width: int = 512
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        if min(self.mnk) < 0 or max(self.mnk) > _LARGEST:
            raise ArgumentError(f"dimensions are from 0 to {_LARGEST:.0e}, got {self.m} x {self.n} x {self.k}")
        if not 1 <= self.ranks <= _MOST_RANKS:
            raise ArgumentError(f"a product needs 1 to {_MOST_RANKS:.0e} ranks, got {self.ranks}")
        if self.shape is not None and min(self.shape) < 1:
            raise ArgumentError(f"a grid has 1 x 1 ranks or more, got {self.shape[0]} x {self.shape[1]}")
        if self.layers is not None and self.layers < 1:
            raise ArgumentError(f"a grid has 1 layer or more, got {self.layers}")
        if self.memory is not None and self.memory < 0:
            raise ArgumentError(f"memory is >= 0 bytes, got {self.memory}")

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def T(self) -> Question:
        """C^T = B^T A^T."""
        return replace(self, m=self.n, n=self.m, shape=self.wish.T.shape)

    @property
    def wish(self) -> Wish:
        return Wish(self.algorithm, self.shape, self.layers)

    def share_bytes(self, ranks: int) -> int:
        """The parts of A, B and C of one of so many ranks that share them."""
        m, n, k = self.mnk
        return sum(-(-size // ranks) for size in (m * k, k * n, m * n)) * self.dtype.itemsize

    @cached_property
    def bound(self) -> float:
        """Words that no algorithm can do without."""
        words = None if self.memory is None else self.memory / self.dtype.itemsize
        return lower_bound(*self.mnk, self.ranks, words)


@dataclass(frozen=True)
class Estimate:
    """One algorithm on one grid, as in `Cut`; `question` is that of C^T = B^T A^T where it is `transposed`."""

    question: Question
    box: Box
    family: str
    inside: str = ""
    transposed: bool = False

    @property
    def cut(self) -> Cut:
        return Cut(self.box, self.family, self.inside, self.transposed)

    @property
    def name(self) -> str:
        return "stationary_b" if self.transposed and self.family == "stationary_a" else self.family

    @property
    def grid(self) -> tuple[int, int]:
        """Pr x Pc as the user sees C."""
        box = self.box
        shape = (box.pr, box.layers) if self.family == "stationary_a" else (box.pr, box.pc)
        return shape[::-1] if self.transposed else shape

    @property
    def key(self) -> tuple[object, ...]:
        return self.name, self.inside, self.grid, self.layers

    @property
    def share_bytes(self) -> int:
        """A rank's parts of A, B and C."""
        return self.question.share_bytes(self.box.ranks)

    @property
    def work(self) -> float:
        """Multiplications of a rank."""
        return float(self.box.high) * self.box.wide * self.box.deep

    @property
    def layers(self) -> int:
        return 1 if self.family == "stationary_a" else self.box.layers

    @cached_property
    def width(self) -> int:
        """The widest panel that a message takes, as in `Product`."""
        box = self.box
        longest = max(1, box.high, box.deep if self.family == "stationary_a" else box.wide)
        return max(1, min(self.question.width, MESSAGE_BYTES // (longest * self.question.dtype.itemsize)))

    @cached_property
    def panels(self) -> int:
        """Steps of a rank."""
        box, width = self.box, self.width
        if not box.k or self.family == "inner":
            return self._windows
        if self.family == "stationary_a":
            of_c, of_b = BlockCyclic.even(box.n, box.layers), BlockCyclic.even(box.n, box.pr)
            return int(panel_counts(of_c, of_b, width).sum())
        if self.cannon:
            return box.pc
        return -(-box.deep // box.block) * -(-min(box.block, box.deep) // width)

    @property
    def at_once(self) -> tuple[int, int, int]:
        """The sizes of one product, as in `Product.at_once`."""
        box, width = self.box, self.width
        m, n, k = box.high, box.wide, box.deep
        if self.family == "stationary_a":
            return m, self._columns(width), k
        if self.family == "inner":
            return m, n, k
        if self.cannon:
            return m, n, min(box.block, k)
        return m, n, self._panel(width)

    def _panel(self, width: int) -> int:
        """Inner indices of a panel, or of a bundle of thin ones."""
        panel = _cut(min(self.box.block, self.box.deep), width)
        bundle = bundle_width(self.box.deep, width, self.box.high * self.box.wide * self.question.dtype.itemsize)
        return bundle if 2 * panel <= bundle else panel

    def _columns(self, width: int) -> int:
        """Columns of a panel of "stationary_a": those that a part of B and a part of C have in common."""
        return _cut(-(-self.box.n // max(1, self.box.pr, self.box.layers)), width)

    @property
    def cannon(self) -> bool:
        return "cannon" in (self.family, self.inside)

    @property
    def _windows(self) -> int:
        """Pieces in which a block of C is added up over the layers."""
        return -(-self.box.high // self._reduced_rows) if self.box.layers > 1 else 1

    @property
    def _reduced_rows(self) -> int:
        """As in `Problem.reduced_rows`."""
        at_once = REDUCED_BYTES // (max(1, self.box.n) * self.question.dtype.itemsize)
        return max(1, min(self.box.m, max(REDUCED_ROWS, at_once)))

    @cached_property
    def transfers(self) -> list[tuple[str, float, float, int, int, bool]]:
        """Kind, words and messages received, stride and length of the direction, and whether it comes after."""
        box, panels = self.box, self.panels
        a, b, c = box.words
        itemsize, mover = self.question.dtype.itemsize, self.question.mover
        if not box.k:
            return []
        if self.family == "stationary_a":
            high, deep = -(-box.m // box.pr), -(-box.k // box.layers)
            b, c = deep * box.n * (1 - 1 / box.pr), high * box.n * (1 - 1 / box.layers)
            return [
                (mover, b, panels * (1 - 1 / box.pr), box.layers, box.pr, False),
                ("reduce", c, panels * (1 - 1 / box.layers), 1, box.layers, False),
            ]
        shares = box.shares[0]
        aligned = -(-box.high // lcm(self._reduced_rows, max(1, box.high // shares)))  # where both begin
        own = (shares + self._windows - aligned) / shares  # windows with rows of one share, on average
        added = ("reduce", c, (box.layers - 1.0) * own, box.pr * box.pc, box.layers, True)
        last = [added] if box.layers > 1 else []
        if self.family == "inner":
            return last
        if self.cannon:
            part = box.block * itemsize
            for_a = (box.pc - 1.0) * -(-box.high * part // MESSAGE_BYTES)
            for_b = (box.pr - 1.0) * -(-box.wide * part * (box.pc // box.pr) // MESSAGE_BYTES)
            mover = "shift"
        else:
            for_a, for_b = panels * (1 - 1 / box.pc), panels * (1 - 1 / box.pr)
        return [(mover, a, for_a, 1, box.pc, False), (mover, b, for_b, box.pc, box.pr, False), *last]

    @property
    def moved_words(self) -> float:
        """Received in redistributions, at most: a rank's parts of A, B and C."""
        question = self.question
        return question.share_bytes(question.ranks) / question.dtype.itemsize * question.redistributed

    @cached_property
    def words(self) -> float:
        return sum(words for _, words, *_ in self.transfers) + self.moved_words

    @property
    def messages(self) -> float:
        """Of redistributions: those of a block of columns that is cut into the rows of a grid, or the like."""
        box, question = self.box, self.question
        moved = (box.pr + box.pc + min(question.ranks, box.pr * box.pc) ** 0.5) * question.redistributed
        return sum(messages for _, _, messages, *_ in self.transfers) + moved

    def memory(self, width: int | None = None) -> float:
        """Bytes of a rank: its parts of A, B and C, copies of them in another layout, and buffers."""
        question, box = self.question, self.box
        width = min(width or self.width, self.width)
        itemsize = question.dtype.itemsize
        words: float
        if self.family == "stationary_a":
            slots = min(question.lookahead + 2, max(1, self.panels))
            wide = self._columns(width)
            words = slots * wide * (box.deep + box.high * (2 if box.layers > 1 else 1)) + 2 * min(SLAB, wide * box.high)
        elif self.cannon:
            words = (
                2.0 * ((box.pc > 1) * box.high + (box.pr > 1) * box.wide * box.pc / box.pr) * min(box.block, box.deep)
            )
        elif self.family == "inner":
            words = 0.0
        else:
            panel = self._panel(width)
            slots = min(question.lookahead + 1, 1 if panel >= box.deep else max(1, self.panels))
            words = slots * panel * ((box.pc > 1) * box.high + (box.pr > 1) * box.wide)
        if self.family == "2.5d":
            words += box.high * box.wide
        if box.layers > 1 and self.family != "stationary_a":
            rows = min(box.high, self._reduced_rows)
            down, across = box.shares
            mine = min(rows, box.high / down) * box.wide / across
            words += box.wide * rows * (1 + (self.family == "inner")) + mine + 2 * min(SLAB, mine)
        return self.share_bytes * (1 + question.redistributed) + words * itemsize

    @property
    def copied(self) -> float:
        """Bytes that a rank packs, copies or adds up beside its products, as in `Product.copied`."""
        box, itemsize = self.box, self.question.dtype.itemsize
        own, whole = box.high * box.wide / box.layers, box.high * box.wide
        if self.family == "stationary_a":
            packed = box.deep * box.n / box.pr if box.pr > 1 else 0.0
            return itemsize * (packed + box.high * box.n + own)
        packed = 0.0
        if "summa" in (self.family, self.inside):
            packed = box.deep * ((box.pc > 1) * box.high / box.pc + (box.pr > 1) * box.wide / box.pr)
        return itemsize * (packed + (2 * whole + own) * (self.family in ("2.5d", "inner")))

    @cached_property
    def seconds(self) -> float:
        """By the model, as `Product.seconds`."""
        question, box, machine = self.question, self.box, self.question.machine
        itemsize = question.dtype.itemsize
        moving = first = last = 0.0
        for kind, words, messages, stride, length, after in self.transfers:
            taken = machine.transfer(kind, words, messages, itemsize, stride, length)
            if after:
                last += taken
            else:
                moving += taken
                first += taken / max(1, self.panels) * (machine.hops(kind, length) - 1)
        computing = machine.multiply(question.dtype, (box.high, box.wide, box.deep), self.at_once)
        overlapped = self.family == "cannon" or (question.lookahead > 0 and self.family != "inner")
        moves = 0.0
        if self.moved_words:
            moves = 3 * machine.call + machine.transfer(
                "exchange", self.moved_words, self.messages, itemsize, 1, question.ranks
            )
        fresh = (self.memory() - self.share_bytes) / machine.fresh
        pipeline = machine.pipeline(computing, moving, self.panels, overlapped, self.cannon)
        memory = fresh + self.copied / machine.copy
        return moves + first + pipeline + last + memory

    def candidate(self, verdict: str = "", chosen: bool = False) -> Candidate:
        return Candidate(
            algorithm=self.name,
            grid=self.grid,
            layers=self.layers,
            words_per_rank=self.words,
            lower_bound_words=self.question.bound,
            messages_per_rank=self.messages,
            memory_bytes_per_rank=self.memory(),
            seconds=self.seconds,
            chosen=chosen,
            moves="ABC" if self.question.redistributed else "",
            inside=self.inside,
            verdict=verdict,
        )


def _cut(size: int, most: int) -> int:
    """The largest of as few even pieces, none larger than `most`."""
    return -(-size // max(1, -(-size // most)))
