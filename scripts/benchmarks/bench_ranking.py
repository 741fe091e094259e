#!/usr/bin/env python3
"""Do measured times rank the algorithms as the model of the machine does?

    mpiexec -n 2 python scripts/benchmarks/bench_ranking.py [--repeats N] [--shape MxNxK]... [--json FILE]
    scripts/hosts.sh --rate 500mbit 2 \\
        mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_ranking.py --shape 3072x3072x3072

Calibrates the machine, then multiplies each shape by each algorithm in turn, so that a drift of the machine meets all
alike: from near-square block layouts, and for large k also from A in columns and B in rows, as "inner" reads them.
A problem counts as ranked alike if every two algorithms whose median times differ by more than 25% are in the order
that the model predicts, and what the model calls the fastest takes at most 25% longer than the fastest.  Prints
predicted and measured seconds side by side.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from mpi4py import MPI

from pdgemm import DistMatrix, Plan, ProcessGrid, plan
from pdgemm.errors import ArgumentError
from pdgemm.names import AnyName
from pdgemm.planning.algorithm_registry import families
from pdgemm.support.files import write_file
from pdgemm.tools.calibrate import calibrate

SHAPES = [  # m, n, k
    (512, 512, 512),
    (1536, 1536, 1536),
    (3072, 3072, 3072),
    (256, 256, 65536),
    (512, 512, 16384),
    (512, 512, 65536),
    (32768, 256, 256),
    (256, 32768, 256),
    (3072, 3072, 128),
    (3072, 128, 3072),
    (128, 3072, 3072),
]
DEEP = 64  # times as many inner indices as rows: the products that "inner" is for
SAME = 1.25  # times that differ by less are not told apart


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--shape", "shapes", multiple=True, help="MxNxK, in place of the eleven.")
@click.option("--json", "path", type=click.Path())
def main(repeats: int, shapes: tuple[str, ...], path: str | None) -> None:
    comm = MPI.COMM_WORLD
    machine = calibrate(comm)
    if comm.rank == 0:
        print(machine)
    results = []
    asked = [tuple(map(int, x.split("x"))) for x in shapes] or SHAPES
    with (
        ProcessGrid(comm) as grid,
        ProcessGrid(comm, (1, comm.size)) as row,
        ProcessGrid(comm, (comm.size, 1)) as column,
    ):
        layouts = {"blocks": (grid, grid), "A in columns, B in rows": (row, column)}
        for (m, n, k), (name, (of_a, of_b)) in itertools.product(asked, layouts.items()):
            if of_a is row and k < DEEP * m:
                continue
            A, B = DistMatrix.random((m, k), grid=of_a, seed=1), DistMatrix.random((k, n), grid=of_b, seed=2)
            C = DistMatrix.zeros((m, n), grid=of_a)
            plans: dict[str, Plan] = {}
            for algorithm in families():
                try:
                    plans[algorithm] = plan(A, B, C, algorithm=AnyName(algorithm), machine=machine)
                except ArgumentError:  # not on so many ranks
                    continue
            results.append(measured(comm, (m, n, k), name, plans, (A, B, C), repeats))
    if comm.rank == 0:
        alike = sum(x["ranked_alike"] for x in results)
        print(f"ranked as predicted: {alike} of {len(results)} problems on {comm.size} ranks")
        if path:
            found = {"machine": machine.name, "ranks": comm.size, "problems": results}
            write_file(Path(path), json.dumps(found, indent=1) + "\n")


def measured(
    comm: MPI.Intracomm,
    mnk: tuple[int, int, int],
    layouts: str,
    plans: dict[str, Plan],
    matrices: tuple[Any, ...],
    repeats: int,
) -> dict[str, Any]:
    """Median seconds of each plan, taken in turns; the slowest rank counts."""
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(repeats + 1):
        for name, p in plans.items():
            comm.Barrier()
            start = perf_counter()
            p.execute(*matrices, check=False)
            taken = comm.allreduce(perf_counter() - start, MPI.MAX)
            if turn:  # the first is to warm up
                seconds[name].append(taken)
    took = {name: statistics.median(x) for name, x in seconds.items()}
    predicted = {name: p.seconds for name, p in plans.items()}
    wrong = [
        (a, b) for a, b in itertools.permutations(plans, 2) if took[a] * SAME < took[b] and predicted[a] > predicted[b]
    ]
    first = min(predicted, key=predicted.__getitem__)
    alike = not wrong and took[first] <= SAME * min(took.values())
    if comm.rank == 0:
        print(f"{' x '.join(map(str, mnk))}, {layouts}: {'ranked alike' if alike else f'not ranked alike: {wrong}'}")
        for name in sorted(took, key=took.__getitem__):
            grid = " x ".join(map(str, plans[name].shape))
            print(f"   {name:13} {grid:10} measured {took[name]:.4f} s, predicted {predicted[name]:.4f} s")
    return {"mnk": mnk, "layouts": layouts, "measured": took, "predicted": predicted, "ranked_alike": alike}


if __name__ == "__main__":
    main()
