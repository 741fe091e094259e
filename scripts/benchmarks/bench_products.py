#!/usr/bin/env python3
"""Products of two matrices: compared with BLAS, on several layouts, and with options such as epilogues or traces.

\b
    . scripts/env.sh; export OMP_NUM_THREADS=1
    mpiexec -n 2 python scripts/benchmarks/bench_products.py layouts --shapes 2048,4096 --dtype complex128
    mpiexec -n 2 python scripts/benchmarks/bench_products.py overhead
    mpiexec -n 2 python scripts/benchmarks/bench_products.py protect --sizes 512,2048
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import numpy as np
from runner import Case, Work, extents, in_unit, integers, main, said
from scipy.special import erfc, expit

from pdgemm import Batch, DistMatrix, Epilogue, ProcessGrid, matmul_grouped, pdgemm, plan, plan_grouped

FLOATS = ("float64", "float32")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one block per rank": {},
    "the same, column-major": {"order": "F"},
    "blocks of 64": {"block": 64},
    "blocks of 256": {"block": 256},
    "1D columns": {"shape": "row"},
    "1D rows": {"shape": "column"},
}
GROUP = 256  # rows of a group
FUNCTIONS: dict[Any, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: 0.5 * z * erfc(-np.sqrt(0.5) * z),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z * expit(z),
}
WAYS: tuple[tuple[Any, Any], ...] = (("summa", "ring"), ("summa", "ibcast"), ("stationary_a", "ring"))
PANELS = 512
MOVERS: tuple[Any, ...] = ("shared", "ibcast", "ring")
SAMPLE = 16  # rows whose error is computed


def operands(grid: Any, mnk: tuple[int, int, int], **how: Any) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Return random A and B, and a C of zeros."""
    m, n, k = mnk
    A, B = (DistMatrix.random(shape, grid=grid, seed=seed, **how) for seed, shape in enumerate([(m, k), (k, n)]))
    how.pop("kind", None)
    return A, B, DistMatrix.zeros((m, n), grid=grid, **how)


def per_rank(grid: Any, size: int, dtype: str) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Return A, B and C such that each rank has `size` rows and columns of C; A has `size` columns."""
    pr, pc = grid.shape
    return operands(grid, (pr * size, pc * size, size), dtype=dtype, kind="normal")


def product(comm: Any, shapes: str = "512,1024,2048", dtype: str = "float64") -> Iterator[Case]:
    """C = A B, compared with BLAS's product of a rank's share, which all ranks compute at the same time."""
    with ProcessGrid(comm) as grid:
        for m, n, k in extents(shapes):
            A, B, C = operands(grid, (m, n, k), dtype=dtype)
            rows, cols = C.local.shape
            a, b, c = (np.ones(shape, dtype) for shape in ((rows, k), (k, cols), (rows, cols)))
            works: dict[str, Work] = {"BLAS": partial(np.matmul, a, b, c), "pdgemm": partial(pdgemm, 1, A, B, 0, C)}
            yield Case(f"{m} x {n} x {k} {dtype}", works)


def layouts(comm: Any, shapes: str = "2048", dtype: str = "float64") -> Iterator[Case]:
    """C = A B of matrices in several layouts; the time of redistribution counts.

    A grouped product with the same number of operations takes part: the rows of A are divided at random into groups of
    256, and each group has its own B.
    """
    size = comm.size
    sides: dict[str, Any] = {"square": None, "row": (1, size), "column": (size, 1)}
    grids = {name: ProcessGrid(comm, shape) for name, shape in sides.items()}
    for m, n, k in extents(shapes):
        works: dict[str, Work] = {}
        results: dict[str, DistMatrix] = {}
        for name, layout in LAYOUTS.items():
            how = {"dtype": dtype, **layout}
            A, B, C = operands(grids[how.pop("shape", "square")], (m, n, k), **how)
            works[name], results[name] = partial(pdgemm, 1, A, B, 0, C), C
        A, _, grouped = operands(grids["column"], (m, n, k), dtype=dtype)
        rng, number = np.random.default_rng(0), -(-m // GROUP)
        mine = int((np.arange(number) * size // number == comm.rank).sum())
        W = Batch.from_local(rng.standard_normal((mine, k, n)).astype(dtype), comm)
        routing = plan_grouped(A, rng.permutation(np.arange(m) // GROUP)[A.indices()[0]], W)
        works[f"rows of groups of {GROUP}"] = partial(matmul_grouped, A, W, routing, grouped)

        def facts(_: Any, results: Any = results, grouped: Any = grouped) -> Iterator[str]:
            for name, C in results.items():
                yield f"{name}: {C.report.algorithm} on {' x '.join(map(str, C.report.grid))}"
            yield f"{grouped.report.groups} groups, imbalance {grouped.report.imbalance:.2f}"

        yield Case(f"{m} x {n} x {k} {dtype}", works, facts=facts)


def overhead(comm: Any) -> Iterator[Case]:
    """Calls with 8 x 8 matrices compared with BLAS on the local parts; panels one inner index wide; and messages."""
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A, B, C = operands(grid, (8, 8, 8))
        how: dict[str, Any] = {"algorithm": "summa", "shape": grid.shape}
        p = plan(A, B, C, **how)
        b = np.ascontiguousarray(B.local[: A.local.shape[1]])
        calls: dict[str, Work] = {
            "BLAS": partial(np.dot, A.local, b, np.empty((8, b.shape[1]))),
            "pdgemm(1, A, B, 0, C)": partial(pdgemm, 1, A, B, 0, C, **how),
            "the same with check=False": partial(pdgemm, 1, A, B, 0, C, check=False, **how),
            "plan.execute(A, B, C)": partial(p.execute, A, B, C),
            "plan.prepare(A, B, C)()": p.prepare(A, B, C),
        }
        yield Case("a product of 8 x 8 matrices", calls, calls=200)
        thin = [DistMatrix.zeros(x, grid=grid, block=(1, 1)) for x in ((1, PANELS), (PANELS, 1), (1, 1))]
        panels: dict[str, Work] = {}
        for mover in MOVERS if comm.size > 1 else ("auto",):
            panels[mover] = plan(*thin, panel_width=1, mover=mover, **how).prepare(*thin)

        def facts(seconds: dict[str, float]) -> list[str]:
            return [f"{mover}: {in_unit(taken / PANELS)} for each panel" for mover, taken in seconds.items()]

        yield Case("a prepared product of panels that are one inner index wide", panels, calls=5, facts=facts)
    if comm.size > 1:
        yield Case("a message of 8 KB from each even rank to the next", messages(comm), calls=200)


def messages(comm: Any) -> dict[str, Work]:
    """Return functions that send by a request for each message, as panels are sent, and by a persistent request."""
    from mpi4py import MPI

    other, odd, words = comm.rank ^ 1, comm.rank % 2, np.zeros(1024)
    other = MPI.PROC_NULL if other == comm.size else other
    fresh = partial(comm.Irecv if odd else comm.Isend, [words, MPI.DOUBLE], other)
    kept = (comm.Recv_init if odd else comm.Send_init)([words, MPI.DOUBLE], other)

    def again() -> None:
        kept.Start()
        kept.Wait()

    return {"a request for each": lambda: fresh().Wait(), "a persistent request": again}


def overlap(comm: Any, size: int = 2048, panel_width: int = 256) -> Iterator[Case]:
    """SUMMA by messages in two ways: products are in one piece, or in slabs, and messages are tested between slabs.

    Set PDGEMM_RANKS_PER_NODE=1, so that every rank counts as a node.
    """
    from pdgemm.local.blas import local_gemm
    from pdgemm.schedules.mover_registry import by_messages

    hidden: dict[str, float] = {}

    def multiply(name: str, flops: float, how: dict[str, Any]) -> None:
        with mock.patch.object(local_gemm, "SLAB_FLOPS", flops):
            report: Any = pdgemm(1, A, B, 0, C, algorithm="summa", shape=grid.shape, **how).report
        hidden[name] = report.overlap or 0.0

    def facts(_: Any) -> list[str]:
        return [f"hidden on rank 0: {', '.join(f'{share:.0%} {name}' for name, share in hidden.items())}"]

    with ProcessGrid(comm) as grid:
        A, B, C = operands(grid, (size, size, size))
        for mover in by_messages():
            for lookahead in (0, 1, 2):
                how = {"mover": mover, "lookahead": lookahead, "panel_width": panel_width}
                lengths = {"in slabs": local_gemm.SLAB_FLOPS, "in one piece": inf}
                works = {name: partial(multiply, name, flops, how) for name, flops in lengths.items()}
                yield Case(f"{mover} lookahead {lookahead}", works, facts=facts)


def emulated(comm: Any, sizes: str = "512,1024,2048", names: str = "ozaki,ozaki-5,bf16x9") -> Iterator[Case]:
    """Products by slices compared with BLAS, and the largest error of both in a sample of rows, over |A||B|."""
    from pdgemm.local.arrays.emulation import EMULATIONS

    with ProcessGrid(comm) as grid:
        for name in names.split(","):
            for n in integers(sizes):
                A, B, C = operands(grid, (n, n, n), dtype=EMULATIONS[name].sums, kind="normal")
                types: dict[str, Any] = {"BLAS": None, name: name}
                works = {key: plan(A, B, C, compute_type=x).prepare(A, B, C) for key, x in types.items()}
                errors = {}
                for key, work in works.items():
                    work()
                    errors[key] = error(A, B, C)
                text = ", ".join(f"{key} {x:.1e}" for key, x in errors.items())
                yield Case(f"{name}, n = {n}", works, facts=said(f"errors over |A||B|: {text}"))


def error(A: DistMatrix, B: DistMatrix, C: DistMatrix) -> float:
    """Return the largest error of the first rows of C over |A||B|, by products in extended precision."""
    a, b, c = A[:SAMPLE].allgather(), B.allgather(), C[:SAMPLE].allgather()
    exact, size = (x.astype(np.longdouble) @ y for x, y in ((a, b), (np.abs(a), np.abs(b))))
    return float((np.abs(c - exact) / size).max())


def epilogue(comm: Any, sizes: str = "1024,2048") -> Iterator[Case]:
    """Products with an epilogue, compared with plain products, a pass over C, and NumPy's functions on C."""
    with ProcessGrid(comm) as grid:
        for size in integers(sizes):
            for dtype in FLOATS:
                A, B, C = per_rank(grid, size, dtype)
                bias, one = np.ones(C.shape[1], dtype), np.ones(C.local.shape[1], dtype)
                for name, f in FUNCTIONS.items():
                    ending = Epilogue(bias=bias, activation=name)
                    works: dict[str, Work] = {
                        "product": partial(pdgemm, 1, A, B, 0, C),
                        "with the epilogue": partial(pdgemm, 1, A, B, 0, C, epilogue=ending),
                        "C *= 1": partial(C.local.__imul__, C.local.dtype.type(1)),
                        "NumPy": partial(after_bias, f, C.local, one),
                    }
                    yield Case(f"{name}, {size} x {size} {dtype} on each rank", works, facts=of_epilogue)


def after_bias(f: Callable[[np.ndarray], np.ndarray], c: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return f(c + bias)


def of_epilogue(seconds: dict[str, float]) -> list[str]:
    more = seconds["with the epilogue"] - seconds["product"]
    return [f"the epilogue takes {more / seconds['C *= 1']:.2f} passes, {more / seconds['NumPy']:.2f} of NumPy's time"]


def protect(comm: Any, sizes: str = "512,1024,2048,4096") -> Iterator[Case]:
    """Products with checksums compared with plain ones."""
    with ProcessGrid(comm) as grid:
        for size in integers(sizes):
            for dtype in FLOATS:
                A, B, C = per_rank(grid, size, dtype)
                modes: dict[str, Any] = {"plain": None, "protected": "repair"}
                works: dict[str, Work] = {x: partial(pdgemm, 1, A, B, 0, C, protect=y) for x, y in modes.items()}
                yield Case(f"{size} x {size} {dtype} on each rank", works, facts=partial(of_checksums, C))


def of_checksums(C: Any, seconds: dict[str, float]) -> list[str]:
    return [f"checksums on rank 0: {C.report.checks.seconds / seconds['plain']:.1%} of the plain product"]


def tracing(comm: Any, sizes: str = "512,1024,2048", width: int = 64, nvtx: bool = False) -> Iterator[Case]:
    """Prepared products with and without a trace; the ratio should be at most 1.02.  Narrow panels have more spans."""
    from pdgemm.instrument.recorder import Recorder
    from pdgemm.instrument.spans import Trace, Traced, taking

    library: Any = __import__("nvtx") if nvtx else None
    spans: list[int] = []

    def multiply(run: Callable[[], object], traced: bool) -> None:
        trace = Trace(nvtx=library)
        with taking(trace) if traced else nullcontext():
            run()
        spans[:] = [len(trace.spans)] if traced else spans

    with ProcessGrid(comm) as grid:
        for n in integers(sizes):
            A, B, C = operands(grid, (n, n, n))
            for algorithm, mover in WAYS:
                p = plan(A, B, C, algorithm=algorithm, mover=mover, panel_width=width)
                run = partial(p.prepare(A, B, C), 0)
                works = {name: partial(multiply, run, name == "traced") for name in ("plain", "traced")}
                name = f"{n}, {algorithm}, {mover}, {p.product.panels} panels"
                yield Case(name, works, facts=lambda _: [f"{spans[0]} spans on rank 0"])

    def phase(recorder: Recorder) -> None:
        with recorder.phase("pack"):
            pass

    phases = {"without a trace": Recorder(), "with one": Traced(Trace(nvtx=library))}
    yield Case("a phase", {name: partial(phase, x) for name, x in phases.items()}, calls=10_000)


if __name__ == "__main__":
    main(product, layouts, overhead, overlap, emulated, epilogue, protect, tracing)
