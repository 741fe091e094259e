"""The layouts in which two tensors are contracted, chosen together with the product by predicted seconds.

A contraction C[..] := sum A[..] B[..] is a product of matrices.  The rows of A's matrix are the indices that only A
has, its columns those that are summed; the rows of B's matrix are those that are summed, its columns those that only B
has.  An operand whose layout does not have these groups of axes is moved first.  Indices that A, B and C have are a
batch: either each rank has whole matrices of a part of the batch ("stack"), or all ranks form one product after the
other.  Without sums, where one operand has all indices, elements are multiplied ("elementwise").
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
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import dtypes
from pdgemm.planning.machines.simulator import sample
from pdgemm.planning.planner import candidates
from pdgemm.planning.problem import AlgorithmRequest
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.program import Stage
from pdgemm.planning.question import IDEAL, Question
from pdgemm.planning.tensors.expression import Labels
from pdgemm.planning.tensors.resources import Costs, Resources, TensorValue
from pdgemm.planning.tensors.tensor_layouts import default_layout, grids_of
from pdgemm.schedules.exchanges.tensor_exchange import NO_PAIRS, spread_layout
from pdgemm.schedules.formulas import lower_bound

ANY_ALGORITHM = AlgorithmRequest("auto", None, None)
PRODUCT, STACK, ELEMENTWISE = "product", "stack", "elementwise"


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


@dataclass(frozen=True)
class Contraction:
    """A way to contract two tensors, as a value.

    way     : "product": of matrices, one after the other for each index of the batch; "stack": each rank multiplies the
              matrices of some indices of the batch; or "elementwise".
    A, B, C : the layouts in which they are contracted; A and B are moved to them if they have others.
    rows, inner, cols : the labels of the rows of A's matrix, of its columns and of the columns of B's matrix, in order.
    batch   : the labels of the batch, in order.
    request : the algorithm and the grid of its products.
    size    : the number of ranks.
    stages  : the moves and the products by the name of the tensor, as in a `Program`.
    seconds : the predicted time.
    extra_bytes : the bytes that a rank needs for moved operands, message buffers and the result.
    """

    pair: Pair
    way: str
    A: TensorLayout
    B: TensorLayout
    C: TensorLayout
    rows: Labels
    inner: Labels
    cols: Labels
    batch: Labels
    size: int
    request: AlgorithmRequest = ANY_ALGORITHM
    stages: tuple[tuple[str, Stage], ...] = ()
    seconds: float = 0.0
    extra_bytes: int = 0

    @cached_property
    def transposed(self) -> tuple[bool, bool, bool]:
        """Whether the matrices of A, B and C are the transposes of their unfoldings."""
        sides = zip(self.pair, (self.A, self.B, self.C), (self.rows, self.inner, self.rows))
        a, b, c = (tuple(labels[axis] for axis in x.rows) != rows for labels, x, rows in sides)
        return a, b, c

    @cached_property
    def item(self) -> Contraction:
        """The contraction for one index of the batch."""
        pair = Pair(*(tuple(y for y in labels if y not in self.batch) for labels in self.pair))
        sides = zip(self.pair, (self.A, self.B, self.C))
        A, B, C = (x.without([labels.index(y) for y in self.batch]) for labels, x in sides)
        return replace(self, pair=pair, A=A, B=B, C=C, batch=())

    def extent(self, labels: Labels) -> int:
        """Return the product of the extents of some axes."""
        extents = dict(zip(self.pair.a + self.pair.b, self.A.shape + self.B.shape))
        return prod(extents[x] for x in labels)

    @cached_property
    def mnk(self) -> tuple[int, int, int]:
        m, n, k = (self.extent(x) for x in (self.rows, self.cols, self.inner))
        return m, n, k

    @cached_property
    def items(self) -> int:
        """The number of indices of the batch."""
        return self.extent(self.batch)

    @cached_property
    def redistributed(self) -> set[str]:
        """The names of the matrices that a product moves once more."""
        return {name for _, x in self.stages if isinstance(x, ProductPlan) for name, _ in x.moves}

    @cached_property
    def words(self) -> int:
        """The words that the busiest rank of `sample` receives."""
        return max(sum(x.traffic(rank).words_received for _, x in self.stages) for rank in sample(self.size))

    @property
    def bound(self) -> float:
        """A lower bound on the words that the busiest rank receives; 0 for a batch, which ranks may divide."""
        return 0.0 if self.batch else lower_bound(*self.mnk, self.size)

    def __str__(self) -> str:
        return f"{self.pair} {self.way} {self.A!r} {self.B!r} {self.C!r} {self.request}"


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
            possible.append(_evaluated(candidate, a, b, resources, out))
    limit = resources.memory_limit
    fitting = [x for x in possible if limit is None or held + x.extra_bytes <= limit]
    if not fitting:
        least = held + min(x.extra_bytes for x in possible)
        raise MemoryLimitError(f"memory limit {limit} bytes per rank is too small for {pair}: {least} bytes are needed")
    return min(fitting, key=lambda x: (resources.fewest_words * x.words, x.seconds))


def _candidates(
    pair: Pair, a: TensorValue, b: TensorValue, resources: Resources, out: TensorLayout | None
) -> Iterator[Contraction]:
    """Yield the ways to contract two tensors, without their costs."""
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
        yield Contraction(pair, ELEMENTWISE, a.layout, b.layout, C, rows, inner, cols, batch, resources.size)
        return
    if batch:
        line = [layout(*x, (ranks, 1)) for x in (
            (pair.a, batch + rows, inner), (pair.b, batch + inner, cols), (pair.c, batch + rows, cols)
        )]  # fmt: skip
        yield Contraction(pair, STACK, line[0], line[1], line[2], rows, inner, cols, batch, resources.size)
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
            Contraction(
                pair,
                PRODUCT,
                a.layout if left else new[0],
                b.layout if right else new[1],
                out if out and of_c == (down, across) else new[2],
                *(down, order, across, batch, resources.size, request),
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
        if set(labels) == set(pair.c):
            return x.layout.transposed([labels.index(label) for label in pair.c])
    return default_layout(tuple(extent[x] for x in pair.c), len(resources.ranks), None, resources.ranks)


def _evaluated(
    x: Contraction, a: TensorValue, b: TensorValue, resources: Resources, out: TensorLayout | None
) -> Contraction:
    """Return a candidate with its stages and its cost."""
    dtype, elementwise = dtypes.product(a.dtype, b.dtype), x.way == ELEMENTWISE
    costs = Costs(resources)
    costs.extra_bytes = x.C.of(dtype).local_bytes(None) * (3 if elementwise else 1)
    for name, labels, operand, target in (("A", x.pair.a, a, x.A), ("B", x.pair.b, b, x.B)):
        source, pairs = operand.layout, NO_PAIRS
        if elementwise:
            source = aligned_layout(source, labels, x.pair.c)
            target, pairs = spread_layout(source, x.C)
        if elementwise or not operand.free:
            costs.move(name, source, target, operand.dtype, pairs)
    mnk, machine, request = x.mnk, resources.machine, x.request
    if x.way == STACK:
        most = x.C.local_shape((x.C.first[0].source, 0))
        share = prod(n for label, n in zip(x.pair.c, most) if label in x.batch)
        costs.seconds += share * machine.multiply(dtype, mnk, mnk)
        costs.extra_bytes += _stack_bytes(share, mnk, dtype)
    elif x.way == PRODUCT and prod(mnk) * x.items:
        one = x.item
        sides = zip((one.A, one.B, one.C), (a.dtype, b.dtype, dtype), one.transposed)
        layouts: Any = tuple(y.of(kind).T if transposed else y.of(kind) for y, kind, transposed in sides)
        algorithm, shape, layers = request
        how: Any = {"algorithm": algorithm, "shape": shape, "layers": layers, "machine": machine}
        m, n, k = mnk
        plan = Question(m, n, k, resources.size, dtype, layouts, **how).plan()
        request = AlgorithmRequest(plan.algorithm, plan.shape[:2], plan.shape[2])
        costs.stages += [("C", plan)] * x.items
        costs.seconds += x.items * plan.seconds
        one_item = sum(layout.local_bytes(None) for layout in layouts) if x.batch else 0
        costs.extra_bytes += plan.extra_bytes(None) + one_item
    if out:
        costs.move("C", x.C, out, dtype)
    stages, seconds = tuple(costs.stages), machine.call_overhead + costs.seconds
    return replace(x, request=request, stages=stages, seconds=seconds, extra_bytes=costs.extra_bytes)


def _stack_bytes(items: int, mnk: tuple[int, int, int], dtype: np.dtype) -> int:
    """Return the bytes of temporary arrays for the products of a stack: those of one item, or at most 1 MiB of them."""
    (m, n, k), wide = mnk, max(8, dtype.itemsize)
    item = wide * (3 * m * n + m * k + k * n)
    return max(item, min(1 << 20, items * item))


def aligned_layout(layout: TensorLayout, labels: Labels, others: Labels) -> TensorLayout:
    """Return the layout with the axes in the order of `others`, and a new axis of extent 1 for each missing label."""
    there = layout.transposed([labels.index(x) for x in others if x in labels])
    return there.expanded([at for at, x in enumerate(others) if x not in labels])
