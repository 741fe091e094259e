"""The orders in which the stages of a pipeline work, each as in its paper, and their registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdgemm.errors import ArgumentError

ActionKind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """What a stage does with a microbatch in one of its chunks of layers.

    kind : "F": the forward pass.  "B": the backward pass; where the schedule has "W" as well, of the gradient of the
        input alone, and "W" computes the gradients of the weights.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0


StageOrder = Callable[[int, int, int, int], list[Action]]  # of stages, microbatches, chunks, and the stage


@dataclass(frozen=True)
class PipelineKind:
    """An entry of the registry.

    order  : a function of (stages, microbatches, chunks, stage) that returns what a stage does, one after the other.
    chunks : may a stage have several chunks of layers?
    lies   : a function of (stages, microbatches) that says why the schedule does not fit; "" where it does.
    """

    order: StageOrder
    chunks: bool = False
    lies: Callable[[int, int], str] = lambda stages, microbatches: ""


def gpipe(stages: int, microbatches: int, chunks: int, stage: int) -> list[Action]:
    """Return all forward passes, then all backward passes.

    The backward passes begin with microbatch 0, so that gradients are added in the order of all other schedules.
    Huang et al., GPipe, NeurIPS 2019.
    """
    return [Action(kind, i) for kind in ("F", "B") for i in range(microbatches)]


def one_f_one_b(stages: int, microbatches: int, chunks: int, stage: int) -> list[Action]:
    """Return forward passes until the first gradient can come back, then one backward and one forward pass in turns.

    Narayanan et al., PipeDream, SOSP 2019; with a flush after each step: Narayanan et al., SC 2021.
    """
    forward, backward = ([Action(kind, i) for i in range(microbatches)] for kind in ("F", "B"))
    return _in_turns(min(stages - stage, microbatches), forward, backward)


def interleaved(stages: int, microbatches: int, chunks: int, stage: int) -> list[Action]:
    """Return one backward and one forward pass in turns, of several chunks of layers a stage.

    Microbatches go through a chunk in groups of as many as there are stages, and the group then goes on in the next
    chunk.  Narayanan et al., SC 2021, section 2.2, with the warm-up of Megatron-LM.
    """
    group, total = stages * chunks, microbatches * chunks

    def action(kind: ActionKind, number: int) -> Action:
        chunk = number % group // stages
        microbatch = number // group * stages + number % stages
        return Action(kind, microbatch, chunk if kind == "F" else chunks - 1 - chunk)

    ahead = min(2 * (stages - 1 - stage) + (chunks - 1) * stages + 1, total)
    return _in_turns(ahead, [action("F", at) for at in range(total)], [action("B", at) for at in range(total)])


def zero_bubble(stages: int, microbatches: int, chunks: int, stage: int) -> list[Action]:
    """Return one backward and one forward pass in turns, and gradients of weights `stage` microbatches later.

    A stage sends the gradient of its input as soon as it has it; what it does later fills the end, where it would wait
    otherwise.  As many microbatches are in flight on each stage as on the first one of "1f1b".
    Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024: ZB-H1.
    """
    ahead, order = min(stages - stage, microbatches), list[Action]()
    order += [Action("F", i) for i in range(ahead)]
    for i in range(microbatches):
        order.append(Action("B", i))
        order += [Action("W", i - stage)] if i >= stage else []
        order += [Action("F", i + ahead)] if i + ahead < microbatches else []
    return order + [Action("W", i) for i in range(max(0, microbatches - stage), microbatches)]


def _in_turns(ahead: int, forward: list[Action], backward: list[Action]) -> list[Action]:
    """Return `ahead` forward passes, then a backward and a forward pass in turns, then what is left."""
    order = forward[:ahead]
    for at, action in enumerate(backward):
        order += [action, *forward[ahead + at : ahead + at + 1]]
    return order


def _not_divided(stages: int, microbatches: int) -> str:
    if not microbatches % stages:
        return ""
    below = microbatches // stages * stages
    nearest = f"{below} or {below + stages}" if below else f"{stages}"
    return (
        f"takes microbatches that its stages divide, here {stages}, {2 * stages}, {3 * stages}, ...; got "
        f"{microbatches}, and the nearest is {nearest}"
    )


PIPELINES = {
    "gpipe": PipelineKind(gpipe),
    "1f1b": PipelineKind(one_f_one_b),
    "interleaved": PipelineKind(interleaved, chunks=True, lies=_not_divided),
    "zero_bubble": PipelineKind(zero_bubble),
}


def pipeline_kind(name: str) -> PipelineKind:
    """Return a schedule of pipelines by its name.  Raises ArgumentError, with all names."""
    if name not in PIPELINES:
        raise ArgumentError(f"schedules of pipelines are {', '.join(PIPELINES)}; got {name!r}")
    return PIPELINES[name]


def register_pipeline(name: str, kind: PipelineKind) -> None:
    """Add a schedule of pipelines."""
    PIPELINES[name] = kind
