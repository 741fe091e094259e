"""Expressions of einsum, and the order in which their operands are contracted.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from opt_einsum.parser import parse_einsum_input

from pdgemm.errors import ArgumentError, LayoutError


class Expression(NamedTuple):
    """The labels of the axes of the operands and of the result, and the extent of each label."""

    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    extents: dict[str, int]

    def __str__(self) -> str:
        return f"{','.join(map(''.join, self.inputs))}->{''.join(self.output)}"


class _Shape(NamedTuple):
    """The shape of an operand, with what the parser reads of an array."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def parsed(expression: Any, operands: Sequence[Any]) -> tuple[Expression, list[Any]]:
    """Return the expression, and the operands in order.

    expression, operands : the arguments of numpy.einsum.   Raises ArgumentError or LayoutError.
    """
    if isinstance(expression, str):
        arrays, lists = list(operands), []
    else:
        everything = [expression, *operands]
        arrays, lists = everything[: len(everything) // 2 * 2 : 2], everything
    shapes = [tuple(getattr(x, "shape", None) or np.shape(x)) for x in arrays]
    places = [np.empty(0)] * 0 + [_Shape(x) for x in shapes]
    if isinstance(expression, str):
        parts: list[Any] = [expression, *places]
    else:
        parts = [y for place, labels in zip(places, lists[1::2]) for y in (place, labels)] + lists[len(arrays) * 2 :]
    try:
        left, right, _ = parse_einsum_input(parts)
    except (ValueError, TypeError, IndexError, AttributeError) as bad:
        raise ArgumentError(f"einsum({expression!r}) of shapes {shapes}: {bad}") from None
    inputs, extents = tuple(tuple(x) for x in left.split(",")), dict[str, int]()
    for labels, shape in zip(inputs, shapes, strict=True):
        if len(labels) != len(shape):
            raise LayoutError(f"einsum: {''.join(labels)!r} names {len(labels)} axes of an operand of shape {shape}")
        for label, n in zip(labels, shape):
            known = extents.setdefault(label, n)
            if n != known and 1 not in (n, known):
                raise LayoutError(f"einsum {left}->{right}: index {label!r} has the extents {known} and {n}")
            extents[label] = n if known == 1 else known
    return Expression(inputs, tuple(right), extents), arrays
