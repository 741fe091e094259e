"""The LU factorisation of a matrix with partial pivoting, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter

import numpy as np

from pdgemm.arrays import dtypes
from pdgemm.matrix.argument_checks import check_dtype, check_matrices, check_result, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.panel_algorithms.lu_panels import LU as Panels
from pdgemm.panel_algorithms.panel_run import can_read, run, working_copy
from pdgemm.panel_schedules.lu_schedule import LUSchedule
from pdgemm.panel_schedules.panel_schedule import is_balanced
from pdgemm.panel_schedules.row_moves import permutation
from pdgemm.support.agreement import together

BLOCK = 128


@dataclass(frozen=True)
class LU:
    LU: DistMatrix
    pivots: np.ndarray
    zero_pivot: int

    @cached_property
    def perm(self) -> np.ndarray:
        return permutation(self.pivots, self.LU.shape[0])


def lu_factor(A: DistMatrix, *, overwrite_a: bool = False) -> LU:
    start = perf_counter()
    with together(communicator(A=A)) as arguments:
        check_matrices(A=A)
        check_dtype("A", A, dtypes.BLAS)
        if overwrite_a:
            check_result("A", A, {})
        fits = is_balanced(A.layout_in(A.grid), BLOCK)
        arguments += ["lu_factor", bool(overwrite_a), A.distribution, A.dtype, A.order]
    W, moves = working_copy(A, BLOCK, fits, overwrite_a, "C")  # rows that are exchanged lie together
    schedule = LUSchedule(W.layout_in(W.grid), BLOCK, can_read(W))
    m, n = A.shape
    pivots = np.zeros(min(m, n), np.int64)
    executor = partial(Panels, pivots=pivots)
    zero, report = run(
        schedule,
        executor,
        {"A": W},
        f"LU factors of a matrix ({m} x {n})",
        moves,
        start,
        lambda plan: replace(plan, pivots=tuple(pivots.tolist())),
    )
    W.report = report
    return LU(W, pivots, zero)
