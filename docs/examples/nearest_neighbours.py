"""Which digits are alike: the five nearest neighbours of each, from one product that the command line makes.

`pdgemm multiply` stores S = X Xᵀ, and from it |x - y|² = |x|² + |y|² - 2 xᵀy.  This program reads the results by h5py,
as any other program can.  `digits.h5` is what `pca.py` writes.
"""

import sys
from pathlib import Path

import h5py
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits


def main(folder="."):
    folder, labels = Path(folder), load_digits().target
    with h5py.File(folder / "digits.h5") as digits, h5py.File(folder / "similarity.h5") as similarity:
        X, S = digits["X"][:], similarity["S"][:]
    print(f"largest difference from NumPy's product: {abs(S - X @ X.T).max():.0e}")

    squares = np.diag(S)
    distances = squares[:, None] + squares - 2 * S
    np.fill_diagonal(distances, np.inf)
    neighbours = np.argsort(distances, axis=1)[:, :5]
    right = np.mean(labels[neighbours[:, 0]] == labels)
    print(f"the nearest neighbour is the same digit in {right:.1%} of {len(X)} cases")
    draw(folder / "nearest_neighbours.png", X, labels, neighbours, shown=(0, 17, 42, 900, 1234))


def draw(path, X, labels, neighbours, shown):
    figure = Figure(figsize=(4.6, 4.6), layout="constrained")
    panels = figure.subplots(len(shown), 6)
    for row, i in zip(panels, shown):
        for axes, j in zip(row, (i, *neighbours[i])):
            axes.imshow(X[j].reshape(8, 8), cmap="gray_r")
            axes.set(xticks=[], yticks=[], xlabel=f"a {labels[j]}")
    figure.suptitle("a digit, and its five nearest neighbours")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
