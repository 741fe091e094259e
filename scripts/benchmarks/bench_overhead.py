#!/usr/bin/env python3
"""What a product costs beside BLAS: microseconds of a plan, of a call, of each panel, and of messages.

    mpiexec -n 1 python scripts/benchmarks/bench_overhead.py        # on one rank, and on several

A call multiplies 8 x 8 matrices, less what BLAS takes for this rank's part; panels are one inner index wide and one
number high, so that all is overhead.
Plans of new extents are those of a blocked factorisation, of which each step has a smaller matrix to update.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.local.blas.local_gemm import prepare
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.planner import plan_product
from pdgemm.planning.problem import Problem
from pdgemm.schedules.mover_registry import host_movers

PANELS = 512
SIDE, BLOCK = 2048, 64  # of the factorisation
FIRST = 3  # steps of it that are not counted
MANY = 32  # x MANY ranks of a grid that one process plans for


def microseconds(comm: MPI.Comm, call: Callable[[], object], repeats: int, calls: int = 200) -> float:
    """Of one call: the median over repeats of the slowest rank's mean."""
    found = []
    for _ in range(repeats + 1):
        comm.Barrier()
        start = perf_counter()
        for _ in range(calls):
            call()
        found.append(comm.allreduce(perf_counter() - start, MPI.MAX) / calls * 1e6)
    return statistics.median(found[1:])


def planning(grid: ProcessGrid) -> list[tuple[str, float]]:
    """The first plan of a script, and the median of those of the steps of a factorisation."""
    A, B, C = (DistMatrix.zeros((SIDE, SIDE), grid=grid) for _ in range(3))
    first = slowest(grid.comm, lambda: plan(A, B, C))
    A = DistMatrix.zeros((SIDE, SIDE), grid=grid, block=BLOCK)
    each = [slowest(grid.comm, partial(plan, *windows, beta=1)) for windows in updates(A)]
    rows = [
        ("the first plan of a script", first),
        ("a plan of new extents", statistics.median(each[FIRST:])),
        ("  the slowest of them", max(each[FIRST:])),
    ]
    if grid.size == 1:
        whole = Layout(Distribution.over((MANY, MANY), (8 * SIDE, 8 * SIDE), BLOCK), tuple(range(MANY**2)), A.dtype)
        for per_node in (MANY, 1):
            many = [slowest(grid.comm, partial(planned, per_node, *layouts)) for layouts in updates(whole)]
            rows.append((f"  for {MANY**2} ranks, {per_node} on each node", statistics.median(many[FIRST:])))
    return rows


def updates(A: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The operands of A22 := A22 - A21 A12 in each step."""
    n = A.distribution.rows.n
    for j in range(BLOCK, n, BLOCK):
        yield part(A, (j, n), (j - BLOCK, j)), part(A, (j - BLOCK, j), (j, n)), part(A, (j, n), (j, n))


def part(x: Any, rows: tuple[int, int], cols: tuple[int, int]) -> Any:
    if isinstance(x, Layout):
        return replace(x, distribution=x.distribution.window(rows, cols))
    return x[slice(*rows), slice(*cols)]


def planned(per_node: int, A: Layout, B: Layout, C: Layout) -> None:
    nodes = tuple(rank // per_node for rank in range(MANY**2)) if per_node > 1 else ()
    asked = {"width_asked": False, "shared": bool(nodes), "nodes": nodes, "machine": Machine(ranks_per_node=per_node)}
    plan_product(Problem(A, B, C, MANY**2, False, A.dtype, 512, 1, "auto", **asked))  # type: ignore[arg-type]


def slowest(comm: MPI.Comm, call: Callable[[], object]) -> float:
    """Microseconds of one call on the slowest rank."""
    comm.Barrier()
    start = perf_counter()
    call()
    return float(comm.allreduce(perf_counter() - start, MPI.MAX) * 1e6)


def messages(comm: MPI.Comm) -> dict[str, Callable[[], object]]:
    """From each even rank to the next: with a request of its own, as panels travel, and with a persistent one."""
    other, odd, words = comm.rank ^ 1, comm.rank % 2, np.zeros(1024)
    if other == comm.size:
        other = MPI.PROC_NULL
    fresh = partial(comm.Irecv if odd else comm.Isend, [words, MPI.DOUBLE], other)
    kept = (comm.Recv_init if odd else comm.Send_init)([words, MPI.DOUBLE], other)

    def again() -> None:
        kept.Start()
        kept.Wait()

    return {"a request each": lambda: fresh().Wait(), "a persistent request": again}


@click.command()
@click.option("--repeats", default=7, show_default=True)
def main(repeats: int) -> None:
    """Time calls of `pdgemm`, of plans and of prepared products, then panels by each mover."""
    comm = MPI.COMM_WORLD
    timed = partial(microseconds, comm, repeats=repeats)
    with ProcessGrid(comm) as grid:
        plans = planning(grid)
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A, B, C = (DistMatrix.random((8, 8), grid=grid, seed=seed) for seed in range(3))
        p = plan(A, B, C, algorithm="summa", shape=grid.shape)
        product = p.prepare(A, B, C)
        local = prepare(1, A.local, B.local[: A.local.shape[1]], C.local)
        blas = timed(lambda: local(0))
        asked = {"algorithm": "summa", "shape": grid.shape}
        rows = [
            *plans,
            ("pdgemm(1, A, B, 0, C)", timed(lambda: pdgemm(1, A, B, 0, C, **asked)) - blas),  # type: ignore[arg-type]
            ("  with check=False", timed(lambda: pdgemm(1, A, B, 0, C, check=False, **asked)) - blas),  # type: ignore[arg-type]
            ("plan.execute(A, B, C)", timed(lambda: p.execute(A, B, C)) - blas),
            ("product = plan.prepare(A, B, C); product()", timed(product) - blas),
        ]
        thin = [DistMatrix.zeros(x, grid=grid, block=(1, 1)) for x in ((1, PANELS), (PANELS, 1), (1, 1))]
        for mover in host_movers() if comm.size > 1 else ("auto",):
            p = plan(*thin, panel_width=1, mover=mover, **asked)  # type: ignore[arg-type]
            panels = p.product.panels
            each = timed(p.prepare(*thin), calls=5) / panels
            rows.append((f"a panel of a prepared product{f', {mover}' * (comm.size > 1)}", each))
    if comm.size > 1:
        rows += [(f"a message of 8 KB, {how}", timed(send)) for how, send in messages(comm).items()]
    if comm.rank == 0:
        print(f"{comm.size} rank{'s' * (comm.size > 1)}, median of {repeats}; microseconds beside BLAS ({blas:.1f})")
        for name, value in rows:
            print(f"  {name:48} {value:8.1f}")


if __name__ == "__main__":
    main()
