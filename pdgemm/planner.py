"""Decide before running: what is moved where, by which algorithm, and what it costs each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from pdgemm import dtypes
from pdgemm.candidates import Problem, Way, ways
from pdgemm.costs import lower_bound
from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.exchange import Exchange, plan_exchange
from pdgemm.grids.layout import Layout
from pdgemm.local import EXACT_WIDTH
from pdgemm.machine import Machine
from pdgemm.products import Product
from pdgemm.timing import Traffic

PANEL_WIDTH = 512  # wide enough for BLAS to reach its peak, narrow enough to stay in flight behind it
_NO_LIMIT = 1 << 62
_WORTH_MOVING = 1.5  # how many times faster makes up for the memory of moved copies, and for what no model sees
_SAMPLE = 4  # ranks that are looked at where there are more


@dataclass(frozen=True)
class Plan:
    """C := alpha A B + beta C from the user's layouts to the user's layouts: a value, without data.

    product    : the algorithm, on layouts that fit it.
    transposed : it is a product C^T = B^T A^T, and `product.A` is the layout of B^T.
    moves      : what is redistributed: A and B before the product, C after it, from and to their own layouts.
    given      : the layouts of A, B and C.
    """

    product: Product
    transposed: bool
    moves: tuple[tuple[str, Exchange], ...]
    given: tuple[Layout, Layout, Layout]

    @property
    def algorithm(self) -> str:
        return Way(self.product, self.transposed).algorithm

    @property
    def mnk(self) -> tuple[int, int, int]:
        m, n, k = self.product.mnk
        return (n, m, k) if self.transposed else (m, n, k)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Pr, Pc and layers of the grid of the product."""
        return Way(self.product, self.transposed).shape

    def traffic(self, rank: int) -> Traffic:
        """Words and messages of a rank, moves included."""
        return sum((move.traffic(rank) for _, move in self.moves), self.product.traffic(rank))

    def extra_bytes(self, rank: int | None) -> int:
        """Memory of a rank beyond A, B and C as they were given; rank None: at most, of any rank."""
        return self.product.extra_bytes(rank) + sum(
            move.extra_bytes(rank) + (move.source if name == "C" else move.target).local_bytes(rank)
            for name, move in self.moves
        )

    @cached_property
    def description(self) -> str:
        """All of the plan in words, to compare among ranks."""
        return repr(self)

    @property
    def total_words(self) -> int:
        """Words that all ranks together send."""
        return self.product.total_words + sum(move.total_words for _, move in self.moves)

    @property
    def lower_bound_words(self) -> float:
        """What no algorithm can do without, of a rank that receives most; of all ranks of the communicator."""
        m, n, k = self.product.mnk
        return lower_bound(m, n, k, max(1, len({r for x in self.given for r in x.place})))

    def seconds(self, machine: Machine, ranks: Sequence[int]) -> float:
        """Of the slowest of these ranks, by the model."""
        return max(
            self.product.seconds(machine, rank) + sum(move.seconds(machine, rank) for _, move in self.moves)
            for rank in ranks
        )


@lru_cache(maxsize=256)
def plan_product(
    A: Layout,
    B: Layout,
    C: Layout,
    size: int,
    *,
    accumulate: np.dtype,
    beta_is_zero: bool = True,
    algorithm: str = "auto",
    shape: tuple[int, int] | None = None,
    layers: int | None = None,
    lookahead: int = 1,
    mover: str = "ibcast",
    panel_width: int | None = None,
    memory_limit: int | None = None,
    machine: Machine | None = None,
) -> Plan:
    """The plan that takes the least time by the model among those that fit `memory_limit` bytes on every rank.

    New grids are those on which a rank receives the fewest words (`pdgemm.boxes`).  What is redistributed, and the
    memory and time it takes, is part of a plan.
    size : ranks of the communicator in which the layouts number their ranks.
    Raises ArgumentError where no grid of the ranks fits the algorithm, and MemoryLimitError, saying what is needed,
    where nothing fits.
    """
    width = min(panel_width or PANEL_WIDTH, _NO_LIMIT if accumulate in dtypes.BLAS else EXACT_WIDTH)
    problem = Problem(A, B, C, size, beta_is_zero, accumulate, width, lookahead, mover)
    best_first = candidates(problem, algorithm, shape, layers, machine or Machine())
    if memory_limit is None:
        return next(best_first)
    least = _NO_LIMIT
    for plan in best_first:
        fitted = fit(plan, memory_limit, problem)
        if isinstance(fitted, Plan):
            return fitted
        least = min(least, fitted)
    raise MemoryLimitError(
        f"memory limit {memory_limit} bytes per rank is too small for A ({A}), B ({B}) and C ({C}): "
        f"at least {least} bytes are needed, {least - memory_limit} more"
        + (f", with lookahead {lookahead}" if lookahead else "")
    )


def candidates(
    problem: Problem, algorithm: str, shape: tuple[int, int] | None, layers: int | None, machine: Machine
) -> Iterator[Plan]:
    """Plans, the cheapest first; what need not be known of the others is not computed.

    What a plan costs is its time, and half as much again where matrices are moved: their copies take memory, and
    the model is not exact.
    """
    ranks = sample(problem.size)
    found = dict.fromkeys(ways(problem, algorithm, shape, layers))
    if not found:
        raise ArgumentError(_impossible(algorithm, shape, layers, problem.size))
    # a heap of costs, at first without the moves, which come when a plan is the cheapest so far
    heap: list[tuple[float, int, Way, Plan | None]] = []
    for number, way in enumerate(found):
        cost = max(way.product.seconds(machine, rank) for rank in ranks)
        moved = any(not x.same_place(to) for x, to in zip((problem.A, problem.B, problem.C), way.layouts))
        heap.append((cost * _WORTH_MOVING if moved else cost, number, way, None))
    heapify(heap)
    while heap:
        _, number, way, plan = heappop(heap)
        if plan is not None:
            yield plan
        else:
            plan = with_moves(way, problem, None)
            cost = plan.seconds(machine, ranks) * (_WORTH_MOVING if plan.moves else 1)
            heappush(heap, (cost, number, way, plan))


def sample(size: int) -> list[int]:
    """Ranks to look at: all of few, some of many."""
    return sorted({round(x) for x in np.linspace(0, size - 1, min(size, _SAMPLE))})


def fit(plan: Plan, limit: int, problem: Problem) -> Plan | int:
    """The plan with as much room as the limit allows, or the bytes that it needs at least."""
    if plan.extra_bytes(None) <= limit:
        return plan
    way = Way(plan.product, plan.transposed)

    def with_room(share: float, spare: int) -> Plan:
        return with_moves(way._replace(product=way.product.scaled(share)), problem, spare)

    narrowest = with_room(0, 0)
    spare = limit - narrowest.extra_bytes(None)
    if spare < 0:
        return narrowest.extra_bytes(None)
    # half of what is left over goes to the messages of moves, the rest to panels
    spare //= 2 * max(1, len(plan.moves))
    best, low, high = with_room(0, spare), 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        tried = with_room(middle, spare)
        if tried.extra_bytes(None) <= limit:
            best, low = tried, middle
        else:
            high = middle
    return best


def with_moves(way: Way, problem: Problem, spare: int | None) -> Plan:
    """The product with the exchanges it needs.

    spare : bytes for the messages of each exchange, beyond what messages of one element take; None: no limit.
    """
    given, size = (problem.A, problem.B, problem.C), problem.size
    a, b, c = way.layouts
    moves = []
    for name, x, to, plain in (("A", given[0], a, True), ("B", given[1], b, True), ("C", c, given[2], problem.plain)):
        if not x.same_place(to):
            least = 0 if spare is None else plan_exchange(x, to, size, plain, 0).extra_bytes(None)
            moves.append((name, plan_exchange(x, to, size, plain, None if spare is None else least + spare)))
    return Plan(way.product, way.transposed, tuple(moves), given)


def _impossible(algorithm: str, shape: tuple[int, int] | None, layers: int | None, size: int) -> str:
    """Why there is no grid for what was asked, and for what there is one."""
    asked = f"{algorithm} on {shape[0]} x {shape[1]} ranks" if shape else algorithm
    asked += f" in {layers} layers" if layers else ""
    fitting = [f"{d}x{size // d}" for d in range(1, size + 1) if size % d == 0]
    if algorithm == "cannon":
        fitting = [x for x in fitting if _divides(*map(int, x.split("x")))]
    return (
        f"{asked} is impossible on {size} ranks: " + {
            "cannon": "one side of the grid has to divide the other, ",
            "2.5d": f"layers are 2 or more, and Pr x Pc x layers at most {size}; ",
            "inner": f"each rank is a layer of its own, a 1 x 1 grid in {size} layers; ",
        }.get(algorithm, f"Pr x Pc x layers is at most {size}, and only 2.5d and inner have layers; ")
        + f"grids of all ranks in one layer: {', '.join(fitting)}"
    )  # fmt: skip


def _divides(pr: int, pc: int) -> bool:
    return max(pr, pc) % min(pr, pc) == 0
