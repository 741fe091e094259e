#!/usr/bin/env python3
"""What the checksums of protected products cost, and whether they take clean products for wrong ones.

    . scripts/env.sh; export OMP_NUM_THREADS=1
    mpiexec -n 2 python scripts/benchmarks/bench_protect.py --sizes 512,1024,2048,4096
    mpiexec -n 2 python scripts/benchmarks/bench_protect.py --clean 10000

--sizes : local C of so many rows and columns, and as many inner indices; float64 and float32, in turns with the
          product without checksums, medians.
--clean : so many products of nasty matrices (tests/helpers/problems.py), of which none may be repeated.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

from pdgemm import DistMatrix, ProcessGrid, pdgemm  # noqa: E402


def timed(grid: ProcessGrid, size: int, dtype: str, repeats: int) -> tuple[float, float, float]:
    """Return the medians of the seconds without and with checksums, and of the checksums alone."""
    pr, pc = grid.shape
    made: Any = {"grid": grid, "dtype": dtype}
    A = DistMatrix.random((pr * size, size), seed=1, kind="normal", **made)
    B = DistMatrix.random((size, pc * size), seed=2, kind="normal", **made)
    C = DistMatrix.empty((pr * size, pc * size), **made)
    report: Any
    modes: list[Any] = [None, "repair"]
    found: dict[str, list[float]] = {"off": [], "on": [], "checks": []}
    for turn in range(repeats + 1):  # the first is not counted
        for protect in modes:
            grid.comm.Barrier()
            start = perf_counter()
            pdgemm(1.0, A, B, 0, C, protect=protect)
            grid.comm.Barrier()
            seconds = perf_counter() - start
            if turn:
                found["on" if protect else "off"].append(seconds)
                if protect:
                    report = C.report
                    found["checks"].append(grid.comm.allreduce(report.checks.seconds, MPI.MAX))
    return tuple(statistics.median(x) for x in found.values())  # type: ignore[return-value]


def uneven(kind: str, shape: tuple[int, int], dtype: str, number: int, r: np.random.Generator) -> np.ndarray:
    """A nasty matrix, in some numbers with a tiny row, a huge one, or tiny throughout."""
    from problems import nasty

    x = nasty(kind, shape, dtype, number)
    tiny, huge = (1e-160, 1e150) if dtype in ("float64", "complex128") else (1e-25, 1e15)
    for every, factor in ((5, tiny), (11, huge)):
        if number % every == 0:
            x[r.integers(shape[0])] *= x.dtype.type(factor)
    return x * x.dtype.type(tiny ** r.uniform()) if number % 3 == 0 else x


def clean(grid: ProcessGrid, count: int) -> None:
    """Multiply nasty matrices, and say how many products were taken for wrong, and the largest residual over tau."""
    from problems import DTYPES, NASTY

    from pdgemm.algorithms.protection import row_checksums

    largest, ratio = [0.0], row_checksums.RowChecksums._ratio

    def measured(self: Any, residuals: np.ndarray) -> np.ndarray:
        ratios = ratio(self, residuals)
        largest.append(float(ratios.max(initial=0)))
        return ratios

    row_checksums.RowChecksums._ratio = measured  # type: ignore[method-assign]
    r = np.random.default_rng(7)
    algorithms = ("auto", "summa", "stationary_a", "stationary_b", "cannon", "inner")
    repeats, start = 0, perf_counter()
    for number in range(count):
        of_a, of_b = (str(r.choice(NASTY)) for _ in "AB")
        m, n, k = (int(r.integers(1, 400)) for _ in range(3))
        dtype = DTYPES[number % len(DTYPES)]
        a, b, c = (
            uneven(kind, shape, dtype, number + i, r)
            for i, (kind, shape) in enumerate(((of_a, (m, k)), (of_b, (k, n)), ("normal", (m, n))))
        )
        block, alpha, beta = int(r.integers(1, 99)), (1.5, 1e-10, 1e10, 1)[number // 4 % 4], (0, 0.5)[number % 2]
        A, B, C = (DistMatrix.from_global(x, grid=grid, block=block) for x in (a, b, c))
        options: Any = {"algorithm": algorithms[number % len(algorithms)], "protect": "repair"}
        report: Any = pdgemm(alpha, A, B, beta, C, **options).report
        if report.checks.repeats:
            repeats += 1
            if grid.rank == 0:
                print(f"repeated: {of_a} x {of_b}, {m} x {n} x {k}, {dtype}, {options}", flush=True)
    if grid.rank == 0:
        print(f"{count} products of {len(NASTY)} kinds in {perf_counter() - start:.0f} s: {repeats} taken for wrong")
        print(f"largest residual: {max(largest):.2f} tau")


@click.command()
@click.option("--sizes", default="512,1024,2048,4096", show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option("--clean", "count", type=int, help="Multiply so many nasty matrices in place of measuring.")
def main(sizes: str, repeats: int, count: int | None) -> None:
    with ProcessGrid(MPI.COMM_WORLD) as grid:
        if count is not None:
            clean(grid, count)
            return
        if grid.rank == 0:
            print("| local C | type | product | protected | more | checksums |\n|---|---|---|---|---|---|")
        for size in map(int, sizes.split(",")):
            for dtype in ("float64", "float32"):
                off, on, checks = timed(grid, size, dtype, repeats)
                if grid.rank == 0:
                    line = f"{off * 1e3:.1f} ms | {on * 1e3:.1f} ms | {on / off - 1:.1%} | {checks / off:.1%}"
                    print(f"| {size} | {dtype} | {line} |", flush=True)


if __name__ == "__main__":
    main()
