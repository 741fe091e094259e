"""The router of a mixture of experts: which experts a token chooses, with which weights, and the gradients.  Local."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Routes(NamedTuple):
    """What the tokens of a rank choose.

    probabilities : (n, experts), softmax of the scores of each token.
    chosen : (n, k), the experts with the largest scores, the largest first, and of equal ones the lower expert.
    gates  : (n, k), the probabilities of those, divided by their sum where k > 1.
    """

    probabilities: Array
    chosen: Array
    gates: Array


def routes_of(x: Array, router: Array, topk: int) -> Routes:
    """Return what tokens choose by their scores x @ router, in the type of x.

    x : (n, h), float32 or float64.   router : (h, experts).
    """
    scores = x @ router.astype(x.dtype, copy=False)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
    scores -= scores.max(axis=1, keepdims=True)
    probabilities = np.exp(scores, out=scores)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    gates = np.take_along_axis(probabilities, chosen, axis=1)
    if topk > 1:  # a quotient of 1 would leave the router without a gradient
        gates /= gates.sum(axis=1, keepdims=True)
    return Routes(probabilities, chosen, gates)


def scores_gradient(routes: Routes, dgates: Array, slope: Array) -> Array:
    """Return the gradient by the scores, (n, experts).

    dgates : (n, k), the gradient by the gates.   slope : (experts), what each probability adds to the loss besides.

    With S the sum of the chosen probabilities, dp_e = slope_e + (dg_e - sum_j dg_j g_j) / S where e is chosen, or
    slope_e + dg_e where k = 1, and ds_e = p_e (dp_e - sum_j dp_j p_j).
    """
    p, chosen, gates = routes
    dp = np.broadcast_to(slope.astype(p.dtype), p.shape).copy()
    if gates.shape[1] > 1:
        total = np.take_along_axis(p, chosen, axis=1).sum(axis=1, keepdims=True)
        dgates = (dgates - (dgates * gates).sum(axis=1, keepdims=True)) / total
    np.put_along_axis(dp, chosen, np.take_along_axis(dp, chosen, axis=1) + dgates, axis=1)
    dp -= (dp * p).sum(axis=1, keepdims=True)
    dp *= p
    return dp


class OwnRuns(NamedTuple):
    """The tokens of a rank in runs of consecutive global numbers.

    first, length : (runs).   counts : (runs, experts), how many tokens of the run chose each expert.
    by_expert : the n k choices, token-major, in the order of expert, run and token.
    place : of each choice in `by_expert`, how many choices of its run and expert come before it.
    group : of each choice in `by_expert`, expert * runs + run.
    """

    first: Array
    length: Array
    counts: Array
    by_expert: Array
    place: Array
    group: Array

    @property
    def table(self) -> Array:
        """What all ranks have to know: (runs, 2 + experts)."""
        return np.concatenate([self.first[:, None], self.length[:, None], self.counts], axis=1)

    def taken(self, kept: Array) -> Array:
        """Return the choices that experts take, in the order of experts.   kept : (runs, experts), of each how many."""
        return self.by_expert[self.place < kept.T.ravel()[self.group]]


def own_runs(order: Array, chosen: Array, experts: int) -> OwnRuns:
    """Return the runs of a rank's tokens.   order : (n), their numbers.   chosen : (n, k), the experts of each."""
    n, topk = chosen.shape
    starts = np.flatnonzero(np.diff(order, prepend=order[:1] - 2) != 1)
    runs, length = len(starts), np.diff(starts, append=n)
    group = chosen.ravel() * runs + np.repeat(np.arange(runs), length * topk)
    by_expert = np.argsort(group, kind="stable")
    group = group[by_expert]
    counts = np.bincount(group, minlength=experts * runs)
    place = np.arange(n * topk) - (np.cumsum(counts) - counts)[group]
    return OwnRuns(order[starts], length, counts.reshape(experts, runs).T, by_expert, place, group)
