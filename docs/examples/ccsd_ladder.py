"""Coupled cluster: the particle-particle ladder of CCSD, its words, and how close they are to the lower bound.

The term R_abij = Σ_ef <ab|ef> t_efij has most of the operations of CCSD, 2 o² v⁴ for o occupied and v virtual orbitals.
It is a product of a v² x v² matrix, the integrals, and a v² x o² matrix, the amplitudes.  The file has integrals of
random orbitals with all eight symmetries of real ones, (ae|bf) = Σ_P B_P,ae B_P,bf with B_P,ae = B_P,ea, and the
amplitudes of second-order perturbation theory, t_abij = <ab|ij> / (ε_i + ε_j - ε_a - ε_b); your own file is read in the
same way.  Tensors that do not exist yet are read in the layouts that the plan chooses, so that only the product sends.
Σ (2 t_abij - t_abji) R_abij is the part of the ladder in the energy of third order (Shavitt & Bartlett, Many-Body
Methods in Chemistry and Physics, 2009).
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

from pdgemm import ProcessGrid, einsum, plan_einsum
from pdgemm.io import hdf5

LADDER = "abef,efij->abij"


def write_integrals(path, o, v, seed=1):
    """Write <ab|ef> as /vvvv, and the amplitudes t_abij as /t2."""
    rng = np.random.default_rng(seed)
    B = rng.standard_normal((2 * (o + v), o + v, o + v)) / (o + v)
    B += B.transpose(0, 2, 1)
    energies = np.concatenate([-2 + np.sort(rng.random(o)), 1 + 3 * np.sort(rng.random(v))])
    below, above = energies[:o], energies[o:]
    gaps = above[:, None, None, None] + above[:, None, None] - below[:, None] - below
    with h5py.File(path, "w") as file:
        file["vvvv"] = np.einsum("Pae,Pbf->abef", B[:, o:, o:], B[:, o:, o:], optimize=True)
        file["t2"] = -np.einsum("Pai,Pbj->abij", B[:, o:, :o], B[:, o:, :o], optimize=True) / gaps


def ladder(path, grid):
    """Return the term, the amplitudes, the integrals, and the plan."""
    with h5py.File(path) as file:
        shapes = [file[name].shape for name in ("vvvv", "t2")]
    plan = plan_einsum(LADDER, *shapes, ranks=grid.size, free=True, minimize="words")
    V, T = (hdf5.load(path, name, grid, layout=layout) for name, layout in zip(("vvvv", "t2"), plan.layouts))
    return einsum(LADDER, V, T, optimize=plan), T, V, plan


def energy(T, R):
    """Return Σ (2 t_abij - t_abji) R_abij."""
    return einsum("abij,abij->", 2 * T - T.transpose(0, 1, 3, 2), R)


def main(*arguments):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--occupied", type=int, default=8)
    add("--virtual", type=int, default=24)
    add("--folder", type=Path, default=".", help="where integrals.h5 and the picture are written")
    options, grid = parser.parse_args(arguments or None), ProcessGrid()
    o, v, path = options.occupied, options.virtual, Path(options.folder) / "integrals.h5"
    if grid.rank == 0:  # your file is there already
        write_integrals(path, o, v)
    grid.comm.Barrier()

    R, T, V, plan = ladder(path, grid)
    third = energy(T, R)
    expected = np.einsum(LADDER, V.allgather(), T.allgather(), optimize=True)
    error = max(np.abs(R - expected).max() / np.abs(expected).max(), np.finfo(float).eps)
    if grid.rank == 0:
        print(plan)
        print(f"{R.report.counted.words_received} words came in for rank 0; the largest local part of <ab|ef> has "
              f"{np.prod(plan.layouts[0].local_shape((0, 0)))}")  # fmt: skip
        print(f"energy of the ladder: {third:.6f}; largest difference from numpy.einsum: {error:.0e}")
        draw(Path(options.folder) / "ccsd_ladder.png", o, v)


def draw(path, o, v):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    shapes, ranks = [(v,) * 4, (v, v, o, o)], [2, 4, 8, 16, 32, 64]
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for label, options in {
        "layouts of new tensors": {},
        "free layouts, least time": {"free": True},
        "free layouts, fewest words": {"free": True, "minimize": "words"},
    }.items():
        plans = [plan_einsum(LADDER, *shapes, ranks=p, **options) for p in ranks]
        axes.loglog(ranks, [x.words for x in plans], "o-", label=label)
    axes.loglog(ranks, [x.bound for x in plans], "k--", label="lower bound")
    axes.set(xlabel="ranks", ylabel="words received by a rank", title=f"{LADDER}, o = {o}, v = {v}")
    axes.set_xticks(ranks, ranks)
    axes.set_xticks([], minor=True)
    axes.legend(fontsize="small", framealpha=1)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
