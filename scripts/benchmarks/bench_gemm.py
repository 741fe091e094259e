#!/usr/bin/env python3
"""How close do two ranks with one thread each come to NumPy's own product with two threads?

Run it plainly: python scripts/benchmarks/bench_gemm.py [n ...].  Seconds on a shared machine drift, so NumPy's
product in one process and pdgemm's on two ranks take turns, and the ratio of each pair is what counts:
time(NumPy) / time(pdgemm), 1.0 where distribution costs nothing.  There is none where NumPy's BLAS and that of the
ranks multiply for processors of different generations.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import click
from peers.job import Job, blas_of_numpy

from pdgemm.local.blas import processors as kernels

if TYPE_CHECKING:
    from mpi4py import MPI


SETTLE = 0.1  # seconds; OpenBLAS's threads go on spinning for tens of milliseconds after a product


def worker(block: int | None, dtype: str, order: str, options: dict[str, Any]) -> None:
    """On each rank: for every "n n n" read on rank 0's standard input, one product; rank 0 answers its seconds."""
    from mpi4py import MPI

    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.local.blas.threads import blas_of_products

    if MPI.COMM_WORLD.rank == 0:
        print("kernel", kernels.kernel(blas_of_products()), flush=True)
    comm, size, A, B, C = MPI.COMM_WORLD, None, None, None, None
    with ProcessGrid(comm) as grid:
        while True:
            n = order_of_rank_0(comm).partition(" ")[0]
            if not n:
                return
            if n != size:
                size, shape = n, (int(n), int(n))
                layout = {"grid": grid, "block": block, "dtype": dtype, "order": order}
                A = DistMatrix.random(shape, seed=1, **layout)  # type: ignore[arg-type]
                B = DistMatrix.random(shape, seed=2, **layout)  # type: ignore[arg-type]
                C = DistMatrix.zeros(shape, **layout)  # type: ignore[arg-type]
            assert A is not None and B is not None
            comm.Barrier()
            start = perf_counter()
            C = pdgemm(1.0, A, B, 0.0, C, **options)
            comm.Barrier()
            if comm.rank == 0:
                print(perf_counter() - start, C.report.compute_seconds, flush=True)


def order_of_rank_0(comm: MPI.Comm, nap: float = 1e-3) -> str:
    """The next line of rank 0's input, on all ranks; they sleep until it comes, to leave NumPy the cores."""
    if comm.rank == 0:
        line = sys.stdin.readline().strip()
        for rank in range(1, comm.size):
            comm.send(line, dest=rank)
        return line
    while not comm.iprobe(source=0):
        sleep(nap)
    return comm.recv(source=0)


@click.command()
@click.argument("sizes", nargs=-1, type=int)
@click.option("--repeats", default=7, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--threads", default=2, show_default=True, help="NumPy's threads; each rank has one.")
@click.option("--dtype", default="float64", show_default=True)
@click.option("--block", type=int, help="Block size of the layout; default: one block per rank.")
@click.option("--order", type=click.Choice("CF"), default="C", show_default=True)
@click.option("--option", "options", multiple=True, help="Of pdgemm, such as panel_width=256; repeatable.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--worker", "is_worker", is_flag=True, hidden=True)
def main(
    sizes: tuple[int, ...],
    repeats: int,
    ranks: int,
    threads: int,
    dtype: str,
    block: int | None,
    order: str,
    options: tuple[str, ...],
    as_json: bool,
    is_worker: bool,
) -> None:
    """Alternate NumPy's product in this process with pdgemm's, for each n of SIZES."""
    pairs = [option.split("=") for option in options]
    given: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in pairs}
    if is_worker:
        return worker(block, dtype, order, given)

    import numpy as np
    from threadpoolctl import threadpool_limits

    command = shlex.join(["mpiexec", "-n", str(ranks), sys.executable, "-m", "mpi4py", *sys.argv, "--worker"])
    rows: list[dict[str, Any]] = []
    with threadpool_limits(threads, user_api="blas"), Job(command, kernels.kernel(blas_of_numpy())) as job:
        for n in sizes or (1024, 2048, 4096):
            rng = np.random.default_rng(0)
            A, B = (rng.random((n, n)).astype(dtype) for _ in "AB")
            C = np.empty_like(A)
            ours, products, numpys = [], [], []
            for _ in range(repeats + 1):
                start = perf_counter()
                np.matmul(A, B, out=C)
                numpys.append(perf_counter() - start)
                sleep(SETTLE)
                whole, product = job.multiply(n, n, n)
                ours.append(whole)
                products.append(float(product))
                sleep(SETTLE)
            # the first round warms up; NumPy's time before and after stands for its time during ours
            around = [(a + b) / 2 for a, b in zip(numpys[1:], [*numpys[2:], numpys[-1]], strict=True)]
            ratios = [] if job.unlike else [a / b for a, b in zip(around, ours[1:], strict=True)]
            rows.append(
                {
                    "n": n,
                    "dtype": dtype,
                    "block": block,
                    "ranks": ranks,
                    "numpy_seconds": statistics.median(numpys[1:]),
                    "pdgemm_seconds": statistics.median(ours[1:]),
                    "product_seconds": statistics.median(products[1:]),
                    "kernel": job.kernel,
                    "ratio": statistics.median(ratios) if ratios else None,
                    "ratio_min": min(ratios, default=None),
                    "ratio_max": max(ratios, default=None),
                }
            )
            if not as_json:
                if len(rows) == 1:
                    print(
                        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {dtype}, "
                        f"{ranks} ranks x 1 thread against NumPy x {threads} threads, median of {repeats}"
                    )
                    print("     n   NumPy s  pdgemm s  product s   ratio  (least, most)  kernel")
                r = rows[-1]
                spread = "{ratio:6.3f}  ({ratio_min:.3f}, {ratio_max:.3f})" if ratios else f"none: {job.unlike}"
                print(f"{n:6d}  {r['numpy_seconds']:8.4f}  {r['pdgemm_seconds']:8.4f}   {r['product_seconds']:8.4f}  "
                      f"{spread.format(**r)}  {job.kernel}", flush=True)  # fmt: skip
    if as_json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
