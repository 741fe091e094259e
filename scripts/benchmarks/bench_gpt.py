#!/usr/bin/env python3
"""A step of the example transformer: its products, its layouts beside one process, and the same model in JAX.

    python scripts/benchmarks/bench_gpt.py products
    python scripts/benchmarks/bench_gpt.py layouts --hidden 512 --sequence 256
    python scripts/benchmarks/bench_gpt.py layouts --jax /path/to/python

Float32.  The layouts are jobs that take turns with their steps, of which all but one sleep; times are medians.  Beside
them are the seconds of `pdgemm model` on the machine of PDGEMM_MACHINE.  --jax names a Python that has jax, which takes
part with two threads.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench_training import Work, in_turns, job_of, jobs_in_turns, serve
from scipy.stats import spearmanr

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gpt"
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one thread": (1, 1, {}),
    "two threads": (1, 2, {}),
    "one thread, recompute": (1, 1, {"recompute": "full"}),
    "dp 2": (2, 1, {"dp": 2}),
    "dp 2, zero 2": (2, 1, {"dp": 2, "zero": 2}),
    "tp 2": (2, 1, {"tp": 2}),
    "cp 2": (2, 1, {"cp": 2}),
    "pp 2": (2, 1, {"pp": 2, "microbatches": 8}),
    "pp 2, 2 microbatches": (2, 1, {"pp": 2, "microbatches": 2}),
}  # ranks, threads, and what differs from one process


@click.group()
@click.option("--layers", default=4, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--heads", default=8, show_default=True)
@click.option("--sequence", default=256, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.pass_context
def main(context: click.Context, /, **sizes: int) -> None:
    """Measure the transformer of docs/examples/gpt."""
    context.obj = sizes


def words_of(sizes: dict[str, Any]) -> list[str]:
    """Return sizes as words of a command line."""
    return [f"--{name}={size}" for name, size in sizes.items()]


def step_of(sizes: dict[str, int], words: list[str]) -> tuple[Work, Any]:
    """Return a step of the example, and its communicator."""
    sys.path.insert(0, str(EXAMPLE))
    import train  # type: ignore[import-not-found]

    own = {name: size for name, size in sizes.items() if name != "repeats"}
    run = train.Run(train.parsed([*words_of(own), "--steps", "100000", *words]))
    steps = run.steps(train.text())
    return (lambda: next(steps)), run.mesh.comm


@main.command()
@click.pass_obj
def products(sizes: dict[str, int]) -> None:
    """A step of one process, and the matrix products of its size alone."""
    step, comm = step_of(sizes, [])
    h, s, d = sizes["hidden"], sizes["sequence"], sizes["hidden"] // sizes["heads"]
    tokens, cores = sizes["batch"] * s, sizes["batch"] * sizes["heads"]
    linear = [(tokens, h, 3 * h), (tokens, h, h), (tokens, h, 4 * h), (tokens, 4 * h, h)]
    shapes = [(1, *shape) for shape in linear] + [(cores, s, d, s), (cores, s, s, d)]
    arrays = [tuple(np.ones((many, *shape), "f") for shape in ((m, k), (k, n), (m, n))) for many, m, k, n in shapes]
    last = tuple(np.ones((1, *shape), "f") for shape in ((tokens, h), (h, 256), (tokens, 256)))

    def alone() -> None:
        for x, w, y in [*arrays * sizes["layers"], last]:
            np.matmul(x, w, out=y)
            np.matmul(y, w.swapaxes(1, 2), out=x)
            np.matmul(x.swapaxes(1, 2), y, out=w)
            x[:], w[:] = 1, 1

    def filled() -> None:
        for x, w, _ in [*arrays * sizes["layers"], last]:
            x[:], w[:] = 1, 1

    seconds = in_turns(comm, {"step": step, "products": alone, "filled": filled}, sizes["repeats"])
    time = seconds["products"] - seconds["filled"]
    flops = 6 * (sizes["layers"] * sum(many * m * k * n for many, m, k, n in shapes) + tokens * h * 256)
    print(
        f"step {1e3 * seconds['step']:.1f} ms, products {1e3 * time:.1f} ms at {flops / time / 1e9:.0f} GFLOP/s: "
        f"{time / seconds['step']:.0%} of the step"
    )


@main.command()
@click.option("--jax", help="A Python that has jax.")
@click.pass_obj
def layouts(sizes: dict[str, int], jax: str | None) -> None:
    """A step of several layouts on two cores, and of JAX."""
    own, jobs = [sys.executable, sys.argv[0], *words_of(sizes), "worker"], {}
    for name, (ranks, threads, layout) in LAYOUTS.items():
        jobs[name] = job_of([*own, "--", *words_of(layout)], ranks, threads)
    if jax:
        program, pipe = [jax, str(Path(__file__).with_name("gpt_in_jax.py")), *words_of(sizes)], subprocess.PIPE
        jobs["JAX"] = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True)
    seconds = jobs_in_turns(jobs, sizes["repeats"])
    one, two = seconds["one thread"], seconds["two threads"]
    plans = {name: planned_seconds(sizes, how) for name, (_, threads, how) in LAYOUTS.items() if threads == 1}
    for name, time in seconds.items():
        beside = f"; planned {1e3 * plans[name]:.1f} ms, {plans[name] / time:.2f} of it" if name in plans else ""
        print(f"{name:22} {1e3 * time:8.1f} ms, {time / two:.2f} of two threads{beside}", flush=True)
    order = spearmanr([*plans.values()], [seconds[name] for name in plans]).statistic
    print(f"rank correlation of the {len(plans)} plans and their times: {order:.2f}")
    bubble = one / 2 * (1 + 1 / 8)
    print(f"pp 2 over half of one thread's time and the bubble of 1/8: {seconds['pp 2'] / bubble:.2f}")


def planned_seconds(sizes: dict[str, int], layout: dict[str, Any]) -> float:
    """Return the seconds of a step by `pdgemm model`."""
    from pdgemm.planning.machines.machine import machine_at_hand
    from pdgemm.planning.models.model_plan import ModelPlan
    from pdgemm.planning.models.model_shape import ModelShape
    from pdgemm.planning.models.training_layout import TrainingLayout

    shape = ModelShape(sizes["layers"], sizes["hidden"], sizes["heads"], 256, sizes["sequence"])
    axes: dict[str, Any] = {name: n for name, n in layout.items() if name != "microbatches"}
    samples = sizes["batch"] // layout.get("microbatches", 1) // layout.get("dp", 1)
    how: dict[str, Any] = {"microbatch": samples, "fused": False, "dtype": "float32"}
    return ModelPlan(shape, TrainingLayout(**axes, **how), sizes["batch"], machine_at_hand()).step_seconds


@main.command(hidden=True)
@click.argument("words", nargs=-1)
@click.pass_obj
def worker(sizes: dict[str, int], words: tuple[str, ...]) -> None:
    """Serve steps of one layout."""
    serve(*step_of(sizes, [*words]))


if __name__ == "__main__":
    main()
