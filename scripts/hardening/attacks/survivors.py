"""Ranks are killed by SIGKILL at any moment, and the others go on: the result is right, or the job says why it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np

from attacks.trial import HERE, Finding, Job, Trial, attack, tail
from attacks.trial import ranks as there

ENDED = 3  # the exit code by which a scheduler knows that the job may be started again
NODES = "PDGEMM_RANKS_PER_NODE"
BOUND = 75  # seconds: the 60 that survivors have, and the job itself


def able() -> bool:
    """Does the launcher let ranks go on, as that of Open MPI 5 does?"""
    said = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, check=False).stdout
    return bool(re.search(r"Open MPI\) ([5-9]|\d\d)\.", said))


@attack("survivors.products")
def products(trial: Trial) -> None:
    """One or two ranks of a job are killed, of one node or several, with and without node-shared memory."""
    rng = trial.rng
    if not able():
        trial.count("refused")
        return
    size = rng.randint(2, max(2, trial.size))
    dtype, steps = rng.choice(("float64", "float32", "complex128")), rng.randint(5, 40)
    n, width = rng.randint(50, 700), rng.randint(1, 500)
    a, b = trial.matrix((n, n), dtype) / np.sqrt(n).astype(dtype), trial.matrix((n, width), dtype)
    trial.store("in.h5:a", a)
    trial.store("in.h5:b", b)
    name, value = rng.choice((("", ""), ("", ""), (NODES, "2"), (NODES, "3"), ("PDGEMM_NODE_MEMORY", "0")))
    environment = {name: value} if name else {}
    mover = rng.choice(("auto", "auto", "ibcast", "ring", *(["shared"] if not environment else [])))
    program = [
        str(HERE / "surviving.py"),
        mover,
        str(steps),
        str(rng.choice((0, 0.01, 0.05))),
        str(rng.choice((1, steps, steps))),
    ]
    words = ["mpiexec", "--with-ft", "ulfm", "-n", str(size), sys.executable, *program]
    job = Job(trial, words, environment)
    while job.process.poll() is None and len([*trial.work.glob("begun.*")]) < size:
        time.sleep(0.002)  # a rank that is killed in MPI_Init leaves the others there
    kills = 0
    for _ in range(min(size - 1, rng.choice((1, 1, 2)))):
        end = time.monotonic() + rng.uniform(0, 2.5)
        while job.process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        if left := there():
            victim = rng.choice(left)
            trial.commands.append(f"# kill -9 {victim}")
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                kills += 1
    run = job.finish(BOUND)
    if run.code == ENDED and "another rank has failed" in run.err:
        trial.count("ended")
        return
    if run.code:
        raise Finding("code", f"exit code {run.code} after {kills} kills: {tail(run)}")
    x = b
    for _ in range(steps):
        x = a @ x + b
    made, eps = trial.read("out.h5:x"), np.finfo(dtype).eps
    if not np.linalg.norm(made - x) <= 50 * steps * n * eps * np.linalg.norm(x):
        raise Finding("wrong", f"after {kills} kills X is wrong: {tail(run)}")
    trial.count("right")
