#!/usr/bin/env python3
"""Reductions and elementwise operations beside NumPy's on the same local data: mpiexec -n 2 python scripts/bench_elements.py.

Each line: seconds of NumPy on the local array, of pdgemm, their ratio, and the bytes per second of pdgemm.  Medians of
repeats in turns; all ranks work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np


@click.command()
@click.option("--size", default=4000, show_default=True, help="Rows and columns on each rank.")
@click.option("--repeats", default=9, show_default=True)
def main(size: int, repeats: int) -> None:
    from mpi4py import MPI

    from pdgemm import DistMatrix, ProcessGrid

    comm = MPI.COMM_WORLD
    for n, what in ((size, "large"), (8, "small")):
        with ProcessGrid(comm, (comm.size, 1)) as grid:
            A, B = (DistMatrix.random((n * comm.size, n), seed=seed, grid=grid) for seed in (1, 2))
            x, y = A.local, B.local
            cases: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
                *((f"{name}, axis {axis}", _of(x, name, axis), _of(A, name, axis))
                  for name in ("sum", "max", "argmax", "var") for axis in (None, 0, 1)),
                ("A + B", lambda: x + y, lambda: A + B),
                ("sqrt(A)", lambda: np.sqrt(x), lambda: np.sqrt(A)),
                ("A *= 1.5", lambda: np.multiply(x, 1.5, out=x), lambda: np.multiply(A, 1.5, out=A)),
            ]  # fmt: skip
            for name, theirs, ours in cases:
                seconds: tuple[list[float], list[float]] = ([], [])
                for _ in range(repeats + 1):
                    for work, taken in zip((theirs, ours), seconds):
                        comm.Barrier()
                        start = perf_counter()
                        work()
                        taken.append(comm.allreduce(perf_counter() - start, MPI.MAX))
                a, b = (median(taken[1:]) for taken in seconds)
                if comm.rank == 0:
                    speed = f"{x.nbytes / b / 1e9:.1f} GB/s" if n == size else f"{1e6 * (b - a):.0f} us more"
                    print(f"{what}, {name}: NumPy {a:.2e} s, pdgemm {b:.2e} s, NumPy / pdgemm {a / b:.2f}, {speed}")


def _of(x: Any, name: str, axis: int | None) -> Callable[[], Any]:
    return lambda: getattr(x, name)(axis=axis)


if __name__ == "__main__":
    main()
