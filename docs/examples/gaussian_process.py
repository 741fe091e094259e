"""Gaussian-process regression: how the diabetes of 442 patients progresses within a year, and how sure that is.

The kernel exp(-gamma |x - y|²) of all pairs of patients is one product, because |x - y|² = |x|² + |y|² - 2 xᵀy.  With
the Cholesky factor of K + alpha I = L Lᵀ the mean is K* L⁻ᵀ L⁻¹ y, the variance 1 + alpha - |L⁻¹ K*ᵀ|² by columns, and
the logarithm of the marginal likelihood, by which gamma is chosen, -yᵀw/2 - Σ log L_ii - n log(2π)/2 (Rasmussen &
Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1).
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from pdgemm import DistMatrix, ProcessGrid, linalg


def kernel(X, Y, gamma):
    """Return exp(-gamma |x - y|²) of each row x of X with each row y of Y."""
    squares = (X * X).sum(axis=1, keepdims=True) + (Y * Y).sum(axis=1) - 2 * (X @ Y.T)
    return np.exp(-gamma * squares)


def fit(X, y, gamma, alpha):
    """Return L, w = (K + alpha I)⁻¹ y, and the logarithm of the marginal likelihood."""
    K = kernel(X, X, gamma)
    L = linalg.cholesky(K + alpha * DistMatrix.eye(len(y), grid=X.grid, block=K.block))
    w = linalg.cho_solve(L, y)
    return L, w, -y @ w / 2 - np.log(L.diagonal()).sum() - len(y) / 2 * np.log(2 * np.pi)


def predict(X, new, L, w, gamma, alpha):
    """Return the means and the variances of what is predicted for the rows of `new`."""
    K = kernel(new, X, gamma)
    V = linalg.solve_triangular(L, K.T, lower=True)
    return K @ w, 1 + alpha - (V * V).sum(axis=0)


def main(folder=".", alpha=0.5):
    patients, progress = load_diabetes(return_X_y=True)
    patients = patients / patients.std(axis=0)
    X, X_new, y, y_new = train_test_split(patients, progress, test_size=100, random_state=0)
    centre, scale = y.mean(), y.std()
    grid = ProcessGrid()
    A, B = DistMatrix.from_global(X, grid=grid), DistMatrix.from_global(X_new, grid=grid)

    fits = {gamma: fit(A, (y - centre) / scale, gamma, alpha) for gamma in (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)}
    gamma = max(fits, key=lambda x: fits[x][2])
    L, w, likelihood = fits[gamma]
    mean, variance = predict(A, B, L, w, gamma, alpha)
    mean, deviation = centre + scale * mean, scale * np.sqrt(variance)
    if grid.rank == 0:
        error, spread = (np.sqrt(np.mean((y_new - x) ** 2)) for x in (mean, centre))
        print(f"{len(y)} patients, {len(y_new)} others: gamma {gamma}, log likelihood {likelihood:.1f}")
        print(f"error of prediction: {error:.2f}; of the mean as prediction: {spread:.2f}")
        print(f"within two standard deviations: {np.mean(abs(y_new - mean) < 2 * deviation):.0%}")
        draw(Path(folder) / "gaussian_process.png", y_new, mean, deviation)


def draw(path, measured, mean, deviation):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(4.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(measured, mean, 2 * deviation, fmt=".", elinewidth=0.5)
    axes.axline((150, 150), slope=1, color="grey", linewidth=0.8)
    axes.set(xlabel="measured progression of diabetes", ylabel="predicted, ± 2 σ", title="100 patients not learnt from")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
