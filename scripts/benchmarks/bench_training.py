#!/usr/bin/env python3
"""Training: collectives compared with MPI's, steps with the limit of processors and cables, many tensors with one.

\b
    mpiexec -n 2 python scripts/benchmarks/bench_training.py collectives
    mpiexec -n 2 python scripts/benchmarks/bench_training.py tensors
    mpiexec -n 4 python scripts/benchmarks/bench_training.py pipelines
    python scripts/benchmarks/bench_training.py gpt-products
    scripts/hosts.sh 2 mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_training.py step

"limit" is an exchange by plain messages, in both directions at once, of the bytes in the lower bound of the
collectives.  Steps on threads, and steps of whole models in several layouts, are in bench_jobs.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
from runner import Case, Work, integers, main

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gpt"
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")


def mesh_of(**axes: Any) -> Any:
    from pdgemm.parallel import Mesh

    return Mesh(**axes)


def exchange(comm: Any, words: int) -> Work:
    """Return a function that sends `words` float32 words to the next rank, and receives as many."""
    there, back = np.zeros(words, "f"), np.zeros(words, "f")
    return lambda: comm.Sendrecv(there, (comm.rank + 1) % comm.size, 0, back, (comm.rank - 1) % comm.size, 0)


def collectives(comm: Any, sizes: str = "4096,1e6,4e6,16e6,64e6") -> Iterator[Case]:
    """All-reduce, reduce-scatter and all-gather of one bucket of each size in bytes, as in training, and by MPI."""
    mesh = mesh_of(dp=-1)
    for size in integers(sizes):
        for operation in COLLECTIVES:
            yield collective(mesh, operation, size // 4)
    mesh.free()


def collective(mesh: Any, operation: str, words: int) -> Case:
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

    works: dict[str, Work] = {"pdgemm": ours, "MPI of parts": of_parts}
    works["limit"] = exchange(comm, (2 if stage == 0 else 1) * words * (d - 1) // d)
    if operation == "all-reduce":
        works["Allreduce"] = lambda: comm.Allreduce(MPI.IN_PLACE, x)
    way = layout.reduction(bucket) if reduces else layout.gathering(bucket)
    return Case(f"{operation} of {4 * words} bytes by {way.algorithm}, {way.mover}", works)


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
    """The two linear layers of a transformer's block, from `width` to four times `width` and back."""

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


def step(comm: Any, layers: int = 4, width: int = 1024, samples: str = "512,1024") -> Iterator[Case]:
    """A step of a perceptron, a step of one process without messages, and the collectives; `samples` are per rank."""
    mesh = mesh_of(dp=-1)
    for number in integers(samples):
        for stage in (0, 2):
            yield step_of_perceptron(mesh, (layers, width, number), stage)
    mesh.free()


def step_of_perceptron(mesh: Any, sizes: tuple[int, int, int], stage: int) -> Case:
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

    def facts(seconds: dict[str, float]) -> list[str]:
        bound = max(seconds["alone"], seconds["limit"])
        hidden = (seconds["alone"] + seconds["collectives"] - seconds["step"]) / seconds["collectives"]
        return [f"step over max(alone, limit): {seconds['step'] / bound:.2f}; {hidden:.0%} of collectives hidden"]

    works: dict[str, Work] = {"step": model.step, "alone": alone.step, "collectives": reduction}
    works["limit"] = exchange(mesh.comm, 2 * buckets.layout.words * (d - 1) // d)
    name = f"{sizes[0]} x {sizes[1]}, {sizes[2]} samples, stage {stage}, {len(buckets.layout.buckets)} buckets"
    return Case(name, works, facts=facts)


def layers(comm: Any, width: int = 512, samples: int = 2048) -> Iterator[Case]:
    """The products of a block along tp, the same products without messages, and the messages without products."""
    from mpi4py import MPI

    from pdgemm.parallel import Mesh
    from pdgemm.parallel.layers import Linear

    mesh, n = mesh_of(tp=-1), 4 * width
    block, t = Block(mesh, width, samples), mesh.comm.size
    up, down = block.up, block.down
    y, z, whole = (np.ones(x, "f") for x in ((samples, n // t), block.x.shape, (samples, width)))
    later = up.input_gradient(y, block.w1, tokens=samples)[1]
    here = Linear(Mesh(MPI.COMM_SELF), width, n // t)

    def facts(seconds: dict[str, float]) -> list[str]:
        longer = max(seconds["product"], seconds["limit"])
        return [f"{name}: {taken / longer:.2f} of max(product, limit)" for name, taken in [*seconds.items()][2:]]

    yield Case(f"{samples} x {width} x {n} on {t}", {
        "product": lambda: here.forward(whole, block.w1),
        "limit": exchange(mesh.comm, samples * width * (t - 1) // t),
        "all-gather and X W": lambda: up.forward(block.x, block.w1, tokens=samples),
        "dY W^T and reduce-scatter": lambda: up.input_gradient(y, block.w1),
        "all-gather and X^T dY": lambda: up.weight_gradient(later, block.x, block.dw1),
        "Y W and reduce-scatter": lambda: down.forward(y, block.w2, tokens=samples),
        "all-gather and dZ W^T": lambda: down.input_gradient(z, block.w2, tokens=samples),
    }, facts=facts)  # fmt: skip
    mesh.free()


def tensors(comm: Any, number: int = 300, words: int = 64) -> Iterator[Case]:
    """A step of many small parameters, a step of one parameter of the same total size, and plain additions of each."""
    mesh = mesh_of(dp=-1)

    def facts(seconds: dict[str, float]) -> list[str]:
        many, one = (seconds[name] - seconds[f"additions of {name}"] for name in ("many", "one"))
        return [f"many over one without the additions: {many / one:.2f}"]

    for stage in range(4):
        one, plain_one = step_of_tensors(mesh, stage, 1, words * number)
        many, plain_many = step_of_tensors(mesh, stage, number, words)
        works = {"one": one, "many": many, "additions of one": plain_one, "additions of many": plain_many}
        yield Case(f"stage {stage}, {number} x {words} words", works, facts=facts)
    mesh.free()


def step_of_tensors(mesh: Any, stage: int, number: int, words: int) -> tuple[Work, Work]:
    """Return a step with gradients of 1, and a function that only adds these to plain arrays."""
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


class Sleeping:
    """A stage that sleeps, and sends arrays of `words` float32 words.

    seconds : {kind of action: its seconds}.
    """

    def __init__(self, seconds: dict[str, float], words: int) -> None:
        self.seconds, self.y = seconds, np.zeros(words, "f")

    def shape(self, microbatch: int) -> tuple[tuple[int, ...], Any]:
        return self.y.shape, self.y.dtype

    def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
        sleep(self.seconds["F"])
        return self.y

    def backward(self, microbatch: int, chunk: int, dy: Any) -> Any:
        sleep(self.seconds["B"])
        return self.y

    def weights(self, microbatch: int, chunk: int) -> None:
        sleep(self.seconds["W"])


def pipelines(
    comm: Any, microbatches: int = 8, chunks: int = 2, forward: float = 0.02, words: int = 1000, draw: bool = False
) -> Iterator[Case]:
    """Pipelines of stages that sleep, by each schedule: the measured bubble compared with the planned one.

    A forward pass takes `forward` seconds and a backward pass twice as long, half of it for the gradients of weights;
    with chunks, each takes its share.  Sleeping stages need no processor, so there may be more stages than cores.  The
    bubble is the waiting time of the stages over their working time, in the step of median length.
    """
    from pdgemm.parallel import PipelineSchedule

    mesh = mesh_of(pp=-1)
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        schedule = PipelineSchedule(name, mesh.shape.pp, microbatches, chunks if name == "interleaved" else 1)
        length = forward / schedule.chunks
        seconds = {"F": length, "B": length * (1 if schedule.split else 2), "W": length}
        walk, runs = schedule.walk(seconds), list[Any]()

        def facts(_: Any, walk: Any = walk, runs: list[Any] = runs) -> Iterator[str]:
            run = sorted(runs[1:], key=lambda run: run.seconds)[len(runs[1:]) // 2]
            yield f"bubble {float(run.bubble):.2%} measured, {float(walk.bubble):.2%} planned"
            yield f"{1e3 * run.seconds:.1f} ms measured, {1e3 * walk.seconds:.1f} ms planned"
            yield from str(run).splitlines() if draw else ()

        yield Case(name, {name: pipeline_run(mesh, schedule, Sleeping(seconds, words), runs)}, facts=facts)
    mesh.free()


def pipeline_run(mesh: Any, schedule: Any, stage: Sleeping, runs: list[Any]) -> Work:
    """Return a function that runs a pipeline, and appends the timeline of the run to `runs`."""
    from pdgemm.instrument import spans
    from pdgemm.parallel import Pipeline
    from pdgemm.schedules.training.pipeline_orders import Action
    from pdgemm.schedules.training.pipeline_timeline import TimelineCell

    pipeline = Pipeline(mesh, schedule)

    def run() -> None:
        with spans.taking(trace := spans.Trace()):
            pipeline.run(stage)
        own = [(x.facts(), x.start, x.end) for x in trace.spans if x.name in stage.seconds and x.facts]
        every = mesh.comm.allgather(own)  # on one node all ranks have one clock
        begun = min(start for row in every for _, start, _ in row)
        cells = [[TimelineCell(Action(**a), start - begun, end - begun) for a, start, end in row] for row in every]
        runs.append(schedule.timeline(cells))

    return run


def gpt_step(words: list[str]) -> tuple[Callable[[], object], Any]:
    """Return a step of docs/examples/gpt, and its communicator."""
    sys.path.insert(0, str(EXAMPLE))
    import train  # type: ignore[import-not-found]

    run = train.Run(train.parsed([*words, "--steps", "100000"]))
    steps = run.steps(train.text())
    return partial(next, steps), run.mesh.comm


def gpt_products(
    comm: Any, layers: int = 4, hidden: int = 512, heads: int = 8, sequence: int = 256, batch: int = 8
) -> Iterator[Case]:
    """A step of the transformer of docs/examples/gpt on one process, compared with only its matrix products."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "batch": batch}
    step, _ = gpt_step([f"--{name}={size}" for name, size in sizes.items()])
    h, s, d, tokens, cores = hidden, sequence, hidden // heads, batch * sequence, batch * heads
    linear = [(tokens, h, 3 * h), (tokens, h, h), (tokens, h, 4 * h), (tokens, 4 * h, h)]
    shapes = [*[(1, *shape) for shape in linear], (cores, s, d, s), (cores, s, s, d)] * layers + [(1, tokens, h, 256)]
    distinct = {x: [np.ones((x[0], *y), "f") for y in ((x[1], x[3]), (x[3], x[2]), (x[1], x[2]))] for x in {*shapes}}
    arrays = [distinct[shape] for shape in shapes]

    def alone() -> None:
        for x, w, y in arrays:
            np.matmul(x, w, out=y)
            np.matmul(y, w.swapaxes(1, 2), out=x)
            np.matmul(x.swapaxes(1, 2), y, out=w)
            x[:], w[:] = 1, 1

    def filled() -> None:
        for x, w, _ in arrays:
            x[:], w[:] = 1, 1

    def facts(seconds: dict[str, float]) -> list[str]:
        taken, flops = seconds["products"] - seconds["fills"], 6 * sum(b * m * n * k for b, m, n, k in shapes)
        return [f"products alone at {flops / taken / 1e9:.0f} GFLOP/s: {taken / seconds['step']:.0%} of the step"]

    yield Case("transformer", {"step": step, "products": alone, "fills": filled}, facts=facts)


if __name__ == "__main__":
    main(collectives, step, layers, tensors, pipelines, gpt_products)
