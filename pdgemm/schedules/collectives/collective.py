"""Collective operations as schedules, the registry of their algorithms, and lower bounds on messages and words.

Chan, Heimlich, Purkayastha & van de Geijn, Concurrency and Computation 19(13), 2007; Thakur, Rabenseifner & Gropp,
International Journal of High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import ceil, log2
from typing import NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives import collective_steps as by
from pdgemm.schedules.collectives.collective_steps import CollectiveStep, CollectiveSteps
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.rounds import LINE, MEMORY, Messages, Round, WorkPiece
from pdgemm.schedules.schedule import Buffers, LineSchedule
from pdgemm.support.members import remembered

_PASSES = 2  # memory passes of an addition, which reads two vectors and writes one: it counts as two copies
OPERATIONS = (
    "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "scatter", "all_to_all",
)  # fmt: skip


@dataclass(frozen=True)
class Collective(LineSchedule):
    """A collective operation, by one algorithm, on a vector that is cut into parts.

    operation : one of `OPERATIONS`.   algorithm : one of `algorithms(operation)`.
    ranks  : the ranks that take part, in the order in which they own the parts of the vector; the first rank is the
        root of "broadcast", "reduce", "scatter" and "gather".
    counts : words of each part, >= 0: one part for each rank; with "all_to_all" one part for each pair of source and
        target, ordered by source.
    node   : a number for the node of each rank; empty where all ranks are on one node.
    arrays : the number of vectors that are cut into these parts; each message carries parts of all vectors.

    A sum is bitwise the same on all ranks and in all runs: the order of its addends depends only on the algorithm and
    the number of ranks, and in each addition the left addend is that of the earlier rank.
    """

    operation: str
    algorithm: str
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: np.dtype
    node: tuple[int, ...] = ()
    arrays: int = 1
    mover = RING.name
    lookahead = 0

    def __post_init__(self) -> None:
        algorithm, p = algorithms(self.operation).get(self.algorithm), len(self.ranks)
        if algorithm is None:
            known = ", ".join(algorithms(self.operation))
            raise ArgumentError(f"algorithms of {self.operation} are {known}; got {self.algorithm!r}")
        parts = p * p if self.operation == "all_to_all" else p
        if len(self.counts) != parts or min(self.counts, default=0) < 0 or len(set(self.ranks)) < p or not p:
            raise ArgumentError(f"{self.operation} on {p} ranks needs {parts} counts >= 0, got {self.counts}")
        if not algorithm.takes(self.node):
            raise ArgumentError(f"{self.algorithm} needs several nodes with equally many ranks, got {self.node}")

    @property
    def words(self) -> int:
        """The words of all vectors together."""
        return int(self.offsets[-1]) * self.arrays

    @cached_property
    def offsets(self) -> np.ndarray:
        """The offset of each part in the vector, and the length of the vector."""
        return np.cumsum([0, *self.counts])

    @property
    def groups(self) -> np.ndarray:
        """The places of the ranks of each node: a row for each node; all nodes have the same number of ranks."""
        return np.array([np.flatnonzero(np.array(self.node) == x) for x in dict.fromkeys(self.node)])

    @property
    def events(self) -> int:
        return algorithms(self.operation)[self.algorithm].messages(len(self.ranks))

    def steps(self) -> CollectiveSteps:
        """Yield the steps of the algorithm; a place is an index in `ranks`."""
        yield from algorithms(self.operation)[self.algorithm].steps(self)

    @remembered
    def messages_of(self, place: int) -> list[RankStep]:
        """Return the messages that the rank at `place` sends and receives, step by step."""
        return [RankStep.of(self, step, place) for step in self.steps()]

    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages of a rank, from its own steps: this is faster than a sum over `rounds`."""
        steps = self.messages_of(self.ranks.index(rank)) if rank in self.ranks else []
        sent = [words for step in steps for words in step.sent_to.values()]
        received = [words for step in steps for words in step.received_from.values()]
        longest = LARGEST_MESSAGE_BYTES // self.dtype.itemsize
        messages = (sum(-(-words // longest) for words in moved) for moved in (sent, received))
        return Traffic(sum(sent), sum(received), *messages)

    def words_of(self, step: CollectiveStep) -> np.ndarray:
        """Return the number of words that each entry of a step carries."""
        parts, ends, length = len(self.counts), step.first + step.number, int(self.offsets[-1])
        return (self.offsets[ends % parts] + length * (ends // parts) - self.offsets[step.first]) * self.arrays

    def rounds(self) -> Iterator[Round]:
        ranks = np.array(self.ranks)
        for step in self.steps():
            pairs, row = np.unique(np.stack([step.source, step.target]), axis=1, return_inverse=True)
            words = np.bincount(row.ravel(), self.words_of(step), pairs.shape[1]).astype(np.int64)
            sent, (source, target) = words > 0, ranks[pairs]
            moves = Messages(self.mover, source[sent], target[sent], words[sent], self.dtype.itemsize, LINE)
            added = np.bincount(target[sent], words[sent] * step.adds, self.last_rank + 1).astype(np.int64)
            work = [WorkPiece((added, 1, _PASSES), MEMORY)] if step.adds else []
            yield Round([moves], work, hidden=False)

    def buffers(self, rank: int | None) -> Buffers:
        return {"vector": (self.words, self.dtype)}

    def lower_bounds(self) -> tuple[int, float]:
        """Return lower bounds on the number of rounds of messages, and on the words that some rank sends or receives.

        The bounds hold for evenly cut vectors and algorithms that add but do not compress (Chan et al. 2007, table 2).
        """
        p, n = len(self.ranks), self.words
        share = n * (p - 1) / p
        words = {
            "all_reduce": 2 * share, "reduce": n * (p > 1), "broadcast": n * (p > 1), "all_to_all": share / p,
        }  # fmt: skip
        return ceil(log2(p)), words.get(self.operation, share)

    def described(self, name: str) -> tuple[str, str]:
        return self.operation, f"{self.words} words, {self.dtype}, on {len(self.ranks)} ranks, by {self.algorithm}"


class RankStep(NamedTuple):
    """The messages of a rank in a step, by the place of the other rank.

    sent, received : the ranges (first, number) of parts.   sent_to, received_from : the words.
    adds : the rank adds the received parts to its parts; otherwise it overwrites its parts with them.
    """

    sent: dict[int, list[tuple[int, int]]]
    received: dict[int, list[tuple[int, int]]]
    sent_to: dict[int, int]
    received_from: dict[int, int]
    adds: bool

    @classmethod
    def of(cls, collective: Collective, step: CollectiveStep, place: int) -> RankStep:
        words = collective.words_of(step)

        def ranges(mine: np.ndarray, peer: np.ndarray) -> tuple[dict[int, list[tuple[int, int]]], dict[int, int]]:
            by_peer, words_by_peer = dict[int, list[tuple[int, int]]](), dict[int, int]()
            for at in np.flatnonzero(mine & (words > 0)).tolist():
                other = int(peer[at])
                by_peer.setdefault(other, []).append((int(step.first[at]), int(step.number[at])))
                words_by_peer[other] = words_by_peer.get(other, 0) + int(words[at])
            return by_peer, words_by_peer

        sent, sent_to = ranges(step.source == place, step.target)
        received, received_from = ranges(step.target == place, step.source)
        return cls(sent, received, sent_to, received_from, step.adds)


@dataclass(frozen=True)
class CollectiveAlgorithm:
    """An algorithm for a collective operation.

    steps : yields the steps of a collective.   messages : estimates the messages of a rank from the number of ranks.
    takes : returns whether the algorithm fits ranks on these nodes.   sums : the order of the additions, as text.
    """

    steps: Callable[[Collective], CollectiveSteps]
    messages: Callable[[int], int]
    sums: str = ""
    takes: Callable[[tuple[int, ...]], bool] = lambda node: True


_REGISTERED: dict[str, dict[str, CollectiveAlgorithm]] = {operation: {} for operation in OPERATIONS}


def register_collective(operation: str, name: str, algorithm: CollectiveAlgorithm) -> None:
    """Register an algorithm for `choose_collective`, `pdgemm plan --collective` and the transport."""
    algorithms(operation)[name] = algorithm


def algorithms(operation: str) -> dict[str, CollectiveAlgorithm]:
    """Return the algorithms of an operation by name.  Raises ArgumentError for an unknown operation."""
    if operation not in _REGISTERED:
        raise ArgumentError(f"collective operations are {', '.join(OPERATIONS)}; got {operation!r}")
    return _REGISTERED[operation]


def even_parts(words: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of `ranks` parts of `words` words: they differ by at most one word, the larger parts first."""
    each, more = divmod(words, ranks)
    return (each + 1,) * more + (each,) * (ranks - more)


@cache
def sum_of_numbers(numbers: int, ranks: int) -> Collective:
    """Return the collective that sums a few float64 numbers of ranks 0 to `ranks` - 1; all get the same bits."""
    counts = (numbers,) + (0,) * (ranks - 1)
    return Collective("all_reduce", "doubling", tuple(range(ranks)), counts, np.dtype(np.float64))


@lru_cache(1024)
def sum_of_array(words: int, ranks: int, dtype: np.dtype) -> Collective:
    """Return the collective that sums large arrays of ranks 0 to p - 1; each receives 2 (p - 1)/p of the words."""
    return Collective("all_reduce", "pairwise", tuple(range(ranks)), even_parts(words, ranks), dtype)


# ---------------------------------------------------------------- the algorithms
def _by_members(
    *phases: Callable[[np.ndarray, np.ndarray], CollectiveSteps],
) -> Callable[[Collective], CollectiveSteps]:
    """Return the function `steps` of an algorithm in which rank i owns part i: one phase runs after the other."""

    def steps(collective: Collective) -> CollectiveSteps:
        places = np.arange(len(collective.ranks))
        for phase in phases:
            yield from phase(places, np.arange(len(places) + 1))

    return steps


def _two_level_sums(collective: Collective) -> CollectiveSteps:
    """Reduce-scatter on each node, all-reduce each part over the nodes, and all-gather on each node."""
    groups = collective.groups
    cuts = np.linspace(0, groups.size, groups.shape[1] + 1).astype(int)
    yield from by.side_by_side(*(by.ring_reduce_scatter(group, cuts) for group in groups))
    across = [
        (column, lo + np.linspace(0, hi - lo, len(groups) + 1).astype(int))
        for column, lo, hi in zip(groups.T, cuts, cuts[1:])
    ]
    yield from by.side_by_side(*(by.ring_reduce_scatter(*line) for line in across))
    yield from by.side_by_side(*(by.ring_all_gather(*line) for line in across))
    yield from by.side_by_side(*(by.ring_all_gather(group, cuts) for group in groups))


def _several_nodes(node: tuple[int, ...]) -> bool:
    """Are there several nodes, each with the same number of ranks, at least two?"""
    sizes = {*Counter(node).values()}
    return len({*node}) > 1 and len(sizes) == 1 and min(sizes) > 1


def _linear(ranks: int) -> int:
    return 2 * ranks


def _logarithmic(ranks: int) -> int:
    return 2 * ranks.bit_length()


_TREE, _RING = "((x0 + x1) + (x2 + x3)) + ...", "part i: ((x_i+1 + x_i+2) + ...) + x_i"
_HALVES = "as in a tree, the farthest partners first, the nearest last"
_PAIRS, _TWO_LEVELS = "part i: ((x_i + x_i-1) + x_i-2) + ...", "as by ring, on each node, and then over the nodes"
for _operation, _name, *_algorithm in (
    ("all_reduce", "tree", _by_members(by.binomial_reduce, by.binomial_broadcast), _logarithmic, _TREE),
    ("all_reduce", "ring", _by_members(by.ring_reduce_scatter, by.ring_all_gather), _linear, _RING),
    ("all_reduce", "doubling", _by_members(by.doubling_all_reduce), _logarithmic, _TREE),
    ("all_reduce", "halving", _by_members(by.halving_doubling_all_reduce), _logarithmic, _HALVES),
    ("all_reduce", "nearest", _by_members(by.nearest_all_reduce), _linear, _TREE),
    ("all_reduce", "pairwise", _by_members(by.pairwise_reduce_scatter, by.pairwise_all_gather), _linear, _PAIRS),
    ("all_reduce", "two-level", _two_level_sums, _linear, _TWO_LEVELS, _several_nodes),
    ("reduce", "tree", _by_members(by.binomial_reduce), _logarithmic, _TREE),
    ("reduce", "halving", _by_members(by.halving_reduce_scatter, by.binomial_gather), _logarithmic, _HALVES),
    ("reduce_scatter", "ring", _by_members(by.ring_reduce_scatter), _linear, _RING),
    ("reduce_scatter", "halving", _by_members(by.halving_reduce_scatter), _logarithmic, _HALVES),
    ("reduce_scatter", "pairwise", _by_members(by.pairwise_reduce_scatter), _linear, _PAIRS),
    ("reduce_scatter", "nearest", _by_members(by.nearest_reduce_scatter), _linear, _TREE),
    ("all_gather", "ring", _by_members(by.ring_all_gather), _linear),
    ("all_gather", "pairwise", _by_members(by.pairwise_all_gather), _linear),
    ("all_gather", "bruck", _by_members(by.bruck_all_gather), _logarithmic),
    ("gather", "tree", _by_members(by.binomial_gather), _logarithmic),
    ("gather", "flat", _by_members(by.flat_gather), _linear),
    ("scatter", "tree", _by_members(by.binomial_scatter), _logarithmic),
    ("scatter", "flat", _by_members(by.flat_scatter), _linear),
    ("broadcast", "tree", _by_members(by.binomial_broadcast), _logarithmic),
    ("broadcast", "scatter", _by_members(by.binomial_scatter, by.ring_all_gather), _linear),
    ("all_to_all", "pairwise", _by_members(by.pairwise_all_to_all), _linear),
    ("all_to_all", "bruck", _by_members(by.bruck_all_to_all), _linear),
):  # fmt: skip
    register_collective(_operation, _name, CollectiveAlgorithm(*_algorithm))
