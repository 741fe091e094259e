"""Least squares with a tall matrix in an HDF5 file: which features of a cell nucleus tell that a tumour is benign?

The normal equations AᵀA x = Aᵀb are small, but the condition number of A is squared in them.  One step of refinement
with the residual b - A x brings most of the lost digits back (Björck, Linear Algebra Appl. 88/89, 1987).
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.linalg import cho_factor, cho_solve
from sklearn.datasets import load_breast_cancer

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5


def least_squares(A, b, refinements=1):
    """Return the x that minimises |A x - b|, the same on every rank; b is an array that is on every rank."""
    factor = cho_factor((A.T @ A).allgather())
    x = cho_solve(factor, b @ A)
    for _ in range(refinements):
        x += cho_solve(factor, (b - A @ x) @ A)
    return x


def main(folder="."):
    tumours, folder, grid = load_breast_cancer(), Path(folder), ProcessGrid()
    features = np.column_stack([np.ones(len(tumours.data)), tumours.data])
    hdf5.save(folder / "tumours.h5", "/A", DistMatrix.from_global(features, grid=grid))  # your file is there already

    A, b = hdf5.load(folder / "tumours.h5", "/A", grid), tumours.target.astype(float)
    first, refined = least_squares(A, b, refinements=0), least_squares(A, b)
    right = np.mean((A @ refined > 0.5) == (b > 0.5))
    if grid.rank == 0:
        exact = np.linalg.lstsq(features, b)[0]
        errors = [abs(x / exact - 1) for x in (first, refined)]
        print(f"A: {A.shape[0]} x {A.shape[1]}, condition number {np.linalg.cond(features):.0e}")
        print(f"largest difference from numpy.linalg.lstsq: {errors[0].max():.0e}, refined {errors[1].max():.0e}")
        print(f"{right:.1%} of the tumours are on the right side of 1/2")
        draw(folder / "least_squares.png", *errors)


def draw(path, first, refined):
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(first, "o", label="normal equations")
    axes.semilogy(refined, "s", label="and one step of refinement")
    axes.set(xlabel="coefficient", ylabel="relative difference from lstsq")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
