#!/usr/bin/env python3
"""What a product costs beside BLAS: microseconds of a call, of each panel, and of messages.

Run it on one rank and on several: mpiexec -n 1 python scripts/bench_overhead.py.  A call multiplies 8 x 8 matrices,
less what BLAS takes for this rank's part; panels are one inner index wide and one number high, so that all is overhead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter

import click
import numpy as np
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan
from pdgemm.blas.local_gemm import prepare

PANELS = 512


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
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A, B, C = (DistMatrix.random((8, 8), grid=grid, seed=seed) for seed in range(3))
        p = plan(A, B, C, algorithm="summa", shape=grid.shape)
        product = p.prepare(A, B, C)
        local = prepare(1, A.local, B.local[: A.local.shape[1]], C.local)
        blas = timed(lambda: local(0))
        asked = {"algorithm": "summa", "shape": grid.shape}
        rows = [
            ("pdgemm(1, A, B, 0, C)", timed(lambda: pdgemm(1, A, B, 0, C, **asked)) - blas),  # type: ignore[arg-type]
            ("  with check=False", timed(lambda: pdgemm(1, A, B, 0, C, check=False, **asked)) - blas),  # type: ignore[arg-type]
            ("plan.execute(A, B, C)", timed(lambda: p.execute(A, B, C)) - blas),
            ("product = plan.prepare(A, B, C); product()", timed(product) - blas),
        ]
        thin = [DistMatrix.zeros(x, grid=grid, block=(1, 1)) for x in ((1, PANELS), (PANELS, 1), (1, 1))]
        for mover in ("shared", "ibcast", "ring") if comm.size > 1 else ("auto",):
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
