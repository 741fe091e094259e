"""Sampler: the order of samples as a function of the seed; any rank computes any part of it, and none is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count, as_name, as_seed
from pdgemm.local.arrays.element_functions import hashed, numbered
from pdgemm.parallel.mesh import Mesh
from pdgemm.support.agreement import together

SampleOrder = Literal["rank", "microbatch"]
_ROUNDS = 4  # of the Feistel network: Luby & Rackoff, SIAM J. Comput. 17(2), 1988


@dataclass(frozen=True)
class Sampler:
    """All samples in a new order in each epoch; a step takes the next `batch` of them, across the end of an epoch.

    count : number of samples.   batch : samples of a step, of all ranks together.   seed : of the order.
    start : samples that were taken before step 0.

    A step number is the whole state: any number of ranks that begins at a step takes the samples that one process
    would have taken.  Raises ArgumentError where a number is out of range.
    """

    count: int
    batch: int
    seed: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        as_count(self.count, "count", 1)
        as_count(self.batch, "batch", 1)
        as_count(self.start, "start", 0)
        as_seed(self.seed)

    def rows(self, step: int) -> np.ndarray:
        """Return the numbers of the samples of a step, in the order in which they are divided among ranks."""
        at = self.start + as_count(step, "step", 0) * self.batch + np.arange(self.batch)
        rows = np.empty(self.batch, np.int64)
        epochs = at // self.count
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            rows[here] = shuffled(at[here] % self.count, self.count, self.seed, epoch)
        return rows

    def shares(
        self,
        mesh: Mesh,
        steps: Sequence[int],
        microbatches: int = 1,
        allow_empty: bool = False,
        order: SampleOrder = "rank",
    ) -> Iterator[list[np.ndarray]]:
        """Return this rank's samples of each step, for `Prefetch`.  Collective over the mesh.

        steps : a range, say.   order : see `share`.   Raises ArgumentError on all ranks, as `share`, and where the
        ranks have different samplers, steps, microbatches or orders.
        """
        with together(mesh.comm) as arguments:
            microbatches = as_count(microbatches, "microbatches", 1)
            arguments += ["Sampler.shares", self, steps, microbatches, order]
            self._check(mesh.shape.dp, microbatches, allow_empty, order)
        index = mesh.index("dp")
        return (self.share(step, index, mesh.shape.dp, microbatches, allow_empty, order) for step in steps)

    def share(
        self,
        step: int,
        index: int,
        ranks: int,
        microbatches: int = 1,
        allow_empty: bool = False,
        order: SampleOrder = "rank",
    ) -> list[np.ndarray]:
        """Return the samples of each microbatch of a rank: of n samples, part j of P begins at floor(n j / P).

        index, ranks : of the rank along dp, and how many there are.
        order : "rank": a batch is cut into ranks * microbatches parts, of which each rank has neighbours.
            "microbatch": it is cut into microbatches, and each of these into a part for each rank: so microbatch i of
            all ranks together has the same samples on any number of ranks, as the capacity of experts needs it.
        Raises ArgumentError where there are more parts than samples, unless some may be empty.  Local.
        """
        self._check(ranks, microbatches, allow_empty, order)
        rows = self.rows(step)
        if order == "microbatch":
            return [_part(rows, ranks * microbatches, at * ranks + index) for at in range(microbatches)]
        return [_part(rows, ranks * microbatches, index * microbatches + at) for at in range(microbatches)]

    def _check(self, ranks: int, microbatches: int, allow_empty: bool, order: str) -> None:
        """Raise ArgumentError where a part of a batch would be empty, and may not."""
        as_name(order, "order", get_args(SampleOrder))
        if ranks * microbatches > self.batch and not allow_empty:
            raise ArgumentError(
                f"a batch of {self.batch} samples has no part for each of {ranks} ranks in {microbatches} microbatches"
            )


def _part(rows: np.ndarray, parts: int, at: int) -> np.ndarray:
    """Return part `at` of `parts`, which differ by one row at most."""
    n = len(rows)
    return rows[n * at // parts : n * (at + 1) // parts]


def shuffled(at: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the images of positions under a permutation of 0, ..., count - 1, one for each seed and epoch.

    A Feistel network permutes the numbers below 4^b >= count; a number that is not below `count` is permuted again,
    until it is (Black & Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002): 4 times at most on average.
    """
    bits = max(1, -(-int(count - 1).bit_length() // 2))
    x, mask = np.asarray(at).astype(np.uint64), np.uint64((1 << bits) - 1)
    pending = np.ones(x.shape, bool)
    while pending.any():
        left, right = x[pending] >> np.uint64(bits), x[pending] & mask
        for step in range(_ROUNDS):
            left, right = right, left ^ (hashed(right, np.asarray(step), seed, numbered(epoch)) & mask)
        x[pending] = (left << np.uint64(bits)) | right
        pending &= x >= count
    return x.astype(np.int64)
