"""Parts of scaling studies: cases, the file of measurements, and failing jobs.  No MPI."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from study_records import record

from pdgemm.errors import ArgumentError, FileError
from pdgemm.support.launcher import allocated_nodes, allocated_ranks
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import FAMILIES, Case, cases
from pdgemm.tools.studies.jobs import Launcher, StudyJobs, threads_per_rank
from pdgemm.tools.studies.measure import confidence

ONE = Case("strong", 1, (64, 64, 64))


# ------------------------------------------------------------------ cases
def test_strong_studies_keep_the_shape() -> None:
    found = cases("strong", [(64, 32, 16), (8, 8, 8)], [4, 1, 4], ["float64", "float32"], ["auto", "cannon"])
    assert len(found) == len({*found}) == 2 * 2 * 2 * 2
    assert [x.ranks for x in found] == [1] * 8 + [4] * 8
    assert {x.mnk for x in found} == {(64, 32, 16), (8, 8, 8)}
    assert len({x.on(1) for x in found}) == 8


def test_weak_studies_keep_the_memory_of_a_rank() -> None:
    found = cases("weak", [(1000, 2000, 3000)], [1, 4, 7, 100])
    assert found[0].mnk == (1000, 2000, 3000)
    assert len({x.on(1) for x in found}) == 1
    for x in found:
        m, n, k = x.mnk
        assert (m * k + k * n + m * n) / x.ranks == pytest.approx(11e6, rel=2e-3)
        assert m / n == pytest.approx(0.5, rel=2e-3) and n / k == pytest.approx(2 / 3, rel=2e-3)
    assert found[1] == cases("weak", [(1000, 2000, 3000)], [4])[0]  # a case does not depend on other cases


def test_shapes_of_one_volume() -> None:
    found = cases("shapes", [(512, 512, 512)], [2])
    assert [x.of for x in found] == [*FAMILIES]
    for x in found:
        m, n, k = x.mnk
        assert m * n * k == pytest.approx(512**3, rel=0.02)
    assert found[0].mnk == (512, 512, 512) and found[1].mnk == (128, 128, 8192)
    assert [x.mnk for x in cases("shapes", [(5, 6, 7), (8, 9, 10)], [2])] == [(5, 6, 7), (8, 9, 10)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sideways", [(1, 1, 1)], [1]), "strong, weak, shapes"),
        (("strong", [], [1]), "shapes"),
        (("strong", [(0, 1, 1)], [1]), "m, n, k > 0"),
        (("strong", [(1, 1, 1)], []), "numbers of ranks"),
        (("strong", [(1, 1, 1)], [0, 1]), "numbers of ranks"),
    ],
)
def test_invalid_studies(arguments: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        cases(*arguments)


# ------------------------------------------------------------------ the file
def test_records_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    assert records.read_study(path) == records.Study()
    two, three = cases("weak", [(8, 8, 8)], [2, 3])
    lines = record(ONE, 1.0), records.failed_record(two, "of no use", []), {"machine": {"name": "m"}}, record(two, 1.0)
    for line in (*lines, record(three, 1.0)):
        records.append(path, line)
    study = records.open_study(path)
    assert study.attempts == [ONE, two, two, three]
    assert study.done == {ONE, two, three} == set(study.measured)
    assert study.machine == {"name": "m"}
    # a later failure does not replace a measurement; a wrong result is measured again
    records.append(path, records.failed_record(ONE, "now", []))
    records.append(path, record(three, 1.0) | {"status": "wrong"})
    study = records.open_study(path)
    assert study.measured[ONE]["status"] == "ok"
    assert study.done == {ONE, two}
    four, five = cases("strong", [(8, 8, 8)], [4, 5])
    records.append(path, records.failed_record(four, "x", []))
    assert records.left(records.open_study(path), [four, ONE, five]) == [five, four]  # the failed case is last


@pytest.mark.parametrize("cut", [1, 200, -1])
def test_only_an_unfinished_line_is_removed(tmp_path: Path, cut: int) -> None:
    path, (one, two, three) = tmp_path / "s.jsonl", cases("strong", [ONE.mnk], [1, 2, 3])
    records.append(path, record(one, 1.0))
    first = len(path.read_bytes())
    records.append(path, record(two, 1.0))
    both = path.read_bytes()
    path.write_bytes(both[:-1] if cut == -1 else both[: first + cut])
    study, whole = records.open_study(path), {one, two} if cut == -1 else {one}
    assert (study.torn, study.done) == (cut != -1, whole)
    records.append(path, record(three, 1.0))
    study = records.open_study(path)
    assert not study.torn and not study.unread and study.done == {*whole, three}


@pytest.mark.parametrize(
    "text",
    [
        *("hello", '{"format": 1, "case": {}, "status": "ok"}\n', '{"format": 2}\n', "[1, 2]\n", '{"format": 1, \n'),
        *(
            json.dumps({"format": 1, **record(ONE, 1.0)}).replace(*change) + "\n"
            for change in (("strong", "sideways"), ("median_seconds", "median"), ('"ok"', '"fine"'))
        ),
    ],
)
def test_files_of_other_data_are_refused_and_unchanged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(FileError, match=r"s\.jsonl: line 1 is not a measurement"):
        records.open_study(path)
    assert path.read_text() == text
    assert len(records.read_study(path).unread) == 1


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="it is a folder, not a file"):
        records.read_study(tmp_path)
    with pytest.raises(FileError, match="directory"):
        records.append(tmp_path / "missing" / "s.jsonl", record(ONE, 1.0))


def test_measurements_of_another_setting_are_refused(tmp_path: Path) -> None:
    path, setting = tmp_path / "s.jsonl", dict.fromkeys(records.SETTING, "here")
    records.append(path, record(ONE, 1.0, **setting))
    study = records.open_study(path)
    records.check_setting(path, study, setting | {"nodes": ["another"]})
    for name in setting:
        with pytest.raises(ArgumentError, match=f"with {name.replace('_', ' ')} 'here', here it is 'there'"):
            records.check_setting(path, study, setting | {name: "there"})


# ------------------------------------------------------------------ jobs
def test_number_of_ranks_that_fit(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    for environment, ranks in (
        ({}, None),
        ({"SLURM_NTASKS": "6", "SLURM_JOB_CPUS_PER_NODE": "64"}, 6),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8"}, 40),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_CPUS_PER_TASK": "4"}, 10),
        (pbs := {"PBS_NODEFILE": str(tmp_path / "nodes")}, 3),
        (lsf := {"LSB_DJOB_NUMPROC": "12", "LSB_MCPU_HOSTS": "n1 8 n2 4"}, 12),
    ):
        assert allocated_ranks(environment) == ranks, environment
    assert [*map(allocated_nodes, (pbs, lsf, {}))] == [2, 2, 1]


def test_threads_are_those_of_the_largest_job() -> None:
    cores = len(os.sched_getaffinity(0))
    for ranks, environment, threads in (
        (1, {}, cores),
        (2 * cores, {}, 1),
        (4 * cores, {"SLURM_JOB_NUM_NODES": "4"}, 1),
        (4, {"SLURM_JOB_NUM_NODES": "4"}, cores),
        (1, {"SLURM_CPUS_PER_TASK": "3"}, 3),
        (1, {"SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": "2"}, 2),
    ):
        assert threads_per_rank(ranks, environment) == threads, (ranks, environment)


def test_launchers() -> None:
    assert Launcher("env -i {ranks}").command(3, "info")[:3] == ["env", "-i", "3"]
    assert Launcher(None, {"PDGEMM_LAUNCH": "env {ranks}"}).template == "env {ranks}"
    for template, said in (
        ("env", r"must contain .ranks., the number of ranks"),
        ("mpiexec '-n {ranks}", "not a command"),
        ("no-such-launcher {ranks}", "no-such-launcher: no such command"),
    ):
        with pytest.raises(ArgumentError, match=said):
            Launcher(template)


JOB = """
import sys
from pathlib import Path
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import cases
wanted = cases("strong", [(8, 8, 8), (9, 9, 9)], [1, 2, 3])
for number in map(int, sys.argv[-1].split(",")):
    {act}
    records.append(Path({path!r}), {record!r} | {{"case": wanted[number].as_dict()}})
"""


@pytest.mark.parametrize(
    ("act", "code", "statuses", "said"),
    [
        ("pass", 0, ["ok"] * 6, ""),
        # a case ends its job: with an error, silently, or by a signal
        ("if number == 3: sys.exit('gone')", 1, ["ok"] * 3 + ["failed"] + ["ok"] * 2, "exit code 1: gone"),
        ("if number == 2: sys.exit(0)", 1, ["ok", "ok", "failed", "ok", "ok", "ok"], ""),
        ("import os; number == 4 and os.kill(os.getpid(), 9)", 1, ["ok"] * 4 + ["failed", "ok"], "exit code 137"),
        ("number == 0 and sys.exit(2)", 2, [], ""),  # exit code 2: bad input, no further jobs
    ],
)
def test_a_failed_job_loses_no_other_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], act: str, code: int, statuses: list[str], said: str
) -> None:
    path, job = tmp_path / "s.jsonl", tmp_path / "job.py"
    job.write_text(JOB.format(record=record(ONE, 1.0), path=str(path), act=act))
    wanted = cases("strong", [(8, 8, 8), (9, 9, 9)], [1, 2, 3])
    steps = StudyJobs(Launcher(f"{sys.executable} {job} {{ranks}}"), path, [], 1)
    assert steps.run(wanted, wanted) == code
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("FAILED ")]
    study = records.open_study(path)
    assert [study.measured[x]["status"] for x in wanted if x in study.measured] == statuses
    assert len(lines) == statuses.count("failed")
    for x in (x for x in study.measured.values() if x["status"] == "failed"):
        assert said in x["error"] and said in lines[0]


def test_confidence_of_a_median() -> None:
    """For ten numbers, from the second to the ninth (binomial, p = 1/2), as in Hoefler & Belli's table."""
    for number, ends in ((10, (1.0, 8.0)), (6, (0.0, 5.0)), (5, None)):
        assert confidence([float(x) for x in range(number)]) == ends
