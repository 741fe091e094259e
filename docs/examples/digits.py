"""Handwritten digits, learned on several ranks without torch: a perceptron by hand, and what moves in a step.

Each rank works on its share of a batch.  All gradients are in one array, in the order of the backward pass, and each
layer is a bucket: its sum over the ranks goes on while the gradients of the next layer are computed.  Losses are
divided by the samples of all ranks: so any number of ranks has the losses of one.
"""

import argparse

import numpy as np
from scipy.special import log_softmax
from sklearn.datasets import load_digits

from pdgemm import parallel

SIZES = ((128, 10), (128, 128), (64, 128))  # inputs and outputs of each layer, the last one first
ENDS = np.cumsum([0, *((m + 1) * n for m, n in SIZES)])


def layers(flat):
    """Return the matrices of a flat array, the last one first: the weights of a layer, and a row of biases."""
    return [flat[start:stop].reshape(-1, n) for start, stop, (_, n) in zip(ENDS, ENDS[1:], SIZES)]


def forward(parameters, x):
    """Return the inputs of all layers, and the logits."""
    values = [x]
    for layer, w in enumerate(reversed(layers(parameters))):
        y = values[-1] @ w[:-1] + w[-1]
        values.append(np.maximum(y, 0) if layer < 2 else y)
    return values


def backward(line, parameters, gradients, values, labels, samples):
    """Compute the gradients of the losses over `samples`, start their sums over a line, and return the mean loss."""
    *inputs, logits = values
    logarithms, right = log_softmax(logits, axis=1), np.eye(10)[labels]
    dy = (np.exp(logarithms) - right) / samples
    for tag, (w, dw, x) in enumerate(zip(layers(parameters), layers(gradients), inputs[::-1]), 1):
        dw[:-1], dw[-1] = x.T @ dy, dy.sum(axis=0)
        line.mesh.transfers.expect([line.start_sum(dw.reshape(-1), "gradients", tag)])
        dy = (dy @ w[:-1].T) * (x > 0)
        line.mesh.transfers.poll()  # sums go on
    return -(logarithms * right).sum() / samples


def train(mesh, x, labels, steps, batch=60, rate=3e-3):
    """Return the parameters after some steps of Adam, and the losses, the same on all ranks.  Collective."""
    rng, line, losses, sampler = np.random.default_rng(0), mesh.line("dp"), [], parallel.Sampler(len(x), batch)
    parameters, gradients, m, v = np.zeros((4, ENDS[-1]))
    for w in reversed(layers(parameters)):
        w[:-1] = rng.standard_normal(w[:-1].shape) * np.sqrt(2 / len(w[:-1]))
    for step in range(steps):
        own = np.array_split(sampler.rows(step), line.size)[line.rank]
        losses += mesh.sum(backward(line, parameters, gradients, forward(parameters, x[own]), labels[own], batch))
        mesh.transfers.complete()
        m, v = 0.9 * m + 0.1 * gradients, 0.999 * v + 0.001 * gradients**2
        parameters -= rate * m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
    return parameters, losses


def main(*arguments):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--steps", type=int, default=300)
    add("--picture", help="a file for the losses, and six digits that are read wrongly")
    options, mesh = parser.parse_args(arguments or None), parallel.Mesh(dp=-1)
    x, labels = load_digits(return_X_y=True)
    learned, others = np.split(np.random.default_rng(1).permutation(len(x)), [1500])
    parameters, losses = train(mesh, x[learned] / 16, labels[learned], options.steps)
    read = forward(parameters, x[others] / 16)[-1].argmax(axis=1)
    if mesh.rank == 0:
        print(*(f"step {step}: loss {losses[step - 1]:.3f}" for step in range(100, options.steps + 1, 100)), sep="\n")
        print(f"{np.mean(read == labels[others]):.0%} of {len(read)} digits that were held out are read right")
        moved, p = mesh.traffic["gradients"].words_received, mesh.length("dp")
        words = sum((p - 2) * -(-n // p) + n for n in np.diff(ENDS))  # 2 (p - 1)/p of each bucket, if p divides it
        print(f"{moved} words of gradients came in for rank 0, {options.steps * words} by formula")
        if options.picture:
            from matplotlib.figure import Figure  # which takes a second to load: on this rank only

            left, right = (figure := Figure(figsize=(7, 3), layout="constrained")).subplots(1, 2)
            left.semilogy(losses)
            left.set(xlabel="step", ylabel="loss", title="handwritten digits")
            wrong = np.flatnonzero(read != labels[others])[:6]
            right.imshow(np.hstack(x[others[wrong]].reshape(-1, 8, 8)), cmap="gray_r")
            right.set(xticks=[], yticks=[], title=f"read as {', '.join(map(str, read[wrong]))}")
            figure.savefig(options.picture, dpi=100)


if __name__ == "__main__":
    main()
