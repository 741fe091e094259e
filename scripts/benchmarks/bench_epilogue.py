#!/usr/bin/env python3
"""What epilogues cost beside the product alone, one pass over C, and the same functions of NumPy after the product.

    . scripts/env.sh; export OMP_NUM_THREADS=1
    mpiexec -n 2 python scripts/benchmarks/bench_epilogue.py --sizes 1024,2048

Local C of so many rows and columns, as many inner indices; in turns, medians of the slowest rank.  The pass is C *= x.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from scipy.special import erfc, expit

from pdgemm import DistMatrix, Epilogue, ProcessGrid, pdgemm

FUNCTIONS: dict[Any, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: 0.5 * z * erfc(-np.sqrt(0.5) * z),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z * expit(z),
}


def measured(grid: ProcessGrid, works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median of the seconds of each, in turns; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            grid.comm.Barrier()
            start = perf_counter()
            work()
            taken = grid.comm.allreduce(perf_counter() - start, MPI.MAX)
            if turn:
                seconds[name].append(taken)
    return {name: statistics.median(x) for name, x in seconds.items()}


@click.command()
@click.option("--sizes", default="1024,2048", show_default=True)
@click.option("--repeats", default=7, show_default=True)
def main(sizes: str, repeats: int) -> None:
    with ProcessGrid(MPI.COMM_WORLD) as grid:
        if grid.rank == 0:
            print("| local C | type | f | product | one pass | epilogue / pass | / NumPy |\n" + "|---" * 7 + "|")
        for size in map(int, sizes.split(",")):
            for dtype in ("float64", "float32"):
                pr, pc = grid.shape
                A = DistMatrix.random((pr * size, size), grid=grid, dtype=dtype, seed=1, kind="normal")
                B = DistMatrix.random((size, pc * size), grid=grid, dtype=dtype, seed=2, kind="normal")
                C, bias = DistMatrix.empty((pr * size, pc * size), grid=grid, dtype=dtype), np.ones(pc * size, dtype)
                here, added = C.local, np.ones((1, C.local.shape[1]), dtype)

                def scaled(here: np.ndarray = here) -> None:
                    here *= here.dtype.type(1)

                for name, f in FUNCTIONS.items():
                    epilogue, alone = Epilogue(bias=bias, activation=name), lambda: pdgemm(1, A, B, 0, C)  # noqa: B023
                    run = measured(grid, {
                        "product": alone,
                        "epilogue": lambda: pdgemm(1, A, B, 0, C, epilogue=epilogue),  # noqa: B023
                        "pass": scaled,
                        "numpy": lambda: f(here + added),  # noqa: B023
                    }, repeats)  # fmt: skip
                    more = run["epilogue"] - run["product"]
                    if grid.rank == 0:
                        line = f"{run['product'] * 1e3:.1f} ms | {run['pass'] * 1e3:.2f} ms | {more / run['pass']:.2f} "
                        print(f"| {size} | {dtype} | {name} | {line}| {more / run['numpy']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
