#!/usr/bin/env python3
"""Training: collectives beside MPI's own, steps beside what processors and cables allow, many tensors beside one.

    mpiexec -n 2 python scripts/benchmarks/bench_training.py collectives
    mpiexec -n 2 python scripts/benchmarks/bench_training.py tensors
    python scripts/benchmarks/bench_training.py threads
    python scripts/benchmarks/bench_training.py threads --axis tp --width 512 --samples 2048
    scripts/hosts.sh 2 mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_training.py collectives
    scripts/hosts.sh 2 mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_training.py step
    scripts/hosts.sh 2 mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_training.py layers

All contenders of a line take turns in one job, or in two jobs of which one sleeps.  Times are medians of the slowest
rank.  Of collectives, "limit" is an exchange by plain messages of as many bytes as the bound says, in both directions
at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep
from typing import Any

import click
import numpy as np

MIB = 1 << 20
Work = Callable[[], object]


def in_turns(comm: Any, contenders: dict[str, Work], repeats: int) -> dict[str, float]:
    """Return the median seconds of the slowest rank of each contender; one turn of each comes before."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            comm.Barrier()
            start = perf_counter()
            run()
            slowest = max(comm.allgather(perf_counter() - start))
            if turn:
                seconds[name].append(slowest)
    return {name: median(some) for name, some in seconds.items()}


@click.group()
def main() -> None:
    """Measure `pdgemm.parallel`."""


def exchange(comm: Any, words: int) -> Work:
    """Return a function that sends so many float32 words to the next rank, and receives as many."""
    there, back = np.zeros(words, "f"), np.zeros(words, "f")
    return lambda: comm.Sendrecv(there, (comm.rank + 1) % comm.size, 0, back, (comm.rank - 1) % comm.size, 0)


@main.command()
@click.option("--sizes", default="4096,1e6,4e6,16e6,64e6", show_default=True, help="Bytes of the vector, in float32.")
@click.option("--repeats", default=11, show_default=True)
def collectives(sizes: str, repeats: int) -> None:
    """All-reduce, reduce-scatter and all-gather of one bucket, as training starts them, and MPI's own."""
    from pdgemm.parallel import Mesh

    mesh = Mesh(dp=-1)
    for size in sizes.split(","):
        for operation in ("all-reduce", "reduce-scatter", "all-gather"):
            line_of_collective(mesh, operation, int(float(size)) // 4, repeats)
    mesh.free()


def line_of_collective(mesh: Any, operation: str, words: int, repeats: int) -> None:
    """Measure and print one collective."""
    from mpi4py import MPI

    from pdgemm.parallel import Buckets

    comm, d, reduces = mesh.comm, mesh.comm.size, operation != "all-gather"
    stage = 0 if operation == "all-reduce" else 1
    buckets = Buckets(mesh, {"x": np.zeros(words, "f")}, stage=stage, bucket_bytes=4 * words)
    (line,), layout, (bucket,), x = buckets.lines, buckets.layout, buckets.layout.buckets, np.zeros(words, "f")
    counts = [s.stop - s.start for s in (layout.part(bucket, at) for at in range(d))]
    part = np.zeros(counts[comm.rank], "f")

    def ours() -> None:
        if reduces:
            line._reduce(bucket)
            line._wait(0)
        else:
            line.gather_updated(bucket)
            line.wait_for(bucket)

    def of_parts() -> None:
        if reduces:
            comm.Reduce_scatter(x, part, counts)
        if operation != "reduce-scatter":
            comm.Allgatherv(part, [x, counts])

    contenders: dict[str, Work] = {"pdgemm": ours, "MPI of parts": of_parts}
    contenders["limit"] = exchange(comm, (2 if stage == 0 else 1) * words * (d - 1) // d)
    if operation == "all-reduce":
        contenders["Allreduce"] = lambda: comm.Allreduce(MPI.IN_PLACE, x)
    seconds = in_turns(comm, contenders, repeats if words < 1 << 23 else max(3, repeats // 2))
    best = min(s for name, s in seconds.items() if name not in ("pdgemm", "limit"))
    if comm.rank == 0:
        parts = ", ".join(f"{name} {1e3 * s:.3f} ms" for name, s in seconds.items())
        way = layout.reduction(bucket) if reduces else layout.gathering(bucket)
        print(
            f"{operation:14} {4 * words / MIB:9.3f} MiB on {d}: {parts}; of limit "
            f"{seconds['pdgemm'] / seconds['limit']:.2f}, of MPI's {seconds['pdgemm'] / best:.2f} "
            f"({way.algorithm}, {way.mover})",
            flush=True,
        )


class Perceptron:
    """Hidden layers of equal width between 64 inputs and 10 outputs, and random samples."""

    def __init__(self, mesh: Any, layers: int, width: int, samples: int, **how: Any) -> None:
        from pdgemm.parallel import SGD, Buckets, ShardedOptimizer

        rng, sizes = np.random.default_rng(0), [64, *[width] * layers, 10]
        weights = {f"w{k}": (rng.standard_normal(x) / width**0.5).astype("f") for k, x in enumerate(pairwise(sizes))}
        self.buckets = Buckets(mesh, weights, **how)
        self.optimizer = ShardedOptimizer(self.buckets, SGD())
        self.x, self.layers = rng.standard_normal((samples, 64)).astype("f"), len(weights)
        self.dy = (rng.standard_normal((samples, 10)) / samples).astype("f")

    def passes(self) -> None:
        """A forward and a backward pass."""
        buckets, inputs = self.buckets, [self.x]
        for k in range(self.layers):
            inputs.append(np.maximum(buckets.multiply(inputs[-1], buckets.parameters[f"w{k}"]), 0))
        dy = self.dy
        for k in range(self.layers)[::-1]:
            x, name = inputs[k], f"w{k}"
            buckets.multiply(x.T, dy, add_to=buckets.gradients[name])
            buckets.ready(name)
            if k:
                dy = buckets.multiply(dy, buckets.parameters[name].T)
                dy *= x > 0

    def step(self) -> None:
        self.passes()
        self.optimizer.step(1e-3)


class Block:
    """The two linear layers of a transformer's block, of hidden width `width` and four times as much between them."""

    def __init__(self, mesh: Any, width: int, samples: int) -> None:
        from pdgemm.parallel.layers import Linear, layernorm, layernorm_backward
        from pdgemm.schedules.training.mesh_shape import block_of

        rng, self.norm, self.norm_backward = np.random.default_rng(0), layernorm, layernorm_backward
        self.up, self.down = Linear(mesh, width, 4 * width, "columns"), Linear(mesh, 4 * width, width, "rows")
        rows, between = (block_of(n, mesh.length("tp"), mesh.index("tp")) for n in (samples, 4 * width))
        self.x, self.dz = (rng.standard_normal((samples, width)).astype("f")[rows] for _ in range(2))
        self.w1, self.w2 = (
            (rng.standard_normal(x) * 0.02).astype("f") for x in ((width, 4 * width), (4 * width, width))
        )
        self.w1, self.w2 = np.ascontiguousarray(self.w1[:, between]), self.w2[between]
        self.b1, self.b2, self.ones = np.zeros(self.w1.shape[1], "f"), np.zeros(width, "f"), np.ones(width, "f")
        self.dw1, self.dw2, self.db1, self.db2 = map(np.zeros_like, (self.w1, self.w2, self.b1, self.b2))
        self.samples = samples

    def step(self) -> None:
        """A forward and a backward pass."""
        rows, kept = self.norm(self.x, self.ones, self.b2)
        y, aux = self.up.forward(rows, self.w1, self.b1, "gelu_tanh", tokens=self.samples)
        self.down.forward(y, self.w2, self.b2, residual=self.x)
        dy, later = self.down.input_gradient(self.dz, self.w2, "gelu_tanh", aux)
        self.down.weight_gradient(later, y, self.dw2, self.db2)
        drows, later = self.up.input_gradient(dy, self.w1)
        self.up.weight_gradient(later, rows, self.dw1, self.db1)
        self.norm_backward(drows, kept, self.ones)


@main.command()
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--samples", default="512,1024", show_default=True, help="Of each rank.")
@click.option("--repeats", default=7, show_default=True)
def step(layers: int, width: int, samples: str, repeats: int) -> None:
    """A step of a perceptron, that of each rank alone, its reduction alone, and the share of it that is hidden."""
    from pdgemm.parallel import Mesh

    mesh = Mesh(dp=-1)
    for number in samples.split(","):
        for stage in (0, 2):
            line_of_step(mesh, (layers, width, int(number)), stage, repeats)
    mesh.free()


def line_of_step(mesh: Any, sizes: tuple[int, int, int], stage: int, repeats: int) -> None:
    """Measure and print the step of a model."""
    from mpi4py import MPI

    from pdgemm.parallel import Mesh

    model, alone = Perceptron(mesh, *sizes, stage=stage), Perceptron(Mesh(MPI.COMM_SELF), *sizes)
    buckets, d = model.buckets, mesh.comm.size
    (line,) = buckets.lines

    def reduction() -> None:
        for name in buckets.layout.places:
            _ = buckets.gradients[name]
            buckets.ready(name)
        buckets.finish()
        for bucket in buckets.layout.buckets if stage else ():
            line.gather_updated(bucket)
            line.wait_for(bucket)
        buckets.clear()

    contenders: dict[str, Work] = {"step": model.step, "alone": alone.step, "collectives": reduction}
    contenders["limit"] = exchange(mesh.comm, 2 * buckets.layout.words * (d - 1) // d)
    seconds = in_turns(mesh.comm, contenders, repeats)
    bound = max(seconds["alone"], seconds["limit"])
    hidden = (seconds["alone"] + seconds["collectives"] - seconds["step"]) / seconds["collectives"]
    if mesh.rank == 0:
        parts = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in seconds.items())
        print(
            f"{sizes[0]} x {sizes[1]}, {sizes[2]} samples, stage {stage}, {len(buckets.layout.buckets)} buckets: "
            f"{parts}; step over max(alone, limit) {seconds['step'] / bound:.2f}; {hidden:.0%} of collectives hidden",
            flush=True,
        )


@main.command()
@click.option("--width", default=512, show_default=True)
@click.option("--samples", default=2048, show_default=True)
@click.option("--repeats", default=7, show_default=True)
def layers(width: int, samples: int, repeats: int) -> None:
    """The products of a block along tp, the same products without messages, and the messages without products."""
    from mpi4py import MPI

    from pdgemm.parallel import Mesh
    from pdgemm.parallel.layers import Linear

    mesh, n = Mesh(tp=-1), 4 * width
    block, t = Block(mesh, width, samples), mesh.comm.size
    up, down, some = block.up, block.down, n // t
    y, z, whole = (np.ones(x, "f") for x in ((samples, some), block.x.shape, (samples, width)))
    later, alone = {layer: layer.input_gradient(x, w, tokens=samples)[1] for layer, x, w in (
        (up, y, block.w1), (down, z, block.w2))}, Mesh(MPI.COMM_SELF)  # fmt: skip
    here = Linear(alone, width, some)
    contenders: dict[str, Work] = {
        "all-gather and X W": lambda: up.forward(block.x, block.w1, tokens=samples),
        "dY W^T and reduce-scatter": lambda: up.input_gradient(y, block.w1),
        "all-gather and X^T dY": lambda: up.weight_gradient(later[up], block.x, block.dw1),
        "Y W and reduce-scatter": lambda: down.forward(y, block.w2, tokens=samples),
        "all-gather and dZ W^T": lambda: down.input_gradient(z, block.w2, tokens=samples),
        "product": lambda: here.forward(whole, block.w1),
        "limit": exchange(mesh.comm, samples * width * (t - 1) // t),
    }
    seconds = in_turns(mesh.comm, contenders, repeats)
    product, limit = seconds.pop("product"), seconds.pop("limit")
    if mesh.rank == 0:
        print(f"{samples} x {width} x {n} on {t}: product {1e3 * product:.1f} ms, messages {1e3 * limit:.1f} ms")
        for name, s in seconds.items():
            print(f"{name:26} {1e3 * s:8.1f} ms, {s / max(product, limit):.2f} of the longer one", flush=True)
    mesh.free()


@main.command()
@click.option("--number", default=300, show_default=True)
@click.option("--words", default=64, show_default=True)
@click.option("--repeats", default=51, show_default=True)
def tensors(number: int, words: int, repeats: int) -> None:
    """A step of many small parameters, one that is as large as all, and the additions of the many without buckets."""
    from pdgemm.parallel import Mesh

    mesh = Mesh(dp=-1)
    for stage in range(4):
        many, plain_many = step_of_tensors(mesh, stage, number, words)
        one, plain_one = step_of_tensors(mesh, stage, 1, words * number)
        contenders = {"many": many, "one": one, "plain many": plain_many, "plain one": plain_one}
        seconds = in_turns(mesh.comm, contenders, repeats)
        of_many, of_one = (seconds[name] - seconds[f"plain {name}"] for name in ("many", "one"))
        if mesh.rank == 0:
            print(
                f"stage {stage}: {number} x {words} words {1e3 * seconds['many']:.3f} ms, one of {words * number} "
                f"words {1e3 * seconds['one']:.3f} ms, ratio {seconds['many'] / seconds['one']:.2f}; without the "
                f"additions, which take {1e3 * seconds['plain many']:.3f} ms, {of_many / of_one:.2f}",
                flush=True,
            )
    mesh.free()


def step_of_tensors(mesh: Any, stage: int, number: int, words: int) -> tuple[Work, Work]:
    """Return a step with gradients of 1, and one that only adds these to plain arrays."""
    from pdgemm.parallel import SGD, Buckets, ShardedOptimizer

    values = {f"x{k}": np.zeros(words, "f") for k in range(number)}
    buckets = Buckets(mesh, values, stage=stage)
    optimizer, names, one = ShardedOptimizer(buckets, SGD()), [*values][::-1], np.ones(words, "f")

    def step() -> None:
        with buckets.backward():
            for name in names:
                buckets.gradients[name] += one
            buckets.ready(*names)
        optimizer.step(1e-3)

    def plain() -> None:
        for name in names:
            values[name] += one

    return step, plain


@main.command()
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--samples", default=1024, show_default=True, help="Of all ranks together.")
@click.option("--axis", type=click.Choice(["dp", "tp"]), default="dp", help="tp: of a block, whose layers are divided.")
@click.option("--repeats", default=9, show_default=True)
@click.option("--worker", is_flag=True, hidden=True)
def threads(layers: int, width: int, samples: int, axis: str, repeats: int, worker: bool) -> None:
    """A step on two ranks with one thread each, and on one process with two threads."""
    if worker:
        from pdgemm.parallel import Mesh

        sizes: Any = {axis: -1}
        mesh = Mesh(**sizes)
        perceptron = axis == "dp" and Perceptron(mesh, layers, width, samples // mesh.comm.size)
        model: Any = perceptron or Block(mesh, width, samples)
        return serve(model.step, mesh.comm)
    program = [sys.executable, sys.argv[0], "threads", "--worker"]
    program += [f"--layers={layers}", f"--width={width}", f"--samples={samples}", f"--axis={axis}"]
    jobs = {"two ranks": job_of(program, 2, 1), "two threads": job_of(program, 1, 2)}
    ranks, one = jobs_in_turns(jobs, repeats).values()
    print(f"two ranks {1e3 * ranks:.1f} ms, two threads {1e3 * one:.1f} ms, ratio {ranks / one:.2f}")


def serve(step: Work, comm: Any = None) -> None:
    """Take two steps whenever the job's input says so, and print the seconds of the second; the job sleeps meanwhile.

    The first brings back to memory and caches what the system and other jobs have driven out.
    """
    step()
    while True:
        word = sys.stdin.readline() if comm is None or comm.rank == 0 else ""
        if comm is not None:
            request = comm.Ibarrier()  # ranks that wait leave the processors to the other jobs
            while not request.Test():
                sleep(1e-3)
            word = comm.bcast(word)
        if word != "step\n":
            return
        step()
        if comm is not None:
            comm.Barrier()
        start = perf_counter()
        step()
        if comm is not None:
            comm.Barrier()
        if comm is None or comm.rank == 0:
            print(perf_counter() - start, flush=True)


def job_of(program: list[str], ranks: int, threads: int) -> subprocess.Popen[str]:
    """Start a job that serves steps."""
    number, pinned = str(threads), [] if ranks > 1 else ["--bind-to", "none"]
    environment = os.environ | {"OMP_NUM_THREADS": number, "OPENBLAS_NUM_THREADS": number}
    command = ["mpiexec", "-n", str(ranks), *pinned, *program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def jobs_in_turns(jobs: dict[str, subprocess.Popen[str]], repeats: int) -> dict[str, float]:
    """Return the median seconds of a step of each job, which take turns, and end the jobs."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            assert job.stdin and job.stdout
            job.stdin.write("step\n")
            job.stdin.flush()
            time = float(job.stdout.readline())
            if turn:
                seconds[name].append(time)
    for job in jobs.values():
        job.communicate("end\n")  # not every mpiexec says that its input has ended
    return {name: median(some) for name, some in seconds.items()}


if __name__ == "__main__":
    main()
