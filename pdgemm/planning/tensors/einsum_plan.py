"""Plans of einsum: the order of contractions, their layouts, and what moves.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, MemoryLimitError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import as_name
from pdgemm.planning.machines.machine import Machine, machine_at_hand, on_nodes, with_reach
from pdgemm.planning.program import Program, Stage
from pdgemm.planning.tensors.contraction_order import contraction_order
from pdgemm.planning.tensors.contractions import Contraction, Pair, contraction
from pdgemm.planning.tensors.expression import Expression, Labels, parsed
from pdgemm.planning.tensors.resources import Resources, TensorValue
from pdgemm.planning.tensors.tensor_layouts import default_layout, partial_layout, undivided
from pdgemm.schedules.collectives.vectors import gathering
from pdgemm.support.text import Table, counted, in_bytes, in_seconds, in_words

DIAGONAL, SUM, UNDIVIDE = "diagonal", "sum", "undivide"  # steps on one tensor
_MOST_SLICES = 1 << 14  # the stages of all slices are listed in the program


class Single(NamedTuple):
    """A step on one tensor.

    kind   : "diagonal": the elements with equal indices along `axes`, of which the first is kept; "sum" over `axes`;
             "undivide": a move to `target`.
    at     : the position of the tensor in the list of tensors.
    """

    kind: str
    at: int
    axes: tuple[int, ...] = ()
    target: TensorLayout | None = None


class Joint(NamedTuple):
    """A contraction of two tensors, at these positions in the list of tensors; the result is appended to the list."""

    a: int
    b: int
    contraction: Contraction


@dataclass(frozen=True)
class EinsumPlan:
    """The plan of an einsum as a value, which can be printed and compared, and is executed by `einsum(optimize=plan)`.

    expression : the labels of all tensors.   operands : the tensors as values, with the layouts that they must have.
    before  : steps on the operands that come once.   slices : labels of which each index is summed after the other.
    steps   : the other steps, for each index of `slices`.   result : the labels and the layout of the result.
    remaining : the position of the result in the list of tensors.
    program : the exchanges and products of all steps.   extra_bytes : per rank, beyond the operands.
    """

    expression: Expression
    operands: tuple[TensorValue, ...]
    before: tuple[Single, ...]
    slices: Labels
    steps: tuple[Single | Joint, ...]
    result: tuple[Labels, TensorValue]
    remaining: int
    program: Program
    extra_bytes: int

    @property
    def seconds(self) -> float:
        """The predicted time."""
        inner = sum(x.contraction.seconds for x in self.steps if isinstance(x, Joint))
        return inner * self.expression.size(self.slices)

    @property
    def words(self) -> int:
        """The words that the busiest rank receives."""
        return self.program.words

    @property
    def bound(self) -> float:
        """The sum of the lower bounds of the contractions on the words that the busiest rank receives."""
        of_steps = (x.contraction.bound for x in self.steps if isinstance(x, Joint))
        return sum(of_steps) * self.expression.size(self.slices)

    @property
    def contractions(self) -> int:
        """The number of contractions, those of all slices included."""
        return sum(isinstance(x, Joint) for x in self.steps) * self.expression.size(self.slices)

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """The layouts of the operands."""
        return tuple(x.layout for x in self.operands)

    @cached_property
    def description(self) -> str:
        """The plan as one line, by which ranks compare their plans: steps, layouts and algorithms."""
        steps = (f"{x.contraction.pair} {x.contraction.chosen}" if isinstance(x, Joint) else f"{x}" for x in self.steps)
        return f"{self.expression} {self.operands} {self.slices} {self.before} {'; '.join(steps)}"

    def __str__(self) -> str:
        rows = []
        for x in self.steps:
            if isinstance(x, Joint):
                one = x.contraction
                moves = "".join(name for name, stage in one.stages if name != "C") or "none"
                what = (str(one.pair), one.chosen.way, " x ".join(map(str, one.mnk)), moves)
                rows.append((*what, in_words(one.words), in_words(one.bound), in_seconds(one.seconds)))
        heads = ("contraction", "as", "m x n x k", "moved", "words", "bound", "time")
        sliced = f", for each index of {', '.join(self.slices)}" if self.slices else ""
        table = Table(heads, rows, words=heads[:4]) if rows else "no contraction"
        ranks = counted(self.program.size, "rank")
        return (
            f"{self.expression} on {ranks}{sliced}\n{table}\n{in_words(self.words)} received by the busiest rank "
            f"(bound {in_words(self.bound)}), {in_bytes(self.extra_bytes)} per rank beside the operands, predicted "
            f"{in_seconds(self.seconds)}"
        )


class _Draft:
    """The tensors and the stages of a plan while its steps are added."""

    def __init__(
        self,
        expression: Expression,
        operands: Sequence[TensorValue],
        resources: Resources,
        out: TensorLayout | None = None,
    ) -> None:
        self.expression, self.resources, self.out = expression, resources, out
        self.terms = list(zip(expression.inputs, operands))
        self.steps, self.stages, self.most, self.held = list[Single | Joint](), list[tuple[str, Stage]](), 0, 0
        self.chosen = dict[int, TensorLayout]()

    def _hold(self, x: TensorValue) -> None:
        """Count the bytes of a new tensor."""
        self.held += x.layout.of(x.dtype).local_bytes(None)
        self.most = max(self.most, self.held)

    def single(self, step: Single) -> None:
        """Add a step on one tensor: its exchange, and its result."""
        labels, x = self.terms[step.at]
        self.steps.append(step)
        source = partial_layout(x.layout, step.axes) if step.kind == SUM else x.layout
        target = step.target
        gone = step.axes[step.kind == DIAGONAL :]
        if target is None:
            target = undivided(source, gone, self.resources.ranks)
        dtype = x.dtype
        if step.kind == SUM and any(x.layout.shape[axis] != 1 for axis in gone):
            dtype = np.sum(np.ones(1, dtype)).dtype
        self.move(step.kind, source, target, dtypes.TYPE[dtype].sums_dtype if step.kind == SUM else dtype)
        if step.kind == UNDIVIDE:
            gone = ()
        elif step.kind == SUM:
            target = partial_layout(target, gone)
        left = tuple(y for axis, y in enumerate(labels) if axis not in gone)
        self.terms[step.at] = left, TensorValue(target.without(gone), dtype)
        if target is not x.layout:
            self._hold(self.terms[step.at][1])

    def move(self, name: str, source: TensorLayout, target: TensorLayout, dtype: np.dtype) -> None:
        """Add the exchange of a move, if ranks do not keep their elements."""
        move, _, nbytes = self.resources.cost_of_move(source, target, dtype)
        self.most = max(self.most, self.held + nbytes)
        if move:
            self.stages.append((name, move))

    def gather(self, x: TensorValue) -> None:
        """Add the gather of a small result on all ranks, if its elements are not all there."""
        schedule = gathering(x.layout.of(x.dtype), self.resources.size)[0]
        self.stages.append(("gather", schedule))

    def joint(self, a: int, b: int, kept: set[str], last: bool) -> None:
        """Add the contraction of two tensors.   kept : the labels of its result.   last : it is the last one."""
        (of_a, A), (of_b, B) = (self.terms[x] for x in (a, b))
        order = self.expression.output if last else dict.fromkeys(of_a + of_b)
        pair = Pair(of_a, of_b, tuple(x for x in order if x in kept))
        for x in (A, B):
            if not dtypes.TYPE[x.dtype].operand:
                kinds = f"{pair} of {A.dtype} and {B.dtype}"
                raise DTypeError(f"einsum {self.expression}: {kinds}, but elements of {x.dtype} are not multiplied")
        joined = contraction(pair, A, B, self.resources, self.out if last else None, self.held)
        for at, x, layout in ((a, A, joined.chosen.A), (b, B, joined.chosen.B)):
            if x.free:
                self.chosen[at] = layout
        self.steps.append(Joint(a, b, joined))
        self.stages += joined.stages
        self.most = max(self.most, self.held + joined.extra_bytes)
        self.terms.append((pair.c, TensorValue(joined.chosen.C, dtypes.product(A.dtype, B.dtype))))
        self._hold(self.terms[-1][1])


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
    draft = _Draft(expression, operands, resources, out)
    for at, axes in enumerate(sliced):
        if axes and draft.terms[at][1].layout.divided_among(axes):
            draft.single(Single(UNDIVIDE, at, axes, undivided(draft.terms[at][1].layout, axes, resources.ranks)))
    before, after = len(draft.steps), len(draft.stages)
    if slices:
        inputs = tuple(tuple(x for x in labels if x not in slices) for labels in expression.inputs)
        extents = tuple((x, n) for x, n in expression.extents if x not in slices)
        draft.expression = Expression(inputs, expression.output, extents)
        draft.terms = [
            (left, x._replace(layout=x.layout.without([axis for axis, y in enumerate(labels) if y in slices])))
            for left, (labels, x) in zip(inputs, draft.terms)
        ]
    _add_singles(draft)
    remaining = _add_joints(draft)
    stages = draft.stages[:after] + draft.stages[after:] * expression.size(slices)
    labels, result = draft.terms[remaining]
    draft.stages = []
    if out and not any(isinstance(x, Joint) for x in draft.steps):
        there = result.layout.transposed([labels.index(x) for x in expression.output])
        draft.move("C", there, out, result.dtype)
    if len(labels) < 2 and not out:
        draft.gather(result)
    stages += draft.stages
    chosen = list(operands)
    for at, (x, axes) in enumerate(zip(operands, sliced)):
        if x.free and at in draft.chosen:  # the layout of a slice
            x = x._replace(layout=draft.chosen[at].expanded(axes, [x.layout.shape[axis] for axis in axes]))
        chosen[at] = x._replace(free=False)
    limit = resources.memory_limit
    if limit is not None and draft.most > limit:
        raise MemoryLimitError(f"memory limit {limit} bytes per rank is too small for {expression}: {draft.most} bytes")
    steps = tuple(draft.steps)
    singles: Any = steps[:before]
    program = Program(tuple(stages), resources.size, resources.machine)
    return EinsumPlan(
        expression, tuple(chosen), singles, slices, steps[before:], (labels, result), remaining, program, draft.most
    )


def _add_singles(draft: _Draft) -> None:
    """Add steps after which each tensor has each label once, and only labels of other tensors or of the result.

    An axis of extent 1 whose label has another extent is dropped.
    """
    extent = draft.expression.extent
    wide = [{x for x, n in zip(labels, value.layout.shape) if n == extent[x]} for labels, value in draft.terms]
    for at, labels in enumerate(draft.expression.inputs):
        for label in [x for x in dict.fromkeys(labels) if labels.count(x) > 1]:
            layout = draft.terms[at][1].layout
            axes = [axis for axis, x in enumerate(draft.terms[at][0]) if x == label]
            draft.single(Single(DIAGONAL, at, tuple(sorted(axes, key=lambda axis: axis not in layout.divided))))
        others = {*draft.expression.output}.union(*(x for y, x in enumerate(wide) if y != at))
        gone = tuple(axis for axis, x in enumerate(draft.terms[at][0]) if x not in wide[at] or x not in others)
        if gone:
            draft.single(Single(SUM, at, gone))


def _add_joints(draft: _Draft) -> int:
    """Add the contractions of pairs, and return the position of the result in the list of tensors."""
    output, left = draft.expression.output, list(range(len(draft.terms)))
    for x, y in contraction_order([draft.terms[at][0] for at in left], draft.expression, draft.resources):
        a, b = left[x], left[y]
        left = [at for at in left if at not in (a, b)]
        kept = {*output}.union(*(draft.terms[at][0] for at in left))
        left.append(len(draft.terms))
        draft.joint(a, b, kept, len(left) == 1)
    return left[0]


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
