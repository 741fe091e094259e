#!/usr/bin/env python3
"""QR of tall matrices, in turns: pdgemm.linalg.qr by each method on these ranks, and SciPy and NumPy on one process.

    . scripts/env.sh; mpiexec -n 2 python scripts/benchmarks/bench_qr.py 100000x64 20000x512   # OMP_NUM_THREADS unset

SciPy and NumPy use as many threads as there are ranks, while the other ranks wait asleep.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.linalg import qr

ROUNDS = 5


def asleep(comm: MPI.Comm) -> None:
    """Wait for the other ranks without keeping a core busy."""
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)


def measure(comm: MPI.Intracomm, m: int, n: int) -> dict[str, float]:
    """Return the least seconds of each."""
    A = DistMatrix.random((m, n), grid=ProcessGrid(comm, (comm.size, 1)), kind="normal", seed=1)
    a: Any = A.to_global()
    by_columns: Any = None if a is None else np.asfortranarray(a)
    alone = {
        "scipy": lambda: scipy.linalg.qr(by_columns, mode="economic", check_finite=False),
        "numpy": lambda: np.linalg.qr(a),
    }
    calls: dict[str, Callable[[], Any]] = {"auto": lambda: qr(A), "tsqr": lambda: qr(A, method="tsqr"), **alone}
    least = dict.fromkeys(calls, np.inf)
    for _, (name, call) in itertools.product(range(ROUNDS), calls.items()):
        comm.Barrier()
        start = time.perf_counter()
        if name not in alone:
            call()
            comm.Barrier()
        elif comm.rank == 0:
            with threadpool_limits(comm.size):
                start = time.perf_counter()
                call()
        least[name] = min(least[name], time.perf_counter() - start)
        asleep(comm)
    return least


def main(shapes: list[str]) -> None:
    """Print the seconds, the rate for the operations of Householder's method, and the ratio to SciPy's time."""
    comm = MPI.COMM_WORLD
    for shape in shapes:
        m, n = map(int, shape.split("x"))
        least = measure(comm, m, n)
        for name, seconds in least.items() if comm.rank == 0 else ():
            rate, ratio = (4 * m * n * n - 4 * n**3 / 3) / seconds / 1e9, least["scipy"] / seconds
            print(f"{shape} {name:6} {seconds * 1e3:8.1f} ms {rate:7.1f} GFLOP/s {ratio:6.2f} x SciPy", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
