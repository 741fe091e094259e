"""A pipeline as a schedule: what each stage does and sends, how long it waits, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count
from pdgemm.schedules.training.pipeline_orders import Action, pipeline_kind
from pdgemm.schedules.training.pipeline_timeline import Handover, PipelineStep, Timeline, walked
from pdgemm.support.members import remembered
from pdgemm.support.text import counted

Seconds = Mapping[str, Any] | Callable[[int, Action], Any]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule by which the stages of a pipeline work on the microbatches of a step.

    name : "gpipe", "1f1b", "interleaved", "zero_bubble", or one that was registered.
    stages, microbatches : p and m, >= 1.   chunks : v, the blocks of layers of each stage; 1 but with "interleaved".

    Layers are cut into v p blocks; block c p + s is chunk c of stage s.  For stages of equal length:

    | name        | waiting / working             | in flight on stage s                   |
    |-------------|-------------------------------|----------------------------------------|
    | gpipe       | (p-1)/m                       | m                                      |
    | 1f1b        | (p-1)/m                       | min(m, p-s)                            |
    | interleaved | (p-1)/(v m), p divides m      | min(v m, (v+1) p - 2 s - 1) chunks     |
    | zero_bubble | (p-1)/(3 m), m >= p, F = B = W | min(m, p)                              |

    All stages together receive 2 (v p - 1) times the words of all microbatches, where p > 1.
    Gradients of a parameter are added in the order of the microbatches with each of them.
    Raises ArgumentError.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        kind = pipeline_kind(self.name)
        for what in ("stages", "microbatches", "chunks"):
            object.__setattr__(self, what, as_count(getattr(self, what), what, 1))
        if self.chunks > 1 and not kind.chunks:
            raise ArgumentError(f"{self.name} has one chunk of layers on each stage, got chunks={self.chunks}")
        if wrong := kind.lies(self.stages, self.microbatches):
            raise ArgumentError(f"{self.name} {wrong}")

    @property
    def blocks(self) -> int:
        """The number of blocks of layers."""
        return self.stages * self.chunks

    @remembered
    def order(self, stage: int) -> tuple[Action, ...]:
        """Return what a stage does, one after the other."""
        return tuple(pipeline_kind(self.name).order(self.stages, self.microbatches, self.chunks, stage))

    @remembered
    def steps(self, stage: int) -> tuple[PipelineStep, ...]:
        """Return what a stage does, with what each action takes from other blocks and hands to them."""
        return tuple(self._step(stage, action) for action in self.order(stage))

    def _step(self, stage: int, action: Action) -> PipelineStep:
        """Return an action with what it takes and hands over: one block on with "F", one back with "B"."""
        if action.kind == "W":
            return PipelineStep(action, None, None)
        block, on = action.chunk * self.stages + stage, 1 if action.kind == "F" else -1

        def between(source: int, target: int) -> Handover | None:
            if not (0 <= source < self.blocks and 0 <= target < self.blocks):
                return None
            return Handover(action.kind, action.microbatch, target, source % self.stages, target % self.stages)

        return PipelineStep(action, between(block - on, block), between(block, block + on))

    # ---------------------------------------------------------------- time
    @property
    def split(self) -> bool:
        """Do actions of their own compute the gradients of weights?"""
        return any(action.kind == "W" for action in self.order(0))

    def walk(self, seconds: Seconds | None = None) -> Timeline:
        """Return when each stage does what, where each action begins as soon as it can; messages take no time.

        seconds : of each kind of action, {"F": 1, "B": 2}, or a function of (stage, action), for stages of unequal
            length.  Integers and fractions give exact times.  None: 1 and 2, or 1, 1 and 1 with "W".
        Raises ArgumentError where the stages wait for one another for ever.
        """
        table = {"F": 1, "B": 1 if self.split else 2, "W": 1} if seconds is None else seconds
        if not callable(table) and (missing := [x for x in ("F", "B", "W")[: 2 + self.split] if x not in table]):
            raise ArgumentError(f"seconds of each kind of action are needed, and {missing[0]!r} is missing")
        of = table if callable(table) else lambda stage, action: table[action.kind]
        cells = walked([self.steps(stage) for stage in range(self.stages)], of)
        chunks = f", {counted(self.chunks, 'chunk')} each" if self.chunks > 1 else ""
        microbatches = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        title = f"{self.name}: {counted(self.stages, 'stage')}{chunks}, {microbatches}"
        return Timeline(title, cells, tuple(map(self.in_flight, range(self.stages))))

    def bubble(self) -> Fraction:
        """Return the time in which stages wait over the time in which they work, for stages of equal length."""
        return self.walk().bubble

    # ---------------------------------------------------------------- memory
    @remembered
    def in_flight(self, stage: int) -> int:
        """Return the most microbatches (of a chunk) of which a stage has activations at one time."""
        live, most, last = set[tuple[int, int]](), 0, "W" if self.split else "B"
        for kind, microbatch, chunk in self.order(stage):
            if kind == "F":
                live.add((microbatch, chunk))
            elif kind == last:
                live.remove((microbatch, chunk))
            most = max(most, len(live))
        return most

    def number(self, x: Handover) -> int:
        """Return a number that identifies what is handed over, below 2 m v p: microbatch, block and direction."""
        return 2 * (x.microbatch * self.blocks + x.block) + (x.kind == "B")


def layers_of(layers: int, stages: int, chunks: int, stage: int, chunk: int) -> range:
    """Return the layers of a chunk of a stage: of block `chunk * stages + stage`.  The first blocks have one more.

    Raises ArgumentError where there are fewer layers than blocks.
    """
    blocks, block = stages * chunks, chunk * stages + stage
    if layers < blocks:
        raise ArgumentError(
            f"{counted(layers, 'layer')} on {counted(stages, 'stage')} of {counted(chunks, 'chunk')}: each of the "
            f"{blocks} has at least one layer"
        )
    each, more = divmod(layers, blocks)
    return range(first := block * each + min(block, more), first + each + (block < more))
