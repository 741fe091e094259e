#!/usr/bin/env python3
"""Tensors: contractions of coupled cluster with NumPy's, products, moves between layouts, and plans for many ranks.

\b
    . scripts/env.sh; export OMP_NUM_THREADS=1
    mpiexec -n 2 python scripts/benchmarks/bench_tensors.py contractions --occupied 16 --virtual 64
    mpiexec -n 2 python scripts/benchmarks/bench_tensors.py products
    mpiexec -n 2 python scripts/benchmarks/bench_tensors.py moves
    python scripts/benchmarks/bench_tensors.py plans
    scripts/hosts.sh 2 mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_tensors.py between-hosts
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np
from runner import Case, Work, asleep, main, said
from threadpoolctl import threadpool_limits

from pdgemm import DistTensor, ProcessGrid, einsum, pdgemm, plan_einsum
from pdgemm.planning.tensors import contractions, einsum_plan
from pdgemm.planning.tensors.tensor_layouts import default_layout
from pdgemm.tensors.tensor_base import in_layout

CCSD = (  # the contractions of the doubles equations, from the ladder (particle-particle) term on
    "abef,efij->abij", "mnij,abmn->abij", "mbej,aeim->abij", "ae,ebij->abij", "mi,abmj->abij", "abej,ei->abij",
    "mbij,am->abij", "mnef,efij->mnij", "mnef,abmn->abef", "mnef,fbjn->mbej", "mnef,afmn->ae", "mnef,efin->mi",
)  # fmt: skip
MANY = {  # expressions of the plans for many ranks, and the extent of every index
    "pair": ("abef,efij->abij", 64),
    "four tensors": ("abef,efgh,ghkl,kl->ab", 24),
    "six tensors": ("ab,bc,cd,de,ef,fg->ag", 2048),
    "six tensors of four axes": ("abij,ijkl,klmn,mnop,opqr,qrst->abst", 12),
}
SETTLE = 0.3  # seconds after which the threads of BLAS no longer keep a core busy
MESSAGE = 1 << 22  # words of a message that measures the rate of a cable
Shapes = list[tuple[int, ...]]


def shapes_of(expression: str, occupied: int, virtual: int) -> Shapes:
    """Return the shapes of the operands.   occupied : the extent of i, j, m and n; virtual : of others."""
    inputs = expression.partition("->")[0].split(",")
    return [tuple(occupied if x in "ijmn" else virtual for x in labels) for labels in inputs]


def mean_seconds(comm: Any, calls: int, work: Work) -> float:
    """Return the mean time of some calls, which all ranks begin together."""
    comm.Barrier()
    start = perf_counter()
    for _ in range(calls):
        work()
    return (perf_counter() - start) / calls


def alone(comm: Any, calls: int, work: Work) -> float:
    """Return the mean time of some calls on rank 0, with a thread for each rank but at most one for each core."""
    seconds = 0.0
    if comm.rank == 0:
        with threadpool_limits(min(comm.size * int(os.environ.get("OMP_NUM_THREADS", 1)), os.cpu_count() or 1)):
            work()
            start = perf_counter()
            for _ in range(calls):
                work()
            seconds = (perf_counter() - start) / calls
        sleep(SETTLE)
    asleep(comm)
    return seconds


def contractions_of_ccsd(comm: Any, occupied: int = 8, virtual: int = 24, calls: int = 20) -> Iterator[Case]:
    """Contractions of CCSD, in free layouts, with numpy.einsum(optimize=True) and as many threads in one process."""
    grid, works, words, bounds = ProcessGrid(comm), list[tuple[Work, Work]](), 0, 0.0
    for expression in CCSD:
        shapes = shapes_of(expression, occupied, virtual)
        fewest = plan_einsum(expression, *shapes, ranks=comm.size, free=True, minimize="words")
        words, bounds = words + fewest.words, bounds + fewest.bound
        layouts = plan_einsum(expression, *shapes, ranks=comm.size, free=True).layouts
        tensors = [DistTensor.random(x.shape, grid=grid, layout=x, seed=at) for at, x in enumerate(layouts)]
        arrays = [x.to_global() for x in tensors]
        ours: Work = partial(einsum, expression, *tensors)
        numpys: Work = partial(np.einsum, expression, *arrays, optimize=True)
        works.append((numpys, ours))
        contenders: dict[str, Work] = {
            "numpy.einsum": partial(alone, comm, calls, numpys),
            "einsum": partial(mean_seconds, comm, calls, ours),
        }
        least = f"{fewest.words} words at least, bound {fewest.bound:.0f}"
        yield Case(f"{expression}, o = {occupied}, v = {virtual}", contenders, facts=said(least), own_clock=True)
    numpy_all, all_ours = ([x[at] for x in works] for at in (0, 1))
    contenders = {
        "numpy.einsum": partial(alone, comm, calls, partial(each, numpy_all)),
        "einsum": partial(mean_seconds, comm, calls, partial(each, all_ours)),
    }
    ratio = f"{words} words with the fewest words, {words / max(bounds, 1):.3f} of the sum of the bounds"
    yield Case(f"all {len(CCSD)}, o = {occupied}, v = {virtual}", contenders, facts=said(ratio), own_clock=True)


def each(works: Iterable[Work]) -> None:
    """Call functions one after the other."""
    for work in works:
        work()


def products(comm: Any, size: int = 1536, calls: int = 1) -> Iterator[Case]:
    """Contractions that are products, with the product of the same matrices."""
    grid = ProcessGrid(comm)
    for expression, a, b in (
        ("ij,jk->ik", (size, size), (size, size)),
        ("ijk,kl->ijl", (size // 16, 16, size), (size, size)),
        ("ijkl,klm->ijm", (size // 16, 16, size // 16, 16), (size // 16, 16, size)),
    ):
        A = DistTensor.random(a, grid=grid, rows=range(len(a) // 2 + len(a) % 2), seed=1)
        B = DistTensor.random(b, grid=grid, rows=range(len(b) - 1), seed=2)
        works: dict[str, Work] = {
            "pdgemm": partial(pdgemm, 1, A.unfolding, B.unfolding),
            "einsum": partial(einsum, expression, A, B),
        }
        yield Case(f"{expression}, {a} by {b}", works, calls=calls)


def moves(comm: Any, extent: int = 48) -> Iterator[Case]:
    """Moves of tensors of four axes, with NumPy's transposition of the same bytes of each rank."""
    grid, shape = ProcessGrid(comm), (extent,) * 4
    for name, rows, cols in (
        ("the rows of (i, j) to rows of (k, l)", (2, 3), (0, 1)),
        ("all axes reversed", (3, 2), (1, 0)),
        ("one axis of the rows with one of the columns", (0, 2), (1, 3)),
        ("the last axis to the front", (3, 0), (1, 2)),
    ):
        T = DistTensor.random(shape, grid=grid, rows=(0, 1), seed=1)
        target = default_layout(shape, comm.size, (rows, cols))
        works: dict[str, Work] = {
            "numpy": partial(np.ascontiguousarray, T.local.transpose(rows + cols)),
            "in_layout": partial(in_layout, T, target),
        }
        received = comm.allreduce(in_layout(T, target).report.counted.words_received if comm.size > 1 else 0)
        yield Case(f"{shape}, {name}", works, facts=said(f"{received / T.size:.0%} of the elements are sent"))


def between_hosts(comm: Any, extents: str = "16x64,24x96") -> Iterator[Case]:
    """The ladder term between hosts, with a rank's share of the product and the transfer of the words of its plan."""
    grid = ProcessGrid(comm)
    for extent in extents.split(","):
        o, v = map(int, extent.split("x"))
        expression, shapes = CCSD[0], shapes_of(CCSD[0], o, v)
        for name, free in (("free layouts", True), ("default layouts", False)):
            layouts = plan_einsum(expression, *shapes, ranks=comm.size, free=free).layouts
            tensors = [DistTensor.random(x.shape, grid=grid, layout=x, seed=at) for at, x in enumerate(layouts)]
            words = comm.allreduce(einsum(expression, *tensors).report.counted.words_received) // comm.size
            m, n, k = v * v // comm.size, o * o, v * v
            share = np.ones((m, k)), np.ones((k, n)), np.empty((m, n))
            works: dict[str, Work] = {
                "product": partial(np.matmul, share[0], share[1], out=share[2]),
                "transfer": partial(transferred, comm, np.ones(min(words, MESSAGE)), words),
                "einsum": partial(einsum, expression, *tensors),
            }
            yield Case(f"{expression}, o = {o}, v = {v}, {name}", works, facts=partial(over_limit, words))


def transferred(comm: Any, buffer: np.ndarray, words: int) -> None:
    """Send and receive this many words in plain messages, to and from the ranks half of all ranks away."""
    other = (comm.rank + comm.size // 2) % comm.size
    arriving = np.empty_like(buffer)
    for start in range(0, words, MESSAGE):
        n = min(MESSAGE, words - start)
        comm.Sendrecv(buffer[:n], other, 0, arriving[:n], other, 0)


def over_limit(words: int, seconds: dict[str, float]) -> list[str]:
    limit = max(seconds["product"], seconds["transfer"])
    return [f"{words} words received by a rank; einsum takes {seconds['einsum'] / limit:.3f} of max(product, transfer)"]


def plans(ranks: str = "4,16,64,256,1024") -> Iterator[Case]:
    """The time of plans of contractions, in default and in free layouts, with empty caches."""

    def plan(expression: str, shapes: Sequence[tuple[int, ...]], count: int, free: bool) -> float:
        for cached in (einsum_plan._plan, contractions.contraction):
            cached.cache_clear()
        start = perf_counter()
        plan_einsum(expression, *shapes, ranks=count, free=free)
        return perf_counter() - start

    for name, (expression, extent) in MANY.items():
        shapes = shapes_of(expression, extent, extent)
        for count in map(int, ranks.split(",")):
            works: dict[str, Work] = {
                f"{kind} layouts": partial(plan, expression, shapes, count, free)
                for kind, free in (("default", False), ("free", True))
            }
            yield Case(f"{name}, {count} ranks", works, own_clock=True)


contractions_of_ccsd.__name__ = "contractions"

if __name__ == "__main__":
    main(contractions_of_ccsd, products, moves, between_hosts, plans)
