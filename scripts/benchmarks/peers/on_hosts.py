"""pdgemm between hosts, in one layout for all algorithms or in the best layout of each; and the limits of the hosts."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from math import prod

import numpy as np
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan
from pdgemm.errors import ArgumentError, GridError
from pdgemm.grids.layout import Layout
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.names import AnyName
from pdgemm.planning.algorithm_registry import ALGORITHMS
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import simulate
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.search.candidates import Arrangement
from peers.places import BOTH, LIMITS, TENSOR_PARALLEL, bytes_into_a_host
from peers.with_pdgemm import block, kernel as kernel
from peers.worker import Maker, Setting, Way, boxes, product, randomize

PIECES = 16  # a product is computed in as many pieces, with progress of MPI in between


def makers(setting: Setting) -> Iterator[Maker]:
    """Yield a single function, which returns the `Way` of a limit, or of an algorithm on the layouts of `setting`.

    "own": the layouts of the algorithm on its best grid, which need no redistribution; if the algorithm is "auto",
    those of the best algorithm.  "blocks": one block per rank.  "columns": one block of columns per rank.
    "column-parallel": A by rows, B and C by columns.  "row-parallel": A by columns, B and C by rows.
    """
    yield partial(limit if setting.variant in (*LIMITS, BOTH) else multiplied, setting)


def limit(setting: Setting) -> Way:
    """Return a `Way` that runs local products on all ranks, an exchange of the bytes a host receives, or both."""
    comm, (m, n, k) = setting.comm, setting.mnk
    names = comm.allgather(platform.node())
    hosts, here = sorted(set(names)), names.count(names[comm.rank])
    pr, pc = max(boxes(comm.size), key=lambda shape: -m * k / shape[0] - k * n / shape[1])
    rows, cols, inner = -(-m // pr), -(-n // pc), k
    if setting.layout in TENSOR_PARALLEL:
        by_columns = setting.layout == "column-parallel"
        rows, cols, inner = (m, -(-n // comm.size), k) if by_columns else (m, n, -(-k // comm.size))
    A, B, C = (np.ones(shape, setting.dtype) for shape in ((rows, inner), (inner, cols), (rows, cols)))
    words = round(bytes_into_a_host(setting.mnk, len(hosts), setting.layout) / here / 8)
    leaving, coming = np.ones(words), np.empty(words)
    number, distance = names[: comm.rank].count(names[comm.rank]), hosts.index(names[comm.rank])
    to, source = (
        [rank for rank, name in enumerate(names) if name == hosts[(distance + step) % len(hosts)]][number]
        for step in (1, -1)
    )
    height = -(-rows // PIECES)

    def run() -> None:
        requests = []
        if setting.variant != "product":
            requests = [comm.Irecv(coming, source), comm.Isend(leaving, to)]
        if setting.variant != "exchange":
            for start in range(0, rows, height):
                piece = slice(start, start + height)
                gemm_accumulate(1, A[piece], B, 0, C[piece])
                MPI.Request.Testall(requests)  # MPI makes progress only while it is called
        MPI.Request.Waitall(requests)

    note = "" if setting.variant == "product" else f"{words * here * 8 / 1e6:.3f} MB, plain messages"
    return Way(note, run)


def multiplied(setting: Setting) -> Way:
    m, n, k = setting.mnk
    algorithm = AnyName(setting.variant)
    size, dtype, layouts = setting.comm.size, np.dtype(setting.dtype), list[Layout]()
    by_rows, by_columns = (size, 1), (1, size)
    grids = {
        "columns": [by_columns] * 3,
        "column-parallel": [by_rows, by_columns, by_columns],
        "row-parallel": [by_columns, by_rows, by_rows],
    }.get(setting.layout, [None] * 3)
    for shape, on in zip(((m, k), (k, n), (m, n)), grids):
        with ProcessGrid(setting.comm, on) as grid:
            layouts.append(DistMatrix.empty(shape, grid=grid, dtype=dtype).layout_in(grid))
    if setting.layout == "own":
        layouts = [*own(setting, *(matrix(setting, layout) for layout in layouts))]
    A, B, C = (matrix(setting, layout) for layout in layouts)
    for seed, x in enumerate((A, B), 1):
        randomize(block(x), seed)
    p = plan(A, B, C, algorithm=algorithm)
    note = f"{into_a_host(p, setting.comm) / 1e6:.3f} MB, predicted {p.seconds:.4f} s, {p}"
    run = partial(pdgemm, 1.0, A, B, 0.0, C, algorithm=algorithm)
    return product(setting, note, run, lambda: (block(A), block(B), block(C)))


def own(setting: Setting, A: DistMatrix, B: DistMatrix, C: DistMatrix) -> tuple[Layout, Layout, Layout]:
    """Return the layouts of the product with the shortest predicted time, without the time of redistribution."""
    algorithms = [*ALGORITHMS] if setting.variant == "auto" else [setting.variant]
    shapes = [None, *((rows, cols) for rows, cols in boxes(setting.comm.size))]
    plans = []
    for algorithm, shape in itertools.product(map(AnyName, algorithms), shapes):
        with suppress(GridError, ArgumentError):  # not every algorithm takes every grid
            plans.append(plan(A, B, C, algorithm=algorithm, shape=shape))
    best = min(plans, key=lambda p: p.seconds - p.moving_seconds)
    return Arrangement(best.product, best.transposed).layouts


def matrix(setting: Setting, layout: Layout) -> DistMatrix:
    grid = ProcessGrid(setting.comm, layout.distribution.grid_shape, ranks=layout.rank_map)
    local = np.zeros(layout.local_shape(setting.comm.rank), setting.dtype, layout.order)
    return DistMatrix(local, grid, layout.distribution, layout.order)


def into_a_host(p: ProductPlan, comm: MPI.Intracomm) -> float:
    """Return the bytes that the busiest host receives, in the product and in the redistributions before and after."""
    here = comm.size // len(set(comm.allgather(platform.node())))
    entering = simulate(p.product, Machine(ranks_per_node=here), comm.size).node_bytes.astype(float)
    for _, move in p.moves:
        for rank in range(comm.size):
            away = sum(prod(x.shape) for x in move.receives(rank) if x.peer // here != rank // here)
            entering[rank // here] += away * move.wire.itemsize
    return float(entering.max())
