"""Handwritten digits, learned on several ranks: a perceptron, its gradients by hand, and what moves in a step.

Each rank works on its share of a batch.  `Buckets` sums the gradients while the backward pass goes on,
`ShardedOptimizer` updates each rank's part of the parameters, and `TrainingState` goes on where a job has ended, on any
number of ranks.  The loss is a sum that is divided once, by the samples of all ranks: so any number of ranks computes
what one would.
"""

import argparse
import sys

import numpy as np
from scipy.special import log_softmax
from sklearn.datasets import load_digits

from pdgemm import PdgemmError, parallel

SIZES = {"1": (64, 128), "2": (128, 128), "3": (128, 10)}


def initial(seed=0):
    """Return weights and biases by name, in the order of the forward pass."""
    rng, parameters = np.random.default_rng(seed), {}
    for layer, (m, n) in SIZES.items():
        parameters["w" + layer] = (rng.standard_normal((m, n)) * np.sqrt(2 / m)).astype("f")
        parameters["b" + layer] = np.zeros(n, "f")
    return parameters


def forward(p, x):
    """Return the inputs of all layers, and the logits.  Products of 16-bit parameters are those of float32."""
    values = [x]
    for layer in SIZES:
        y = values[-1] @ p["w" + layer].astype(x.dtype) + p["b" + layer].astype(x.dtype)
        values.append(np.maximum(y, 0) if layer < "3" else y)
    return values


def backward(buckets, values, labels, factor):
    """Add the gradients of `factor` times the sum of the losses, and return this sum."""
    *inputs, logits = values
    logarithms, own = log_softmax(logits, axis=1), (np.arange(len(labels)), labels)
    dy = np.exp(logarithms)
    dy[own] -= 1
    dy *= factor
    for layer, x in zip("321", inputs[::-1]):
        for name, gradient in ("b" + layer, dy.sum(axis=0)), ("w" + layer, x.T @ dy):
            buckets.gradients[name] += gradient
            buckets.ready(name)
        if layer > "1":
            dy = (dy @ buckets.parameters["w" + layer].astype(x.dtype).T) * (x > 0)
    return -logarithms[own].sum(dtype=float)


def train(options, buckets, x, labels):
    """Yield the number and the loss of each step of this job.  Collective."""
    mesh, batch, parts, last = buckets.mesh, options.batch, options.microbatches, options.steps
    scale = parallel.LossScale() if options.dtype == "float16" else None
    optimizer, steps, first = parallel.ShardedOptimizer(buckets, parallel.AdamW(), scale=scale), range(last), 0
    if options.state:
        run = {"batch": batch, "steps": last}
        state = parallel.TrainingState(options.state, optimizer, every=50, attrs=run)
        steps, first = state.steps(last), state.step
    shares = parallel.Sampler(len(x), batch).shares(mesh, range(first, last), parts)
    with parallel.Prefetch(mesh, (x, labels), shares) as batches:
        times = parallel.StepTimes(optimizer, batches)
        for step, samples in zip(steps, batches):
            loss, factor = 0.0, (optimizer.scale.scale if scale else 1) / samples.divisor
            with times.step(batch):
                for some, digits in samples.arrays:
                    with buckets.forward():
                        values = forward(buckets.parameters, some)
                    with buckets.backward():
                        loss += backward(buckets, values, digits, factor)
                optimizer.step(parallel.warmup_cosine(step, 3e-3, min(20, last), last), clip=1.0)
            yield step + 1, mesh.sum(loss)[0] / samples.divisor
    report = times.report()
    if options.report and mesh.rank == 0:
        print(report)


def prepared(options):
    """Return images and labels, of which 1500 are learned and the others held out, and a network's parameters."""
    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(x))
    x, labels = (x[order] / 16).astype("d" if options.dtype == "float64" else "f"), labels[order]
    how = {"stage": options.zero, "microbatches": options.microbatches, "same_bits": options.same_bits}
    buckets = parallel.Buckets(parallel.Mesh(dp=-1), initial(), dtype=options.dtype, **how)
    return (x[:1500], labels[:1500]), (x[1500:], labels[1500:]), buckets


def main(*words):
    options = parsed(words)
    learned, (x, labels), buckets = prepared(options)
    losses = dict(train(options, buckets, *learned))
    with buckets.forward():
        read = forward(buckets.parameters, x)[-1].argmax(axis=1)
    if buckets.mesh.rank == 0:
        for step in filter(losses.get, range(100, options.steps + 1, 100)):
            print(f"step {step}: loss {losses[step]:.3f}")
        print(f"{np.mean(read == labels):.0%} of {len(x)} digits that were held out are read right")
        words = buckets.layout.step(0)["gradients"].words_received
        print(f"{words} words of gradients come in for rank 0 in a step")
        if options.picture:
            draw(options.picture, losses, x, labels, read)


def draw(path, losses, x, labels, read):
    """Draw the losses, and some digits that are read wrongly."""
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplot_mosaic("LLabc;LLdef", width_ratios=(2, 2, 1, 1, 1))
    axes["L"].semilogy(losses.keys(), losses.values())
    axes["L"].set(xlabel="step", ylabel="loss", title="handwritten digits")
    for name, at in zip("abcdef", np.flatnonzero(read != labels)):
        axes[name].imshow(x[at].reshape(8, 8).astype("f"), cmap="gray_r", interpolation="nearest")
        axes[name].set_title(f"{labels[at]} as {read[at]}", fontsize="small")
    for name in "abcdef":
        axes[name].set_axis_off()
    figure.savefig(path, dpi=100)


def parsed(words):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=60, help="samples of a step, on all ranks together")
    add("--microbatches", type=int, default=1, help="of each rank, added before they are reduced")
    add("--zero", type=int, default=0, help="what ranks divide: 1 state, 2 gradients, 3 parameters")
    add("--dtype", default="float32", help="of parameters: float16, bfloat16, float32, float64")
    add("--same-bits", action="store_true", help="as on 1, 2, 4, ... ranks")
    add("--state", help="a file from which to go on")
    add("--picture", help="a file for the losses, and the digits that were read wrongly")
    add("--no-report", dest="report", action="store_false", help="print no step report")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PdgemmError as bad:  # raised on all ranks: one line, and exit code 2
        sys.exit(bad)
