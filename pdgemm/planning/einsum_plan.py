"""Plans of einsum: the order of contractions, their layouts, and what moves.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError, MemoryLimitError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import dtypes
from pdgemm.planning.contractions import Contraction, Labels, Operand, Pair, Setting, contraction
from pdgemm.planning.program import Program, Stage
from pdgemm.planning.tensor_layouts import partial_layout, undivided
from pdgemm.schedules.collectives.vectors import gathering
from pdgemm.schedules.formulas import gemm_flops, lower_bound
from pdgemm.schedules.mover_registry import RING
from pdgemm.support.text import Table, in_bytes, in_seconds, in_words

DIAGONAL, SUM, NUMBER, UNDIVIDE = "diagonal", "sum", "number", "undivide"  # steps on one tensor
_EXHAUSTIVE = 6  # most operands of which every order is compared


@dataclass(frozen=True)
class Expression:
    """An expression of einsum: the labels of the axes of the operands and of the result, and their extents."""

    inputs: tuple[Labels, ...]
    output: Labels
    extents: tuple[tuple[str, int], ...]

    @cached_property
    def extent(self) -> dict[str, int]:
        return dict(self.extents)

    def size(self, labels: Sequence[str]) -> int:
        """Return the product of the extents of labels."""
        return prod(self.extent[x] for x in labels)

    def __str__(self) -> str:
        return f"{','.join(map(''.join, self.inputs))}->{''.join(self.output)}"


class _Shape(NamedTuple):
    """An operand without elements, for the parser."""

    shape: tuple[int, ...]
    ndim: int


def parsed(expression: Any, operands: Sequence[Any], shape_of: Any = np.shape) -> tuple[Expression, list[Any]]:
    """Return the expression, and the operands in order.

    expression, operands : the arguments of numpy.einsum.   shape_of : returns the shape of an operand.
    Raises ArgumentError or LayoutError, which name the expression, the index and both extents.
    """
    from opt_einsum.parser import parse_einsum_input

    arguments = [expression, *operands]
    arrays = list(operands) if isinstance(expression, str) else arguments[: len(arguments) // 2 * 2 : 2]
    shapes = [tuple(shape_of(x)) for x in arrays]
    places = [_Shape(x, len(x)) for x in shapes]
    parts: list[Any] = [expression, *places]
    if not isinstance(expression, str):
        lists = arguments[1 : 2 * len(arrays) : 2]
        parts = [y for pair in zip(places, lists) for y in pair] + arguments[2 * len(arrays) :]
    text = expression if isinstance(expression, str) else "einsum"
    try:
        left, right, _ = parse_einsum_input(parts)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as bad:
        raise ArgumentError(f"einsum {text!r} of shapes {shapes}: {bad}") from None
    inputs, extents = tuple(tuple(x) for x in left.split(",")), dict[str, int]()
    for labels, shape in zip(inputs, shapes, strict=True):
        if len(labels) != len(shape):
            raise LayoutError(f"einsum {text!r}: {''.join(labels)!r} names {len(labels)} axes of an operand of {shape}")
        for label, n in zip(labels, shape):
            known = extents.setdefault(label, n)
            if n != known and 1 not in (n, known):
                raise LayoutError(f"einsum {left}->{right}: index {label!r} has the extents {known} and {n}")
            extents[label] = n if known == 1 else known
    return Expression(inputs, tuple(right), tuple(extents.items())), arrays


class Single(NamedTuple):
    """A step on one tensor.

    kind   : "diagonal": the elements with equal indices along `axes`, of which the first is kept; "sum" over `axes`;
             "number": a tensor without axes, by which the result is multiplied; "undivide": a move to `target`.
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
    """The plan of an einsum as a value: it can be printed and compared, and is executed by `einsum(..., optimize=plan)`.

    expression : the labels of all tensors.   operands : the tensors as values, with the layouts that they must have.
    before  : steps on the operands that come once.   slices : labels of which each index is summed after the other.
    steps   : the other steps, for each index of `slices`.   result : the labels and the layout of the result.
    remaining : the position of the result in the list of tensors.
    program : the exchanges and products of all steps.   extra_bytes : per rank, beyond the operands.
    """

    expression: Expression
    operands: tuple[Operand, ...]
    before: tuple[Single, ...]
    slices: Labels
    steps: tuple[Single | Joint, ...]
    result: tuple[Labels, Operand]
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
        of_steps = (x.contraction.bound(self.program.size) for x in self.steps if isinstance(x, Joint))
        return sum(of_steps) * self.expression.size(self.slices)

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """The layouts of the operands."""
        return tuple(x.layout for x in self.operands)

    def __str__(self) -> str:
        rows = []
        for x in self.steps:
            if isinstance(x, Joint):
                one = x.contraction
                words = max(sum(s.traffic(r).words_received for _, s in one.stages) for r in range(self.program.size))
                moves = "".join(name for name, stage in one.stages if name != "C") or "none"
                what = (str(one.pair), one.chosen.way, " x ".join(map(str, one.mnk)), moves)
                rows.append((*what, in_words(words), in_words(one.bound(self.program.size)), in_seconds(one.seconds)))
        heads = ("contraction", "as", "m x n x k", "moved", "words", "bound", "time")
        sliced = f", for each index of {', '.join(self.slices)}" if self.slices else ""
        table = Table(heads, rows, words=heads[:4]) if rows else "no contraction"
        return (
            f"{self.expression} on {self.program.size} ranks{sliced}\n{table}\n{in_words(self.words)} received by the "
            f"busiest rank (bound {in_words(self.bound)}), {in_bytes(self.extra_bytes)} per rank beside the operands, "
            f"predicted {in_seconds(self.seconds)}"
        )


class _Draft:
    """The tensors and the stages of a plan while its steps are added."""

    def __init__(self, expression: Expression, operands: Sequence[Operand], setting: Setting) -> None:
        self.expression, self.setting = expression, setting
        self.terms = list(zip(expression.inputs, operands))
        self.steps, self.stages, self.most, self.held = list[Single | Joint](), list[tuple[str, Stage]](), 0, 0
        self.chosen = dict[int, TensorLayout]()

    def _made(self, x: Operand) -> None:
        self.held += x.layout.of(x.dtype).local_bytes(None)
        self.most = max(self.most, self.held)

    def single(self, step: Single) -> None:
        labels, x = self.terms[step.at]
        self.steps.append(step)
        source = partial_layout(x.layout, step.axes) if step.kind == SUM else x.layout
        target = step.target
        gone = step.axes[step.kind == DIAGONAL :]
        if target is None:
            target = undivided(source, gone, self.setting.ranks)
        if step.kind == NUMBER:
            self.gather(x)
        elif move := self.setting.move(source, target, x.dtype):
            self.stages.append((step.kind, move))
        if step.kind == UNDIVIDE:
            gone = ()
        elif step.kind == SUM:
            target = partial_layout(target, gone)
        left = tuple(y for axis, y in enumerate(labels) if axis not in gone)
        self.terms[step.at] = left, Operand(target.without(gone), x.dtype)
        if target is not x.layout:
            self._made(self.terms[step.at][1])

    def gather(self, x: Operand) -> None:
        """Add the gather of a small result on all ranks, if its elements are not all there."""
        schedule = gathering(x.layout.of(x.dtype), self.setting.size)[0]
        self.stages.append(("gather", schedule))

    def joint(self, a: int, b: int, kept: set[str], last: bool) -> None:
        (of_a, A), (of_b, B) = (self.terms[x] for x in (a, b))
        order = self.expression.output if last else dict.fromkeys(of_a + of_b)
        pair = Pair(of_a, of_b, tuple(x for x in order if x in kept))
        limit = self.setting.memory_limit
        setting = self.setting._replace(memory_limit=None if limit is None else max(0, limit - self.held))
        found = contraction(pair, A, B, setting)
        for at, x, layout in ((a, A, found.chosen.A), (b, B, found.chosen.B)):
            if x.free:
                self.chosen[at] = layout
        self.steps.append(Joint(a, b, found))
        self.stages += found.stages
        self.most = max(self.most, self.held + found.extra_bytes)
        self.terms.append((pair.c, Operand(found.chosen.C, dtypes.product(A.dtype, B.dtype))))
        self._made(self.terms[-1][1])


def plan_of(expression: Expression, operands: tuple[Operand, ...], setting: Setting) -> EinsumPlan:
    """Return the plan of an expression for tensors in these layouts, with slices if the memory limit requires them.

    Raises MemoryLimitError where no plan fits.
    """
    slices: Labels = ()
    while True:
        try:
            return _plan(expression, operands, setting, slices)
        except MemoryLimitError:
            summed = [x for x, n in expression.extents if x not in expression.output + slices and n > 1]
            if not summed:
                raise
            slices += (max(summed, key=lambda x: (sum(x in y for y in expression.inputs), expression.extent[x])),)


@lru_cache(maxsize=256)
def _plan(expression: Expression, operands: tuple[Operand, ...], setting: Setting, slices: Labels) -> EinsumPlan:
    draft = _Draft(expression, operands, setting)
    for at, labels in enumerate(expression.inputs):
        axes = tuple(axis for axis, x in enumerate(labels) if x in slices)
        if axes and draft.terms[at][1].layout.divided_among(axes):
            draft.single(Single(UNDIVIDE, at, axes, undivided(draft.terms[at][1].layout, axes, setting.ranks)))
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
    if len(labels) < 2:
        draft.stages = []
        draft.gather(result)
        stages += draft.stages
    chosen = tuple(
        x._replace(layout=draft.chosen.get(at, x.layout), free=False) if x.free else x for at, x in enumerate(operands)
    )
    limit = setting.memory_limit
    if limit is not None and draft.most > limit:
        raise MemoryLimitError(f"memory limit {limit} bytes per rank is too small for {expression}: {draft.most} bytes")
    steps = tuple(draft.steps)
    singles: Any = steps[:before]
    program = Program(tuple(stages), setting.size, setting.machine)
    return EinsumPlan(expression, chosen, singles, slices, steps[before:], (labels, result), remaining, program, draft.most)


def _add_singles(draft: _Draft) -> None:
    """Add steps after which each tensor has each label once, and only labels of other tensors or of the result."""
    for at, labels in enumerate(draft.expression.inputs):
        for label in [x for x in dict.fromkeys(labels) if labels.count(x) > 1]:
            layout = draft.terms[at][1].layout
            axes = [axis for axis, x in enumerate(draft.terms[at][0]) if x == label]
            draft.single(Single(DIAGONAL, at, tuple(sorted(axes, key=lambda axis: axis not in layout.divided))))
        others = {*draft.expression.output}.union(*(x for y, x in enumerate(draft.expression.inputs) if y != at))
        held, x = draft.terms[at]
        thin = [n == 1 != draft.expression.extent[label] for label, n in zip(held, x.layout.shape)]
        gone = tuple(axis for axis, label in enumerate(held) if thin[axis] or label not in others)
        if gone:
            draft.single(Single(SUM, at, gone))


def _add_joints(draft: _Draft) -> int:
    """Add the contractions of pairs, and return the position of the result in the list of tensors.

    Tensors without axes are numbers by which the result is multiplied.
    """
    output, left = draft.expression.output, [at for at, (labels, _) in enumerate(draft.terms) if labels]
    numbers = [at for at, (labels, _) in enumerate(draft.terms) if not labels]
    if not left:
        left = [numbers.pop()]
    for at in numbers:
        draft.single(Single(NUMBER, at))
    for x, y in order([draft.terms[at][0] for at in left], draft.expression, draft.setting):
        a, b = left[x], left[y]
        left = [at for at in left if at not in (a, b)]
        kept = {*output}.union(*(draft.terms[at][0] for at in left))
        left.append(len(draft.terms))
        draft.joint(a, b, kept, len(left) == 1)
    return left[0]


def order(terms: Sequence[Labels], expression: Expression, setting: Setting) -> list[tuple[int, int]]:
    """Return the pairs to contract, as positions in a list from which both are taken and to which the result is appended.

    Up to six tensors every order is compared by the least time of its products; for more, opt_einsum chooses.
    """
    if len(terms) > _EXHAUSTIVE:
        from opt_einsum import contract_path

        text = f"{','.join(map(''.join, terms))}->{''.join(expression.output)}"
        shapes = [tuple(expression.extent[x] for x in labels) for labels in terms]
        path, _ = contract_path(text, *shapes, shapes=True, optimize="auto")
        return [(int(x), int(y)) for step in path for x, y in [(*step, *step)[:2]] if len(step) == 2]
    best = {frozenset([at]): (0.0, tuple[Any, ...]()) for at in range(len(terms))}
    everything = frozenset(range(len(terms)))

    def labels_of(part: frozenset[int]) -> frozenset[str]:
        inside = frozenset[str]().union(*(terms[at] for at in part))
        return inside & frozenset(expression.output).union(*(terms[at] for at in everything - part))

    for number in range(2, len(terms) + 1):
        for part in map(frozenset, combinations(range(len(terms)), number)):
            ways = list[tuple[float, tuple[Any, ...]]]()
            for left in _halves(part):
                right = part - left
                seconds = _least_seconds(labels_of(left), labels_of(right), labels_of(part), expression, setting)
                ways.append((best[left][0] + best[right][0] + seconds, (left, right)))
            best[part] = min(ways, key=lambda x: x[0])
    path, held = list[tuple[int, int]](), [frozenset([at]) for at in range(len(terms))]

    def add(part: frozenset[int]) -> None:
        """Add the contractions of a part to the path, the innermost ones first."""
        for half in best[part][1]:
            add(half)
        if best[part][1]:
            x, y = sorted(held.index(half) for half in best[part][1])
            path.append((x, y))
            held.append(part)
            del held[y], held[x]

    add(everything)
    return path


def _halves(part: frozenset[int]) -> Iterator[frozenset[int]]:
    """Yield each set of which, with the rest, the part consists; the set has the first element."""
    first, *others = sorted(part)
    for number in range(len(others)):
        for rest in combinations(others, number):
            yield frozenset((first, *rest))


def _least_seconds(
    a: frozenset[str], b: frozenset[str], c: frozenset[str], expression: Expression, setting: Setting
) -> float:
    """Return a lower estimate of the time of a contraction: its operations, and the bound on its words."""
    m, n, k = (expression.size([*x]) for x in ((a - b) & c, (b - a) & c, (a & b) - c))
    items, machine, dtype = expression.size([*(a & b & c)]), setting.machine, np.dtype(float)
    rate = machine.rate(str(dtype), max(1, m), max(1, n), max(1, k))
    words = lower_bound(m, n, k, setting.size) if items == 1 else 0.0
    link = machine.links(RING.name)[machine.ranks_per_node is not None]
    return items * gemm_flops(m, n, k) / rate / setting.size + words * dtype.itemsize * link.beta + machine.call_overhead


def plan_einsum(
    expression: Any,
    *operands: Any,
    ranks: int | None = None,
    dtype: Any = float,
    free: bool = False,
    machine: Any = None,
    memory_limit: int | None = None,
) -> EinsumPlan:
    """Return the plan of `einsum` with these arguments, without MPI.  Local.

    operands : DistTensor, or shapes; a tensor of a shape has the layout of `DistTensor.empty`.
    ranks    : number of ranks; by default that of the tensors.   dtype : the type of tensors of shapes.
    free     : the layouts of operands of shapes may be chosen, too: `plan.layouts` has them.
    machine  : Machine; by default the machine at hand.   memory_limit : bytes per rank beyond the operands.

    Raises ArgumentError, LayoutError or MemoryLimitError.
    """
    from pdgemm.planning.machines.machine import machine_at_hand
    from pdgemm.planning.tensor_layouts import default_layout

    is_tensor = lambda x: hasattr(x, "layout")  # noqa: E731
    expr, arrays = parsed(expression, operands, lambda x: x.shape if is_tensor(x) else x)
    tensors = [x for x in arrays if is_tensor(x)]
    members = tensors[0].grid.members if tensors else tuple(range(ranks or 1))
    if ranks is None and not tensors:
        raise ArgumentError("plan_einsum of shapes takes ranks, the number of ranks")
    values = tuple(
        Operand(x.layout, x.dtype)
        if is_tensor(x)
        else Operand(default_layout(tuple(x), len(members), None, members), np.dtype(dtype), free)
        for x in arrays
    )
    size = tensors[0].grid.size if tensors else len(members)
    return plan_of(expr, values, Setting(size, machine or machine_at_hand(), memory_limit, members))
