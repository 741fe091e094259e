"""`pdgemm plot`: are the figures true to the records, and the report to the figures?  Without MPI, but for one run."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from bs4 import BeautifulSoup
from jobs import pdgemm
from study_records import SIDE, TIMES, record, strong, study

from pdgemm.errors import ArgumentError, FileError, PdgemmError
from pdgemm.planning.machines.machine import Machine, on_nodes
from pdgemm.planning.machines.simulator import MOST_PAIRED, words_between
from pdgemm.planning.question import Question
from pdgemm.support.text import in_bytes, in_seconds
from pdgemm.tools.profiling.profile import OUTSIDE, PHASES, TRAINING, About, Profile, Rank, Spent
from pdgemm.tools.studies import pictures, plot, records
from pdgemm.tools.studies.cases import cases, weak_shape
from pdgemm.tools.studies.curves import Section, per_node, read_all
from pdgemm.tools.studies.figures import drawing
from pdgemm.tools.studies.page import KEY, Drawn, command_of_record
from pdgemm.tools.studies.panels import Forecast, panels
from pdgemm.tools.studies.pictures import SPANS
from pdgemm.tools.studies.predictions import predict

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
MACHINE = json.loads(Machine(name="a measured one").as_json())


def section(*lines: dict[str, Any], folder: Path) -> Section:
    (only,) = read_all([study(folder / "s.jsonl", *lines)]).sections
    return only


def drawn(section: Section, name: str, forecast: Forecast | None = None) -> Any:
    """The axes of a panel."""
    from matplotlib.figure import Figure

    (panel,) = (x for x in panels(section, forecast or {}) if x.name == name)
    axes = Figure().subplots()
    with drawing():
        panel.draw(axes)
    return axes


def line(axes: Any, label: str) -> tuple[list[float], list[float]]:
    (found,) = (x for x in axes.lines if x.get_label() == label and len(x.get_xdata()))
    return list(found.get_xdata()), list(found.get_ydata())


def plotted(*arguments: object, cwd: Path) -> jobs.Finished:
    """`pdgemm plot ARGUMENTS`, finished."""
    return pdgemm(0, "plot", *map(str, arguments), "--predict-to", "8", cwd=cwd)


class Page:
    """Text and cells of a page, which loads and runs nothing; every element has its end."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        page = BeautifulSoup(text, "html.parser")
        assert page.find_all(["script", "link", "iframe", "img", "object", "embed", "base"]) == []
        assert "url(http" not in text and "@import" not in text
        for name in ("src", "href", "xlink:href"):
            assert all(str(x[name]).startswith("#") for x in page.find_all(attrs={name: True}))
        ends = Counter((x or alone).lower() for x, alone in re.findall(r"</(\w+)>|<(\w+)[^<>]*/>", text))
        assert Counter(x.name for x in page.find_all() if x.name not in ("meta", "br")) == ends
        names = [str(x["id"]) for x in page.find_all(id=True)]
        assert len({*names}) == len(names)
        self.text = page.get_text()
        self.rows = [[cell.get_text() for cell in row.find_all(["td", "th"])] for row in page.find_all("tr")]


# ------------------------------------------------------------------ what is drawn
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
    assert line(axes, "ideal") == ([2, 4, 8], [100] * 3)
    assert axes.get_ylim()[0] == 0
    axes = drawn(section(*strong(times={2: 4.0, 8: 2.0}), folder=tmp_path), "time")
    assert line(axes, "ideal") == ([2, 8], [4.0, 1.0])


def test_weak_study_is_relative_to_the_rate_per_rank(tmp_path: Path) -> None:
    wanted = cases("weak", [(256, 256, 256)], [1, 4, 16])
    assert [case.mnk[0] for case in wanted] == [256, 512, 1024]
    found = section(*(record(case, seconds) for case, seconds in zip(wanted, (1.0, 2.5, 8.0))), folder=tmp_path)
    # flops per rank are 1, 2, 4 times those of one rank
    assert line(drawn(found, "efficiency"), "auto")[1] == pytest.approx([100, 80, 50])
    assert line(drawn(found, "time"), "ideal")[1] == pytest.approx([1, 2, 4])
    rate = 2 * 256**3 / 1e9
    axes = drawn(found, "rate")
    assert line(axes, "auto")[1] == pytest.approx([rate, 0.8 * rate, 0.5 * rate])
    assert line(axes, "ideal")[1] == pytest.approx([rate] * 3)


def test_ideal_starts_at_the_fastest_of_equal_shapes(tmp_path: Path) -> None:
    found = section(*strong(), *strong("summa", {1: 6.0, 2: 5.0}), folder=tmp_path)
    axes = drawn(found, "time")
    assert [curve.label for curve in found.curves] == ["auto", "summa"]
    assert line(axes, "ideal") == ([1, 2, 4, 8], [6.0, 3.0, 1.5, 0.75])
    styles = {(x.get_color(), x.get_marker()) for x in axes.lines if x.get_label() in ("auto", "summa")}
    assert len({color for color, _ in styles}) == len({marker for _, marker in styles}) == 2


def test_words_beside_their_bound_and_the_fraction_of_peak(tmp_path: Path) -> None:
    found = section(*strong(), folder=tmp_path)
    axes = drawn(found, "words")
    ranks, words = line(axes, "auto")
    assert ranks == [1, 2, 4, 8] and np.isnan(words[0]) and words[1:] == [2000, 4000, 8000]
    ranks, bound = line(axes, "lower bound")
    assert ranks == [2, 4, 8]  # cubes: 3 (N^3/P)^(2/3) - 3 N^2/P
    assert bound == pytest.approx([3 * SIDE**2 * (p ** (-2 / 3) - 1 / p) for p in ranks])
    assert [text.get_text() for text in axes.texts] == ["1.25"] * 3
    assert line(drawn(found, "fraction"), "auto")[1] == pytest.approx([95, 94, 92, 88])


def test_split_of_the_time(tmp_path: Path) -> None:
    axes = drawn(section(*strong(times={1: 8.0, 2: 4.4}), folder=tmp_path), "split")
    bars = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    left = {bars.get_label(): [bar.get_x() for bar in bars] for bars in axes.containers}
    # of 0.9: compute 0.6, wait 0.12 of which 0.02 for ranks, pack 0.04, redistribution 0.06
    shares = {"compute": 0.6, "wait for data": 0.1, "wait for ranks": 0.02, "pack": 0.04, "redistribution": 0.06,
              "rest": 0.08}  # fmt: skip
    for name, share in shares.items():
        assert bars.pop(name) == pytest.approx([100 * share / 0.9] * 2), name
    (hidden,) = bars  # ends where the waits begin
    assert bars[hidden] == pytest.approx([100 * 0.3 / 0.9] * 2)
    assert [x + y for x, y in zip(left[hidden], bars[hidden])] == pytest.approx(left["wait for data"])
    assert [text.get_text() for text in axes.texts] == [  # the medians, as the panel of times has them
        "8 s, 75% of transfers hidden",
        "4.4 s, 75% of transfers hidden",
    ]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["auto, 1 rank", "auto, 2 ranks"]


def test_records_without_the_waits_for_ranks(tmp_path: Path) -> None:
    (old,) = strong(times={2: 4.0})
    del old["product"]["per_rank"]["sync_seconds"]
    (point,) = section(old, folder=tmp_path).points
    assert point.parts["wait"] == pytest.approx(0.12 * 4) and point.parts["sync"] == 0


def test_shapes_are_bars(tmp_path: Path) -> None:
    found = section(*(record(case, 1.0) for case in cases("shapes", [(64, 64, 64)], [1, 2])), folder=tmp_path)
    axes = drawn(found, "fraction")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["square", "large k", "large m", "flat"]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights["1 rank"] == pytest.approx([95] * 4) and heights["2 ranks"] == pytest.approx([94] * 4)
    words = drawn(found, "words")
    (bars,) = words.containers  # one rank receives nothing
    assert bars.get_label() == "2 ranks" and [bar.get_height() for bar in bars] == pytest.approx([1.25] * 4)
    assert bars[0].get_facecolor() == axes.containers[1][0].get_facecolor()  # the same colour in both


# ------------------------------------------------------------------ predictions
def forecast(found: Section, to: int, machine: Machine | None = None) -> Forecast:
    made = {}
    for number, curve in enumerate(found.curves):
        made[number] = predict(curve.case, [x.ranks for x in curve.points], to, machine, per_node(found.points))
    return {number: x for number, x in made.items() if x}


def test_predictions_are_marked_and_go_beyond(tmp_path: Path) -> None:
    found = section(*strong(), folder=tmp_path)
    ahead = forecast(found, 64, Machine())
    axes = drawn(found, "time", ahead)
    ranks, seconds = line(axes, "_auto, predicted (formula)")
    assert ranks == [1, 2, 4, 8, 16, 32, 64] and seconds == [x.seconds for x in ahead[0].formula]
    (by_formula,) = (x for x in axes.lines if x.get_label() == "_auto, predicted (formula)")
    (walked,) = (x for x in axes.lines if x.get_label() == "_auto, predicted (simulation)")
    assert by_formula.get_linestyle() != "-" and by_formula.get_marker() == "None"
    assert walked.get_linestyle() == "None" and walked.get_markerfacecolor() == "white"
    assert list(walked.get_ydata()) == [x.seconds for x in ahead[0].simulation]
    assert {"predicted (formula)", "predicted (simulation)"} <= {*axes.get_legend_handles_labels()[1]}
    (shaded,) = (x for x in axes.patches if x.get_label() == "beyond what was measured")
    assert 8 < shaded.get_x() < 16 and shaded.get_x() + shaded.get_width() > 64
    _, efficiency = line(drawn(found, "efficiency", ahead), "_auto, predicted (formula)")
    assert efficiency == pytest.approx([100 * seconds[0] / (p * x) for p, x in zip(ranks, seconds)])
    _, words = line(drawn(found, "words", ahead), "_auto, predicted (formula)")
    assert words[1:] == [x.words for x in ahead[0].formula][1:]
    assert len(drawn(found, "time").patches) == 0  # nothing beyond, nothing shaded


def test_predictions_of_weak_cases_grow_with_the_ranks() -> None:
    (case,) = cases("weak", [(100, 200, 300)], [2])
    predicted = predict(case, [2], 8, Machine(), 8)
    assert predicted is not None
    assert [x.case.mnk for x in predicted.formula] == [weak_shape((100, 200, 300), p) for p in (2, 4, 8)]


def test_nodes_hold_as_many_ranks_as_they_have_cores_for(tmp_path: Path) -> None:
    found = section(*strong(), folder=tmp_path)  # 8 ranks were more than cores
    assert per_node(found.points) == 4
    ahead = forecast(found, 64, Machine())[0]
    assert ahead.machine == on_nodes(Machine(), 4) and ahead.guessed and ahead.calibrated
    assert not forecast(found, 64, on_nodes(Machine(), 2))[0].guessed
    assert not forecast(found, 64)[0].calibrated


def test_what_cannot_be_predicted(tmp_path: Path) -> None:
    (case,) = cases("strong", [(64, 64, 64)], [2], algorithms=["cannon"], device="cuda")
    assert predict(case, [2], 8, Machine(), 2) is None
    (case,) = cases("strong", [(4096,) * 3], [64], memory_limit=10)
    predicted = predict(case, [64], 64, Machine(), 2)
    assert predicted is not None and predicted.formula == predicted.simulation == ()


@jobs.needs_mpiexec
def test_predictions_are_those_of_the_run_itself(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(MACHINE))
    arguments = ["strong", "--shape", "96,80,1100", "--ranks", "1,2", "--repeats", "1", "--machine", "m.json"]
    many = [x for name in ("auto", "cannon", "2.5d") for x in ("--algorithm", name)]
    jobs.pdgemm(2, "scaling", *arguments, *many, "--out", "s.jsonl", cwd=tmp_path, OMP_NUM_THREADS="1")
    found = read_all([tmp_path / "s.jsonl"]).sections[0]
    compared = 0
    for curve in found.curves:
        predicted = predict(curve.case, [x.ranks for x in curve.points], 2, Machine.from_dict(MACHINE), 2)
        assert predicted is not None
        for point, x in zip(curve.points, predicted.formula, strict=True):
            assert x.seconds == pytest.approx(point.record["product"]["predicted_seconds"], rel=1e-12)
            assert x.words == point.words
            compared += 1
    assert compared >= 5


# ------------------------------------------------------------------ files
def test_page(tmp_path: Path) -> None:
    weak = [record(case, 1.0) for case in cases("weak", [(64, 64, 64)], [1, 2])]
    shapes = [record(case, 1.0) for case in cases("shapes", [(64, 64, 64)], [2])]
    evil = records.failed_record(cases("strong", [(9, 9, 9)], [2])[0], "<script>alert(1)</script> & more", [])
    study(tmp_path / "s.jsonl", {"machine": MACHINE, "ranks": 2}, *strong(), *weak, *shapes, evil)
    done = plotted("s.jsonl", "--out", "r.html", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("r.html: 10 measurements, 1 failed or wrong\n"), done.stderr
    shown = Page(tmp_path / "r.html")
    for (ranks, seconds), efficiency in zip(TIMES.items(), (100, 91, 80, 50)):
        (row,) = (row for row in shown.rows if len(row) == 18 and row[5] == f"{seconds:.4g}")
        assert row[0] == "auto" and row[2] == "1024 x 1024 x 1024" and row[1] == f"{ranks}{'*' * (ranks == 8)}"
        assert row[6] == f"{0.9 * seconds:.4g} to {1.2 * seconds:.4g}" and row[9] == str(efficiency)
        assert row[15] == "3e-16" and row[17] == "absent: no RAPL"
    assert sum("predicted [s]" in row for row in shown.rows) == 3  # a table for each kind
    (key,) = (row for row in shown.rows if len(row) == len(KEY) and row[5] == "2.0 s")
    assert key[1] == "8*"
    assert sum(len(row) == 18 for row in shown.rows) == 3 + 4 + 2 + 4
    for said in ("Strong scaling", "Weak scaling", "Shapes", "host<1>", "a measured one", "alert(1)</script> & more"):
        assert said in shown.text
    assert "OMP_NUM_THREADS=1 pdgemm scaling strong --ranks 1,2\n" in shown.text
    assert "links between nodes were not measured" in shown.text and "not calibrated" not in shown.text
    assert (tmp_path / "r.html").read_text().count("<figure") == 5 + 6 + 5


def test_one_legend_and_a_warning_beside_the_error(tmp_path: Path) -> None:
    """What several panels have is named once; measured ranks take half of the axis; errors are of no calibration."""
    study(tmp_path / "s.jsonl", *strong())
    plot.report([tmp_path / "s.jsonl"], tmp_path / "r.html", None, None)
    text = (tmp_path / "r.html").read_text()
    for label in ("predicted (formula), not calibrated", "predicted (simulation)", "more ranks than cores", "ideal"):
        assert len(re.findall(rf"<text[^>]*>[^<]*{re.escape(label)}</text>", text)) == 1, label
    for label in ("measured peak", "lower bound"):
        assert len(re.findall(rf"<text[^>]*>{label}</text>", text)) == 1, label
    errors = re.findall(r"<td[^>]*>([-+]\d+[^<]*)</td>", text)
    assert errors and all(x.endswith(" (uncalibrated)") for x in errors)
    assert re.search(r"<text[^>]*>64</text>", text) and not re.search(r"<text[^>]*>128</text>", text)  # of 1 to 8


def test_candidates_of_a_plan_with_their_time_and_memory(tmp_path: Path) -> None:
    """Each candidate has a row with its name, and two bars with their numbers; those that do not fit are white."""
    from matplotlib.figure import Figure

    question = Question(20_000, 20_000, 20_000, 64, memory=400 << 20, machine=on_nodes(Machine(), 16))
    candidates = question.candidates()
    axes = Figure().subplots()
    pictures._candidates(candidates, question.memory, axes)
    left, right = axes.figure.axes
    names = [x.get_text() for x in left.get_yticklabels()]
    moved = [f", moves {x.moves}" if x.moves else "" for x in candidates]
    assert names == [f"{x.name}, {x.grid_text}{moves}" for x, moves in zip(candidates, moved)]
    for half, values, form in (
        (left, [x.seconds for x in candidates], in_seconds),
        (right, [x.memory_bytes_per_rank for x in candidates], in_bytes),
    ):
        rows = {round(bar.get_y() + bar.get_height() / 2): bar for bar in half.patches}
        assert [rows[row].get_width() for row in range(len(candidates))] == values
        white = {row for row, bar in rows.items() if bar.get_facecolor() == (1, 1, 1, 1)}
        assert white == {row for row, x in enumerate(candidates) if not x.fits} != set()
        assert sorted(x.get_text() for x in half.texts) == sorted(map(form, values)) and not len(half.get_xticks())
    named = {"memory limit", "chosen", "does not fit the memory", "not chosen"}
    assert {*axes.get_legend_handles_labels()[1]} == named
    out = tmp_path / "plan.svg"
    pictures.draw_candidates(candidates, out, "Plans", question.memory)
    for said in ("Plans", candidates[0].grid_text, "memory per rank, A, B and C included", "memory limit"):
        assert re.search(rf"<text[^>]*>[^<]*{re.escape(said)}", out.read_text()), said
    for bad in ("plan.html", "plan", "none/plan.svg"):
        with pytest.raises(PdgemmError):
            pictures.check_picture(tmp_path / bad)


@pytest.mark.parametrize("algorithm", ["summa", "cannon", "2.5d", "inner", "stationary_a"])
def test_words_from_rank_to_rank_are_those_that_are_counted(algorithm: str) -> None:
    """Of each rank, on one node and between nodes; the sums over the senders are what it receives."""
    for machine in (Machine(), on_nodes(Machine(), 4)):
        plan = Question(310, 170, 290, 16, algorithm=algorithm, machine=machine).plan()
        words = words_between(plan.product, 16)
        assert words.sum(axis=0).tolist() == [plan.product.traffic(rank).words_received for rank in range(16)]
        assert words.sum() > 0 and not np.diagonal(words).any()
    with pytest.raises(ArgumentError, match="too many messages to be shown for each pair"):
        words_between(plan.product, MOST_PAIRED + 1)


def test_a_timeline_has_the_spans_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of too many the longest, which is said."""
    from matplotlib.figure import Figure

    spans = [Spent("pdgemm", 5.0, 9.0)] + [Spent(("product", "wait")[x % 2], 5.0 + x, 0.1 + x / 10) for x in range(8)]
    ranks = [Rank(0, "a", spans=spans), Rank(1, "a", spans=[*spans[:3], Spent("transfer", 6.0, 1.0)])]

    def drawn() -> tuple[dict[str, int], str]:
        axes = Figure().subplots()
        pictures._timeline(ranks, axes)
        count = dict[str, int]()
        for x in axes.collections:
            name = {str(matplotlib.colors.to_hex(color)): name for name, (color, *_) in pictures.SPANS.items()}
            shown = name[matplotlib.colors.to_hex(x.get_facecolor()[0])]
            count[shown] = count.get(shown, 0) + len(x.get_paths())
        assert axes.get_ylim() == (1.6, -0.6) and axes.get_xlim() == (0, 9.0)
        return count, axes.get_xlabel()

    import matplotlib.colors

    assert drawn() == ({"product": 5, "wait": 5, "transfer": 1}, "seconds")
    monkeypatch.setattr(pictures, "MOST_SPANS", 4)
    assert drawn() == ({"product": 1, "wait": 2, "transfer": 1}, "seconds; only spans of 600 ms and more are drawn")


def test_all_spans_have_colours_that_differ() -> None:
    """Also the spans of training, of pipelines and of `--verify`; as they look on white."""
    from matplotlib.colors import to_rgba

    named = {"redistribute" if name == "moved" else name for name in (*PHASES, *OUTSIDE, *TRAINING)}
    assert named | {"F", "B", "W", "transfer"} == SPANS.keys()
    seen = {name: [x * a + 1 - a for x in rgb] for name, (color, *_) in SPANS.items() for *rgb, a in [to_rgba(color)]}
    for one, other in combinations(seen, 2):
        assert max(abs(x - y) for x, y in zip(seen[one], seen[other])) > 0.1, (one, other)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    """Tables, figures and the timeline of a traced run, without scripts, network and markup from outside."""
    ranks = [Rank(x, "<b>host", spans=[Spent("product", x, 1.0)], outside={"read": 0.5 + x}) for x in range(2)]
    for rank in ranks:
        rank.outside |= {name: 0.0 for name in OUTSIDE if name != "read"}
    about = [About("<b>host", 0, 8, [0, 1], 0.0)] * 2
    pictures.draw_timeline(Profile(ranks, about, Machine()), tmp_path / "run.html", "Timeline of <i>t.json")
    text, shown = (tmp_path / "run.html").read_text(), Page(tmp_path / "run.html")
    assert "Seconds of each rank outside of products" in shown.text and "more threads than cores: <b>host" in shown.text
    assert "<b>" not in text and "<i>" not in text and text.count("<svg") == 1
    assert ["0", "0.500"] in shown.rows and ["1", "1.50"] in shown.rows


@pytest.mark.parametrize(("name", "said"), [("plan", "predicted time"), ("simulate", "rank that receives, or reads")])
def test_commands_draw(tmp_path: Path, name: str, said: str) -> None:
    words = name, "--shape", "300,200,100", "--ranks", "6", "--plot"
    done = pdgemm(0, *words, "x.svg", cwd=tmp_path)
    assert done.returncode == 0 and said in (tmp_path / "x.svg").read_text(), done.stderr
    assert done.stdout.endswith("\nwrote x.svg\n")
    assert json.loads(pdgemm(0, *words, "x.svg", "--json", cwd=tmp_path).stdout)["wrote"] == "x.svg"
    assert pdgemm(0, *words, "x.html", cwd=tmp_path).returncode == 2 and not (tmp_path / "x.html").exists()


def test_pictures(tmp_path: Path) -> None:
    study(tmp_path / "s.jsonl", *strong())
    assert plotted("s.jsonl", "--out", "r.png", cwd=tmp_path).returncode == 0
    data = (tmp_path / "r.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20], "big") == 2240  # 11.2 inches at 200 dpi
    assert plotted("s.jsonl", "--out", "r.SVG", cwd=tmp_path).returncode == 0
    text = (tmp_path / "r.SVG").read_text()
    for said in ("time of one product [s]", "efficiency [%]", "predicted (formula), not calibrated", "(e) Where the"):
        assert re.search(rf"<text[^>]*>[^<]*{re.escape(said)}", text)


def test_single_point(tmp_path: Path) -> None:
    (one,) = strong(times={4: 2.0})
    one["confidence"] = None
    study(tmp_path / "s.jsonl", one)
    assert plotted("s.jsonl", "--out", "r.html", cwd=tmp_path).returncode == 0
    found = section(one, folder=tmp_path)
    assert [panel.name for panel in panels(found, {})] == ["fraction", "words", "split"]


def test_other_settings_are_other_curves(tmp_path: Path) -> None:
    first = study(tmp_path / "a.jsonl", *strong(times={1: 8.0, 2: 4.0}))
    second = study(tmp_path / "b.jsonl", *strong(times={1: 4.0, 4: 2.0}, threads_per_rank=[2], nodes=["other"]))
    found = read_all([first, second])
    (only,) = found.sections
    assert [curve.label for curve in only.curves] == ["1 thread per rank", "2 threads per rank"]
    assert [[x.ranks for x in curve.points] for curve in only.curves] == [[1, 2], [1, 4]]
    assert any("threads per rank (1; 2)" in note for note in found.notes)
    assert any("host<1>, other" in note for note in found.notes)
    again = study(tmp_path / "c.jsonl", *strong(times={1: 7.0}))
    (curve, _) = read_all([first, second, again]).sections[0].curves
    assert [x.seconds for x in curve.points] == [7.0, 4.0]  # the later file of equal dates
    ideal = [x for x in drawn(only, "time").lines if x.get_label() in ("ideal", "_ideal")]
    assert [x.get_ydata()[0] for x in ideal] == [8.0, 4.0]


def test_what_is_not_drawn(tmp_path: Path) -> None:
    """Lines that cannot be read, and cases that are wrong or failed: the page names them."""
    good, bad, endless, wrong = strong(times={1: 8.0, 2: 4.4, 4: 2.5, 8: 2.0})
    del bad["product"]["per_rank"]
    endless["median_seconds"] = float("inf")
    wrong.update(status="wrong", residual=0.5)
    failed = records.failed_record(cases("strong", [(SIDE,) * 3], [16])[0], "it broke", [])
    path = study(tmp_path / "s.jsonl", good, "no json", bad, endless, wrong, failed, '{"format": 1, "case": {"kind"')
    path.write_text(path.read_text().rstrip("\n"))
    done = plotted("s.jsonl", "--out", "r.html", cwd=tmp_path)
    told = done.stderr.splitlines()
    assert done.returncode == 0 and len(told) == 4, done.stderr
    assert all(x.startswith("pdgemm: warning: ") and x.endswith("left out") for x in told)
    shown = Page(tmp_path / "r.html")
    for said in (
        "s.jsonl:2: ",
        "2 ranks, 1024 x 1024 x 1024 float64, auto: Object missing required field `per_rank` - at `$.product`",
        "not finished",
        "s.jsonl:4: ",
    ):
        assert said in shown.text and any(said in x for x in told)
    left = {row[1]: row[2] for row in shown.rows if len(row) == 4}
    assert left["failed"] == "it broke" and left["wrong"] == "residual 0.5, at most 1e-14 is right"
    (only,) = read_all([path]).sections
    assert [x.ranks for x in only.points] == [1] and line(drawn(only, "fraction"), "auto")[0] == [1]


def test_only_failed_cases(tmp_path: Path) -> None:
    study(tmp_path / "s.jsonl", records.failed_record(cases("strong", [(SIDE,) * 3], [4])[0], "it broke", []))
    assert plotted("s.jsonl", "--out", "r.html", cwd=tmp_path).returncode == 0
    assert "it broke" in Page(tmp_path / "r.html").text
    done = plotted("s.jsonl", "--out", "r.png", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing to draw: 1 case failed" in done.stderr and not (tmp_path / "r.png").exists()


@pytest.mark.parametrize(
    ("lines", "out", "said"),
    [
        (None, "r.html", "no such file"),
        ([], "r.html", "no measurement in it"),
        (["text"], "r.svg", "no measurement in it: line 1: "),
        (strong(), "r.pdf", "the ending .html, .png or .svg"),
        (strong(), "no/r.svg", "the folder"),
        (strong(), "folder.svg", "is a folder, not a file"),
    ],
)
def test_bad_input_is_one_line(lines: Sequence[Any] | None, out: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    if lines is not None:
        study(tmp_path / "s.jsonl", *lines)
    done = plotted("s.jsonl", "--out", out, cwd=tmp_path)
    (told,) = done.stderr.splitlines()
    assert done.returncode == 2 and told.startswith("pdgemm: error: ") and said in told
    assert {x.name for x in tmp_path.iterdir()} <= {"s.jsonl", "folder.svg"}


def test_an_error_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = study(tmp_path / "s.jsonl", *strong(times={1: 8.0})), tmp_path / "r.svg"
    out.write_text("before")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _no_space)
        with pytest.raises(FileError, match=r"r\.svg: No space left"):
            plot.report([path], out, None, 8, overwrite=True)
    assert out.read_text() == "before" and sorted(x.name for x in tmp_path.iterdir()) == ["r.svg", "s.jsonl"]
    with pytest.raises(ArgumentError, match=r"r\.svg exists, and was not written by pdgemm: it is replaced only with"):
        plot.report([path], out, None, 8)
    assert out.read_text() == "before"
    for overwrite in (True, False):  # which it then has written
        plot.report([path], out, None, 8, overwrite)
        assert out.read_text().startswith("<?xml")


def _no_space(file: int) -> None:
    raise OSError(28, "No space left on device")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = study(tmp_path / "s.jsonl", *strong())
    monkeypatch.setattr("pdgemm.tools.studies.figures.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=re.escape("pip install matplotlib jinja2")):
        plot.report([path], tmp_path / "r.html", None, 8)
    assert not (tmp_path / "r.html").exists()


def test_machine_of_the_option_comes_first(tmp_path: Path) -> None:
    study(tmp_path / "s.jsonl", {"machine": MACHINE, "ranks": 1}, *strong(times={1: 8.0}))
    (tmp_path / "m.json").write_text(json.dumps({**MACHINE, "name": "another", "ranks_per_node": 2}))
    assert plotted("s.jsonl", "--out", "r.html", "--machine", "m.json", cwd=tmp_path).returncode == 0
    text = Page(tmp_path / "r.html").text
    assert "another: 2 ranks on a node" in text and "a measured one" not in text
    assert "links between nodes were not measured" not in text


def test_key_figures_are_of_the_fastest_product_of_each_curve(tmp_path: Path) -> None:
    found = section(*strong(), *strong("summa", {1: 8.0, 2: 4.0, 4: 8.0}), folder=tmp_path)
    ahead = forecast(found, 8, Machine())
    table = Drawn(found, ahead, []).key_figures
    errors = [100 * (ahead[0].formula[3].seconds / 2.0 - 1), 100 * (ahead[1].formula[1].seconds / 4.0 - 1)]
    assert [dict(zip(table.columns, row)) for row in table.rows] == [
        dict(zip(KEY, (label, ranks, "1024 x 1024 x 1024", "summa", grid, *figures, "1.250", f"{error:+.0f}")))
        for label, ranks, grid, figures, error in (
            ("auto", "8*", "1 x 8", ("2.0 s", "1.074", "88", "50"), errors[0]),
            ("summa", "2", "1 x 2", ("4.0 s", "0.5369", "94", "100"), errors[1]),
        )
    ]
    assert [row[-1] for row in Drawn(found, {}, []).key_figures.rows] == ["-", "-"]


def test_commands_as_the_user_typed_them() -> None:
    typed = {"command": ["mpirun", "-n", "4", "pdgemm", "scaling", "weak", "--out", "a b.jsonl"]}
    assert command_of_record(typed) == "mpirun -n 4 pdgemm scaling weak --out 'a b.jsonl'"
    assert command_of_record(typed | {"environment": {"OMP_NUM_THREADS": 2}}).startswith(
        "OMP_NUM_THREADS=2 mpirun -n 4 "
    )
    assert command_of_record({}) == ""


@jobs.needs_mpiexec
@pytest.mark.timeout(400)
def test_two_studies_and_their_report_from_one_command(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "study.sh"
    command = [str(script), str(tmp_path), "--ranks", "2", "--strong", "96,96,96", "--weak", "64,64,64"]
    done = jobs.run([*command, "--repeats", "1", "--no-calibrate"], timeout=180)
    assert done.returncode == 0, done.stderr
    assert {x.name for x in tmp_path.iterdir()} == {"strong.jsonl", "weak.jsonl", "report.html", "report.png"}
    assert len((tmp_path / "weak.jsonl").read_text().splitlines()) == 1
