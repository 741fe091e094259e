"""Where the tokens of a microbatch go in a mixture of experts, which of them are dropped, and what travels."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives.collective import Collective, sum_of_numbers
from pdgemm.schedules.training.mesh_shape import EXPERTS, MeshShape, block_of
from pdgemm.support.remembered import remembered

MICROBATCH = "dp+cp+tp"  # the line of the ranks whose tokens are one microbatch
RUN_WORDS = 2  # of a run in a table of runs, before its count for each expert: its first token, and its length
_WHOLE = np.dtype(np.int64)


def expert_capacity(factor: float, tokens: int, topk: int, experts: int) -> int:
    """Return ceil(factor tokens topk / experts), for `factor` as the decimal number that it is written as."""
    return -(-Fraction(repr(float(factor))) * tokens * topk // experts)


@dataclass(frozen=True, eq=False)
class TokenExchange:
    """The tokens of a microbatch on their way to the experts and back.

    Each token has a global number and chooses k of the experts.  A rank has runs of tokens, whose numbers are
    consecutive.  An expert takes tokens in the order of their numbers until it has `capacity`, on whatever ranks they
    are; later ones are dropped.  Expert e is on the ranks of ep index e // (experts / ep).  A token travels to that one
    on its rank's ep line, and its result back, h words each way; in the backward pass gradients take the same ways.

    shape  : the mesh; ranks of one pp index share a microbatch.
    topk   : the number k of experts that a token chooses.
    factor : of the capacity; an expert takes as many tokens as `expert_capacity` says.
    owner  : (runs), the index of each run's rank in the line `MICROBATCH`, ascending.
    first  : (runs), the number of the first token.   length : (runs), the number of tokens.
    counts : (runs, experts), how many tokens of the run chose each expert.

    Raises ArgumentError where two runs have a token of one number.
    """

    shape: MeshShape
    topk: int
    factor: float
    owner: np.ndarray
    first: np.ndarray
    length: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        order = self._order
        twice = np.flatnonzero(self.first[order][1:] < (self.first + self.length)[order][:-1])
        if len(twice):
            two = [
                f"{self.first[run]} to {self.first[run] + self.length[run] - 1} on rank {self.owner[run]}"
                for run in order[twice[0] : twice[0] + 2]
            ]
            raise ArgumentError(f"tokens have one number each in a microbatch, got {' and '.join(two)} of {MICROBATCH}")

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.first, kind="stable")

    @property
    def tokens(self) -> int:
        return int(self.length.sum())

    @property
    def experts(self) -> int:
        return self.counts.shape[1]

    @property
    def capacity(self) -> int:
        return expert_capacity(self.factor, self.tokens, self.topk, self.experts)

    @property
    def loads(self) -> np.ndarray:
        """How many tokens chose each expert."""
        return self.counts.sum(axis=0)

    @cached_property
    def kept(self) -> np.ndarray:
        """How many tokens of each run each expert takes: those at the run's beginning.   (runs, experts)"""
        in_order = self.counts[self._order]
        before = np.cumsum(in_order, axis=0) - in_order
        kept = np.empty_like(in_order)
        kept[self._order] = np.clip(self.capacity - before, 0, in_order)
        return kept

    @property
    def dropped(self) -> int:
        """How many choices of tokens are dropped."""
        return int(self.counts.sum() - self.kept.sum())

    @cached_property
    def rows(self) -> np.ndarray:
        """How many rows each rank of the line `MICROBATCH` sends to each expert.   (ranks, experts)"""
        rows = np.zeros((self.shape.length(MICROBATCH), self.experts), np.int64)
        np.add.at(rows, self.owner, self.kept)
        return rows

    def own_experts(self, index: int) -> slice:
        """Return the experts of the ranks of this ep index."""
        return block_of(self.experts, self.shape.ep, index)

    @remembered
    def arriving(self, rank: int) -> np.ndarray:
        """Return the rows that come to a rank from each rank of its ep line, for each of its experts.

        (ep, own experts)
        """
        return self._line_rows(rank)[:, self.own_experts(self.shape.index(EXPERTS, rank))]

    def _line_rows(self, rank: int) -> np.ndarray:
        return self.rows[[self.shape.index(MICROBATCH, other) for other in self.shape.line(EXPERTS, rank)]]

    def exchange(self, rank: int, width: int, dtype: np.dtype, back: bool = False) -> Collective:
        """Return the exchange of rows of `width` words on a rank's ep line, to the experts or back."""
        ep = self.shape.ep
        rows = self._line_rows(rank).reshape(ep, ep, -1).sum(axis=2)  # from, to
        counts = (rows.T if back else rows).ravel() * width
        return Collective("all_to_all", "pairwise", tuple(range(ep)), tuple(counts.tolist()), dtype)

    def traffic(
        self, rank: int, width: int, dtype: np.dtype, *, forwards: int = 1, backwards: int = 1
    ) -> dict[str, Traffic]:
        """Return the words and messages of a rank in forward and backward passes over one layer, by kind.

        width, dtype : of a row of a token.   forwards : how often the forward pass is computed.
        """
        index, total = self.shape.index(MICROBATCH, rank), {"router": Traffic(), "experts": Traffic()}
        runs = np.bincount(self.owner, minlength=self.shape.length(MICROBATCH))
        for _ in range(forwards):
            total["router"] += router_sums(len(runs), self.experts).traffic(index)
            total["router"] += run_tables(runs, self.experts).traffic(index)
        ways = [self.exchange(rank, width, dtype, back) for back in (False, True)]
        for _ in range(forwards + backwards):
            for way in ways:
                total["experts"] += way.traffic(self.shape.index(EXPERTS, rank))
        return total


def router_sums(ranks: int, experts: int) -> Collective:
    """Return the all-reduce of a router: each expert's probabilities, each rank's number of runs, and failures."""
    return sum_of_numbers(experts + ranks + 1, ranks)


def run_tables(runs: np.ndarray, experts: int) -> Collective:
    """Return the all-gather of the runs of all ranks of a microbatch.   runs : (ranks), how many each rank has."""
    counts = tuple((runs * (RUN_WORDS + experts)).tolist())
    return Collective("all_gather", "bruck", tuple(range(len(runs))), counts, _WHOLE)
