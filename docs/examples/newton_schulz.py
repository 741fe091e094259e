"""The inverse and the polar factor of a matrix by nothing but products.

Each step of X := X + X (I - A X) squares the residual of the inverse (Schulz, ZAMM 13, 1933).  With the residual
(I - XᵀX) / 2 instead, all singular values of X go to 1, and X becomes the orthogonal matrix that is nearest to A
(Higham, Functions of Matrices, 2008, 8.3).
"""

import sys
from pathlib import Path

import numpy as np

from pdgemm import DistMatrix, ProcessGrid


def iterate(X, residual, weight, tolerance=1e-12):
    """Repeat X := X + weight X R until the residual R is small; return X and the norms of all R."""
    norms = []
    while True:
        R = residual(X)
        norms.append(R.norm())
        if norms[-1] <= tolerance or len(norms) == 100:
            return X, norms
        X = X + weight * (X @ R)


def inverse(A):
    """Return X with A X = I, and the norms of I - A X in all steps."""
    start = (A.T / (A.norm(1) * A.norm(np.inf))).redistribute(like=A)
    identity = DistMatrix.eye(len(A), grid=A.grid)
    return iterate(start, lambda X: identity - A @ X, 1)


def polar(A):
    """Return U of A = U H, with orthonormal columns and H symmetric, and the norms of I - UᵀU in all steps."""
    start = A / np.sqrt(A.norm(1) * A.norm(np.inf))  # no singular value is above 1
    identity = DistMatrix.eye(A.shape[1], grid=A.grid)
    return iterate(start, lambda X: identity - X.T @ X, 1 / 2)


def main(folder=".", n=400):
    grid = ProcessGrid()
    A = 2 * DistMatrix.eye(n, grid=grid) + DistMatrix.random((n, n), grid=grid, kind="normal", seed=1) / np.sqrt(n)
    X, of_inverse = inverse(A)
    U, of_polar = polar(A)
    H = U.T @ A
    asymmetry = (H - H.T).norm() / H.norm()

    whole, computed = A.to_global(), X.to_global()
    if grid.rank == 0:
        exact = np.linalg.inv(whole)
        print(f"inverse: {len(of_inverse) - 1} steps, |I - A X| = {of_inverse[-1]:.0e}")
        print(f"difference from numpy.linalg.inv: {np.linalg.norm(computed - exact) / np.linalg.norm(exact):.0e}")
        print(f"polar factor: {len(of_polar) - 1} steps, |I - UᵀU| = {of_polar[-1]:.0e}")
        print(f"UᵀA differs from its transpose by {asymmetry:.0e}")
        draw(Path(folder) / "newton_schulz.png", of_inverse, of_polar)


def draw(path, of_inverse, of_polar):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(of_inverse, "o-", label="inverse, |I - A X|")
    axes.semilogy(of_polar, "s-", label="polar factor, |I - XᵀX|")
    axes.set(xlabel="step", ylabel="residual in the Frobenius norm", title="quadratic convergence")
    axes.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
