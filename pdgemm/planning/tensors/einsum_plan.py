"""Plans of einsum: the order of contractions, their layouts, and what moves.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, MemoryLimitError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_name
from pdgemm.planning.machines.machine import Machine, machine_at_hand, on_nodes, with_reach
from pdgemm.planning.program import Program, Stage
from pdgemm.planning.tensors.contractions import PRODUCT, Contraction, Pair, contraction
from pdgemm.planning.tensors.expression import Expression, Labels, contraction_order, parsed
from pdgemm.planning.tensors.resources import Costs, Resources, TensorValue
from pdgemm.planning.tensors.tensor_layouts import default_layout, partial_layout, undivided
from pdgemm.schedules.collectives.vectors import gathering
from pdgemm.support.text import Table, counted, in_bytes, in_seconds, in_words

_MOST_SLICES = 1 << 14  # the stages of all slices are listed in the program


class Move(NamedTuple):
    """A move of the tensor at a position of the list of tensors to another layout."""

    at: int
    target: TensorLayout


class Diagonal(NamedTuple):
    """The elements of a tensor with equal indices along `axes`, of which the first is kept; no other one is divided."""

    at: int
    axes: tuple[int, ...]


class SumOver(NamedTuple):
    """The sums of a tensor over some axes."""

    at: int
    axes: tuple[int, ...]


class Joint(NamedTuple):
    """A contraction of two tensors, at these positions in the list of tensors; the result is appended to the list."""

    a: int
    b: int
    contraction: Contraction


Single = Move | Diagonal | SumOver  # a step on one tensor
Step = Single | Joint


@dataclass(frozen=True)
class EinsumPlan:
    """The plan of an einsum as a value, which can be printed and compared, and is executed by `einsum(optimize=plan)`.

    expression : the labels of all tensors.   operands : the tensors as values, with the layouts that they must have.
    before  : moves of operands.   slices : labels of which each index is summed after the other.
    steps   : the other steps, for each index of `slices`.   result : the labels and the layout of the result.
    program : the exchanges and products of all steps.   seconds : the predicted time.
    extra_bytes : per rank, beyond the operands.
    """

    expression: Expression
    operands: tuple[TensorValue, ...]
    before: tuple[Single, ...]
    slices: Labels
    steps: tuple[Step, ...]
    result: tuple[Labels, TensorValue]
    program: Program
    seconds: float
    extra_bytes: int

    @property
    def words(self) -> int:
        """The words that the busiest rank receives."""
        return self.program.words

    @property
    def bound(self) -> float:
        """The sum of the lower bounds of the contractions on the words that the busiest rank receives."""
        return sum(x.bound for x in self._joined) * self.expression.size(self.slices)

    @property
    def contractions(self) -> int:
        """The number of contractions, those of all slices included."""
        return len(self._joined) * self.expression.size(self.slices)

    @property
    def _joined(self) -> list[Contraction]:
        return [x.contraction for x in self.steps if isinstance(x, Joint)]

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """The layouts of the operands."""
        return tuple(x.layout for x in self.operands)

    @cached_property
    def description(self) -> str:
        """The plan as one line, by which ranks compare their plans: steps, layouts and algorithms."""
        steps = (f"{x.contraction}" if isinstance(x, Joint) else f"{x}" for x in self.steps)
        return f"{self.expression} {self.operands} {self.slices} {self.before} {'; '.join(steps)}"

    def __str__(self) -> str:
        rows = []
        for x in self._joined:
            moves = "".join(name for name, stage in x.stages if name != "C") or "none"
            way = counted(x.items, x.way) if x.batch and x.way == PRODUCT else x.way
            what = (str(x.pair), way, " x ".join(map(str, x.mnk)), moves)
            rows.append((*what, in_words(x.words), in_words(x.bound), in_seconds(x.seconds)))
        heads = ("contraction", "as", "m x n x k", "moved", "words", "bound", "time")
        sliced = f", for each index of {', '.join(self.slices)}" if self.slices else ""
        table = Table(heads, rows, words=heads[:4]) if rows else "no contraction"
        ranks = counted(self.program.size, "rank")
        return (
            f"{self.expression} on {ranks}{sliced}\n{table}\n{in_words(self.words)} received by the busiest rank "
            f"(bound {in_words(self.bound)}), {in_bytes(self.extra_bytes)} per rank beside the operands, predicted "
            f"{in_seconds(self.seconds)}"
        )


def sums_dtype(x: Any, axes: Sequence[int]) -> np.dtype:
    """Return the type of sums over some axes of a tensor: its own, for int8 int32, for truth values that of NumPy."""
    if all(x.layout.shape[axis] == 1 for axis in axes):
        return x.dtype
    return np.sum(np.ones(1, x.dtype)).dtype if x.dtype.kind == "b" else dtypes.product(x.dtype, x.dtype)


class _Draft:
    """The tensors, the steps and the stages of a plan while steps are added."""

    def __init__(self, expression: Expression, operands: Sequence[TensorValue], resources: Resources) -> None:
        self.expression, self.resources = expression, resources
        self.terms = list(zip(expression.inputs, operands))
        self.steps, self.stages, self.chosen = list[Step](), list[tuple[str, Stage]](), dict[int, TensorLayout]()
        self.seconds, self.most, self.held = 0.0, 0, 0

    def _hold(self, at: int, labels: Labels, x: TensorValue) -> None:
        """Set a tensor of the list to a new one, and count its bytes."""
        self.terms[at : at + 1] = [(labels, x)]
        self.held += x.layout.of(x.dtype).local_bytes(None)
        self.most = max(self.most, self.held)

    def _add(self, costs: Costs | Contraction) -> None:
        self.stages += costs.stages
        self.seconds += costs.seconds
        self.most = max(self.most, self.held + costs.extra_bytes)

    def taken(self) -> tuple[tuple[Step, ...], tuple[tuple[str, Stage], ...], float]:
        """Return the steps, the stages and the seconds that were added since the last call."""
        added = tuple(self.steps), tuple(self.stages), self.seconds
        self.steps, self.stages, self.seconds = [], [], 0.0
        return added

    def exchange(self, name: str, source: TensorLayout, target: TensorLayout, dtype: np.dtype) -> None:
        """Add the exchange of a move, without a step."""
        costs = Costs(self.resources)
        costs.move(name, source, target, dtype)
        self._add(costs)

    def undivide(self, at: int, axes: tuple[int, ...]) -> TensorLayout:
        """Move a tensor if one of these axes is divided; return its layout."""
        labels, x = self.terms[at]
        target = undivided(x.layout, axes, self.resources.ranks)
        if target is not x.layout:
            self.steps.append(Move(at, target))
            self.exchange("move", x.layout, target, x.dtype)
            self._hold(at, labels, TensorValue(target, x.dtype))
        return target

    def diagonal(self, at: int, label: str) -> None:
        """Add a step after which the tensor has a label once."""
        labels, x = self.terms[at]
        axes = sorted((axis for axis, y in enumerate(labels) if y == label), key=lambda y: y not in x.layout.divided)
        layout = self.undivide(at, tuple(axes[1:]))
        self.steps.append(Diagonal(at, tuple(axes)))
        self._hold(at, _without(labels, axes[1:]), TensorValue(layout.without(axes[1:]), x.dtype))

    def sum(self, at: int, axes: tuple[int, ...]) -> None:
        """Add a step after which the tensor does not have these axes."""
        labels, x = self.terms[at]
        wide = np.sum(np.ones(1, x.dtype)).dtype
        parts = partial_layout(x.layout, axes)
        target = undivided(parts, axes, self.resources.ranks)
        self.steps.append(SumOver(at, axes))
        if prod(x.layout.shape[axis] for axis in axes):  # sums of no elements are zeros on all ranks
            self.exchange("sum", parts, target, dtypes.TYPE[wide].sums_dtype if wide in dtypes.NARROW else wide)
        self._hold(
            at, _without(labels, axes), TensorValue(partial_layout(target, axes).without(axes), sums_dtype(x, axes))
        )

    def joint(self, a: int, b: int, kept: set[str], out: TensorLayout | None, last: bool) -> None:
        """Add the contraction of two tensors.   kept : the labels of its result.   last : it is the last one."""
        (of_a, A), (of_b, B) = (self.terms[x] for x in (a, b))
        order = self.expression.output if last else dict.fromkeys(of_a + of_b)
        pair = Pair(of_a, of_b, tuple(x for x in order if x in kept))
        for x in (A, B):
            if not dtypes.TYPE[x.dtype].operand:
                kinds = f"{pair} of {A.dtype} and {B.dtype}"
                raise DTypeError(f"einsum {self.expression}: {kinds}, but elements of {x.dtype} are not multiplied")
        joined = contraction(pair, A, B, self.resources, out if last else None, self.held)
        self.chosen |= {at: layout for at, x, layout in ((a, A, joined.A), (b, B, joined.B)) if x.free}
        self.steps.append(Joint(a, b, joined))
        self._add(joined)
        self._hold(len(self.terms), pair.c, TensorValue(joined.C, dtypes.product(A.dtype, B.dtype)))


def _without(labels: Labels, axes: Sequence[int]) -> Labels:
    return tuple(x for axis, x in enumerate(labels) if axis not in axes)


def plan_of(
    expression: Expression,
    operands: tuple[TensorValue, ...],
    resources: Resources,
    out: TensorLayout | None = None,
) -> EinsumPlan:
    """Return the plan of an expression for tensors in these layouts, with slices if the memory limit requires them.

    Slices are added one by one: each time the label whose plan fits and takes the least time or, if none fits, needs
    the least memory.
    out : the layout of the tensor that gets the result; None: the result may have any.
    Raises MemoryLimitError where no plan of at most _MOST_SLICES slices fits.
    """
    slices, first = tuple[str, ...](), None
    while True:
        try:
            return _plan(expression, operands, resources, out, slices)
        except MemoryLimitError as lacking:
            first = first or lacking
            most, kept = _MOST_SLICES // expression.size(slices), expression.output + slices
            summed = [x for x, n in expression.extents if x not in kept and 1 < n <= most]
            if not summed:
                raise first from None
            unlimited, least = resources._replace(memory_limit=None), resources.memory_limit or 0
            possible = [_plan.__wrapped__(expression, operands, unlimited, out, (*slices, x)) for x in summed]
            slices = min(possible, key=lambda x: (max(x.extra_bytes, least), x.seconds)).slices


@lru_cache(maxsize=256)
def _plan(
    expression: Expression,
    operands: tuple[TensorValue, ...],
    resources: Resources,
    out: TensorLayout | None,
    slices: Labels,
) -> EinsumPlan:
    """Return the plan with these slices."""
    sliced = [tuple(axis for axis, x in enumerate(labels) if x in slices) for labels in expression.inputs]
    operands = tuple(
        x._replace(layout=undivided(x.layout, axes, resources.ranks)) if x.free else x
        for x, axes in zip(operands, sliced)
    )
    draft = _Draft(expression, operands, resources)
    for at, axes in enumerate(sliced):
        draft.undivide(at, axes)
    before: Any
    before, stages_before, seconds_before = draft.taken()
    if slices:
        inputs = tuple(_without(labels, axes) for labels, axes in zip(expression.inputs, sliced))
        extents = tuple((x, n) for x, n in expression.extents if x not in slices)
        draft.expression = Expression(inputs, expression.output, extents)
        for at, (left, (_, x), axes) in enumerate(zip(inputs, draft.terms, sliced)):
            if axes:  # a copy of the part
                draft._hold(at, left, x._replace(layout=x.layout.without(axes)))
    _add_singles(draft)
    _add_joints(draft, out)
    labels, result = draft.terms[-1]
    if slices and not out:  # the sum of the slices so far
        draft._hold(len(draft.terms), labels, result)
    if out and len(operands) == 1:
        there = result.layout.transposed([labels.index(x) for x in expression.output])
        draft.exchange("C", there, out, result.dtype)
    steps, stages, seconds = draft.taken()
    times, ends = expression.size(slices), []
    if len(labels) < 2 and not out:  # a small result is gathered on all ranks
        ends = [("gather", gathering(result.layout.of(result.dtype), resources.size)[0])]
    chosen = list(operands)
    for at, (x, axes) in enumerate(zip(operands, sliced)):
        if x.free and at in draft.chosen:  # the layout of a slice
            x = x._replace(layout=draft.chosen[at].expanded(axes, [x.layout.shape[axis] for axis in axes]))
        chosen[at] = x._replace(free=False)
    limit = resources.memory_limit
    if limit is not None and draft.most > limit:
        raise MemoryLimitError(f"memory limit {limit} bytes per rank is too small for {expression}: {draft.most} bytes")
    program = Program((*stages_before, *stages * times, *ends), resources.size, resources.machine)
    seconds = seconds_before + times * seconds
    return EinsumPlan(expression, tuple(chosen), before, slices, steps, (labels, result), program, seconds, draft.most)


def _add_singles(draft: _Draft) -> None:
    """Add steps after which each tensor has each label once, and only labels of other tensors or of the result.

    An axis of extent 1 whose label has another extent is dropped.
    """
    extent = draft.expression.extent
    wide = [{x for x, n in zip(labels, value.layout.shape) if n == extent[x]} for labels, value in draft.terms]
    for at, labels in enumerate(draft.expression.inputs):
        for label in [x for x in dict.fromkeys(labels) if labels.count(x) > 1]:
            draft.diagonal(at, label)
        others = {*draft.expression.output}.union(*(x for y, x in enumerate(wide) if y != at))
        gone = tuple(axis for axis, x in enumerate(draft.terms[at][0]) if x not in wide[at] or x not in others)
        if gone:
            draft.sum(at, gone)


def _add_joints(draft: _Draft, out: TensorLayout | None) -> None:
    """Add the contractions of pairs; the result becomes the last tensor.   out : the layout of the result."""
    output, left = draft.expression.output, list(range(len(draft.terms)))
    for x, y in contraction_order([draft.terms[at][0] for at in left], draft.expression, draft.resources):
        a, b = left[x], left[y]
        left = [at for at in left if at not in (a, b)]
        kept = {*output}.union(*(draft.terms[at][0] for at in left))
        draft.joint(a, b, kept, out, last=not left)
        left.append(len(draft.terms) - 1)


def plan_einsum(
    expression: Any,
    *operands: Any,
    ranks: int | None = None,
    dtype: Any = float,
    free: bool = False,
    machine: Machine | None = None,
    memory_limit: int | None = None,
    minimize: str = "time",
) -> EinsumPlan:
    """Return the plan of `einsum` with these arguments, without MPI.  Local.

    operands : DistTensor, DistMatrix, arrays, or shapes; a tensor of a shape has the layout of `DistTensor.empty`.
    ranks    : number of ranks; by default that of the tensors.   dtype : the type of tensors of shapes.
    free     : the layouts of operands of shapes may be chosen, too: `plan.layouts` has them.
    machine  : Machine; by default the machine at hand, for tensors on GPUs one with GPUs, whose links are the ways by
        which the ranks of their grid reach each other's memory.  The plan is then the one that `einsum` carries out,
        unless memory of another GPU cannot be mapped.
    memory_limit : bytes per rank beyond the operands.
    minimize : "time", the predicted time, or "words", the words that the busiest rank receives in each contraction.

    Raises ArgumentError, LayoutError or MemoryLimitError.
    """
    expr, arrays = parsed(expression, operands, lambda x: x if isinstance(x, (tuple, list)) else np.shape(x))
    tensors = [x for x in arrays if hasattr(x, "grid")]
    members = tensors[0].grid.members if tensors else tuple(range(ranks or 1))
    if ranks is None and not tensors:
        raise ArgumentError("plan_einsum of shapes takes ranks, the number of ranks")
    values = tuple(_value(x, np.dtype(dtype), members, free) for x in arrays)
    size = tensors[0].grid.size if tensors else len(members)
    fewest = as_name(minimize, "minimize", ("time", "words")) == "words"
    machine = machine or (machine_beneath(tensors[0]) if tensors else machine_at_hand())
    return plan_of(expr, values, Resources(size, machine, memory_limit, members, fewest))


def _value(x: Any, dtype: np.dtype, members: tuple[int, ...], free: bool) -> TensorValue:
    """Return a tensor, a matrix, an array or a shape as a value."""
    if hasattr(x, "unfolding"):
        return TensorValue(x.layout, x.dtype)
    if hasattr(x, "layout_in"):
        return TensorValue(TensorLayout.of_matrix(x.layout_in(x.grid), x.shape, (0,), (1,)), x.dtype)
    exists = not isinstance(x, (tuple, list))
    layout = default_layout(np.shape(x) if exists else tuple(x), len(members), None, members)
    return TensorValue(layout, np.asarray(x).dtype if exists else dtype, free and not exists)


def machine_beneath(x: Any) -> Machine:
    """Return the machine at hand with the nodes of a tensor's grid and, on GPUs, the ways between its ranks.  Local."""
    device = devices.of(getattr(x, "unfolding", x).stored)
    if device is None:
        return on_nodes(machine_at_hand(), x.grid.ranks_per_node)
    reach = device.reach(x.grid)
    return with_reach(on_nodes(machine_at_hand(True, reach.staged), x.grid.ranks_per_node), reach)
