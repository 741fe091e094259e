#!/usr/bin/env python3
"""What products by slices cost on a CPU beside products of BLAS, and how accurate both are.

    . scripts/env.sh; export OMP_NUM_THREADS=1
    mpiexec -n 2 python scripts/benchmarks/bench_emulated.py --sizes 512,1024,2048

Square matrices of normal numbers; the two products take turns, medians.  The error of an element is relative to |A||B|,
in the largest of a sample of rows.
"""

from __future__ import annotations

import statistics
from typing import Any

import click
import numpy as np
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid, plan
from pdgemm.local.arrays.emulation import EMULATIONS

ROWS = 16  # of which the error is computed, in extended precision


def error(A: DistMatrix, B: DistMatrix, C: DistMatrix) -> float:
    """Return the largest error of the first rows of C, relative to |A||B|."""
    a, b, c = A[:ROWS].allgather(), B.allgather(), C[:ROWS].allgather()
    exact, size = (x.astype(np.longdouble) @ y for x, y in ((a, b), (np.abs(a), np.abs(b))))
    return float((np.abs(c - exact) / size).max())


@click.command()
@click.option("--sizes", default="512,1024,2048", show_default=True)
@click.option("--names", default="ozaki,ozaki-5,bf16x9", show_default=True)
@click.option("--repeats", default=5, show_default=True)
def main(sizes: str, names: str, repeats: int) -> None:
    """C = A B of each size, by slices and by BLAS alone."""
    comm = MPI.COMM_WORLD
    with ProcessGrid(comm) as grid:
        for name, n in ((name, int(size)) for name in names.split(",") for size in sizes.split(",")):
            how: Any = {"grid": grid, "dtype": EMULATIONS[name].sums, "kind": "normal"}
            A, B, C = (DistMatrix.random((n, n), seed=seed, **how) for seed in range(3))
            compute: Any
            names_in_turn: tuple[Any, ...] = (None, name)
            products = {compute: plan(A, B, C, compute_type=compute).prepare(A, B, C) for compute in names_in_turn}
            seconds: dict[Any, list[float]] = {None: [], name: []}
            errors: dict[Any, float] = {}
            for turn in range(repeats + 1):  # the first is not counted
                for compute, product in products.items():
                    comm.Barrier()
                    start = MPI.Wtime()
                    product()
                    comm.Barrier()
                    seconds[compute] += [MPI.Wtime() - start] * (turn > 0)
                    errors[compute] = errors[compute] if turn else error(A, B, C)
            if comm.rank == 0:
                alone, sliced = (statistics.median(x) for x in seconds.values())
                print(
                    f"{name:8} n = {n:5}: {1e3 * sliced:8.1f} ms, {sliced / alone:5.1f} times {1e3 * alone:.1f} ms; "
                    f"errors {errors[name]:.1e} and {errors[None]:.1e} |A||B|",
                    flush=True,
                )


if __name__ == "__main__":
    main()
