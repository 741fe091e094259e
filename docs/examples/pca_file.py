"""Principal components of a file larger than the memory: what are the patches of a photograph made of?

The patches of 32 x 32 pixels are the rows of a file of 59 MiB, and all ranks together use 28 MiB.  `centered_svd` reads
the file panel by panel, as often as wanted.  The mean comes from the same passes: what is subtracted from the matrix is
subtracted from its sketches, as a product of rank 1.  One pass estimates the error of the components (Tropp, Yurtsever,
Udell & Cevher, SIAM J. Matrix Anal. Appl. 38(4), 2017), the last of several passes measures it, and each more makes it
smaller (Halko, Martinsson & Tropp, SIAM Review 53(2), 2011).
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_sample_image

from pdgemm import ProcessGrid
from pdgemm.io import npy

SIDE, STEP, MEMORY = 32, 4, 28 << 20  # pixels, pixels, bytes of all ranks


def pca(A, count, passes, memory):
    """Return variances, components as rows, the mean, and what is known of the error, as parts of |A - mean|."""
    U, s, Vh, mean = A.centered_svd(count, passes=passes, memory=memory, oversample=3 * count)
    facts = U.report.facts
    errors = {name: facts[name] / facts["norm"] for name in ("error", "bound")}
    return s**2 / (len(A) - 1), Vh.allgather(), mean.allgather(), errors


def main(folder="."):
    grid, file = ProcessGrid(), Path(folder) / "patches.npy"
    if grid.rank == 0:  # your file is there already
        gray = load_sample_image("china.jpg").mean(axis=2, dtype="f")
        patches = np.lib.stride_tricks.sliding_window_view(gray, (SIDE, SIDE))[::STEP, ::STEP]
        np.save(file, patches.reshape(-1, SIDE * SIDE))
    grid.comm.Barrier()

    A = npy.dataset(file, grid)
    results = {passes: pca(A, 16, passes, MEMORY // grid.size) for passes in (1, 2, 4)}
    if grid.rank == 0:
        size = file.stat().st_size
        print(f"A: {A.shape[0]} x {A.shape[1]}, {size / 2**20:.0f} MiB in the file, {MEMORY >> 20} MiB of memory")
        once, twice, often = (results[passes][3] for passes in results)
        print(f"1 pass: 16 components leave about {once['error']:.1%}, and with 99.9% less than {once['bound']:.1%}")
        print(f"2 passes: they leave {twice['error']:.1%}")
        print(f"4 passes: they leave {often['error']:.1%}, and explain {1 - often['error'] ** 2:.1%} of the variance")
        draw(Path(folder) / "pca_file.png", *results[4][:3])


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
