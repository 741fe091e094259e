"""Least squares with a tall matrix in an HDF5 file: which features of a cell nucleus tell that a tumour is benign?

The normal equations AᵀA x = Aᵀb are small, but the condition number of A is squared in them, and half of the digits are
lost.  `lstsq` factors A = Q R, and loses none; each rank has some rows of Q, and all of R.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5
from pdgemm.linalg import lstsq


def normal_equations(A, b):
    """Return the x that minimises |A x - b|, without half of its digits; b is an array that is on every rank."""
    return np.linalg.solve((A.T @ A).allgather(), b @ A)


def main(folder="."):
    tumours, folder, grid = load_breast_cancer(), Path(folder), ProcessGrid()
    features = np.column_stack([np.ones(len(tumours.data)), tumours.data])
    hdf5.save(folder / "tumours.h5", "/A", DistMatrix.from_global(features, grid=grid))  # your file is there already

    A, b = hdf5.load(folder / "tumours.h5", "/A", grid), tumours.target.astype(float)
    x, (square,), rank, s = lstsq(A, b)  # all of these are the same on every rank
    normal = normal_equations(A, b)
    right = np.mean((A @ x > 0.5) == (b > 0.5))
    if grid.rank == 0:
        exact = np.linalg.lstsq(features, b)[0]
        errors = [abs(y / exact - 1) for y in (normal, x)]
        print(f"A: {A.shape[0]} x {A.shape[1]}, rank {rank}, condition number {s[0] / s[-1]:.0e}")
        print(f"largest difference from numpy.linalg.lstsq: {errors[1].max():.0e}")
        print(f"that of the normal equations: {errors[0].max():.0e}")
        print(f"sum of squares that is left: {square:.2f}")
        print(f"{right:.1%} of the tumours are on the right side of 1/2")
        draw(folder / "least_squares.png", *errors)


def draw(path, normal, by_qr):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(normal, "o", label="normal equations")
    axes.semilogy(by_qr, "s", label="pdgemm.linalg.lstsq")
    axes.set(xlabel="coefficient", ylabel="difference from NumPy, relative")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
