#!/usr/bin/env python3
"""The demo's input and the check of its output, by plain h5py and NumPy: nothing here knows of pdgemm.

demo_digits.py write digits.h5     the handwritten digits X (1797 x 64), and X with each column's mean removed
demo_digits.py check FOLDER        covariance.h5 and similarity.h5 against NumPy; whose digits are alike
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

SHOWN = (0, 17, 42, 900, 1234, 1796)


def write(path: Path) -> None:
    """The input file."""
    X, labels = load_digits(return_X_y=True)
    with h5py.File(path, "w") as file:
        file["X"] = X
        file["centred"] = X - X.mean(axis=0)
        file["labels"] = labels
    print(f"wrote {path}: X and centred ({X.shape[0]} x {X.shape[1]}), labels")


def check(folder: Path) -> None:
    """The products on disk against NumPy's, and what they are good for."""
    with h5py.File(folder / "digits.h5") as file:
        X, centred, labels = (np.array(file[name]) for name in ("X", "centred", "labels"))
    with h5py.File(folder / "similarity.h5") as file:
        S = np.array(file["S"])
    with h5py.File(folder / "covariance.h5") as file:
        covariance = np.array(file["C"])
    compare("similarity X X^T", S, X, X.T, 1.0)
    compare("covariance", covariance, centred.T, centred, 1 / (len(X) - 1))
    if not np.allclose(covariance, np.cov(X, rowvar=False)):
        sys.exit("the covariance is not numpy.cov's")

    squares = np.diag(S)
    distance = squares[:, None] + squares[None, :] - 2 * S  # |x_i - x_j|^2 from the products alone
    np.fill_diagonal(distance, np.inf)
    neighbours = np.argsort(distance, axis=1)[:, :5]
    print("nearest neighbours, from the stored similarity:")
    for i in SHOWN:
        print(f"  digit {i:4d}, a {labels[i]}: " + ", ".join(f"{j} (a {labels[j]})" for j in neighbours[i]))
    right = (labels[neighbours[:, 0]] == labels).mean()
    print(f"the nearest neighbour is the same digit in {right:.1%} of {len(X)} cases")
    draw(folder / "neighbours.png", X, labels, neighbours)


def compare(what: str, C: np.ndarray, A: np.ndarray, B: np.ndarray, alpha: float) -> None:
    """|C - alpha A B| within the rounding error of two products: gamma_k |A||B| each (Higham 2002, 3.5)."""
    unit = np.finfo(C.dtype).eps / 2
    k = A.shape[1] + 1
    bound = 2 * k * unit / (1 - k * unit) * abs(alpha) * (np.abs(A) @ np.abs(B))
    error = np.abs(C - alpha * (A @ B))
    if C.shape != bound.shape or not (error <= bound).all():
        sys.exit(f"{what}: differs from NumPy's by {error.max():.2e}, more than rounding explains")
    print(f"{what}, {C.shape[0]} x {C.shape[1]}: as NumPy says, within rounding (difference up to {error.max():.1e})")


def draw(path: Path, X: np.ndarray, labels: np.ndarray, neighbours: np.ndarray) -> None:
    """A picture: each digit beside its five nearest."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(SHOWN), 6, figsize=(6, 1.1 * len(SHOWN)), layout="constrained")
    for row, i in zip(axes, SHOWN, strict=True):
        for axis, j in zip(row, (i, *neighbours[i]), strict=True):
            axis.imshow(X[j].reshape(8, 8), cmap="gray_r")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_xlabel(f"{labels[j]}", fontsize=8)
    axes[0, 0].set_title("digit", fontsize=9)
    axes[0, 1].set_title("nearest neighbours", fontsize=9, loc="left")
    figure.savefig(path, dpi=120)
    print(f"drew {path}")


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]))
