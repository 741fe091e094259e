"""PageRank by power iteration: which modules of Python's standard library do the others import?

Module j links to module i if it imports it.  The link matrix is distributed over the ranks; the vector r is the same
on every rank, and so is P @ r (Brin & Page, Computer Networks 30, 1998).
"""

import re
import sys
import sysconfig
from pathlib import Path

import numpy as np

from pdgemm import DistMatrix, ProcessGrid


def links_of_modules():
    """Return the names of the modules that are one file, and 1 at [i, j] where a line of j begins with `import i`."""
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.stem for path in library.glob("*.py") if path.stem in sys.stdlib_module_names)
    links = np.zeros((len(names), len(names)))
    for j, name in enumerate(names):
        text = (library / f"{name}.py").read_text(encoding="utf-8")
        imported = set(re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.MULTILINE)) - {name}
        links[[names.index(other) for other in imported if other in names], j] = 1
    return names, links


def pagerank(A, damping=0.85, tolerance=1e-12):
    """Return r = damping P r + (1 - damping) / n, where P has the columns of A, divided by their sums."""
    n, links = len(A), A.sum(axis=0)
    P = A / np.maximum(links, 1)
    r = np.full(n, 1 / n)
    while True:
        last = r
        r = damping * (P @ r + r[links == 0].sum() / n) + (1 - damping) / n  # who links to nobody, links to all
        if abs(r - last).sum() <= tolerance:
            return r


def main(folder="."):
    grid = ProcessGrid()
    names, links = links_of_modules() if grid.rank == 0 else (None, None)
    A = DistMatrix.from_global(links, grid=grid, root=0)
    r = pagerank(A)
    if grid.rank == 0:
        first = np.argsort(-r)[:15]
        print(f"{len(names)} modules; their PageRanks add up to {r.sum():.6f}")
        print("the first five:", ", ".join(names[i] for i in first[:5]))
        draw(Path(folder) / "pagerank.png", [names[i] for i in first], r[first])


def draw(path, names, r):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, r)
    axes.invert_yaxis()
    axes.set(xlabel="PageRank", title="the modules that others import")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
