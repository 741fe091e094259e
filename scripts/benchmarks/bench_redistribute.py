#!/usr/bin/env python3
"""How fast is a redistribution, beside copying the same elements within memory?  Run under mpirun.

    mpirun -n 2 python scripts/benchmarks/bench_redistribute.py --size 4096

For each pair of layouts all ranks copy their own arrays (numpy.copyto), and then redistribute the matrix, alternately;
medians of both, and their ratio: 1 would be the speed of memory.  Words are those that change their owner.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.names import DType, ElementTypeName

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "columns to rows": ({"shape": "row"}, {"shape": "column"}),
    "rows to blocks of 64": ({"shape": "column"}, {"shape": "square", "block": 64}),
    "blocks of 64 to rows": ({"shape": "square", "block": 64}, {"shape": "column"}),
    "blocks of 64 to 96": ({"shape": "square", "block": 64}, {"shape": "square", "block": 96}),
    "blocks of 4 to rows": ({"shape": "square", "block": 4}, {"shape": "column"}),
    "transpose, blocks of 64": ({"shape": "square", "block": 64, "transposed": True}, {"shape": "square", "block": 64}),
    "row- to column-major": ({"shape": "column"}, {"shape": "column", "order": "F"}),
}


def timed(comm: MPI.Intracomm, work: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    comm.Barrier()
    start = perf_counter()
    work()
    comm.Barrier()
    return perf_counter() - start


def measure(
    name: str,
    one: dict[str, Any],
    two: dict[str, Any],
    grids: dict[str, ProcessGrid],
    size: int,
    dtype: DType,
    repeats: int,
) -> dict[str, Any]:
    """One pair of layouts."""
    comm, kinds, other = grids["row"].comm, dict(one), dict(two)
    transposed = kinds.pop("transposed", False)
    X = DistMatrix.random((size, size), grid=grids[kinds.pop("shape")], dtype=dtype, **kinds)
    Y = DistMatrix.empty((size, size), grid=grids[other.pop("shape")], dtype=dtype, **other)
    source, room = X.T if transposed else X, X.local.copy()
    source.redistribute(Y)  # warm: plan, connections, pages
    seconds = [
        (timed(comm, lambda: np.copyto(room, X.local)), timed(comm, lambda: source.redistribute(Y)))
        for _ in range(repeats)
    ]
    ratios = [copy / move for copy, move in seconds]
    return {
        "case": name,
        "copy_seconds": median(copy for copy, _ in seconds),
        "redistribute_seconds": median(move for _, move in seconds),
        "ratio": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "words": comm.allreduce(Y.report.counted.words_received),
    }


@click.command()
@click.option("--size", default=4096, show_default=True, help="Rows and columns.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--dtype", default="float64", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(size: int, repeats: int, dtype: ElementTypeName, as_json: bool) -> None:
    """Redistribute a SIZE x SIZE matrix among some layouts."""
    comm = MPI.COMM_WORLD
    grids = {
        "row": ProcessGrid(comm, (1, comm.size)),
        "column": ProcessGrid(comm, (comm.size, 1)),
        "square": ProcessGrid(comm),
    }
    results = [measure(name, *layouts, grids, size, dtype, repeats) for name, layouts in CASES.items()]
    if comm.rank == 0 and as_json:
        print(json.dumps({"size": size, "ranks": comm.size, "dtype": dtype, "results": results}))
    elif comm.rank == 0:
        print(f"{size} x {size} {dtype} on {comm.size} ranks, median of {repeats}")
        print(f"{'':26} {'copy s':>8} {'move s':>8} {'ratio':>6}  (least, most)  share that travels")
        for r in results:
            print(
                f"{r['case']:26} {r['copy_seconds']:8.4f} {r['redistribute_seconds']:8.4f} {r['ratio']:6.2f}  "
                f"({r['least']:.2f}, {r['most']:.2f})  {r['words'] / size**2:.0%}"
            )


if __name__ == "__main__":
    main()
