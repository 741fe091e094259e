#!/usr/bin/env python3
"""The transformer of docs/examples/gpt in JAX, whose steps `bench_jobs.py gpt --jax` times; needs only jax."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax  # type: ignore[import-not-found]
import numpy as np
from jax import numpy as jnp

Arrays = dict[str, Any]


class Sizes(NamedTuple):
    """The sizes of the model and of a step."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    repeats: int


def initial(sizes: Sizes) -> Arrays:
    """Return random parameters."""
    rng, h = np.random.default_rng(0), sizes.hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding": (256, h), "positions": (sizes.sequence, h)}
    for layer in range(sizes.layers):
        products = {"qkv": (h, 3 * h), "out": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}
        for name, shape in products.items():
            shapes[f"{layer}.{name}.weight"], shapes[f"{layer}.{name}.bias"] = shape, shape[1:]
    norms = [f"{layer}.norm{k}" for layer in range(sizes.layers) for k in (1, 2)] + ["norm"]
    values = {name: rng.standard_normal(shape).astype("f") * 0.02 for name, shape in shapes.items()}
    return values | {f"{name}.{part}": np.full(h, part == "gain", "f") for name in norms for part in ("gain", "bias")}


def norm(x: Any, p: Arrays, name: str) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.gain"] + p[f"{name}.bias"]


def linear(x: Any, p: Arrays, name: str) -> Any:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def loss(p: Arrays, tokens: Any, sizes: Sizes) -> Any:
    """Return the mean loss of a token."""
    ids, labels, heads = tokens[:, :-1], tokens[:, 1:], sizes.heads
    batch, s = ids.shape
    x, past = p["embedding"][ids] + p["positions"], np.tril(np.ones((s, s), bool))
    for layer in range(sizes.layers):
        qkv = linear(norm(x, p, f"{layer}.norm1"), p, f"{layer}.qkv")
        q, k, v = qkv.reshape(batch, s, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        scores = jnp.where(past, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -jnp.inf)
        y = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + linear(y, p, f"{layer}.out")
        y = jax.nn.gelu(linear(norm(x, p, f"{layer}.norm2"), p, f"{layer}.up"), approximate=True)
        x = x + linear(y, p, f"{layer}.down")
    logits = jax.nn.log_softmax(norm(x, p, "norm") @ p["embedding"].T)
    return -jnp.take_along_axis(logits, labels[..., None], -1).mean()


@partial(jax.jit, static_argnums=3, donate_argnums=(0,))
def step(state: tuple[Arrays, Arrays, Arrays, Any], tokens: Any, rate: float, sizes: Sizes) -> tuple[Any, Any]:
    """Take a step of AdamW with clipping, as in the example."""
    p, m, v, t = state
    value, g = jax.value_and_grad(loss)(p, tokens, sizes)
    size = jnp.sqrt(sum((x * x).sum() for x in g.values()))
    g = {name: x * jnp.minimum(1.0, 1.0 / size) for name, x in g.items()}
    m, v, t = {n: 0.9 * m[n] + 0.1 * g[n] for n in p}, {n: 0.95 * v[n] + 0.05 * g[n] ** 2 for n in p}, t + 1
    change = {n: m[n] / (1 - 0.9**t) / (jnp.sqrt(v[n] / (1 - 0.95**t)) + 1e-8) for n in p}
    decay = {n: 0.1 * p[n] * n.endswith("weight") for n in p}
    return ({n: p[n] - rate * (change[n] + decay[n]) for n in p}, m, v, t), value


def main() -> None:
    """Take two steps for each line of input, and print the seconds of the second one."""
    parser = argparse.ArgumentParser()
    for name in Sizes._fields:
        parser.add_argument(f"--{name}", type=int)
    sizes = Sizes(**vars(parser.parse_args()))
    p = {name: jnp.asarray(x) for name, x in initial(sizes).items()}
    state: Any = p, *({name: jnp.zeros_like(x) for name, x in p.items()} for _ in "mv"), jnp.float32(0)
    tokens = np.random.default_rng(0).integers(0, 256, (sizes.batch, sizes.sequence + 1))
    state, value = step(state, tokens, 1e-3, sizes)
    for word in sys.stdin:
        if not word.strip():
            break
        for _ in range(2):  # only the second step counts, as in the other jobs
            start = perf_counter()
            state, value = step(state, tokens, 1e-3, sizes)
            float(value)
            jax.block_until_ready(state)
        print(perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
