"""What a product of any size costs on any number of ranks, by formula alone: no MPI, no layouts, no list of ranks.

The figures are those of a rank with full blocks; where the grid divides the dimensions they are those of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

import numpy as np

from pdgemm.boxes import IDLE, Box, best_grids, impossible
from pdgemm.candidates import (
    REDUCED_BYTES,
    REDUCED_ROWS,
    Problem,
    cannon_on,
    inner_layouts,
    layered_on,
    stationary,
    summa_on,
)
from pdgemm.costs import MESSAGE_BYTES, gemm_flops, lower_bound
from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.explain import Candidate, in_bytes
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.machine import Machine
from pdgemm.products import Inner, Product
from pdgemm.products.summa import bundle_width
from pdgemm.schedule import panel_counts

FAMILIES = ("summa", "cannon", "stationary_a", "stationary_b", "2.5d", "inner")
LAYOUTS = ("native", "column", "row", "grid")
_KEEP = 3  # grids of each kind that are looked at
_LARGEST, _MOST_RANKS = 10**12, 10**7
_TIE = 1.01  # words that count as equal; then time decides


@dataclass(frozen=True)
class Question:
    """C (m x n) := A (m x k) B (k x n) on so many ranks.

    memory : bytes per rank for everything: its parts of A, B and C, copies, panels and messages.
    layout : where A, B and C lie before and after: "native", as the algorithm wants them; or in one block of
             columns or rows per rank, or on a near-square grid, and are redistributed.
    """

    m: int
    n: int
    k: int
    ranks: int
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float64))
    memory: int | None = None
    layout: str = "native"
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
        return replace(self, m=self.n, n=self.m, shape=self.shape and self.shape[::-1])

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
    """One algorithm on one grid; `transposed`: of C^T = B^T A^T, as `question` has it then."""

    question: Question
    box: Box
    family: str
    inside: str = ""
    transposed: bool = False

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

    @property
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
            return m, min(width, -(-n // max(box.pr, box.layers))), k
        if self.family == "inner":
            return m, n, k
        if self.cannon:
            return m, n, min(box.block, k)
        return m, n, self._panel(width)

    def _panel(self, width: int) -> int:
        """Inner indices of a panel, or of a bundle of thin ones."""
        panel, bundle = min(width, self.box.block, self.box.deep), bundle_width(self.box.deep, width)
        return bundle if 2 * panel <= bundle else panel

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
        shares = box.shares[0] if self.family == "2.5d" else box.layers
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
        return 0.0 if question.layout == "native" else question.share_bytes(question.ranks) / question.dtype.itemsize

    @property
    def words(self) -> float:
        return sum(words for _, words, *_ in self.transfers) + self.moved_words

    @property
    def messages(self) -> float:
        """Of redistributions: those of a block of columns that is cut into the rows of a grid, or the like."""
        box, native = self.box, self.question.layout == "native"
        moved = 0 if native else box.pr + box.pc + min(self.question.ranks, box.pr * box.pc) ** 0.5
        return sum(messages for _, _, messages, *_ in self.transfers) + moved

    def memory(self, width: int | None = None) -> float:
        """Bytes of a rank: its parts of A, B and C, copies of them in another layout, and buffers."""
        question, box = self.question, self.box
        width = min(width or self.width, self.width)
        itemsize = question.dtype.itemsize
        words: float
        if self.family == "stationary_a":
            slots = min(question.lookahead + 2, max(1, self.panels))
            wide = min(width, -(-box.n // max(1, box.layers)))
            words = slots * wide * (box.deep + box.high * (2 if box.layers > 1 else 1))
        elif self.cannon:
            words = (
                2.0 * ((box.pc > 1) * box.high + (box.pr > 1) * box.wide * box.pc / box.pr) * min(box.block, box.deep)
            )
        elif self.family == "inner":
            words = 0.0
        else:
            slots = min(question.lookahead + 1, max(1, self.panels))
            panel = self._panel(width)
            words = slots * panel * ((box.pc > 1) * box.high + (box.pr > 1) * box.wide)
        if self.family == "2.5d":
            words += box.high * box.wide
        if box.layers > 1 and self.family != "stationary_a":
            rows = min(box.high, self._reduced_rows)
            mine = min(rows, box.high / box.layers)
            words += box.wide * (rows + mine + rows * (self.family == "inner"))
        copies = 0 if question.layout == "native" else 2
        return self.share_bytes * (1 + copies / 2) + words * itemsize

    @cached_property
    def seconds(self) -> float:
        """By the model, as `Product.seconds`."""
        question, box, machine = self.question, self.box, self.question.machine
        itemsize = question.dtype.itemsize
        m, n, k = box.high, box.wide, box.deep
        moving = first = last = 0.0
        for kind, words, messages, stride, length, after in self.transfers:
            taken = machine.transfer(kind, words, messages, itemsize, stride, length)
            if after:
                last += taken
            else:
                moving += taken
                first += taken / max(1, self.panels) * (machine.hops(kind, length) - 1)
        rate = machine.rate(str(question.dtype), *self.at_once) if m * n * k else 1.0
        flops = gemm_flops(m, n, k, complex_=question.dtype.kind == "c")
        overlapped = self.family == "cannon" or (question.lookahead > 0 and self.family != "inner")
        moves = 0.0
        if self.moved_words:
            moves = 3 * machine.call + machine.transfer(
                "exchange", self.moved_words, self.messages, itemsize, 1, question.ranks
            )
        fresh = (self.memory() - self.share_bytes) / machine.fresh
        own = box.high * box.wide / box.layers
        passes = {"stationary_a": box.high * box.n + own, "2.5d": 2 * box.high * box.wide + own}
        passes["inner"] = passes["2.5d"]
        memory = fresh + passes.get(self.family, 0.0) * itemsize / machine.copy
        pipeline = machine.pipeline(flops / rate, moving, self.panels, overlapped, self.cannon)
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
            moves="" if self.question.layout == "native" else "ABC",
            inside=self.inside,
            verdict=verdict,
        )


def estimates(question: Question) -> list[Candidate]:
    """What there is to choose from, the choice first.

    The choice sends the fewest words of what fits the memory and leaves few ranks idle; of those within 1% it is the
    fastest.
    Raises ArgumentError where nothing is possible, MemoryLimitError where nothing fits.
    """
    best, found = chosen(question)
    limit = question.memory
    others = []
    for x in found:
        if limit is not None and x.memory(1) > limit:
            others.append(x.candidate(f"needs {in_bytes(x.memory(1))}"))
        elif x.key != best.key:
            x = _fitted(x)
            idle = f"{x.work / best.work:.2f} times the work, " if x.work * (1 - IDLE) > best.work > 0 else ""
            words = f"{x.words / best.words:.2f} times the words, " if best.words else ""
            time = f"{x.seconds / best.seconds:.2f} times the time" if best.seconds else "as long"
            others.append(x.candidate(f"{idle}{words}{time}"))
    return [best.candidate("chosen", chosen=True), *sorted(others, key=lambda x: (x.words_per_rank, x.seconds))]


def chosen(question: Question) -> tuple[Estimate, list[Estimate]]:
    """The choice, and all it was chosen from."""
    found = list({x.key: x for x in _estimates(question)}.values())
    if not found:
        raise ArgumentError(impossible(question.algorithm, question.shape, question.layers, question.ranks))
    limit = question.memory
    fitting = [_fitted(x) for x in found if limit is None or x.memory(1) <= limit]
    if not fitting:
        needed = min(x.memory(1) for x in found)
        raise MemoryLimitError(
            f"{in_bytes(limit or 0)} per rank is too small: at least {in_bytes(needed)} are needed on "
            f"{question.ranks} ranks, of which {in_bytes(question.share_bytes(question.ranks))} are A, B and C"
        )
    least = min(x.work for x in fitting)
    busy = [x for x in fitting if x.work * (1 - IDLE) <= least]
    fewest = min(x.words for x in busy)
    return min((x for x in busy if x.words <= _TIE * fewest), key=lambda x: x.seconds), found


def product_of(estimate: Estimate) -> Product:
    """The product itself, on layouts that it wants."""
    question, box = estimate.question, estimate.box
    m, n, k = question.mnk
    ranks = tuple(range(question.ranks))
    A, B, C = (
        Layout(Distribution.over((question.ranks, 1), shape), ranks, question.dtype)
        for shape in ((m, k), (k, n), (m, n))
    )
    problem = Problem(A, B, C, question.ranks, True, question.dtype, question.width, question.lookahead, question.mover)
    if estimate.family == "summa":
        return summa_on(problem, box)
    if estimate.family == "cannon":
        return cannon_on(problem, box)
    if estimate.family == "stationary_a":
        return stationary(problem, (box.pr, box.layers), ranks[: box.ranks])
    if estimate.family == "2.5d":
        return layered_on(problem, box, estimate.inside)
    a, b = list(inner_layouts(problem))[-1]
    return Inner(a, b, C, question.dtype, question.width, 0, "reduce_scatter", problem.reduced_rows, question.ranks)


def _fitted(estimate: Estimate) -> Estimate:
    """With panels as wide as the memory allows."""
    question, limit = estimate.question, estimate.question.memory
    width = question.width
    while limit is not None and width > 1 and estimate.memory(width) > limit:
        width //= 2
    return replace(estimate, question=replace(question, width=width))


def _estimates(question: Question) -> Iterator[Estimate]:
    algorithm, layers = question.algorithm, question.layers
    sides = {"row": (question.ranks, 1), "column": (1, question.ranks)}
    if algorithm in sides:
        if question.shape not in (None, sides[algorithm]):
            return
        question = replace(question, shape=sides[algorithm])
    families = {"auto": FAMILIES, "row": ("summa", "cannon"), "column": ("summa", "cannon")}.get(
        algorithm, (algorithm,)
    )

    def layered(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (c > 1) & ((a * b > 1) | (algorithm == "2.5d"))  # 1 x 1 x P is "inner"

    if layers in (None, 1) and "summa" in families:
        yield from (Estimate(question, box, "summa") for box in _boxes(question, lambda a, b, c: c == 1, 1))
    for transposed, q in enumerate((question, question.T)):
        flip = bool(transposed)
        if layers in (None, 1) and "cannon" in families:
            for box in _boxes(q, lambda a, b, c: (c == 1) & (b % a == 0), 1):
                if not flip or box.pr != box.pc:
                    yield Estimate(q, box, "cannon", transposed=flip)
        if layers in (None, 1) and ("stationary_b" if flip else "stationary_a") in families:
            if q.shape is not None:
                pr, pc = q.shape
                boxes = [Box(*q.mnk, pr, 1, pc)] if pr * pc <= q.ranks else []
            else:
                boxes = _boxes(q, lambda a, b, c: b == 1, None)
            yield from (Estimate(q, box, "stationary_a", transposed=flip) for box in boxes)
        if layers != 1 and "2.5d" in families:
            for box in _boxes(q, lambda a, b, c: layered(a, b, c) & (b % a == 0), layers):
                if not flip or box.pr != box.pc:
                    yield Estimate(q, box, "2.5d", "cannon", flip)
    if layers != 1 and "2.5d" in families:
        for box in _boxes(question, layered, layers):
            yield Estimate(question, box, "2.5d", "summa")
    alone = question.shape in (None, (1, 1)) and layers in (None, question.ranks)
    if "inner" in families and alone and (question.ranks > 1 or algorithm == "inner"):
        yield Estimate(question, Box(*question.mnk, 1, 1, question.ranks), "inner")


def _boxes(
    question: Question, fits: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], layers: int | None
) -> list[Box]:
    """The best grids of a kind, and the best of those that leave room for a block of C in each layer."""
    m, n, k = question.mnk

    def small(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        room = ((question.memory or 0) - question.share_bytes(question.ranks)) / question.dtype.itemsize
        return fits(a, b, c) & ((c == 1) | (-(-m // a) * -(-n // b).astype(float) * (1 + 1 / c) <= room))

    forced = question.algorithm != "auto"
    best = best_grids(m, n, k, question.ranks, _KEEP, layers=layers, shape=question.shape, fits=fits, anyhow=forced)
    if question.memory is not None:
        best += best_grids(m, n, k, question.ranks, _KEEP, layers=layers, shape=question.shape, fits=small)
    return best
