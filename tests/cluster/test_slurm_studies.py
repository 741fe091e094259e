"""Scaling studies in jobs of Slurm, and figures of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slurm_jobs import CHECKOUT, SCRIPTS, SLOW_PRODUCT, Batch, Job, needs_cluster, slurm
from tiers import thorough

from pdgemm import load_machine

pytestmark = needs_cluster

STUDY: dict[str, Any] = {"SHAPES": "64,64,64 48,80,96", "OPTIONS": "--repeats 2 --no-calibrate", "OUT": "study"}


def measured(path: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Return ranks and shape of the correct measurements in a file."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(x["case"]["ranks"], tuple(x["case"]["mnk"])) for x in records if x.get("status") == "ok"]


def drawn(study: Path) -> None:
    assert "<html" in (study / "report.html").read_text().lower()
    assert (study / "report.png").read_bytes().startswith(b"\x89PNG")


def test_strong_scaling(batch: Batch) -> None:
    """A study measures on 1, 2, ... and all ranks of the allocation; finished cases are not measured again."""
    job = batch.completed("strong.sbatch", shape=(1, 3), **STUDY)
    results = batch.folder / "study" / "strong.jsonl"
    shapes = [(64, 64, 64), (48, 80, 96)]
    assert sorted(measured(results)) == sorted((ranks, mnk) for ranks in (1, 2, 3) for mnk in shapes)
    assert "strong.sbatch: 6 measurements in study/strong.jsonl\n" in job.out
    before = results.read_bytes()
    batch.completed("strong.sbatch", shape=(1, 3), **STUDY)
    assert results.read_bytes() == before


@thorough
def test_a_cancelled_study_resumes(batch: Batch) -> None:
    """Cases on one rank are measured, cases on two ranks are cancelled; submitted again, the study runs these."""
    batch.variables |= {**STUDY, "RANKS": "1,2"}
    results = batch.folder / "study" / "strong.jsonl"
    job = batch.submit("strong.sbatch", shape=(2, 1), **batch.changed(SLOW_PRODUCT))
    job.printed("[2/4]")
    done = job.terminated()
    assert "2 measurements are finished and kept in study/strong.jsonl; the one that ran is lost" in done.out
    assert "the same sbatch command goes on from there" in done.out
    batch.has_no_ranks()
    before = results.read_bytes()
    assert "4 cases, 2 to run" in batch.completed("strong.sbatch", shape=(2, 1)).out
    assert results.read_bytes().startswith(before)
    assert sorted(ranks for ranks, _ in measured(results)) == [1, 1, 2, 2]


def test_more_ranks_than_the_allocation(batch: Batch) -> None:
    job = batch.done("strong.sbatch", **STUDY, RANKS="64")
    assert "the allocation has room for 2 ranks: cases of 64 ranks do not fit" in job.error()
    assert "0 measurements in study/strong.jsonl" in job.out


@thorough
def test_weak_scaling_and_the_figures_of_both(batch: Batch) -> None:
    """An array job with a failed task: the report job, which depends on it and on a study, draws existing records."""
    batch.variables |= STUDY
    folder, study = batch.folder, batch.folder / "study"
    strong = batch.submit("strong.sbatch", RANKS="1,2")
    weak = batch.submit("weak.sbatch", "--array=1,2,9")
    figures = batch.submit("figures.sbatch", f"--dependency=afterany:{strong.number}:{weak.number}", shape=(1, 1))
    tasks = weak.ended_tasks(seconds=120)
    *right, failed = sorted(tasks, key=lambda task: task.code)
    assert [task.well().code for task in right] == [0, 0]
    assert "cases of 9 ranks do not fit" in failed.error()
    assert {x.name for x in study.glob("weak-*")} == {"weak-1.jsonl", "weak-2.jsonl"}
    assert measured(study / "weak-1.jsonl") == [(1, (64, 64, 64)), (1, (48, 80, 96))]
    assert measured(study / "weak-2.jsonl") == [(2, (91, 91, 91)), (2, (68, 113, 136))]
    assert len(list(folder.glob(f"pdgemm-weak-{weak.number}-*.out"))) == 3
    for job in (strong, figures):
        job.ended().well()
    drawn(study)


def test_the_example_of_a_study(folder: Path, site: str) -> None:
    """docs/examples/scaling_study.sh submits three jobs, each after the other, and the last writes the report."""
    script, study = CHECKOUT / "docs" / "examples" / "scaling_study.sh", folder / "my-study"
    variables = {"ALLOCATION": "-N 1 --ntasks-per-node=2 --cpus-per-task=1", "RANKS": "1,2", "STRONG": "96,64,80"}
    variables |= {"WEAK": "48,40,32", "OPTIONS": "--repeats 2", "PDGEMM_SITE": site}
    study.mkdir()
    machine = study / "machine.json"  # without a machine file the first job calibrates
    machine.write_text(load_machine().as_json())
    told = slurm(script, "my-study", cwd=folder, **variables)
    jobs = re.fullmatch(
        r"jobs (\d+) \(strong scaling\), (\d+) \(weak scaling\), (\d+) \(the report: my-study/report.html\)\n", told
    )
    assert jobs, told
    for job, number in zip(jobs.groups(), (1, 2, 1)):
        assert len([task.well() for task in Job(job).ended_tasks(seconds=150)]) == number
    assert measured(study / "strong.jsonl") == [(1, (96, 64, 80)), (2, (96, 64, 80))]
    assert [measured(study / f"weak-{n}.jsonl")[0][0] for n in (1, 2)] == [1, 2]
    assert machine.read_text() == load_machine().as_json()
    drawn(study)


def test_figures_of_nothing_and_tasks_outside_an_array(batch: Batch) -> None:
    message = "OUT=.: no strong.jsonl and no weak-N.jsonl in this folder"
    assert message in batch.refused("figures.sbatch", shape=(1, 1))
    script = batch.folder / "weak.sbatch"
    script.write_text(re.sub(r"#SBATCH --array.*\n", "", (SCRIPTS / "weak.sbatch").read_text()))
    message = "this is a job array: sbatch --array=1,2,4 slurm/weak.sbatch"
    assert message in batch.refused(script, **STUDY, PDGEMM_SLURM=str(SCRIPTS))
