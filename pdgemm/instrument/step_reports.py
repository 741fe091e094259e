"""The report of a function that works in steps: the sum of what its products, factorisations and moves report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from pdgemm.instrument.panel_report import PanelReport
from pdgemm.instrument.qr_report import QRReport
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.report import MoveReport, Report
from pdgemm.names import AnyName

Result = TypeVar("Result")
_SUMS = (
    "panels", "predicted_seconds", "compute_seconds", "wait_seconds", "pack_seconds", "sync_seconds",
    "hidden_seconds",
)  # fmt: skip


class Steps:
    """What a function does, one step after another.

        steps = Steps(what="Solution of A X = B")
        Y = steps.did(forward(L, B))
        return steps.reported(steps.did(backward(U, Y)))

    changes : fields of the report that are no sums.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes, self.start, self._made = changes, perf_counter(), list[Callable[[], Any]]()

    def did(self, result: Result) -> Result:
        """Keep the report of the matrix that a step returned, and return it; an array has no report."""
        made: Any = getattr(result, "later_report", None)
        if made is not None:
            self._made.append(made if callable(made) else lambda: made)
        return result

    def add(self, steps: Steps) -> None:
        """Keep the steps of a part of the work as one step."""
        if steps._made:
            self._made.append(partial(total, steps.made, perf_counter() - steps.start, **steps._changes))

    def reported(self, result: Result, **changes: Any) -> Result:
        """Let the report of a matrix be that of all steps, and return it; an array has none."""
        if self._made and hasattr(result, "later_report"):
            seconds = perf_counter() - self.start
            result.report = partial(total, self.made, seconds, **self._changes | changes)  # type: ignore[attr-defined]
        return result

    @property
    def made(self) -> tuple[Callable[[], Any], ...]:
        """Functions that make the reports of the steps so far."""
        return tuple(self._made)

    def after(self, report: Any) -> Callable[[], QRReport]:
        """Return a function that makes a report to which the flops and the words of these steps are added."""
        made = (lambda: report, *self._made)

        def added() -> QRReport:
            flops, counted, predicted = summed([make() for make in made])
            return replace(report, flops=flops, counted=counted, predicted=predicted)

        return added


def summed(reports: Sequence[Any]) -> tuple[int, Traffic, Traffic]:
    """Return the flops of all ranks, and this rank's words and messages, counted and predicted; of moves no flops."""
    flops = sum(getattr(x, "flops", 0) for x in reports)
    return flops, sum((x.counted for x in reports), Traffic()), sum((x.predicted for x in reports), Traffic())


def total(steps: Sequence[Callable[[], Any]], seconds: float, **changes: Any) -> Report:
    """Return the sum of the reports that these functions make; buffers are those of the step with the largest ones.

    seconds : of all steps.   changes : other fields.
    What is no sum, such as the grid, is that of the first step that is no redistribution.
    """
    reports = [step() for step in steps]
    first = next(x for x in reports if isinstance(x, Report))
    flops, counted, predicted = summed(reports)
    fields = {name: sum(getattr(x, name, 0) for x in reports) for name in _SUMS} | {
        "flops": flops,
        "seconds": seconds,
        "counted": counted,
        "predicted": predicted,
        "extra_bytes": max(getattr(x, "extra_bytes", 0) for x in reports),
        "predicted_extra_bytes": max(getattr(x, "predicted_extra_bytes", 0) for x in reports),
        "lower_bound_words": 0.0,  # the sum of the steps' is none of what they do together
        "moves": tuple(move for x in reports for move in ((x,) if isinstance(x, MoveReport) else x.moves)),
    }
    if isinstance(first, PanelReport):
        done = [str(x.algorithm) for x in reports if isinstance(x, Report)]
        fields |= {"algorithm": AnyName(" + ".join(done)), "steps": tuple(reports)}
    return first.changed(**fields | changes)
