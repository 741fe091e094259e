"""`pdgemm scaling`: studies that start ranks or run in a job, with failed cases, or ended by a signal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import jobs
import pytest
from jobs import pdgemm
from processes import TEXTS, running, started, until
from study_records import record
from tiers import thorough

from pdgemm.planning.machines.machine import Machine
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import Case


def scaling(folder: Path, *arguments: str, ranks: int = 0, **environment: str) -> jobs.Finished:
    """Run `pdgemm scaling ARGUMENTS` on `ranks` ranks, for 0 without a launcher; return the finished process."""
    return pdgemm(ranks, "scaling", *arguments, cwd=folder, timeout=110, **{"OMP_NUM_THREADS": "1"} | environment)


QUICK = ("--repeats", "6", "--no-calibrate")
SMALL = ("strong", "--shape", "96,80,64", "--ranks", "1,2", "--out", "s.jsonl", *QUICK)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study s.jsonl of a small shape on 1 and 2 ranks."""
    folder = tmp_path_factory.mktemp("study")
    run = scaling(folder, *SMALL)
    assert run.returncode == 0, run.stderr
    assert "[2/2] 2 ranks, 96 x 80 x 64 float64, auto: " in run.stdout
    return folder


@jobs.needs_mpiexec
def test_a_study_resumes(measured: Path, tmp_path: Path) -> None:
    study = records.open_study(measured / "s.jsonl")
    assert [x.ranks for x in study.attempts] == [1, 2]
    for case, found in study.measured.items():
        seconds, cost = found["median_seconds"], found["cost"]
        (low, high), setting = found["confidence"], found["setting"]
        assert found["residual"] <= found["residual_bound"] and len(found["seconds"]) == 6 and low <= seconds <= high
        assert found["gflops"] == pytest.approx(2 * 96 * 80 * 64 / seconds / 1e9)
        assert found["fraction_of_peak"] == pytest.approx(found["gflops"] / found["peak_gflops"])
        assert cost["core_hours"] == pytest.approx(seconds * case.ranks / 3600) and cost["gpu_hours"] == 0
        assert found["product"]["mnk"] == [96, 80, 64] and found["product"]["as_predicted"]
        assert setting["threads_per_rank"] == [1] and setting["cores_per_node"] == len(os.sched_getaffinity(0))
        assert found["command"][:3] == ["pdgemm", "scaling", "strong"] and "--only" not in found["command"]
        assert found["environment"]["OMP_NUM_THREADS"] == "1"
    lines = (measured / "s.jsonl").read_text().splitlines()
    shutil.copy(measured / "s.jsonl", tmp_path)
    run = scaling(tmp_path, *SMALL, "--shape", "8,8,8", "--ranks", "1")
    assert run.returncode == 0, run.stderr
    now = (tmp_path / "s.jsonl").read_text().splitlines()
    assert now[:2] == lines and len(now) == 3


@jobs.needs_mpiexec
def test_a_study_continues_when_its_output_is_closed(tmp_path: Path) -> None:
    command = jobs.python(2, "-m", "pdgemm", "scaling", *SMALL)
    with started(tmp_path, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        run.stdout.close()
        run.wait(60)
    assert [x.ranks for x in records.open_study(tmp_path / "s.jsonl").attempts] == [1, 2]


@jobs.needs_mpiexec
def test_a_study_within_a_job(tmp_path: Path) -> None:
    options = ("--shape", "64,64,64", "--out", "w.jsonl", "--algorithm", "summa", "--algorithm", "inner", *QUICK)
    run = scaling(tmp_path, "weak", *options, "--ranks", "1,2,4", ranks=2)
    assert run.returncode == 2
    assert run.stderr.startswith("pdgemm: error: this job has 2 ranks: cases of 4 ranks do not fit\n")
    assert scaling(tmp_path, "weak", *options, "--ranks", "1,2", ranks=2).returncode == 0
    study = records.open_study(tmp_path / "w.jsonl")
    assert [(x.ranks, x.mnk[0], x.algorithm) for x in study.attempts] == [
        (1, 64, "summa"), (1, 64, "inner"), (2, 91, "summa"), (2, 91, "inner"),
    ]  # fmt: skip
    for case, x in study.measured.items():
        assert x["status"] == "ok" and x["product"]["algorithm"] == case.algorithm
        assert x["command"][:5] == ["mpirun", "-n", "2", "pdgemm", "scaling"]


@jobs.needs_mpiexec
def test_calibration_is_kept_in_the_study(tmp_path: Path) -> None:
    """A study calibrates once, and keeps the machine (here a fake one)."""
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
def test_ranks_beyond_the_allocation(tmp_path: Path) -> None:
    options = ("strong", "--shape", "32,32,32", "--out", "s.jsonl", "--launch", f"{jobs.MPIEXEC} -n {{ranks}}", *QUICK)
    run = scaling(tmp_path, *options, "--ranks", "1,4,8", SLURM_NTASKS="2")
    assert run.returncode == 2
    assert run.stderr == "pdgemm: error: the allocation has room for 2 ranks: cases of 4, 8 ranks do not fit\n"
    assert not (tmp_path / "s.jsonl").exists()


@jobs.needs_mpiexec
def test_an_impossible_case_is_recorded_and_the_study_continues(tmp_path: Path) -> None:
    options = ("--shape", "64,64,64", "--ranks", "1,2", "--out", "s.jsonl", "--memory-limit", "1")
    run = scaling(tmp_path, "strong", *options, "--algorithm", "cannon", "--algorithm", "summa", *QUICK, ranks=2)
    assert run.returncode == 1
    study = records.open_study(tmp_path / "s.jsonl")
    failed = [x for x in study.measured.values() if x["status"] == "failed"]
    assert failed and all("memory limit" in x["error"] for x in failed) and len(study.measured) == 4
    assert run.stderr.count("FAILED") == len(failed)


@jobs.needs_mpiexec
@pytest.mark.parametrize(
    ("ranks", "out", "said"),
    [
        (0, "notes.txt", "line 1 is not a measurement"),
        (0, "missing/s.jsonl", "does not exist"),
        *((ranks, "s.jsonl", "they do not belong in one study") for ranks in (0, 2)),
        *((ranks, "locked.jsonl", "another study is being written to it") for ranks in (0, 2)),
    ],
)
def test_files_of_other_data_are_not_changed_by_a_study(tmp_path: Path, ranks: int, out: str, said: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    records.append(tmp_path / "s.jsonl", record(Case("strong", 2, (8, 8, 8)), 1.0))
    before = {x: x.read_bytes() for x in tmp_path.iterdir()}
    with records.study_lock(tmp_path / "locked.jsonl"):
        words = ("scaling", "strong", "--shape", "8,8,8", "--ranks", "1", "--out", out, *QUICK)
        run = pdgemm(ranks, *words, cwd=tmp_path)
        assert run.returncode == 2
        assert run.stderr.splitlines()[0].startswith("pdgemm: error: ") and said in run.stderr
    assert {x: x.read_bytes() for x in tmp_path.iterdir()} == before


ENDLESS = ("--ranks", "2", "--shape", "512,512,512", "--repeats", "100000")


def listening(folder: Path) -> list[int]:
    """Return the process ids of a study's ranks in this folder that handle SIGUSR1."""
    heard = []
    for pid in running(lambda words, where: where == folder and "--only" in words and words[0].endswith("python")):
        with suppress(OSError):  # the process has ended
            caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
            heard += [pid] * (int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
    return heard


@jobs.needs_mpiexec
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, -signal.SIGUSR1, *(pytest.param(x, marks=thorough) for x in (signal.SIGINT, signal.SIGUSR1))],
)
def test_a_study_ended_by_a_signal_keeps_its_records(measured: Path, tmp_path: Path, number: int) -> None:
    """The signal ends the second case, which would take minutes.   number : a negative one is sent to mpiexec."""
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
def test_a_crashed_rank_loses_only_its_case(tmp_path: Path) -> None:
    """When a rank crashes, mpiexec ends the others by SIGTERM; the study records the failure and continues."""
    words = ("scaling", "strong", "--out", "s.jsonl", "--no-calibrate", *ENDLESS, "--shape", "64,64,64")
    path = tmp_path / "s.jsonl"
    with started(tmp_path, jobs.python(0, "-m", "pdgemm", *words), **TEXTS) as run:
        assert until(lambda: len(listening(tmp_path)) == 2)
        first = listening(tmp_path)
        os.kill(first[1], signal.SIGSEGV)
        # the next case runs in another job
        assert until(lambda: path.exists() and len(records.read_study(path).attempts) == 1)
        assert until(lambda: len({*listening(tmp_path)} - {*first}) == 2)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    (found,) = records.open_study(path).measured.values()
    assert found["status"] == "failed" and "its job ended with exit code" in found["error"]
    assert found["case"]["mnk"] == [512, 512, 512] and found["command"][:2] == ["pdgemm", "scaling"]
    assert "FAILED 2 ranks, 512 x 512 x 512" in errors and run.returncode == 143


@jobs.needs_mpiexec
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=thorough)])
def test_a_study_uses_the_machine_of_its_file(tmp_path: Path, ranks: int) -> None:
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
def test_sigterm_ends_a_rank_that_waits_inside_mpi(tmp_path: Path, ranks: int, number: int) -> None:
    with started(tmp_path, jobs.python(ranks, "-c", IN_MPI), **TEXTS) as run:
        assert run.stdout.readline() == "ready\n"
        assert {x.suffix for x in tmp_path.iterdir()} == {".partial", ".pdgemm-lock"}
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 143
    assert errors.count("s, writing: nothing remains") == 1
    assert [*tmp_path.iterdir()] == []
