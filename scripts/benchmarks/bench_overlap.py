#!/usr/bin/env python3
"""What do tests between the slabs of a product hide of the transfers?

    mpiexec -n 2 python scripts/benchmarks/bench_overlap.py
    mpiexec --mca pml ob1 --mca btl self,tcp -n 2 python scripts/benchmarks/bench_overlap.py     # through sockets

Every rank counts as a node, and SUMMA sends its panels.  Products cut into slabs and products in one piece take turns;
the ratio of each pair is time(in one piece) / time(cut).
"""

from __future__ import annotations

import os
import statistics
from math import inf
from typing import Any

import click

os.environ["PDGEMM_RANKS_PER_NODE"] = "1"


@click.command()
@click.option("-n", default=2048, show_default=True)
@click.option("--panel-width", default=256, show_default=True)
@click.option("--repeats", default=9, show_default=True)
def main(n: int, panel_width: int, repeats: int) -> None:
    """C = A B of order N by messages, with and without tests in the middle of a product."""
    from mpi4py import MPI

    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.local.blas import local_gemm
    from pdgemm.schedules.mover_registry import by_messages

    comm, slab = MPI.COMM_WORLD, local_gemm.SLAB_FLOPS
    with ProcessGrid(comm) as grid:
        A, B, C = (DistMatrix.random((n, n), grid=grid, seed=seed) for seed in range(3))
        for mover in by_messages():
            for lookahead in (0, 1, 2):
                options: dict[str, Any] = {"mover": mover, "lookahead": lookahead, "panel_width": panel_width}
                found: dict[float, list[tuple[float, float]]] = {inf: [], slab: []}
                for _ in range(repeats + 1):
                    for local_gemm.SLAB_FLOPS, seen in found.items():
                        comm.Barrier()
                        start = MPI.Wtime()
                        report = pdgemm(1, A, B, 0, C, algorithm="summa", shape=grid.shape, **options).report
                        comm.Barrier()
                        seen.append((MPI.Wtime() - start, comm.allreduce(report.overlap or 0.0) / comm.size))
                whole, cut = ([list(x) for x in zip(*seen[1:])] for seen in found.values())
                ratios = [a / b for a, b in zip(whole[0], cut[0])]
                if comm.rank == 0:
                    print(
                        f"{mover:6} lookahead {lookahead}: {1e3 * statistics.median(cut[0]):7.1f} ms, "
                        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}); hidden "
                        f"{statistics.median(cut[1]):.0%}, in one piece {statistics.median(whole[1]):.0%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
