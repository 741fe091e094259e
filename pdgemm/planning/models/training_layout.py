"""A layout: how a transformer is divided among ranks, and how a step is run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.blas.orthogonal_stacks import STEPS
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.schedules.training.mesh_shape import MeshShape
from pdgemm.schedules.training.pipeline_orders import pipeline_kind

Recompute = Literal["none", "selective", "full"]
Optimizer = Literal["adamw", "muon"]
_SHORT = {"dp", "tp", "pp", "cp", "ep", "zero", "microbatch", "chunks", "recompute", "schedule", "reduce_each"}


@dataclass(frozen=True)
class TrainingLayout:
    """How a step is divided.

    dp, tp, pp, cp, ep : the sizes of a `MeshShape`: samples, matrices, layers, positions and experts.
    zero : what ranks along dp divide: 0 nothing, 1 the optimizer's state, 2 gradients as well, 3 parameters as well.
    microbatch : samples of one pass.   chunks : blocks of layers of a stage, more than one with "interleaved" alone.
    schedule : of the pipeline, see `PipelineSchedule`.
    reduce_each : with stages 2 and 3, the gradients of each microbatch are reduced, so that none is kept as a whole.
    recompute : what the backward pass computes again: "none"; "selective", the core of attention; "full", layers.
    sequence : norms and residuals are divided along tp, too.
    fused : attention is one kernel, which skips later positions and stores no weights, and the backward pass gathers
        keys and values along cp once more.
    dropout : masks of one byte are kept.
    apart : the gradient of a microbatch is written, and then added to those before; otherwise products add to them.
    dtype : of parameters and activations.   Gradients and what the optimizer keeps have 32 bits at least.
    optimizer : "muon" updates the matrices of attention and of linear layers, each at its home, and AdamW all others.
    muon_steps : of Newton and Schulz in an update of Muon, its `steps`.
    bucket_words : of gradients that are reduced together, unless one parameter has more; with ZeRO each rank updates a
        part of each bucket, and the words of homes hinge on it.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    microbatch: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    reduce_each: bool = False
    recompute: Recompute = "none"
    sequence: bool = True
    fused: bool = True
    dropout: bool = False
    apart: bool = False
    dtype: str = "bfloat16"
    optimizer: Optimizer = "adamw"
    muon_steps: int = STEPS
    bucket_words: int = 1 << 22

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "microbatch", "chunks", "muon_steps", "bucket_words"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, 1))
        if self.zero not in range(4):
            raise ArgumentError(f"zero is 0, 1, 2 or 3, got {self.zero!r}")
        if self.reduce_each and self.zero < 2:
            raise ArgumentError(f"the gradients of each microbatch are reduced with zero 2 and 3, got zero {self.zero}")
        kind = pipeline_kind(self.schedule)  # it refuses unknown ones
        if self.chunks > 1 and not kind.chunks:
            raise ArgumentError(
                f"{self.chunks} blocks of layers a stage take an interleaved schedule, got {self.schedule}"
            )
        if self.recompute not in get_args(Recompute):
            raise ArgumentError(f"recompute is {', '.join(get_args(Recompute))}, got {self.recompute!r}")
        if self.optimizer not in get_args(Optimizer):
            raise ArgumentError(f"optimizer is {', '.join(get_args(Optimizer))}, got {self.optimizer!r}")
        object.__setattr__(self, "dtype", str(element_type(self.dtype)))
        assert self.mesh

    @cached_property
    def mesh(self) -> MeshShape:
        return MeshShape(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep)

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @cached_property
    def element(self) -> np.dtype:
        return np.dtype(element_type(self.dtype))

    @property
    def itemsize(self) -> int:
        return int(self.element.itemsize)

    @property
    def copies(self) -> int:
        """The ranks that have the same parameters, of those that are not experts."""
        return self.dp * self.cp

    def microbatches(self, batch: int) -> int:
        """Return the microbatches of a step of so many samples on each rank; 0 where they are not equally many."""
        whole, rest = divmod(batch, self.dp * self.microbatch)
        return 0 if rest else whole

    def lies(self, shape: ModelShape, batch: int) -> str:
        """Return why this layout is none for a model, or an empty text."""
        blocks = self.pp * self.chunks
        m = self.microbatches(batch)
        if not m:
            return f"dp {self.dp} x microbatch {self.microbatch} does not divide the {batch} samples of a step"
        if shape.heads % self.tp or shape.kv_heads % self.tp:
            return f"tp {self.tp} does not divide {shape.heads} heads and {shape.kv_heads} of keys and values"
        if blocks > shape.layers:
            return f"{blocks} blocks of layers are more than {shape.layers} layers"
        if wrong := pipeline_kind(self.schedule).lies(self.pp, m):
            return f"{self.schedule} {wrong}"
        if 2 * self.cp > shape.sequence:
            return f"cp {self.cp} has fewer than 2 positions a rank"
        if self.ep > 1 and (not shape.experts or shape.experts % self.ep):
            return f"ep {self.ep} does not divide {shape.experts} experts"
        return ""

    @classmethod
    def parsed(cls, text: str, fixed: TrainingLayout) -> TrainingLayout:
        """Return the layout of a text such as "dp=4,tp=4,pp=8,recompute=selective"; the rest is that of `fixed`.

        Raises ArgumentError where a name is none of a layout.
        """
        members: dict[str, object] = {}
        types = {x.name: x.type for x in fields(cls)}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in types or not value:
                raise ArgumentError(f"a layout is name=value,...; the names are {', '.join(types)}; got {part!r}")
            if types[name] == "bool":
                if value.lower() not in (choices := {"yes": True, "true": True, "no": False, "false": False}):
                    raise ArgumentError(f"{name} of a layout is yes or no, got {value!r}")
                members[name] = choices[value.lower()]
            elif types[name] == "int":
                try:
                    members[name] = int(value)
                except ValueError:
                    raise ArgumentError(f"{name} of a layout is a whole number, got {value!r}") from None
            else:
                members[name] = value
        if members.get("chunks", 1) != 1:
            members.setdefault("schedule", "interleaved")
        return replace(fixed, **members)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return what differs from the defaults, as `parsed` takes it."""
        members = {x.name: getattr(self, x.name) for x in fields(self)}
        differing = [f"{x.name}={members[x.name]}" for x in fields(self) if members[x.name] != x.default]
        shown = [x for x in differing if x.partition("=")[0] in _SHORT]
        return ",".join(shown) or "dp=1"
