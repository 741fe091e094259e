"""`pdgemm scaling --train`: what is measured, whether a report is true to it, and studies of an invented program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jobs
import pytest
from study_records import record, study, trained
from tiers import thorough

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import Machine
from pdgemm.tools.studies import plot, records
from pdgemm.tools.studies.cases import SIZES, Case, TrainingCase, training_cases
from pdgemm.tools.studies.curves import Section, TrainingPoint, agreement, read_all
from pdgemm.tools.studies.figures import drawing, panels

HOW: dict[str, Any] = {"program": "gpt", "steps": 2, "warmup": 1}


def wanted(kind: str, ranks: list[int], *layouts: str, **sizes: int) -> list[TrainingCase]:
    return training_cases(kind, ranks, layouts, 16, SIZES | sizes, ["float32"], **HOW)


def test_cases_of_each_number_of_ranks() -> None:
    """On one rank all axes are the same layout; a written one is measured on as many ranks as it has."""
    weak = wanted("weak", [3, 1], "auto")
    assert [(x.ranks, x.batch, x.of, x.tokens) for x in weak] == [(1, 16, 16, 2048), (3, 48, 16, 6144)]
    written = "dp=2,tp=2,microbatch=4,recompute=full"
    strong = wanted("strong", [1, 2, 4], "dp,tp,pp", written)
    assert [(x.ranks, x.layout, x.batch, x.of) for x in strong] == [
        (1, "auto", 16, 0), *((2, x, 16, 0) for x in ("dp", "tp", "pp")),
        *((4, x, 16, 0) for x in ("dp", "tp", "pp", written)),
    ]  # fmt: skip
    layouts = {x.layout: x.plan(Machine()).layout for x in strong[4:]}
    assert [(layouts[x].ranks, getattr(layouts[x], x)) for x in ("dp", "tp", "pp")] == [(4, 4)] * 3
    words = strong[-1].words(layouts[written])
    assert {*zip(words[::2], words[1::2])} >= {
        ("--dp", "2"), ("--tp", "2"), ("--pp", "1"), ("--batch", "16"), ("--microbatches", "2"), ("--steps", "3"),
        ("--recompute", "blocks"), ("--hidden", "128"), ("--dtype", "float32"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ranks", "layouts", "more", "message"),
    [
        ("strong", 7, "auto", {}, "no mesh of 7 ranks fits 4 layers of 4 heads and 16 samples"),
        ("strong", 3, "dp", {}, "3 ranks, 16 samples of 128 tokens, dp: dp 3 x microbatch 1 does not divide"),
        ("strong", 4, "dq", {}, "a layout is name=value.*got 'dq'"),
        ("strong", 4, "dp=2", {}, "dp=2 is a layout of 2 ranks, which --ranks does not have"),
        ("strong", 2, "dp=2,dtype=float64", {}, "layouts of a study have dp, tp,"),
        ("shapes", 1, "auto", {}, "Invalid enum value 'shapes'"),
        ("strong", 1, "auto", {"heads": 3}, "heads 3 does not divide hidden 128"),
    ],
)
def test_what_is_no_study_of_training(kind: str, ranks: int, layouts: str, more: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        wanted(kind, [ranks], layouts, **more)


# ------------------------------------------------------------------ the report
def section(folder: Path, *lines: dict[str, Any]) -> Section:
    (only,) = read_all([study(folder / "t.jsonl", *lines)]).sections
    return only


def test_efficiency_is_relative_to_the_fastest_layout_on_the_fewest_ranks(tmp_path: Path) -> None:
    lines = [*trained("strong", {2: 5.0, 4: 3.2}, ["dp"]), *trained("strong", {2: 4.0, 4: 4.0}, ["tp"])]
    fastest, table = plot.tables_of_section(section(tmp_path, *lines)).values()
    assert [row[:3] for row in fastest.rows] == [["tp", "2", "dp=2"], ["dp", "4", "dp=4"]]
    rows = [dict(zip(table.columns, row)) for row in table.rows]
    assert [(x["curve"], x["efficiency [%]"], x["tokens/s"]) for x in rows] == [
        ("dp", "80", "205"), ("dp", "62", "320"), ("tp", "100", "256"), ("tp", "50", "256"),
    ]  # fmt: skip
    shared = section(tmp_path, *trained("weak", {1: 8.0}), *trained("weak", {2: 10.0}, ["tp"]))
    assert [[x.ranks for x in curve.line] for curve in shared.curves] == [[1], [1, 2]]


def test_losses_that_agree_and_that_do_not(tmp_path: Path) -> None:
    one, two = (TrainingPoint.of(x, tmp_path) for x in trained("strong", {1: 1.0, 2: 1.0}))
    for step, by, said in ((3, 1e-4, "The losses agree: "), (0, 1e-3, "THE LOSSES DIFFER by 1.0e-03, more than 3.5e")):
        losses = [loss * (1 + by * (number == step)) for number, loss in enumerate(two.training.losses)]
        (line,) = trained("strong", {2: 1.0}, losses=losses)
        agree, text = agreement([one, TrainingPoint.of(line, tmp_path)])
        assert agree == (step == 3) and text.startswith(said) and f"step {step + 1}: " in text
    assert "5.5 on 1 rank, dp=1 and 5.5055 on 2 ranks, dp=2" in text
    weak = [TrainingPoint.of(x, tmp_path) for x in trained("weak", {1: 1.0, 2: 1.0})]  # they have other samples
    assert agreement(weak) == (True, "Losses cannot be compared: no two cases have the same samples.")


def test_figures_show_what_was_measured_beside_ideal_and_plan(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    results = read_all([study(tmp_path / "t.jsonl", *trained("weak", {1: 8.0, 2: 10.0, 8: 16.0}))])
    plot.predict_curves(results, Machine(), None)
    drawn = {}
    with drawing():
        for panel in panels(results.sections[0]):
            panel.draw(axes := figure.Figure().subplots())
            drawn[panel.name] = axes
    lines = {name: {x.get_label(): [*x.get_ydata()] for x in axes.lines} for name, axes in drawn.items()}
    assert lines["tokens"]["auto"] == pytest.approx([128, 2 * 128 * 0.8, 8 * 128 * 0.5])
    assert lines["tokens"]["ideal"] == pytest.approx([128, 256, 1024])
    assert lines["tokens"]["_auto, predicted"] == pytest.approx([x / 0.75 for x in lines["tokens"]["auto"]])
    assert lines["efficiency"]["auto"] == lines["efficiency"]["_auto, predicted"] == pytest.approx([100, 80, 50])
    assert [x.get_width() for x in drawn["waits"].patches] == pytest.approx([80] * 3 + [20] * 3)
    assert drawn["waits"].texts[-1].get_text() == "16 s, planned 12 s: dp=8"


def test_a_page_of_products_and_of_training(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    wrong = [{"kind": "tensor", "counted": 9.0, "formula": 8.0, "differ": 2}]
    lines = [*trained("strong", {1: 8.0, 2: 5.0}), *trained("weak", {2: 9.0}, words=wrong)]
    broken = trained("strong", {4: 1.0}, losses=[1.0])
    path = study(tmp_path / "t.jsonl", record(Case("strong", 1, (64, 64, 64)), 1.0), *lines, *broken)
    plot.report([path], tmp_path / "t.html", None, None)
    text = re.sub(r"\s+", " ", (tmp_path / "t.html").read_text())
    for expected in (
        "<h1>Strong scaling; Weak scaling</h1>", "Strong scaling of training: 4 layers of 128 with 4 heads, vocabulary "
        "256, 8 samples of 128 tokens, auto, float32", "8 samples of 128 tokens on a rank", "The losses agree",
        "gradients 1,000 (by formula 1,000)", "DIFFER from formulas (2 ranks, dp=2: tensor 9 (by formula 8; they "
        "DIFFER on 2 ranks))", "MFU [%]", "GFLOP/s: 2 m n k", "wait for messages", "has the loss of each step",
    ):  # fmt: skip
        assert expected in text, expected
    plot.report([study(path, *trained("strong", {1: 8.0}))], tmp_path / "t.html", None, None)  # of training only
    assert "GFLOP/s: 2 m n k" not in (tmp_path / "t.html").read_text()


# ------------------------------------------------------------------ the measurement
TINY = ("--layers", "2", "--hidden", "8", "--heads", "2", "--sequence", "8", "--batch", "4", "--no-calibrate")
PROGRAM = """
from types import SimpleNamespace as Run
from pdgemm.instrument.recorder import Traffic

def training(words, comm):
    options = {name: value for name, value in zip(words[::2], words[1::2])}
    def expected(*batch):
        assert [tuple(x.shape) for x in batch] == [(4 // int(options["--dp"]), 8)] * 2
        return {"tensor": Traffic(words_received=10 * (comm.size - 1)), "pipeline": Traffic()}
    for step in range(int(options["--steps"])):
        loss, words = 5.5 - step, 10 * (comm.size - 1)
        # CHANGE
        traffic = {"tensor": Traffic(words_received=words), "gradients": Traffic()}
        report = Run(loss=loss, norm=1.0, seconds=(1 + comm.rank) / 4, waited=comm.rank / 4, traffic=traffic)
        yield Run(report=report, expected=expected)
"""


def program(folder: Path, change: str = "") -> str:
    """Write a program that invents what it reports, with a change; return its path."""
    pytest.importorskip("torch")
    (folder / "mine.py").write_text(PROGRAM.replace("# CHANGE", change))
    return str(folder / "mine.py")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "ok"),
        ("loss *= float('nan')", "wrong"),
        ("yield 1", r"yields the run after each of 1 \+ 1 steps, got 4, 2 of which have no report"),
        ("if step: return", "got 1, 0 of which have no report"),
        ("pass\n\nimport nothing_of_the_kind\ndef unused():", "mine.py cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_program_is_measured_or_refused(grid: Any, change: str, message: str, tmp_path: Path) -> None:
    from pdgemm.tools.studies.measure import measure_training

    how: dict[str, Any] = {"program": program(tmp_path, change), "steps": 1, "warmup": 1}
    (case,) = training_cases("strong", [grid.size], ["auto"], 4, SIZES | {"sequence": 8}, ["float32"], **how)
    done, machine = list[int](), Machine()
    if len(message) > 5:
        with pytest.raises(ArgumentError, match=message):
            measure_training(grid, case, machine, done.append)
        return
    measured = measure_training(grid, case, machine, done.append)
    assert done == [0, 1] and (grid.rank == 0) == (measured is not None)
    if measured:
        assert measured["status"] == message and measured["seconds"] == [grid.size / 4]
        assert measured["training"]["waited"] == (grid.size - 1) / 8
        share = case.flops / (grid.size / 4 * grid.size * max(machine.gamma["float32"].values()))
        assert measured["training"]["mfu"] == pytest.approx(share)


@jobs.needs_mpiexec
def test_a_study_of_training_is_gone_on_with(tmp_path: Path) -> None:
    options = (
        "--ranks",
        "1,2",
        "--layouts",
        "auto",
        "--layouts",
        "tp=2,microbatch=2",
        "--steps",
        "2",
        "--out",
        "s.jsonl",
    )
    words = ("scaling", "--train", program(tmp_path), *TINY, *options)
    run = jobs.pdgemm(0, *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    last = "[3/3] 2 ranks, 4 samples of 8 tokens, tp=2,microbatch=2: 500 ms a step, 64 tokens/s, by tp=2,microbatch=2; "
    assert last + "words match the formulas" in run.stdout and "  The losses agree: the largest" in run.stdout
    path = tmp_path / "s.jsonl"
    points = [TrainingPoint.of(x, path) for x in records.open_study(path).measured.values()]
    assert [(x.repetitions, x.training.losses) for x in points] == [
        ([0.25] * 2, [5.5, 4.5, 3.5]), *[([0.5] * 2, [5.5, 4.5, 3.5])] * 2,
    ]  # fmt: skip
    assert [[*map(str, x.training.words)] for x in points] == [[], *[["tensor 10 (by formula 10)"]] * 2]
    plans = [x.case.plan(Machine()) for x in points]
    assert [x.training.layout for x in points] == [str(x.layout) for x in plans]
    assert [x.training.planned for x in points] == pytest.approx([x.step_seconds for x in plans])
    assert "mine.py, 2 layers of 8 with 2 heads" in (tmp_path / "s.html").read_text()
    kept = path.read_text().splitlines()
    path.write_text("\n".join([kept[1], kept[2], kept[0][:50]]))  # killed in the case of one rank
    again = jobs.pdgemm(0, *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert again.returncode == 0 and "3 cases, 1 to run" in again.stdout and len(path.read_text().splitlines()) == 3


@jobs.needs_mpiexec
def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """In one job on two ranks, the first of which measures the case of one rank."""
    changed = program(tmp_path, "loss *= 1 + (comm.size - 1) * 0.01; words += step == 1 and comm.rank")
    run = jobs.pdgemm(2, "scaling", "--train", changed, *TINY, "--ranks", "1,2", "--steps", "1", cwd=tmp_path)
    assert run.returncode == 1 and "THE LOSSES DIFFER by 1.0e-02" in run.stderr
    first, second = (line for line in run.stdout.splitlines() if line.startswith("["))
    assert "words match the formulas" in first and "words of tensor DIFFER from their formulas" in second
    *_, last = records.open_study(tmp_path / "training.jsonl").measured.values()
    assert last["training"]["words"] == [{"kind": "tensor", "counted": 11.0, "formula": 10.0, "differ": 1}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 1 --out s.jsonl", "strong, weak, shapes, or --train"),
        ("strong --ranks 1 --shape 8,8,8 --out s.jsonl --layers 2", "--layers is an option of studies of training"),
        ("--train --ranks 1 --shape 8,8,8", "--shape is an option of studies of products"),
        ("--train no.py --ranks 1", "there is no such program"),
        (f"--train {jobs.__file__} --ranks 1", "has no function training(words, comm)"),
        ("--train --ranks 1 --out s.html", "holds the measurements"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(words: str, message: str, tmp_path: Path) -> None:
    run = jobs.pdgemm(0, "scaling", *words.split(), cwd=tmp_path)
    assert run.returncode == 2 and message in run.stderr and run.stderr.count("pdgemm: error:") == 1
    assert [*tmp_path.iterdir()] == []


@thorough
@jobs.needs_mpiexec
@pytest.mark.timeout(400)
def test_the_example_on_all_axes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = "--layouts auto,dp,tp,pp --layouts dp=2,tp=2,zero=2 --layers 4 --heads 4 --dtype float64 --ranks 1,2,4"
    words = ("scaling", "--train", *TINY, *options.split(), "--steps", "3")
    run = jobs.pdgemm(0, *words, cwd=tmp_path, timeout=350, OMP_NUM_THREADS="1")
    assert run.returncode == 0 and "DIFFER" not in run.stdout, run.stderr
    points = [TrainingPoint.of(x, tmp_path) for x in records.open_study(tmp_path / "training.jsonl").measured.values()]
    assert len(points) == 1 + 4 + 5
    assert all(x.training.losses == pytest.approx(points[0].training.losses, rel=1e-12) for x in points)
