"""Decide before running: what is moved where, by which algorithm, and what it costs each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from math import inf
from typing import Self

import numpy as np

from pdgemm.arrays import dtypes
from pdgemm.blas.local_gemm import EXACT_WIDTH
from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.model.formulas import lower_bound
from pdgemm.planning.algorithm_grids import impossible
from pdgemm.planning.candidate_table import Candidate, table
from pdgemm.planning.candidates import BROADCASTS, Problem, Way, ways, ways_in_place
from pdgemm.planning.plan_json import pack, unpack
from pdgemm.schedules import Product
from pdgemm.schedules.exchange import Exchange, plan_exchange
from pdgemm.schedules.product import Buffers
from pdgemm.support.remembered import remembered
from pdgemm.support.text import in_bytes

PANEL_WIDTH = 512  # wide enough for BLAS to reach its peak, narrow enough to stay in flight behind it
DEVICE_PANEL_WIDTH = 2048  # for a device that multiplies a hundred times as fast, but reads C no more than ten times
WIDTHS = (2048, 1024, 512, 256, 128)  # of panels, where none is asked for
_TIE = 1.1  # costs that are taken to be equal
_WORTH_TUNING = 0.99  # of the time: less is no reason to leave the default
_MOVES_WEIGH = 2  # times their seconds: for the memory of the copies, and for what no model sees
_SAMPLE = 4  # ranks that are looked at where there are more
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, eq=False)
class ProductPlan:
    """C := alpha A B + beta C from the user's layouts to the user's layouts: a value, without data.

    product    : the algorithm, on layouts that fit it.
    transposed : it is a product C^T = B^T A^T, and `product.A` is the layout of B^T.
    moves      : what is redistributed: A and B before the product, C after it, from and to their own layouts.
    problem    : what was asked.

    Plans compare equal if they do the same; `str` tells what, `explain()` also what else was considered.
    """

    product: Product
    transposed: bool
    moves: tuple[tuple[str, Exchange], ...]
    problem: Problem

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProductPlan) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(self._fields)

    @property
    def _fields(self) -> tuple[object, ...]:
        return self.product, self.transposed, self.moves, self.problem

    @property
    def way(self) -> Way:
        """The product on its layouts, as the user sees them."""
        return Way(self.product, self.transposed)

    @cached_property
    def algorithm(self) -> str:
        return self.way.algorithm

    @property
    def inside(self) -> str:
        """The algorithm of each layer of "2.5d"."""
        return getattr(self.product, "inside", "")

    @property
    def mnk(self) -> tuple[int, int, int]:
        m, n, k = self.product.mnk
        return (n, m, k) if self.transposed else (m, n, k)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Pr, Pc and layers of the grid of the product."""
        return self.way.shape

    @remembered
    def traffic(self, rank: int) -> Traffic:
        """Words and messages of a rank, moves included."""
        return sum((move.traffic(rank) for _, move in self.moves), self.product.traffic(rank))

    @remembered
    def buffers(self, rank: int) -> Buffers:
        """What the product allocates on a rank."""
        return self.product.buffers(rank)

    @remembered
    def extra_bytes(self, rank: int | None) -> int:
        """Memory of a rank beyond A, B and C as they were given; rank None: at most, of any rank."""
        staged = sum(layout.local_bytes(rank) for layout in self.staged.values())
        return (
            self.product.extra_bytes(rank)
            + staged
            + sum(
                move.extra_bytes(rank) + (move.source if name == "C" else move.target).local_bytes(rank)
                for name, move in self.moves
            )
        )

    @cached_property
    def needs_node_memory(self) -> bool:
        """Does it allocate memory that the ranks of a node share?"""
        product, moved = self.product, dict(self.moves)
        back = "C" in moved and moved["C"].shared
        return bool(self.staged or product.lent_buffers or {*product.lends} & {*moved}) or back

    @cached_property
    def staged(self) -> dict[str, Layout]:
        """Operands that are copied to where the ranks of the node can read them."""
        problem = self.problem
        stay = set(problem.private if self.product.lends else "") - {name for name, _ in self.moves}
        return {name: x for name, x in (("A", problem.A), ("B", problem.B)) if name in stay}

    @cached_property
    def description(self) -> str:
        """All of the plan in words, to compare among ranks."""
        return repr(self)

    @property
    def total_words(self) -> int:
        """Words that all ranks together send."""
        return self.product.total_words + sum(move.total_words for _, move in self.moves)

    @cached_property
    def words(self) -> int:
        """Received by the busiest of some ranks, redistribution included."""
        return max(self.traffic(rank).words_received for rank in sample(self.problem.size))

    @property
    def weight(self) -> float:
        """Words received, and memory beyond A, B and C as words: what counts among plans that take as long."""
        return self.words + self.extra_bytes(None) / self.product.accumulate.itemsize

    @cached_property
    def lower_bound_words(self) -> float:
        """What no algorithm can do without, of the rank that receives most; without redistribution."""
        return lower_bound(*self.mnk, self.problem.size)

    @cached_property
    def seconds(self) -> float:
        """Of the slowest of some ranks, by the model of `problem.machine`."""
        return max(self._seconds(rank) for rank in sample(self.problem.size))

    @cached_property
    def cost(self) -> float:
        """What plans are compared by: time, that of moves counted twice."""
        return max(self._seconds(rank, _MOVES_WEIGH) for rank in sample(self.problem.size))

    def _seconds(self, rank: int, weight: float = 1) -> float:
        machine = self.problem.machine
        moving = sum(move.seconds(machine, rank) for _, move in self.moves)
        copies = (self.extra_bytes(rank) - self.product.extra_bytes(rank)) / machine.fresh
        copies += sum(layout.local_bytes(rank) for layout in self.staged.values()) / machine.copy
        return self.product.seconds(machine, rank) + weight * (moving + copies)

    def candidate(self, verdict: str = "", chosen: bool = False) -> Candidate:
        """The plan in figures, of the busiest of some ranks."""
        traffic = [self.traffic(rank) for rank in sample(self.problem.size)]
        return Candidate(
            algorithm=self.algorithm,
            grid=self.shape[:2],
            layers=self.shape[2],
            words_per_rank=self.words,
            lower_bound_words=self.lower_bound_words,
            messages_per_rank=max(x.messages_received for x in traffic),
            memory_bytes_per_rank=self.extra_bytes(None),
            seconds=self.seconds,
            chosen=chosen,
            moves="".join(name for name, _ in self.moves),
            inside=self.inside,
            verdict=verdict,
        )

    def candidates(self) -> list[Candidate]:
        """All that was considered, best first: this plan, and why not the others."""
        found: dict[object, Candidate] = {}
        limit = self.problem.memory_limit
        for plan in candidates(self.problem):
            fitted = tuned(fit(plan, limit))
            if fitted == self:
                shown = fitted.candidate("chosen", chosen=True)
            elif fits(fitted, limit):
                shown = fitted.candidate(self._beside(fitted))
            else:
                shown = fitted.candidate(f"needs {in_bytes(fitted.extra_bytes(None))}")
            # the same on the grid of a matrix and on a new one is one way
            found.setdefault((shown.chosen, replace(shown, seconds=0.0, memory_bytes_per_rank=0.0, verdict="")), shown)
        return sorted(found.values(), key=lambda x: not x.chosen)

    def _beside(self, other: ProductPlan) -> str:
        """Why not the other one."""
        if not self.seconds:
            return "as long"
        longer = other.seconds / self.seconds
        words = f", {other.weight / self.weight:.2f} times the words" if longer < _TIE and self.weight else ""
        moves = " and moves matrices" if other.moves and not self.moves else ""
        return f"{longer:.2f} times as long{words}{moves}"

    def explain(self) -> str:
        """The candidates as a table."""
        return f"{self}\n{table(self.candidates())}"

    def __str__(self) -> str:
        return self.candidate().summary(self.mnk, self.problem.size)

    def to_json(self) -> str:
        """The plan as JSON, to be made a plan again by `from_json`."""
        return pack(self.product, self.transposed, self.moves, self.problem)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote.  Raises ArgumentError for anything else."""
        plan = cls(*unpack(text))
        if [(name, x.source, x.target) for name, x in plan.moves] != _moved(plan.way, plan.problem):
            raise ArgumentError("not a plan: its moves do not bring the matrices where its product needs them")
        return plan


@lru_cache(maxsize=256)
def plan_product(problem: Problem) -> ProductPlan:
    """The plan that takes the least time by the model among those that fit the memory limit on every rank.

    The model is not exact to 10%: of plans as close as that, the one that sends and keeps the fewest words.  New
    grids are those on which a rank receives the fewest words (`grid_search`).  What is redistributed, and the memory
    and time it takes, is part of a plan.
    Raises ArgumentError where no grid of the ranks fits the algorithm, and MemoryLimitError, saying what is needed,
    where nothing fits.
    """
    limit = problem.memory_limit
    plan, least = _best(problem)
    if plan is None and problem.shared and problem.mover == "auto":  # copies that others can read take room
        plan, other = _best(replace(problem, shared=False, private="", nodes=()))
        least = min(least, other)
    if plan is not None:
        return plan
    assert limit is not None
    raise MemoryLimitError(
        f"memory limit {limit} bytes per rank is too small for A ({problem.A}), B ({problem.B}) and C ({problem.C}): "
        f"at least {least} bytes are needed, {least - limit} more"
        + (f", with lookahead {problem.lookahead}" if problem.lookahead else "")
    )


def _best(problem: Problem) -> tuple[ProductPlan | None, int]:
    """The best plan that fits, if one does, and the bytes that one needs at least."""
    limit, least, best = problem.memory_limit, _NO_LIMIT, inf
    known = _unrivalled(problem)
    if known is not None:
        return tuned(known), 0
    fitting: list[ProductPlan] = []
    for plan in candidates(problem):
        if plan.cost > _TIE * best:
            break
        fitted = fit(plan, limit)
        if fits(fitted, limit):
            fitting.append(fitted)
            best = min(best, fitted.cost)
        else:
            least = min(least, fitted.extra_bytes(None))
    if fitting:
        best_of_all = min((x for x in fitting if x.cost <= _TIE * best), key=lambda plan: plan.weight)
        return tuned(best_of_all), 0
    return None, least


def _unrivalled(problem: Problem) -> ProductPlan | None:
    """The best plan that moves no matrix, if none that moves one can beat it by 10%; None: they have to be compared."""
    limit = problem.memory_limit
    still = [plan for plan in (with_moves(way, problem) for way in ways_in_place(problem)) if fits(plan, limit)]
    if not still:
        return None
    best = min(still, key=lambda plan: plan.cost)
    least = problem.machine.least(best.product.panel_dtype, problem.mnk, problem.size)
    if problem.size > 1 and best.cost > _TIE * (least + _MOVES_WEIGH * problem.machine.call):
        return None
    return min((x for x in still if x.cost <= _TIE * best.cost), key=lambda plan: plan.weight)


def tuned(plan: ProductPlan) -> ProductPlan:
    """The plan with the mover and the panel width that take the least time, of those that were left open.

    They change neither the words nor the layouts.  A plan that had to be narrowed to fit its memory limit,
    or whose panels are all that a rank has, stays.
    """
    problem, product = plan.problem, plan.product
    if not (product.lends or product.mover in (*BROADCASTS, "nccl")) or product.width != problem.width:
        return plan
    movers = problem.broadcasts if problem.mover == "auto" and not product.shared else (product.mover,)
    widths = [problem.width] if problem.width_asked else [x for x in WIDTHS if x <= problem.width] or [problem.width]
    limit, best = problem.memory_limit, plan
    widest = product.product_width  # as wide as this or wider is the same
    widths = [*dict.fromkeys(problem.width if width >= widest else width for width in widths)]
    for mover, width in itertools.product(movers, widths):
        if (mover, width) == (product.mover, product.width):
            continue
        tried = replace(plan, product=replace(product, mover=mover, width=width))
        if fits(tried, limit) and tried.seconds < best.seconds * _WORTH_TUNING:
            best = tried
    return best


def panel_width(asked: int | None, accumulate: np.dtype, on_device: bool = False) -> int:
    """The widest panel: as asked, but no wider than sums stay exact."""
    return min(
        asked or (DEVICE_PANEL_WIDTH if on_device else PANEL_WIDTH),
        _NO_LIMIT if accumulate in dtypes.BLAS else EXACT_WIDTH,
    )


def candidates(problem: Problem) -> Iterator[ProductPlan]:
    """Plans, the cheapest first; what need not be known of the others is not computed."""
    # a heap of costs; at first of one rank, with moves that only begin: less than they will turn out to be
    heap: list[tuple[float, int, ProductPlan | Way]] = []
    machine = problem.machine
    for number, way in enumerate(dict.fromkeys(ways(problem))):
        moved = sum(not x.same_place(to) for x, to in zip(problem.given, way.layouts))
        seconds = way.product.seconds(machine, sample(problem.size)[0])
        heap.append((seconds + _MOVES_WEIGH * moved * machine.call, number, way))
    if not heap:
        raise ArgumentError(impossible(problem.wish, problem.size))
    heapify(heap)
    while heap:
        _, number, best = heappop(heap)
        if isinstance(best, ProductPlan):
            yield best
        else:
            plan = with_moves(best, problem)
            heappush(heap, (plan.cost, number, plan))


def sample(size: int) -> list[int]:
    """Ranks to look at: all of few, some of many."""
    return sorted({round(x) for x in np.linspace(0, size - 1, min(size, _SAMPLE))})


def fits(plan: ProductPlan, limit: int | None) -> bool:
    return limit is None or plan.extra_bytes(None) <= limit


def fit(plan: ProductPlan, limit: int | None) -> ProductPlan:
    """The plan with as much room as the limit allows, or with as little as it needs if that is more."""
    if limit is None or plan.extra_bytes(None) <= limit:
        return plan

    def with_room(share: float, spare: int) -> ProductPlan:
        return with_moves(plan.way._replace(product=plan.product.scaled(share)), plan.problem, spare)

    narrowest = with_room(0, 0)
    spare = limit - narrowest.extra_bytes(None)
    if spare < 0:
        return narrowest
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


def with_moves(way: Way, problem: Problem, spare: int | None = None) -> ProductPlan:
    """The product with the exchanges it needs.

    spare : bytes for the messages of each exchange, beyond what messages of one element take; None: no limit.
    """
    size, there = problem.size, (problem.device, problem.staged)
    moves = []
    for name, x, to in _moved(way, problem):
        plain = problem.plain if name == "C" else True
        shared = problem.shared and not problem.nodes and name not in problem.private
        least = 0 if spare is None else plan_exchange(x, to, size, plain, 0, shared, *there).extra_bytes(None)
        limit = None if spare is None else least + spare
        moves.append((name, plan_exchange(x, to, size, plain, limit, shared, *there)))
    return ProductPlan(way.product, way.transposed, tuple(moves), problem)


def _moved(way: Way, problem: Problem) -> list[tuple[str, Layout, Layout]]:
    """What a product needs elsewhere than it lies, or makes there: from where, and to where."""
    (A, B, C), (a, b, c) = problem.given, way.layouts
    return [(name, x, to) for name, x, to in (("A", A, a), ("B", B, b), ("C", c, C)) if not x.same_place(to)]
