"""Principal components of a tall matrix in an HDF5 file: 1797 handwritten digits of 64 pixels.

Each rank reads its part of A.  Their mean is subtracted, and the largest singular values with their vectors are found
by products of A and thin matrices.  The scores are saved in HDF5.
"""

import sys
from pathlib import Path

from sklearn.datasets import load_digits

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5
from pdgemm.linalg import svd


def pca(A, count):
    """Return the first variances, their share of the total, the components as columns, and scores (a DistMatrix)."""
    A = A - A.mean(axis=0)
    U, s, Vt = svd(A, count)
    variances = s**2 / (len(A) - 1)
    return variances, (s**2).sum() / A.norm() ** 2, Vt.allgather().T, U * s


def main(folder="."):
    digits, folder = load_digits(), Path(folder)
    grid = ProcessGrid()
    hdf5.save(folder / "digits.h5", "/X", DistMatrix.from_global(digits.data, grid=grid))  # your file is there already

    A = hdf5.load(folder / "digits.h5", "/X", grid)
    _, share, components, scores = pca(A, 10)
    hdf5.save(folder / "pca.h5", "/scores", scores)

    x, y = scores[:, 0], scores[:, 1]  # columns are collective, and arrays on every rank
    if grid.rank == 0:
        print(f"A: {A.shape[0]} x {A.shape[1]}; 10 components explain {share:.1%} of the variance")
        print(f"wrote pca.h5:/scores, {scores.shape[0]} x {scores.shape[1]}")
        draw(folder / "pca.png", x, y, components, digits.target)


def draw(path, x, y, components, labels):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

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
