#!/usr/bin/env python3
"""Plans: the time that planning takes, and whether measured times rank algorithms as the predictions do.

\b
    python scripts/benchmarks/bench_planning.py many --ranks 99991,100000
    mpiexec -n 1 python scripts/benchmarks/bench_planning.py steps
    mpiexec -n 2 python scripts/benchmarks/bench_planning.py ranking
    scripts/hosts.sh --rate 500mbit 2 \\
        mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_planning.py ranking --shapes 3072
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from runner import Case, Work, extents, in_unit, main, said
from table_words import SHAPES

from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.names import AnyName
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.planner import best_plan, plan_product
from pdgemm.planning.problem import Problem
from pdgemm.planning.question import Question
from pdgemm.planning.search.grid_search import priced

SIDE, BLOCK = 2048, 64  # the order and the block size of the factorisation whose steps are planned
NODE = 32  # ranks of a node; one process plans for a grid of NODE x NODE ranks
DEEP = 64  # from this ratio k / m on, A in columns and B in rows are tried, too: layouts for "inner"
SAME = 1.25  # times with a smaller ratio count as equal
RANKED = "512,1536,3072,256x256x65536,512x512x16384,512x512x65536,32768x256x256,256x32768x256,3072x3072x128,"
RANKED += "3072x128x3072,128x3072x3072"


def many(ranks: str = "99991,100000") -> Iterator[Case]:
    """The choice of `pdgemm plan` for the shapes of the COSMA paper on nodes of 64 ranks, with empty caches."""

    def choose(mnk: tuple[int, int, int], count: int, memory: int | None) -> None:
        priced.cache_clear()
        best_plan.cache_clear()
        Question(*mnk, count, memory=memory, machine=Machine(ranks_per_node=64)).plan()

    for count, (name, mnk) in itertools.product(map(int, ranks.split(",")), SHAPES.items()):
        limits = {"no limit": None, "4 GiB per rank": 4 << 30}
        yield Case(f"{count} ranks, {name}", {x: partial(choose, mnk, count, limit) for x, limit in limits.items()})


def steps(comm: Any) -> Iterator[Case]:
    """Plans for new extents, as in a blocked factorisation: in each step the matrix is smaller."""
    from pdgemm import DistMatrix, ProcessGrid, plan

    with ProcessGrid(comm) as grid:
        A, B, C = (DistMatrix.zeros((SIDE, SIDE), grid=grid) for _ in range(3))
        start = perf_counter()
        plan(A, B, C)
        first = in_unit(perf_counter() - start)
        windows = updates(DistMatrix.zeros((SIDE, SIDE), grid=grid, block=BLOCK))
        works: dict[str, Work] = {"a plan of new extents": lambda: plan(*next(windows), beta=1)}
        for per_node in (NODE, 1) if comm.size == 1 else ():
            distribution = Distribution.over((NODE, NODE), (8 * SIDE, 8 * SIDE), BLOCK)
            layouts = updates(Layout(distribution, tuple(range(NODE**2)), A.dtype))
            name = f"for {NODE**2} ranks, {per_node} on each node"
            works[name] = partial(plan_next, layouts, per_node)
        yield Case("plans", works, facts=said(f"the first plan of a script: {first}"))


def updates(A: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the operands of A22 := A22 - A21 A12 in each step."""
    n = A.distribution.rows.n
    for j in range(BLOCK, n, BLOCK):
        yield window(A, (j, n), (j - BLOCK, j)), window(A, (j - BLOCK, j), (j, n)), window(A, (j, n), (j, n))


def window(x: Any, rows: tuple[int, int], cols: tuple[int, int]) -> Any:
    if isinstance(x, Layout):
        return replace(x, distribution=x.distribution.window(rows, cols))
    return x[slice(*rows), slice(*cols)]


def plan_next(layouts: Iterator[tuple[Layout, Layout, Layout]], per_node: int) -> None:
    A, B, C = next(layouts)
    nodes = tuple(rank // per_node for rank in range(NODE**2)) if per_node > 1 else ()
    how: Any = {
        "width_asked": False,
        "shared": bool(nodes),
        "nodes": nodes,
        "machine": Machine(ranks_per_node=per_node),
    }
    plan_product(Problem(A, B, C, NODE**2, False, A.dtype, 512, 1, "auto", **how))


def ranking(comm: Any, shapes: str = RANKED) -> Iterator[Case]:
    """Products by each algorithm, from near-square blocks, and for large k also from A in columns and B in rows.

    The predicted ranking of a product is right under two conditions.  If the median times of two algorithms differ by
    more than 25%, their predictions have the same order.  The algorithm with the shortest prediction takes at most 25%
    longer than the fastest one.
    """
    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm.tools.calibrate import calibrate

    machine, alike = calibrate(comm), list[bool]()
    if comm.rank == 0:
        print(machine)
    grid, row, column = (ProcessGrid(comm, x) for x in (None, (1, comm.size), (comm.size, 1)))
    layouts = {"blocks": (grid, grid), "A in columns, B in rows": (row, column)}
    for (m, n, k), (name, (of_a, of_b)) in itertools.product(extents(shapes), layouts.items()):
        if of_a is row and k < DEEP * m:
            continue
        A, B = DistMatrix.random((m, k), grid=of_a, seed=1), DistMatrix.random((k, n), grid=of_b, seed=2)
        matrices = A, B, DistMatrix.zeros((m, n), grid=of_a)
        plans = possible_plans(matrices, machine)
        works: dict[str, Work] = {x: partial(p.execute, *matrices, check=False) for x, p in plans.items()}
        yield Case(f"{m} x {n} x {k}, {name}", works, facts=partial(compared, plans, alike))
    if comm.rank == 0:
        print(f"ranked as predicted: {sum(alike)} of {len(alike)} problems on {comm.size} ranks")


def possible_plans(matrices: tuple[Any, Any, Any], machine: Machine) -> dict[str, Any]:
    """Return a plan by each algorithm that runs on this number of ranks."""
    from pdgemm import plan
    from pdgemm.errors import ArgumentError
    from pdgemm.planning.algorithm_registry import families

    plans = {}
    for algorithm in families():
        try:
            plans[algorithm] = plan(*matrices, algorithm=AnyName(algorithm), machine=machine)
        except ArgumentError:
            continue
    return plans


def compared(plans: dict[str, Any], alike: list[bool], seconds: dict[str, float]) -> list[str]:
    """Return lines on whether measured and predicted seconds have the same order; append True or False to `alike`."""
    pairs = itertools.permutations(plans, 2)
    wrong = [(a, b) for a, b in pairs if seconds[a] * SAME < seconds[b] and plans[a].seconds > plans[b].seconds]
    first = min(plans, key=lambda name: plans[name].seconds)
    alike.append(not wrong and seconds[first] <= SAME * min(seconds.values()))
    lines = [f"{x}: on {' x '.join(map(str, p.shape))}, predicted {in_unit(p.seconds)}" for x, p in plans.items()]
    return [*lines, "ranked alike" if alike[-1] else f"not ranked alike: {wrong}"]


if __name__ == "__main__":
    main(many, steps, ranking)
