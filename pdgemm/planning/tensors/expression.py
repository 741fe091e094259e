"""Expressions of einsum: the labels of axes, and their extents.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from opt_einsum.parser import parse_einsum_input

from pdgemm.errors import ArgumentError, LayoutError

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
