"""The order in which the tensors of an expression are contracted.  No MPI, no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from opt_einsum import contract_path

from pdgemm.planning.tensors.expression import Expression, Labels
from pdgemm.planning.tensors.resources import Resources
from pdgemm.schedules.formulas import gemm_flops, lower_bound
from pdgemm.schedules.mover_registry import RING

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
