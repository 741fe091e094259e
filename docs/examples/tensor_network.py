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
    add("--bond", type=int, default=8)
    add("--memory", type=int, default=64_000, help="bytes per rank beside the tensors of the network")
    add("--folder", type=Path, default=".", help="where the picture is written")
    options, grid = parser.parse_args(arguments or None), ProcessGrid()
    tensors = network(options.bond, grid)
    plans = [plan_einsum(CUBE, *tensors, memory_limit=limit) for limit in (None, options.memory)]
    values = [einsum(CUBE, *tensors, optimize=plan) for plan in plans]
    whole = [x.allgather() for x in tensors]
    expected = np.einsum(CUBE, *whole, optimize=("greedy", 1 << 30))  # its own limit allows no intermediate tensor
    error = max(abs(np.array(values) - expected).max() / abs(expected), np.finfo(float).eps)
    if grid.rank == 0:
        print(*plans, sep="\n\n")
        print(f"\n{expected:.6f} by numpy.einsum; largest relative difference {error:.0e}")
        draw(Path(options.folder) / "tensor_network.png", tensors, plans[1])


def draw(path, tensors, sliced):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    left, right = (figure := Figure(figsize=(7, 3.2), layout="constrained")).subplots(1, 2)
    corners = np.array([(0, 0), (3, 0), (3, 3), (0, 3), (1, 1), (2, 1), (2, 2), (1, 2)])
    names = CUBE.removesuffix("->").split(",")
    for bond in "abcdefghijkl":
        ends = corners[[at for at, name in enumerate(names) if bond in name]]
        left.plot(*ends.T, color="#b2182b" if bond in sliced.slices else "grey", linewidth=2, zorder=0)
        left.text(*ends.mean(axis=0), bond, ha="center", va="center", backgroundcolor="white")
    left.scatter(*corners.T, s=150, color="#4393c3")
    left.set_title(f"{sliced.program.size} ranks: slices of {' and '.join(sliced.slices) or 'no bond'}")
    left.set_axis_off()

    plans = [plan_einsum(CUBE, *tensors)]
    while len(plans) < 5 and len(plans[-1].slices) < 2:
        plans.append(plan_einsum(CUBE, *tensors, memory_limit=plans[-1].extra_bytes // 2))
    right.loglog([x.extra_bytes for x in plans], [x.words or 1 for x in plans], "o-")
    for x in plans:
        label = f" {', '.join(x.slices) or 'no slices'}"
        right.annotate(label, (x.extra_bytes, x.words or 1), va="bottom")
    right.set(xlabel="bytes per rank", ylabel="words received by a rank", title="less memory, more words")
    right.margins(0.2)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
