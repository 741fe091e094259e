"""Drawn contractions of tensors, in all kinds of layouts, compared with NumPy's; their words are those of their plans.

With --all there are 3,000 expressions on each number of ranks, in fifteen parts; -k "expressions and part3" runs three.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiers
from drawn_einsums import checked, compare, drawn_cases, machine_of, reference
from drawn_tensors import elements, tensor_of
from mpi4py import MPI

import pdgemm
from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.support.agreement import together

pytestmark = [pytest.mark.mpi, tiers.every_grid]
PARTS = 5


@pytest.mark.parametrize("part", range(PARTS), ids="part{}".format)
def test_drawn_expressions(grids_on_nodes: list[Any], part: int, request: pytest.FixtureRequest) -> None:
    seed = request.node.callspec.indices["grids_on_nodes"]
    for _, grid, expression, arrays, operands in drawn_cases(grids_on_nodes, 1000, seed, (part, PARTS), False):
        try:
            checked(expression, arrays, operands, grid)
        except Exception as error:
            error.add_note(f"{expression} of {arrays[0].dtype}, {operands}, on a {grid} grid")
            raise


def test_scalars_and_results_in_place(grids: list[Any]) -> None:
    for draw, grid, expression, arrays, tensors in drawn_cases(grids, 1500, 2):
        dtype, of = arrays[0].dtype, reference(expression, arrays)
        if dtype.kind == "i":
            continue
        alpha, beta = draw.choice((1, 2, -0.5)), draw.choice((0, 0, 1, -3))
        if dtype.kind == "c":
            alpha *= draw.choice((1, 1 + 1j))
        before = elements(of[0].shape, dtype, 99)
        if beta == 0:
            before = np.full(of[0].shape, np.nan, dtype)  # is not read
        out, limit = tensor_of(before, grid, draw), None
        if out.unfolding.conjugated:
            with pytest.raises(ArgumentError, match="out is the conjugate of another matrix"):
                pdgemm.einsum(expression, *tensors, out=out)
            continue
        if draw.random() < 0.5:  # slices
            most = pdgemm.plan_einsum(expression, *tensors, machine=machine_of(grid)).extra_bytes
            limit = draw.randint(most // 2, 2 * most)
        options: Any = {"alpha": alpha, "beta": beta, "memory_limit": limit, "out": out}
        try:
            assert pdgemm.einsum(expression, *tensors, **options) is out
        except MemoryLimitError:
            assert limit is not None
            continue
        added = np.zeros(()) if beta == 0 else before.astype(of[0].dtype)
        compare(out, alpha * of[0] + beta * added, abs(alpha) * of[1] + abs(beta * added), of[2] + 4, dtype)
        after = [T.allgather() for T in tensors]
        with together(MPI.COMM_WORLD):
            assert out.report.counted == out.report.predicted
            assert all(np.array_equal(x, y) for x, y in zip(arrays, after))


def test_plans_within_a_memory_limit(grids: list[Any]) -> None:
    for draw, grid, expression, arrays, tensors in drawn_cases(grids, 600, 3):
        if arrays[0].dtype.kind == "i":
            continue
        machine = machine_of(grid)
        most = pdgemm.plan_einsum(expression, *tensors, machine=machine).extra_bytes
        for limit in (most, draw.randint(0, most)):
            try:
                plan = pdgemm.plan_einsum(expression, *tensors, machine=machine, memory_limit=limit)
            except MemoryLimitError:
                assert limit < most
                with pytest.raises(MemoryLimitError, match="is too small for"):
                    pdgemm.einsum(expression, *tensors, memory_limit=limit)
            else:
                assert plan.extra_bytes <= limit
                checked(expression, arrays, tensors, grid, memory_limit=limit)


def test_a_plan_is_used_again(grids: list[Any]) -> None:
    for _, grid, expression, arrays, tensors in drawn_cases(grids, 300, 5):
        if arrays[0].dtype.kind != "i":
            plan = pdgemm.plan_einsum(expression, *tensors, machine=machine_of(grid))
            assert plan == pdgemm.plan_einsum(expression, *tensors, machine=machine_of(grid))
            assert expression in str(plan)
            result = pdgemm.einsum(expression, *tensors, optimize=plan)
            compare(result, *reference(expression, arrays), arrays[0].dtype)
