"""The plan of the checksums that protect a product: their buffers, words and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdgemm.instrument.check_report import Checks
from pdgemm.planning.problem import Problem
from pdgemm.schedules.schedule import Buffers


@dataclass(frozen=True)
class ChecksumPlan:
    """The plan of checksums of the rows of C: is C x = alpha A (B x) + beta C x?  See `algorithms/protection`."""

    problem: Problem

    def buffers(self, rank: int | None) -> Buffers:
        """Return the checksum vectors of a rank, and the copy of C on entry with which a product is repeated.

        For rank None, return the largest sizes of any rank.
        """
        problem, (m, _, k) = self.problem, self.problem.mnk
        dtype = np.dtype(np.int64) if problem.accumulate.kind in "iu" else problem.accumulate
        (rows, cols), entry = problem.C.local_shape(rank), not problem.beta_is_zero
        own = sum(x.local_shape(rank)[0] for x in (problem.B, problem.A)) + entry * rows
        norms, sizes = self._rounding
        workspace = {"B x": (k, dtype), "own": (own, dtype), "C x": (m, dtype)}
        workspace |= {"norms": (norms, np.dtype(np.float64)), "sizes": (sizes, np.dtype(np.float64))}
        if entry and problem.protect == "repair":
            workspace["C on entry"] = rows * cols, problem.C.dtype
        return workspace

    def cost(self, rank: int | None) -> Checks:
        """Return the cost of the checksums of one run: all-reduces of B x, norms, sizes, C x and the verdict."""
        m, _, k = self.problem.mnk
        some = k, *self._rounding  # lengths of the all-reduced vectors; empty ones are skipped
        memory = sum(n * dtype.itemsize for n, dtype in self.buffers(rank).values())
        return Checks(sum(some) + m + 2, 2 + sum(x > 0 for x in some), memory)

    @property
    def _rounding(self) -> tuple[int, int]:
        """The lengths of the vectors from which tolerances are computed; 0 for integers, which are not rounded.

        They are "norms", of the rows of B and of C on entry, and "sizes", of the rows of A B.
        """
        problem, (m, _, k) = self.problem, self.problem.mnk
        rounded = problem.accumulate.kind not in "iu"
        return rounded * (k + (not problem.beta_is_zero) * m), rounded * (k > 0) * m

    @property
    def seconds(self) -> float:
        """The predicted time of the checksums, which read A, B and C once."""
        return sum(x.local_bytes(None) for x in self.problem.layouts) / self.problem.machine.copy_bandwidth
