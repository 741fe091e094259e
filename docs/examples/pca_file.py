"""Principal components of a file larger than the memory: what are the patches of a photograph made of?

The patches of 32 x 32 pixels are the rows of a file of 59 MiB, and all ranks together use 28 MiB.  `centered_svd` reads
the file panel by panel, until every singular value is known to the tolerance.  The mean comes from the same passes, and
is subtracted from each panel.  With memory for a triangle of order 1024 on each rank, two passes would be enough
(Demmel, Grigori, Hoemmen & Langou, SIAM J. Sci. Comput. 34(1), 2012).
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_sample_image

from pdgemm import ProcessGrid
from pdgemm.io import npy

SIDE, STEP, MEMORY = 32, 4, 28 << 20  # pixels, pixels, bytes of all ranks


def pca(A, count, tolerance, memory):
    """Return variances, components as rows, the mean, and the report."""
    U, s, Vh, mean = A.centered_svd(count, tolerance=tolerance, memory=memory)
    return s**2 / (len(A) - 1), Vh.allgather(), mean.allgather(), U.report


def main(folder="."):
    grid, file = ProcessGrid(), Path(folder) / "patches.npy"
    if grid.rank == 0:  # your file is there already
        gray = load_sample_image("china.jpg").mean(axis=2, dtype="f")
        patches = np.lib.stride_tricks.sliding_window_view(gray, (SIDE, SIDE))[::STEP, ::STEP]
        np.save(file, patches.reshape(-1, SIDE * SIDE))
    grid.comm.Barrier()

    A = npy.dataset(file, grid)
    variances, components, mean, report = pca(A, 16, 1e-3, MEMORY // grid.size)
    if grid.rank == 0:
        size, share = file.stat().st_size, report.facts["share"]
        print(f"A: {A.shape[0]} x {A.shape[1]}, {size / 2**20:.0f} MiB in the file, {MEMORY >> 20} MiB of memory")
        print(f"16 components explain {share:.2%} of the variance")
        draw(Path(folder) / "pca_file.png", variances, components, mean)


def draw(path, variances, components, mean):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
    axes = left.subplots()
    axes.semilogy(np.arange(1, 17), variances / SIDE**2, "o-")
    axes.set(xlabel="component", ylabel="variance of a pixel", title="patches of a photograph")
    right.suptitle("the mean, and 14 components", fontsize="large")
    pictures = [mean[0], *components[:14]]
    for axes, picture in zip(right.subplots(3, 5).flat, pictures):
        axes.imshow(picture.reshape(SIDE, SIDE), cmap="RdBu", interpolation="nearest")
        axes.set_axis_off()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
