#!/usr/bin/env python3
"""Whole jobs in turns: products from file to file, and steps of a transformer in several layouts.

\b
    . scripts/env.sh
    python scripts/benchmarks/bench_jobs.py files --sizes 8192 --with '--memory 100MiB' --with '--checkpoint 2s'
    python scripts/benchmarks/bench_jobs.py gpt --hidden 512 --sequence 256 --jax /path/to/python

A job of training takes a step for each line of input, and sleeps while other jobs work.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
from peers.job import Job
from peers.worker import next_line
from runner import Case, Work, integers, main

NUMPY = """
import json, os, sys, time
spent = {}
def lap(name, last=[time.time()]):
    spent[name], last[0] = time.time() - last[0], time.time()
import h5py
a, b, c, sync = sys.argv[1:]
lap("imports")
def read(name):
    path, dataset = name.split(":")
    with h5py.File(path) as file:
        return file[dataset][()]
A = read(a)
B = A if b == a else read(b)
lap("read")
C = A @ B
lap("product")
path, dataset = c.split(":")
with h5py.File(path, "w") as file:
    file[dataset] = C
    file.flush()
    if sync == "True":
        os.fsync(file.id.get_vfd_handle())
lap("write")
print(json.dumps(spent))
"""
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gpt"
PHASES = ("start", "read", "product", "write", "save")  # "start" includes all other time, such as the end
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "two threads": (1, 2, {}),
    "one thread": (1, 1, {}),
    "dp 2": (2, 1, {"dp": 2}),
    "dp 2, zero 2": (2, 1, {"dp": 2, "zero": 2}),
    "tp 2": (2, 1, {"tp": 2}),
    "cp 2": (2, 1, {"cp": 2}),
    "pp 2": (2, 1, {"pp": 2, "microbatches": 8}),
    "pp 2, 2 microbatches": (2, 1, {"pp": 2, "microbatches": 2}),
}  # {layout: (ranks, threads, options of `TrainingLayout`)}


# ------------------------------------------------------------------ from file to file
def files(
    sizes: str = "512,2048,4096,8192",
    ranks: int = 2,
    different: bool = False,
    sync: bool = False,
    with_: tuple[str, ...] = (),
    folder: str = "",
) -> Iterator[Case]:
    """The whole command `pdgemm multiply`, compared with one process of h5py and NumPy with as many threads.

    The matrices are in the page cache; without --different A and B are one dataset.  With --sync NumPy's file is
    written to the disk, as pdgemm's is.  Each --with adds a contender: `pdgemm multiply` with these options.
    """
    with tempfile.TemporaryDirectory(dir=folder or None) as place:
        for size in integers(sizes):
            a, b, c = f"{place}/a.h5:/X", f"{place}/{'b' if different else 'a'}.h5:/X", f"{place}/c.h5:/C"
            for seed, name in enumerate(sorted({a, b})):
                words = ["generate", name, "--shape", f"{size}x{size}", "--seed", str(seed), "--force"]
                subprocess.run([sys.executable, "-m", "pdgemm", *words], stdout=sys.stderr, check=True)
            phases: dict[str, list[dict[str, float]]] = {}
            works: dict[str, Work] = {"numpy": partial(by_numpy, phases, ranks, a, b, c, str(sync))}
            for name in ("pdgemm", *(f"pdgemm {options}" for options in with_)):
                words = ["multiply", a, b, "-o", c, "--json", *name.split()[1:]]
                works[name] = partial(by_pdgemm, phases, name, ranks, words)
            yield Case(f"{size} x {size}", works, facts=partial(in_phases, phases), own_clock=True)


def run(words: list[str], threads: int) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a command, and the JSON object that it prints."""
    start = perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    seconds = perf_counter() - start
    if done.returncode:
        raise click.ClickException(done.stdout + done.stderr)
    return seconds, json.loads(done.stdout)


def by_numpy(phases: dict[str, list[dict[str, float]]], ranks: int, a: str, b: str, c: str, sync: str) -> float:
    Path(c.partition(":")[0]).unlink(missing_ok=True)
    seconds, spent = run([sys.executable, "-c", NUMPY, a, b, c, sync], ranks)
    phases.setdefault("numpy", []).append(spent | {"start": seconds - sum(spent.values()) + spent["imports"]})
    return seconds


def by_pdgemm(phases: dict[str, list[dict[str, float]]], name: str, ranks: int, words: list[str]) -> float:
    Path(words[4].partition(":")[0]).unlink(missing_ok=True)
    seconds, facts = run(["mpiexec", "-n", str(ranks), sys.executable, "-m", "pdgemm", *words], 1)
    product = facts["product"]
    if "read_wait" in product:  # the product includes reading and writing: only the waits for them are subtracted
        spent = {"read": product["read_wait"], "write": product["write_wait"], "save": product["save_seconds"]}
        spent["product"] = product["seconds"] - sum(spent.values())
    else:
        spent = {"read": sum(x["seconds"] for x in facts["read"]), "write": facts["wrote"]["seconds"]}
        spent["product"] = product["per_rank"]["seconds"]["max"]
    phases.setdefault(name, []).append(spent | {"start": seconds - sum(spent.values())})
    return seconds


def in_phases(phases: dict[str, list[dict[str, float]]], _: Any) -> Iterator[str]:
    for name, turns in phases.items():
        medians = {x: median(turn.get(x, 0.0) for turn in turns[1:]) for x in PHASES}
        yield f"{name}: {', '.join(f'{x} {seconds:.2f} s' for x, seconds in medians.items())}"


# ------------------------------------------------------------------ steps of training
def gpt(
    layers: int = 4, hidden: int = 512, heads: int = 8, sequence: int = 256, batch: int = 8, jax: str = ""
) -> Iterator[Case]:
    """A float32 step of the transformer of docs/examples/gpt in several layouts on two cores, and with two threads.

    The predictions are those of `pdgemm model` on the machine of PDGEMM_MACHINE.  --jax names a Python with jax
    installed; JAX then takes part with two threads.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "batch": batch}
    own = [f"--{name}={size}" for name, size in sizes.items()]
    plans = {name: planned_seconds(sizes, how) for name, (_, threads, how) in LAYOUTS.items() if threads == 1}
    with ExitStack() as stack:
        jobs = {}
        for name, (ranks, threads, layout) in LAYOUTS.items():
            words = " ".join([*own, *(f"--{x}={y}" for x, y in layout.items())])
            jobs[name] = stack.enter_context(job_of(["serve-gpt", f"--words={words}"], ranks, threads))
        if jax:
            program = [jax, str(Path(__file__).with_name("gpt_in_jax.py")), *own]
            jobs["JAX"] = stack.enter_context(Job(shlex.join(["env", "OMP_NUM_THREADS=2", *program]), ""))
        works: dict[str, Work] = {name: partial(seconds_of_step, job) for name, job in jobs.items()}
        yield Case("a step", works, facts=partial(of_plans, plans), own_clock=True)


def planned_seconds(sizes: dict[str, int], layout: dict[str, Any]) -> float:
    """Return the seconds of a step that `pdgemm model` predicts."""
    from pdgemm.planning.machines.machine import machine_at_hand
    from pdgemm.planning.models.model_layers import TrainingLayout
    from pdgemm.planning.models.model_plan import ModelPlan
    from pdgemm.planning.models.model_shape import ModelShape

    shape = ModelShape(sizes["layers"], sizes["hidden"], sizes["heads"], 256, sizes["sequence"])
    axes: dict[str, Any] = {name: n for name, n in layout.items() if name != "microbatches"}
    samples = sizes["batch"] // layout.get("microbatches", 1) // layout.get("dp", 1)
    how: dict[str, Any] = {"microbatch": samples, "fused": False, "dtype": "float32"}
    return ModelPlan(shape, TrainingLayout(**axes, **how), sizes["batch"], machine_at_hand()).step_seconds


def of_plans(plans: dict[str, float], seconds: dict[str, float]) -> Iterator[str]:
    from scipy.stats import spearmanr

    for name, planned in plans.items():
        yield f"{name}: planned {1e3 * planned:.1f} ms, {planned / seconds[name]:.2f} of the measured time"
    order = spearmanr([*plans.values()], [seconds[name] for name in plans]).statistic
    yield f"rank correlation of the {len(plans)} plans and their times: {order:.2f}"
    bubble = seconds["one thread"] / 2 * (1 + 1 / 8)
    yield f"pp 2 over the ideal, half of one thread's time plus a bubble of 1/8: {seconds['pp 2'] / bubble:.2f}"


# ------------------------------------------------------------------ jobs that serve steps
def job_of(words: list[str], ranks: int, threads: int) -> Job:
    """Return a job that runs a command of this program, and takes steps on request."""
    pinned = [] if ranks > 1 else ["--bind-to", "none"]
    launcher = ["env", f"OMP_NUM_THREADS={threads}", f"OPENBLAS_NUM_THREADS={threads}", "mpiexec", "-n", str(ranks)]
    return Job(shlex.join([*launcher, *pinned, sys.executable, sys.argv[0], *words]), "")


def seconds_of_step(job: Job) -> float:
    return job.ask("step")[0]


def serve(step: Work, comm: Any) -> Iterator[Case]:
    """Take two steps for each line of the input, and print the seconds of the second one.

    The first step brings pages and caches back that other jobs have replaced.
    """
    step()
    while next_line(comm):
        step()
        comm.Barrier()
        start = perf_counter()
        step()
        comm.Barrier()
        if comm.rank == 0:
            print(perf_counter() - start, flush=True)
    yield from ()


def serve_gpt(comm: Any, words: str = "") -> Iterator[Case]:
    """Take steps on request, as one contender of `gpt`."""
    sys.path.insert(0, str(EXAMPLE))
    import train  # type: ignore[import-not-found]

    return serve(partial(next, train.training([*words.split(), "--steps", "100000"], comm)), comm)


if __name__ == "__main__":
    main(files, gpt, serve_gpt)
