"""Eigenvalues of two matrices: how does a square plate vibrate when a quarter of it is four times as heavy?

With edges that are held, but may turn, the stiffness matrix of a plate is K = L², where L is the Laplacian of a grid of
points, and its mass matrix M is diagonal.  A mode v with K v = ω² M v vibrates with the angular frequency ω; only the
lowest modes are computed.  Those of the plate without the weight are known: ω = π² (i² + j²) (Leissa, Vibration of
Plates, NASA SP-160, 1969).
"""

import sys
from pathlib import Path

import numpy as np

from pdgemm import DistMatrix, ProcessGrid, linalg


def stiffness(side, grid):
    """Return K for side x side points inside of a plate of length 1, as a distributed matrix."""
    h, eye = 1 / (side + 1), np.eye(side)
    second = (2 * eye - np.eye(side, k=1) - np.eye(side, k=-1)) / h**2
    D, I = (DistMatrix.from_global(x, grid=grid) for x in (second, eye))
    L = linalg.kron(D, I) + linalg.kron(I, D)
    return L @ L


def masses(side, weight):
    """Return the mass at each point: `weight` in the upper right quarter, 1 elsewhere."""
    x = np.arange(1, side + 1) / (side + 1)
    return np.where((x[:, None] > 0.5) & (x > 0.5), weight, 1.0)


def modes(K, mass, number):
    """Return the lowest frequencies and their modes, of length 1 in the norm of the masses; all modes on every rank."""
    M = DistMatrix.eye(len(K), grid=K.grid, block=K.block) * mass.ravel()
    squares, V = linalg.eigh(K, M, subset_by_index=(0, number - 1))
    return np.sqrt(squares), V.allgather()


def main(folder=".", side=24):
    grid = ProcessGrid()
    K = stiffness(side, grid)
    plain, _ = modes(K, masses(side, 1.0), 6)
    heavy, V = modes(K, masses(side, 4.0), 6)
    if grid.rank == 0:
        known = np.pi**2 * np.array([2, 5, 5, 8, 10, 10])
        print(f"{side * side} points; frequencies of the plain plate within {max(abs(1 - plain / known)):.1%}")
        print("with the weight, over those without it:", " ".join(f"{x:.2f}" for x in heavy / plain))
        draw(Path(folder) / "vibrating_plate.png", V.reshape(side, side, -1), heavy / np.pi**2)


def draw(path, V, frequencies):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    for axes, v, frequency in zip(figure.subplots(2, 3).flat, np.moveaxis(V, 2, 0), frequencies):
        axes.contourf(v, levels=np.linspace(-abs(v).max(), abs(v).max(), 12), cmap="RdBu")
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.set_title(f"ω = {frequency:.2f} π²", fontsize=9)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
