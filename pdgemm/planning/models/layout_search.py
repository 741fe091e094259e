"""The layouts of a model on some ranks: which fit, which are fastest, and why the others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from operator import attrgetter

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import CUDA, Machine
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import Recompute, TrainingLayout
from pdgemm.schedules.training.mesh_shape import MeshShape

AGAIN: tuple[Recompute, ...] = ("none", "selective", "full")  # each takes longer than the one before, and keeps less
_ORDER = attrgetter("step_seconds", "all_bytes")  # of plans, the second where the first are equal
_LONG = 8192  # positions from which they are divided along cp
_MICROBATCHES = (1, 2, 4, 8, 16)  # samples of a microbatch that are tried


@dataclass(frozen=True)
class LayoutSearch:
    """All layouts of a model on `ranks` ranks.

    batch : samples of a step.
    recompute : what may be computed again, from the least to the most; the least that fits is.
    zero  : the stages of ZeRO; none: those that help.
    fixed : a layout whose `fused`, `autograd`, `sequence`, `dropout`, `apart`, `dtype`, `optimizer` and `muon_steps`
        all layouts have.

    Raises ArgumentError.
    """

    shape: ModelShape
    batch: int
    ranks: int
    machine: Machine
    recompute: tuple[Recompute, ...] = AGAIN
    zero: tuple[int, ...] = ()
    fixed: TrainingLayout = field(default_factory=TrainingLayout)

    def __post_init__(self) -> None:
        if not self.recompute or (*self.recompute,) != tuple(x for x in AGAIN if x in self.recompute):
            raise ArgumentError(f"recompute is some of {', '.join(AGAIN)}, in this order, got {self.recompute!r}")

    def meshes(self) -> Iterator[TrainingLayout]:
        """Yield the meshes that the model can be divided on."""
        shape, ranks = self.shape, self.ranks
        for tp in _divisors(ranks):
            if shape.kv_heads % tp:
                continue
            for pp in (x for x in _divisors(ranks // tp) if x <= shape.layers):
                for cp in _divisors(ranks // tp // pp) if shape.sequence >= _LONG else [1]:
                    dp = ranks // tp // pp // cp
                    if 2 * cp > shape.sequence or self.batch % dp:
                        continue
                    for ep in (x for x in _divisors(dp) if not shape.experts % x) if shape.experts else [1]:
                        yield replace(self.fixed, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)

    def runs(self, mesh: TrainingLayout) -> Iterator[TrainingLayout]:
        """Yield the microbatches and the blocks of layers of a mesh."""
        samples = self.batch // mesh.dp
        for microbatch in (x for x in _MICROBATCHES if not samples % x):
            yield (one := replace(mesh, microbatch=microbatch))
            if mesh.pp > 1 and not samples // microbatch % mesh.pp and not self.shape.layers % mesh.pp:
                for chunks in _divisors(self.shape.layers // mesh.pp)[1:]:
                    yield replace(one, chunks=chunks, schedule="interleaved")

    def plans(self) -> Iterator[ModelPlan]:
        """Yield a plan for each run and stage of ZeRO that helps: with the least recomputation that fits, or the most.

        Stage 1 keeps less than 0 and moves no more, and so does 2 where there is one microbatch; but where gradients
        are reduced behind the backward pass, 0 hides all of its words, and 1 half of them.
        """
        for mesh in self.meshes():
            for run in self.runs(mesh):
                whole = (0,) if run.copies == 1 or (run.pp == 1 and self.machine.device == CUDA) else ()
                divided = (1, 2, 3)[run.microbatches(self.batch) == 1 :] if run.copies > 1 else ()
                for zero in self.zero or whole + divided:
                    yield self._again(run, zero)

    def _again(self, run: TrainingLayout, zero: int) -> ModelPlan:
        """Return a plan with the least recomputation that fits, or with the most."""
        for recompute in self.recompute:
            layout = replace(run, zero=zero, recompute=recompute)
            plan = ModelPlan(self.shape, layout, self.batch, self.machine)
            if not plan.refused:
                break
        return plan

    def best(self, number: int = 10) -> LayoutChoice:
        """Return the fastest layouts, one of each mesh, and what is refused.

        Raises ArgumentError where the samples of a step fit no mesh.
        """
        fastest, fitting, refused, least = dict[MeshShape, ModelPlan](), 0, 0, None
        for plan in self.plans():
            if not plan.refused:
                fitting += 1
                mesh = plan.layout.mesh
                fastest[mesh] = min(plan, fastest.get(mesh, plan), key=_ORDER)
                continue
            refused += 1
            if least is None or plan.all_bytes < least.all_bytes:
                least = plan
        if not fitting and least is None:
            possible = [dp for dp in range(1, self.ranks + 1) if not self.ranks % dp and not self.batch % dp]
            raise ArgumentError(
                f"no mesh of {self.ranks} ranks fits {self.shape.layers} layers of {self.shape.heads} heads and "
                f"{self.batch} samples of a step, which dp divides: dp may be {', '.join(map(str, possible))}"
            )
        return LayoutChoice(nsmallest(number, fastest.values(), key=_ORDER), fitting, refused, least)


@dataclass(frozen=True)
class LayoutChoice:
    """The fastest plans; how many layouts fit and do not; and of these the one that needs the least memory."""

    best: list[ModelPlan]
    fitting: int
    refused: int
    nearest: ModelPlan | None


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [x for x in range(1, int(number**0.5) + 1) if not number % x]
    return small + [number // x for x in reversed(small) if x * x != number]
