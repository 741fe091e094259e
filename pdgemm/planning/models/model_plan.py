"""The plan of a training step on a machine: bytes, words, seconds, and what follows for a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.step_seconds import StepSeconds
from pdgemm.planning.models.training_step import TrainingStep


@dataclass(frozen=True)
class ModelPlan(TrainingStep):
    """A training step of a model in a layout on a machine.   No MPI, no arrays."""

    machine: Machine

    @cached_property
    def links(self) -> dict[str, str]:
        """Where the words of each kind travel: over links inside a node, or its network cards."""
        return {kind: self.times.link(kind) for kind in self.words}

    # ---------------------------------------------------------------- seconds
    @cached_property
    def times(self) -> StepSeconds:
        return StepSeconds(self, self.machine)

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
        return self._share(self.shape.flops(self.step_tokens, self.layout.recompute))

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds

    @cached_property
    def refused(self) -> str:
        """Why this layout cannot be run, and by how much; "" where it can."""
        if why := self.lies():
            return why
        if self.machine.memory and self.all_bytes > self.machine.memory:
            over = self.all_bytes / self.machine.memory - 1
            return f"{self.all_bytes / 1e9:.1f} GB, {100 * over:.2g}% too much"
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
