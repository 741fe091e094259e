"""Measurements of a panel algorithm on one rank, such as a factorisation, beside the predictions of its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdgemm.instrument.report import Report
from pdgemm.support.text import in_words, sides


@dataclass(frozen=True)
class PanelReport(Report):
    """A Report of a panel algorithm; `mnk` has the rows and columns of the matrix, and the length of its diagonal.

    what  : what was computed, as a formula with shapes.
    rcond : of a solution an estimate of 1 / (|A|_1 |A^-1|_1), else None.
    steps : the reports of which this is the sum, where several algorithms ran, one after another.
    """

    what: str = ""
    rcond: float | None = None
    steps: tuple[Any, ...] = ()

    @property
    def title(self) -> str:
        how = f" by {self.algorithm}" if self.steps else ""
        return f"{self.what}{how}, {self.dtype}, on a {sides(*self.grid, 1)} grid: {self.means}"

    def beside_bound(self, per_rank: dict[str, dict[str, float]]) -> str:
        """Return the lower bound as the end of a sentence, where one is known."""
        return f"; lower bound {in_words(self.lower_bound_words)}" if self.lower_bound_words else ""
