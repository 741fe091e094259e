"""Handwritten digits by residual convolutions: batch normalisation is the trap of training on several ranks.

A convolution is a product with the neighbourhoods of all pixels as rows.  Batch normalisation takes the mean and the
variance of a batch (Ioffe & Szegedy, ICML 2015), which no rank has as a whole.  Here the sums of its forward and of its
backward pass are those of all ranks: so any number of ranks computes what one would.  With `--local-statistics` the
network is trained once more, and each rank takes those of its own samples: nothing fails, but every number of ranks has
other losses.  The residual blocks are those of He, Zhang, Ren & Sun (CVPR 2016).
"""

import argparse
import sys
from functools import partial
from itertools import product

import numpy as np
from scipy.special import log_softmax
from sklearn.datasets import load_digits

from pdgemm import PdgemmError, parallel

CHANNELS, BLOCKS, PIXELS = 16, 2, (0, 1, 2)  # axes of images (n, height, width, channels)


def initial(seed=0):
    """Return the parameters in the order of the forward pass: convolutions with scales and shifts, a dense layer."""
    rng, parameters, inputs = np.random.default_rng(seed), {}, [1] + [CHANNELS] * (2 * BLOCKS)
    for layer, c in enumerate(inputs):
        parameters[f"w{layer}"] = rng.standard_normal((9 * c, CHANNELS)) * np.sqrt(2 / (9 * c))
        parameters[f"scale{layer}"], parameters[f"shift{layer}"] = np.ones(CHANNELS), np.zeros(CHANNELS)
    parameters["w"] = rng.standard_normal((16 * CHANNELS, 10)) / np.sqrt(16 * CHANNELS)
    parameters["b"] = np.zeros(10)
    return parameters


class Network:
    """The layers and their backward passes, which take from `kept` what the forward passes have put there.

    total : function that adds up numbers and arrays of all ranks, of which means and variances of a batch are made.
    """

    def __init__(self, buckets, total):
        self.buckets, self.p, self.total = buckets, buckets.parameters, total
        self.kept, self.averages = [], {}

    def add(self, name, gradient):
        self.buckets.gradients[name] += gradient
        self.buckets.ready(name)

    def convolution(self, layer, x):
        """Return the 3 x 3 convolution with zeros outside: the neighbourhoods of all pixels, as rows, times weights."""
        n, h, w, _ = x.shape
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        rows = np.concatenate([padded[:, i : i + h, j : j + w] for i, j in product(range(3), repeat=2)], axis=3)
        rows = rows.reshape(n * h * w, -1)
        self.kept.append(rows)
        return (rows @ self.p[f"w{layer}"]).reshape(n, h, w, -1)

    def convolution_back(self, layer, dy):
        """Return the gradient of the input: that of each row is added where the row has read."""
        (n, h, w, _), dy = dy.shape, dy.reshape(-1, CHANNELS)
        self.add(f"w{layer}", self.kept.pop().T @ dy)
        rows = (dy @ self.p[f"w{layer}"].T).reshape(n, h, w, 9, -1)
        dx = np.zeros((n, h + 2, w + 2, rows.shape[-1]), dy.dtype)
        for at, (i, j) in enumerate(product(range(3), repeat=2)):
            dx[:, i : i + h, j : j + w] += rows[:, :, :, at]
        return dx[:, 1:-1, 1:-1]

    def normalisation(self, layer, x, learning):
        """Return scale (x - mean) / sqrt(variance + 1e-5) + shift by channel; averages stand for the batch later on.

        The variance is a sum over what is left without the mean: two reductions, and nothing cancels.
        """
        count = 1
        if learning:
            count, mean = self.total(x[..., 0].size, x.sum(axis=PIXELS, dtype=float))
            mean = mean / count
            (squares,) = self.total(np.square(x - mean.astype(x.dtype)).sum(axis=PIXELS, dtype=float))
            variance = squares / count
            old = self.averages.get(layer, (mean, variance))
            self.averages[layer] = [0.9 * before + 0.1 * now for before, now in zip(old, (mean, variance))]
        else:
            mean, variance = self.averages[layer]
        inverse = (1 / np.sqrt(variance + 1e-5)).astype(x.dtype)
        x = (x - mean.astype(x.dtype)) * inverse
        self.kept.append((x, inverse, count))
        return x * self.p[f"scale{layer}"] + self.p[f"shift{layer}"]

    def normalisation_back(self, layer, dy):
        """Return the gradient of the input.  Each sample moves the mean and the variance of all: two sums again."""
        x, inverse, count = self.kept.pop()
        shift, scale = dy.sum(axis=PIXELS), (dy * x).sum(axis=PIXELS)
        self.add(f"shift{layer}", shift)  # those of this rank's samples: buckets add them up
        self.add(f"scale{layer}", scale)
        shift, scale = self.total(shift, scale)
        mean, slope = (shift / count).astype(x.dtype), (scale / count).astype(x.dtype)
        return (dy - mean - x * slope) * (inverse * self.p[f"scale{layer}"])

    def relu(self, x):
        self.kept.append(x > 0)
        return np.maximum(x, 0)

    def forward(self, x, learning=True):
        """Return the logits of images: a layer, residual blocks x := relu(x + layer(relu(layer(x)))), a dense layer."""
        self.kept = []
        x = self.relu(self.layer(0, x.reshape(-1, 8, 8, 1), learning))
        for first in range(1, 2 * BLOCKS, 2):
            y = self.relu(self.layer(first, x, learning))
            x = self.relu(x + self.layer(first + 1, y, learning))
        x = x.reshape(-1, 4, 2, 4, 2, CHANNELS).mean(axis=(2, 4)).reshape(len(x), -1)
        self.kept.append(x)
        return x @ self.p["w"] + self.p["b"]

    def backward(self, logits, labels, divisor):
        """Add the gradients of the sum of the losses over the divisor, and return this sum."""
        logarithms, own = log_softmax(logits, axis=1), (np.arange(len(labels)), labels)
        dy = np.exp(logarithms)
        dy[own] -= 1
        dy /= divisor
        self.add("b", dy.sum(axis=0))
        self.add("w", self.kept.pop().T @ dy)
        dx = (dy @ self.p["w"].T).reshape(-1, 4, 1, 4, 1, CHANNELS) / 4
        dx = np.broadcast_to(dx, (len(labels), 4, 2, 4, 2, CHANNELS)).reshape(-1, 8, 8, CHANNELS)
        for first in range(2 * BLOCKS - 1, 0, -2):
            dx = dx * self.kept.pop()
            dy = self.layer_back(first + 1, dx) * self.kept.pop()
            dx = dx + self.layer_back(first, dy)
        self.layer_back(0, dx * self.kept.pop())
        return -logarithms[own].sum(dtype=float)

    def layer(self, layer, x, learning):
        return self.normalisation(layer, self.convolution(layer, x), learning)

    def layer_back(self, layer, dy):
        return self.convolution_back(layer, self.normalisation_back(layer, dy))


def train(options, mesh, x, labels, total):
    """Return the losses of all steps, and the network."""
    buckets = parallel.Buckets(mesh, initial(), stage=options.zero, dtype=options.dtype)
    optimizer = parallel.ShardedOptimizer(buckets, parallel.AdamW())
    network, losses = Network(buckets, total), []
    shares = parallel.Sampler(len(x), options.batch).shares(mesh, range(options.steps))
    with parallel.Prefetch(mesh, (x, labels), shares) as batches:
        for step, batch in enumerate(batches):
            ((some, digits),) = batch.arrays
            with buckets.forward():
                logits = network.forward(some)
            with buckets.backward():
                loss = network.backward(logits, digits, batch.divisor)
            optimizer.step(parallel.warmup_cosine(step, 1e-2, min(20, options.steps), options.steps), clip=1.0)
            losses.append(mesh.sum(loss)[0] / batch.divisor)
    return losses, network


def main(*words):
    options, mesh = parsed(words), parallel.Mesh(dp=-1)
    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(x))
    x, labels = (x[order] / 16).astype("d" if options.dtype == "float64" else "f"), labels[order]
    losses, network = train(options, mesh, x[:1500], labels[:1500], partial(mesh.sum, kind="statistics"))
    with network.buckets.forward():
        read = network.forward(x[1500:], learning=False).argmax(axis=1)
    others = []
    if options.local_statistics:
        others, _ = train(options, mesh, x[:1500], labels[:1500], lambda *own: own)
    if mesh.rank == 0:
        for step in range(20, options.steps + 1, 20):
            other = f", and {others[step - 1]:.4f} with the statistics of each rank" if others else ""
            print(f"step {step}: loss {losses[step - 1]:.4f}{other}")
        print(f"{np.mean(read == labels[1500:]):.0%} of {len(read)} digits that were held out are read right")
        if others:
            most = np.abs(np.subtract(losses, others)).max()
            print(f"with the statistics of each rank, losses on {mesh.shape.dp} ranks are wrong by up to {most:.2f}")
        if options.picture:
            draw(options.picture, losses, others)


def draw(path, losses, others):
    """Draw the losses, and what those with local statistics differ by."""
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(losses, label="statistics of all ranks")
    left.set(xlabel="step", ylabel="loss", title="residual convolutions")
    if others:
        left.semilogy(others, linewidth=1, label="of each rank")
        left.legend(fontsize="small")
        right.plot(np.subtract(others, losses), color="tab:orange")
    right.axhline(0, color="tab:blue")
    right.set(xlabel="step", title="error of the loss by local statistics")
    figure.savefig(path, dpi=100)


def parsed(words):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=60, help="samples of a step, on all ranks together")
    add("--zero", type=int, default=0, help="what ranks divide: 1 state, 2 gradients, 3 parameters")
    add("--dtype", default="float64", help="of parameters: float32, float64")
    add("--local-statistics", action="store_true", help="train again with those of each rank, and compare")
    add("--picture", help="a file for the losses")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PdgemmError as bad:  # raised on all ranks: one line, and exit code 2
        sys.exit(bad)
