"""A plan as a value: the product, the redistributions before and after it, and their cost for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Self

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.layout import Layout
from pdgemm.instrument.ownership import Ownership, as_html
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.report import Checks
from pdgemm.planning.machines.simulator import exchange_seconds, fastest_exchange, product_seconds, sample
from pdgemm.planning.plan_json import pack, unpack
from pdgemm.planning.problem import Problem
from pdgemm.planning.search.candidate_table import Candidate
from pdgemm.planning.search.candidates import Arrangement
from pdgemm.schedules.exchanges.exchange import Exchange, plan_exchange
from pdgemm.schedules.formulas import lower_bound
from pdgemm.schedules.products import Product
from pdgemm.schedules.products.scales import plan_strips, strip_name
from pdgemm.schedules.schedule import Buffers, Schedule
from pdgemm.schedules.staircase import Staircase, in_triangle
from pdgemm.support.members import remembered
from pdgemm.support.text import algorithm_name, sides

MOVES_WEIGH = 2  # weight of the seconds of redistribution: for the memory of copies, and for costs outside the model


@dataclass(frozen=True, eq=False, repr=False)
class ProductPlan:
    """The plan of C := alpha A B + beta C on matrices in the user's layouts: a value, without data.

    product    : schedule of the algorithm, on layouts that fit it.
    transposed : the product is C^T = B^T A^T, and `product.A` is the layout of B^T.
    moves      : redistributions by matrix name: of A and B to the product's layouts, of C to the user's layout, and of
                 scales to each rank (`schedules.products.scales`).
    problem    : the input of the planner.

    Plans are equal if all their fields are equal; `str` describes the plan.
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
    def arrangement(self) -> Arrangement:
        """The product on its layouts, and whether it is transposed."""
        return Arrangement(self.product, self.transposed)

    @cached_property
    def algorithm(self) -> str:
        return self.arrangement.algorithm

    @property
    def inside(self) -> str:
        """The algorithm of each layer of "2.5d"."""
        return getattr(self.product, "inside", "")

    @property
    def collective(self) -> str:
        """The collective of the product, without redistribution: "allgather", "reduce_scatter", or "" for any other."""
        return self.product.collective if prod(self.shape) > 1 else ""

    @property
    def mnk(self) -> tuple[int, int, int]:
        m, n, k = self.product.mnk
        return (n, m, k) if self.transposed else (m, n, k)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Pr, Pc and layers of the grid of the product."""
        return self.arrangement.shape

    @remembered
    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages of a rank, redistribution included."""
        return sum((move.traffic(rank) for _, move in self.moves), self.product.traffic(rank))

    @remembered
    def buffers(self, rank: int) -> Buffers:
        """Return the buffers that the product allocates on a rank."""
        return self.product.buffers(rank)

    @remembered
    def extra_bytes(self, rank: int | None) -> int:
        """Return the bytes that a rank needs beyond the user's A, B and C; for rank None, the most of any rank.

        If the plan chooses the layouts of A, B and C itself (`Problem.ideal`), their bytes are included.
        """
        own = sum(layout.local_bytes(rank) for layout in self.arrangement.layouts) if self.problem.ideal else 0
        checks = self.protection.cost(rank).bytes if self.protection else 0
        return self.product.extra_bytes(rank) + self._copied_bytes(rank) + own + checks + self._ending_bytes(rank)

    def _copied_bytes(self, rank: int | None) -> int:
        """Return the bytes of copies of A, B and C, and of the message buffers of their redistribution."""
        return self._held_bytes(rank) + sum(move.extra_bytes(rank) for _, move in self.moves)

    def _held_bytes(self, rank: int | None) -> int:
        """Return the bytes of copies of A, B and C."""
        copies = [*self.staged.values(), *(move.source if name == "C" else move.target for name, move in self.moves)]
        return sum(self.held_words(layout, rank) * layout.dtype.itemsize for layout in copies)

    def held_words(self, layout: Layout, rank: int | None) -> int:
        """Return the words of memory of a copy of A, B or C in this layout."""
        return self.product.arithmetic.held(*layout.local_shape(rank), layout.order, layout.dtype)

    # ------------------------------------------------------------------ epilogue
    @property
    def sums(self) -> Layout | None:
        """The layout of the matrix of sums, if an epilogue needs a wider type than C's for them; otherwise None."""
        C, ending = self.problem.C, self.problem.ending
        return C if ending and ending.dtype != C.dtype else None

    @property
    def repeated(self) -> dict[str, Layout]:
        """The layouts, by name, of vectors that are repeated for each row (or column) of C's grid and then moved."""
        ending = self.problem.ending
        return {x.name: x.source for x in ending.moved if x.name != "residual"} if ending else {}

    def _ending_bytes(self, rank: int | None) -> int:
        sums = self.held_words(self.sums, rank) * self.sums.dtype.itemsize if self.sums else 0
        return sums + sum(x.local_bytes(rank) for x in self.repeated.values())

    # ------------------------------------------------------------------ memory
    @cached_property
    def protection(self) -> ChecksumPlan | None:
        """The checksums that protect the product; None if it is not protected."""
        return ChecksumPlan(self.problem) if self.problem.protect else None

    @property
    def needs_beta_zero(self) -> bool:
        """Can the plan be executed only with beta = 0?

        In such a plan a C that is redistributed after the product is not read, and checksums leave out C on entry.
        """
        moved = any(name == "C" for name, _ in self.moves)
        return self.problem.beta_is_zero and (moved or self.protection is not None)

    @cached_property
    def needs_node_memory(self) -> bool:
        """Does the plan allocate memory that the ranks of a node share?"""
        product, moved = self.product, dict(self.moves)
        back = "C" in moved and moved["C"].shared
        exposed = {*product.exposed} & {*moved} or any(move.nodes for move in moved.values())
        return bool(self.staged or product.exposed_buffers or exposed) or back

    @cached_property
    def staged(self) -> dict[str, Layout]:
        """The layouts, by name, of the operands that are copied to node-shared memory."""
        problem = self.problem
        stay = set(problem.outside_node_memory if self.product.exposed else ()) - {name for name, _ in self.moves}
        return {name: x for name, x in (("A", problem.A), ("B", problem.B)) if name in stay}

    @cached_property
    def description(self) -> str:
        """A description of the whole plan that ranks compare; it begins with the matrices of the user."""
        matrices = zip(("op(A)", "op(B)", "C"), (self.problem.A, self.problem.B, self.problem.C))
        return (
            ", ".join(f"{name} {x.distribution} of {x.dtype} in {x.order} order" for name, x in matrices)
            + f"\n{self._fields!r}"
        )

    def kept(self, rank: int) -> Staircase | None:
        """Return the elements of C, in the user's layout, that the rank writes; None: all elements."""
        return in_triangle(self.problem.triangle, self.problem.C, rank)

    @property
    def total_words(self) -> int:
        """The words that all ranks together send."""
        return self.product.total_words + sum(move.total_words for _, move in self.moves)

    @cached_property
    def words(self) -> int:
        """The words that the busiest rank of `sample` receives, redistribution included."""
        return max(self.traffic(rank).words_received for rank in sample(self.problem.size))

    @property
    def weight(self) -> float:
        """The words received, plus the memory beyond A, B and C in words; the weight decides between equal costs."""
        return self.words + self.extra_bytes(None) / self.product.accumulate.itemsize

    @cached_property
    def lower_bound_words(self) -> float:
        """The lower bound, for any algorithm, on the words that the busiest rank receives, without redistribution.

        0 for one triangle of C, because the bound of a whole product does not hold for a triangle.
        """
        return 0.0 if self.problem.triangle else lower_bound(*self.mnk, self.problem.size)

    @cached_property
    def seconds(self) -> float:
        """The predicted time of the slowest rank of `sample`, by the model of `problem.machine`."""
        return max(self._seconds(rank) for rank in sample(self.problem.size))

    @cached_property
    def cost(self) -> float:
        """The cost by which plans are compared: the time, with redistribution counted twice."""
        if not self.moves and not self.staged:
            return self.seconds
        return max(self._seconds(rank, MOVES_WEIGH) for rank in sample(self.problem.size))

    @cached_property
    def moving_seconds(self) -> float:
        """The predicted time of redistribution before and after the product."""
        machine, ranks = self.problem.machine, sample(self.problem.size)
        return max(0.0, self.seconds - max(product_seconds(self.product, machine, rank) for rank in ranks))

    @property
    def copying_seconds(self) -> float:
        """The predicted time of the first touch of copies of A, B and C, and of filling those in node-shared memory."""
        return max(self._copying(rank) for rank in sample(self.problem.size))

    @property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        return self.product.flops

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules in the order in which they run: redistributions of A and B, product, redistribution of C."""
        before = [move for name, move in self.moves if name != "C"]
        return [*before, self.product, *(move for name, move in self.moves if name == "C")]

    def described(self, name: str) -> tuple[str, str]:
        """Return the kind of the stage, and its sizes, algorithm and grid, as text for a table."""
        algorithm = algorithm_name(self.algorithm, self.inside or self.collective)
        return "product", f"{sides(*self.mnk)}, {algorithm}, {sides(*self.shape)} grid"

    @property
    def product_words(self) -> int:
        """The words of the product itself that the busiest rank of `sample` receives in messages."""
        traffic = [self.product.traffic(rank) for rank in sample(self.problem.size)]
        return max(x.words_received - x.words_read for x in traffic)

    def _seconds(self, rank: int, weight: float = 1) -> float:
        machine = self.problem.machine
        moving = sum(exchange_seconds(move, machine, rank) for _, move in self.moves)
        buffers = sum(move.extra_bytes(rank) for _, move in self.moves) / machine.first_touch_bandwidth
        return product_seconds(self.product, machine, rank) + weight * (moving + buffers + self._copying(rank))

    def _copying(self, rank: int) -> float:
        """Return the time of the first touch of copies, and of filling those of operands in node-shared memory."""
        machine, filled = self.problem.machine, sum(layout.local_bytes(rank) for layout in self.staged.values())
        return self._held_bytes(rank) / machine.first_touch_bandwidth + filled / machine.copy_bandwidth

    def candidate(self, verdict: str = "", chosen: bool = False) -> Candidate:
        """Return the figures of the plan for the busiest rank of `sample`."""
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
            cost=self.cost,
            chosen=chosen,
            moves="".join(name for name, _ in self.moves if name in ("A", "B", "C")),
            node_to_node="".join(name for name, move in self.moves if name in ("A", "B", "C") and move.nodes),
            inside=self.inside,
            collective=self.collective,
            verdict=verdict,
        )

    def __str__(self) -> str:
        return self.candidate().summary(self.mnk, self.problem.size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def _repr_html_(self) -> str:
        """Return the plan for a notebook: its text, and pictures of the owners of A, B and C in the product."""
        return as_html(f"{self}\nA, B and C:", *map(Ownership, self.arrangement.layouts))

    def to_json(self) -> str:
        """Return the plan as JSON, which `from_json` reads."""
        return pack(self.product, self.transposed, self.moves, self.problem)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote.  Raises ArgumentError for any other text."""
        plan = cls(*unpack(text))
        needed = _moved(plan.arrangement, plan.problem)
        if plan.problem.ideal or [(name, x.source, x.target) for name, x in plan.moves] != needed:
            raise ArgumentError("not a plan: its moves do not lead to the layouts of its product")
        return plan


@dataclass(frozen=True)
class ChecksumPlan:
    """The checksums C x = alpha A (B x) + beta C x of the rows of C (`algorithms/protection/row_checksums`)."""

    problem: Problem

    def buffers(self, rank: int | None) -> Buffers:
        """Return the checksum vectors of a rank, and the copy of C from which a product is repeated.

        For rank None, return the largest sizes of any rank.
        """
        problem, (m, _, k) = self.problem, self.problem.mnk
        dtype = np.dtype(np.int64) if problem.accumulate.kind in "iu" else problem.accumulate
        (rows, cols), entry = problem.C.local_shape(rank), not problem.beta_is_zero
        own = sum(x.local_shape(rank)[0] for x in (problem.B, problem.A)) + entry * rows
        norms, sizes = self._rounding
        workspace = {"B x": (k, dtype), "own": (own, dtype), "C x": (m, dtype)}
        workspace |= {"norms": (norms, np.dtype(np.float64)), "sizes": (sizes, np.dtype(np.float64))}
        if entry and problem.protect == "repair":
            workspace["C on entry"] = rows * cols, problem.C.dtype
        return workspace

    def cost(self, rank: int | None) -> Checks:
        """Return the cost of the checksums of one run: all-reduces of B x, norms, sizes, C x, and of the verdict."""
        m, _, k = self.problem.mnk
        some = k, *self._rounding  # lengths of the all-reduced vectors; empty ones are skipped
        memory = sum(n * dtype.itemsize for n, dtype in self.buffers(rank).values())
        return Checks(sum(some) + m + 2, 2 + sum(x > 0 for x in some), memory)

    @property
    def _rounding(self) -> tuple[int, int]:
        """The numbers of norms and of sizes by which rounding errors are bounded; both are 0 for integers.

        There is a norm for each row of B and, if it is read, of C on entry; there is a size for each row of A.
        """
        problem, (m, _, k) = self.problem, self.problem.mnk
        rounded = problem.accumulate.kind not in "iu"
        return rounded * (k + (not problem.beta_is_zero) * m), rounded * (k > 0) * m

    @property
    def seconds(self) -> float:
        """The predicted time of the checksums, which read A, B and C once."""
        return sum(x.local_bytes(None) for x in self.problem.layouts) / self.problem.machine.copy_bandwidth


def with_moves(arrangement: Arrangement, problem: Problem, spare: int | None = None) -> ProductPlan:
    """Return the plan of an arrangement, with the redistributions that it needs.

    spare : bytes for the buffers of each exchange beyond those for messages of one element; None: no limit.
    """
    size, there = problem.size, (problem.device, problem.staged, problem.nccl)
    moves = list[tuple[str, Exchange]]()
    for name, x, to in _moved(arrangement, problem):
        copies_only = problem.beta_is_zero and not problem.triangle if name == "C" else True
        shared = name in ("A", "B", "C") and name not in problem.outside_node_memory
        shared = shared and problem.shared and not problem.nodes
        least = 0 if spare is None else plan_exchange(x, to, size, copies_only, 0, shared, *there).extra_bytes(None)
        limit = None if spare is None else least + spare
        move = plan_exchange(x, to, size, copies_only, limit, shared, *there)
        moves.append((name, fastest_exchange(move, problem.nodes, problem.machine, limit)))
    for name, scales in zip("AB", problem.scales):
        if scales:
            strips = plan_strips(scales, arrangement.product, name, arrangement.transposed, size, spare)
            moves.append((strip_name(name), strips))
    return ProductPlan(arrangement.product, arrangement.transposed, tuple(moves), problem)


def _moved(arrangement: Arrangement, problem: Problem) -> list[tuple[str, Layout, Layout]]:
    """Return (name, source, target) of the matrices whose layouts in the product differ from the user's layouts."""
    if problem.ideal:
        return []
    (A, B, C), (a, b, c) = problem.layouts, arrangement.layouts
    moved = [(name, x, to) for name, x, to in (("A", A, a), ("B", B, b), ("C", c, C)) if not x.same_owners(to)]
    return moved + [(x.name, x.source, x.target) for x in (problem.ending.moved if problem.ending else ())]
