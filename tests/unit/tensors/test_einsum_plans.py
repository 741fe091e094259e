"""Plans of einsum without MPI: expressions, orders of contractions, memory limits and slices."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import opt_einsum
import pytest
import tiers

from pdgemm import plan_einsum
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, MemoryLimitError
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.tensors.contractions import Resources
from pdgemm.planning.tensors.einsum_plan import EinsumPlan, Joint
from pdgemm.planning.tensors.expression import _least_seconds, contraction_order, parsed

MACHINE = Machine()


def plan_of(expression: str, *shapes: tuple[int, ...], ranks: int = 4, **options: Any) -> EinsumPlan:
    return plan_einsum(expression, *shapes, ranks=ranks, machine=MACHINE, **options)


def test_expressions() -> None:
    def labels(expression: Any, *operands: Any) -> str:
        return str(parsed(expression, operands, lambda x: x)[0])

    assert labels("ij,jk", (2, 3), (3, 4)) == "ij,jk->ik"
    assert labels("ba", (2, 3)) == "ba->ab"
    assert labels(" i j , jk -> k i", (2, 3), (3, 4)) == "ij,jk->ki"
    expression, _ = parsed("...i,...i->...", ((5, 2, 3), (2, 1)), lambda x: x)
    assert [expression.extent[x] for x in expression.output] == [5, 2]
    assert expression.size(expression.inputs[0]) == 30
    expression, arrays = parsed((2, 3), [[0, 1], (3, 4), [1, 2], [2, 0]], lambda x: x)
    assert arrays == [(2, 3), (3, 4)]
    assert [expression.extent[x] for x in expression.output] == [4, 2]


@pytest.mark.parametrize(
    ("expression", "shapes", "kind", "message"),
    [
        ("ij,kj->ik", [(2, 3), (3, 4)], LayoutError, "einsum ij,kj->ik: index 'j' has the extents 3 and 4"),
        ("ijk->i", [(2, 3)], LayoutError, "einsum 'ijk->i': 'ijk' names 3 axes of an operand of (2, 3)"),
        ("ii->i", [(2, 3)], LayoutError, "einsum ii->i: index 'i' of one operand has the extents 2 and 3"),
        ("ij->x", [(2, 3)], ArgumentError, "einsum 'ij->x' of shapes [(2, 3)]: "),
        ("ij->ii", [(2, 3)], ArgumentError, "einsum 'ij->ii' of shapes [(2, 3)]: "),
        ("ij,jk->ik", [(2, 3)], ArgumentError, "einsum 'ij,jk->ik' of shapes [(2, 3)]: "),
        ("i-j", [(2, 3)], ArgumentError, "einsum 'i-j' of shapes [(2, 3)]: "),
        ("....i->i", [(2, 3)], ArgumentError, "einsum '....i->i' of shapes [(2, 3)]: "),
    ],
)
def test_messages_name_the_expression(expression: str, shapes: Any, kind: type, message: str) -> None:
    with pytest.raises(kind) as error:
        plan_of(expression, *shapes)
    assert str(error.value).startswith(message)


def test_bad_arguments_of_plans() -> None:
    with pytest.raises(ArgumentError, match="takes ranks, the number of ranks"):
        plan_einsum("ij->ji", (2, 3))
    with pytest.raises(ArgumentError, match="minimize"):
        plan_of("ij->ji", (2, 3), minimize="flops")
    with pytest.raises(DTypeError, match="einsum ij,jk->ik: ij,jk->ik of bool and bool, but elements of bool"):
        plan_of("ij,jk->ik", (2, 3), (3, 4), dtype="bool")


def drawn_network(draw: random.Random, number: int) -> tuple[str, list[tuple[int, ...]]]:
    """Return an expression of a connected network of tensors, and their shapes."""
    inputs, extents = [list[str]() for _ in range(number)], dict[str, int]()
    for letter in "abcdefghij"[: number + draw.randint(0, 3)]:
        extents[letter] = draw.choice((2, 3, 5, 8, 13))
        for at in draw.sample(range(number), 2):
            inputs[at].append(letter)
    for at in range(number):
        if not inputs[at] or draw.random() < 0.3:
            inputs[at].append("uvwxyz"[at])
            extents["uvwxyz"[at]] = draw.choice((2, 4))
    output = "".join(x for x in "uvwxyz" if x in extents)
    return f"{','.join(map(''.join, inputs))}->{output}", [tuple(extents[x] for x in y) for y in inputs]


def seconds_of(terms: list[Any], expression: Any, resources: Resources, path: list[tuple[int, int]]) -> float:
    """Return the estimated seconds of the contractions of a path."""
    held, total = [frozenset(x) for x in terms], 0.0
    for a, b in path:
        x, y = held[a], held[b]
        held = [z for at, z in enumerate(held) if at not in (a, b)]
        new = (x | y) & frozenset(expression.output).union(*held)
        total += _least_seconds(x, y, new, expression, resources)
        held.append(new)
    return total


def paths(number: int) -> Iterator[list[tuple[int, int]]]:
    """Yield all orders in which pairs of tensors can be contracted."""
    if number == 1:
        yield []
    for pair in combinations(range(number), 2):
        for path in paths(number - 1):
            yield [pair, *path]


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_no_order_is_faster(number: int) -> None:
    for turn in range(tiers.examples(12)):
        draw = random.Random(100 * number + turn)
        text, shapes = drawn_network(draw, number)
        expression, _ = parsed(text, shapes, lambda x: x)
        terms, resources = list(expression.inputs), Resources(draw.choice((1, 4)), MACHINE)
        mine = seconds_of(terms, expression, resources, contraction_order(terms, expression, resources))
        least = min(seconds_of(terms, expression, resources, path) for path in paths(number))
        assert np.isclose(mine, least, rtol=1e-12)
        by_flops, _ = opt_einsum.contract_path(text, *shapes, shapes=True, optimize="optimal")
        if all(len(x) == 2 for x in by_flops):
            assert mine <= seconds_of(terms, expression, resources, by_flops) * (1 + 1e-12)


def test_orders_of_many_tensors() -> None:
    letters = "abcdefghij"
    text = ",".join(letters[at : at + 2] for at in range(9)) + "->aj"
    plan = plan_of(text, *[(4, 4)] * 9)
    assert sum(isinstance(x, Joint) for x in plan.steps) == 8
    assert plan.contractions == 8


@pytest.mark.parametrize("turn", range(2))
def test_plans_hold_their_memory_limit(turn: int) -> None:
    """100 drawn plans each: within the limit, or refused where the limit is too small."""
    held = refused = 0
    for number in range(100):
        draw = random.Random(1000 * turn + number)
        text, shapes = drawn_network(draw, draw.randint(2, 4))
        ranks = draw.choice((1, 2, 3, 4, 6, 9))
        whole = plan_of(text, *shapes, ranks=ranks)
        limit = draw.randint(whole.extra_bytes // 8, whole.extra_bytes)
        try:
            plan = plan_of(text, *shapes, ranks=ranks, memory_limit=limit)
            assert plan.extra_bytes <= limit
            held += 1
        except MemoryLimitError as error:
            assert "bytes per rank is too small for" in str(error)
            refused += 1
        assert plan_of(text, *shapes, ranks=ranks, memory_limit=whole.extra_bytes).extra_bytes <= whole.extra_bytes
    assert held > 20
    assert refused > 5


def test_slices_where_memory_is_short() -> None:
    shapes = (6, 40), (40, 50, 6), (50, 6)
    whole = plan_of("ai,ijb,jc->abc", *shapes)
    assert not whole.slices
    limits = [whole.extra_bytes * x // 20 for x in range(19, 4, -1)]
    plans = []
    for limit in limits:
        try:
            plans.append(plan_of("ai,ijb,jc->abc", *shapes, memory_limit=limit))
        except MemoryLimitError:
            break
    sliced = next(x for x in plans if x.slices)
    assert {*sliced.slices} <= {"i", "j"}
    assert sliced.contractions == 2 * sliced.expression.size(sliced.slices)
    assert f"for each index of {', '.join(sliced.slices)}" in str(sliced)


def test_plans_are_values() -> None:
    plan, again = (plan_of("ijab,abkl->ijkl", (2, 3, 4, 5), (4, 5, 3, 2)) for _ in range(2))
    assert plan == again
    assert plan != plan_of("ijab,abkl->ijkl", (2, 3, 4, 5), (4, 5, 3, 2), ranks=2)
    lines = str(plan).splitlines()
    assert lines[0] == "ijab,abkl->ijkl on 4 ranks"
    assert lines[1].split() == ["contraction", "as", "m", "x", "n", "x", "k", "moved", "words", "bound", "time"]
    assert "6 x 6 x 20" in lines[2]
    assert "received by the busiest rank (bound" in lines[-1]
    assert "no contraction" in str(plan_of("ij->ji", (2, 3)))
    assert plan.words == max(plan.program.traffic(rank).words_received for rank in range(4))
    free = plan_of("ijab,abkl->ijkl", (8, 8, 8, 8), (8, 8, 8, 8), free=True, minimize="words")
    assert free.words <= plan_of("ijab,abkl->ijkl", (8, 8, 8, 8), (8, 8, 8, 8)).words
    assert [x.shape for x in free.layouts] == [(8, 8, 8, 8)] * 2


def test_plans_need_no_mpi() -> None:
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from pdgemm import plan_einsum\n"
        "print(plan_einsum('ij,jk,kl->il', (4, 5), (5, 6), (6, 7), ranks=4).contractions)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "2\n"), run.stderr


def test_types_of_results() -> None:
    for dtype, result in (("int8", "int32"), ("uint8", "uint8"), ("float16", "float16"), ("complex64", "complex64")):
        assert plan_of("ij,jk->ik", (2, 3), (3, 4), dtype=dtype).result[1].dtype == np.dtype(result)
    assert plan_of("ij->i", (2, 3), dtype="int8").result[1].dtype == np.dtype("int32")
    assert plan_of("ij->i", (2, 3), dtype="uint16").result[1].dtype == np.dtype("uint16")
    assert plan_of("ij->i", (2, 3), dtype="bool").result[1].dtype == np.dtype("int64")
    assert plan_of("i,j->ij", (1,), (4,), dtype="int8").result[1].dtype == np.dtype("int32")
