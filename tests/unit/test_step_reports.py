"""The report of a function of several steps is the sum of the reports of its steps, of any kinds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.instrument.report import Report
from pdgemm.instrument.run_report import RunReport, report_of_move
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.tall_qr import text_of_qr

OF_ALGORITHMS = {
    "mover": "ring", "grid": (2, 3), "dtype": "float64", "panel_width": 8, "lookahead": 1, "coords": (0, 1),
    "predicted_seconds": 0.5, "lower_bound_words": 10.0, "threads": 1, "blas": "", "device": "", "ranks_per_device": 1,
    "moves": (),
}  # fmt: skip
OF_PRODUCT = dict.fromkeys(("collective", "compute", "epilogue", "result_dtype"), "") | {"operands": ("A", "B")}
OF_QR = {"method": "tsqr", "shape": (9, 3), "dtype": "d", "passes": 0, "departure": 0.0, "shift": 0, "moves": ()}
KINDS: dict[str, tuple[Callable[..., RunReport], dict[str, Any]]] = {
    "move": (report_of_move, {"name": "A", "source": "here", "target": "there"}),
    "work": (RunReport.of_work, {}),
    "qr": (RunReport.of_work, {"text": text_of_qr, **OF_QR}),
    "product": (
        Report.of_work,
        OF_ALGORITHMS | OF_PRODUCT | {"algorithm": "summa", "panels": 3, "inside": "", "layers": 1, "mnk": (4, 5, 6)},
    ),
    "panels": (
        Report.of_work,
        OF_ALGORITHMS | {"algorithm": "lu", "panels": 4, "grid": (3, 2), "what": "Factors", "rcond": None, "steps": ()},
    ),
}


def reported(kind: str, words: int, flops: int = 0, **others: Any) -> Any:
    """Return the report of rank 1 of a run of two schedules, each with these words, as many bytes, and these flops."""
    schedule = SimpleNamespace(
        traffic=lambda rank: Traffic(words_received=words * rank, messages_received=1),
        extra_bytes=lambda rank: words * rank,
        flops=flops,
    )
    recorder = Recorder({"compute": 2.0, "wait": 1.0, "sync": 0.5})
    for _ in range(2 * words):
        recorder.traffic.received(1)
    recorder.traffic.messages_received = 2
    recorder.hold(words)
    grid: Any = SimpleNamespace(rank=1, comm=None)
    of_run, figures = KINDS[kind]
    return of_run(recorder, [schedule, schedule], grid, 3.0, **figures | others)


def result_of(*steps: RunReport, **changes: Any) -> Any:
    """Return the report of a function with these steps."""
    done = Steps(**changes)
    for step in steps:
        done.did(SimpleNamespace(later_report=step))
    result = done.reported(SimpleNamespace(later_report=None))
    return result.report()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_counted_and_predicted_figures_of_a_run(kind: str) -> None:
    report = reported(kind, 7, 100)
    assert report.counted == report.predicted == Traffic(words_received=14, messages_received=2)
    assert (report.rank, report.seconds, report.extra_bytes, report.predicted_extra_bytes) == (1, 3.0, 7, 7)
    assert report.as_predicted and not report.changed(extra_bytes=8).as_predicted
    assert pickle.loads(pickle.dumps(report)) == report and str(report)
    json.dumps(report.as_dict())
    if kind != "move":
        phases = [getattr(report, f"{name}_seconds") for name in ("compute", "wait", "sync", "pack", "hidden")]
        assert (report.flops, *phases) == (200, 2.0, 1.5, 0.5, 0.0, 0.0)
    else:
        assert "flops" not in report.as_dict()


def test_a_sequence_that_has_a_product() -> None:
    product, factors, move = reported("product", 5, 1000), reported("panels", 7, 100), reported("move", 90)
    for steps in ([product, move, factors], [factors, move, product], [product, move]):
        total = result_of(*steps, what="Solution")
        assert (
            type(total) is Report
            and not hasattr(total, "mnk")
            and total.what == "Solution"
            and total.steps == tuple(steps)
        )
        assert total.algorithm == " + ".join(x.algorithm for x in steps if x is not move)
        assert total.grid == ((3, 2) if factors in steps else (2, 3)) and total.moves == (move,)
        assert total.counted.words_received == 2 * sum(x.extra_bytes for x in steps) and total.as_predicted
        assert total.flops == sum(x.flops for x in steps if x is not move) and total.extra_bytes == 90
        assert total.compute_seconds == 2.0 * (len(steps) - 1)  # except the redistribution
        assert f"Solution by {total.algorithm}, float64, on a {total.grid[0]} x" in total.title
        assert result_of(total, product, what="More").counted == Traffic() + total.counted + product.counted


def test_several_products_are_reported_as_one() -> None:
    product = reported("product", 5, 1000)
    both = result_of(product, product, mnk=(4, 5, 12))
    assert (
        type(both) is Report
        and not hasattr(both, "what")
        and both.title.startswith("C (4 x 5) := A (4 x 12) B")
        and both.panels == 6
    )


def test_steps_that_are_added_to_a_report() -> None:
    steps, qr = Steps(), reported("qr", 5, 100)
    for step in (reported("product", 9, 1), reported("move", 3)):
        steps.did(SimpleNamespace(later_report=step))
    more = steps.after(qr)()
    assert (more.method, more.seconds, more.flops, more.extra_bytes, more.moves) == ("tsqr", 3.0, 202, 9, ())
    assert more.counted == more.predicted and more.counted.words_received == 34
    assert np.isclose(more.compute_seconds, 4.0)
    with pytest.raises(ArgumentError, match="came from another process"):
        reported("panels", 3).summary()
