"""Training in jobs of their own: a rank is killed at any moment, and numbers of ranks beside those of the suite."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import perceptron
import pytest
from tiers import thorough

from pdgemm.support.launcher import outside_job

PROGRAM = Path(perceptron.__file__)
STEPS, EVERY = 18, 3
pytestmark = [jobs.needs_mpiexec, pytest.mark.timeout(900)]


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=thorough)])
def test_a_killed_run_goes_on_with_fewer_ranks(tmp_path: Path, moments: int) -> None:
    """kill -9 of one of 3 ranks: the file is whole, and on 2 and 1 ranks, with other stages, losses agree to 1e-12."""
    words, paths = dict[int, list[str]](), [tmp_path / f"{number}.h5" for number in range(moments)]
    with ThreadPoolExecutor(2) as jobs_at_once:
        [*jobs_at_once.map(kill_one, paths, range(moments))]
    for number, path in enumerate(paths):
        stage = number % 4
        for at, ranks in enumerate((2, 1), 1):
            copy, other = tmp_path / f"{number}-on-{ranks}.h5", (stage + at) % 4
            if path.exists():  # else the rank was killed before anything was saved
                shutil.copy(path, copy)
            words.setdefault(ranks, []).extend([str(copy), str(other)])
    whole = tmp_path / "whole.h5"
    words[1] += [str(whole), "0"]
    commands = [jobs.python(ranks, PROGRAM, str(STEPS), str(STEPS), *files) for ranks, files in words.items()]
    with ThreadPoolExecutor(2) as jobs_at_once:
        ended = [*jobs_at_once.map(partial(jobs.run, timeout=300), commands)]
    for job in ended:
        assert job.returncode == 0 and "loaded in its place" not in job.stderr, job.stdout + job.stderr
    wanted, left = result(whole), list[int]()
    for files in words.values():
        for path in map(Path, files[::2]):
            losses, end = result(path)
            left.append(len(losses))
            np.testing.assert_allclose(losses, wanted[0][STEPS - len(losses) :], rtol=1e-12)
            for name, value in wanted[1].items():
                np.testing.assert_allclose(end[name], value, rtol=0, atol=1e-12)
    assert all(number % EVERY == 0 for number in left) and 0 < min(left) < max(left), left


@thorough
@pytest.mark.parametrize("ranks", [5, 7])
def test_numbers_of_ranks_beside_those_of_the_suite(ranks: int) -> None:
    """5 and 7 ranks, with every mesh and stage: --all has the others up to 9."""
    tests = ["-m", "pytest", "-q", "--all", "--with-mpi", "-m", "mpi", "-p", "no:cacheprovider", "--timeout", "600"]
    tests += ["-k", "every_mesh", str(Path(__file__).with_name("test_divided_parameters.py"))]
    done = jobs.run(jobs.python(ranks, *tests), timeout=800, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr
    assert " failed" not in done.stdout and " passed" in done.stdout


EXPORTS = """
import os, sys
from itertools import count
import numpy as np
from pdgemm.parallel import Buckets, Mesh, export_parameters
mesh = Mesh(dp=-1)
ranks = mesh.comm.allgather(os.getpid())
buckets = Buckets(mesh, {"w": np.zeros((500, 300)), "b": np.zeros(300)}, stage=1)
for number in count() if len(sys.argv) == 2 else [-1]:
    for name in buckets.divisions:
        buckets.set_parameter(name, np.full(buckets.divisions[name].shape, float(number)))
    export_parameters(sys.argv[1], buckets)
    if mesh.rank == 0 and number == 2:
        print(*ranks, flush=True)
"""


def test_a_killed_export_leaves_the_old_file(tmp_path: Path) -> None:
    """kill -9 of one of 2 ranks: the library reads parameters of one moment, and the next job writes and tidies up."""
    numpy_files = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    path, rng = tmp_path / "x.safetensors", random.Random(1)
    kill_job(jobs.python(2, "-c", EXPORTS, str(path)), rng, 0, skipped=0)
    tensors = numpy_files.load_file(path)
    assert {name: x.shape for name, x in tensors.items()} == {"w": (500, 300), "b": (300,)}
    assert len({value for x in tensors.values() for value in x.ravel()}) == 1 and tensors["b"][0] >= 2
    done = jobs.run(jobs.python(2, "-c", EXPORTS, str(path), "once"))
    assert done.returncode == 0, done.stderr
    assert (numpy_files.load_file(path)["w"] == -1).all()
    assert [x.name for x in tmp_path.iterdir() if "partial" in x.name] == []


def kill_one(path: Path, number: int) -> None:
    """Kill one of the 3 ranks of a run in one of its steps, or while it saves; the job ends."""
    rng = random.Random(number)
    last = rng.randrange(-1, STEPS // 2)  # several files are not written, however fast they are
    command = jobs.python(3, PROGRAM, str(STEPS), str(EVERY), str(path), str(number % 4))
    kill_job(command, rng, last + 1)


def kill_job(command: list[str], rng: random.Random, lines: int, skipped: int = 1) -> None:
    """Kill one of the ranks, whose numbers a job prints behind `skipped` words, a moment after so many more lines."""
    job = subprocess.Popen(command, env=outside_job(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        ranks = job.stdout.readline().split()[skipped:]
        for _ in range(lines):
            job.stdout.readline()
        time.sleep(rng.uniform(0, 0.25))
        os.kill(int(rng.choice(ranks)), signal.SIGKILL)
        job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode != 0
    end = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, "a rank goes on"
        time.sleep(0.01)


def result(path: Path) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of the steps that a job has taken, and the parameters at the end."""
    read = json.loads(Path(f"{path}.json").read_text())
    return read["losses"], read["end"]
