"""What each pipeline stage keeps and receives in a training step, and how long it waits, by formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from pdgemm.planning.models.home_plan import home_loads
from pdgemm.planning.models.kept_arrays import activation_bytes, score_bytes
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.stage_state import layers_of_stage, state_of_stage
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.schedules.training.home_exchange import HomeLoads


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
    def tokens(self) -> float:
        """Of a microbatch on a rank: microbatch x sequence / cp."""
        return self.layout.microbatch * self.shape.sequence / self.layout.cp

    @cached_property
    def rows(self) -> float:
        """Rows between layers, which are divided along tp with `sequence`."""
        return self.tokens / (self.layout.tp if self.layout.sequence else 1)

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

    def homes(self, stage: int) -> HomeLoads | None:
        """Return what Muon updates on the ranks of a stage, and what is at their homes; None: with AdamW alone."""
        return home_loads(self.shape, self.layout, stage) if self.layout.optimizer == "muon" else None

    # ---------------------------------------------------------------- bytes
    def bytes_of(self, stage: int) -> dict[str, float]:
        """Return the bytes of a rank of a stage by kind, with Muon those of the rank that has the most of each."""
        layout, total = self.layout, Counter[str]()
        for x in state_of_stage(self.shape, layout, stage):
            total.update(x.bytes(layout, self.microbatches))
        layers = layers_of_stage(self.shape, layout, stage) / layout.chunks
        kept = self.in_flight(stage) * layers * activation_bytes(self.shape, layout)
        scores = score_bytes(self.shape, layout) if stage == layout.pp - 1 else 0
        if loads := self.homes(stage):
            total["optimizer"] -= loads.dtype.itemsize * loads.least_updated  # one moment, not two
            total["homes"] = loads.most_bytes
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

        Those of experts where all have equally many tokens; those of homes of the rank that receives the most.
        """
        shape, layout, m = self.shape, self.layout, self.microbatches
        t, again, layers = layout.tp, 2 if layout.recompute == "full" else 1, layers_of_stage(shape, layout, stage)
        row = (t - 1) / t * self.tokens * shape.hidden  # of one all-gather or reduce-scatter
        pairs = 1 if shape.experts else 2  # of linear layers
        tensor = layers * pairs * row * (2 * again + 2 + layout.sequence)
        if stage == 0:  # an embedding, and with `sequence` the gradient of its rows
            tensor += 2 * row
        if stage == layout.pp - 1:  # scores, and 3 words of each token in their cross-entropy
            tensor += (3 if layout.sequence else 2) * row + 2 * (t - 1) / t * 3 * self.tokens
        travels = (layout.ep - 1) / layout.ep * self.rows * shape.topk * shape.hidden if shape.experts else 0
        moved = [x.moved(m, layout.reduce_each) for x in state_of_stage(shape, layout, stage)]
        words = {
            "tensor": m * tensor,
            "pipeline": m * self._handovers(stage) * self.rows * shape.hidden,
            "context": m * layers * (again + 1 + layout.fused) * self.context_words,
            "experts": m * layers * 2 * (again + 1) * travels,
            **{kind: sum(x[kind] for x in moved) for kind in ("gradients", "parameters")},
        }
        if loads := self.homes(stage):
            words["homes"] = int(loads.received.max())
        return {kind: number for kind, number in words.items() if number}

    @cached_property
    def context_words(self) -> float:
        """The words of keys and values that a layer gathers for a microbatch."""
        layout, shape = self.layout, self.shape
        return (layout.cp - 1) / layout.cp * layout.microbatch * shape.sequence * 2 * shape.keys / layout.tp

    def _handovers(self, stage: int) -> int:
        """Return how often a stage receives activations or their gradients for a microbatch."""
        p, blocks = self.layout.pp, self.layout.pp * self.layout.chunks
        own = range(stage, blocks, p)
        return sum((block > 0) + (block < blocks - 1) for block in own) if p > 1 else 0

    @cached_property
    def words(self) -> dict[str, float]:
        """The words of each kind, of the stage that receives the most of it."""
        p, most = self.layout.pp, dict[str, float]()
        for stage in {0, min(1, p - 1), p - 1}:
            for kind, number in self.words_of(stage).items():
                most[kind] = max(number, most.get(kind, 0))
        return most
