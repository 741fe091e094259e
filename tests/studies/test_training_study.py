"""`pdgemm scaling --train`: what is measured, whether a report is true to it, and studies of a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from jobs import pdgemm
from study_records import record, study, trained
from tiers import thorough

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.tools.studies import plot, records
from pdgemm.tools.studies.cases import Case
from pdgemm.tools.studies.curves import read_all
from pdgemm.tools.studies.figures import drawing
from pdgemm.tools.studies.training.training_cases import SIZES, TrainingCase, program_file, training_cases
from pdgemm.tools.studies.training.training_curves import TrainingPoint, TrainingSection, agreement
from pdgemm.tools.studies.training.training_panels import PARTS, panels_of_training
from pdgemm.tools.studies.training.training_tables import tables_of_training

HOW: dict[str, Any] = {"program": "gpt", "steps": 2, "warmup": 1}


def wanted(kind: str, ranks: list[int], layouts: list[str], batch: int = 16, **sizes: int) -> list[TrainingCase]:
    return training_cases(kind, ranks, layouts, batch, SIZES | sizes, ["float32"], **HOW)


# ------------------------------------------------------------------ what is measured
def test_strong_studies_keep_the_samples_and_weak_ones_those_of_a_rank() -> None:
    assert [(x.ranks, x.batch, x.of) for x in wanted("strong", [4, 1, 2], ["auto"])] == [
        (1, 16, 0), (2, 16, 0), (4, 16, 0),
    ]  # fmt: skip
    weak = wanted("weak", [1, 2, 3], ["auto"])
    assert [(x.ranks, x.batch, x.of) for x in weak] == [(1, 16, 16), (2, 32, 16), (3, 48, 16)]
    assert len({x.model for x in weak}) == 1 and len({x.trained for x in weak}) == 3
    assert [x.tokens for x in weak] == [16 * 128, 32 * 128, 48 * 128]


def test_layouts_of_each_number_of_ranks() -> None:
    """On one rank all axes are the same layout; one that is written out is that of its ranks."""
    layouts = ["dp,tp", "pp", "dp=2,tp=2,microbatch=4"]
    assert [(x.ranks, x.layout) for x in wanted("strong", [1, 2, 4], layouts)] == [
        (1, "auto"), *((2, x) for x in ("dp", "tp", "pp")), *((4, x) for x in ("dp", "tp", "pp", layouts[-1])),
    ]  # fmt: skip
    plans = {x.layout: x.plan(Machine()) for x in wanted("strong", [4], layouts)}
    assert [(plans[axis].layout.ranks, getattr(plans[axis].layout, axis)) for axis in ("dp", "tp", "pp")] == [
        (4, 4)
    ] * 3
    (last,) = (x for x in wanted("strong", [4], layouts) if "=" in x.layout)
    words = last.words(plans[last.layout].layout)
    options = dict(zip(words[::2], words[1::2]))
    assert {name: options[name] for name in ("--dp", "--tp", "--pp", "--batch", "--microbatches", "--steps")} == {
        "--dp": "2", "--tp": "2", "--pp": "1", "--batch": "16", "--microbatches": "2", "--steps": "3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ranks", "layouts", "message"),
    [
        ("strong", 7, "auto", r"--ranks 7, layout auto: no mesh of 7 ranks.*the nearest that fits: 6 and 8"),
        ("strong", 3, "dp", r"dp 3 does not divide the 16 samples.*nearest that fits: 2 and 4"),
        ("strong", 8, "tp", r"tp 8 does not divide 4 heads.*nearest that fits: 4"),
        ("weak", 10**9, "pp", r"stages are more than 4 layers.*nearest that fits: 4"),
        ("strong", 2**31 - 1, "auto", r"nearest that fits: 256"),
        ("strong", 4, "dq", r"no layout 'dq': layouts are auto, dp, tp, pp, or such as dp=2"),
        ("strong", 4, "auto,", "no layout ''"),
        ("strong", 4, "dp=2", "dp=2 is a layout of 2 ranks: --ranks has no such number, but 4"),
        ("strong", 2, "dp=2,microbatch=3", "dp 2 x microbatch 3 does not divide the 16 samples"),
        ("strong", 2, "dp=2,ep=2", "ep 2 does not divide 0 experts"),
        ("strong", 2, "dp=2,dtype=float64", "dtype is no part of a study's layouts"),
        ("strong", 2, "dp=two", "dp of a layout is a whole number, got 'two'"),
        ("shapes", 1, "auto", "strong or weak, got 'shapes'"),
        ("strong", 0, "auto", "numbers of ranks > 0"),
    ],
)
def test_what_is_no_study_of_training(kind: str, ranks: int, layouts: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        wanted(kind, [ranks], [layouts])


def test_models_and_programs_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="heads 3 does not divide hidden 128"):
        wanted("strong", [1], ["auto"], heads=3)
    with pytest.raises(ArgumentError, match="--dtype of training is float32 or float64, got complex64"):
        training_cases("strong", [1], ["auto"], 16, SIZES, ["complex64"], **HOW)
    assert program_file("gpt").name == "train.py"
    program = tmp_path / "mine.py"
    for text, message in (("x = 1\n", r"no function training\(words, comm\)"), ("def (", "not a program of Python")):
        program.write_text(text)
        with pytest.raises(ArgumentError, match=message):
            program_file(str(program))
    with pytest.raises(ArgumentError, match="there is no such program"):
        program_file(str(tmp_path))


def test_parts_of_a_plan_are_its_seconds() -> None:
    shape, machine = wanted("strong", [1], ["auto"])[0].shape, Machine()
    for text in ("dp=2,zero=1", "tp=2", "pp=2,microbatch=4", "dp=2,tp=2,pp=2", "dp=1,recompute=full"):
        plan = ModelPlan(shape, TrainingLayout.parsed(text, TrainingLayout(fused=False, dtype="float32")), 16, machine)
        parts, step = plan.times.of_parts(), plan.times.of_step()
        assert sum(parts.values()) == pytest.approx(plan.step_seconds)
        assert parts["transfers"] == pytest.approx(step.get("tensor", 0) + step.get("gradients", 0))
        assert {*parts} <= PARTS.keys() and min(parts.values()) >= 0


# ------------------------------------------------------------------ the report
def sections(folder: Path, *lines: dict[str, Any]) -> list[TrainingSection]:
    return read_all([study(folder / "t.jsonl", *lines)]).trainings


def test_efficiency_of_strong_and_of_weak_scaling(tmp_path: Path) -> None:
    times = {1: 8.0, 2: 5.0, 4: 4.0}
    (strong,) = sections(tmp_path, *trained("strong", times))
    assert [strong.efficiency(x) for x in strong.points] == pytest.approx([1, 8 / (2 * 5), 8 / (4 * 4)])
    assert [x.tokens_per_second for x in strong.points] == pytest.approx([8 * 128 / t for t in times.values()])
    (weak,) = sections(tmp_path, *trained("weak", times))
    assert [weak.efficiency(x) for x in weak.points] == pytest.approx([1, 8 / 5, 8 / 4])
    assert [x.tokens_per_second for x in weak.points] == pytest.approx([8 * 128 * p / t for p, t in times.items()])
    assert [weak.planned_efficiency(x) for x in weak.points] == pytest.approx([1, 8 / 5, 8 / 4])
    # a plan is relative to that of the fastest on the fewest ranks, and so is what was measured
    both = [*trained("strong", {2: 5.0, 4: 4.0}, ["dp"]), *trained("strong", {2: 4.0, 4: 4.0}, ["tp"])]
    (section,) = sections(tmp_path, *both)
    assert section.first.case.layout == "tp"
    assert [section.efficiency(x) for x in section.points] == pytest.approx([4 / 5, 1, 0.5, 0.5])
    assert [x.case.layout for x in section.fastest] == ["tp", "dp"]


def test_curves_begin_on_the_one_rank_that_they_share(tmp_path: Path) -> None:
    lines = trained("strong", {1: 8.0, 2: 5.0, 4: 4.0}, ["dp", "tp"])
    (section,) = sections(tmp_path, *lines)
    assert {name: [x.ranks for x in points] for name, points in section.curves.items()} == {
        "dp": [1, 2, 4], "tp": [1, 2, 4],
    }  # fmt: skip
    two = sections(tmp_path, *lines, *trained("strong", {1: 8.0, 2: 5.0}, batch=4))
    assert [len(x.points) for x in two] == [5, 2]  # another number of samples is another section


def test_parts_of_a_step(tmp_path: Path) -> None:
    (section,) = sections(tmp_path, *trained("strong", {2: 10.0}))
    (point,) = section.points
    assert point.parts == pytest.approx(
        {"forward": 2.8, "backward": 4.7, "transfers": 0.5 + 0.5, "wait": 0.5, "update": 0.6, "rest": 0.4}
    )
    assert sum(point.parts.values()) == pytest.approx(10)
    assert point.planned.seconds == pytest.approx(7.5)


def test_losses_that_agree_and_that_do_not(tmp_path: Path) -> None:
    one, two = (TrainingPoint.of(x, tmp_path) for x in trained("strong", {1: 1.0, 2: 1.0}))

    def changed(step: int, by: float) -> Any:
        losses = [*two.training.losses]
        losses[step] *= 1 + by  # type: ignore[operator]
        (line,) = trained("strong", {2: 1.0}, losses=losses)
        return agreement([one, TrainingPoint.of(line, tmp_path)])

    assert agreement([one, two]) == (True, agreement([one, two]).text)
    close = changed(3, 1e-4)
    assert close.agree and "2 cases agree: the largest relative difference in 8 steps is 1.0e-04 (step 4:" in close.text
    apart = changed(0, 1e-3)
    assert not apart.agree and apart.text.startswith("THE LOSSES DIFFER by 1.0e-03, more than 3.5e-04")
    assert "5.5 on 1 rank, dp=1 and 5.5055 on 2 ranks, dp=2 (auto)" in apart.text
    # of a weak study each number of ranks has losses of its own
    weak = [TrainingPoint.of(x, tmp_path) for x in trained("weak", {1: 1.0, 2: 1.0})]
    assert agreement(weak).text.startswith("Losses cannot be compared")


def test_words_that_differ_from_their_formula_are_named(tmp_path: Path) -> None:
    wrong = [{"kind": "tensor", "counted": 9.0, "formula": 8.0, "all_ranks": 18.0, "differ": 2}]
    lines = [*trained("strong", {1: 8.0}), *trained("strong", {2: 5.0}, words=wrong)]
    results = read_all([study(tmp_path / "t.jsonl", *lines)])
    assert any(
        "DIFFER from their formulas (2 ranks, dp=2 (auto): tensor differ on 2 ranks)" in x for x in results.notes
    )
    key, _, words = tables_of_training(results.trainings[0]).values()
    assert words.rows == [("2 ranks, dp=2 (auto)", "tensor", "9", "8", "18", "differ on 2 ranks")]
    assert [row[-1] for row in key.rows] == ["equal", "DIFFER"]
    unknown = [wrong[0] | {"formula": None, "differ": 0}]
    results = read_all([study(tmp_path / "t.jsonl", *trained("strong", {2: 5.0}, words=unknown))])
    assert any(x.startswith("There is no formula of tensor;") for x in results.notes)
    key, *_ = tables_of_training(results.trainings[0]).values()
    assert key.rows[0][-1] == "not all have one"


def test_figures_show_what_was_measured_beside_ideal_and_plan(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    (section,) = sections(tmp_path, *trained("weak", {1: 8.0, 2: 10.0, 8: 16.0}))
    drawn = {}
    with drawing():
        for panel in panels_of_training(section):
            panel.draw(axes := figure.Figure().subplots())
            drawn[panel.name] = axes
    lines = {name: {x.get_label(): [*x.get_ydata()] for x in axes.lines} for name, axes in drawn.items()}
    rate = 8 * 128 / 8
    assert lines["tokens"]["auto"] == pytest.approx([rate, 2 * rate * 0.8, 8 * rate * 0.5])
    assert lines["tokens"]["ideal"] == pytest.approx([rate, 2 * rate, 8 * rate])
    assert lines["tokens"]["_auto, predicted"] == pytest.approx([x / 0.75 for x in lines["tokens"]["auto"]])
    assert lines["training_efficiency"]["auto"] == pytest.approx([100, 80, 50])
    assert lines["training_efficiency"]["ideal"] == [100, 100, 100]
    assert drawn["training_efficiency"].get_ylabel() == "weak efficiency [%]"
    bars = [x.get_width() for x in drawn["parts"].patches]
    assert sum(bars) == pytest.approx((1 + 0.75) * (8 + 10 + 16))
    assert [x.get_text() for x in drawn["parts"].texts][:3] == ["8.0 s", "10 s", "16 s"]


def test_a_page_of_products_and_of_training(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    training = trained("strong", {1: 8.0, 2: 5.0}), trained("weak", {2: 9.0})
    lines = [record(Case("strong", 1, (64, 64, 64)), 1.0), *training[0], *training[1]]
    plot.report([study(tmp_path / "t.jsonl", *lines)], tmp_path / "t.html", None, None)
    text = (tmp_path / "t.html").read_text()
    for expected in (
        "<h1>Strong scaling; Weak scaling</h1>",
        "Strong scaling of training: 4 layers of 128 with 4 heads, vocabulary 256, 8 samples of 128 tokens, float32",
        "8 samples of 128 tokens on a rank", "The losses of 2 cases agree", "equal on all ranks", "MFU [%]", "HFU [%]",
        "planned bubble [%]", "GFLOP/s: 2 m n k", "computation of the passes", "pdgemm scaling strong",
    ):  # fmt: skip
        assert re.sub(r"\s+", " ", expected) in re.sub(r"\s+", " ", text), expected
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len({*names})
    # of training alone the page says nothing of products
    study(tmp_path / "t.jsonl", *trained("strong", {1: 8.0}))
    for name in ("t.html", "t.png"):
        plot.report([tmp_path / "t.jsonl"], tmp_path / name, None, None)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "GFLOP/s: 2 m n k" not in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    "field", ["training", "case", "training.words", "training.losses", "training.phases", "training.layout"]
)
def test_any_field_of_a_record_may_hold_anything(field: str, tmp_path: Path) -> None:
    for value in (None, -1, "x", [], {"a": []}):
        good, bad = trained("strong", {1: 8.0, 2: 5.0})
        *outer, name = field.split(".")
        (bad[outer[0]] if outer else bad)[name] = value
        results = read_all([study(tmp_path / "t.jsonl", good, bad)])
        assert results.unread or field in ("training.layout", "training.words", "training.phases")
        for section in results.trainings:
            key, measured, *_ = tables_of_training(section).values()
            assert key.rows and measured.rows


# ------------------------------------------------------------------ the command
TINY = ("--layers", "2", "--hidden", "8", "--heads", "2", "--sequence", "8", "--batch", "4", "--no-calibrate")


def scaling(folder: Path, *words: str, ranks: int = 0) -> jobs.Finished:
    """`pdgemm scaling WORDS` of a tiny model, alone or on so many ranks, finished."""
    return jobs.pdgemm(ranks, "scaling", *TINY, *words, cwd=folder, timeout=110, OMP_NUM_THREADS="1")


@jobs.needs_mpiexec
def test_a_study_of_training_is_gone_on_with(tmp_path: Path) -> None:
    layouts = ("--layouts", "microbatch=2", "--layouts", "tp=2,microbatch=2")
    words = ("--train", "--ranks", "1,2", *layouts, "--steps", "2", "--dtype", "float64")
    run = scaling(tmp_path, *words)
    assert run.returncode == 0, run.stderr
    assert "[2/2] 2 ranks, 4 samples of 8 tokens, tp=2,microbatch=2: " in run.stdout
    assert "words match the formulas" in run.stdout
    assert "The losses of 2 cases agree: the largest relative difference in 3 steps" in run.stdout
    path = tmp_path / "training.jsonl"
    one, two = (TrainingPoint.of(x, path) for x in records.open_study(path).measured.values())
    for point in (one, two):
        assert (len(point.repetitions), len(point.training.losses)) == (2, 3)  # the first step is not counted
        assert point.seconds == pytest.approx(np.median(point.repetitions)) and point.words_verdict == "equal"
        assert point.record["training"]["tokens_per_second"] == pytest.approx(4 * 8 / point.seconds)
        means = sum(point.repetitions) / 2
        assert 0 < sum(point.training.phases.values()) <= 1.001 * means
    assert one.training.losses == pytest.approx(two.training.losses, rel=1e-12)
    # tp on two ranks: of each kind what a step of the plan moves, to the word
    plan = two.case.plan(Machine())
    assert two.training.layout == str(plan.layout) and plan.layout.tp == 2
    assert {x.kind for x in two.training.words} >= {"tensor"} and not one.training.words
    assert all(x.counted == x.formula > 0 for x in two.training.words)
    assert "Strong scaling of training: " in (tmp_path / "training.html").read_text()

    kept = path.read_text().splitlines()
    path.write_text("\n".join([kept[1], kept[0][:50]]))  # killed in the case of one rank
    again = scaling(tmp_path, *words)
    assert again.returncode == 0 and "2 cases, 1 to run" in again.stdout
    assert len(path.read_text().splitlines()) == 2


CHANGED = """
import sys
sys.path.insert(0, {folder!r})
import train
{before}
def training(words, comm):
    for step, (times, loss) in enumerate(train.training(words, comm)):
        {change}
        yield times, loss
"""


def changed(folder: Path, change: str, before: str = "") -> str:
    """Return the path of a program that trains as the example does, but for a change of its steps, or before them."""
    program = folder / "mine.py"
    program.write_text(CHANGED.format(folder=str(program_file("gpt").parent), change=change, before=before))
    return str(program)


@jobs.needs_mpiexec
def test_a_number_of_ranks_that_fails_is_reported(tmp_path: Path) -> None:
    program = changed(tmp_path, "if comm.size == 2 and step: raise ValueError('no use')")
    options = "--ranks", "1,2", "--steps", "1", "--out", "s.jsonl", "--page", "s.html"
    run = scaling(tmp_path, "--train", program, *options)
    assert run.returncode == 1
    assert "FAILED 2 ranks, 4 samples of 8 tokens, auto: its job ended with exit code" in run.stderr
    first, second = records.open_study(tmp_path / "s.jsonl").measured.values()
    assert (first["status"], second["status"]) == ("ok", "failed") and "no use" in run.stderr
    page = (tmp_path / "s.html").read_text()
    assert "Cases that failed" in page and "mine.py, 2 layers of 8 with 2 heads" in page


@jobs.needs_mpiexec
def test_losses_and_words_that_differ_are_said(tmp_path: Path) -> None:
    """In one job on two ranks, the first of which measures the case of one rank."""
    wrong = "train.expected_words = lambda run: {'tensor': run.mesh.comm.size - 1}"
    program = changed(tmp_path, "loss *= 1 + (comm.size - 1) * 0.01", wrong)
    run = scaling(tmp_path, "--train", program, "--ranks", "1,2", "--steps", "1", "--out", "s.jsonl", ranks=2)
    assert run.returncode == 1
    assert "THE LOSSES DIFFER by 1.0e-02" in run.stderr
    first, second = (line for line in run.stdout.splitlines() if line.startswith("["))
    assert "words match the formulas" in first and "words of tensor DIFFER from their formulas" in second
    assert all(x["status"] == "ok" for x in records.open_study(tmp_path / "s.jsonl").measured.values())


@jobs.needs_mpiexec
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def training(words, comm):\n    yield 1, 2.0", "got 1 of int"),
        ("import nothing_of_the_kind\ndef training(words, comm):\n    return", "cannot be loaded: ModuleNot"),
    ],
)
def test_a_program_that_yields_something_else_is_one_error(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(body)
    run = scaling(tmp_path, "--train", "mine.py", "--ranks", "1", "--out", "s.jsonl")
    assert run.returncode == 1 and "FAILED 1 rank" in run.stderr and message in run.stderr
    assert "Traceback" not in run.stderr


@jobs.needs_mpiexec
def test_a_loss_that_is_no_number_is_wrong(tmp_path: Path) -> None:
    program = changed(tmp_path, "loss *= float('nan')")
    run = scaling(tmp_path, "weak", "--train", program, "--ranks", "1", "--steps", "1")
    assert run.returncode == 1 and "WRONG: a loss is infinite or not a number" in run.stderr
    assert "a loss is infinite or not a number" in (tmp_path / "training.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 1 --out s.jsonl", "strong, weak, shapes, or --train"),
        ("strong --ranks 1 --out s.jsonl", "--shape"),
        ("strong --ranks 1 --shape 8,8,8", "--out"),
        ("strong --ranks 1 --shape 8,8,8 --out s.jsonl --layers 2", "--layers is an option of studies of training"),
        ("--train --ranks 1 --shape 8,8,8", "--shape is an option of studies of products"),
        ("--train --ranks 1 --algorithm summa", "--algorithm is an option of studies of products"),
        ("--train --ranks 3 --layouts tp", "nearest that fits: 2 and 4"),
        ("--train --ranks 2 --batch 3 --layouts dp", "dp 2 does not divide the 3 samples of a step"),
        ("--train no.py --ranks 1", "there is no such program"),
        ("shapes --train --ranks 1", "strong or weak"),
        ("--train --ranks 1 --page s.txt", "a report is a file with the ending .html"),
        ("--train --ranks 1 --out s.html", "holds the measurements"),
        ("--train --ranks 1 --page no/s.html", "does not exist"),
        ("--train --ranks 1 --steps 0", "0 is not in the range"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(words: str, message: str, tmp_path: Path) -> None:
    run = pdgemm(0, "scaling", *words.split(), cwd=tmp_path)
    assert run.returncode == 2 and message in run.stderr and run.stderr.count("pdgemm: error:") == 1
    assert [*tmp_path.iterdir()] == []


@thorough
@jobs.needs_mpiexec
@pytest.mark.timeout(400)
def test_all_axes_on_up_to_four_ranks(tmp_path: Path) -> None:
    layouts = "--layouts", "auto,dp,tp,pp", "--layouts", "dp=2,tp=2,zero=2", "--layers", "4", "--heads", "4"
    for kind in ("strong", "weak"):
        run = scaling(tmp_path, kind, "--train", *layouts, "--ranks", "1,2,4", "--steps", "3", "--dtype", "float64")
        assert run.returncode == 0, run.stderr
    points = [TrainingPoint.of(x, tmp_path) for x in records.open_study(tmp_path / "training.jsonl").measured.values()]
    assert len(points) == 2 * (1 + 4 + 5) and {x.words_verdict for x in points} == {"equal"}
    assert agreement(points).agree
    line = json.loads((tmp_path / "training.jsonl").read_text().splitlines()[0])
    assert line["case"]["program"] == "gpt"
