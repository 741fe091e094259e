"""The report of a function that works in steps: the sum of the reports of its products, factorisations and moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from pdgemm.instrument.report import OF_PRODUCTS, Report
from pdgemm.instrument.run_report import VectorTraffic, summed, vectors_so_far
from pdgemm.names import AnyName

Result = TypeVar("Result")


class Steps:
    """The steps of a function, one after another, their reports, and the traffic of the function's reductions.

    A function creates its Steps before its first reduction.

        steps = Steps(what="Solution of A X = B")
        Y = steps.did(forward(L, B))
        return steps.reported(steps.did(backward(U, Y)))

    changes : values of the fields of the report that are not sums.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes, self.start, self._reports = changes, perf_counter(), list[Callable[[], Any]]()
        self._vectors = vectors_so_far()

    def did(self, result: Result) -> Result:
        """Record the report of the matrix that a step returned, and return the matrix; an array has no report."""
        self.ran(getattr(result, "later_report", None))
        return result

    def ran(self, report: Any) -> None:
        """Record the report of a step, or the function that makes the report; None: there is none."""
        if report is not None:
            self._reports.append(report if callable(report) else lambda: report)

    def add(self, steps: Steps) -> None:
        """Record the steps of a part of the work as one step."""
        if steps._reports:
            seconds = perf_counter() - steps.start
            self._reports.append(partial(total, steps.reports, steps.vectors, seconds, **steps._changes))

    def reported(self, result: Result, **changes: Any) -> Result:
        """Set the report of a matrix to the report of all steps, and return the matrix; an array gets no report."""
        if self._reports and hasattr(result, "later_report"):
            seconds = perf_counter() - self.start
            changes = self._changes | changes
            result.report = partial(total, self.reports, self.vectors, seconds, **changes)  # type: ignore[attr-defined]
        return result

    @property
    def reports(self) -> tuple[Callable[[], Any], ...]:
        """Functions that return the reports of the steps so far."""
        return tuple(self._reports)

    @property
    def vectors(self) -> VectorTraffic:
        """The traffic of all reductions since the Steps were created, including those of the steps."""
        return vectors_so_far() - self._vectors

    def after(self, report: Any) -> Callable[[], Any]:
        """Return a function that returns `report` with the sums of the steps so far added to it.

        report : of an algorithm that ran between the steps, or a function that returns such a report.
        """
        reports, vectors = self.reports, self.vectors
        return lambda: (report() if callable(report) else report).after([make() for make in reports], vectors)


def total(steps: Sequence[Callable[[], Any]], vectors: VectorTraffic, seconds: float, **changes: Any) -> Report:
    """Return the sum of the reports that `steps` return.

    If all steps are products, and `changes` does not contain `what`, the sum is the report of a product.
    vectors : traffic of all reductions, including those of the steps.   seconds : time of all steps.
    changes : values of other figures.
    Figures that are not sums, such as the grid, are those of the first algorithm that is not a product; if all
    algorithms are products, they are those of the first product.
    """
    reports = [step() for step in steps]
    algorithms = [x for x in reports if isinstance(x, Report)]
    first = next((x for x in algorithms if hasattr(x, "what")), algorithms[0])
    moves = [(x,) if hasattr(x, "target") else getattr(x, "moves", ()) for x in reports]
    values = summed(reports, vectors) | {
        "seconds": seconds,
        "panels": sum(x.panels for x in algorithms),
        "predicted_seconds": sum(x.predicted_seconds for x in algorithms),
        "lower_bound_words": 0.0,  # the sum of the bounds of the steps is not a bound of the whole function
        "moves": sum(moves, ()),
    }
    if "what" not in changes and not hasattr(first, "what"):
        return first.changed(**values | changes)
    shared = {name: value for name, value in first.figures.items() if name not in OF_PRODUCTS}
    names = dict.fromkeys(x.algorithm for x in algorithms)
    values |= {"algorithm": AnyName(" + ".join(names)), "steps": tuple(reports)}
    return Report(comm=first._comm, **{"rcond": None} | shared | values | changes)
