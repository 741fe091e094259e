"""Random problems: what is not refused is right."""

from __future__ import annotations

import numpy as np
from problems import TOLERANCE, accepted, gemm_error, grid_shapes

from attacks.trial import Finding, Trial, attack, judge
from pdgemm.schedules.mover_registry import host_movers

OPTIONS = {
    "--block": ("1", "7", "64x3", "1000"),
    "--memory-limit": ("1", "20k", "1MiB", "1GiB"),
    "--panel-width": ("1", "5", "1000", "0"),
    "--lookahead": ("0", "1", "3"),
    "--mover": ("auto", "mpi", *host_movers()),
    "--accumulate-dtype": ("float64", "complex128"),
    "--seed": ("0", "5"),
}


@attack("products.command")
def command(trial: Trial) -> None:
    """`pdgemm multiply` with random options, and `pdgemm verify` of what it says."""
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
    if not np.array_equal(trial.read("f.h5:/c0"), c0):
        raise Finding("lost", "f.h5:/c0 is not what it was")
    if outcome == "right":
        if not gemm_error(trial.read("f.h5:/z"), alpha, a, b, beta, c0) <= TOLERANCE:
            raise Finding("wrong", "the product is wrong")
        if rng.random() < 0.3:
            c = ["--c0", "f.h5:/c0"] if beta else []
            judge(trial.pdgemm(size, "verify", "a.h5:/x", "b.h5:/x", "f.h5:/z", *scalars, *c), codes=(0,))
    trial.count(outcome)


@attack("products.calls")
def calls(trial: Trial) -> None:
    """`pdgemm` on views of any layout, many in one job."""
    trial.cases("product", 200)


@attack("products.keys")
def keys(trial: Trial) -> None:
    """A[key] and A[key] = value beside NumPy, many in one job."""
    trial.cases("keyed", 300)
