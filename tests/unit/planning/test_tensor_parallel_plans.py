"""Plans for tensor-parallel layers on any number of ranks, and their names; one process, no MPI."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.planning.planner import explain, plan_product
from pdgemm.planning.problem import Problem
from pdgemm.planning.product_plan import ProductPlan

SINGLE = np.dtype("f4")
WAYS: dict[str, dict[str, Any]] = {"read in place": {"shared": True}, "ring": {"mover": "ring"}, "chosen": {}}


def problem(form: str, sizes: tuple[int, int, int], ranks: int, **options: Any) -> Problem:
    """Return the product of a column-parallel or row-parallel layer.   sizes : tokens, inputs, hidden units."""
    tokens, inputs, hidden = sizes
    rows, columns = (ranks, 1), (1, ranks)
    if form == "column":
        shapes = ((tokens, inputs), rows), ((inputs, hidden), columns), ((tokens, hidden), columns)
    else:
        shapes = ((tokens, hidden), columns), ((hidden, inputs), rows), ((tokens, inputs), rows)
    layouts = (Layout(Distribution.over(grid, shape), tuple(range(ranks)), SINGLE) for shape, grid in shapes)
    arguments: dict[str, Any] = {"width_asked": False, "mover": "auto"} | options
    return Problem(*layouts, ranks, beta_is_zero=True, accumulate=SINGLE, width=512, lookahead=1, **arguments)


def check(plan: ProductPlan, form: str, sizes: tuple[int, int, int], ranks: int) -> None:
    tokens, inputs, _ = sizes
    assert plan.collective == {"column": "allgather", "row": "reduce_scatter"}[form]
    assert not plan.moves
    assert f"({plan.collective}) on" in str(plan)
    moved = Distribution.over((ranks, 1), (tokens, inputs)).rows
    for rank in range(ranks):
        own = moved.count(rank) * inputs
        words = tokens * inputs - own if form == "column" else (ranks - 1) * own
        assert plan.traffic(rank).words_received == words
    assert plan.product.total_words == (ranks - 1) * tokens * inputs


@pytest.mark.parametrize("form", ["column", "row"])
@pytest.mark.parametrize("way", WAYS)
def test_the_layouts_of_a_layer_choose_its_collective(form: str, way: str) -> None:
    for ranks, sizes in (
        (2, (4096, 1024, 4096)),
        (8, (8192, 4096, 16384)),
        (3, (2047, 769, 3071)),
        (6, (4096, 1024, 4096)),
    ):
        check(plan_product(problem(form, sizes, ranks, **WAYS[way])), form, sizes, ranks)


def test_on_many_ranks_auto_sends_as_many_words_or_fewer() -> None:
    for form, name in (("column", "allgather"), ("row", "reduce_scatter")):
        sizes = (8192, 4096, 16384)
        auto, named = (plan_product(problem(form, sizes, 16, algorithm=x)) for x in ("auto", name))
        check(named, form, sizes, 16)
        assert auto.words <= named.words


@pytest.mark.parametrize(("form", "name"), [("column", "allgather"), ("row", "reduce_scatter")])
def test_names_keep_to_the_collective(form: str, name: str) -> None:
    """For few hidden units and many tokens, it takes fewer words to gather weights, which only "auto" plans."""
    for ranks, sizes in product((2, 5), ((100_000, 64, 8), (3, 2, 100), (1, 1, 1))):
        named = problem(form, sizes, ranks, algorithm=name)
        check(plan_product(named), form, sizes, ranks)
        auto = plan_product(replace(named, algorithm="auto"))
        assert sizes[0] < 100 or auto.words < plan_product(named).words
        assert all(x in explain(auto) for x in ("chosen", f"{auto.algorithm} "))


def test_a_name_that_no_grid_allows() -> None:
    one = problem("column", (40, 20, 30), 4)
    for name, options, grids in (
        ("allgather", {"shape": (2, 2)}, "4 x 1 or 1 x 4, in 1 layer"),
        ("allgather", {"layers": 2}, "4 x 1 or 1 x 4, in 1 layer"),
        ("reduce_scatter", {"shape": (2, 2)}, "4 x 1, 1 x 4, or 1 x 1 in 4 layers"),
    ):
        with pytest.raises(ArgumentError, match=f"{name} .*is impossible on 4 ranks: its grid is {grids}"):
            plan_product(replace(one, algorithm=name, **options))
