"""boosted_trees.py: trees do not depend on the number of ranks, splits are optimal, and words equal the formula."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from example_programs import EXAMPLES, example
from mpi4py import MPI

from pdgemm import PdgemmError
from pdgemm.parallel import Mesh

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(3)]
ROWS = 97


@pytest.fixture
def mesh(comm: Any) -> Iterator[Any]:
    with Mesh(comm.Dup(), dp=-1) as mesh:
        yield mesh


def options(words: str = "") -> Any:
    return example("boosted_trees").parsed(words.split())


def data(rows: int = ROWS, values: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Return X and y: three features with gaps (in two of them gaps depend on y), a constant, and an empty feature."""
    rng = np.random.default_rng(8)
    X = rng.integers(0, values, (rows, 5)) / 4 - 2
    y = (X[:, 0] + X[:, 1] * X[:, 2] + rng.standard_normal(rows) > 0).astype(float)
    X[(rng.random(rows) < 0.3) & (y == 1), 0] = np.nan  # gaps only where y is 1; below, where y is 0
    X[(rng.random(rows) < 0.3) & (y == 0), 1] = np.nan
    X[rng.random(rows) < 0.2, 2] = np.nan
    X[:, 3], X[:, 4] = 7, np.nan
    return X, y


def own_rows(mesh: Any, rows: int = ROWS, seed: int = 0) -> slice:
    """Return the rows of this rank, cut at random; of three or more ranks one has no rows."""
    p = mesh.shape.dp
    cuts = np.sort(np.random.default_rng(seed).integers(0, rows + 1, p - 1))
    if p > 2:
        cuts[1] = cuts[0]
    return slice(*[0, *cuts, rows][mesh.rank : mesh.rank + 2])


def fitted(mesh: Any, X: np.ndarray, y: np.ndarray, chosen: Any, seed: int = 0) -> Any:
    own = own_rows(mesh, len(X), seed)
    return example("boosted_trees").fit(mesh, X[own], y[own], chosen)


def alone(X: np.ndarray, y: np.ndarray, chosen: Any) -> Any:
    """Return the model that one process fits."""
    with Mesh(MPI.COMM_SELF, dp=1) as mesh:
        return example("boosted_trees").fit(mesh, X, y, chosen)


def same(model: Any, other: Any) -> bool:
    return [x.tobytes() for x in model] == [x.tobytes() for x in other]


# ---------------------------------------------------------------- any number of ranks
@pytest.mark.parametrize(
    "words", ["", "--loss squared --rate 0.5 --gamma 0.1", "--depth 6 --bins 7 --child-weight 0 --lambda 0"]
)
def test_trees_are_those_of_one_process(comm: Any, mesh: Any, words: str) -> None:
    """Trees equal those of one process to the bit, for two divisions of the rows; words equal the formula."""
    module, (X, y), chosen = example("boosted_trees"), data(), options(f"--trees 3 {words}")
    if chosen.loss == "squared":
        y = np.exp(10 * X[:, 2]) * (1 + y) + np.arange(len(y)) / 3  # of many magnitudes
        y[np.isnan(y)] = -1e5
    one = alone(X, y, chosen)
    assert len(one) == 4 and all(len(tree) > 3 for tree in one[1:])
    for seed in range(2):
        before = {kind: mesh.traffic[kind].words_received for kind in ("histograms", "edges")}
        model = fitted(mesh, X, y, chosen, seed)
        assert same(model, one) and np.array_equal([*module.scores(model, X)], [*module.scores(one, X)])
        moved = [mesh.traffic[kind].words_received - before[kind] for kind in ("histograms", "edges")]
        number, *expected = module.expected(mesh, model[1:], 5, chosen)
        assert moved == expected
        sums = [comm.allreduce(x) for x in moved]  # all ranks together receive each number 2 (p - 1) times
        assert sums[0] == 2 * (comm.size - 1) * number * 2 * 5 * (chosen.bins + 1)
        assert sums[1] == 2 * (comm.size - 1) * (64 * 5 * chosen.bins + 5)


def test_ends_of_bins_are_quantiles(mesh: Any) -> None:
    """Quantiles of each column without its gaps; numbers of any magnitude, equal, or infinite."""
    rng = np.random.default_rng(3)
    X = rng.standard_normal((83, 6)) * 10.0 ** rng.integers(-300, 300, (83, 6))
    X[:, 1] = rng.integers(-2, 3, 83)
    X[::3, 1] *= -1.0  # -0.0 must equal 0.0
    X[rng.random((83, 6)) < 0.2] = np.nan
    X[:7, 2], X[7:30, 2], X[:, 3], X[1:, 4] = np.inf, -np.inf, np.nan, np.nan
    X[0, 4], X[:, 5] = 5e-324, np.copysign(np.nan, -1)
    ends = example("boosted_trees").bin_ends(mesh, X[own_rows(mesh, 83)], 11)
    for column, x in zip(ends, X.T):
        known = np.sort(x[~np.isnan(x)])
        if len(known):
            places = [-(-len(known) * q // 11) - 1 for q in range(1, 12)]
            assert np.array_equal(column, known[places])
        assert not np.isnan(column).any()


# ---------------------------------------------------------------- splits
def gain(g: np.ndarray, h: np.ndarray, left: np.ndarray, chosen: Any) -> float:
    """Return the gain of a split whose left rows are `left`, or 0 if the sum of h of a side is below child_weight."""
    sides = [(g[rows].sum(), h[rows].sum()) for rows in (left, ~left)]
    if min(H for _, H in sides) < chosen.child_weight or left.all() or not left.any():
        return 0.0
    parts = sum(G * G / (H + chosen.l2) for G, H in sides)
    return float(parts - g.sum() ** 2 / (h.sum() + chosen.l2)) / 2 - chosen.gamma


def every_split(X: np.ndarray) -> Iterator[tuple[int, float, int, np.ndarray]]:
    """Yield feature, edge, side of rows without a value, and mask of the rows on the left."""
    for feature, x in enumerate(X.T):
        for edge in np.unique(x[~np.isnan(x)]):
            for missing in (0, 1):
                yield feature, edge, missing, np.where(np.isnan(x), missing == 0, x <= edge)


def check_node(tree: Any, node: int, X: np.ndarray, g: np.ndarray, h: np.ndarray, depth: int, chosen: Any) -> list[Any]:
    """Check that a node and its descendants have the best splits of their rows.

    Returns each split with its gain over the same split whose missing values are on the other side.
    """
    here, gains = tree[node], [(gain(g, h, left, chosen), *split) for *split, left in every_split(X)]
    best = max(x[0] for x in gains) if depth < chosen.depth else 0.0
    if not here["child"]:
        assert best < 1e-6
        assert abs(here["value"] + chosen.rate * g.sum() / (h.sum() + chosen.l2)) < 1e-6
        return []
    own = here[["feature", "edge", "missing"]].item()
    (mine,) = [x[0] for x in gains if tuple(x[1:]) == own]
    assert best > 0 and abs(mine - best) < 1e-6, (node, own)
    x = X[:, here["feature"]]
    left = np.where(np.isnan(x), here["missing"] == 0, x <= here["edge"])
    other = max(x[0] for x in gains if x[1:3] == own[:2] and x[3] != own[2]) if np.isnan(x).any() else 0.0
    return [(own, best - other)] + [
        split
        for side, rows in enumerate((left, ~left))
        for split in check_node(tree, here["child"] + side, X[rows], g[rows], h[rows], depth + 1, chosen)
    ]


@pytest.mark.parametrize("words", ["", "--gamma 0.3 --child-weight 2.5", "--loss squared --lambda 0.25 --depth 3"])
def test_splits_are_the_best_of_all(mesh: Any, words: str) -> None:
    """Every number is the end of a bin, so all splits are compared, with missing values on either side."""
    module, (X, y), chosen = example("boosted_trees"), data(), options(f"--trees 2 --bins 97 {words}")
    model = fitted(mesh, X, y, chosen)
    score, sides = np.full(len(y), model[0]), set()
    if chosen.loss == "squared":
        assert abs(model[0] - y.mean()) < 1e-8
    for tree, after in zip(model[1:], module.scores(model, X), strict=True):
        g, h = module.LOSSES[chosen.loss][0](score, y)
        splits = check_node(tree, 0, X, g, h, 0, chosen)
        sides |= {own[2] for own, more in splits if more > 1e-3}
        assert {own[0] for own, _ in splits} <= {0, 1, 2}  # the constant and the empty feature never split
        score = after
    assert sides == {0, 1}


def test_a_gap_is_all_that_a_feature_says(mesh: Any) -> None:
    """A feature has one value or none: the split separates rows with and without the value."""
    module, y = example("boosted_trees"), (np.arange(30) % 3 == 0).astype(float)
    X = np.where(y == 1, np.nan, 7.0)[:, None]
    model = fitted(mesh, X, y, options("--trees 2"))
    assert [(*tree[0],)[:4] for tree in model[1:]] == [(0, 7.0, 1, 1)] * 2
    assert np.array_equal([*module.scores(model, X)][-1] > model[0], y == 1)


# ---------------------------------------------------------------- errors
def test_sums_that_int64_may_not_have_are_refused(comm: Any, mesh: Any) -> None:
    """All ranks refuse sums whose bound exceeds int64; with the most bits the sum of the largest addends is exact."""
    X, y = np.arange(7.0)[:, None], np.full(7, 1 - 2.0**-30)
    words = "--loss squared --trees 1 --child-weight 0"
    assert fitted(mesh, X, y, options(f"{words} --bits 60"))[0] == y[0]
    with pytest.raises(PdgemmError, match="no sum of 7 numbers of 61 bits: bits must be <= 60"):
        fitted(mesh, X, y, options(f"{words} --bits 61"))
    y[3] = 1e200  # a row of one rank
    with pytest.raises(PdgemmError, match=r"less than 2\^500: g is up to 1e\+200, h 1.0"):
        fitted(mesh, X, y, options(words))


def bad_input() -> dict[str, tuple[str, Any]]:
    X, y = data()
    return {
        "X has float64": ("", (X.astype("f"), y)),
        "at least one feature": ("", (X[:, :0], y)),
        "number for each of 97 rows, got \\(96,\\)": ("", (X, y[1:])),
        "y of the logistic loss is 0 to 1, got 0.0 to 3.0": ("", (X, y * 3)),
        "y is an array of a finite number": ("--loss squared", (X, y * np.nan)),
        "y is an array": ("", (X, y + 0j)),
        "got \\(97,\\)": ("", (X, y.tolist())),
        "there are no rows on any rank": ("", (X[:0], y[:0])),
        "depth is at least 1": ("--depth 0", (X, y)),
        "bits is at least 1, and at most 62": ("--bits 63", (X, y)),
        "rate is at least 0, and at most 1": ("--rate nan", (X, y)),
    }


def test_bad_input(mesh: Any) -> None:
    """Bad input on all ranks, or on one, raises an error on all ranks; later calls succeed."""
    X, y = data()
    fit = example("boosted_trees").fit
    for message, (words, arrays) in bad_input().items():
        with pytest.raises(PdgemmError, match=message):
            fit(mesh, *arrays, options(words))
        if len(arrays[0]) and mesh.shape.dp > 1:
            with pytest.raises(PdgemmError):
                fit(mesh, *((X, y, options()) if mesh.rank != 1 else (*arrays, options(words))))
    if mesh.shape.dp > 1:
        for mine in ((X, y, options("--seed 1")), (X[:, :2], y, options())):
            with pytest.raises(PdgemmError):
                fit(mesh, *((X, y, options()) if mesh.rank != 1 else mine))
    assert len(fitted(mesh, X, y, options("--trees 1"))) == 2


# ---------------------------------------------------------------- the program
def test_boosted_trees(mesh: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output equals that in the gallery, except for the words, which depend on the ranks."""
    picture = shared_tmp_path / "boosted_trees.png"
    example("boosted_trees").main("--missing", "0.1", "--picture", str(picture))
    mesh.comm.Barrier()
    printed = capsys.readouterr().out
    if mesh.rank:
        assert printed == ""
        return
    shown = (EXAMPLES / "README.md").read_text().partition("examples/boosted_trees.py --")[2].partition("\n")[2]
    lines = SimpleNamespace(printed=printed.splitlines(), shown=shown.partition("```")[0].splitlines())
    for line, other in zip(lines.printed, lines.shown, strict=True):
        counts = re.findall(r": (\d+) words .* rank 0, (\d+) by", line)
        assert all(x == y for x, y in counts) and (counts or line == other)
    assert picture.read_bytes().startswith(b"\x89PNG")
