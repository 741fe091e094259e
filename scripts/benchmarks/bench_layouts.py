#!/usr/bin/env python3
"""What do the layouts of the matrices cost?  Run under mpirun.

    mpirun -n 4 python scripts/benchmarks/bench_layouts.py 2048 4096 --dtype complex128

The same product C = A B of matrices in one block per rank, block-cyclic, and in 1D columns and rows, in turns; what has
to be moved counts.  A grouped product of as many operations joins in, of a B for each 256 rows of A, which are drawn at
random.  Each time is divided by that of one block per rank, the mean of the product before and after it.
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI

from pdgemm import Batch, DistMatrix, ProcessGrid, matmul_grouped, pdgemm, plan_grouped

PLAIN = "one block per rank"
LAYOUTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "the same, column-major": {"order": "F"},
    "blocks of 64": {"block": 64},
    "blocks of 256": {"block": 256},
    "1D columns": {"shape": "row"},
    "1D rows": {"shape": "column"},
}
ROWS = 256  # of a group
GROUPED = f"rows of groups of {ROWS}"


class Case:
    """A, B and C in one layout, and how long their product took."""

    def __init__(self, mnk: tuple[int, int, int], grids: dict[str, ProcessGrid], dtype: str, layout: dict[str, Any]):
        m, n, k = mnk
        options = {"grid": grids[layout.get("shape", "square")], "dtype": dtype, **layout}
        options.pop("shape", None)
        self.A, self.B = (DistMatrix.random(shape, seed=seed, **options) for seed, shape in enumerate([(m, k), (k, n)]))
        self.C = DistMatrix.zeros((m, n), **options)
        self.seconds = list[float]()

    def multiply(self) -> None:
        comm = self.C.grid.comm
        comm.Barrier()
        start = perf_counter()
        self.product()
        comm.Barrier()
        self.seconds.append(perf_counter() - start)

    def product(self) -> None:
        pdgemm(1.0, self.A, self.B, 0.0, self.C)

    @property
    def plan(self) -> str:
        return f"{self.C.report.algorithm} on {' x '.join(map(str, self.C.report.grid))}"


class GroupedCase(Case):
    """Rows of A in 1D rows, each in a group of ROWS that has a B of its own."""

    def __init__(self, mnk: tuple[int, int, int], grids: dict[str, ProcessGrid], dtype: str):
        super().__init__(mnk, grids, dtype, {"shape": "column"})
        (m, n, k), comm, rng = mnk, self.C.grid.comm, np.random.default_rng(0)
        number = -(-m // ROWS)
        owner = np.arange(number) * comm.size // number
        mine = int((owner == comm.rank).sum())
        self.W = Batch.from_local(rng.standard_normal((mine, k, n)).astype(dtype), comm)
        groups = rng.permutation(np.arange(m) // ROWS)
        self.routing = plan_grouped(self.A, groups[self.A.indices()[0]], self.W)

    def product(self) -> None:
        matmul_grouped(self.A, self.W, self.routing, self.C)

    @property
    def plan(self) -> str:
        return f"{self.C.report.groups} groups, imbalance {self.C.report.imbalance:.2f}"


def measure(mnk: tuple[int, int, int], grids: dict[str, ProcessGrid], dtype: str, repeats: int) -> list[dict[str, Any]]:
    """All layouts, each between two products of plain blocks; the first round warms up."""
    cases = {name: Case(mnk, grids, dtype, layout) for name, layout in LAYOUTS.items()}
    cases[GROUPED] = GroupedCase(mnk, grids, dtype)
    plain = cases.pop(PLAIN)
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    plain.multiply()
    for turn in range(repeats + 1):
        for name, case in cases.items():
            case.multiply()
            plain.multiply()
            if turn:
                ratios[name].append(2 * case.seconds[-1] / sum(plain.seconds[-2:]))
    return [
        {
            "layout": name,
            "seconds": median(case.seconds[1:]),
            "ratio": median(ratios.get(name, [1.0])),
            "least": min(ratios.get(name, [1.0])),
            "most": max(ratios.get(name, [1.0])),
            "plan": case.plan,
        }
        for name, case in {PLAIN: plain, **cases}.items()
    ]


@click.command()
@click.argument("shapes", nargs=-1)
@click.option("--dtype", default="float64", show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(shapes: tuple[str, ...], dtype: str, repeats: int, as_json: bool) -> None:
    """Multiply matrices of SHAPES, each N or MxNxK."""
    comm = MPI.COMM_WORLD
    grids = {
        "square": ProcessGrid(comm),
        "row": ProcessGrid(comm, (1, comm.size)),
        "column": ProcessGrid(comm, (comm.size, 1)),
    }
    for shape in shapes or ("2048",):
        m, n, k = (int(side) for side in (shape.split("x") * 3)[:3])
        results = measure((m, n, k), grids, dtype, repeats)
        if comm.rank == 0 and as_json:
            print(json.dumps({"shape": [m, n, k], "ranks": comm.size, "dtype": dtype, "results": results}))
        elif comm.rank == 0:
            print(f"{m} x {n} x {k} {dtype} on {comm.size} ranks, median of {repeats}")
            for r in results:
                spread = f"{r['ratio']:.2f} ({r['least']:.2f}, {r['most']:.2f})"
                print(f"  {r['layout']:24} {r['seconds']:8.4f} s  {spread}  {r['plan']}", flush=True)


if __name__ == "__main__":
    main()
