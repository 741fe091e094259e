"""Expressions of einsum: the labels of axes, their extents, and the order of contractions.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np
from opt_einsum import contract_path
from opt_einsum.parser import parse_einsum_input

from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.planning.tensors.resources import Resources
from pdgemm.schedules.formulas import gemm_flops, lower_bound
from pdgemm.schedules.mover_registry import RING

Labels = tuple[str, ...]
Shapes = tuple[tuple[int, ...], ...]


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
    arguments = [expression, *operands]
    arrays = list(operands) if isinstance(expression, str) else arguments[: len(arguments) // 2 * 2 : 2]
    shapes = tuple(tuple(shape_of(x)) for x in arrays)
    if isinstance(expression, str):
        return _of_text(expression, shapes), arrays
    lists = arguments[1 : 2 * len(arrays) : 2]
    parts = [y for shape, labels in zip(shapes, lists) for y in (_Shape(shape, len(shape)), labels)]
    return _expression("einsum", shapes, parts + arguments[2 * len(arrays) :]), arrays


@lru_cache(maxsize=1024)
def _of_text(text: str, shapes: Shapes) -> Expression:
    return _expression(text, shapes, [text, *(_Shape(x, len(x)) for x in shapes)])


def _expression(text: str, shapes: Shapes, parts: list[Any]) -> Expression:
    """Return the expression of operands of these shapes.   text : its name in messages.   parts : for the parser."""
    try:
        left, right, _ = parse_einsum_input(parts)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as bad:
        raise ArgumentError(f"einsum {text!r} of shapes {[*shapes]}: {bad}") from None
    inputs, extents = tuple(tuple(x) for x in left.split(",")), dict[str, int]()
    for labels, shape in zip(inputs, shapes, strict=True):
        if len(labels) != len(shape):
            raise LayoutError(f"einsum {text!r}: {''.join(labels)!r} names {len(labels)} axes of an operand of {shape}")
        for label, n in zip(labels, shape):
            if n != shape[labels.index(label)]:
                ends = f"{shape[labels.index(label)]} and {n}"
                raise LayoutError(f"einsum {left}->{right}: index {label!r} of one operand has the extents {ends}")
            known = extents.setdefault(label, n)
            if n != known and 1 not in (n, known):
                raise LayoutError(f"einsum {left}->{right}: index {label!r} has the extents {known} and {n}")
            extents[label] = n if known == 1 else known
    return Expression(inputs, tuple(right), tuple(extents.items()))


_EXHAUSTIVE = 6  # most tensors of which every order is compared


def contraction_order(terms: Sequence[Labels], expression: Expression, resources: Resources) -> list[tuple[int, int]]:
    """Return the pairs to contract: positions in a list, from which both are taken and to which the result is added.

    Up to six tensors every order is compared by the least time of its products; for more, opt_einsum chooses.
    """
    if len(terms) > _EXHAUSTIVE:
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
                seconds = _least_seconds(labels_of(left), labels_of(right), labels_of(part), expression, resources)
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
    a: frozenset[str], b: frozenset[str], c: frozenset[str], expression: Expression, resources: Resources
) -> float:
    """Return a lower estimate of the time of a contraction: its operations, and the bound on its words."""
    m, n, k = (expression.size([*x]) for x in ((a - b) & c, (b - a) & c, (a & b) - c))
    items, machine, dtype = expression.size([*(a & b & c)]), resources.machine, np.dtype(float)
    rate = machine.rate(str(dtype), max(1, m), max(1, n), max(1, k))
    words = lower_bound(m, n, k, resources.size) if items == 1 else 0.0
    link = machine.links(RING.name)[machine.ranks_per_node is not None]
    return (
        items * gemm_flops(m, n, k) / rate / resources.size + words * dtype.itemsize * link.beta + machine.call_overhead
    )
