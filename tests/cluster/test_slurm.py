"""slurm/*.sbatch as a user submits them, on the cluster of scripts/slurm_cluster.sh:

    scripts/slurm_cluster.sh up DIR
    SLURM_CONF=DIR/slurm.conf pytest tests/cluster/test_slurm.py
    scripts/slurm_cluster.sh down DIR

Jobs start from a bare environment: what they know of this machine comes from a site file of the tests' own.  Every wait
has an end, at which the output of the job is shown.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from problems import TOLERANCE, gemm_error
from processes import running, until
from tiers import thorough

from pdgemm import load_machine
from pdgemm.devices import gpu_binding

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "slurm"
CLUSTER = ROOT / "scripts" / "slurm_cluster.sh"
RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT"}
BARE = {"PATH": "/usr/local/bin:/usr/bin:/bin", **{x: os.environ[x] for x in ("HOME", "SLURM_CONF") if x in os.environ}}


def why_not() -> str:
    """Why there is nothing to submit to; never a cluster that others use."""
    path = os.environ.get("SLURM_CONF")
    if not path:
        return "no SLURM_CONF of a test cluster (scripts/slurm_cluster.sh up DIR)"
    if not Path(path).is_file() or "ClusterName=pdgemm\n" not in Path(path).read_text():
        return f"{path} is not of a test cluster (scripts/slurm_cluster.sh up DIR)"
    return ""


pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(200)]


# ------------------------------------------------------------------ jobs
def slurm(*command: str | Path, cwd: Path | None = None, input: str | None = None, **variables: str) -> str:
    """What a command of Slurm prints."""
    run = subprocess.run(
        [*map(str, command)], cwd=cwd, env=BARE | variables, input=input, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"
    return run.stdout


def start_now(task: dict[str, str]) -> None:
    """Cut the delay of a job that is queued again, which Slurm sets once more when it has cleaned up the first run."""
    if task["JobState"] == "PENDING":
        update = ["scontrol", "update", f"JobId={task['JobId']}", "StartTime=now"]
        run = subprocess.run(update, env=BARE, capture_output=True, text=True, timeout=60)
        assert not run.returncode or "no longer pending" in run.stderr, run.stderr  # it may have started meanwhile


def tasks_of(job: str) -> list[dict[str, str]]:
    """What Slurm knows of a job; of each task, if it is an array."""
    lines = slurm("scontrol", "show", "job", "-o", job).splitlines()
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]


def output_of(task: dict[str, str]) -> str:
    path = Path(task["StdOut"])
    return path.read_bytes().replace(b"\0", b"").decode() if path.exists() else ""


def awaited(job: str, seconds: float, what: str, reached: Callable[[dict[str, str]], object]) -> list[dict[str, str]]:
    """Wait until something holds of all tasks of a job; a wait that ends without is a failure, and ends the job."""
    end = time.monotonic() + seconds
    while True:
        tasks = tasks_of(job)
        if all(reached(task) for task in tasks):
            return tasks
        if time.monotonic() > end:
            said = "\n".join(f"{task['JobState']} {task['JobId']}:\n{output_of(task)}" for task in tasks)
            slurm("scancel", job)
            pytest.fail(f"not {what} after {seconds} s: job {job}\n{said}")
        time.sleep(0.1)


def ended_tasks(job: str, seconds: float = 60) -> list[Any]:
    """.state, .code and .out of each task, when all have ended."""
    tasks = awaited(job, seconds, "ended", lambda task: task["JobState"] not in RUNNING)
    return [
        SimpleNamespace(
            id=task["JobId"], state=task["JobState"], code=int(task["ExitCode"].split(":")[0]), out=output_of(task)
        )
        for task in tasks
    ]


def ended(job: str, seconds: float = 60) -> Any:
    (only,) = ended_tasks(job, seconds)
    return only


def said(job: str, text: str, seconds: float = 60) -> None:
    """Wait until a job that runs has printed a text."""

    def reached(task: dict[str, str]) -> bool:
        if task["JobState"] not in RUNNING:
            pytest.fail(f"{task['JobState']} before it said {text!r}:\n{output_of(task)}")
        return text in output_of(task)

    awaited(job, seconds, f"at {text!r}", reached)


def ranks_in(folder: Path) -> list[int]:
    """Processes of pdgemm that work in this folder."""
    return running(lambda words, where: where == folder and any(x.endswith("pdgemm") for x in words[1:3]))


def no_ranks_in(folder: Path) -> None:
    assert until(lambda: not ranks_in(folder), 10), f"still there: {ranks_in(folder)}"


# ------------------------------------------------------------------ what jobs work on
def site_file(path: Path, **instead: str) -> Path:
    """A site file for this machine, with some settings instead."""
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    settings = {
        "PDGEMM_MODULES": "",
        "PDGEMM_VENV": sys.prefix,
        "PDGEMM_LAUNCH": f"mpirun {'--bind-to none ' if 'Open' in said else ''}-n {{ranks}}",
        "PDGEMM_THREADS": "1",
    } | instead
    lines = [f"{name}='{value}'" for name, value in settings.items() if value != "unset"]
    # root in a container; the nodes are one host, where two of Open MPI's would give their shared memory the same name
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        lines.append(f"export {name}=1 {name}_CONFIRM=1")
    lines.append("export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp OMPI_MCA_osc=^ucx OMPI_MCA_mpi_yield_when_idle=1")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(site_file(tmp_path_factory.mktemp("site") / "here.sh"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a.h5:/x (61 x 83) and b.h5:/y (83 x 29)."""
    rng = np.random.default_rng(1)
    for name, dataset, shape in (("a", "x", (61, 83)), ("b", "y", (83, 29))):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[dataset] = rng.standard_normal(shape)
    return tmp_path


class Batch:
    """What is submitted in a folder, by a site file, to multiply its matrices."""

    def __init__(self, folder: Path, site: str) -> None:
        self.folder, self.variables = folder, FILES | {"PDGEMM_SITE": site}

    def submit(
        self, script: str | Path, *options: str, shape: tuple[int, int] = (1, 2), words: Sequence[str] = (),
        cwd: Path | None = None, input: str | None = None, **variables: str,
    ) -> str:  # fmt: skip
        """sbatch on nodes x ranks per node; the number of the job.

        words : arguments of the script.   variables : of the shell that submits.
        """
        size = [f"--nodes={shape[0]}", f"--ntasks-per-node={shape[1]}", "--cpus-per-task=1"]
        path = [] if input else [SCRIPTS / script]
        command = "sbatch", "--parsable", *size, *options, *path, *words
        said = slurm(*command, cwd=cwd or self.folder, input=input, **self.variables | variables)
        return said.split(";")[0].strip()

    def done(self, script: str | Path, *options: str, seconds: float = 60, **how: Any) -> Any:
        """A job that is submitted, and has ended."""
        return ended(self.submit(script, *options, **how), seconds)

    def completed(self, script: str | Path, *options: str, seconds: float = 60, **how: Any) -> Any:
        """A job that is submitted, and has ended well."""
        job = self.done(script, *options, seconds=seconds, **how)
        assert (job.state, job.code) == ("COMPLETED", 0), job.out
        return job

    def refused(self, script: str | Path, *options: str, **how: Any) -> str:
        """The error line of a job that is submitted, and ends with exit code 2, of itself or of pdgemm."""
        return one_error(self.done(script, *options, **how))

    def changed(self, code: str) -> dict[str, str]:
        """Python code that all processes of a job run when they start, as variables of the shell that submits."""
        (self.folder / "changed").mkdir()
        (self.folder / "changed" / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": str(self.folder / "changed")}


@pytest.fixture
def batch(folder: Path, site: str) -> Batch:
    return Batch(folder, site)


FILES = {"A": "a.h5:/x", "B": "b.h5:/y", "C": "c.h5:/z"}


def matrices(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return read(folder / "a.h5", "x"), read(folder / "b.h5", "y")


def check_product(folder: Path) -> None:
    assert gemm_error(read(folder / "c.h5", "z"), 1, *matrices(folder)) <= TOLERANCE


def read(path: Path, name: str) -> np.ndarray:
    with h5py.File(path) as file:
        return np.array(file[name])


def one_error(job: Any, start: str = "") -> str:
    """The line of a job that ended with exit code 2, of itself or of pdgemm."""
    assert (job.state, job.code) == ("FAILED", 2), job.out
    (line,) = (line for line in job.out.splitlines() if "error: " in line and line.startswith(start))
    return str(line)


PRODUCT = """
import os
size = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS")
if int(size or 1) > 1:
    import time, pdgemm.algorithms.products.accumulator
    right = pdgemm.algorithms.products.accumulator.prepare
    def changed(alpha, A, B, C, *conjugate):
        multiply = right(alpha, A, B, C, *conjugate)
        def product(beta):
            multiply(beta)
            CHANGE
        return product
    pdgemm.algorithms.products.accumulator.prepare = changed
"""
SLOW_PRODUCT = PRODUCT.replace("CHANGE", "time.sleep(60)")
WRONG_PRODUCT = PRODUCT.replace("CHANGE", "C[:1, :1] += 1e-6")
SLOW_WRITE = """
import os, time
rename = os.rename
if int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1) > 1:
    import pathlib
    def slow(self, target):
        print("about to rename", self.name, flush=True)
        time.sleep(60)
    pathlib.Path.replace = slow
"""


# ------------------------------------------------------------------ products
def test_one_node(batch: Batch) -> None:
    """As the script's first lines say: all by --export, and the output where sbatch was called."""
    exported = ",".join(f"{name}={value}" for name, value in batch.variables.items())
    batch.variables = {}
    job = ended(batch.submit("one_node.sbatch", f"--export=ALL,{exported}"))
    assert (job.state, job.code) == ("COMPLETED", 0), job.out
    assert (batch.folder / f"pdgemm-one-node-{job.id}.out").read_text().startswith("one_node.sbatch: job ")
    assert re.search(r"residual .*: ok\n", job.out)
    assert "2 ranks by 'mpirun" in job.out
    assert "1 thread per rank" in job.out
    check_product(batch.folder)


def test_many_nodes(batch: Batch) -> None:
    """Two nodes: ranks of one share memory, messages go between them."""
    job = batch.completed("many_nodes.sbatch", shape=(2, 2), OPTIONS="--algorithm summa")
    assert "on n[1-2], pdgemm " in job.out
    assert "4 ranks by 'mpirun" in job.out
    assert "mover shared" in job.out
    assert re.search(r"messages received +[1-9]", job.out) and "messages as predicted" in job.out
    assert re.search(r"residual .*: ok\n", job.out)
    check_product(batch.folder)


def test_the_speeds_of_a_machine_are_measured_once(batch: Batch) -> None:
    path = batch.folder / "machine.json"
    for measured in (True, False):
        job = batch.completed("many_nodes.sbatch", seconds=120, MACHINE="machine.json")
        assert ("float64: GFLOP/s " in job.out) == measured
        assert json.loads(path.read_text())["name"]
        check_product(batch.folder)
    path.write_text("nothing")
    assert "machine.json" in batch.refused("many_nodes.sbatch", MACHINE="machine.json")  # so it is read


def test_gpus(batch: Batch) -> None:
    if gpu_binding.visible():
        pytest.skip("this test is of a node without GPUs, and here are some")
    job = batch.done("gpus.sbatch", "--gpus-per-node=2", shape=(2, 1))
    assert "warning: 2 ranks, but 4 GPUs" in job.out
    assert job.out.index("GPU-aware MPI") < job.out.index("pdgemm: error: ")
    assert "'cuda'" in one_error(job)
    assert not (batch.folder / "c.h5").exists()


def test_a_wrong_product_is_told_by_the_exit_code(batch: Batch) -> None:
    job = batch.done("one_node.sbatch", **batch.changed(WRONG_PRODUCT))
    assert (job.state, job.code) == ("FAILED", 1), job.out
    assert "WRONG" in job.out
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
    tasks = ended_tasks(batch.submit("run.sbatch", "--array=3,5", words=words))
    assert [task.code for task in tasks] == [0, 0], tasks
    for task in (3, 5):
        assert gemm_error(read(folder / f"c{task}.h5", "z"), 1, *matrices(folder)) <= TOLERANCE
    message = "has {task}, but this job is not an array: sbatch --array=0-9 ... run.sbatch ..."
    assert message in batch.refused("run.sbatch", words=words)


def test_programs_that_cannot_run(batch: Batch) -> None:
    (batch.folder / "wrong.py").write_text("raise SystemExit(7)")
    for words, code, message in (
        ([], 2, "no command: append 'my.py'"),
        (["none.py"], 2, "none.py: no such program (seen from "),
        (["svd", "none.h5:/x", "-o", "s.h5:/s"], 2, "none.h5"),
        (["wrong.py"], 7, ""),
    ):
        job = batch.done("run.sbatch", words=words)
        assert (job.state, job.code) == ("FAILED", code), job.out
        assert message in job.out


@pytest.mark.parametrize("script", ["run.pbs", "run.lsf"])
def test_other_batch_systems(folder: Path, site: str, script: str) -> None:
    """The scripts for PBS and LSF with the variables that these set: two ranks on one node, the third task of an array.

    PBS starts a copy of the script, in the home folder.
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

    def start(**changed: str) -> Any:
        words = ["bash", folder / "home" / "copy"]
        return subprocess.run(words, cwd=where, env=variables | changed, capture_output=True, text=True, timeout=60)

    done = start()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^run\.\w+: job 7\S* on n1, pdgemm ", done.stdout), done.stdout
    assert "2 ranks, trace 3.0, arguments ['3']" in done.stdout
    done = start(PDGEMM_RUN="")
    assert (done.returncode, "no command" in done.stderr) == (2, True), done.stderr
    done = start(LSB_JOBINDEX="0", PBS_ARRAY_INDEX="", PDGEMM_RUN="my.py 4")  # no array
    assert (done.returncode, "trace 4.0" in done.stdout) == (0, True), done.stdout + done.stderr
    done = start(LSB_JOBINDEX="0", PBS_ARRAY_INDEX="")
    assert (done.returncode, "is not an array" in done.stderr) == (2, True), done.stderr


def test_a_part_of_a_node(batch: Batch) -> None:
    """Where whole nodes are refused, the command line takes back what the scripts ask for."""
    (batch.folder / "my.py").write_text(PROGRAM)
    job = batch.submit("run.sbatch", "--oversubscribe", "--mem=500M", words=["my.py", "2"])
    (task,) = tasks_of(job)
    assert (task["OverSubscribe"], task["MinMemoryNode"]) == ("YES", "500M"), task
    assert ended(job).code == 0


# ------------------------------------------------------------------ what a site sets
def base_python(folder: Path) -> str:
    """An environment without pdgemm."""
    (folder / "bare" / "bin").mkdir(parents=True)
    (folder / "bare" / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}")
    return str(folder / "bare")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VENV", "unset", "PDGEMM_VENV is not set: "),
        ("VENV", "/nowhere", "PDGEMM_VENV=/nowhere has no bin/python on "),
        ("VENV", "BARE", "cannot import pdgemm (ModuleNotFoundError: No module named 'pdgemm')"),
        ("LAUNCH", "", "PDGEMM_LAUNCH is not set: "),
        ("LAUNCH", "mpirun -n 2", "PDGEMM_LAUNCH='mpirun -n 2' has no {ranks}"),
        ("LAUNCH", "jsrun -n {ranks}", "PDGEMM_LAUNCH: there is no jsrun on PATH"),
        ("LAUNCH", "srun --mpi=none -n {ranks}", "starts 2 processes that each see 1 rank: "),
        ("LAUNCH", "srun --mpi=nix -n {ranks}", "fails to start 2 ranks in 120 s (srun: "),
        ("LAUNCH", "env RANKS={ranks}", "was to start 2 ranks, but there were: 1 ranks 1; "),
        ("MODULES", "openmpi", "PDGEMM_MODULES is set, but there is no command 'module'"),
        ("STRIPES", "4", "PDGEMM_STRIPES=4: lfs setstripe fails for .; "),
    ],
)
def test_a_site_file_without_what_is_needed(batch: Batch, name: str, value: str, message: str) -> None:
    value = base_python(batch.folder) if value == "BARE" else value
    path = site_file(batch.folder / "site.sh", **{f"PDGEMM_{name}": value})
    job = batch.done("one_node.sbatch", PDGEMM_SITE=str(path))
    line = one_error(job)
    assert line.startswith(f"one_node.sbatch: error: {path}: PDGEMM_")
    assert message in line
    assert "read a.h5" not in job.out


def test_which_site_file_is_read(batch: Batch, site: str) -> None:
    """The one that comes with the scripts names what is missing; one of the user's own goes before it."""
    del batch.variables["PDGEMM_SITE"]
    batch.variables["XDG_CONFIG_HOME"] = str(batch.folder)
    assert f"{SCRIPTS}/site.sh: PDGEMM_VENV is not set" in batch.refused("one_node.sbatch")
    (batch.folder / "pdgemm").mkdir()
    shutil.copy(site, batch.folder / "pdgemm" / "site.sh")
    batch.completed("one_node.sbatch")
    message = "PDGEMM_SITE: there is no file none.sh"
    assert message in batch.refused("one_node.sbatch", PDGEMM_SITE="none.sh")


def test_modules_and_stripes(folder: Path) -> None:
    """What `module` and `lfs` are called with; a module that is not there."""
    path = site_file(folder / "site.sh", PDGEMM_MODULES="gcc openmpi/5", PDGEMM_STRIPES="8")
    note = f'echo "$FUNCNAME $*" >>{folder}/called'
    with path.open("a") as file:
        file.write(f'module() {{ {note}; [ "$*" != "load nope" ]; }}\nlfs() {{ {note}; }}\n')
    batch = Batch(folder, str(path))
    batch.completed("one_node.sbatch")
    called = (folder / "called").read_text().splitlines()
    assert called == ["module purge", "module load gcc", "module load openmpi/5", "lfs setstripe -c 8 ."]
    path.write_text(path.read_text().replace("openmpi/5", "nope"))
    assert "PDGEMM_MODULES: module load nope fails" in batch.refused("one_node.sbatch")


def test_the_folder_of_the_scripts_is_found_or_asked_for(batch: Batch, site: str) -> None:
    folder = batch.folder
    copy = folder / "my scripts"
    shutil.copytree(SCRIPTS, copy)
    shutil.copy(site, copy / "site.sh")
    (folder / "elsewhere").mkdir()
    absolute = {name: f"{folder}/{value}" for name, value in FILES.items()} | {"XDG_CONFIG_HOME": str(folder)}
    del batch.variables["PDGEMM_SITE"]
    batch.completed(copy / "one_node.sbatch", cwd=folder / "elsewhere", **absolute)
    text = (copy / "one_node.sbatch").read_text()  # by a pipe: Slurm knows no path
    message = "job.sh and site.sh are not found; say where they are: --export=ALL,PDGEMM_SLURM="
    assert message in batch.refused("", input=text)
    batch.completed("", input=text, **absolute, PDGEMM_SLURM=str(copy))


def test_all_scripts_begin_alike() -> None:
    """Each has to find job.sh by itself, so each has the same lines for it."""
    scripts = sorted(SCRIPTS.glob("*.sbatch"))
    beginnings = {re.search(r"^set -euo.*?^\. ", path.read_text(), re.DOTALL | re.MULTILINE)[0] for path in scripts}
    assert len(beginnings) == 1
    for path in scripts:
        assert f'. "$here/job.sh" {path.name}\n' in path.read_text()
        signal = {"one_node": "USR1@120", "many_nodes": "USR1@120", "train": "USR1@60"}.get(path.stem, "TERM@60")
        assert f"#SBATCH --signal=B:{signal}\n" in path.read_text()


# ------------------------------------------------------------------ the end of jobs
def old_c(folder: Path) -> bytes:
    with h5py.File(folder / "c.h5", "w") as file:
        file["z"] = np.eye(3)
        file["z"].attrs["pdgemm_checksum"] = "0"  # an earlier result, which may be replaced
    return (folder / "c.h5").read_bytes()


LOST = "the product is lost; nothing was written to c.h5:/z; submitted again, the job starts anew"


@pytest.mark.parametrize(
    ("script", "nodes"), [("one_node.sbatch", 1), pytest.param("many_nodes.sbatch", 2, marks=thorough)]
)
def test_sigterm_while_a_file_is_written(batch: Batch, script: str, nodes: int) -> None:
    folder, old = batch.folder, old_c(batch.folder)
    job = batch.submit(script, shape=(nodes, 2), **batch.changed(SLOW_WRITE))
    said(job, "about to rename")
    assert len(list(folder.glob(".c.h5.*.partial"))) == 1
    start = time.monotonic()
    done = after_signal(job, "TERM")
    assert time.monotonic() - start < 20
    assert f"{script}: SIGTERM: the time limit is near" in done.out
    assert "pdgemm: ended by SIG" in done.out  # the ranks had time to say so: nobody killed them
    assert LOST in done.out
    assert (folder / "c.h5").read_bytes() == old
    assert not list(folder.glob(".*.partial")), done.out
    assert "left behind" not in done.out
    no_ranks_in(folder)


@thorough
def test_the_time_limit(batch: Batch) -> None:
    """Slurm sends the signal some time after the 5th second; it need not be exact."""
    limit = ["--time=1", "--signal=B:TERM@55"]
    done = batch.done("one_node.sbatch", *limit, seconds=100, **batch.changed(SLOW_PRODUCT))
    assert (done.state, done.code) == ("FAILED", 143), done.out
    assert LOST in done.out
    assert sorted(x.name for x in batch.folder.glob("*.h5")) == ["a.h5", "b.h5"]
    no_ranks_in(batch.folder)


def after_signal(job: str, name: str) -> Any:
    """A job whose script gets a signal, by which it ends with the exit code of SIGTERM."""
    slurm("scancel", "--batch", f"--signal={name}", job)
    done = ended(job)
    assert (done.state, done.code) == ("FAILED", 143), done.out
    return done


def queued_again(job: str) -> str:
    """What a job has said that gets the signal of the time limit, and is queued again."""
    slurm("scancel", "--batch", "--signal=USR1", job)
    (task,) = awaited(job, 60, "queued again", lambda task: task["JobState"] == "PENDING")
    return output_of(task)


def going_on(job: str, reached: Callable[[dict[str, str]], object]) -> None:
    """Wait until a job that is queued again has started, and has come so far."""

    def started(task: dict[str, str]) -> object:
        start_now(task)
        return reached(task)

    awaited(job, 60, "going on", started)


def test_a_job_with_checkpoints_is_queued_again(batch: Batch) -> None:
    """Before the time limit, and goes on; a job that was cancelled is not, and the same command goes on."""
    folder, rng = batch.folder, np.random.default_rng(1)
    for name, dataset in (("a", "x"), ("b", "y")):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file[dataset] = rng.standard_normal((700, 700))
    batch.variables |= {"CHECKPOINT": "0s", "OPTIONS": "--memory 4MB"}
    job = batch.submit("one_node.sbatch", **batch.changed(PRODUCT.replace("CHANGE", "time.sleep(0.5)")))
    saved = folder / "c.h5.z.checkpoint"
    awaited(job, 60, "at a checkpoint", lambda task: saved.exists())
    out = queued_again(job)
    assert "the job is queued again, and goes on from the checkpoint" in out
    assert "the same command goes on from" in out and not (folder / "c.h5").exists()
    # the second run's ranks say so: its script handles signals by then
    going_on(job, lambda task: " is done, saved at " in output_of(task))
    assert "the same sbatch command goes on from there" in after_signal(job, "TERM").out
    assert "goes on from " in batch.completed("one_node.sbatch").out
    check_product(folder)
    assert not list(folder.glob("*checkpoint*"))


def test_training_is_queued_again(batch: Batch) -> None:
    """Before the time limit, and goes on from the state that was saved last."""
    sizes = "--hidden 16 --sequence 16 --layers 2 --batch 4"
    how = "--steps 600 --every 50 --show 200 --no-report"
    words = f"{ROOT}/docs/examples/gpt/train.py {sizes} {how}".split()
    done = batch.done("train.sbatch", words=words)
    assert done.code == 2 and "STATE is not set: the file from which the program goes on" in done.out
    job = batch.submit("train.sbatch", words=words, STATE="run.h5")
    awaited(job, 60, "at a state", lambda task: (batch.folder / "run.h5").exists())
    out = queued_again(job)
    assert "the job is queued again, and goes on from run.h5" in out
    assert "step 600: " not in out
    going_on(job, lambda task: task["JobState"] in ("RUNNING", "COMPLETED"))
    done = ended(job)
    assert (done.state, done.code) == ("COMPLETED", 0), done.out
    assert len(re.findall("step 600: ", done.out)) == 1


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=thorough)], ids=["cancelled", "killed"])
def test_a_job_that_ends_in_a_product_harms_no_file(batch: Batch, killed: bool) -> None:
    """By plain scancel, which signals all that runs, at once; by kill -9 of the ranks."""
    folder, old = batch.folder, old_c(batch.folder)
    job = batch.submit("many_nodes.sbatch", shape=(2, 2), **batch.changed(SLOW_PRODUCT))
    said(job, "read b.h5")
    if killed:
        ranks = ranks_in(folder)
        assert len(ranks) == 4
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
    else:
        slurm("scancel", job)
    done = ended(job)
    assert done.state == ("FAILED" if killed else "CANCELLED"), done
    assert done.code not in (0, 1, 2)
    assert (LOST in done.out) == (not killed), done.out
    assert (folder / "c.h5").read_bytes() == old
    assert not list(folder.glob(".*.partial"))
    no_ranks_in(folder)


def test_steps_that_are_cancelled_are_no_success(batch: Batch, site: str) -> None:
    """Open MPI's mpirun says 0 when the step of its daemons is cancelled."""
    if "--bind-to" not in Path(site).read_text():
        pytest.skip("another mpirun goes on without its daemons")
    job = batch.submit("many_nodes.sbatch", shape=(2, 2), **batch.changed(SLOW_PRODUCT))
    said(job, "read b.h5")
    slurm("scancel", "--signal=TERM", job)
    done = ended(job)
    assert (done.state, done.code not in (0, 1, 2)) == ("FAILED", True), done.out
    assert not (batch.folder / "c.h5").exists()


# ------------------------------------------------------------------ studies
STUDY = {"SHAPES": "64,64,64 48,80,96", "OPTIONS": "--repeats 2 --no-calibrate", "OUT": "study"}


def measured(path: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Ranks and shape of the right measurements in a file."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(x["case"]["ranks"], tuple(x["case"]["mnk"])) for x in records if x.get("status") == "ok"]


def test_strong_scaling(batch: Batch) -> None:
    """On 1, 2, ... and all ranks of the allocation; what is measured is not measured again."""
    job = batch.completed("strong.sbatch", shape=(1, 3), **STUDY)
    results = batch.folder / "study" / "strong.jsonl"
    shapes = [(64, 64, 64), (48, 80, 96)]
    assert sorted(measured(results)) == sorted((ranks, mnk) for ranks in (1, 2, 3) for mnk in shapes)
    assert "strong.sbatch: 6 measurements in study/strong.jsonl\n" in job.out
    before = results.read_bytes()
    batch.completed("strong.sbatch", shape=(1, 3), **STUDY)
    assert results.read_bytes() == before


@thorough
def test_a_study_that_was_ended_goes_on(batch: Batch) -> None:
    """The step on one rank is quick, that on two takes for ever, until the study is submitted again."""
    batch.variables |= {**STUDY, "RANKS": "1,2"}
    results = batch.folder / "study" / "strong.jsonl"
    job = batch.submit("strong.sbatch", shape=(2, 1), **batch.changed(SLOW_PRODUCT))
    said(job, "[2/4]")
    done = after_signal(job, "TERM")
    assert "2 measurements are finished and kept in study/strong.jsonl; the one that ran is lost" in done.out
    assert "the same sbatch command goes on from there" in done.out
    no_ranks_in(batch.folder)
    before = results.read_bytes()
    assert "4 cases, 2 to run" in batch.completed("strong.sbatch", shape=(2, 1)).out
    assert results.read_bytes().startswith(before)
    assert sorted(ranks for ranks, _ in measured(results)) == [1, 1, 2, 2]


def test_more_ranks_than_the_allocation_has(batch: Batch) -> None:
    job = batch.done("strong.sbatch", **STUDY, RANKS="64")
    assert "the allocation has room for 2 ranks: cases of 64 ranks do not fit" in one_error(job)
    assert "0 measurements in study/strong.jsonl" in job.out
    job = batch.done("strong.sbatch", **STUDY, RANKS="1,64")
    assert (job.state, job.code) == ("FAILED", 1), job.out
    assert "cases of 64 ranks do not fit, and are left out" in job.out
    assert [ranks for ranks, _ in measured(batch.folder / "study" / "strong.jsonl")] == [1, 1]


@thorough
def test_weak_scaling_and_the_figures_of_both(batch: Batch) -> None:
    """An array, of which a task fails; the job that depends on it and on the other study draws what there is."""
    batch.variables |= STUDY
    folder, study = batch.folder, batch.folder / "study"
    strong = batch.submit("strong.sbatch", RANKS="1,2")
    weak = batch.submit("weak.sbatch", "--array=1,2,9")
    figures = batch.submit("figures.sbatch", f"--dependency=afterany:{strong}:{weak}", shape=(1, 1))
    tasks = {task.id: task for task in ended_tasks(weak, seconds=120)}
    assert sorted((task.state, task.code) for task in tasks.values()) == [
        ("COMPLETED", 0), ("COMPLETED", 0), ("FAILED", 2)
    ]  # fmt: skip
    (failed,) = (task for task in tasks.values() if task.code)
    assert "cases of 9 ranks do not fit" in one_error(failed)
    assert {x.name for x in study.glob("weak-*")} == {"weak-1.jsonl", "weak-2.jsonl"}
    assert measured(study / "weak-1.jsonl") == [(1, (64, 64, 64)), (1, (48, 80, 96))]
    assert measured(study / "weak-2.jsonl") == [(2, (91, 91, 91)), (2, (68, 113, 136))]
    assert len(list(folder.glob(f"pdgemm-weak-{weak}-*.out"))) == 3
    assert ended(strong).code == 0
    done = ended(figures)
    assert (done.state, done.code) == ("COMPLETED", 0), done.out
    drawn(study)


def drawn(study: Path) -> None:
    assert "<html" in (study / "report.html").read_text().lower()
    assert (study / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_of_a_study(folder: Path, site: str) -> None:
    """docs/examples/scaling_study.sh: three jobs that wait for each other, and the report of what was measured."""
    script, study = ROOT / "docs" / "examples" / "scaling_study.sh", folder / "my-study"
    variables = {"ALLOCATION": "-N 1 --ntasks-per-node=2 --cpus-per-task=1", "RANKS": "1,2", "STRONG": "96,64,80"}
    variables |= {"WEAK": "48,40,32", "OPTIONS": "--repeats 2", "PDGEMM_SITE": site}
    study.mkdir()
    machine = study / "machine.json"  # otherwise the first job measures it
    machine.write_text(load_machine().as_json())
    told = slurm(script, "my-study", cwd=folder, **variables)
    jobs = re.fullmatch(
        r"jobs (\d+) \(strong scaling\), (\d+) \(weak scaling\), (\d+) \(the report: my-study/report.html\)\n", told
    )
    assert jobs, told
    for job, number in zip(jobs.groups(), (1, 2, 1)):
        tasks = ended_tasks(job, seconds=150)
        assert [(task.state, task.code) for task in tasks] == [("COMPLETED", 0)] * number, tasks
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


# ------------------------------------------------------------------ srun
@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with MPICH, whose ranks srun starts by PMI2; all else is that of this environment."""
    if not (Path(sys.prefix) / "bin" / "pip").exists() or "pmi2" not in slurm_protocols():
        pytest.skip("needs pip, and a Slurm that speaks PMI2")
    made = tmp_path_factory.mktemp("mpich")
    python = made / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
    installed = subprocess.run([*pip, "mpich==5.0.2"], capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode:
        pytest.skip(f"the wheel of MPICH cannot be had: {installed.stderr.strip().splitlines()[-1]}")
    (packages,) = (made / "lib").glob("python3.*/site-packages")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "all_else.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    (made / "bin" / "pdgemm").write_text(f"#!{python}\nfrom pdgemm.tools.cli.commands import main\nmain()\n")
    (made / "bin" / "pdgemm").chmod(0o755)
    return str(made)


def slurm_protocols() -> str:
    run = subprocess.run(["srun", "--mpi=list"], env=BARE, capture_output=True, text=True, timeout=60, check=False)
    return run.stdout + run.stderr


@thorough
def test_srun_with_pmi2(folder: Path, mpich: str) -> None:
    launch = "srun --mpi=pmi2 -n {ranks}"
    batch = Batch(folder, str(site_file(folder / "site.sh", PDGEMM_VENV=mpich, PDGEMM_LAUNCH=launch)))
    job = batch.completed("many_nodes.sbatch", shape=(2, 2))
    assert f"4 ranks by '{launch}'" in job.out
    check_product(folder)
    job = batch.done("many_nodes.sbatch", shape=(2, 2), OPTIONS="--grid 3x3")
    assert "a 3 x 3 grid needs 9 ranks, but there are 4" in one_error(job, "pdgemm: error: ")  # srun adds errors

    old = old_c(folder)
    job = batch.submit("many_nodes.sbatch", shape=(2, 2), **batch.changed(SLOW_WRITE))
    said(job, "about to rename")
    done = after_signal(job, "TERM")
    assert "pdgemm: ended by SIG" in done.out
    assert LOST in done.out
    assert (folder / "c.h5").read_bytes() == old
    assert not list(folder.glob(".*.partial"))


def test_srun_with_pmix(folder: Path, site: str) -> None:
    words = ["srun", "--mpi=pmix", "-n", "1", "true"]  # it lists pmix without the library, too
    if "--bind-to" not in Path(site).read_text() or subprocess.run(words, env=BARE, timeout=60, check=False).returncode:
        pytest.skip("needs Open MPI, and a Slurm that speaks PMIx")
    path = site_file(folder / "site.sh", PDGEMM_LAUNCH="srun --mpi=pmix -n {ranks}")
    job = Batch(folder, str(path)).completed("many_nodes.sbatch", shape=(2, 2))
    assert "4 ranks by 'srun --mpi=pmix " in job.out
    check_product(folder)


# ------------------------------------------------------------------ the cluster itself
def cluster(*words: str | Path) -> Any:
    return subprocess.run([CLUSTER, *words], env=BARE, capture_output=True, text=True, timeout=60, check=False)


def processes_with(text: str) -> list[str]:
    """Names of the processes in whose environment or command a text is."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (path / "environ").read_bytes() + (path / "cmdline").read_bytes():
                found.append((path / "comm").read_text().strip())
        except OSError:
            pass
    return found


@thorough
def test_two_clusters_at_once_and_nothing_stays(tmp_path: Path) -> None:
    """Another one beside that of the tests; what it started is gone when it is down, with a job in its middle."""
    there = tmp_path / "cluster"
    assert cluster("up", there).returncode == 0
    try:
        again = cluster("up", there)
        assert again.returncode == 1 and "a cluster runs in " in again.stderr
        text = "#!/bin/bash\ntrap '' TERM\nsetsid sleep 600 & sleep 600 & echo started; wait; wait\n"
        conf = str(there / "slurm.conf")
        job = slurm("sbatch", "--parsable", cwd=tmp_path, input=text, SLURM_CONF=conf).strip()
        out = tmp_path / f"slurm-{job}.out"
        assert until(lambda: out.exists() and out.read_text(), 20), slurm("squeue", SLURM_CONF=conf)
        assert {"munged", "slurmctld", "slurmd", "sleep"} <= set(processes_with(str(there)))
        assert "JobState=RUNNING" in slurm("scontrol", "show", "job", job, SLURM_CONF=conf)
    finally:
        down = cluster("down", there)
    assert down.returncode == 0, down.stderr
    assert [name for name in processes_with(str(there)) if name != "pytest"] == []
    assert cluster("down", there).returncode == 0
    assert "n[1-2]" in slurm("sinfo")  # ours is still there
    for words in ([], ["up"], ["sideways", there], ["down", there / "nothing"]):
        assert cluster(*words).returncode == 2
