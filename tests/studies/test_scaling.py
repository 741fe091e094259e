"""Scaling studies: what is measured, the file of measurements, jobs that fail or are ended, and the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import jobs
import pytest
from jobs import pdgemm
from processes import TEXTS, running, started, until
from tiers import thorough

from pdgemm.errors import ArgumentError, FileError
from pdgemm.planning.machines.machine import Machine
from pdgemm.support.launcher import allocated_nodes, allocated_ranks
from pdgemm.tools.studies import energy, records
from pdgemm.tools.studies.cases import FAMILIES, Case, cases
from pdgemm.tools.studies.energy import Meter
from pdgemm.tools.studies.jobs import Launcher, StudyJobs, threads_per_rank
from pdgemm.tools.studies.measure import confidence

ONE = Case("strong", 1, (64, 64, 64))
SETTING = dict.fromkeys(records.SETTING, "here")


def record(case: Case, **facts: Any) -> records.Record:
    """As of a measurement."""
    return {
        "case": case.as_dict(), "status": "ok", "median_seconds": 1.0, "product": {}, "setting": SETTING, **facts,
    }  # fmt: skip


# ------------------------------------------------------------------ what is measured
def test_strong_studies_keep_the_shape() -> None:
    found = cases("strong", [(64, 32, 16), (8, 8, 8)], [4, 1, 4], ["float64", "float32"], ["auto", "cannon"])
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2
    assert [x.ranks for x in found] == [1] * 8 + [4] * 8
    assert {x.mnk for x in found} == {(64, 32, 16), (8, 8, 8)}
    assert len({x.curve for x in found}) == 8


def test_weak_studies_keep_the_memory_of_a_rank() -> None:
    found = cases("weak", [(1000, 2000, 3000)], [1, 4, 7, 100])
    assert found[0].mnk == (1000, 2000, 3000)
    assert len({x.curve for x in found}) == 1
    for x in found:
        m, n, k = x.mnk
        assert (m * k + k * n + m * n) / x.ranks == pytest.approx(11e6, rel=2e-3)
        assert m / n == pytest.approx(0.5, rel=2e-3) and n / k == pytest.approx(2 / 3, rel=2e-3)
    assert found[1] == cases("weak", [(1000, 2000, 3000)], [4])[0]  # whatever else is in the study


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
def test_what_is_no_study(arguments: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        cases(*arguments)


# ------------------------------------------------------------------ the file
def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    assert records.read_study(path) == records.Study()
    two, three = cases("weak", [(8, 8, 8)], [2, 3])
    lines = record(ONE), records.failed_record(two, "of no use", []), {"machine": {"name": "m"}}, record(two)
    for each in (*lines, record(three)):
        records.append(path, each)
    study = records.open_study(path)
    assert study.attempts == [ONE, two, two, three]
    assert study.done == {ONE, two, three} == set(study.measured)
    assert study.machine == {"name": "m"}
    # a later failure does not lose what was measured; a wrong result is measured again
    records.append(path, records.failed_record(ONE, "now", []))
    records.append(path, record(three, status="wrong"))
    study = records.open_study(path)
    assert study.measured[ONE]["status"] == "ok"
    assert study.done == {ONE, two}
    four = Case("strong", 4, (8, 8, 8))
    records.append(path, records.failed_record(four, "x", []))
    assert records.left(records.open_study(path), [four, ONE, Case("strong", 5, (8, 8, 8))]) == [
        Case("strong", 5, (8, 8, 8)),
        four,  # which failed before
    ]


@pytest.mark.parametrize("cut", [1, 200, -1])
def test_a_line_that_was_not_finished_goes_and_nothing_else(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "s.jsonl"
    two = Case("strong", 2, (64, 64, 64))
    records.append(path, record(ONE))
    whole = path.read_bytes()
    records.append(path, record(two))
    both = path.read_bytes()
    path.write_bytes(both[: len(both) - 1 if cut == -1 else len(whole) + cut])
    study = records.open_study(path)
    assert study.torn == (cut != -1)
    assert study.done == ({ONE, two} if cut == -1 else {ONE})
    records.append(path, record(Case("strong", 3, (64, 64, 64))))
    study = records.open_study(path)
    assert not study.torn and not study.unread
    assert len(study.done) == (3 if cut == -1 else 2)


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        '{"format": 1, "case": {}, "status": "ok"}\n',
        '{"format": 2}\n',
        "[1, 2]\n",
        '{"format": 1, ' + "\n",
        json.dumps({"format": 1, **record(ONE)}).replace("strong", "sideways") + "\n",
        json.dumps({"format": 1, **record(ONE)}).replace("median_seconds", "median") + "\n",
        json.dumps({"format": 1, **record(ONE)}).replace('"ok"', '"fine"') + "\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
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
        records.append(tmp_path / "missing" / "s.jsonl", record(ONE))


def test_measurements_of_another_setting_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    records.append(path, record(ONE))
    study = records.open_study(path)
    records.check_setting(path, study, SETTING | {"nodes": ["another"]})
    for name in records.SETTING:
        with pytest.raises(ArgumentError, match=f"with {name.replace('_', ' ')} 'here', here it is 'there'"):
            records.check_setting(path, study, SETTING | {name: "there"})


# ------------------------------------------------------------------ jobs
def test_how_many_ranks_there_is_room_for(tmp_path: Path) -> None:
    assert allocated_ranks({}) is None
    assert allocated_ranks({"SLURM_NTASKS": "6", "SLURM_JOB_CPUS_PER_NODE": "64"}) == 6
    assert allocated_ranks({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8"}) == 40
    assert allocated_ranks({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_CPUS_PER_TASK": "4"}) == 10
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    pbs, lsf = {"PBS_NODEFILE": str(tmp_path / "nodes")}, {"LSB_DJOB_NUMPROC": "12", "LSB_MCPU_HOSTS": "n1 8 n2 4"}
    assert (allocated_ranks(pbs), allocated_nodes(pbs)) == (3, 2)
    assert (allocated_ranks(lsf), allocated_nodes(lsf)) == (12, 2)
    assert allocated_nodes({}) == 1


def test_threads_are_those_of_the_largest_job() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1, {}) == cores
    assert threads_per_rank(2 * cores, {}) == 1
    assert threads_per_rank(4 * cores, {"SLURM_JOB_NUM_NODES": "4"}) == 1
    assert threads_per_rank(4, {"SLURM_JOB_NUM_NODES": "4"}) == cores
    assert threads_per_rank(1, {"SLURM_CPUS_PER_TASK": "3"}) == 3
    assert threads_per_rank(1, {"SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": "2"}) == 2


def test_launchers() -> None:
    assert Launcher("env -i {ranks}").command(3, "info")[:3] == ["env", "-i", "3"]
    assert Launcher(None, {"PDGEMM_LAUNCH": "env {ranks}"}).template == "env {ranks}"
    with pytest.raises(ArgumentError, match=r"must contain .ranks., the number of ranks"):
        Launcher("env")
    with pytest.raises(ArgumentError, match="not a command"):
        Launcher("mpiexec '-n {ranks}")
    with pytest.raises(ArgumentError, match="no-such-launcher: no such command"):
        Launcher("no-such-launcher {ranks}")


JOB = """
import json, sys
from pathlib import Path
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import cases
def record(case):
    return {{
        "case": case.as_dict(), "status": "ok", "median_seconds": 1.0, "product": {{}}, "setting": {setting!r},
    }}
ranks, path = int(sys.argv[1]), Path({path!r})
wanted = cases("strong", [(8, 8, 8), (9, 9, 9)], [1, 2, 3])
for number in map(int, sys.argv[-1].split(",")):
    {act}
    records.append(path, record(wanted[number]))
"""


@pytest.mark.parametrize(
    ("act", "code", "statuses", "said"),
    [
        ("pass", 0, ["ok"] * 6, ""),
        # the second case of two ranks takes its job along; the first of three ends it without a word
        ("if number == 3: sys.exit('gone')", 1, ["ok"] * 3 + ["failed"] + ["ok"] * 2, "exit code 1: gone"),
        ("if number == 2: sys.exit(0)", 1, ["ok", "ok", "failed", "ok", "ok", "ok"], ""),
        ("import os; number == 4 and os.kill(os.getpid(), 9)", 1, ["ok"] * 4 + ["failed", "ok"], "exit code 137"),
        ("number == 0 and sys.exit(2)", 2, [], ""),  # bad input is that of all jobs
    ],
)
def test_a_job_that_fails_takes_nothing_along(
    tmp_path: Path, act: str, code: int, statuses: list[str], said: str
) -> None:
    path, job = tmp_path / "s.jsonl", tmp_path / "job.py"
    job.write_text(JOB.format(setting=SETTING, path=str(path), act=act))
    wanted = cases("strong", [(8, 8, 8), (9, 9, 9)], [1, 2, 3])
    told: list[str] = []
    steps = StudyJobs(Launcher(f"{sys.executable} {job} {{ranks}}"), path, [], 1, told.append)
    assert steps.run(wanted, wanted) == code
    study = records.open_study(path)
    assert [study.measured[x]["status"] for x in wanted if x in study.measured] == statuses
    assert len(told) == statuses.count("failed")
    for x in (x for x in study.measured.values() if x["status"] == "failed"):
        assert said in x["error"] and said in told[0]


# ------------------------------------------------------------------ energy
def zone(folder: Path, name: str, called: str, joules: float, wraps: float = 1000.0) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / "name").write_text(f"{called}\n")
    (made / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (made / "max_energy_range_uj").write_text(f"{wraps * 1e6:.0f}\n")
    return made / "energy_uj"


def test_energy_of_packages_and_memory(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 10)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 990)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 5)
    zone(tmp_path, "intel-rapl:0:0", "core", 7)  # part of its package
    zone(tmp_path, "intel-rapl:2", "psys", 9)  # which holds the packages
    meter = Meter(False, tmp_path)
    assert meter.absent == ""
    assert meter.names == ["RAPL package-0", "RAPL dram", "RAPL package-1"]
    first.write_text("12500000\n")
    second.write_text("4000000\n")  # began again at 1000
    memory.write_text("5250000\n")
    assert meter.joules() == pytest.approx(2.5 + 14 + 0.25)


def test_energy_that_is_not_counted_is_absent(tmp_path: Path) -> None:
    assert Meter(False, tmp_path).absent == "no RAPL counters"
    zone(tmp_path, "intel-rapl:0", "package-0", 10).write_text("nonsense")
    assert "cannot be read" in Meter(False, tmp_path).absent
    assert Meter(False, tmp_path).joules() == 0 and Meter(False, tmp_path).names == []


def test_energy_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 10)
    used = [1000, 2000]
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit, nvml.nvmlDeviceGetCount = OSError, lambda: None, lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda number: number
    nvml.nvmlDeviceGetTotalEnergyConsumption = used.__getitem__
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(energy, "find_spec", lambda name: nvml)
    meter = Meter(True, tmp_path)
    used[:] = 3000, 2500
    assert meter.joules() == pytest.approx(2.5)
    assert meter.names == ["RAPL package-0", "GPU 0", "GPU 1"]

    def lost(handle: int) -> float:
        raise OSError("no such counter")

    nvml.nvmlDeviceGetTotalEnergyConsumption = lost
    assert Meter(True, tmp_path).absent == "NVML cannot be read (no such counter)"
    assert Meter(True, tmp_path).names == ["RAPL package-0"]  # what is counted is told
    monkeypatch.setattr(energy, "find_spec", lambda name: None)
    assert Meter(True, tmp_path).absent.startswith("no NVML")


def test_confidence_of_a_median() -> None:
    """Of ten numbers the second and the ninth: binomial, p = 1/2, as in Hoefler & Belli's table."""
    assert confidence([float(x) for x in range(10)]) == (1.0, 8.0)
    assert confidence([float(x) for x in range(6)]) == (0.0, 5.0)
    assert confidence([float(x) for x in range(5)]) is None


# ------------------------------------------------------------------ the command
def scaling(folder: Path, *arguments: str, ranks: int = 0, **environment: str) -> jobs.Finished:
    """`pdgemm scaling ARGUMENTS`, alone or on so many ranks, finished."""
    environment = {"OMP_NUM_THREADS": "1"} | environment
    return jobs.pdgemm(ranks, "scaling", *arguments, cwd=folder, timeout=110, **environment)


QUICK = ("--repeats", "6", "--no-calibrate")
SMALL = ("strong", "--shape", "96,80,64", "--ranks", "1,2", "--out", "s.jsonl", *QUICK)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of a small shape on 1 and on 2 ranks."""
    folder = tmp_path_factory.mktemp("study")
    run = scaling(folder, *SMALL)
    assert run.returncode == 0, run.stderr
    assert "[2/2] 2 ranks, 96 x 80 x 64 float64, auto: " in run.stdout
    return folder


@jobs.needs_mpiexec
def test_a_study_is_gone_on_with(measured: Path, tmp_path: Path) -> None:
    study = records.open_study(measured / "s.jsonl")
    assert [x.ranks for x in study.attempts] == [1, 2]
    for case, found in study.measured.items():
        assert found["residual"] <= found["residual_bound"]
        assert len(found["seconds"]) == 6
        low, high = found["confidence"]
        assert low <= found["median_seconds"] <= high
        flops = 2 * 96 * 80 * 64
        assert found["gflops"] == pytest.approx(flops / found["median_seconds"] / 1e9)
        assert found["fraction_of_peak"] == pytest.approx(found["gflops"] / found["peak_gflops"])
        assert found["cost"]["core_hours"] == pytest.approx(found["median_seconds"] * case.ranks / 3600)
        assert found["cost"]["gpu_hours"] == 0
        assert (found["cost"]["joules"] is None) == found["cost"]["energy"].startswith("absent: ")
        assert found["product"]["mnk"] == [96, 80, 64]
        assert found["product"]["as_predicted"]
        assert found["setting"]["threads_per_rank"] == [1]
        assert found["command"][:3] == ["pdgemm", "scaling", "strong"] and "--only" not in found["command"]
        assert found["environment"]["OMP_NUM_THREADS"] == "1"
        assert found["setting"]["cores_per_node"] == len(os.sched_getaffinity(0))
    lines = (measured / "s.jsonl").read_text().splitlines()
    shutil.copy(measured / "s.jsonl", tmp_path)
    run = scaling(tmp_path, *SMALL, "--shape", "8,8,8", "--ranks", "1")
    assert run.returncode == 0, run.stderr
    now = (tmp_path / "s.jsonl").read_text().splitlines()
    assert now[:2] == lines and len(now) == 3


@jobs.needs_mpiexec
def test_a_study_goes_on_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    command = jobs.python(2, "-m", "pdgemm", "scaling", *SMALL)
    with started(tmp_path, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        run.stdout.close()
        run.wait(60)
    assert [x.ranks for x in records.open_study(tmp_path / "s.jsonl").attempts] == [1, 2]


@jobs.needs_mpiexec
def test_a_study_within_a_job(tmp_path: Path) -> None:
    options = ("--shape", "64,64,64", "--ranks", "1,2,4", "--out", "w.jsonl", "--algorithm", "summa", "--algorithm")
    run = scaling(tmp_path, "weak", *options, "inner", *QUICK, ranks=2)
    assert run.returncode == 1
    assert run.stderr.count("this job has 2 ranks: cases of 4 ranks do not fit, and are left out") == 1
    study = records.open_study(tmp_path / "w.jsonl")
    assert [(x.ranks, x.mnk[0], x.algorithm) for x in study.attempts] == [
        (1, 64, "summa"), (1, 64, "inner"), (2, 91, "summa"), (2, 91, "inner"),
    ]  # fmt: skip
    for case, x in study.measured.items():
        assert x["status"] == "ok" and x["product"]["algorithm"] == case.algorithm
        assert x["command"][:5] == ["mpirun", "-n", "2", "pdgemm", "scaling"]


@jobs.needs_mpiexec
def test_calibration_is_kept_in_the_study(tmp_path: Path) -> None:
    """What is measured by it is the subject of other tests."""
    plant = jobs.with_plant(
        tmp_path,
        "import sys, types\n"
        "def calibrate(comm, device):\n"
        "    from pdgemm.planning.machines.machine import Machine\n"
        "    return Machine(name=f'of {comm.size} ranks')\n"
        "sys.modules['pdgemm.tools.calibrate'] = types.SimpleNamespace(calibrate=calibrate)\n",
    )
    words = ("shapes", "--shape", "64,64,64", "--ranks", "2", "--out", "s.jsonl", "--repeats", "2")
    for done in (0, 4):
        before = (tmp_path / "s.jsonl").read_bytes() if done else b""
        run = scaling(tmp_path, *words, **plant)
        assert run.returncode == 0, run.stderr
        study = records.open_study(tmp_path / "s.jsonl")
        assert study.machine is not None and study.machine["name"] == "of 2 ranks"
        assert len(study.done) == 4 and all(x["confidence"] is None for x in study.measured.values())
        assert (tmp_path / "s.jsonl").read_bytes() == before or not done


@jobs.needs_mpiexec
def test_ranks_that_the_allocation_has_not(tmp_path: Path) -> None:
    options = ("strong", "--shape", "32,32,32", "--out", "s.jsonl", "--launch", f"{jobs.MPIEXEC} -n {{ranks}}", *QUICK)
    run = scaling(tmp_path, *options, "--ranks", "4,8", SLURM_NTASKS="2")
    assert run.returncode == 2
    assert run.stderr == "pdgemm: error: the allocation has room for 2 ranks: cases of 4, 8 ranks do not fit\n"
    assert not (tmp_path / "s.jsonl").exists()
    run = scaling(tmp_path, *options, "--ranks", "1,8", SLURM_NTASKS="2")
    assert run.returncode == 1
    assert "cases of 8 ranks do not fit, and are left out" in run.stderr
    assert [x.ranks for x in records.open_study(tmp_path / "s.jsonl").done] == [1]


@jobs.needs_mpiexec
def test_a_case_that_cannot_be_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    options = ("--shape", "64,64,64", "--ranks", "1,2", "--out", "s.jsonl", "--memory-limit", "1")
    run = scaling(tmp_path, "strong", *options, "--algorithm", "cannon", "--algorithm", "summa", *QUICK, ranks=2)
    assert run.returncode == 1
    study = records.open_study(tmp_path / "s.jsonl")
    failed = [x for x in study.measured.values() if x["status"] == "failed"]
    assert failed and all("memory limit" in x["error"] for x in failed) and len(study.measured) == 4
    assert run.stderr.count("FAILED") == len(failed)


@jobs.needs_mpiexec
@pytest.mark.parametrize("ranks", [0, 2])
def test_bad_input_of_a_study(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    records.append(tmp_path / "s.jsonl", record(Case("strong", 2, (8, 8, 8))))
    before = (tmp_path / "s.jsonl").read_bytes()
    for out, said in (
        ("notes.txt", "line 1 is not a measurement"),
        ("missing/s.jsonl", "does not exist"),
        ("s.jsonl", "they do not belong in one study"),
    )[2 * (ranks == 2) :]:
        words = ("scaling", "strong", "--shape", "8,8,8", "--ranks", "1", "--out", out, *QUICK)
        run = pdgemm(ranks, *words, cwd=tmp_path)
        assert run.returncode == 2
        assert run.stderr.splitlines()[0].startswith("pdgemm: error: ") and said in run.stderr
    assert (tmp_path / "notes.txt").read_text() == "hello"
    assert (tmp_path / "s.jsonl").read_bytes() == before


ENDLESS = ("--ranks", "2", "--shape", "512,512,512", "--repeats", "100000")


def listening(folder: Path) -> list[int]:
    """Ranks of a study in this folder that hear SIGUSR1."""
    heard = []
    for pid in running(lambda words, where: where == folder and "--only" in words and words[0].endswith("python")):
        with suppress(OSError):  # it has ended
            caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
            heard += [pid] * (int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
    return heard


@jobs.needs_mpiexec
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, -signal.SIGUSR1, *(pytest.param(x, marks=thorough) for x in (signal.SIGINT, signal.SIGUSR1))],
)
def test_a_study_that_is_ended_keeps_what_it_has(measured: Path, tmp_path: Path, number: int) -> None:
    """In the second case, which would take minutes; a number below 0: to its job, as a batch system may send it."""
    path = Path(shutil.copy(measured / "s.jsonl", tmp_path))
    with started(tmp_path, jobs.python(0, "-m", "pdgemm", "scaling", *SMALL, *ENDLESS), **TEXTS) as run:
        assert until(lambda: len(listening(tmp_path)) == 2)
        if number > 0:
            run.send_signal(number)
        else:
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            os.kill(int(children[0]), -number)
        said, errors = run.communicate(timeout=60)
    assert run.returncode == 143, errors
    assert "ended by a signal: 1 of 2 cases are measured and in s.jsonl" in errors
    assert len(records.open_study(path).done) == 2 and "2 cases, 1 to run" in said


@jobs.needs_mpiexec
def test_a_rank_that_crashes_takes_its_case_along_and_no_other(tmp_path: Path) -> None:
    """mpiexec then ends the other ranks by SIGTERM, of which they speak: that is no end of the study."""
    words = ("scaling", "strong", "--out", "s.jsonl", "--no-calibrate", *ENDLESS, "--shape", "64,64,64")
    path = tmp_path / "s.jsonl"
    with started(tmp_path, jobs.python(0, "-m", "pdgemm", *words), **TEXTS) as run:
        assert until(lambda: len(listening(tmp_path)) == 2)
        first = listening(tmp_path)
        os.kill(first[1], signal.SIGSEGV)
        # the next case is that of another job
        assert until(lambda: path.exists() and len(records.read_study(path).attempts) == 1)
        assert until(lambda: len({*listening(tmp_path)} - {*first}) == 2)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    (found,) = records.open_study(path).measured.values()
    assert found["status"] == "failed" and "its job ended with exit code" in found["error"]
    assert found["case"]["mnk"] == [512, 512, 512] and found["command"][:2] == ["pdgemm", "scaling"]
    assert "FAILED 2 ranks, 512 x 512 x 512" in errors and run.returncode == 143


@jobs.needs_mpiexec
@pytest.mark.parametrize("ranks", [0, 2])
def test_two_studies_do_not_share_a_file(tmp_path: Path, ranks: int) -> None:
    with records.study_lock(tmp_path / "s.jsonl"):
        run = scaling(tmp_path, *SMALL, "--ranks", "1", ranks=ranks)
        assert run.returncode == 2 and "another study is being written to it" in run.stderr
    assert not (tmp_path / "s.jsonl").exists()


@jobs.needs_mpiexec
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=thorough)])
def test_the_machine_of_a_file_is_that_of_the_study(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "m.json").write_text(Machine(name="theirs").as_json())
    for _ in range(2):
        assert scaling(tmp_path, *SMALL, "--ranks", "1", "--machine", "m.json", ranks=ranks).returncode == 0
        study = records.open_study(tmp_path / "s.jsonl")
        assert study.machine is not None and study.machine["name"] == "theirs"
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 2


# ------------------------------------------------------------------ SIGTERM in any command
IN_MPI = """
import sys, time
from pathlib import Path
from mpi4py import MPI
from pdgemm.support import signals as ending
from pdgemm.io.atomic import replacing
comm = MPI.COMM_WORLD
ending.watch(comm.rank)
ending.doing("writing", "nothing remains")
with replacing(Path("c"), comm, 10) as partial:
    comm.Barrier()  # all of them hear signals now
    if comm.rank == 0:
        partial.write_text("half")
        print("ready", flush=True)
        comm.Recv(bytearray(1), source=MPI.ANY_SOURCE)
    time.sleep(100)
"""


@jobs.needs_mpiexec
@pytest.mark.parametrize(("ranks", "number"), [(0, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_rank_that_waits_inside_mpi_hears_of_the_end(tmp_path: Path, ranks: int, number: int) -> None:
    with started(tmp_path, jobs.python(ranks, "-c", IN_MPI), **TEXTS) as run:
        assert run.stdout.readline() == "ready\n"
        assert {x.suffix for x in tmp_path.iterdir()} == {".partial", ".pdgemm-lock"}
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 143
    assert errors.count("s, writing: nothing remains") == 1
    assert [*tmp_path.iterdir()] == []
