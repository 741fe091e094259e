#!/usr/bin/env python3
"""What does a trace cost?

    mpirun -n 2 python -m mpi4py scripts/benchmarks/bench_tracing.py \\
        [--sizes 512,1024,2048] [--width 64] [--repeats 30] [--nvtx]

The same prepared product without and with a trace in turn, by each mover that sends messages: the median of the
ratios of neighbours, with the quartiles, and nanoseconds of a phase.  The limit is 1.02.
"""

from __future__ import annotations

from contextlib import nullcontext
from statistics import median, quantiles
from time import perf_counter

import click
import nvtx as nvtx_library
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid, plan
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.spans import Trace, Traced, taking
from pdgemm.names import AlgorithmName, MoverName


def seconds(comm: MPI.Comm, product: object) -> float:
    comm.Barrier()
    start = perf_counter()
    product(0)  # type: ignore[operator]
    return comm.allreduce(perf_counter() - start, MPI.MAX)


def nanoseconds(recorder: Recorder, phases: int = 100_000) -> float:
    start = perf_counter()
    for _ in range(phases):
        with recorder.phase("pack"):
            pass
    return (perf_counter() - start) / phases * 1e9


WAYS: tuple[tuple[AlgorithmName, MoverName], ...] = (("summa", "ring"), ("summa", "ibcast"), ("stationary_a", "ring"))


@click.command()
@click.option("--sizes", default="512,1024,2048", show_default=True)
@click.option("--width", default=64, show_default=True, help="Of panels: the narrower, the more spans.")
@click.option("--repeats", default=30, show_default=True)
@click.option("--nvtx", is_flag=True, help="With ranges of NVTX, too.")
def main(sizes: str, width: int, repeats: int, nvtx: bool) -> None:
    comm = MPI.COMM_WORLD
    library = nvtx_library if nvtx else None
    with ProcessGrid(comm) as grid:
        for size in map(int, sizes.split(",")):
            A, B, C = (DistMatrix.random((size, size), grid=grid, seed=seed) for seed in range(3))
            for algorithm, mover in WAYS:
                p = plan(A, B, C, algorithm=algorithm, mover=mover, panel_width=width)
                product = p.prepare(A, B, C)
                product(0)
                ratios, spans = list[float](), 0
                for number in range(repeats):
                    taken = {}
                    for with_trace in (False, True) if number % 2 else (True, False):
                        trace = Trace(nvtx=library)
                        with taking(trace) if with_trace else nullcontext():
                            taken[with_trace] = seconds(comm, product)
                        spans = max(spans, len(trace.spans))
                    ratios.append(taken[True] / taken[False])
                low, _, high = quantiles(ratios, n=4)
                if comm.rank == 0:
                    print(
                        f"{comm.size} ranks, {size}, {algorithm}, {mover}, {p.product.panels} panels: traced / plain "
                        f"{median(ratios):.4f} ({low:.4f} to {high:.4f}), {spans} spans on rank 0",
                        flush=True,
                    )
    if comm.rank == 0:
        plain, traced = nanoseconds(Recorder()), nanoseconds(Traced(Trace(nvtx=library)))
        print(f"a phase: {plain:.0f} ns without a trace, {traced:.0f} ns with one")


if __name__ == "__main__":
    main()
