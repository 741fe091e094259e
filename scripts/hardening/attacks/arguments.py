"""Arguments that are wrong, or differ between ranks: all ranks raise the same, or the job is ended and says why."""

from __future__ import annotations

import shlex
import sys

import numpy as np
from problems import TOLERANCE, gemm_error

from attacks.trial import Finding, Job, Told, Trial, attack, judge

TRUE: tuple[str, ...] = ("multiply", "a.h5:/x", "b.h5:/x", "-o", "c.h5:/z")
OTHERS: tuple[tuple[str, ...], ...] = (
    (),
    ("--help",),
    ("--version",),
    ("nonsense",),
    ("info",),
    ("plan", "--shape", "9,9,9", "--ranks", "2"),
    ("multiply",),
    ("multiply", "--help"),
    ("multiply", "a.h5:/x", "b.h5:/x", "-o", "d.h5:/z"),
    ("multiply", "a.h5:/x", "a.h5:/x", "-o", "c.h5:/z"),
    ("multiply", "none.h5:/x", "b.h5:/x", "-o", "c.h5:/z"),
    ("generate", "c.h5:/z", "--shape", "30x30"),
    ("verify", "a.h5:/x", "b.h5:/x", "c.h5:/z"),
    ("calibrate", "-o", "m.json"),
)
MORE = "--alpha=2 --transa=T --verify --wrong --block=3 --grid=1x1 --beta=1 --lookahead=x --trace=t.json --nvtx"
MORE += " --device=cuda --dtype=float32 --seed=9 --json"
DIFFERENT: tuple[tuple[str, ...], ...] = (*OTHERS, *((*TRUE, more) for more in MORE.split()))
VARIABLES: tuple[str, ...] = (
    "PDGEMM_MACHINE=none.json",
    "PDGEMM_NODE_MEMORY=0",
    "PDGEMM_NODE_MEMORY=x",
    "PDGEMM_RANKS_PER_NODE=1",
)
VARIABLES += ("PDGEMM_RANKS_PER_NODE=x", "PDGEMM_BLAS=none", "PDGEMM_WATCHDOG=x", "PDGEMM_WATCHDOG=-1")


@attack("arguments.lines")
def lines(trial: Trial) -> None:
    """One rank has another command line, or another environment."""
    rng = trial.rng
    a, b = trial.matrix((30, 20)), trial.matrix((20, 30))
    trial.store("a.h5:/x", a)
    trial.store("b.h5:/x", b)
    size = max(2, rng.randint(1, trial.size))
    odd, words, prefix = rng.randrange(size), OTHERS[0], ["env"]
    if rng.random() < 0.8:
        words = rng.choice(DIFFERENT)
    else:
        words = TRUE
        prefix += [rng.choice(VARIABLES)]
    program = [sys.executable, "-m", "pdgemm"]
    true = [*program, *TRUE]
    parts = [(odd, true), (1, [*prefix, *program, *words]), (size - odd - 1, true)]
    command: list[str] = []
    for number, part in parts:
        if number:
            command += [*([":"] if command else []), "-n", str(number), *part]
    trial.commands.append(f"# rank {odd} of {size}: {shlex.join([*prefix[1:], 'pdgemm', *words])}")
    try:
        outcome = judge(Job(trial, ["mpiexec", *command], {}).finish())
    except Told:
        outcome = "ended"
    if outcome == "right" and gemm_error(trial.read("c.h5:/z"), 1, a, b) > TOLERANCE:
        raise Finding("wrong", "c.h5 does not hold the product of most of the ranks")
    if not np.array_equal(trial.read("a.h5:/x"), a):
        raise Finding("lost", "a.h5:/x is not what it was")
    trial.count(outcome)


@attack("arguments.calls")
def calls(trial: Trial) -> None:
    """One rank, or all, call the library's functions with something else."""
    trial.cases("deviate", 60)
