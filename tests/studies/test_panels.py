"""Panels of a report: curves, bars and predictions agree with the records of a study.  Only one test needs MPI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from study_records import SIDE, TIMES, record, strong, study

from pdgemm.planning.machines.machine import Machine, on_nodes
from pdgemm.tools.studies import plot
from pdgemm.tools.studies.cases import cases, weak_shape
from pdgemm.tools.studies.curves import Section, per_node, read_all
from pdgemm.tools.studies.figures import drawing, panels
from pdgemm.tools.studies.plot import KEY, tables_of_section
from pdgemm.tools.studies.predictions import Prediction, predict

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def section(*lines: dict[str, Any], folder: Path) -> Section:
    (only,) = read_all([study(folder / "s.jsonl", *lines)]).sections
    return only


def drawn(section: Section, name: str) -> Any:
    """Return the axes of a panel."""
    from matplotlib.figure import Figure

    (panel,) = (x for x in panels(section) if x.name == name)
    axes = Figure().subplots()
    with drawing():
        panel.draw(axes)
    return axes


def line(axes: Any, label: str) -> tuple[list[float], list[float]]:
    (found,) = (x for x in axes.lines if x.get_label() == label and len(x.get_xdata()))
    return list(found.get_xdata()), list(found.get_ydata())


def texts(drawn: Any) -> list[str]:
    return [text.get_text() for text in drawn]


# ------------------------------------------------------------------ contents of panels
def test_strong_times_and_ideal_line(tmp_path: Path) -> None:
    axes = drawn(section(*strong(), folder=tmp_path), "time")
    assert line(axes, "auto") == ([1, 2, 4, 8], [8.0, 4.4, 2.5, 2.0])
    assert line(axes, "ideal") == ([1, 2, 4, 8], [8.0, 4.0, 2.0, 1.0])
    assert line(axes, "_auto, more ranks than cores") == ([8], [2.0])
    (bars,) = axes.collections[:1]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([0.9 * x, 1.2 * x]) for x in TIMES.values()]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [*axes.get_xticks()] == [1, 2, 4, 8]
    assert axes.get_xlabel() == "ranks" and axes.get_ylabel() == "time of one product [s]"


def test_strong_efficiency(tmp_path: Path) -> None:
    axes = drawn(section(*strong(times={2: 4.0, 4: 2.5, 8: 2.0}), folder=tmp_path), "efficiency")
    assert line(axes, "auto") == ([2, 4, 8], [100.0, 80.0, 50.0])  # T(2) 2 / (T(p) p)
    assert line(axes, "ideal")[1] == pytest.approx([100] * 3)
    assert axes.get_ylim()[0] == 0
    ideal = line(drawn(section(*strong(times={2: 4.0, 8: 2.0}), folder=tmp_path), "time"), "ideal")
    assert ideal == ([2, 8], [4.0, 1.0])


def test_weak_study_is_relative_to_the_rate_per_rank(tmp_path: Path) -> None:
    wanted = cases("weak", [(256, 256, 256)], [1, 4, 16])
    assert [case.mnk[0] for case in wanted] == [256, 512, 1024]
    found = section(*(record(case, seconds) for case, seconds in zip(wanted, (1.0, 2.5, 8.0))), folder=tmp_path)
    # flops per rank are 1, 2, 4 times those of one rank
    assert line(drawn(found, "efficiency"), "auto")[1] == pytest.approx([100, 80, 50])
    assert line(drawn(found, "time"), "ideal")[1] == pytest.approx([1, 2, 4])


def test_ideal_starts_at_the_fastest_of_equal_shapes(tmp_path: Path) -> None:
    found = section(*strong(), *strong("summa", {1: 6.0, 2: 5.0}), folder=tmp_path)
    axes = drawn(found, "time")
    assert [curve.label for curve in found.curves] == ["auto", "summa"]
    assert line(axes, "ideal") == ([1, 2, 4, 8], [6.0, 3.0, 1.5, 0.75])
    styles = {(x.get_color(), x.get_marker()) for x in axes.lines if x.get_label() in ("auto", "summa")}
    assert len({color for color, _ in styles}) == len({marker for _, marker in styles}) == 2


def test_words_over_their_bound_and_the_fraction_of_peak(tmp_path: Path) -> None:
    found = section(*strong(), folder=tmp_path)
    axes = drawn(found, "words")
    ranks, ratios = line(axes, "auto")
    assert ranks == [1, 2, 4, 8] and np.isnan(ratios[0]) and ratios[1:] == pytest.approx([1.25] * 3)
    assert line(axes, "lower bound") == ([1, 2, 4, 8], [1] * 4) and axes.get_ylim()[0] == 0
    for x in found.points[1:]:  # for a cube: 3 (N^3/P)^(2/3) - 3 N^2/P
        bound = 3 * SIDE**2 * (x.ranks ** (-2 / 3) - 1 / x.ranks)
        assert Prediction(x.case, 1.0, x.words).over_bound == pytest.approx(x.words / bound)
    assert line(drawn(found, "fraction"), "auto")[1] == pytest.approx([95, 94, 92, 88])
    assert line(drawn(found, "fraction"), "measured peak")[1] == [100] * 4


def test_split_of_the_time(tmp_path: Path) -> None:
    axes = drawn(section(*strong(times={1: 8.0, 2: 4.4}), folder=tmp_path), "split")
    bars, left = (
        {bars.get_label(): [getattr(bar, f"get_{side}")() for bar in bars] for bars in axes.containers}
        for side in ("width", "x")
    )
    shares = {"compute": 0.6, "wait for data": 0.1, "wait for ranks": 0.02, "pack": 0.04, "redistribution": 0.06,
              "rest": 0.08}  # fmt: skip  # fractions; the median is 0.9
    for name, share in shares.items():
        assert bars.pop(name) == pytest.approx([100 * share / 0.9] * 2), name
    (hidden,) = bars  # its bar ends where the bar of waits begins
    assert bars[hidden] == pytest.approx([100 * 0.3 / 0.9] * 2)
    assert [x + y for x, y in zip(left[hidden], bars[hidden])] == pytest.approx(left["wait for data"])
    # medians, as in the panel of times
    assert texts(axes.texts) == [f"{seconds} s, 75% of transfers hidden" for seconds in ("8.0", "4.4")]
    assert texts(axes.get_yticklabels()) == ["auto, 1 rank", "auto, 2 ranks"]


def test_records_without_the_waits_for_ranks(tmp_path: Path) -> None:
    (old,) = strong(times={2: 4.0})
    del old["product"]["per_rank"]["sync_seconds"]
    (point,) = section(old, folder=tmp_path).points
    assert point.parts["wait for data"] == pytest.approx(0.12 * 4) and point.parts["wait for ranks"] == 0


def test_shapes_are_curves(tmp_path: Path) -> None:
    found = section(*(record(case, 1.0) for case in cases("shapes", [(64, 64, 64)], [1, 2])), folder=tmp_path)
    fraction, words = drawn(found, "fraction"), drawn(found, "words")
    for name in ("square", "large k", "large m", "flat"):
        assert line(fraction, name) == ([1, 2], pytest.approx([95, 94]))
        (alone, shared) = line(words, name)[1]  # one rank receives nothing
        assert np.isnan(alone) and shared == pytest.approx(1.25)
    assert texts(drawn(found, "split").get_yticklabels())[:2] == ["square, 1 rank", "square, 2 ranks"]


def test_other_settings_are_other_curves(tmp_path: Path) -> None:
    first = study(tmp_path / "a.jsonl", *strong(times={1: 8.0, 2: 4.0}))
    second = study(tmp_path / "b.jsonl", *strong(times={1: 4.0, 4: 2.0}, threads_per_rank=[2], nodes=["other"]))
    found = read_all([first, second])
    (only,) = found.sections
    assert [curve.label for curve in only.curves] == ["1 thread per rank", "2 threads per rank"]
    assert [[x.ranks for x in curve.points] for curve in only.curves] == [[1, 2], [1, 4]]
    assert any("threads per rank (1; 2)" in note for note in found.notes)
    again = study(tmp_path / "c.jsonl", *strong(times={1: 7.0}))
    (curve, _) = read_all([first, second, again]).sections[0].curves
    assert [x.seconds for x in curve.points] == [7.0, 4.0]  # of equal dates, the later file
    ideal = [x for x in drawn(only, "time").lines if x.get_label() in ("ideal", "_ideal")]
    assert [x.get_ydata()[0] for x in ideal] == [4.0, 8.0]


def test_single_point(tmp_path: Path) -> None:
    (one,) = strong(times={4: 2.0})
    one["confidence"] = None
    assert [panel.name for panel in panels(section(one, folder=tmp_path))] == ["fraction", "words", "split"]
    plot.report([tmp_path / "s.jsonl"], tmp_path / "r.html", None, 8)


# ------------------------------------------------------------------ predictions
def predicted(found: Section, to: int, machine: Machine | None = None) -> list[Any]:
    """Predict the curves of a section up to `to` ranks; return the predictions."""
    nodes = per_node(found.points)
    for curve in found.curves:
        curve.forecast = predict(curve.case, [x.ranks for x in curve.points], to, machine, nodes)
    return [curve.forecast for curve in found.curves]


def test_predictions_are_marked_and_go_beyond(tmp_path: Path) -> None:
    found = section(*strong(), folder=tmp_path)
    assert len(drawn(found, "time").patches) == 0  # no predictions, no shaded part
    (ahead,) = predicted(found, 64, Machine())
    axes = drawn(found, "time")
    ranks, seconds = line(axes, "_auto, predicted")
    assert ranks == [1, 2, 4, 8, 16, 32, 64] and seconds == [x.seconds for x in ahead.predictions]
    (broken,) = (x for x in axes.lines if x.get_label() == "_auto, predicted")
    assert broken.get_linestyle() != "-" and broken.get_marker() == "None"
    assert "predicted" in axes.get_legend_handles_labels()[1]
    (shaded,) = (x for x in axes.patches if x.get_label() == "beyond measurements")
    assert 8 < shaded.get_x() < 16 and shaded.get_x() + shaded.get_width() > 64
    _, efficiency = line(drawn(found, "efficiency"), "_auto, predicted")
    assert efficiency == pytest.approx([100 * seconds[0] / (p * x) for p, x in zip(ranks, seconds)])
    _, words = line(drawn(found, "words"), "_auto, predicted")
    assert np.isnan(words[0]) and words[1:] == [x.over_bound for x in ahead.predictions][1:]
    assert "_auto, predicted" not in [x.get_label() for x in drawn(found, "fraction").lines]


def test_predictions_of_weak_cases_grow_with_the_ranks() -> None:
    (case,) = cases("weak", [(100, 200, 300)], [2])
    forecast: Any = predict(case, [2], 8, Machine(), 8)
    assert [x.case.mnk for x in forecast.predictions] == [weak_shape((100, 200, 300), p) for p in (2, 4, 8)]


def test_nodes_hold_as_many_ranks_as_they_have_cores_for(tmp_path: Path) -> None:
    found = section(*strong(), folder=tmp_path)  # measured on up to 8 ranks, 4 of which have cores
    assert per_node(found.points) == 4
    (ahead,) = predicted(found, 64, Machine())
    assert ahead.machine == on_nodes(Machine(), 4) and ahead.guessed and ahead.calibrated
    assert not predicted(found, 64, on_nodes(Machine(), 2))[0].guessed
    assert not predicted(found, 64)[0].calibrated


def test_cases_without_predictions(tmp_path: Path) -> None:
    (case,) = cases("strong", [(64, 64, 64)], [2], algorithms=["cannon"], device="cuda")
    assert predict(case, [2], 8, Machine(), 2) is None
    (case,) = cases("strong", [(4096,) * 3], [64], memory_limit=10)
    assert predict(case, [64], 64, Machine(), 2) is None


@jobs.needs_mpiexec
def test_predictions_equal_the_plan_of_the_run(tmp_path: Path) -> None:
    machine = Machine(name="a measured one")
    (tmp_path / "m.json").write_text(machine.as_json())
    arguments = ["strong", "--shape", "96,80,1100", "--ranks", "1,2", "--repeats", "1", "--machine", "m.json"]
    many = [x for name in ("auto", "cannon", "2.5d") for x in ("--algorithm", name)]
    jobs.pdgemm(2, "scaling", *arguments, *many, "--out", "s.jsonl", cwd=tmp_path, OMP_NUM_THREADS="1")
    found = read_all([tmp_path / "s.jsonl"]).sections[0]
    assert len(found.points) >= 5
    for curve in found.curves:
        forecast: Any = predict(curve.case, [x.ranks for x in curve.points], 2, machine, 2)
        for point, x in zip(curve.points, forecast.predictions, strict=True):
            assert x.seconds == pytest.approx(point.record["product"]["predicted_seconds"], rel=1e-12)
            assert x.words == point.words


def test_key_figures_are_of_the_fastest_product_of_each_curve(tmp_path: Path) -> None:
    found = section(*strong(), *strong("summa", {1: 8.0, 2: 4.0, 4: 8.0}), folder=tmp_path)
    table, _ = tables_of_section(found).values()
    assert [row[-1] for row in table.rows] == ["-", "-"]
    ahead = predicted(found, 8, Machine())
    table, _ = tables_of_section(found).values()
    errors = [100 * (ahead[0].predictions[3].seconds / 2.0 - 1), 100 * (ahead[1].predictions[1].seconds / 4.0 - 1)]
    assert [dict(zip(table.columns, row)) for row in table.rows] == [
        dict(zip(KEY, (label, ranks, "1024 x 1024 x 1024", "summa", grid, *figures, "1.250", f"{error:+.0f}")))
        for label, ranks, grid, figures, error in (
            ("auto", "8*", "1 x 8", ("2.0 s", "1.074", "88", "50"), errors[0]),
            ("summa", "2", "1 x 2", ("4.0 s", "0.5369", "94", "100"), errors[1]),
        )
    ]
