"""Measurements of a panel algorithm on one rank, such as a factorisation, beside the predictions of its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from pdgemm.instrument.report import Report
from pdgemm.support.text import sides


@dataclass(frozen=True)
class PanelReport(Report):
    """A Report of a panel algorithm; `mnk` has the rows and columns of the matrix, and the length of its diagonal.

    what : what was computed, as a formula with shapes.
    """

    what: str = ""

    @property
    def title(self) -> str:
        return f"{self.what}, {self.dtype}, on a {sides(*self.grid, 1)} grid: {self.means}"
