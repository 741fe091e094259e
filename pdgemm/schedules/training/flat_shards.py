"""Parameters in flat storage: buckets, each cut into a part for each rank, and the collectives of a step.

Rajbhandari, Rasley, Ruwase & He, ZeRO: Memory optimizations toward training trillion parameter models, SC 2020;
Li et al., PyTorch distributed: Experiences on accelerating data parallel training, VLDB 13(12), 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.support.members import remembered


class FlatBucket(NamedTuple):
    """Neighbours in flat storage whose gradients are reduced together: elements `start` to `stop`."""

    number: int
    start: int
    stop: int
    names: tuple[str, ...]

    @property
    def words(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatShards:
    """The storage of parameters and gradients that the ranks of a line have in common.

    names, words : the parameters in the order of the backward pass, and their elements.
    units  : for each parameter the number of its bucket, ascending.
    users  : for each bucket the number of modules whose passes need its parameters, with stage 3.
    shards : the number of ranks of the line.
    groups : of such lines that have copies of all parts, and sum their parts of the gradients at the end of a step.
    stage  : what is divided among them (ZeRO): 0 nothing, 1 the state of the optimizer, 2 gradients as well, 3
        parameters as well.   dtype : of the parameters.  Gradients are float64 where it is float64, else float32.
    owners : for each parameter the rank to which it belongs whole; empty: the ranks cut each bucket evenly.
    """

    names: tuple[str, ...]
    words: tuple[int, ...]
    units: tuple[int, ...]
    users: tuple[int, ...]
    shards: int
    stage: int
    dtype: np.dtype
    groups: int = 1
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise ArgumentError(f"zero is 0, 1, 2 or 3, got {self.stage!r}")

    @property
    def wide(self) -> np.dtype:
        """The type of gradients, master weights and the state of the optimizer."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @cached_property
    def owner(self) -> dict[str, int]:
        """The rank to which each parameter belongs whole; no names where buckets are cut evenly."""
        return dict(zip(self.names, self.owners))

    @cached_property
    def places(self) -> dict[str, slice]:
        """The place of each parameter in flat storage."""
        order = sorted(range(len(self.names)), key=lambda k: (self.units[k], *self.owners[k : k + 1]))
        ends = np.cumsum([0, *(self.words[k] for k in order)]).tolist()
        return {self.names[k]: slice(*place) for k, place in zip(order, pairwise(ends))}

    @cached_property
    def buckets(self) -> tuple[FlatBucket, ...]:
        buckets, unit_of = list[FlatBucket](), dict(zip(self.names, self.units))
        for unit in dict.fromkeys(self.units):
            names = tuple(name for name in self.places if unit_of[name] == unit)
            buckets.append(FlatBucket(len(buckets), self.places[names[0]].start, self.places[names[-1]].stop, names))
        return tuple(buckets)

    def counts(self, bucket: FlatBucket) -> tuple[int, ...]:
        """Return the words of the part of each rank."""
        parts = [self.part(bucket, index) for index in range(self.shards)]
        return tuple(x.stop - x.start for x in parts)

    def part(self, bucket: FlatBucket, index: int) -> slice:
        """Return the part of a bucket, in flat storage, that a rank of the line owns."""
        if self.owners:
            mine = [self.places[name] for name in bucket.names if self.owner[name] == index]
            return slice(mine[0].start, mine[-1].stop) if mine else slice(bucket.start, bucket.start)
        cuts = (bucket.start + bucket.words * at // self.shards for at in (index, index + 1))
        return slice(*cuts)

    @remembered
    def reduction(self, bucket: FlatBucket) -> Collective:
        """Return the collective that sums the gradients of a bucket."""
        return self._collective("reduce_scatter" if self.stage else "all_reduce", bucket, self.wide)

    @remembered
    def gathering(self, bucket: FlatBucket) -> Collective:
        """Return the collective that makes the parameters of a bucket whole."""
        return self._collective("all_gather", bucket, self.dtype)

    @remembered
    def sum_of_groups(self, words: int) -> Collective:
        """Return the collective that sums a part of gradients over the groups."""
        counts = tuple(words * (at + 1) // self.groups - words * at // self.groups for at in range(self.groups))
        return Collective("all_reduce", "ring", tuple(range(self.groups)), counts, self.wide)

    def _collective(self, operation: str, bucket: FlatBucket, dtype: np.dtype) -> Collective:
        return Collective(operation, "ring", tuple(range(self.shards)), self.counts(bucket), dtype)

    def traffic(self, index: int, microbatches: int, group: int = 0) -> dict[str, Traffic]:
        """Return the traffic of a step of a rank of the line of a group, by kind.

        For N words on d ranks, a rank receives about N (d - 1)/d words of gradients, twice as many with stage 0, and
        with stages 2 and 3 as many in each microbatch.  It receives N (d - 1)/d words of parameters with stages 1 and
        2, and with stage 3 as many in each microbatch for each user forward, and once backward.  With g groups it
        receives 2 N/d (g - 1)/g words of gradients more in a step.
        """
        reductions = microbatches if self.stage > 1 else 1
        total = {"gradients": Traffic(), "parameters": Traffic()}
        for bucket in self.buckets if self.shards > 1 else ():
            total["gradients"] += sum([self.reduction(bucket).traffic(index)] * reductions, Traffic())
            gathers = (0, 1, 1, (self.users[bucket.number] + 1) * microbatches)[self.stage]
            total["parameters"] += sum([self.gathering(bucket).traffic(index)] * gathers, Traffic())
        for bucket in self.buckets if self.groups > 1 else ():
            total["gradients"] += self.sum_of_groups(self.counts(bucket)[index]).traffic(group)
        return total

    def bytes(self, index: int, state_words: int) -> dict[str, int]:
        """Return the bytes that a rank keeps between steps.   state_words : of the optimizer, for each element."""
        total, own = sum(self.words), sum(self.part(x, index).stop - self.part(x, index).start for x in self.buckets)
        masters = self.dtype.itemsize < self.wide.itemsize
        return {
            "parameters": (own if self.stage == 3 else total) * self.dtype.itemsize,
            "gradients": (own if self.stage > 1 else total) * self.wide.itemsize,
            "optimizer": (own if self.stage else total) * (state_words + masters) * self.wide.itemsize,
        }


def owners_of(words: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Deal parameters of so many words to ranks: the largest first, each to the rank that has the fewest words."""
    loads, owners = [0] * ranks, [0] * len(words)
    for k in sorted(range(len(words)), key=lambda k: -words[k]):
        owners[k] = loads.index(min(loads))
        loads[owners[k]] += words[k]
    return tuple(owners)
