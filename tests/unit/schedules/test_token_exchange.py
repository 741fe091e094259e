"""The ways of tokens to experts as values: capacity by the order of tokens, and words.  Without MPI."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel.layers.router import own_runs
from pdgemm.schedules.training.mesh_shape import MeshShape
from pdgemm.schedules.training.token_exchange import TokenExchange, expert_capacity, router_sums

SHAPES = [MeshShape(), MeshShape(dp=4, ep=2), MeshShape(2, 2, 2, 2, 2), MeshShape(dp=6, tp=2, ep=3), MeshShape(cp=3)]


def drawn(shape: MeshShape, tokens: int, experts: int, topk: int, factor: float, seed: int) -> tuple:
    """An exchange of tokens that lie on ranks in pieces, what each token chose, and each token's rank in the line."""
    rng, ranks = np.random.default_rng(seed), shape.length("dp+cp+tp")
    chosen = np.array([rng.permutation(experts)[:topk] for _ in range(tokens)], int).reshape(-1, topk)
    skewed = np.where(rng.random(tokens) < 0.5, 0, chosen[:, 0])
    chosen[:, 0] = np.where((chosen[:, 1:] == skewed[:, None]).any(axis=1), chosen[:, 0], skewed)
    owner = np.repeat(rng.integers(0, ranks, tokens), rng.integers(1, 5, tokens))[:tokens]  # some ranks have none
    orders = [
        rng.permutation(np.flatnonzero(owner == at)) if at == 1 else np.flatnonzero(owner == at) for at in range(ranks)
    ]
    orders = [order if at != 1 else np.sort(order)[::-1] for at, order in enumerate(orders)]  # of one, backwards
    runs = [own_runs(order, chosen[order], experts) for order in orders]
    table = np.concatenate([run.table for run in runs])
    of = np.repeat(np.arange(ranks), [len(run.first) for run in runs])
    exchange = TokenExchange(shape, topk, factor, of, table[:, 0], table[:, 1], table[:, 2:])
    return exchange, chosen, owner, orders, runs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "topk", "factor"), [(40, 2, 1.0), (37, 1, 0.5), (9, 3, 1.25), (1, 2, 1.0), (0, 1, 2.0)]
)
def test_an_expert_takes_the_first_tokens(shape: MeshShape, tokens: int, topk: int, factor: float) -> None:
    """Token by token in the order of their numbers; and 4 h words for each choice of an expert on another rank."""
    experts, h = 6, 5
    exchange, chosen, owner, orders, runs = drawn(shape, tokens, experts, topk, factor, tokens)
    load, taken, dropped = np.zeros(experts, int), [set() for _ in orders], 0
    for token in range(tokens):
        for e in chosen[token].tolist():
            if load[e] < ceil(factor * tokens * topk / experts):
                taken[owner[token]].add((token, e))
            else:
                dropped += 1
            load[e] += 1
    assert exchange.tokens == tokens and exchange.dropped == dropped and np.array_equal(exchange.loads, load)
    away = 0
    for at, (order, run) in enumerate(zip(orders, runs)):
        choices = run.taken(exchange.kept[exchange.owner == at])
        pairs = [(int(order[c // topk]), int(chosen[order].ravel()[c])) for c in choices]
        assert {*pairs} == taken[at] and len(pairs) == len(taken[at])
        assert [e for _, e in pairs] == sorted(e for _, e in pairs)  # in the order of experts
        assert np.array_equal(exchange.rows[at], np.bincount([e for _, e in pairs], minlength=experts))
        away += sum(e // (experts // shape.ep) != shape.index("ep", at) for _, e in pairs)
    stage = range(shape.size // shape.pp)
    totals = [exchange.traffic(rank, h, np.dtype("f")) for rank in stage]
    experts_words = sum((x["experts"] for x in totals), Traffic())
    assert experts_words.words_sent == experts_words.words_received == 4 * h * away
    router = sum((x["router"] for x in totals), Traffic())
    ranks, number = len(stage), len(exchange.first)
    sums = sum(router_sums(ranks, experts).traffic(rank).words_sent for rank in stage)
    assert router.words_sent == sums + (ranks - 1) * number * (2 + experts)
    again = [exchange.traffic(rank, h, np.dtype("f"), forwards=2) for rank in stage]  # recomputed
    assert sum((x["router"] for x in again), Traffic()).words_sent == 2 * router.words_sent
    assert 2 * sum((x["experts"] for x in again), Traffic()).words_sent == 3 * experts_words.words_sent


def test_rows_that_arrive_are_those_that_are_sent() -> None:
    """On each ep line; ranks of other edp, cp and tp indices have copies of experts, and exchange among themselves."""
    shape = MeshShape(dp=4, cp=2, tp=2, ep=2)
    exchange, *_ = drawn(shape, 90, 6, 2, 1.0, 3)
    for rank in range(shape.size):
        line = shape.line("ep", rank)
        there, back = exchange.exchange(rank, 1, np.dtype("d")), exchange.exchange(rank, 1, np.dtype("d"), back=True)
        sent = np.array(there.counts).reshape(2, 2)
        assert np.array_equal(sent.T.ravel(), back.counts)
        arriving = exchange.arriving(rank)
        assert arriving.shape == (2, 3) and np.array_equal(arriving.sum(axis=1), sent[:, line.index(rank)])
        for at, other in enumerate(line):
            assert sent[at].sum() == exchange.rows[shape.index("dp+cp+tp", other)].sum()


def test_capacity_is_that_of_the_decimal_number() -> None:
    for factor, tokens, topk, experts, capacity in (
        (1.0, 10, 1, 4, 3), (1.1, 10, 1, 1, 11), (1.1, 100, 2, 4, 55), (0.1, 30, 1, 3, 1), (1, 8, 2, 4, 4),
        (2.0, 0, 1, 4, 0),
    ):  # fmt: skip
        assert expert_capacity(factor, tokens, topk, experts) == capacity


def test_a_token_has_one_number() -> None:
    def exchange(first: list[int], length: list[int]) -> TokenExchange:
        counts = np.array([[n, 0] for n in length])
        return TokenExchange(MeshShape(dp=2), 1, 1.0, np.array([0, 0, 1]), np.array(first), np.array(length), counts)

    assert exchange([0, 9, 4], [4, 1, 5]).tokens == 10
    message = "one number each in a microbatch, got 0 to 4 on rank 0 and 4 to 8 on rank 1 of dp.cp.tp"
    with pytest.raises(ArgumentError, match=message):
        exchange([0, 9, 4], [5, 1, 5])
    with pytest.raises(ArgumentError, match="got 4 to 8 on rank 1 and 8 to 8 on rank 0"):
        exchange([0, 8, 4], [4, 1, 5])
