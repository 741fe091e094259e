"""pdgemm(): check together, plan, run, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Number
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError, together
from pdgemm.grids.distribution import Distribution
from pdgemm.local import LETTER
from pdgemm.matrix import DistMatrix
from pdgemm.movers import MOVERS
from pdgemm.pipeline import PanelRing
from pdgemm.planner import Plan, plan_summa
from pdgemm.report import Report
from pdgemm.summa import summa
from pdgemm.threads import threads
from pdgemm.timing import Recorder

_BLAS_INT = 2**31 - 1
ALGORITHMS = ("auto", "summa")


def pdgemm(
    alpha: complex,
    A: DistMatrix,
    B: DistMatrix,
    beta: complex = 0.0,
    C: DistMatrix | None = None,
    *,
    algorithm: str = "auto",
    lookahead: int = 1,
    panel_width: int | None = None,
    memory_limit: int | None = None,
    mover: str = "ibcast",
    progress: Callable[[int, int], object] | None = None,
) -> DistMatrix:
    """C := alpha A B + beta C.  Collective over the grid; arguments in the order of SciPy's BLAS.

    alpha, beta : scalars, real for real matrices.  beta == 0: C is not read.  alpha == 0: A and B are not.
    A : DistMatrix (m, k);  B : DistMatrix (k, n), on the same grid, of any block sizes: the blocks of the
        inner dimension may differ.  float32, float64, complex64 or complex128, the same for all.
    C : DistMatrix (m, n) with A's row layout and B's column layout, overwritten; made where it is None.
    algorithm    : "summa" (C stationary); "auto" chooses it.
    lookahead    : panels in flight behind the one in use, >= 0.
    panel_width  : widest panel, in inner indices.
    memory_limit : bytes per rank for buffers beyond A, B and C; narrows the panels.
    mover        : "ibcast" (MPI_Ibcast) or "ring" (point-to-point).
    progress     : called as progress(done, total) after each panel.

    Returns C; `C.report` says what ran, how fast, and how many words.

    Cost per rank on Pr x Pc: 2mnk/P flops; mk (Pc - 1)/P + kn (Pr - 1)/P words in.
    Raises LayoutError, GridError, DTypeError, ArgumentError or MemoryLimitError, the same on every rank
    and before anything is sent.  Error: |C - C^| <= gamma_k |alpha||A||B| (Higham 2002, 3.5).
    """
    start = perf_counter()
    if not isinstance(A, DistMatrix):  # without a matrix there is no communicator to agree on
        raise DTypeError(f"A is a DistMatrix, got {type(A).__name__}")
    recorder = Recorder()
    with together(A.grid.comm) as said:
        _check(alpha, A, B, beta, C, algorithm, mover)
        number: Any = complex if A.dtype.kind == "c" else float
        alpha, beta = number(alpha), number(beta)
        # without alpha nothing is multiplied: the inner dimension has no indices
        k = A.shape[1] if alpha != 0 else 0
        plan = plan_summa(
            Distribution(A.distribution.rows, replace(A.distribution.cols, n=k)),
            Distribution(replace(B.distribution.rows, n=k), B.distribution.cols),
            A.dtype,
            lookahead=lookahead,
            mover=mover,
            panel_width=panel_width,
            memory_limit=memory_limit,
        )
        layout = Distribution(A.distribution.rows, B.distribution.cols)
        if C is None:
            C = DistMatrix(np.empty(layout.local_shape(A.grid.coords), A.dtype), A.grid, layout)
            beta = 0
        ring = PanelRing(plan.slots, *plan.panel_words(A.grid.coords), A.dtype, recorder)
        said += [f"alpha={alpha}", f"beta={beta}", f"orders {A.order}{B.order}", plan]
    assert C is not None  # an error was raised on all ranks

    summa(alpha, A, B, beta, C, plan, ring, recorder, progress)
    C.report = _report(plan, C, recorder, perf_counter() - start)
    return C


def matmul(A: DistMatrix, B: DistMatrix, out: DistMatrix | None = None) -> DistMatrix:
    """A B, also as `A @ B` and `numpy.matmul(A, B)`.  Collective; see `pdgemm`."""
    return pdgemm(1.0, A, B, 0.0, out)


def _check(
    alpha: complex, A: DistMatrix, B: DistMatrix, beta: complex, C: DistMatrix | None, algorithm: str, mover: str
) -> None:
    """Everything about the arguments that this rank can see."""
    given = {"A": A, "B": B} | ({} if C is None else {"C": C})
    shapes = ", ".join(f"{name} is {_size(x)}" for name, x in given.items())
    for name, x in given.items():
        if not isinstance(x, DistMatrix):
            raise DTypeError(f"{name} is a DistMatrix, got {type(x).__name__}")
        if not x.grid.same_as(A.grid):
            raise GridError(f"A and {name} lie on different grids: {A.grid!r} and {x.grid!r}")
        if x.dtype.char not in LETTER or not x.dtype.isnative:
            raise DTypeError(f"{name} has dtype {x.dtype}; supported: float32, float64, complex64, complex128")
        if x.dtype != A.dtype:
            raise DTypeError(f"dtypes differ: A has {A.dtype}, {name} has {x.dtype}; convert one (astype, --dtype)")
        if x.local.size and max(x.local.shape) > _BLAS_INT:
            raise LayoutError(f"{name} has a local part of shape {x.local.shape}, BLAS takes up to {_BLAS_INT}")
    if A.shape[1] != B.shape[0]:
        raise LayoutError(f"inner dimensions do not agree: {shapes}, on a {A.grid} grid")
    if C is not None:
        if C.shape != (A.shape[0], B.shape[1]):
            raise LayoutError(f"C is not as high as A and as wide as B: {shapes}, on a {A.grid} grid")
        if C.distribution != Distribution(A.distribution.rows, B.distribution.cols):
            raise LayoutError(
                f"C needs the row layout of A and the column layout of B: A is {A.distribution}, "
                f"B is {B.distribution}, C is {C.distribution}, on a {A.grid} grid"
            )
        if not C.local.flags.writeable:
            raise ArgumentError("C is read-only")
        for name in ("A", "B"):
            if _overlap(C.local, given[name].local):
                raise ArgumentError(f"C shares memory with {name}")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if np.ndim(value) != 0 or not isinstance(value, (Number, np.number)):
            raise DTypeError(f"{name} is a number, got {type(value).__name__}")
        if A.dtype.kind != "c" and np.iscomplexobj(value):
            raise DTypeError(f"{name} = {value} is complex, but the matrices are {A.dtype}")
    if algorithm not in ALGORITHMS:
        raise ArgumentError(f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    if mover not in MOVERS:
        raise ArgumentError(f"mover {mover!r} is not one of {', '.join(MOVERS)}")


def _overlap(x: np.ndarray, y: np.ndarray) -> bool:
    try:
        return np.shares_memory(x, y, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return np.may_share_memory(x, y)  # only bounds: better too careful


def _size(x: object) -> str:
    return f"{x.shape[0]} x {x.shape[1]}" if isinstance(x, DistMatrix) else type(x).__name__


def _report(plan: Plan, C: DistMatrix, recorder: Recorder, seconds: float) -> Report:
    coords = C.grid.coords
    return Report(
        algorithm=plan.algorithm,
        mover=plan.mover,
        grid=C.grid.shape,
        mnk=plan.mnk,
        dtype=str(plan.dtype),
        panels=len(plan.steps),
        panel_width=max((step.width for step in plan.steps), default=0),
        lookahead=plan.lookahead,
        threads=threads(),
        rank=C.grid.rank,
        coords=coords,
        flops=plan.flops,
        seconds=seconds,
        compute_seconds=recorder.seconds.get("compute", 0.0),
        wait_seconds=recorder.seconds.get("wait", 0.0),
        pack_seconds=recorder.seconds.get("pack", 0.0),
        counted=recorder.traffic,
        predicted=plan.traffic(coords),
        extra_bytes=recorder.peak_bytes,
        predicted_extra_bytes=plan.extra_bytes(coords),
    )
