"""Sampler: the order of samples as a function of the seed; any rank computes any part of it, and none is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count, as_seed
from pdgemm.local.arrays.element_functions import hashed, numbered

_ROUNDS = 4  # of the Feistel network: Luby & Rackoff, SIAM J. Comput. 17(2), 1988


@dataclass
class Sampler:
    """All samples in a new order in each epoch; a step takes the next `batch` of them, across the end of an epoch.

    ::

        sampler = Sampler(len(data), batch=64, seed=1)
        steps = range(run.steps, 1000)
        for x, y in DataLoader(data, batch_sampler=sampler.batches(steps, mesh.index("dp"), mesh.length("dp"))):
            run.step(x, y)

    count : number of samples.   batch : samples of a step, of all replicas together.   seed : of the order.
    start : samples that were taken before step 0.

    The number of samples that were taken, `start + steps * batch`, is the whole state: any number of replicas continues
    with the samples that one process would have taken, however far the loader reads ahead.
    Raises ArgumentError where a number is out of range.
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
        """Return the numbers of the samples of a step, in the order in which they are divided among replicas."""
        at = self.start + as_count(step, "step", 0) * self.batch + np.arange(self.batch)
        rows = np.empty(self.batch, np.int64)
        epochs = at // self.count
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            rows[here] = shuffled(at[here] % self.count, self.count, self.seed, epoch)
        return rows

    def batches(self, steps: range, index: int = 0, replicas: int = 1) -> Batches:
        """Return the samples of a replica in these steps, a `batch_sampler` of torch's DataLoader.

        index : of the replica.  Of n samples, replica j of d takes those from floor(n j / d) on.
        Raises ArgumentError where there are more replicas than samples in a batch.
        """
        if not 0 <= index < replicas <= self.batch:
            raise ArgumentError(f"a batch of {self.batch} samples has no part for replica {index} of {replicas}")
        return Batches(self, steps, index, replicas)

    def state(self, step: int) -> dict[str, int]:
        """Return the order, and the number of samples that were taken before a step."""
        return {"count": self.count, "seed": self.seed, "taken": self.start + step * self.batch}


@dataclass(frozen=True)
class Batches:
    """The numbers of a replica's samples, step by step; see `Sampler.batches`."""

    sampler: Sampler
    steps: range
    index: int
    replicas: int

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            rows = self.sampler.rows(step)
            first, last = (len(rows) * at // self.replicas for at in (self.index, self.index + 1))
            yield rows[first:last].tolist()


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
