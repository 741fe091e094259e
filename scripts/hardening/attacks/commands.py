"""Commands with wrong arguments, little memory, or random options: they compute the right result, or print one error.

No command may end by a signal.
"""

from __future__ import annotations

import math
import shlex
import sys

import numpy as np
from problems import accepted, grid_shapes

from attacks.trial import Finding, Job, Told, Trial, judge
from pdgemm.schedules.mover_registry import host_movers

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


def lines(trial: Trial) -> None:
    """One rank gets another command line or environment than the others."""
    rng = trial.rng
    a, b = trial.operands(30, 30, 20)
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
    if outcome == "right":
        trial.is_product("c.h5:/z", 1, a, b)
    trial.unchanged("a.h5:/x", a)
    trial.count(outcome)


NODE = ("0", "1", "4096", str(8 << 20), "1e9", "-5", "x", "", "9" * 5000, "nan")
PER_NODE = ("1", "2", "3", "0", "-1", "x", "9" * 5000, "1.5")


def scarce(trial: Trial) -> None:
    """Run up to three jobs at once that share a small /dev/shm, or one job with limits or a full disk."""
    rng = trial.rng
    size = rng.randint(1, trial.size)
    room = rng.choice((4096, int(math.exp(rng.uniform(math.log(1 << 20), math.log(300 << 20)))), 64 << 20, 128 << 20))
    trial.shared_memory(room)
    what = rng.choice(("jobs", "jobs", "address space", "file size", "disk", "environment"))
    # the matrices of all jobs take a large part of /dev/shm, or more than all of it
    n = max(50, min(1500, int(math.sqrt(room * rng.uniform(0.05, 0.6) / 8 / 3))))
    a, b = trial.operands(n, n, n)
    environment: dict[str, str] = {}
    prefix: list[str] = []
    out = trial.work / "out"
    out.mkdir()
    if what == "address space":
        base = 600 << 20  # the address space of a rank that has loaded its libraries
        prefix = ["prlimit", f"--as={base + rng.randrange(1 << 20, 500 << 20)}"]
    elif what == "file size":
        prefix = ["prlimit", f"--fsize={int(8 * n * n * rng.uniform(0.0, 1.5))}"]
    elif what == "disk":
        trial.mount(out, int(8 * n * n * rng.uniform(0, 1.3)))
    if what == "environment" or rng.random() < 0.3:
        environment["PDGEMM_NODE_MEMORY"] = rng.choice(NODE)
        environment["PDGEMM_RANKS_PER_NODE"] = rng.choice(PER_NODE)
    trial.commands.append(f"# {what}; /dev/shm of {room} bytes, n = {n}, {environment or ''}")
    jobs: list[tuple[Job, str]] = []
    for number in range(rng.randint(2, 3) if what == "jobs" else 1):
        target = f"out/c{number}.h5:/z"
        words: tuple[str, ...] = ("multiply", "a.h5:/x", "b.h5:/x", "-o", target)
        if rng.random() < 0.3:
            words = ("generate", target, "--shape", f"{n}x{n}", "--kind", "ones")
        jobs.append((trial.start(size, *words, prefix=prefix, **environment), target))
    for job, target in jobs:
        try:
            outcome = judge(job.finish(2 * trial.bound))
        except Told as bad:
            raise Finding("hang", "the watchdog ended the job, though all ranks made the same calls") from bad
        if outcome == "right":
            if "generate" not in job.command:
                trial.is_product(target, 1, a, b)
            elif not np.array_equal(trial.read(target), np.ones((n, n))):
                raise Finding("wrong", f"{target} is not the generated matrix")
        elif any(out.glob(f".{target[4:9]}*")):
            raise Finding("litter", f"refused, but it left {[x.name for x in out.glob('.*')]}")
        trial.count(outcome)


OPTIONS = {
    "--block": ("1", "7", "64x3", "1000"),
    "--memory-limit": ("1", "20k", "1MiB", "1GiB"),
    "--panel-width": ("1", "5", "1000", "0"),
    "--lookahead": ("0", "1", "3"),
    "--mover": ("auto", "mpi", *host_movers()),
    "--accumulate-dtype": ("float64", "complex128"),
    "--seed": ("0", "5"),
}


def random_options(trial: Trial) -> None:
    """`pdgemm multiply` with random options, and `pdgemm verify` of its result."""
    rng = trial.rng
    m, n, k = (rng.choice((1, 2, 3, 17, 64, 150)) for _ in "mnk")
    dtype = rng.choice(("float64", "float64", "float32", "complex64", "complex128"))
    transa, transb = (rng.choice("NTC") for _ in "ab")
    a, b, c0 = trial.matrix((m, k), dtype), trial.matrix((k, n), dtype), trial.matrix((m, n), dtype)
    stored = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
    trial.store("a.h5:/x", stored[transa](a))
    trial.store("b.h5:/x", stored[transb](b))
    trial.store("f.h5:/c0", c0)
    alpha, beta = rng.choice((1, -2, 0.5, 0)), rng.choice((0, 0, 1, -0.5))
    scalars = ["--alpha", str(alpha), "--beta", str(beta), "--transa", transa, "--transb", transb]
    options = [x for name, some in OPTIONS.items() if rng.random() < 0.2 for x in (name, rng.choice(some))]
    options += [x for x in ("--verify", "--json", "--debug") if rng.random() < 0.3]
    size = rng.randint(1, trial.size)
    if rng.random() < 0.5:
        options += ["--grid", "x".join(map(str, rng.choice(grid_shapes(size))))]
    if rng.random() < 0.5:
        name, shape, layers = rng.choice(accepted(size))
        options += ["--algorithm", name, "--product-grid", "x".join(map(str, shape)), "--layers", str(layers)]
    words = ("multiply", "a.h5:/x", "b.h5:/x", "-o", "f.h5:/z", *scalars, *(["--c", "f.h5:/c0"] if beta else []))
    run = trial.pdgemm(size, *words, *options, PDGEMM_RANKS_PER_NODE=rng.choice(("", "", "1", "2")))
    if "--debug" in options and run.code == 2:
        run.err = run.err.replace("Traceback (most recent call last)", "")
    outcome = judge(run)
    trial.unchanged("f.h5:/c0", c0)
    if outcome == "right":
        trial.is_product("f.h5:/z", alpha, a, b, beta, c0)
        if rng.random() < 0.3:
            c = ["--c0", "f.h5:/c0"] if beta else []
            judge(trial.pdgemm(size, "verify", "a.h5:/x", "b.h5:/x", "f.h5:/z", *scalars, *c), codes=(0,))
    trial.count(outcome)
