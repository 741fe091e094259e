"""The storage of a rank with parameters on several lines of a mesh: what it allocates, and what moves in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives.collective import Collective, sum_of_numbers
from pdgemm.schedules.training.flat_layout import DECISIONS, FlatLayout
from pdgemm.schedules.training.parameter_division import Line

ALL = "pp+tp+cp+dp"  # the line of all ranks


class LineLayout(NamedTuple):
    """The storage of the parameters of one line.   place : the index of the rank on it."""

    line: Line
    layout: FlatLayout
    place: int


@dataclass(frozen=True)
class JointLayout:
    """The storage of the parameters of a rank of a mesh: a `FlatLayout` for each line along which gradients are added.

    lines : those of this rank that have elements, in the order in which all ranks number them.
    every : all lines of parameters of any rank: each adds a squared norm to the numbers on which all ranks decide.
    whole : the layout of the whole parameters of this pipeline stage on one rank, with their type and microbatches.
    ranks, index : of the line `ALL`.
    """

    lines: tuple[LineLayout, ...]
    every: tuple[Line, ...]
    whole: FlatLayout
    ranks: int
    index: int

    def bytes(self, state_words: int | Mapping[str, int]) -> dict[str, int]:
        """Return the bytes that this rank allocates, by kind: the sums of `FlatLayout.bytes`."""
        sizes = [x.layout.bytes(x.place, state_words) for x in self.lines]
        kinds = ("parameters", "gradients", "optimizer", "buffers")
        return {kind: sum(size[kind] for size in sizes) for kind in kinds}

    def decision(self) -> Collective:
        """Return the collective that sums the numbers on which all ranks decide: a squared norm for each line."""
        return sum_of_numbers(DECISIONS + len(self.every) * self.whole.norm_words, self.ranks)

    def step(self) -> dict[str, Traffic]:
        """Return the traffic of this rank in one step, by kind: the sums of `FlatLayout.step`, and one decision."""
        steps = [x.layout.step(x.place) for x in self.lines]
        total = {kind: sum((x[kind] for x in steps), Traffic()) for kind in ("gradients", "parameters")}
        return {**total, "decisions": self.decision().traffic(self.index)}

    def updates(self) -> Traffic:
        """Return the traffic of parameters after an update, a part of `step`: that of stages 1 and 2."""
        return sum((x.layout.step(x.place)["parameters"] for x in self.lines if x.layout.stage in (1, 2)), Traffic())
