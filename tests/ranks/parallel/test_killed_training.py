"""A training run of which a rank is killed at any moment goes on, and is the run that was not disturbed."""

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


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=thorough)])
def test_a_killed_run_goes_on_with_fewer_ranks(tmp_path: Path, moments: int) -> None:
    """kill -9 of one of 4 ranks: the file is whole, and on 3 and 1 ranks, with other stages, losses agree to 1e-12."""
    words, paths = dict[int, list[str]](), [tmp_path / f"{number}.h5" for number in range(moments)]
    with ThreadPoolExecutor(2) as jobs_at_once:
        [*jobs_at_once.map(kill_one, paths, range(moments))]
    for number, path in enumerate(paths):
        stage = number % 4
        for at, ranks in enumerate((3, 1), 1):
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


def kill_one(path: Path, number: int) -> None:
    """Kill one of the 4 ranks of a run in one of its steps, or while it saves; the job ends."""
    rng = random.Random(number)
    command = jobs.python(4, PROGRAM, str(STEPS), str(EVERY), str(path), str(number % 4))
    job = subprocess.Popen(command, env=outside_job(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        _, *ranks = job.stdout.readline().split()
        last = rng.randrange(-1, STEPS // 2)  # several files are not written, however fast they are
        for _ in range(last + 1):
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
