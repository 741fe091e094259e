"""The report of a function that works in steps: the sum of what its products, factorisations and moves report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from pdgemm.instrument.panel_report import PanelReport
from pdgemm.instrument.qr_report import QRReport
from pdgemm.instrument.report import AlgorithmReport
from pdgemm.instrument.run_report import MoveReport, summed
from pdgemm.names import AnyName

Result = TypeVar("Result")


class Steps:
    """What a function does, one step after another.

        steps = Steps(what="Solution of A X = B")
        Y = steps.did(forward(L, B))
        return steps.reported(steps.did(backward(U, Y)))

    changes : fields of the report that are no sums.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes, self.start, self._reports = changes, perf_counter(), list[Callable[[], Any]]()

    def did(self, result: Result) -> Result:
        """Keep the report of the matrix that a step returned, and return it; an array has no report."""
        report: Any = getattr(result, "later_report", None)
        if report is not None:
            self._reports.append(report if callable(report) else lambda: report)
        return result

    def add(self, steps: Steps) -> None:
        """Keep the steps of a part of the work as one step."""
        if steps._reports:
            self._reports.append(partial(total, steps.reports, perf_counter() - steps.start, **steps._changes))

    def reported(self, result: Result, **changes: Any) -> Result:
        """Let the report of a matrix be that of all steps, and return it; an array has none."""
        if self._reports and hasattr(result, "later_report"):
            seconds = perf_counter() - self.start
            result.report = partial(total, self.reports, seconds, **self._changes | changes)  # type: ignore[attr-defined]
        return result

    @property
    def reports(self) -> tuple[Callable[[], Any], ...]:
        """Functions that make the reports of the steps so far."""
        return tuple(self._reports)

    def after(self, report: Any) -> Callable[[], QRReport]:
        """Return a function that makes a report to which the sums of these steps are added."""
        reports = self.reports
        return lambda: report.after([make() for make in reports])


def total(steps: Sequence[Callable[[], Any]], seconds: float, **changes: Any) -> AlgorithmReport:
    """Return the sum of the reports that these functions make: a PanelReport, or of products alone a Report.

    seconds : of all steps.   changes : other fields; with `what` it is a PanelReport of any steps.
    What is no sum, such as the grid, is that of the first panel algorithm, or of the first product if there is none.
    """
    reports = [step() for step in steps]
    algorithms = [x for x in reports if isinstance(x, AlgorithmReport)]
    first = next((x for x in algorithms if isinstance(x, PanelReport)), algorithms[0])
    moves = [(x,) if isinstance(x, MoveReport) else getattr(x, "moves", ()) for x in reports]
    values = summed(reports) | {
        "seconds": seconds,
        "panels": sum(x.panels for x in algorithms),
        "predicted_seconds": sum(x.predicted_seconds for x in algorithms),
        "lower_bound_words": 0.0,  # the sum of the steps' is none of what they do together
        "moves": sum(moves, ()),
    }
    if "what" not in changes and not isinstance(first, PanelReport):
        return first.changed(**values | changes)
    shared = {x.name: getattr(first, x.name) for x in fields(PanelReport) if hasattr(first, x.name)}
    values |= {"algorithm": AnyName(" + ".join(x.algorithm for x in algorithms)), "steps": tuple(reports)}
    return PanelReport(**shared | values | changes).with_ranks(first._comm)
