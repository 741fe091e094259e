"""Pages and pictures of `pdgemm plot`, `plan`, `simulate` and `profile`: contents and files.  No MPI."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
from pdgemm.tools.profiling.profile import OUTSIDE, PHASES, About, Profile, Rank, Spent
from pdgemm.tools.studies import figures, pictures, plot, records
from pdgemm.tools.studies.cases import cases
from pdgemm.tools.studies.curves import read_all
from pdgemm.tools.studies.pictures import SPANS
from pdgemm.tools.studies.plot import KEY, command_of_record

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
MACHINE = json.loads(Machine(name="a measured one").as_json())


def plotted(folder: Path, out: str, *options: str) -> jobs.Finished:
    """Run `pdgemm plot s.jsonl --out OUT OPTIONS --predict-to 8` in a folder; return the finished process."""
    return pdgemm(0, "plot", "s.jsonl", "--out", out, *options, "--predict-to", "8", cwd=folder)


class Page:
    """Text and cells of an HTML page, which must not load or run anything, and must close every element."""

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


def test_page(tmp_path: Path) -> None:
    weak = [record(case, 1.0) for case in cases("weak", [(64, 64, 64)], [1, 2])]
    shapes = [record(case, 1.0) for case in cases("shapes", [(64, 64, 64)], [2])]
    evil = records.failed_record(cases("strong", [(9, 9, 9)], [2])[0], "<script>alert(1)</script> & more", [])
    study(tmp_path / "s.jsonl", {"machine": MACHINE, "ranks": 2}, *strong(), *weak, *shapes, evil)
    done = plotted(tmp_path, "r.html")
    assert done.returncode == 0 and done.stdout.startswith("r.html: 10 measurements, 1 failed or wrong\n"), done.stderr
    shown = Page(tmp_path / "r.html")
    for (ranks, seconds), efficiency in zip(TIMES.items(), (100, 91, 80, 50)):
        (row,) = (row for row in shown.rows if len(row) == 17 and row[5] == f"{seconds:.4g}")
        assert row[0] == "auto" and row[2] == "1024 x 1024 x 1024" and row[1] == f"{ranks}{'*' * (ranks == 8)}"
        assert row[6] == f"{0.9 * seconds:.4g} to {1.2 * seconds:.4g}" and row[9] == str(efficiency)
        assert row[15] == "3e-16"
    assert sum("predicted [s]" in row for row in shown.rows) == 3  # a table for each kind of study
    assert [row[1] for row in shown.rows if len(row) == len(KEY) and row[5] == "2.0 s"] == ["8*"]
    assert sum(len(row) == 17 for row in shown.rows) == 3 + 4 + 2 + 4
    for said in ("Strong scaling", "Weak scaling", "Shapes", "host<1>", "a measured one", "alert(1)</script> & more"):
        assert said in shown.text
    assert "pdgemm scaling strong --ranks 1,2\n" in shown.text
    assert "links between nodes were not measured" in shown.text and "not calibrated" not in shown.text
    assert (tmp_path / "r.html").read_text().count("<figure>") == 3 * 2
    captions = re.findall(r"<b>(\([a-e]\)) ", (tmp_path / "r.html").read_text())
    assert captions == 3 * ["(a)", "(b)", "(c)", "(d)", "(e)"]


def test_one_legend_and_a_warning_beside_the_error(tmp_path: Path) -> None:
    """The legend names each curve once, axes end at 64 ranks, and prediction errors are marked as uncalibrated."""
    study(tmp_path / "s.jsonl", *strong())
    plot.report([tmp_path / "s.jsonl"], tmp_path / "r.html", None, None)
    text = (tmp_path / "r.html").read_text()
    for label in ("predicted, not calibrated", "more ranks than cores", "ideal", "measured peak", "lower bound"):
        assert len(re.findall(f"<text[^>]*>{label}</text>", text)) == 1, label
    errors = re.findall(r"<td[^>]*>([-+]\d+[^<]*)</td>", text)
    assert errors and all(x.endswith(" (uncalibrated)") for x in errors)
    # measured: 1 to 8 ranks
    assert re.search(r"<text[^>]*>64</text>", text) and not re.search(r"<text[^>]*>128</text>", text)


def test_candidates_of_a_plan_with_their_time_and_memory(tmp_path: Path) -> None:
    """Each candidate has a named row with two labelled bars; bars are white if the memory does not suffice."""
    from matplotlib.figure import Figure

    question = Question(20_000, 20_000, 20_000, 64, memory=400 << 20, machine=on_nodes(Machine(), 16))
    candidates = question.candidates()
    left, right = Figure().subplots(1, 2, sharey=True)
    pictures._candidates(candidates, question.memory, left, right)
    moved = [f", moves {x.moves}" if x.moves else "" for x in candidates]
    names = [f"{x.name}, {x.grid_text}{moves}" for x, moves in zip(candidates, moved)]
    assert [x.get_text() for x in left.get_yticklabels()] == names
    for half, values, form in (
        (left, [x.seconds for x in candidates], in_seconds),
        (right, [x.memory_bytes_per_rank for x in candidates], in_bytes),
    ):
        rows = {round(bar.get_y() + bar.get_height() / 2): bar for bar in half.patches}
        assert [rows[row].get_width() for row in range(len(candidates))] == values
        white = {row for row, bar in rows.items() if bar.get_facecolor() == (1, 1, 1, 1)}
        assert white == {row for row, x in enumerate(candidates) if not x.fits} != set()
        assert sorted(x.get_text() for x in half.texts) == sorted(map(form, values)) and not len(half.get_xticks())
    legend = {"memory limit", "chosen", "does not fit the memory", "not chosen"}
    assert {*right.get_legend_handles_labels()[1]} == legend
    pictures.draw_candidates(candidates, out := tmp_path / "plan.svg", "Plans", question.memory)
    for said in ("Plans", candidates[0].grid_text, "memory per rank, A, B and C included", "memory limit"):
        assert re.search(rf"<text[^>]*>[^<]*{re.escape(said)}", out.read_text()), said
    for bad in ("plan.html", "plan", "none/plan.svg"):
        with pytest.raises(PdgemmError):
            figures.check_output(tmp_path / bad, figures.IMAGES, False)


@pytest.mark.parametrize("algorithm", ["summa", "cannon", "2.5d", "inner", "stationary_a"])
def test_drawn_words_between_ranks_equal_counted_ones(algorithm: str) -> None:
    """Sums over the senders equal the words that each rank receives, on one node and on several."""
    for machine in (Machine(), on_nodes(Machine(), 4)):
        plan = Question(310, 170, 290, 16, algorithm=algorithm, machine=machine).plan()
        words = words_between(plan.product, 16)
        assert words.sum(axis=0).tolist() == [plan.product.traffic(rank).words_received for rank in range(16)]
        assert words.sum() > 0 and not np.diagonal(words).any()
    with pytest.raises(ArgumentError, match="send too many messages to show for each pair"):
        words_between(plan.product, MOST_PAIRED + 1)


def test_a_timeline_has_the_spans_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many spans, only the longest are drawn, and a note says so."""
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    named = {to_hex(color): name for name, (color, *_) in SPANS.items()}
    spans = [Spent("pdgemm", 5.0, 9.0)] + [Spent(("product", "wait")[x % 2], 5.0 + x, 0.1 + x / 10) for x in range(8)]
    ranks = [Rank(0, "a", spans=spans), Rank(1, "a", spans=[*spans[:3], Spent("transfer", 6.0, 1.0)])]

    def drawn() -> tuple[dict[str, int], str]:
        axes = Figure().subplots()
        pictures._timeline(ranks, axes)
        assert axes.get_ylim() == (1.6, -0.6) and axes.get_xlim() == (0, 9.0)
        count = Counter(named[to_hex(x.get_facecolor()[0])] for x in axes.collections for _ in x.get_paths())
        return count, axes.get_xlabel()

    assert drawn() == ({"product": 5, "wait": 5, "transfer": 1}, "seconds")
    monkeypatch.setattr(pictures, "MOST_SPANS", 4)
    assert drawn() == ({"product": 1, "wait": 2, "transfer": 1}, "seconds; only spans of 600 ms and more are drawn")


def test_all_spans_have_colours_that_differ() -> None:
    """Colours of any two kinds of spans differ on white, including spans of training, pipelines and `--verify`."""
    from matplotlib.colors import to_rgba

    named = {"redistribute" if name == "moved" else name for name in (*PHASES, *OUTSIDE)}
    assert named | {"F", "B", "W", "transfer"} == SPANS.keys()
    seen = {name: [x * a + 1 - a for x in rgb] for name, (color, *_) in SPANS.items() for *rgb, a in [to_rgba(color)]}
    for one, other in combinations(seen, 2):
        assert max(abs(x - y) for x, y in zip(seen[one], seen[other])) > 0.1, (one, other)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    """Tables, figures and the timeline of a traced run, without scripts, network access and foreign markup."""
    outside = [dict.fromkeys(OUTSIDE, 0.0) | {"read": 0.5 + x} for x in range(2)]
    ranks = [Rank(x, "<b>host", spans=[Spent("product", x, 1.0)], outside=outside[x]) for x in range(2)]
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
    assert plotted(tmp_path, "r.png").returncode == plotted(tmp_path, "r.SVG").returncode == 0
    data = (tmp_path / "r.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20], "big") == 2240  # 11.2" at 200 dpi
    text = (tmp_path / "r.SVG").read_text()
    for said in ("time of one product [s]", "efficiency [%]", "predicted, not calibrated", "(e) Where the"):
        assert re.search(rf"<text[^>]*>[^<]*{re.escape(said)}", text)


def test_bad_records_are_not_drawn(tmp_path: Path) -> None:
    """Lines that cannot be read, and wrong or failed cases, are not drawn, but listed on the page."""
    good, bad, endless, wrong = strong(times={1: 8.0, 2: 4.4, 4: 2.5, 8: 2.0})
    del bad["product"]["per_rank"]
    endless["median_seconds"] = float("inf")
    wrong.update(status="wrong", residual=0.5)
    failed = records.failed_record(cases("strong", [(SIDE,) * 3], [16])[0], "it broke", [])
    path = study(tmp_path / "s.jsonl", good, "no json", bad, endless, wrong, failed, '{"format": 1, "case": {"kind"')
    path.write_text(path.read_text().rstrip("\n"))
    done = plotted(tmp_path, "r.html")
    told = done.stderr.splitlines()
    assert done.returncode == 0 and len(told) == 4, done.stderr
    assert all(x.startswith("pdgemm: warning: ") and x.endswith("left out") for x in told)
    shown = Page(tmp_path / "r.html")
    missing = "2 ranks, 1024 x 1024 x 1024 float64, auto: Object missing required field `per_rank` - at `$.product`"
    for said in ("s.jsonl:2: ", missing, "not finished", "s.jsonl:4: "):
        assert said in shown.text and any(said in x for x in told)
    left = {row[1]: row[2] for row in shown.rows if len(row) == 4}
    assert left["failed"] == "it broke" and left["wrong"] == "residual 0.5, at most 1e-14 is right"
    (only,) = read_all([path]).sections
    assert [x.ranks for x in only.points] == [1]


def test_only_failed_cases(tmp_path: Path) -> None:
    study(tmp_path / "s.jsonl", records.failed_record(cases("strong", [(SIDE,) * 3], [4])[0], "it broke", []))
    assert plotted(tmp_path, "r.html").returncode == 0
    assert "it broke" in Page(tmp_path / "r.html").text
    done = plotted(tmp_path, "r.png")
    assert done.returncode == 2 and "nothing to draw: 1 case failed" in done.stderr
    assert not (tmp_path / "r.png").exists()


@pytest.mark.parametrize(
    ("lines", "out", "said"),
    [
        (None, "r.html", "no such file"),
        ([], "r.html", "no measurement in it"),
        (["text"], "r.svg", "no measurement in it: line 1: "),
        (strong(), "r.pdf", "a file with the ending .html, .png or .svg"),
        (strong(), "no/r.svg", "the folder"),
        (strong(), "folder.svg", "is a folder, not a file"),
    ],
)
def test_bad_input_is_one_line(lines: Sequence[Any] | None, out: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    if lines is not None:
        study(tmp_path / "s.jsonl", *lines)
    done = plotted(tmp_path, out)
    (told,) = done.stderr.splitlines()
    assert done.returncode == 2 and told.startswith("pdgemm: error: ") and said in told
    assert {x.name for x in tmp_path.iterdir()} <= {"s.jsonl", "folder.svg"}


def test_an_error_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = study(tmp_path / "s.jsonl", *strong(times={1: 8.0})), tmp_path / "r.svg"
    out.write_text("before")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(FileError, match=r"r\.svg: No space left"):
            plot.report([path], out, None, 8, overwrite=True)
    assert out.read_text() == "before" and sorted(x.name for x in tmp_path.iterdir()) == ["r.svg", "s.jsonl"]
    with pytest.raises(ArgumentError, match=r"r\.svg exists, and was not written by pdgemm: it is replaced only with"):
        plot.report([path], out, None, 8)
    assert out.read_text() == "before"
    for overwrite in (True, False):  # its own file needs no overwrite
        plot.report([path], out, None, 8, overwrite)
        assert out.read_text().startswith("<?xml")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = study(tmp_path / "s.jsonl", *strong())
    monkeypatch.setattr("pdgemm.tools.studies.figures.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=re.escape("pip install matplotlib jinja2")):
        plot.report([path], tmp_path / "r.html", None, 8)
    assert not (tmp_path / "r.html").exists()


def test_machine_of_the_option_comes_first(tmp_path: Path) -> None:
    study(tmp_path / "s.jsonl", {"machine": MACHINE, "ranks": 1}, *strong(times={1: 8.0}))
    (tmp_path / "m.json").write_text(json.dumps({**MACHINE, "name": "another", "ranks_per_node": 2}))
    assert plotted(tmp_path, "r.html", "--machine", "m.json").returncode == 0
    text = Page(tmp_path / "r.html").text
    assert "another: 2 ranks on a node" in text and "a measured one" not in text
    assert "links between nodes were not measured" not in text


def test_commands_as_the_user_typed_them() -> None:
    typed = {"command": ["mpirun", "-n", "4", "pdgemm", "scaling", "weak", "--out", "a b.jsonl"]}
    for line, command in ((typed, "mpirun -n 4 pdgemm scaling weak --out 'a b.jsonl'"), ({}, "")):
        assert command_of_record(line) == command


@jobs.needs_mpiexec
@pytest.mark.timeout(400)
def test_two_studies_and_their_report_from_one_command(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "study.sh"
    command = [str(script), str(tmp_path), "--ranks", "2", "--strong", "96,96,96", "--weak", "64,64,64"]
    done = jobs.run([*command, "--repeats", "1", "--no-calibrate"], timeout=180)
    assert done.returncode == 0, done.stderr
    assert {x.name for x in tmp_path.iterdir()} == {"strong.jsonl", "weak.jsonl", "report.html", "report.png"}
    assert len((tmp_path / "weak.jsonl").read_text().splitlines()) == 1
