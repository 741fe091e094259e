"""Sampler: the order of samples as a function of the seed; any rank computes any part of it, and none is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.element_functions import hashed, numbered
from pdgemm.local.arrays.integers import as_count, as_seed
from pdgemm.parallel.mesh import Mesh
from pdgemm.support.agreement import together

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
        self, mesh: Mesh, steps: Sequence[int], microbatches: int = 1, allow_empty: bool = False
    ) -> Iterator[list[np.ndarray]]:
        """Return this rank's samples of each step, for `Prefetch`.  Collective over the mesh.

        steps : a range, say.   Raises ArgumentError on all ranks, as `share`, and where the ranks have different
        samplers, steps or microbatches.
        """
        with together(mesh.comm) as arguments:
            microbatches = as_count(microbatches, "microbatches", 1)
            arguments += ["Sampler.shares", self, steps, microbatches]
            self._check(mesh.shape.dp, microbatches, allow_empty)
        index = mesh.index("dp")
        return (self.share(step, index, mesh.shape.dp, microbatches, allow_empty) for step in steps)

    def share(
        self, step: int, index: int, ranks: int, microbatches: int = 1, allow_empty: bool = False
    ) -> list[np.ndarray]:
        """Return the samples of each microbatch of a rank: of batch B, part j of P begins at floor(B j / P).

        index, ranks : of the rank along dp, and how many there are; P = ranks * microbatches.
        Raises ArgumentError where there are more parts than samples, unless some may be empty.  Local.
        """
        self._check(ranks, microbatches, allow_empty)
        rows, parts = self.rows(step), ranks * microbatches
        cuts = [self.batch * at // parts for at in range(index * microbatches, (index + 1) * microbatches + 1)]
        return [rows[lo:hi] for lo, hi in pairwise(cuts)]

    def _check(self, ranks: int, microbatches: int, allow_empty: bool) -> None:
        """Raise ArgumentError where a part of a batch would be empty, and may not."""
        if ranks * microbatches > self.batch and not allow_empty:
            raise ArgumentError(
                f"a batch of {self.batch} samples has no part for each of {ranks} ranks in {microbatches} microbatches"
            )


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
