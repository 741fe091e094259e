"""Kernel ridge regression: how the diabetes of 442 patients progresses within a year.

The kernel exp(-gamma |x - y|²) of all pairs of patients is one product, because |x - y|² = |x|² + |y|² - 2 xᵀy.  The
system (K + alpha I) w = y is solved by SciPy's conjugate gradients, which needs K @ v alone; w is the same on every
rank.  This is also the mean of a Gaussian process with noise of variance alpha.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.sparse.linalg import LinearOperator, cg
from sklearn.datasets import load_diabetes
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import train_test_split

from pdgemm import DistMatrix, ProcessGrid


def kernel(X, Y, gamma):
    """Return exp(-gamma |x - y|²) of each row x of X with each row y of Y."""
    squares = (X * X).sum(axis=1, keepdims=True) + (Y * Y).sum(axis=1) - 2 * (X @ Y.T)
    return np.exp(-gamma * squares)


def fit(K, y, alpha):
    """Return w with (K + alpha I) w = y, and the number of steps that it took."""
    system, steps = LinearOperator(K.shape, matvec=lambda v: K @ v + alpha * v, dtype=K.dtype), []
    w, failed = cg(system, y, rtol=1e-10, callback=steps.append)
    if failed:
        raise ArithmeticError("conjugate gradients did not converge")
    return w, len(steps)


def main(folder=".", gamma=0.02, alpha=1.0):
    patients, progress = load_diabetes(return_X_y=True)
    patients = patients / patients.std(axis=0)
    X, X_new, y, y_new = train_test_split(patients, progress, test_size=100, random_state=0)
    grid = ProcessGrid()
    A, B = DistMatrix.from_global(X, grid=grid), DistMatrix.from_global(X_new, grid=grid)

    w, steps = fit(kernel(A, A, gamma), y - y.mean(), alpha)
    predicted = y.mean() + kernel(B, A, gamma) @ w
    if grid.rank == 0:
        there = KernelRidge(kernel="rbf", gamma=gamma, alpha=alpha).fit(X, y - y.mean()).predict(X_new) + y.mean()
        error, error_there, spread = (np.sqrt(np.mean((y_new - x) ** 2)) for x in (predicted, there, y.mean()))
        print(f"learnt from {len(y)} patients in {steps} steps, predicted for {len(y_new)}")
        print(f"error of prediction: {error:.2f}; of the mean as prediction: {spread:.2f}")
        print(f"error of scikit-learn's KernelRidge: {error_there:.2f}")
        draw(Path(folder) / "kernel_ridge.png", y_new, predicted)


def draw(path, measured, predicted):
    figure = Figure(figsize=(4.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(measured, predicted, ".")
    axes.axline((150, 150), slope=1, color="grey", linewidth=0.8)
    axes.set(xlabel="measured progression of diabetes", ylabel="predicted", title="100 patients not learnt from")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
