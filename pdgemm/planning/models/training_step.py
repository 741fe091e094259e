"""What each pipeline stage keeps and receives in a training step, and how long it waits, by formulas."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from pdgemm.planning.models.model_layers import Layers, TrainingLayout, sums_by_name
from pdgemm.planning.models.model_shape import ModelLayers, ModelShape
from pdgemm.schedules.training.flat_shards import FlatShards
from pdgemm.schedules.training.pipeline_orders import pipeline_kind
from pdgemm.support.members import remembered


class LineState(NamedTuple):
    """Parameters of a rank whose gradients are added along one line, see `FlatShards`.

    words : of the rank.   ranks : of the line.   zero : what they divide.   users : of each bucket.
    """

    words: int
    ranks: int
    zero: int
    users: int

    def moved(self, microbatches: int) -> dict[str, float]:
        """Return the words that a rank receives in a step where the ranks divide them evenly: `FlatShards.traffic`."""
        part, m = (self.ranks - 1) / self.ranks * self.words, microbatches
        gathers = (0, 1, 1, (self.users + 1) * m)[self.zero]
        return {"gradients": (2, 1, m, m)[self.zero] * part, "parameters": gathers * part}

    @lru_cache(maxsize=1024)  # noqa: B019  of layouts that divide what is computed, and not what is kept
    def bytes(self, element: np.dtype) -> dict[str, int]:
        """Return the bytes that a rank keeps, by kind, with the two moments of Adam; not to be changed."""
        shards = FlatShards(("all",), (self.words,), (0,), (self.users,), self.ranks, self.zero, element)
        return shards.bytes(self.ranks - 1, 2)


@dataclass(frozen=True)
class TrainingStep:
    """A training step of a model in a layout.   No MPI, no arrays.

    batch : samples of a step.   Sizes of stages are those of a rank that has the most.
    """

    shape: ModelShape
    layout: TrainingLayout
    batch: int

    @cached_property
    def microbatches(self) -> int:
        """Of each rank in a step."""
        return self.layout.microbatches(self.batch)

    @cached_property
    def layers(self) -> ModelLayers:
        """The layers on a rank."""
        return self.shape.layers_in(self.layout)

    def blocks_of(self, stage: int) -> int:
        """Return the number of blocks, layers of the shape, of a stage, as `layers_of` a pipeline deals them out."""
        each, more = divmod(self.shape.layers, self.layout.pp * self.layout.chunks)
        return self.layout.chunks * each + len(range(stage, more, self.layout.pp))

    @remembered
    def _on(self, stage: int) -> list[tuple[Layers, int]]:
        """Return the layers of a stage, and how often it has them."""
        first, block, last = self.layers
        return [(first, stage == 0), (block, self.blocks_of(stage)), (last, stage == self.layout.pp - 1)]

    def lies(self) -> str:
        """Return why the layout is none for this model, or an empty text."""
        layout, shape, blocks = self.layout, self.shape, self.layout.pp * self.layout.chunks
        if not self.microbatches:
            return f"dp {layout.dp} x microbatch {layout.microbatch} does not divide the {self.batch} samples of a step"
        if shape.heads % layout.tp or shape.kv_heads % layout.tp:
            return f"tp {layout.tp} does not divide {shape.heads} heads and {shape.kv_heads} of keys and values"
        if blocks > shape.layers:
            return f"{blocks} blocks of layers are more than {shape.layers} layers"
        if wrong := pipeline_kind(layout.schedule).lies(layout.pp, self.microbatches):
            return f"{layout.schedule} {wrong}"
        if 2 * layout.cp > shape.sequence:
            return f"cp {layout.cp} has fewer than 2 positions a rank"
        if layout.ep > 1 and (not shape.experts or shape.experts % layout.ep):
            return f"ep {layout.ep} does not divide {shape.experts} experts"
        return ""

    # ---------------------------------------------------------------- pipeline
    @cached_property
    def bubble(self) -> Fraction:
        """The time in which stages wait over the time in which they work, for stages of equal length."""
        p, m = self.layout.pp, self.microbatches
        work = {"interleaved": self.layout.chunks * m, "zero_bubble": 3 * m}.get(self.layout.schedule, m)
        return Fraction(p - 1, work)

    def in_flight(self, stage: int) -> int:
        """Return the most microbatches of a block of layers whose activations a stage keeps at one time."""
        p, m, v, name = self.layout.pp, self.microbatches, self.layout.chunks, self.layout.schedule
        if name == "gpipe":
            return m
        if name == "interleaved":
            return min(v * m, (v + 1) * p - 2 * stage - 1)
        return min(m, p if name == "zero_bubble" else p - stage)

    # ---------------------------------------------------------------- bytes
    @remembered
    def state_of(self, stage: int) -> list[LineState]:
        """Return the parameters of a rank of a stage, by the lines along which their gradients are added."""
        layout, own = self.layout, dict[tuple[int, int, int], int]()
        copies, t, zero = layout.copies, layout.tp, layout.zero
        lines = {  # of a placement, and the ranks that divide the parameters
            "divided": ((copies, zero, 1), t),
            "rows": ((copies * (t if layout.sequence else 1), zero, 1), 1),
            "experts": ((copies // layout.ep * t, zero, 1), layout.ep),
            "tied": ((copies, zero, 2) if layout.pp == 1 else (2 * copies, min(1, zero), 1), t),
        }
        words = sums_by_name({place: n * number for place, n in x.parameters.items()} for x, number in self._on(stage))
        for place, number in words.items():
            line, ranks = lines[place]
            own[line] = own.get(line, 0) + -(-number // ranks)
        return [LineState(number, *line) for line, number in own.items() if number]

    def owned_words(self, stage: int) -> float:
        """Return the words of a rank of the matrices that Muon updates: of blocks, divided along tp and by ZeRO."""
        layout, words = self.layout, self.layers.block.matrix_words if self.layout.optimizer == "muon" else 0
        return self.blocks_of(stage) * words / layout.tp / (layout.copies if layout.zero else 1)

    def bytes_of(self, stage: int) -> dict[str, float]:
        """Return the bytes of a rank of a stage by kind."""
        total = sums_by_name(x.bytes(self.layout.element) for x in self.state_of(stage))
        owned = self.layout.wide * self.owned_words(stage)  # Muon keeps one moment
        if self.layout.tp > 1:  # owners have whole weights in place of the other one, and whole gradients
            total["gradients"] += owned
        else:
            total["optimizer"] -= owned
        passes, (_, block, last), m = self.in_flight(stage), self.layers, self.microbatches
        # microbatches that wait for gradients of weights alone; one more at the end of a backward pass
        waiting, e = (min(stage, m - 1), self.layout.itemsize) if self.layout.schedule == "zero_bubble" else (0, 0)
        kept = (passes - waiting - 1) * block.kept + waiting * block.delayed * e + max(block.kept, block.delayed * e)
        kept, scores = self.blocks_of(stage) / self.layout.chunks * kept, 0.0
        if stage == self.layout.pp - 1:
            losses = m if self.layout.schedule == "gpipe" else 1
            scores = losses * last.layers[-1].kept
            ends = losses * last.kept - scores if self.layout.autograd else 0  # published sizes are without them
            kept += ends + waiting * last.delayed * e
        return {**total, "activations": kept, "scores": scores}

    @cached_property
    def bytes(self) -> dict[str, float]:
        """The bytes of a rank by kind, of the stage that has the most, the first one or the last."""
        return max((self.bytes_of(stage) for stage in {0, self.layout.pp - 1}), key=lambda x: sum(x.values()))

    @cached_property
    def all_bytes(self) -> float:
        return sum(self.bytes.values())

    # ---------------------------------------------------------------- words
    def words_of(self, stage: int) -> dict[str, float]:
        """Return the words that a rank of a stage receives in a step, by kind, where all sizes divide.

        Those of experts where all have equally many tokens.  Muon's owners receive the parts of their matrices from
        other ranks along tp, and each rank receives as many updated parts.
        """
        m, t = self.microbatches, self.layout.tp
        handed = self._handovers(stage) * self.layout.rows(self.shape.sequence) * self.shape.hidden
        moved = [{kind: m * number * n for kind, n in x.words.items()} for x, number in self._on(stage)]
        moved += [{"pipeline": m * handed, "owners": 2 * (t - 1) / t * self.owned_words(stage)}]
        words = sums_by_name(moved + [x.moved(m) for x in self.state_of(stage)])
        return {kind: number for kind, number in words.items() if number}

    def _handovers(self, stage: int) -> int:
        """Return how often a stage receives activations or their gradients for a microbatch."""
        p, blocks = self.layout.pp, self.layout.pp * self.layout.chunks
        own = range(stage, blocks, p)
        return sum((block > 0) + (block < blocks - 1) for block in own) if p > 1 else 0

    @cached_property
    def words(self) -> dict[str, float]:
        """The words of each kind, of the stage that receives the most of it."""
        stages = [self.words_of(stage) for stage in {0, min(1, self.layout.pp - 1), self.layout.pp - 1}]
        return {kind: max(x.get(kind, 0) for x in stages) for kind in chain(*stages)}
