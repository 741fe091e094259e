"""Jobs on the cluster of scripts/slurm_cluster.sh, as a user submits them: their files, and how they end.

    scripts/slurm_cluster.sh up DIR
    SLURM_CONF=DIR/slurm.conf pytest tests/cluster/test_slurm_*.py
    scripts/slurm_cluster.sh down DIR

Jobs start from a minimal environment; settings for this machine are in a site file that the tests write.  Each wait has
a time limit, after which it prints the output of the job.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from many_commands import read
from problems import TOLERANCE, gemm_error
from processes import running, until

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = CHECKOUT / "slurm"
FILES: dict[str, Any] = {"A": "a.h5:/x", "B": "b.h5:/y", "C": "c.h5:/z"}
RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "STAGE_OUT"}
BARE = {"PATH": "/usr/local/bin:/usr/bin:/bin", **{x: os.environ[x] for x in ("HOME", "SLURM_CONF") if x in os.environ}}
Task = dict[str, str]  # Slurm's record of a task of a job


def _why_not() -> str:
    """Return the reason why there is no test cluster, or ""; other clusters are never used."""
    path = os.environ.get("SLURM_CONF")
    if not path:
        return "no SLURM_CONF of a test cluster (scripts/slurm_cluster.sh up DIR)"
    if not Path(path).is_file() or "ClusterName=pdgemm\n" not in Path(path).read_text():
        return f"{path} is not of a test cluster (scripts/slurm_cluster.sh up DIR)"
    return ""


needs_cluster = [pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-"), pytest.mark.timeout(200)]


# ------------------------------------------------------------------ jobs
def slurm(*command: str | Path, cwd: Path | None = None, input: str | None = None, **variables: str) -> str:
    """Run a command of Slurm; return its output."""
    run = subprocess.run(
        [*map(str, command)], cwd=cwd, env=BARE | variables, input=input, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"
    return run.stdout


def output_of(task: Task) -> str:
    path = Path(task["StdOut"])
    return path.read_bytes().replace(b"\0", b"").decode() if path.exists() else ""


class EndedTask(NamedTuple):
    """A task of a job that has ended: its state, exit code and output."""

    id: str
    state: str
    code: int
    out: str

    def well(self) -> EndedTask:
        """Check that the task ended with success; return it."""
        assert (self.state, self.code) == ("COMPLETED", 0), self.out
        return self

    def failed(self, code: int) -> EndedTask:
        """Check that the task failed with this exit code; return it."""
        assert (self.state, self.code) == ("FAILED", code), self.out
        return self

    def error(self, start: str = "") -> str:
        """Return the error line that the script or pdgemm printed; check that the exit code is 2."""
        lines = [line for line in self.failed(2).out.splitlines() if "error: " in line and line.startswith(start)]
        assert len(lines) == 1, self.out
        return lines[0]


class Job(NamedTuple):
    """A submitted job."""

    number: str

    def tasks(self) -> list[Task]:
        """Return Slurm's record of the job; for an array, of each task."""
        lines = slurm("scontrol", "show", "job", "-o", self.number).splitlines()
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]

    def awaited(self, what: str, reached: Callable[[Task], object], seconds: float = 60) -> list[Task]:
        """Wait until `reached` is true for all tasks, and return them; after `seconds`, cancel the job and fail."""
        end = time.monotonic() + seconds
        while True:
            tasks = self.tasks()
            if all(reached(task) for task in tasks):
                return tasks
            if time.monotonic() > end:
                outputs = "\n".join(f"{task['JobState']} {task['JobId']}:\n{output_of(task)}" for task in tasks)
                slurm("scancel", self.number)
                pytest.fail(f"not {what} after {seconds} s: job {self.number}\n{outputs}")
            time.sleep(0.1)

    def printed(self, text: str) -> None:
        """Wait until the running job has printed a text."""

        def reached(task: Task) -> bool:
            if task["JobState"] not in RUNNING:
                pytest.fail(f"{task['JobState']} before it said {text!r}:\n{output_of(task)}")
            return text in output_of(task)

        self.awaited(f"at {text!r}", reached)

    def ended_tasks(self, seconds: float = 60) -> list[EndedTask]:
        """Wait until all tasks have ended; return them."""
        tasks = self.awaited("ended", lambda task: task["JobState"] not in RUNNING, seconds)
        return [EndedTask(x["JobId"], x["JobState"], int(x["ExitCode"].split(":")[0]), output_of(x)) for x in tasks]

    def ended(self, seconds: float = 60) -> EndedTask:
        """Wait until the only task has ended; return it."""
        (only,) = self.ended_tasks(seconds)
        return only

    def terminated(self) -> EndedTask:
        """Send SIGTERM to the job's script; check that it exits with 143, and return its task."""
        slurm("scancel", "--batch", "--signal=TERM", self.number)
        return self.ended().failed(143)


# ------------------------------------------------------------------ files of jobs
def site_file(path: Path, **instead: str) -> Path:
    """Write a site file for this machine, with some settings replaced."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    settings = {
        "PDGEMM_MODULES": "",
        "PDGEMM_VENV": sys.prefix,
        "PDGEMM_LAUNCH": f"mpirun {'--bind-to none ' if 'Open' in version else ''}-n {{ranks}}",
        "PDGEMM_THREADS": "1",
    } | instead
    lines = [f"{name}='{value}'" for name, value in settings.items() if value != "unset"]
    # for root in a container; and because all nodes are one host: Open MPI's shared memory of two nodes has one name
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        lines.append(f"export {name}=1 {name}_CONFIRM=1")
    lines.append("export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp OMPI_MCA_osc=^ucx OMPI_MCA_mpi_yield_when_idle=1")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_matrices(folder: Path, a: tuple[int, int], b: tuple[int, int]) -> None:
    """Write a.h5:/x and b.h5:/y of these shapes."""
    rng = np.random.default_rng(1)
    for name, dataset, shape in (("a", "x", a), ("b", "y", b)):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file[dataset] = rng.standard_normal(shape)


LOST = "the product is lost; nothing was written to c.h5:/z; submitted again, the job starts anew"


class Batch:
    """A folder with matrices, and a site file, with which jobs are submitted."""

    def __init__(self, folder: Path, site: str) -> None:
        self.folder, self.variables = folder, FILES | {"PDGEMM_SITE": site}

    def submit(
        self, script: str | Path, *options: str, shape: tuple[int, int] = (1, 2), words: Sequence[str] = (),
        cwd: Path | None = None, input: str | None = None, **variables: str,
    ) -> Job:  # fmt: skip
        """Submit a job on nodes x ranks per node by sbatch.

        words : arguments of the script.   variables : environment of sbatch.
        """
        size = [f"--nodes={shape[0]}", f"--ntasks-per-node={shape[1]}", "--cpus-per-task=1"]
        words = ["--parsable", *size, *options, *([] if input else [str(SCRIPTS / script)]), *words]
        answer = slurm("sbatch", *words, cwd=cwd or self.folder, input=input, **self.variables | variables)
        return Job(answer.split(";")[0].strip())

    def done(self, script: str | Path, *options: str, seconds: float = 60, **how: Any) -> EndedTask:
        """Submit a job and wait for its end."""
        return self.submit(script, *options, **how).ended(seconds)

    def completed(self, script: str | Path, *options: str, seconds: float = 60, **how: Any) -> EndedTask:
        """Submit a job, wait for its end, and check that it succeeded."""
        return self.done(script, *options, seconds=seconds, **how).well()

    def refused(self, script: str | Path, *options: str, **how: Any) -> str:
        """Submit a job that fails with exit code 2; return the error line of the script or of pdgemm."""
        return self.done(script, *options, **how).error()

    def changed(self, code: str) -> dict[str, Any]:
        """Let all Python processes of a job run code at their start; return environment variables for `submit`."""
        (self.folder / "changed").mkdir()
        (self.folder / "changed" / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": str(self.folder / "changed")}

    def check_product(self, name: str = "c") -> None:
        """Check that dataset /z of c.h5, or of NAME.h5, is the product."""
        a, b = read(self.folder / "a.h5", "x"), read(self.folder / "b.h5", "y")
        assert gemm_error(read(self.folder / f"{name}.h5", "z"), 1, a, b) <= TOLERANCE

    def ranks(self) -> list[int]:
        """Return the ids of processes of pdgemm whose current folder is this one."""
        return running(lambda words, where: where == self.folder and any(x.endswith("pdgemm") for x in words[1:3]))

    def has_no_ranks(self) -> None:
        """Check that no process of an ended job still runs."""
        assert until(lambda: not self.ranks(), 10), f"still there: {self.ranks()}"

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Check that the block does not change an earlier c.h5, and leaves no temporary files or running ranks."""
        path = self.folder / "c.h5"
        with h5py.File(path, "w") as file:
            file["z"] = np.eye(3)
            file["z"].attrs["pdgemm_checksum"] = "0"  # with a checksum: a result of pdgemm may be replaced
        before = path.read_bytes()
        yield
        assert path.read_bytes() == before and not list(self.folder.glob(".*.partial"))
        self.has_no_ranks()


# ------------------------------------------------------------------ ranks that tests slow down
_ON_RANKS = """
import os, time
size = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS")
if int(size or 1) > 1:
"""
_PRODUCT = """
    import pdgemm.algorithms.products.accumulator
    right = pdgemm.algorithms.products.accumulator.prepare
    def changed(alpha, A, B, C, *conjugate):
        multiply = right(alpha, A, B, C, *conjugate)
        def product(beta):
            multiply(beta)
            CHANGE
        return product
    pdgemm.algorithms.products.accumulator.prepare = changed
"""
SLOW_WRITE = f"""{_ON_RANKS}
    import pathlib
    def slow(self, target):
        print("about to rename", self.name, flush=True)
        time.sleep(600)
    pathlib.Path.replace = slow
"""


def with_product(change: str) -> str:
    """Return code for `changed` that appends a statement to all local products of a job with several ranks."""
    return _ON_RANKS + _PRODUCT.replace("CHANGE", change)


SLOW_PRODUCT = with_product("time.sleep(600)")
