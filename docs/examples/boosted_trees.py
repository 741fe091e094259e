"""Gradient-boosted trees by histograms, the same to the bit on any number of ranks: which tumours are benign?

The algorithm is that of XGBoost (Chen & Guestrin, KDD 2016).  g and h are the first and the second derivative of the
loss by the score of a row, G and H their sums over the rows of a node.  A leaf adds -G/(H + λ) to the score, times a
rate, and a split into left and right gains (G_L²/(H_L + λ) + G_R²/(H_R + λ) - G²/(H + λ))/2 - γ.  Rows without a value,
NaN, go to the side where they gain more.

Each rank has some of the rows, or none, and adds up their g and h in histograms of each feature.  Sums of
floating-point numbers depend on the order of their addends: another number of ranks has other sums, and splits
otherwise where two splits are nearly as good.  Here g and h are integers, in a unit that all ranks share, and sums of
integers are exact: one all-reduce for each level of a tree.  Of two siblings one is added up; the other is the rest of
their parent.  The ends of bins are exact quantiles, which are found by counting.
"""

import argparse
import sys
from hashlib import sha256

import numpy as np
from scipy.special import expit, xlogy
from sklearn.datasets import load_breast_cancer, load_diabetes

from pdgemm import PdgemmError, parallel
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.support.agreement import together

NODE = np.dtype([("feature", int), ("edge", float), ("missing", int), ("child", int), ("depth", int), ("value", float)])
REAL = ("rate", "l2", "gamma", "child_weight", "missing")  # options
LARGEST = np.iinfo(np.int64).max


def logistic(score, y):
    """Return g and h of log(1 + exp(score)) - y score."""
    p = expit(score)
    return np.array([p - y, p * (1 - p)])


def squared(score, y):
    """Return g and h of (score - y)²/2."""
    return np.array([score - y, np.ones_like(y)])


LOSSES = {"logistic": (logistic, load_breast_cancer), "squared": (squared, load_diabetes)}


# ---------------------------------------------------------------- what ranks add up
def bin_ends(mesh, X, number):
    """Return the quantiles 1/number, 2/number, ... 1 of each column without its NaN, (features, number).  Collective.

    Each is the least number that is not less than so many rows.  It is bisected among all 2^64 numbers, in 64 steps, of
    which each counts the rows that are not greater: one all-reduce.
    """
    columns = [np.sort(in_order((x[~np.isnan(x)] + 0.0).view(np.int64))) for x in X.T]  # -0.0 + 0.0 is 0.0
    lengths = mesh.line("dp").sum(np.array([len(x) for x in columns]), "edges")
    wanted = -(-lengths[:, None] * np.arange(1, number + 1) // number)
    low, high = (np.full(wanted.shape, in_order(np.array(x).view(np.int64))) for x in (-np.inf, np.inf))
    for _ in range(64):
        middle = (low & high) + ((low ^ high) >> 1)
        counts = np.array([np.searchsorted(x, ends, "right") for x, ends in zip(columns, middle)])
        enough = mesh.line("dp").sum(counts, "edges") >= wanted
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    return in_order(high).view(float)


def in_order(bits):
    """Return integers in the order of the numbers that have these bits; of those integers, the bits."""
    return bits ^ (bits >> 63 & LARGEST)


def fixed_point(mesh, gradients, rows, bits):
    """Return g and h of this rank's rows as int64, and their units, powers of 2.  Collective.

    A unit is the least for which no row of any rank has more than 2^bits of them, and so no sum more than rows 2^bits.
    All ranks raise ArgumentError where int64 does not reach to this bound, and where a number is not finite.
    """
    own = np.zeros((mesh.shape.dp, 2))
    own[mesh.index("dp")] = np.abs(gradients).max(axis=1, initial=0)
    bounds = mesh.line("dp").sum(own, "decisions").max(axis=0)  # numbers and zeros: without rounding
    if not (rows * bounds < 2.0**500).all():  # gains have squares of sums
        raise ArgumentError(f"sums of rows must be finite, and less than 2^500: g is up to {bounds[0]}, h {bounds[1]}")
    if rows << bits > LARGEST:
        most = (LARGEST // rows).bit_length() - 1
        raise ArgumentError(f"int64 has no sum of {rows} numbers of {bits} bits: bits must be <= {most}")
    exponents = np.frexp(bounds)[1] - bits
    return np.rint(np.ldexp(gradients, -exponents[:, None])).astype(np.int64), np.ldexp(1.0, exponents)


def histograms(mesh, slot, number, bins, fixed, width):
    """Return the sums of g and h by node, feature and bin, (number, 2, features, width) of int64.  Collective.

    slot : (rows), the number of each row's node among those whose histograms are wanted, or -1.
    """
    rows = np.flatnonzero(slot >= 0)
    own = np.zeros((number, 2, bins.shape[1], width), np.int64)
    place = np.ravel_multi_index((slot[rows, None], 0, np.arange(bins.shape[1]), bins[rows]), own.shape).ravel()
    for at, x in enumerate(fixed):
        np.add.at(own.reshape(-1), place + at * own[0, 0].size, np.repeat(x[rows], bins.shape[1]))
    return mesh.line("dp").sum(own, "histograms")


def words(mesh, numbers):
    """Return the words that come in for this rank in an all-reduce: 2 (p - 1)/p of the numbers, if p divides them."""
    p = mesh.shape.dp
    return (p - 2) * (numbers // p + (mesh.index("dp") < numbers % p)) + numbers


def expected(mesh, trees, features, options):
    """Return the number of histograms of all trees, and the words of them and of the ends of bins that come in.

    A tree adds up that of its root, and that of one child of each split whose children may be split.
    """
    size, sums = 2 * features * (options.bins + 1), []
    for tree in trees:
        splits = np.bincount(tree["depth"][tree["child"] > 0], minlength=options.depth)
        sums += [1, *splits[: options.depth - 1]]
    ends = words(mesh, features) + 64 * words(mesh, features * options.bins)
    return sum(sums), sum(words(mesh, number * size) for number in sums), ends


# ---------------------------------------------------------------- trees
def leaf_values(G, H, options):
    return -options.rate * np.divide(G, H + options.l2, out=np.zeros_like(G), where=H + options.l2 > 0)


def best_split(histogram, unit, options):
    """Return feature, bin, side of missing rows (0 left, 1 right), and G and H of both sides (2, 2); None without gain.

    Of equal gains, that of the first feature, bin and side.
    """
    total, missing = histogram[:, 0].sum(axis=1), histogram[:, :, -1:]
    left = histogram[:, :, :-1].cumsum(axis=2)
    left = np.stack([left + missing, left], axis=-1)  # (2, features, bins, sides of missing rows)
    both = np.stack([left, total[:, None, None, None] - left], axis=1)
    G, H = both * unit[:, None, None, None, None]
    g, h = total * unit
    with np.errstate(all="ignore"):
        gain = ((G**2 / (H + options.l2)).sum(axis=0) - g**2 / (h + options.l2)) / 2 - options.gamma
    gain[((options.child_weight > H) | (H <= 0)).any(axis=0)] = 0
    at = np.unravel_index(gain.argmax(), gain.shape)
    return (*map(int, at), both[:, :, *at]) if gain[at] > 0 else None


def descend(tree, at, X):
    """Return the nodes that come after the nodes `at` of rows; after a leaf, the leaf."""
    here = tree[at]
    x = X[np.arange(len(X)), here["feature"]]
    right = np.where(np.isnan(x), here["missing"], x > here["edge"])
    return np.where(here["child"] > 0, here["child"] + right, at)


def grow(mesh, X, bins, ends, fixed, unit, options):
    """Return a tree, an array of nodes, of which 0 is the root, and the leaf of each row.  Collective."""
    width, at = options.bins + 1, np.zeros(len(X), int)
    level = {0: histograms(mesh, at, 1, bins, fixed, width)[0]}  # of the nodes that may be split
    tree = np.zeros(1, NODE)
    tree["value"] = leaf_values(*(level[0][:, :1].sum(axis=2) * unit[:, None]), options)
    for depth in range(1, options.depth + 1):
        split = []  # the lighter child, its sibling, and the histogram of both
        for node, histogram in level.items():
            if best := best_split(histogram, unit, options):
                feature, bin, missing, sums = best
                left, children = len(tree), np.zeros(2, NODE)
                children["value"] = leaf_values(*(sums * unit[:, None]), options)
                tree[node] = feature, ends[feature, bin], missing, left, depth - 1, 0
                children["depth"] = depth
                tree = np.concatenate([tree, children])
                lighter = int(sums[1, 1] < sums[1, 0])
                split.append((left + lighter, left + 1 - lighter, histogram))
        at = descend(tree, at, X)
        if not split or depth == options.depth:
            break
        slot = np.full(len(tree), -1)
        slot[[node for node, _, _ in split]] = range(len(split))
        level = {}
        for (node, sibling, both), own in zip(split, histograms(mesh, slot[at], len(split), bins, fixed, width)):
            level[node], level[sibling] = own, both - own
    return tree, at


def fit(mesh, X, y, options):
    """Return a model: the first score and then trees, the same on all ranks.  Collective.

    X : (rows, features) of float64, the rows of this rank, NaN where a value is missing.   y : (rows), what to predict.
    """
    with together(mesh.comm) as arguments:
        check(X, y, options, f"on rank {mesh.rank}")
        arguments += [X.shape[1], sorted(vars(options).items())]
    loss, rows, trees = LOSSES[options.loss][0], int(mesh.sum(len(X))[0]), []
    if not rows:
        raise ArgumentError("there are no rows on any rank")
    ends = bin_ends(mesh, X, options.bins)
    bins = np.array([np.searchsorted(*column) for column in zip(ends, X.T)]).T  # NaN comes after all numbers
    fixed, unit = fixed_point(mesh, loss(np.zeros(len(y)), y), rows, options.bits)
    g, h = mesh.line("dp").sum(fixed.sum(axis=1), "sums") * unit
    first = -g / h  # one step of Newton's method
    score = np.full(len(y), first)
    for _ in range(options.trees):
        fixed, unit = fixed_point(mesh, loss(score, y), rows, options.bits)
        tree, leaf = grow(mesh, X, bins, ends, fixed, unit, options)
        score += tree["value"][leaf]
        trees.append(tree)
    return first, *trees


def scores(model, X):
    """Yield the scores of rows after each tree."""
    first, *trees = model
    score = np.full(len(X), first)
    for tree in trees:
        at = np.zeros(len(X), int)
        while not np.array_equal(at, after := descend(tree, at, X)):
            at = after
        score = score + tree["value"][at]
        yield score


def check(X, y, options, where):
    """Raise ArgumentError for arrays that are not those of `fit`, and for options that are none."""
    if not (isinstance(X, np.ndarray) and X.dtype == float and X.ndim == 2 and X.shape[1]):
        raise ArgumentError(f"X has float64 of rows and at least one feature, got {np.shape(X)} {where}")
    real = isinstance(y, np.ndarray) and y.dtype.kind in "biuf"
    if not (real and y.shape == (len(X),) and np.isfinite(y).all()):
        raise ArgumentError(f"y is an array of a finite number for each of {len(X)} rows, got {np.shape(y)} {where}")
    if options.loss == "logistic" and not ((y >= 0) & (y <= 1)).all():
        raise ArgumentError(f"y of the logistic loss is 0 to 1, got {y.min()} to {y.max()} {where}")
    most = {"bits": 62, "rate": 1, "missing": 1}
    for name, least in {"trees": 0, "depth": 1, "bins": 1, "bits": 1, **dict.fromkeys(REAL, 0)}.items():
        if not least <= (value := getattr(options, name)) <= most.get(name, sys.float_info.max):
            raise ArgumentError(f"{name} is at least {least}, and at most {most.get(name, 'finite')}, got {value}")


# ---------------------------------------------------------------- the program
def main(*arguments):
    options, mesh = parsed(arguments), parallel.Mesh(dp=-1)
    data = LOSSES[options.loss][1]()
    X, y = data.data.copy(), data.target.astype(float)
    i, j = np.indices(X.shape)  # each value is deleted or not by (seed, i, j), on any rank
    X[element_function("uniform", options.seed, X.dtype)(i, j) < options.missing] = np.nan
    order = np.random.default_rng(options.seed % 2**64).permutation(len(X))
    learned, others = np.split(order, [3 * len(X) // 4])
    own = learned[mesh.rank :: mesh.shape.dp]
    _, *trees = model = fit(mesh, X[own], y[own], options)
    number, *predicted = expected(mesh, trees, X.shape[1], options)
    if mesh.rank == 0:
        after = [measured(options.loss, score, y[others]) for score in scores(model, X[others])]
        leaves = sum(np.count_nonzero(tree["child"] == 0) for tree in trees)
        print(f"{len(trees)} trees of depth {options.depth} have {leaves} leaves")
        print(f"of {len(others)} rows that were held out: {after[-1][1] if after else 'none'}")
        print(f"{number} histograms of 2 x {X.shape[1]} x {options.bins + 1} numbers were added up")
        for kind, much in zip(("histograms", "edges"), predicted):
            print(f"{kind}: {mesh.traffic[kind].words_received} words came in for rank 0, {much} by formula")
        print(f"sha256 of the trees: {sha256(b''.join(x.tobytes() for x in model)).hexdigest()[:16]}")
        if options.picture:
            draw(options.picture, [x for x, _ in after], trees, data.feature_names)


def measured(loss, score, y):
    """Return the mean loss, and what it says."""
    if loss == "squared":
        mean = np.square(score - y).mean()
        return mean, f"{1 - mean / y.var():.1%} of the variance is explained, root mean square error {mean**0.5:.1f}"
    p = expit(score)
    mean = -(xlogy(y, p) + xlogy(1 - y, 1 - p)).mean()
    return mean, f"{np.mean((score > 0) == y):.1%} are right, log loss {mean:.4f}"


def draw(path, losses, trees, names):
    """Draw the loss of the rows that were held out after each tree, and the features by which trees split most."""
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses)
    left.set(xlabel="trees", ylabel="loss of rows held out", title="boosted trees", ylim=(0, None))
    features = np.concatenate([np.zeros(0, int), *(tree["feature"][tree["child"] > 0] for tree in trees)])
    counts = np.bincount(features, minlength=len(names))
    most = np.argsort(counts)[-8:]
    right.barh([names[x] for x in most], counts[most])
    right.set_title("splits")
    figure.savefig(path, dpi=100)


def parsed(words):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--loss", choices=LOSSES, default="logistic", help="of tumours, or squared, of the progress of diabetes")
    add("--trees", type=int, default=50)
    add("--depth", type=int, default=4, help="splits from the root to a leaf, at most")
    add("--bins", type=int, default=64, help="of each feature")
    add("--rate", type=float, default=0.1, help="factor of leaves")
    add("--lambda", type=float, default=1.0, dest="l2", help="added to the second derivatives of a node")
    add("--gamma", type=float, default=0.0, help="what a split must gain")
    add("--child-weight", type=float, default=1.0, help="least second derivative of a child")
    add("--bits", type=int, default=30, help="of a gradient as an integer, without its sign")
    add("--missing", type=float, default=0.0, help="share of values to delete")
    add("--seed", type=int, default=0, help="of rows that are held out, and of values that are deleted")
    add("--picture", help="a file for the loss, and the features that count")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PdgemmError as bad:  # raised on all ranks: one line, and exit code 2
        sys.exit(bad)
