#!/usr/bin/env python3
"""Work on matrices other than products: elements, layouts, tall QR factorisations, and files of many matrices.

\b
    . scripts/env.sh; export OMP_NUM_THREADS=1
    mpiexec -n 2 python scripts/benchmarks/bench_matrices.py elements
    mpiexec -n 2 python scripts/benchmarks/bench_matrices.py redistribute --size 4096
    scripts/hosts.sh 8 mpirun -n 16 --map-by ppr:2:node python scripts/benchmarks/bench_matrices.py between-hosts
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
from runner import Case, Work, asleep, main, said

from pdgemm import DistMatrix, ProcessGrid, array_api
from pdgemm.algorithms.redistribution import timed_exchange
from pdgemm.planning.machines.machine import load_machine
from pdgemm.planning.machines.simulator import fastest_exchange
from pdgemm.schedules.exchanges.exchange import plan_exchange
from pdgemm.transport.exchange_buffers import ExchangeBuffers

MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "columns to rows": ({"shape": "row"}, {"shape": "column"}),
    "rows to blocks of 64": ({"shape": "column"}, {"shape": "square", "block": 64}),
    "blocks of 64 to rows": ({"shape": "square", "block": 64}, {"shape": "column"}),
    "blocks of 64 to 96": ({"shape": "square", "block": 64}, {"shape": "square", "block": 96}),
    "blocks of 4 to rows": ({"shape": "square", "block": 4}, {"shape": "column"}),
    "transpose, blocks of 64": ({"shape": "square", "block": 64}, {"shape": "square", "block": 64}),
    "row- to column-major": ({"shape": "column"}, {"shape": "column", "order": "F"}),
}
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name}, axis {axis}": methodcaller(name, axis=axis)
        for name in ("sum", "max", "argmax", "var")
        for axis in (None, 0, 1)
    },
    "A + A": lambda A: A + A,
    "sqrt(A)": np.sqrt,
    "A *= 1.5": lambda A: A.__imul__(1.5),
    "A - A.mean(0)": lambda A: A - A.mean(0),
}


def arrays(comm: Any, size: int = 4096) -> Iterator[Case]:
    """Functions of the array API with the methods of matrices, and with NumPy's functions on the local array."""
    A = DistMatrix.random((size, size), grid=ProcessGrid(comm), seed=1)
    X = array_api.asarray(A)
    works: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        **{name: (methodcaller(name), getattr(array_api, name)) for name in ("sum", "max", "mean", "var")},
        "sum, axis 0": (methodcaller("sum", axis=0), partial(array_api.sum, axis=0)),
        "x + x": (lambda A: A + A, lambda X: X + X),
        "exp(x)": (np.exp, array_api.exp),
        "where(x > 0.5, x, 0)": (lambda A: np.where(A > 0.5, A, 0), lambda X: array_api.where(X > 0.5, X, 0)),
        "x @ x": (lambda A: A @ A, lambda X: X @ X),
    }
    for name, (of_matrices, of_arrays) in works.items():
        yield Case(
            f"{size} x {size}, {name}",
            {"matrix": partial(of_matrices, A), "array": partial(of_arrays, X)},
        )


def elements(comm: Any, sizes: str = "4000,8") -> Iterator[Case]:
    """Reductions and elementwise operations, compared with NumPy's on the local array."""
    for n in map(int, sizes.split(",")):
        with ProcessGrid(comm, (comm.size, 1)) as grid:
            A = DistMatrix.random((n * comm.size, n), seed=1, grid=grid)
            for name, operation in OPERATIONS.items():
                works = {"pdgemm": partial(operation, A), "NumPy": partial(operation, A.local)}
                yield Case(f"{n} x {n} on each rank, {name}", works)


def redistribute(comm: Any, size: int = 4096, dtype: Any = "float64") -> Iterator[Case]:
    """Redistributions among some layouts, compared with copies of the local arrays in memory."""
    sides = {"row": (1, comm.size), "column": (comm.size, 1), "square": None}
    grids = {name: ProcessGrid(comm, shape) for name, shape in sides.items()}
    for name, (one, two) in MOVES.items():
        start, end = ({"grid": grids[x["shape"]], "dtype": dtype, **x} for x in (one, two))
        del start["shape"], end["shape"]
        X, Y = DistMatrix.random((size, size), **start), DistMatrix.empty((size, size), **end)
        source = X.T if name.startswith("transpose") else X
        works: dict[str, Work] = {
            "redistribute": partial(source.redistribute, Y),
            "copy": partial(np.copyto, X.local.copy(), X.local),
        }
        source.redistribute(Y)
        words = comm.allreduce(Y.report.counted.words_received)
        yield Case(name, works, facts=said(f"{words / size**2:.0%} of the elements are sent"))


def between_hosts(comm: Any, sizes: str = "64,256,512,1024,2048") -> Iterator[Case]:
    """From single columns to blocks: messages from rank to rank, or one between two hosts, and the model's choice."""
    with ProcessGrid(comm, (1, comm.size)) as columns, ProcessGrid(comm) as blocks:
        for n in map(int, sizes.split(",")):
            X, Y = DistMatrix.random((n, n), grid=columns, block=1), DistMatrix.empty((n, n), grid=blocks, block=32)
            direct = plan_exchange(X.layout_in(blocks), Y.layout_in(blocks), comm.size)
            plans = {"rank to rank": direct, "host to host": direct.joined(blocks.nodes)}
            works: dict[str, Work] = {
                name: partial(timed_exchange, name, 1, X.stored, 0, Y.stored, plan, buffers, blocks)
                for name, plan in plans.items()
                for buffers in [ExchangeBuffers(plan, comm.rank, shared=blocks.memory)]
            }
            chosen = "host to host" if fastest_exchange(direct, blocks.nodes, load_machine()).nodes else "rank to rank"
            messages = {name: comm.allreduce(plan.traffic(comm.rank).messages_sent) for name, plan in plans.items()}
            yield Case(f"{n} x {n}", works, calls=5, facts=said(f"messages: {messages}; chosen: {chosen}"))


def qr(comm: Any, shapes: str = "100000x64,20000x512") -> Iterator[Case]:
    """QR of tall matrices by each method, compared with SciPy and NumPy on rank 0 with a thread per rank.

    Leave OMP_NUM_THREADS unset.
    """
    import scipy.linalg
    from threadpoolctl import threadpool_limits

    from pdgemm import linalg

    def alone(call: Callable[[], object]) -> None:
        if comm.rank == 0:
            with threadpool_limits(comm.size):
                call()
        asleep(comm)

    for shape in shapes.split(","):
        m, n = map(int, shape.split("x"))
        A = DistMatrix.random((m, n), grid=ProcessGrid(comm, (comm.size, 1)), kind="normal", seed=1)
        a: Any = A.to_global()
        by_columns = None if a is None else np.asfortranarray(a)
        householder = partial(scipy.linalg.qr, by_columns, mode="economic", check_finite=False)
        works: dict[str, Work] = {
            "scipy": partial(alone, householder),
            "numpy": partial(alone, partial(np.linalg.qr, a)),
            "auto": partial(linalg.qr, A),
            "tsqr": partial(linalg.qr, A, method="tsqr"),
        }
        flops = 4 * m * n * n - 4 * n**3 / 3
        yield Case(f"{shape}, rates for the operations of Householder's method", works, facts=partial(rates, flops))


def rates(flops: float, seconds: dict[str, float]) -> list[str]:
    return [f"{name}: {flops / taken / 1e9:.1f} GFLOP/s" for name, taken in seconds.items()]


def states(comm: Any, cases: str = "100x32,4x1448", folder: str = "") -> Iterator[Case]:
    """`save_all` and `load_all` of many square matrices (NUMBERxORDER), compared with one matrix after the other.

    Matrices of more than 724 rows have more than 2^19 elements, and are written by all ranks.
    """
    from pdgemm.io import hdf5

    with tempfile.TemporaryDirectory(dir=folder or None) as own, ProcessGrid(comm) as grid:
        place = Path(comm.bcast(own))
        for number, order in (map(int, case.split("x")) for case in cases.split(",")):
            matrices = {f"x{at}": DistMatrix.random((order, order), grid=grid, seed=at) for at in range(number)}
            path = place / f"{number}x{order}.h5"

            def save_each(matrices: Any = matrices) -> None:
                for name, x in matrices.items():
                    hdf5.save(place / f"{name}.h5", "x", x)

            def load_each(names: Any = (*matrices,), path: Path = path) -> None:
                for name in names:
                    hdf5.load(path, name, grid, verify=True)

            title = f"{number} of {order} x {order}"
            yield Case(f"save {title}", {"all at once": partial(hdf5.save_all, path, matrices), "in a loop": save_each})
            yield Case(f"load {title}", {"all at once": partial(hdf5.load_all, path, grid), "in a loop": load_each})
        comm.Barrier()  # the folder is removed after all ranks have closed their files


if __name__ == "__main__":
    main(elements, arrays, redistribute, between_hosts, qr, states)
