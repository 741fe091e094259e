"""A tensor network in less memory than its intermediate tensors need: the order of contractions, and slices.

Eight random tensors of three indices each are the corners of a cube, and each of the twelve edges is a sum over one
index, the bond.  The plan chooses the order of the contractions, and the layouts of every tensor.  Where a memory limit
is too small for the intermediate tensors, it picks bonds whose values are taken one after the other, the slices: less
memory, more products and words.  Both are known before a word is sent.
"""

import argparse
from pathlib import Path

import numpy as np

from pdgemm import DistTensor, ProcessGrid, einsum, plan_einsum

CUBE = "adi,abj,bck,cdl,ehi,efj,fgk,ghl->"  # two faces, abcd and efgh, and four edges ijkl between them


def network(bond, grid):
    """Return eight random tensors, of such a variance that the contraction is of the order of 1."""
    return [
        DistTensor.random((bond,) * 3, grid=grid, kind="normal", seed=seed) / bond**0.75
        for seed in range(CUBE.count(",") + 1)
    ]


def main(*arguments):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--bond", type=int, default=12)
    add("--memory", type=int, default=64 << 10, help="bytes per rank beside the tensors of the network")
    add("--folder", type=Path, default=".", help="where the picture is written")
    options, grid = parser.parse_args(arguments or None), ProcessGrid()
    tensors = network(options.bond, grid)
    plans = [plan_einsum(CUBE, *tensors, memory_limit=limit) for limit in (None, options.memory)]
    values = [einsum(CUBE, *tensors, optimize=plan) for plan in plans]
    expected = np.einsum(CUBE, *(x.allgather() for x in tensors), optimize=True)
    errors = [abs(x - expected) / abs(expected) for x in values]
    if grid.rank == 0:
        print(*plans, sep="\n\n")
        print(f"\n{expected:.6f} by numpy.einsum; largest relative difference {max(errors):.0e}")
        draw(Path(options.folder) / "tensor_network.png", options.bond, plans[1], grid.size)


def draw(path, bond, plan, ranks):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    left, right = (figure := Figure(figsize=(7, 3.2), layout="constrained")).subplots(1, 2)
    places = np.array([(0, 0), (3, 0), (3, 3), (0, 3), (1, 1), (2, 1), (2, 2), (1, 2)])
    names = CUBE.removesuffix("->").split(",")
    for label in sorted({*CUBE} & {*"abcdefghijkl"}):
        ends = places[[at for at, name in enumerate(names) if label in name]]
        left.plot(*ends.T, color="#b2182b" if label in plan.slices else "grey", linewidth=2)
        left.text(*ends.mean(axis=0), label, ha="center", va="center", backgroundcolor="white")
    left.plot(*places.T, "o", color="#4393c3", markersize=12)
    left.set_title(f"sliced: {', '.join(plan.slices) or 'nothing'}")
    left.set_axis_off()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
