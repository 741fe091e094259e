"""The layouts in which two tensors are contracted, chosen together with the product by predicted seconds.

A contraction C[..] := sum A[..] B[..] is a product of matrices.  The rows of A's matrix are the indices that only A
has, its columns those that are summed; the rows of B's matrix are those that are summed, its columns those that only B
has.  An operand whose layout does not have these groups of axes is moved first.  Indices that A, B and C have are a
batch: either each rank has whole matrices of a part of the batch ("stack"), or all ranks form one product after the
other ("loop").  Without sums, where one operand has all indices, elements are multiplied ("elementwise").
No MPI, no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError, MemoryLimitError
from pdgemm.grids.layout import Layout
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import dtypes
from pdgemm.planning.layout_text import IDEAL
from pdgemm.planning.machines.timing import sample
from pdgemm.planning.planner import candidates
from pdgemm.planning.problem import AlgorithmRequest
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.program import Stage
from pdgemm.planning.question import Question
from pdgemm.planning.tensors.expression import Labels
from pdgemm.planning.tensors.resources import Resources, TensorValue
from pdgemm.planning.tensors.tensor_layouts import default_layout, grids_of
from pdgemm.schedules.exchanges.tensor_exchange import NO_PAIRS, Pairs, spread_layout
from pdgemm.schedules.formulas import lower_bound

ANY_ALGORITHM = AlgorithmRequest("auto", None, None)
PRODUCT, STACK, LOOP, ELEMENTWISE = "product", "stack", "loop", "elementwise"


class Pair(NamedTuple):
    """The labels of the axes of two tensors and of their contraction; each tensor has each of its labels once."""

    a: Labels
    b: Labels
    c: Labels

    @property
    def batch(self) -> Labels:
        return tuple(x for x in self.c if x in self.a and x in self.b)

    @property
    def summed(self) -> Labels:
        return tuple(x for x in self.a if x in self.b and x not in self.c)

    def only(self, mine: Labels) -> Labels:
        """Return the labels of the result that only one of the tensors has."""
        return tuple(x for x in self.c if x in mine and x not in self.batch)

    def __str__(self) -> str:
        return f"{','.join(map(''.join, (self.a, self.b)))}->{''.join(self.c)}"


class Way(NamedTuple):
    """A way to contract two tensors.

    way     : "product", "stack", "loop" or "elementwise".
    A, B, C : the layouts in which they are contracted; A and B are moved to them if they have others.
    rows, inner, cols : the labels of the rows of A's matrix, of its columns and of the columns of B's matrix, in order.
    batch   : the labels of the batch, in order.   request : the algorithm of the product.
    """

    way: str
    A: TensorLayout
    B: TensorLayout
    C: TensorLayout
    rows: Labels
    inner: Labels
    cols: Labels
    batch: Labels = ()
    request: AlgorithmRequest = ANY_ALGORITHM

    @property
    def row_labels(self) -> tuple[Labels, Labels, Labels]:
        """The labels of the rows of the matrices of A, B and C."""
        return self.rows, self.inner, self.rows


@dataclass(frozen=True)
class Contraction:
    """The contraction of two tensors as a value.

    size    : the number of ranks.
    stages  : the moves and the products by the name of the tensor, as in a `Program`.
    seconds : the predicted time.
    extra_bytes : the bytes that a rank needs for moved operands, message buffers and the result.
    """

    pair: Pair
    chosen: Way
    size: int
    stages: tuple[tuple[str, Stage], ...]
    seconds: float
    extra_bytes: int

    @cached_property
    def extents(self) -> dict[str, int]:
        return dict(zip(self.pair.a + self.pair.b, self.chosen.A.shape + self.chosen.B.shape))

    def extent(self, labels: Labels) -> int:
        """Return the product of the extents of some axes."""
        return prod(self.extents[x] for x in labels)

    @property
    def mnk(self) -> tuple[int, int, int]:
        m, n, k = (self.extent(x) for x in (self.chosen.rows, self.chosen.cols, self.chosen.inner))
        return m, n, k

    @property
    def request(self) -> AlgorithmRequest:
        """The algorithm and the grid of its products."""
        plan = next((x for _, x in self.stages if isinstance(x, ProductPlan)), None)
        return AlgorithmRequest(plan.algorithm, plan.shape[:2], plan.shape[2]) if plan else ANY_ALGORITHM

    @cached_property
    def words(self) -> int:
        """The words that the busiest rank of `sample` receives."""
        return max(sum(x.traffic(rank).words_received for _, x in self.stages) for rank in sample(self.size))

    @property
    def bound(self) -> float:
        """A lower bound on the words that the busiest rank receives; 0 for a batch, which ranks may divide."""
        return 0.0 if self.pair.batch else lower_bound(*self.mnk, self.size)


@lru_cache(maxsize=512)
def contraction(
    pair: Pair,
    a: TensorValue,
    b: TensorValue,
    resources: Resources,
    out: TensorLayout | None = None,
    held: int = 0,
) -> Contraction:
    """Return the contraction with the least predicted seconds.

    out  : the layout that the result must have at the end; None: any.
    held : bytes per rank of other tensors within the memory limit.
    Raises MemoryLimitError where no candidate fits the memory limit.
    """
    possible = list[Contraction]()
    for candidate in _candidates(pair, a, b, resources, out):
        with suppress(ArgumentError):  # a product that this number of ranks cannot compute
            possible.append(_evaluated(pair, a, b, candidate, resources, out))
    limit = resources.memory_limit
    fitting = [x for x in possible if limit is None or held + x.extra_bytes <= limit]
    if not fitting:
        least = held + min(x.extra_bytes for x in possible)
        raise MemoryLimitError(f"memory limit {limit} bytes per rank is too small for {pair}: {least} bytes are needed")
    return min(fitting, key=lambda x: (resources.fewest_words * x.words, x.seconds))


def _candidates(
    pair: Pair, a: TensorValue, b: TensorValue, resources: Resources, out: TensorLayout | None
) -> Iterator[Way]:
    """Yield the ways to contract two tensors."""
    extent, ranks = dict(zip(pair.a + pair.b, a.layout.shape + b.layout.shape)), len(resources.ranks)
    batch, rows, inner, cols = (
        tuple(sorted(labels, key=lambda x: -extent[x]))
        for labels in (pair.batch, pair.only(pair.a), pair.summed, pair.only(pair.b))
    )

    def layout(labels: Labels, down: Labels, across: Labels, grid: tuple[int, int]) -> TensorLayout:
        """Return a layout on the grid, or for a group without axes on a line of all ranks."""
        rows, cols = (tuple(labels.index(x) for x in group) for group in (down, across))
        grid = (1, 1) if not labels else (1, ranks) if not down else (ranks, 1) if not across else grid
        return TensorLayout.even([extent[x] for x in labels], rows, cols, grid, resources.ranks[: prod(grid)])

    if not inner and not (rows and cols):
        C = out or _spread(pair, a, b, extent, resources)
        yield Way(ELEMENTWISE, a.layout, b.layout, C, rows, inner, cols, batch)
        return
    if batch:
        line = [layout(*x, (ranks, 1)) for x in (
            (pair.a, batch + rows, inner), (pair.b, batch + inner, cols), (pair.c, batch + rows, cols)
        )]  # fmt: skip
        yield Way(STACK, line[0], line[1], line[2], rows, inner, cols, batch)
        if not rows and not cols:
            return
    kept = [
        None if batch or x is None else _groups_of(labels, x, *groups)
        for labels, x, *groups in (
            (pair.a, None if a.free else a.layout, rows, inner),
            (pair.b, None if b.free else b.layout, inner, cols),
            (pair.c, out, rows, cols),
        )
    ]
    of_c = kept.pop()
    rows, cols = of_c or (rows, cols)
    m, n = (prod(extent[x] for x in labels) for labels in (rows, cols))
    for order in dict.fromkeys([*(x[1 - at] for at, x in enumerate(kept) if x), inner]):
        left, right = (x if x and x[1 - at] == order else None for at, x in enumerate(kept))
        down, across = left[0] if left else rows, right[1] if right else cols
        sides = ((pair.a, down, order), (pair.b, order, across), (pair.c, down, across))
        grids = [(x, x, x) for x in grids_of(ranks, m, n)] + [((1, ranks), (ranks, 1), grids_of(ranks, m, n)[0])]
        choices = [
            [layout(labels, *_with_batch(batch, x, y), grid) for (labels, x, y), grid in zip(sides, on)] for on in grids
        ]
        requests = [(x, ANY_ALGORITHM) for x in choices]
        if not batch and not (left and right):
            requests += _ideal(extent, sides, resources)
        ways = (
            Way(
                LOOP if batch else PRODUCT,
                a.layout if left else new[0],
                b.layout if right else new[1],
                out if out and of_c == (down, across) else new[2],
                *(down, order, across, batch, request),
            )
            for new, request in requests
        )
        yield from dict.fromkeys(ways)


def _ideal(
    extent: dict[str, int], sides: Sequence[tuple[Labels, Labels, Labels]], resources: Resources
) -> Iterator[tuple[list[TensorLayout], AlgorithmRequest]]:
    """Yield layouts of A, B and C with which a good product needs no move, if these are layouts of tensors.

    sides : the labels of each tensor, of the rows and of the columns of its matrix.
    """
    m, k, n = (prod(extent[x] for x in labels) for labels in (sides[0][1], sides[0][2], sides[1][2]))
    if not m * n * k or resources.ranks != tuple(range(resources.size)):
        return
    question = Question(m, n, k, resources.size, layouts=IDEAL, machine=resources.machine)
    plans = {ANY_ALGORITHM: question.plan()}
    if resources.fewest_words:
        plan = min(
            candidates(question.problem),
            key=lambda x: max(x.traffic(rank).words_received for rank in sample(resources.size)),
        )
        plans[AlgorithmRequest(plan.algorithm, plan.shape[:2], plan.shape[2])] = plan
    for request, plan in plans.items():
        layouts = []
        for (labels, *groups), matrix in zip(sides, plan.arrangement.layouts):
            axes = [tuple(labels.index(x) for x in group) for group in groups]
            with suppress(LayoutError):
                layouts.append(TensorLayout.of_matrix(matrix, [extent[x] for x in labels], *axes))
        if len(layouts) == len(sides):
            yield layouts, request


def _with_batch(batch: Labels, rows: Labels, cols: Labels) -> tuple[Labels, Labels]:
    """Return two groups of labels with the batch at the end of one that is not empty, so that it is not divided."""
    return (rows + batch, cols) if rows else (rows, cols + batch)


def _groups_of(labels: Labels, layout: TensorLayout, rows: Labels, cols: Labels) -> tuple[Labels, Labels] | None:
    """Return the labels of the rows and columns of a tensor's matrix, or its transpose, if these are its groups."""
    held = [tuple(labels[axis] for axis in axes) for axes in (layout.rows, layout.cols)]
    for down, across in (held, held[::-1]):
        if (set(down), set(across)) == (set(rows), set(cols)):
            return down, across
    return None


def _spread(pair: Pair, a: TensorValue, b: TensorValue, extent: dict[str, int], resources: Resources) -> TensorLayout:
    """Return the layout of an elementwise product: that of an operand with all labels, or the default layout."""
    for labels, x in ((pair.a, a), (pair.b, b)):
        if set(labels) == set(pair.c) and not x.free:
            return x.layout.transposed([labels.index(label) for label in pair.c])
    return default_layout(tuple(extent[x] for x in pair.c), len(resources.ranks), None, resources.ranks)


def _evaluated(
    pair: Pair, a: TensorValue, b: TensorValue, chosen: Way, resources: Resources, out: TensorLayout | None
) -> Contraction:
    """Return a candidate with its stages and its cost."""
    dtype = dtypes.product(a.dtype, b.dtype)
    costs = _Costs(resources, chosen.C.of(dtype).local_bytes(None) * (3 if chosen.way == ELEMENTWISE else 1))
    for name, labels, x, target in (("A", pair.a, a, chosen.A), ("B", pair.b, b, chosen.B)):
        source, pairs = x.layout, NO_PAIRS
        if chosen.way == ELEMENTWISE:
            source = aligned_layout(x.layout, labels, pair.c)
            target, pairs = spread_layout(source, chosen.C)
        if not x.free:
            costs.move(name, source, target, x.dtype, pairs)
    plain = Contraction(pair, chosen, resources.size, (), 0.0, 0)
    mnk, items, machine = plain.mnk, plain.extent(chosen.batch), resources.machine
    if chosen.way == STACK:
        most = chosen.C.local_shape((chosen.C.first[0].source, 0))
        share = prod(n for label, n in zip(pair.c, most) if label in chosen.batch)
        costs.seconds += share * machine.multiply(dtype, mnk, mnk)
        costs.extra_bytes += _stack_bytes(share, mnk, dtype)
    elif chosen.way != ELEMENTWISE and prod(mnk) * items:
        sides = zip(pair, (chosen.A, chosen.B, chosen.C), (a.dtype, b.dtype, dtype), chosen.row_labels)
        layouts: Any = tuple(_of_product(*side, chosen.batch) for side in sides)
        algorithm, shape, layers = chosen.request
        how: Any = {"algorithm": algorithm, "shape": shape, "layers": layers, "machine": machine}
        m, n, k = mnk
        plan = Question(m, n, k, resources.size, dtype, layouts, **how).plan()
        costs.stages += [("C", plan)] * items
        costs.seconds += items * plan.seconds
        one_item = sum(x.local_bytes(None) for x in layouts) if chosen.way == LOOP else 0
        costs.extra_bytes += plan.extra_bytes(None) + one_item
    if out:
        costs.move("C", chosen.C, out, dtype)
    return replace(plain, stages=tuple(costs.stages), seconds=costs.seconds, extra_bytes=costs.extra_bytes)


class _Costs:
    """The stages of a candidate, their predicted time and the bytes that a rank needs, while they are added."""

    def __init__(self, resources: Resources, extra_bytes: int) -> None:
        self.resources, self.stages = resources, list[tuple[str, Stage]]()
        self.seconds, self.extra_bytes = resources.machine.call_overhead, extra_bytes

    def move(
        self, name: str, source: TensorLayout, target: TensorLayout, dtype: np.dtype, pairs: Pairs = NO_PAIRS
    ) -> None:
        """Add the move of a tensor."""
        move, seconds, nbytes = self.resources.cost_of_move(source, target, dtype, pairs)
        self.seconds, self.extra_bytes = self.seconds + seconds, self.extra_bytes + nbytes
        if move:
            self.stages.append((name, move))


def _stack_bytes(items: int, mnk: tuple[int, int, int], dtype: np.dtype) -> int:
    """Return the bytes of temporary arrays for the products of a stack: those of one item, or at most 1 MiB of them."""
    (m, n, k), wide = mnk, max(8, dtype.itemsize)
    item = wide * (3 * m * n + m * k + k * n)
    return max(item, min(1 << 20, items * item))


def aligned_layout(layout: TensorLayout, labels: Labels, others: Labels) -> TensorLayout:
    """Return the layout with the axes in the order of `others`, and a new axis of extent 1 for each missing label."""
    there = layout.transposed([labels.index(x) for x in others if x in labels])
    return there.expanded([at for at, x in enumerate(others) if x not in labels])


def _of_product(labels: Labels, layout: TensorLayout, dtype: np.dtype, rows: Labels, batch: Labels) -> Layout:
    """Return the layout of the matrix with these labels of its rows, for one index of each label of the batch."""
    part = layout.without([labels.index(x) for x in batch])
    left = [x for x in labels if x not in batch]
    matrix = part.of(dtype)
    return matrix if tuple(left[x] for x in part.rows) == rows else matrix.T
