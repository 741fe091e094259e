"""A small network with gradients by hand, which tests train on meshes of any shape.

    mpiexec -n RANKS python perceptron.py STEPS EVERY FILE STAGE [FILE STAGE]...

continues the runs of files.  Rank 0 prints the process numbers of all ranks, and each step; for each FILE it also
writes FILE.json with the losses of these steps and the parameters.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pdgemm.parallel import AdamW, Buckets, LossScale, Mesh, Prefetch, Sampler, ShardedOptimizer, TrainingState

ROWS, BATCH = 101, 60  # samples; the last is the number in a step of a `continued` run
SIZES = (13, 17, 10, 9)  # 517 parameters, which no number of ranks from 2 to 9 divides


def initial(sizes: tuple[int, ...] = SIZES, dtype: Any = float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    parameters = {}
    for layer, (m, n) in enumerate(pairwise(sizes)):
        parameters[f"w{layer}"] = (rng.standard_normal((m, n)) / np.sqrt(m)).astype(dtype)
        parameters[f"b{layer}"] = (rng.standard_normal(n) / 10).astype(dtype)
    return parameters


def samples(count: int, sizes: tuple[int, ...] = SIZES) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((count, sizes[0]))
    return x, np.argmax(x @ rng.standard_normal((sizes[0], sizes[-1])), axis=1)


def microbatch(
    buckets: Any, x: np.ndarray, labels: np.ndarray, divisor: float, scale: float = 1.0, planted: float = 0.0
) -> float:
    """Return the sum of the losses, cross-entropy, and add the gradients of scale/divisor times the sum.

    planted : is added to an element of the gradient of w1.
    """
    kind, layers = buckets.layout.wide, len(buckets.layout.parameters) // 2
    inputs, y = [], x.astype(kind)
    with buckets.forward():
        for layer in range(layers):
            inputs.append(y)
            y = y @ buckets.parameters[f"w{layer}"].astype(kind) + buckets.parameters[f"b{layer}"].astype(kind)
            y = np.tanh(y) if layer < layers - 1 else y
    y = y - y.max(axis=1, keepdims=True, initial=-np.inf)
    rows = np.arange(len(labels))
    probability = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    loss = -float(np.log(probability[rows, labels]).sum(dtype=float))
    dy = probability
    dy[rows, labels] -= 1
    dy *= kind.type(scale / divisor)
    with buckets.backward():
        for layer in reversed(range(layers)):
            buckets.gradients[f"b{layer}"] += dy.sum(axis=0)
            buckets.ready(f"b{layer}")
            buckets.gradients[f"w{layer}"] += inputs[layer].T @ dy
            if layer == 1:
                buckets.gradients["w1"][3, 2] += planted
            buckets.ready(f"w{layer}")
            if layer:
                dy = (dy @ buckets.parameters[f"w{layer}"].astype(kind).T) * (1 - inputs[layer] ** 2)
    return loss


def trained(mesh: Any, steps: int, batch: int = 60, count: int = 240, microbatches: int = 1, dtype: Any = float,
            rule: Any = None, clip: float | None = 1.0, scale: Any = None, sizes: tuple[int, ...] = SIZES,
            **how: Any) -> Any:  # fmt: skip
    """Return losses, norms, the final parameters, and the buckets and optimizer."""
    buckets = Buckets(mesh, initial(sizes), microbatches=microbatches, dtype=dtype, **how)
    optimizer = ShardedOptimizer(buckets, rule or AdamW(), scale=scale)
    (x, labels), losses, norms = samples(count, sizes), [], []
    for step in range(steps):
        rows = (np.arange(batch) + step * batch) % count
        (divisor,), loss = mesh.sum(sum(map(len, own(mesh, rows, microbatches)))), 0.0
        for some in own(mesh, rows, microbatches):
            loss += microbatch(buckets, x[some], labels[some], divisor, optimizer.scale.scale if scale else 1.0)
        norms.append(optimizer.step(0.01, clip).norm)
        losses.append(mesh.sum(loss)[0] / divisor)
    with buckets.forward():
        end = {name: buckets.parameters[name].astype(float) for name in buckets.parameters}
    return losses, norms, end, buckets, optimizer


def continued(
    mesh: Any,
    path: Path,
    until: int,
    every: int = 100,
    dtype: Any = "d",
    rule: Any = None,
    attrs: Any = None,
    done: Callable[[int], object] = lambda step: None,
    **how: Any,
) -> tuple[list[float], dict[str, np.ndarray], Any]:
    """Continue the run of a file; return the losses of the remaining steps, the parameters, and the optimizer.

    done : is called after each step, before it may be saved.
    """
    buckets = Buckets(mesh, initial(), dtype=dtype, **how)
    scale = LossScale(2.0**12, growth_every=4) if dtype == "float16" else None
    optimizer = ShardedOptimizer(buckets, rule or AdamW(), scale=scale)
    state = TrainingState(path, optimizer, every=every, attrs={"batch": BATCH, **(attrs or {})})
    sampler, (x, labels), losses = Sampler(ROWS, BATCH, 5), samples(ROWS), []
    shares = sampler.shares(mesh, range(state.step, until), buckets.layout.microbatches)
    with Prefetch(mesh, (x, labels), shares) as batches:
        for batch, step in zip(batches, state.steps(until)):
            factor = optimizer.scale.scale if optimizer.scale else 1.0
            loss = sum(microbatch(buckets, *some, batch.divisor, factor) for some in batch.arrays)
            optimizer.step(0.01, clip=1.0)
            losses += [mesh.sum(loss)[0] / batch.divisor]
            done(step)
        for _ in state.steps(until):  # the last step saves
            pass
    with buckets.forward():
        end = {name: buckets.parameters[name].astype(float) for name in buckets.parameters}
    return losses, end, optimizer


def own(mesh: Any, rows: np.ndarray, microbatches: int) -> list[np.ndarray]:
    """Return the rows of each microbatch that belong to this rank."""
    parts = mesh.shape.dp * microbatches
    cuts = [len(rows) * at // parts for at in range(parts + 1)]
    first = mesh.index("dp") * microbatches
    return [rows[cuts[at] : cuts[at + 1]] for at in range(first, first + microbatches)]


def main(steps: str, every: str, *files: str) -> None:
    mesh = Mesh(dp=-1)
    say = partial(print, flush=True) if mesh.rank == 0 else lambda *words: None
    say("ranks", *mesh.comm.allgather(os.getpid()))
    for path, stage in zip(files[::2], files[1::2]):
        how = {"stage": int(stage), "bucket_bytes": 600, "microbatches": 1 + int(stage) % 2}
        losses, end, _ = continued(mesh, Path(path), int(steps), int(every), done=partial(say, "step"), **how)
        if mesh.rank == 0:
            result = {"losses": losses, "end": {name: x.tolist() for name, x in end.items()}}
            Path(f"{path}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
