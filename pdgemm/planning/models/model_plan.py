"""The plan of a training step: bytes and words of each pipeline stage, seconds, and what follows for a whole run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.kept_arrays import activation_bytes, score_bytes
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.stage_state import layers_of_stage, state_of_stage
from pdgemm.planning.models.step_seconds import NETWORK, NODE, StepSeconds
from pdgemm.planning.models.training_layout import TrainingLayout

__all__ = ["NETWORK", "NODE", "ModelPlan"]


@dataclass(frozen=True)
class ModelPlan:
    """A training step of a model in a layout on a machine.   No MPI, no arrays.

    batch : samples of a step.   Sizes of stages are those of a rank that has the most.
    """

    shape: ModelShape
    layout: TrainingLayout
    batch: int
    machine: Machine

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
        if v > 1:
            return min(v * m, (v + 1) * p - 2 * stage - 1)
        return min(m, p if name == "zero_bubble" else p - stage)

    # ---------------------------------------------------------------- bytes
    def bytes_of(self, stage: int) -> dict[str, float]:
        """Return the bytes of a rank of a stage by kind."""
        layout, total = self.layout, Counter[str]()
        for x in state_of_stage(self.shape, layout, stage):
            total.update(x.bytes(layout, self.microbatches))
        layers = layers_of_stage(self.shape, layout, stage) / layout.chunks
        kept = self.in_flight(stage) * layers * activation_bytes(self.shape, layout)
        scores = score_bytes(self.shape, layout) if stage == layout.pp - 1 else 0
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

        Those of experts where all have equally many tokens.
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

    @cached_property
    def links(self) -> dict[str, str]:
        """Where the words of each kind travel: over links inside a node, or its network cards."""
        return {kind: self.times.link(kind) for kind in self.words}

    # ---------------------------------------------------------------- seconds
    @cached_property
    def times(self) -> StepSeconds:
        return StepSeconds(self)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by part, on the slowest stage."""
        return self.times.of_step()

    @cached_property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    # ---------------------------------------------------------------- figures
    @cached_property
    def step_tokens(self) -> int:
        return self.batch * self.shape.sequence

    def _share(self, flops: float) -> float:
        peak = self.machine.peak or max(
            self.machine.gamma.get(self.layout.dtype, self.machine.gamma["float32"]).values()
        )
        return flops / (self.step_seconds * self.layout.ranks * peak)

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own flops take."""
        return self._share(self.shape.flops(self.step_tokens))

    @property
    def hfu(self) -> float:
        """The share of the peak that all flops take, also those that are computed again."""
        return self._share(self.shape.hardware_flops(self.step_tokens, self.layout.recompute))

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds

    @cached_property
    def refused(self) -> str:
        """Why this layout cannot be run, and by how much; "" where it can."""
        if why := self.layout.lies(self.shape, self.batch):
            return why
        if self.machine.memory and self.all_bytes > self.machine.memory:
            return f"{self.all_bytes / 1e9:.1f} GB, {self.all_bytes / self.machine.memory:.2f} of a rank's memory"
        return ""

    def run(self, tokens: int | None, price: float | None) -> dict[str, float]:
        """Return the days and rank-hours of a run of so many tokens, and what a million of them cost.

        price : of a rank for an hour.
        """
        figures, hours = dict[str, float](), self.layout.ranks / 3600 / self.tokens_per_second
        if tokens:
            figures |= {"days": tokens / self.tokens_per_second / 86400, "rank_hours": tokens * hours}
        if price is not None:
            figures["cost_of_a_million_tokens"] = price * 1e6 * hours
        return figures

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        return {
            "layout": str(self.layout), "refused": self.refused, "bytes": self.bytes, "words": self.words,
            "links": self.links, "bubble": float(self.bubble), "seconds": self.seconds, "mfu": self.mfu,
            "hfu": self.hfu, "tokens_per_second": self.tokens_per_second,
        }  # fmt: skip
