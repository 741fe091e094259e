"""Draw the pictures of the documentation from the layouts and schedules of the package, as SVG.

python docs/drawings.py [FOLDER]      by default docs/pictures

The ground is transparent and what is written on it grey, so that the pictures can be read on light and on dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np

from pdgemm.grids.distribution import Distribution
from pdgemm.planning.question import Question
from pdgemm.schedules.products.cannon_product import Cannon
from pdgemm.schedules.products.layered_product import Layered
from pdgemm.schedules.products.product import Product
from pdgemm.schedules.products.summa_product import Summa

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

OWNERS = ["#f4a582", "#92c5de", "#a6d96a", "#ffd966", "#c2a5cf", "#e6a0c4", "#9ad0c2", "#d9c7a0", "#b8c0ff"]
GREY, DARK, FAINT, RED = "#7d7d7d", "#1a1a1a", "#8080802b", "#d6453d"
STYLE = {
    "svg.hashsalt": "pdgemm", "svg.fonttype": "none", "font.size": 11, "text.color": GREY, "axes.edgecolor": GREY,
    "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "savefig.transparent": True,
}  # fmt: skip


def product(mnk: tuple[int, int, int], ranks: int, algorithm: str, **asked: object) -> Product:
    """Return the schedule that the planner makes for these extents on the layouts that suit the algorithm."""
    return Question(*mnk, ranks, algorithm=algorithm, layouts="ideal", mover="ring", **asked).plan().product  # type: ignore[arg-type]


def owners(distribution: Distribution, rank_map: tuple[int, ...] | None = None) -> np.ndarray:
    """Return the rank that owns each element."""
    rows, cols = np.indices(distribution.shape)
    i, j = distribution.owner(rows, cols)
    at = i * distribution.grid_shape[1] + j
    return np.asarray(at if rank_map is None else np.array(rank_map)[at])


def cells(ax: Axes, colours: np.ndarray, texts: np.ndarray | None = None, edge: str = "white") -> None:
    """Draw a matrix of squares, the first row above; an empty colour leaves a square out."""
    m, n = colours.shape
    for (i, j), colour in np.ndenumerate(colours):
        ax.add_patch(Rectangle((j, m - 1 - i), 1, 1, facecolor=colour or FAINT, edgecolor=edge, linewidth=0.8))
        if texts is not None and texts[i, j] != "":
            ax.text(j + 0.5, m - 0.5 - i, texts[i, j], ha="center", va="center", color=DARK, fontsize=10)
    ax.set(xlim=(-0.1, n + 0.1), ylim=(-0.1, m + 0.1), aspect="equal")
    ax.axis("off")


def by_owner(ranks: np.ndarray) -> np.ndarray:
    return np.array(OWNERS, dtype=object)[ranks % len(OWNERS)]


def block_cyclic() -> Figure:
    """A 10 x 12 matrix in blocks of 2 x 2 over a 2 x 3 grid, and the elements on rank 4."""
    distribution = Distribution.over((2, 3), (10, 12), (2, 2))
    ranks = owners(distribution)
    figure, (whole, local) = plt.subplots(1, 2, figsize=(8, 4.2), width_ratios=(12, 5))
    cells(whole, by_owner(ranks))
    for i in range(0, 10, 2):
        for j in range(0, 12, 2):
            whole.add_patch(Rectangle((j, 8 - i), 2, 2, fill=False, edgecolor="white", linewidth=3))
            whole.text(j + 1, 9 - i, str(ranks[i, j]), ha="center", va="center", color=DARK, fontsize=14)
    whole.set_title("the matrix: each block on a rank", color=GREY)
    row, col = divmod(4, 3)
    held = np.ix_(distribution.rows.indices(row), distribution.cols.indices(col))
    names = np.array([[f"{i},{j}" for j in range(12)] for i in range(10)], dtype=object)
    cells(local, by_owner(ranks[held]), names[held])
    local.set_title("rank 4: its array", color=GREY)
    return figure


def summa() -> Figure:
    """Two steps of SUMMA on a 2 x 3 grid: the panels that are sent, and the ranks that multiply."""
    schedule = product((6, 6, 6), 6, "summa", shape=(2, 3), width=1)
    assert isinstance(schedule, Summa)
    a, b, c = schedule.A, schedule.B, schedule.C
    figure, axes = plt.subplots(2, 3, figsize=(8, 5.6))
    for line, number in zip(axes, (0, 1)):
        step = schedule.steps[number]
        k_a = a.distribution.cols.to_global(np.array([x for run in runs(step.a) for x in run]), step.col)
        k_b = b.distribution.rows.to_global(np.array([x for run in runs(step.b) for x in run]), step.row)
        of_a, of_b = by_owner(owners(a.distribution, a.rank_map)), by_owner(owners(b.distribution, b.rank_map))
        of_a[:, [k for k in range(6) if k not in k_a]] = ""
        of_b[[k for k in range(6) if k not in k_b], :] = ""
        ranks = owners(c.distribution, c.rank_map)
        cells(line[0], of_a)
        cells(line[1], of_b)
        cells(line[2], by_owner(ranks), ranks.astype(str).astype(object))
        column, row = float(k_a[0]) + 0.5, 5.5 - float(k_b[0])
        for y in (1.5, 4.5):
            along(line[0], (column, y), 0, 6)
        for x in (1, 3, 5):
            along(line[1], (float(x), row), 1, 6)
        inner = ", ".join(map(str, k_a))
        line[0].set_title(f"A: column {inner}, along rows", color=GREY, fontsize=10)
        line[1].set_title(f"B: row {inner}, along columns", color=GREY, fontsize=10)
        line[2].set_title("C: every rank adds up", color=GREY, fontsize=10)
    return figure


def runs(index_map: object) -> Iterator[range]:
    """Yield the local indices of a panel, run by run."""
    for start, length in zip(index_map.source.tolist(), index_map.lengths.tolist()):  # type: ignore[attr-defined]
        yield range(start, start + length)


def along(ax: Axes, start: tuple[float, float], axis: int, end: float) -> None:
    """Draw arrows from a place to both ends of a row (axis 0) or column (axis 1)."""
    for limit in (0.0, end):
        target = (limit, start[1]) if axis == 0 else (start[0], limit)
        if abs(limit - start[axis]) > 1:
            ax.add_patch(FancyArrowPatch(start, target, arrowstyle="-|>", mutation_scale=12, color=RED, linewidth=1.5))


def cannon() -> Figure:
    """The three steps of Cannon's algorithm on a 3 x 3 torus: the parts of A and of B on each rank."""
    schedule = product((9, 9, 9), 9, "cannon", shape=(3, 3))
    assert isinstance(schedule, Cannon)
    figure, axes = plt.subplots(1, 3, figsize=(8, 3.3))
    shifts = [round_.moves for round_ in schedule.rounds()]
    for number, ax in enumerate(axes):
        held = np.empty((3, 3), dtype=object)
        parts = np.zeros((3, 3), int)
        for rank in range(9):
            i, j = schedule.C.coords(rank)
            step = schedule.steps(rank)[number]
            held[i, j], parts[i, j] = f"A{i}{step.a}\nB{step.b}{j}", step.a
        cells(ax, by_owner(parts), held)
        ax.set_title(f"step {number}", color=GREY)
        if number + 1 == len(axes):
            continue
        for moves in shifts[number + 1]:
            for source, target in zip(moves.source.tolist(), moves.target.tolist()):
                (i, j), (to_i, to_j) = schedule.C.coords(source), schedule.C.coords(target)
                if abs(i - to_i) + abs(j - to_j) == 1:  # transfers around the torus are not drawn
                    middle = np.array((j + to_j + 1, 5 - i - to_i)) / 2
                    step = np.array((to_j - j, i - to_i)) * 0.17
                    ends = tuple(middle - step), tuple(middle + step)
                    ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=12, color=DARK, linewidth=1.5))
    return figure


def layers() -> Figure:
    """2.5D on 2 x 2 x 2 ranks: the inner indices of each layer, and the ranks that add up C."""
    schedule = product((8, 8, 8), 8, "2.5d", shape=(2, 2), layers=2)
    assert isinstance(schedule, Layered)
    grid = schedule.grid
    figure, axes = plt.subplots(1, 3, figsize=(8, 3.4))
    for ax, name, layout in zip(axes, "ABC", (schedule.A, schedule.B, schedule.C)):
        ranks = owners(layout.distribution, layout.rank_map)
        layer = np.vectorize(grid.layer_of)(ranks)
        cells(ax, by_owner(layer if name != "C" else ranks), ranks.astype(str).astype(object))
        what = {"A": "columns by layers", "B": "rows by layers", "C": "sums of the layers"}[name]
        ax.set_title(f"{name}: {what}", color=GREY)
    return figure


def words() -> Figure:
    """The words that a rank receives over the lower bound, for SUMMA and for the best of all algorithms."""
    figure, ax = plt.subplots(figsize=(7, 3.6))
    ranks = [8, 27, 64, 125, 216, 343, 512, 1000, 2197, 4096]
    for algorithm, colour, mark in (("summa", RED, "o"), ("2.5d", "#4393c3", "s")):
        over = []
        for count in ranks:
            question = Question(16384, 16384, 16384, count, algorithm=algorithm, layouts="ideal", mover="ring")
            over.append(min(x.words_per_rank for x in question.candidates()) / question.bound)
        ax.plot(ranks, over, color=colour, marker=mark, label=algorithm)
    ax.axhline(1, color=GREY, linewidth=1, linestyle="--")
    ax.set(xscale="log", xlabel="ranks", ylabel="words / lower bound", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, labelcolor=GREY)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "block-cyclic": block_cyclic,
    "summa": summa,
    "cannon": cannon,
    "layers": layers,
    "words": words,
}


def draw(folder: Path, keep: Iterable[str] = ()) -> None:
    """Write all pictures, except those named in `keep`."""
    folder.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        path = folder / f"{name}.svg"
        if name in keep and path.exists():
            continue
        with mpl.rc_context(STYLE):
            figure = picture()
            figure.savefig(path.with_suffix(".new"), format="svg", bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
        path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("pictures"))
