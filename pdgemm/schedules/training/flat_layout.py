"""Parameters in flat storage: buckets in the order of the backward pass, each cut into a part for each rank.

Rajbhandari, Rasley, Ruwase & He, ZeRO: Memory optimizations toward training trillion parameter models, SC 2020;
Li et al., PyTorch distributed: Experiences on accelerating data parallel training, VLDB 13(12), 2020.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives.collective import Collective, sum_of_numbers
from pdgemm.schedules.mover_registry import RING, SHARED
from pdgemm.support.remembered import remembered

Kind = Literal["parameters", "gradients", "optimizer", "buffers", "decisions"]
FLIGHT = 2  # buckets of gradients, and of parameters, that are whole at one time where only parts are kept
# numbers that all ranks reduce in a step beside the squared norm of the gradients: how many ranks overflow, and two
# that are 0 where all ranks take the same step, and where copies of gradients along tp are equal
DECISIONS = 3
DIGITS = 66  # numbers of 32 bits that are an exact sum of squares, of 2^64 ones between 2^-1074 and 2^960


class Parameter(NamedTuple):
    """A parameter of a model.   chunk : the block of layers that has it, of those of a pipeline stage."""

    name: str
    shape: tuple[int, ...]
    chunk: int = 0

    @property
    def words(self) -> int:
        return prod(self.shape)


class Bucket(NamedTuple):
    """Neighbours in flat storage, of one chunk, whose gradients are reduced together: elements `start` to `stop`."""

    number: int
    start: int
    stop: int
    names: tuple[str, ...]
    chunk: int = 0

    @property
    def words(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The storage of a model's parameters, their gradients and the optimizer's state on the ranks of a line.

    parameters : in the order of the forward pass, those of a chunk of layers as neighbours.
    dtype  : of the parameters.  Gradients, master weights and the state of the optimizer are float64 where it is
        float64, else float32; master weights are kept where the parameters are of 16 bits.
    shards : ranks of the line.
    stage  : what is divided among the ranks: 0 nothing, 1 the state of the optimizer, 2 gradients as well, 3 parameters
        as well (ZeRO).
    bucket_words : words of the largest bucket, unless it has one parameter alone.
    microbatches : whose gradients each rank adds in a step before they are reduced.
    reduce_each : the gradients of each microbatch are reduced: this moves `microbatches` times as much, and with stages
        2 and 3 no gradients are kept whole.
    tree   : the gradients of microbatches are added as a binary tree, and those of the ranks, too.
    uses   : gradients of each parameter that are reduced apart, and then added; those of more than one are whole.
    mover, reduce_by, gather_by, node : of the collectives, see `Collective`.

    Flat storage has the parameters in the order of the backward pass, the last one of the model first.  Part j of a
    bucket of N words begins at word floor(N j / shards), so that parts for twice as many ranks are parts of these.

    ::

        flat storage   w3 b3 | w2 b2 | w1 b1        buckets 0, 1, 2: in this order gradients are ready
        of rank 0      --      --      --
        of rank 1        ---     ---     ---        its part of each bucket

    Gradients are whole on each rank with stages 0 and 1, and where those of several microbatches are added first.
    """

    parameters: tuple[Parameter, ...]
    dtype: np.dtype
    shards: int = 1
    stage: int = 0
    bucket_words: int = 1 << 22
    microbatches: int = 1
    reduce_each: bool = False
    tree: bool = False
    uses: int = 1
    mover: str = RING.name
    reduce_by: str = "ring"
    gather_by: str = "ring"
    node: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [x.name for x in self.parameters]
        if not sum(x.words for x in self.parameters):
            raise ArgumentError("a model has at least one parameter with an element")
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise ArgumentError(f"two parameters have the name {twice[0]!r}")
        if self.stage not in range(4):
            raise ArgumentError(f"stage is 0, 1, 2 or 3, got {self.stage!r}")
        if self.tree and self.microbatches & (self.microbatches - 1):
            raise ArgumentError(f"a binary tree adds a power of two of microbatches, got {self.microbatches}")
        if self.reduce_each and (self.tree or self.stage < 2):
            raise ArgumentError("the gradients of each microbatch are reduced with stages 2 and 3, and not as a tree")

    # ---------------------------------------------------------------- what lies where
    @cached_property
    def words(self) -> int:
        """The words of all parameters, N."""
        return sum(x.words for x in self.parameters)

    @property
    def wide(self) -> np.dtype:
        """The type of gradients, master weights and the state of the optimizer."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @cached_property
    def places(self) -> dict[str, slice]:
        """The place of each parameter in flat storage."""
        at, places = 0, dict[str, slice]()
        for x in reversed(self.parameters):
            places[x.name] = slice(at, at := at + x.words)
        return places

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which their gradients are complete."""
        buckets, names, start, chunk = list[Bucket](), list[str](), 0, self.parameters[-1].chunk
        for x in reversed(self.parameters):
            place = self.places[x.name]
            if names and (x.chunk != chunk or place.stop - start > self.bucket_words):
                buckets.append(Bucket(len(buckets), start, place.start, tuple(names), chunk))
                names, start = [], place.start
            names.append(x.name)
            chunk = x.chunk
        return (*buckets, Bucket(len(buckets), start, self.words, tuple(names), chunk))

    @cached_property
    def bucket_of(self) -> dict[str, Bucket]:
        """The bucket of each parameter."""
        return {name: bucket for bucket in self.buckets for name in bucket.names}

    def part(self, bucket: Bucket, index: int) -> slice:
        """Return the part of a bucket, in flat storage, that a rank of the line owns."""
        cuts = (bucket.start + bucket.words * at // self.shards for at in (index, index + 1))
        return slice(*cuts)

    def owned(self, index: int) -> int:
        """Return the words that a rank of the line owns."""
        return self._offsets(index)[-1]

    @remembered
    def _offsets(self, index: int) -> tuple[int, ...]:
        parts = (self.part(bucket, index) for bucket in self.buckets)
        return tuple(accumulate((part.stop - part.start for part in parts), initial=0))

    def kept(self, bucket: Bucket, index: int) -> slice:
        """Return the place of a rank's part of a bucket where it keeps its own parts alone, one after the other."""
        return slice(*self._offsets(index)[bucket.number : bucket.number + 2])

    def overlap(self, name: str, span: slice) -> tuple[slice, slice]:
        """Return the elements of a flat parameter that are in a span of flat storage, and their places in the span."""
        place = self.places[name]
        start = max(place.start, span.start)
        stop = max(start, min(place.stop, span.stop))
        return slice(start - place.start, stop - place.start), slice(start - span.start, stop - span.start)

    def in_bucket(self, name: str) -> tuple[int, int, int]:
        """Return the words of the bucket of a parameter, its first one of these, and the one behind its last one."""
        place, bucket = self.places[name], self.bucket_of[name]
        return bucket.words, place.start - bucket.start, place.stop - bucket.start

    # ---------------------------------------------------------------- what is allocated
    @property
    def whole_gradients(self) -> bool:
        """Does each rank keep the gradients of all parameters?"""
        return self.stage < 2 or (self.microbatches > 1 and not self.reduce_each)

    @property
    def in_place(self) -> bool:
        """Are parts of gradients and parameters read in place?"""
        return self.mover == SHARED.name

    @property
    def levels(self) -> int:
        """The gradients of all parameters that a rank keeps at one time for each use: partial sums of a tree."""
        return self.microbatches.bit_length() if self.tree else 1

    @property
    def times(self) -> int:
        """How often each gradient becomes ready in a step: in each microbatch once for each use."""
        return self.microbatches * self.uses

    @property
    def masters(self) -> bool:
        """Are master weights kept?"""
        return self.dtype.itemsize < self.wide.itemsize

    def bytes(self, index: int, state_words: int | Mapping[str, int]) -> dict[str, int]:
        """Return the bytes that a rank of the line allocates, by kind.

        state_words : of the optimizer for each parameter, 2 for AdamW; or by name, where several rules update them.

        For N words, of which n = N/shards about are owned, with P bytes a parameter and W a wide number:
        parameters : N P; with stage 3 n P.
        gradients  : N W, times the levels of a tree, times the uses; n W where they are not whole.
        optimizer  : n W (state_words + 1 for master weights); N instead of n with stage 0.
        buffers    : two buckets of gradients, where these are not whole, and two of parameters with stage 3.
        """
        own, largest = self.owned(index), max(bucket.words for bucket in self.buckets)
        narrow, wide = self.dtype.itemsize, self.wide.itemsize
        buffers = FLIGHT * largest * (wide * (not self.whole_gradients) + narrow * (self.stage == 3))
        return {
            "parameters": (own if self.stage == 3 else self.words) * narrow,
            "gradients": self.words * wide * self.levels * self.uses if self.whole_gradients else own * wide,
            "optimizer": self._state(index, state_words) * wide,
            "buffers": buffers,
        }

    def _state(self, index: int, state_words: int | Mapping[str, int]) -> int:
        """Return the words of the optimizer's state and of master weights on a rank."""
        if isinstance(state_words, int):
            return (self.owned(index) if self.stage else self.words) * (state_words + self.masters)
        words = 0
        for bucket in self.buckets:
            span = self.part(bucket, index) if self.stage else slice(bucket.start, bucket.stop)
            for name in bucket.names:
                _, place = self.overlap(name, span)
                words += (place.stop - place.start) * (state_words[name] + self.masters)
        return words

    # ---------------------------------------------------------------- what moves
    @remembered
    def reduction(self, bucket: Bucket) -> Collective:
        """Return the collective that sums the gradients of a bucket, of all parts or of the own part."""
        operation = "reduce_scatter" if self.stage else "all_reduce"
        return self._collective(operation, self.reduce_by, bucket, self.wide)

    @remembered
    def gathering(self, bucket: Bucket) -> Collective:
        """Return the collective that gathers the parts of the parameters of a bucket."""
        return self._collective("all_gather", self.gather_by, bucket, self.dtype)

    def _collective(self, operation: str, algorithm: str, bucket: Bucket, dtype: np.dtype) -> Collective:
        spans = (self.part(bucket, index) for index in range(self.shards))
        counts = tuple(span.stop - span.start for span in spans)
        return Collective(operation, algorithm, tuple(range(self.shards)), counts, dtype, self.node, mover=self.mover)

    @property
    def norm_words(self) -> int:
        """The float64 numbers that are the sum of the squares of the gradients; with a tree it is exact."""
        return DIGITS if self.tree else 1

    def decision(self) -> Collective:
        """Return the collective that sums a few float64 numbers, on which all ranks decide."""
        return sum_of_numbers(DECISIONS + self.norm_words, self.shards)

    @property
    def gathers_late(self) -> bool:
        """Do updated parameters come in while the next forward pass goes on?

        Only those that are sent, and by an algorithm of one step: its messages need nothing from a rank that waits
        outside of this package.
        """
        return self.stage in (1, 2) and not self.in_place and self.gather_by == "pairwise"

    @property
    def gathers(self) -> int:
        """How often a step gathers a bucket: after the update; with stage 3 in the passes of each microbatch."""
        return (0, 1, 1, 2 * self.microbatches)[self.stage]

    def step(self, index: int) -> dict[str, Traffic]:
        """Return the traffic of a rank of the line in one step, by kind; the number of samples is not part of it.

        Each rank receives, for N words that the ranks can divide evenly and d = shards:
        gradients  : (d-1)/d N for each use, with stage 0 twice as much, with `reduce_each` once for each microbatch.
        parameters : (d-1)/d N with stages 1 and 2; with stage 3 twice as much for each microbatch.
        """
        gradients, parameters = Traffic(), Traffic()
        for bucket in self.buckets:
            for _ in range(self.microbatches if self.reduce_each else self.uses):
                gradients += self.reduction(bucket).traffic(index)
            for _ in range(self.gathers):
                parameters += self.gathering(bucket).traffic(index)
        return {"gradients": gradients, "parameters": parameters, "decisions": self.decision().traffic(index)}


def updated_elements(place: tuple[int, int, int], shards: int, stage: int) -> np.ndarray:
    """Return the elements of a parameter that each rank of a line updates: its part, with stage 0 all.

    place : `FlatLayout.in_bucket`.
    """
    words, start, stop = place
    if not stage:
        return np.full(shards, stop - start)
    cuts = words * np.arange(shards + 1) // shards
    return np.diff(cuts.clip(start, stop))
