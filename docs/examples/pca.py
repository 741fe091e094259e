"""Principal components of a tall matrix in an HDF5 file: 1797 handwritten digits of 64 pixels.

Each rank reads its part of A.  Their mean is subtracted, and the small matrix AᵀA is one distributed product.  Every
rank computes its eigenvectors V; the scores A V are a second product, which is saved in HDF5.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5


def pca(A, count):
    """Return all variances in descending order, the first components as columns, and the scores (a DistMatrix)."""
    A = A - A.mean(axis=0)
    gram = (A.T @ A).allgather()  # it is small, and every rank takes all of it
    variances, V = np.linalg.eigh(gram / (len(A) - 1))
    V = V[:, ::-1][:, :count]
    return variances[::-1], V, A @ V


def main(folder="."):
    digits, folder = load_digits(), Path(folder)
    grid = ProcessGrid()
    hdf5.save(folder / "digits.h5", "/X", DistMatrix.from_global(digits.data, grid=grid))  # your file is there already

    A = hdf5.load(folder / "digits.h5", "/X", grid)
    variances, components, scores = pca(A, 10)
    hdf5.save(folder / "pca.h5", "/scores", scores)

    x, y = scores[:, 0], scores[:, 1]  # columns are collective, and arrays on every rank
    if grid.rank == 0:
        share = variances[:10].sum() / variances.sum()
        print(f"A: {A.shape[0]} x {A.shape[1]}; 10 components explain {share:.1%} of the variance")
        print(f"wrote pca.h5:/scores, {scores.shape[0]} x {scores.shape[1]}")
        draw(folder / "pca.png", x, y, components, digits.target)


def draw(path, x, y, components, labels):
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 1))
    axes = left.subplots()
    dots = axes.scatter(x, y, c=labels, cmap="tab10", s=4)
    axes.set(xlabel="first component", ylabel="second component", title="scores of 1797 digits")
    axes.legend(*dots.legend_elements(), title="digit", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    right.suptitle("six components", fontsize="large")
    for axes, component in zip(right.subplots(3, 2).flat, components.T):
        axes.imshow(component.reshape(8, 8), cmap="RdBu")
        axes.set_axis_off()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
