"""Singular values of a photograph by random projections, with products of tall matrices and small local work.

The range of A begins as A times a thin random matrix (Halko, Martinsson & Tropp, SIAM Review 53(2), 2011), and grows
step by step until residuals show that the values are right (Musco & Musco, NeurIPS 2015).
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_sample_image

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.linalg import svd


def main(folder=".", rank=40):
    photograph = load_sample_image("china.jpg").mean(axis=2) / 255  # grey, 427 x 640
    A = DistMatrix.from_global(photograph, grid=ProcessGrid())
    U, s, Vt = svd(A, rank)
    compressed = (U * s) @ Vt
    error = (A - compressed).norm() / A.norm()

    picture = compressed.to_global()
    if A.grid.rank == 0:
        exact = np.linalg.svd(photograph, compute_uv=False)
        best = np.linalg.norm(exact[rank:]) / np.linalg.norm(exact)
        print(f"{A.shape[0]} x {A.shape[1]} of rank {rank}: error {error:.2%}, the least possible is {best:.2%}")
        print(f"the first 10 singular values agree with NumPy's to {max(abs(1 - s[:10] / exact[:10])):.0e}")
        draw(Path(folder) / "randomized_svd.png", photograph, picture, s, exact)


def draw(path, photograph, picture, s, exact):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplot_mosaic([["spectrum", "photograph"], ["spectrum", "picture"]], width_ratios=(3, 2))
    axes["spectrum"].semilogy(np.arange(1, 121), exact[:120], label="NumPy, all of them")
    axes["spectrum"].semilogy(np.arange(1, len(s) + 1), s, "o", ms=3, label=f"random projections, {len(s)}")
    axes["spectrum"].set(xlabel="index", ylabel="singular value")
    axes["spectrum"].legend()
    for name, pixels in ("photograph", photograph), ("picture", picture):
        axes[name].imshow(pixels[::4, ::4], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes[name].set_axis_off()
    axes["photograph"].set_title("photograph", fontsize="medium")
    axes["picture"].set_title(f"rank {len(s)}", fontsize="medium")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
