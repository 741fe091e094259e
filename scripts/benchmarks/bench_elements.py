#!/usr/bin/env python3
"""Reductions and elementwise operations beside NumPy's on the same local data.

mpiexec -n 2 python scripts/benchmarks/bench_elements.py

Each line: seconds of NumPy on the local array, of pdgemm, their ratio, and the bytes per second of pdgemm.  Medians of
repeats in turns; all ranks work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np


@click.command()
@click.option("--size", default=4000, show_default=True, help="Rows and columns on each rank.")
@click.option("--repeats", default=9, show_default=True)
def main(size: int, repeats: int) -> None:
    from mpi4py import MPI

    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm.tools.calibrate.place import in_turns

    for n in (size, 8):
        with ProcessGrid(MPI.COMM_WORLD, (MPI.COMM_WORLD.size, 1)) as grid:
            A, B = (DistMatrix.random((n * grid.size, n), seed=seed, grid=grid) for seed in (1, 2))
            for name, theirs, ours in _cases(A, B, A.local, B.local):
                a, b = in_turns(grid.comm, (theirs, ours), repeats)
                if grid.comm.rank == 0:
                    more = f"{A.local.nbytes / b / 1e9:.1f} GB/s, {1e6 * (b - a):.0f} us more"
                    print(f"{n} x {n}, {name}: NumPy {a:.2e} s, pdgemm {b:.2e} s, ratio {a / b:.2f}, {more}")


def _cases(A: Any, B: Any, x: Any, y: Any) -> list[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    names = [(name, axis) for name in ("sum", "max", "argmax", "var") for axis in (None, 0, 1)]
    cases = [(f"{name}, axis {axis}", _of(x, name, axis), _of(A, name, axis)) for name, axis in names]
    return [
        *cases,
        ("A + B", lambda: x + y, lambda: A + B),
        ("sqrt(A)", lambda: np.sqrt(x), lambda: np.sqrt(A)),
        ("A *= 1.5", lambda: x.__imul__(1.5), lambda: A.__imul__(1.5)),
        ("A - A.mean(0)", lambda: x - x.mean(0), lambda: A - A.mean(0)),
    ]


def _of(x: Any, name: str, axis: int | None) -> Callable[[], Any]:
    return lambda: getattr(x, name)(axis=axis)


if __name__ == "__main__":
    main()
