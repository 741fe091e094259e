"""Job scripts for products, programs and other commands, and jobs that end early."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from many_commands import read
from problems import TOLERANCE, gemm_error
from slurm_jobs import (
    BARE,
    CHECKOUT,
    LOST,
    SCRIPTS,
    SLOW_PRODUCT,
    SLOW_WRITE,
    Batch,
    Job,
    Task,
    needs_cluster,
    output_of,
    slurm,
    with_product,
    write_matrices,
)
from tiers import thorough

from pdgemm.devices import gpu_binding

pytestmark = needs_cluster


# ------------------------------------------------------------------ products
def test_one_node(batch: Batch) -> None:
    """As in the script's first lines: variables by --export; the output is in the folder where sbatch was called."""
    exported = ",".join(f"{name}={value}" for name, value in batch.variables.items())
    batch.variables = {}
    job = batch.completed("one_node.sbatch", f"--export=ALL,{exported}")
    assert (batch.folder / f"pdgemm-one-node-{job.id}.out").read_text().startswith("one_node.sbatch: job ")
    assert re.search(r"residual .*: ok\n", job.out)
    assert "2 ranks by 'mpirun" in job.out and "1 thread per rank" in job.out
    batch.check_product()


def test_many_nodes(batch: Batch) -> None:
    """Two nodes: ranks of a node share memory, and messages are sent between nodes."""
    job = batch.completed("many_nodes.sbatch", shape=(2, 2), OPTIONS="--algorithm summa")
    assert "on n[1-2], pdgemm " in job.out and "4 ranks by 'mpirun" in job.out
    assert "mover shared" in job.out
    assert re.search(r"messages received +[1-9]", job.out) and "messages as predicted" in job.out
    assert re.search(r"residual .*: ok\n", job.out)
    batch.check_product()


def test_the_speeds_of_a_machine_are_measured_once(batch: Batch) -> None:
    path = batch.folder / "machine.json"
    for measured in (True, False):
        job = batch.completed("many_nodes.sbatch", seconds=120, MACHINE="machine.json")
        assert ("float64: GFLOP/s " in job.out) == measured
        assert json.loads(path.read_text())["name"]
        batch.check_product()
    path.write_text("nothing")
    assert "machine.json" in batch.refused("many_nodes.sbatch", MACHINE="machine.json")  # the existing file is read


def test_gpus(batch: Batch) -> None:
    if gpu_binding.visible():
        pytest.skip("this test needs a node without GPUs")
    job = batch.done("gpus.sbatch", "--gpus-per-node=2", shape=(2, 1))
    assert "warning: 2 ranks, but 4 GPUs" in job.out
    assert job.out.index("GPU-aware MPI") < job.out.index("pdgemm: error: ")
    assert "'cuda'" in job.error()
    assert not (batch.folder / "c.h5").exists()


def test_a_wrong_product_is_told_by_the_exit_code(batch: Batch) -> None:
    wrong = with_product("C[:1, :1] += 1e-6")
    assert "WRONG" in batch.done("one_node.sbatch", **batch.changed(wrong)).failed(1).out
    assert not (batch.folder / "c.h5").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("A", "", "A is not set: sbatch --export=ALL,A=a.h5:/x,B=b.h5:/y,C=c.h5:/z one_node.sbatch"),
        ("B", "none.h5:/y", "B=none.h5:/y: no file none.h5 (seen from "),
        ("B", "b.h5", "B='b.h5' is not of the form FILE:/DATASET"),
        ("C", "none/c.h5:/z", "C=none/c.h5:/z: there is no folder none (seen from "),
        ("B", "b.h5:/nope", "pdgemm: error: b.h5 has no dataset /nope"),
        ("OPTIONS", "--transb T", "pdgemm: error: inner dimensions do not agree"),
    ],
    ids=["not set", "no file", "form", "folder", "dataset", "shapes"],
)
def test_bad_input(batch: Batch, name: str, value: str, message: str) -> None:
    assert message in batch.refused("one_node.sbatch", **{name: value})
    assert not (batch.folder / "c.h5").exists()


# ------------------------------------------------------------------ programs and other commands
PROGRAM = """
import sys
import numpy as np
from pdgemm import DistMatrix, ProcessGrid
grid = ProcessGrid()
A = DistMatrix.eye(int(sys.argv[1]), grid=grid)
trace = np.trace(A @ A)
if grid.rank == 0:
    print(f"{grid.size} ranks, trace {trace}, arguments {sys.argv[1:]}")
"""


def test_a_program_and_a_command(batch: Batch) -> None:
    (batch.folder / "my.py").write_text(PROGRAM)
    job = batch.completed("run.sbatch", words=["my.py", "5", "two words"])
    assert "2 ranks, trace 5.0, arguments ['5', 'two words']" in job.out
    batch.completed("run.sbatch", words=["gram", "a.h5:/x", "-o", "g.h5:/g"])
    a = read(batch.folder / "a.h5", "x")
    assert gemm_error(read(batch.folder / "g.h5", "g"), 1, a.T, a) <= TOLERANCE


def test_an_array_of_commands(batch: Batch) -> None:
    folder, words = batch.folder, ["multiply", "a{task}.h5:/x", "b.h5:/y", "-o", "c{task}.h5:/z"]
    for task in (3, 5):
        shutil.copy(folder / "a.h5", folder / f"a{task}.h5")
    tasks = batch.submit("run.sbatch", "--array=3,5", words=words).ended_tasks()
    assert [task.code for task in tasks] == [0, 0], tasks
    for task in (3, 5):
        batch.check_product(f"c{task}")
    message = "has {task}, but this job is not an array: sbatch --array=0-9 ... run.sbatch ..."
    assert message in batch.refused("run.sbatch", words=words)


def test_programs_that_cannot_run(batch: Batch) -> None:
    (batch.folder / "wrong.py").write_text("raise SystemExit(7)")
    words: list[str]
    for words, code, message in (
        ([], 2, "no command: append 'my.py'"),
        (["none.py"], 2, "none.py: no such program (seen from "),
        (["svd", "none.h5:/x", "-o", "s.h5:/s"], 2, "none.h5"),
        (["wrong.py"], 7, ""),
    ):
        assert message in batch.done("run.sbatch", words=words).failed(code).out


@pytest.mark.parametrize("script", ["run.pbs", "run.lsf"])
def test_other_batch_systems(folder: Path, site: str, script: str) -> None:
    """Scripts for PBS and LSF, with the variables that these systems set: two ranks on one node, task 3 of an array.

    PBS starts a copy of the script in the home folder.
    """
    (folder / "my.py").write_text(PROGRAM)
    (folder / "nodes").write_text("n1\nn1\n")
    (folder / "home").mkdir()
    (folder / "slurm").symlink_to(SCRIPTS)
    shutil.copy(SCRIPTS / script, folder / "home" / "copy")
    variables = BARE | {"PDGEMM_SITE": site, "PDGEMM_RUN": "my.py {task}"}
    if script == "run.pbs":
        variables |= {"PBS_JOBID": "7[3].pbs", "PBS_NODEFILE": str(folder / "nodes"), "PBS_ARRAY_INDEX": "3"}
        variables |= {"PBS_O_WORKDIR": str(folder)}
    else:
        variables |= {"LSB_JOBID": "7", "LSB_JOBINDEX": "3", "LSB_DJOB_NUMPROC": "2", "LSB_MCPU_HOSTS": "n1 2"}
        variables |= {"LS_SUBCWD": str(folder)}
    where = folder / "home" if script == "run.pbs" else folder
    no_array = {"LSB_JOBINDEX": "0", "PBS_ARRAY_INDEX": ""}
    for changed, code, message in (
        ({}, 0, r"^run\.\w+: job 7\S* on n1, pdgemm (.|\n)*2 ranks, trace 3.0, arguments \['3'\]"),
        ({"PDGEMM_RUN": ""}, 2, "no command"),
        (no_array | {"PDGEMM_RUN": "my.py 4"}, 0, "trace 4.0"),
        (no_array, 2, "is not an array"),
    ):
        words = ["bash", str(folder / "home" / "copy")]
        run = subprocess.run(words, cwd=where, env=variables | changed, capture_output=True, text=True, timeout=60)
        assert run.returncode == code, run.stdout + run.stderr
        assert re.search(message, run.stderr if code else run.stdout, re.MULTILINE), run.stdout + run.stderr


def test_a_part_of_a_node(batch: Batch) -> None:
    """If whole nodes are refused, options of the command line override the scripts' request."""
    (batch.folder / "my.py").write_text(PROGRAM)
    job = batch.submit("run.sbatch", "--oversubscribe", "--mem=500M", words=["my.py", "2"])
    (task,) = job.tasks()
    assert (task["OverSubscribe"], task["MinMemoryNode"]) == ("YES", "500M"), task
    job.ended().well()


# ------------------------------------------------------------------ the end of jobs
def start_now(task: Task) -> None:
    """Remove the delay of a requeued job; Slurm sets it again when it has cleaned up the first run."""
    if task["JobState"] == "PENDING":
        update = ["scontrol", "update", f"JobId={task['JobId']}", "StartTime=now"]
        run = subprocess.run(update, env=BARE, capture_output=True, text=True, timeout=60)
        assert not run.returncode or "no longer pending" in run.stderr, run.stderr  # the job may have started already


def queued_again(job: Job) -> str:
    """Send a job the signal of the time limit; return its output when it is requeued."""
    slurm("scancel", "--batch", "--signal=USR1", job.number)
    (task,) = job.awaited("queued again", lambda task: task["JobState"] == "PENDING")
    return output_of(task)


def going_on(job: Job, reached: Callable[[Task], object]) -> None:
    """Wait until a requeued job has started and `reached(task)` is true."""

    def started(task: Task) -> object:
        start_now(task)
        return reached(task)

    job.awaited("going on", started)


@pytest.mark.parametrize(
    ("script", "nodes"), [("one_node.sbatch", 1), pytest.param("many_nodes.sbatch", 2, marks=thorough)]
)
def test_sigterm_while_a_file_is_written(batch: Batch, script: str, nodes: int) -> None:
    with batch.unharmed():
        job = batch.submit(script, shape=(nodes, 2), **batch.changed(SLOW_WRITE))
        job.printed("about to rename")
        assert len(list(batch.folder.glob(".c.h5.*.partial"))) == 1
        done = job.terminated()
        assert f"{script}: SIGTERM: the time limit is near" in done.out
        assert "pdgemm: ended by SIG" in done.out  # the ranks were not killed before they could print
        assert LOST in done.out and "left behind" not in done.out


@thorough
def test_the_time_limit(batch: Batch) -> None:
    """Slurm sends the signal at an uncertain time after the 5th second."""
    limit = ["--time=1", "--signal=B:TERM@55"]
    done = batch.done("one_node.sbatch", *limit, seconds=100, **batch.changed(SLOW_PRODUCT))
    assert LOST in done.failed(143).out
    assert sorted(x.name for x in batch.folder.glob("*.h5")) == ["a.h5", "b.h5"]
    batch.has_no_ranks()


def test_a_job_with_checkpoints_is_queued_again(batch: Batch) -> None:
    """A job is requeued before its time limit, and resumes; a cancelled job resumes when it is submitted again."""
    folder = batch.folder
    write_matrices(folder, (700, 700), (700, 700))
    batch.variables |= {"CHECKPOINT": "0s", "OPTIONS": "--memory 4MB"}
    job = batch.submit("one_node.sbatch", **batch.changed(with_product("time.sleep(0.5)")))
    saved = folder / "c.h5.z.checkpoint"
    job.awaited("at a checkpoint", lambda task: saved.exists())
    out = queued_again(job)
    assert "the job is queued again, and goes on from the checkpoint" in out
    assert "the same command goes on from" in out and not (folder / "c.h5").exists()
    # wait for output of the second run's ranks: its script handles signals by then
    going_on(job, lambda task: " is done, saved at " in output_of(task))
    assert "the same sbatch command goes on from there" in job.terminated().out
    assert "goes on from " in batch.completed("one_node.sbatch").out
    batch.check_product()
    assert not list(folder.glob("*checkpoint*"))


def test_training_is_queued_again(batch: Batch) -> None:
    """A training job is requeued before its time limit, and resumes from the last saved state."""
    sizes = "--hidden 16 --sequence 16 --layers 2 --batch 4"
    how = "--steps 600 --every 50 --show 200 --no-report"
    words = f"{CHECKOUT}/docs/examples/gpt/train.py {sizes} {how}".split()
    message = "STATE is not set: the file from which the program continues"
    assert message in batch.done("train.sbatch", words=words).failed(2).out
    job = batch.submit("train.sbatch", words=words, STATE="run.h5")
    job.awaited("at a state", lambda task: (batch.folder / "run.h5").exists())
    out = queued_again(job)
    assert "the job is queued again, and goes on from run.h5" in out and "step 600: " not in out
    going_on(job, lambda task: task["JobState"] in ("RUNNING", "COMPLETED"))
    assert job.ended().well().out.count("step 600: ") == 1


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=thorough)], ids=["cancelled", "killed"])
def test_a_job_that_ends_in_a_product_harms_no_file(batch: Batch, killed: bool) -> None:
    """The job is ended by plain scancel, which signals all processes at once, or by kill -9 of the ranks."""
    with batch.unharmed():
        job = batch.submit("many_nodes.sbatch", shape=(2, 2), **batch.changed(SLOW_PRODUCT))
        job.printed("read b.h5")
        if killed:
            ranks = batch.ranks()
            assert len(ranks) == 4
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
        else:
            slurm("scancel", job.number)
        done = job.ended()
        assert done.state == ("FAILED" if killed else "CANCELLED"), done
        assert done.code not in (0, 1, 2)
        assert (LOST in done.out) == (not killed), done.out


def test_cancelled_steps_are_failures(batch: Batch, site: str) -> None:
    """A cancelled step fails the job, although Open MPI's mpirun then exits with 0."""
    if "--bind-to" not in Path(site).read_text():
        pytest.skip("another mpirun continues without its daemons")
    job = batch.submit("many_nodes.sbatch", shape=(2, 2), **batch.changed(SLOW_PRODUCT))
    job.printed("read b.h5")
    slurm("scancel", "--signal=TERM", job.number)
    done = job.ended()
    assert (done.state, done.code not in (0, 1, 2)) == ("FAILED", True), done.out
    assert not (batch.folder / "c.h5").exists()
