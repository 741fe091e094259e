"""Measurements of a panel algorithm on one rank, such as a factorisation, beside the predictions of its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from pdgemm.instrument.report import AlgorithmReport
from pdgemm.instrument.run_report import RunReport
from pdgemm.support.text import sides


@dataclass(frozen=True, kw_only=True)
class PanelReport(AlgorithmReport):
    """An AlgorithmReport of a panel algorithm.

    what  : the formula that was computed, with shapes.
    rcond : for a solution, an estimate of 1 / (|A|_1 |A^-1|_1), for the A that was factored, which `solve` may have
        scaled; else None.
    steps : the reports whose sum this report is, if several algorithms ran one after another.
    """

    what: str
    rcond: float | None = None
    steps: tuple[RunReport, ...] = ()

    @property
    def formula(self) -> str:
        return self.what

    @property
    def title(self) -> str:
        how = f" by {self.algorithm}" if self.steps else ""
        return f"{self.what}{how}, {self.dtype}, on a {sides(*self.grid, 1)} grid: {self.means}"
