"""A layout: how a transformer is divided among ranks, and how a step is run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count, as_name
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.schedules.training.mesh_shape import MeshShape
from pdgemm.schedules.training.pipeline_orders import pipeline_kind

Recompute = Literal["none", "selective", "full"]
Optimizer = Literal["adamw", "muon"]
_SHORT = {"dp", "tp", "pp", "cp", "ep", "zero", "microbatch", "chunks", "recompute", "schedule"}
_READ: dict[Any, Any] = {"int": int, "bool": {"yes": True, "true": True, "no": False, "false": False}.__getitem__}


@dataclass(frozen=True)
class TrainingLayout:
    """How a step is divided.

    dp, tp, pp, cp, ep : the sizes of a `MeshShape`: samples, matrices, layers, positions and experts.
    zero : what ranks along dp divide: 0 nothing, 1 the optimizer's state, 2 gradients as well, 3 parameters as well.
        With 2 and 3 the gradients of each microbatch are reduced.
    microbatch : samples of one pass.   chunks : blocks of layers of a stage, more than one with "interleaved" alone.
    schedule : of the pipeline, see `PipelineSchedule`.
    recompute : what the backward pass computes again: "none"; "selective", the core of attention; "full", layers.
    sequence : norms and residuals are divided along tp, too.
    fused : attention is one kernel, which skips later positions and stores no weights.
    autograd : as the autograd of torch in `pdgemm.training`, a step keeps the inputs of linear layers, keys and values
        as they were gathered, which the backward pass of Megatron-LM gathers once more, and all else that functions of
        torch keep on the host; the last layer of a block is not computed again.
    dropout : masks of one byte are kept.
    apart : the gradient of a microbatch is written, and then added to those before; otherwise products add to them.
    dtype : of parameters and activations.   Gradients and what the optimizer keeps have 32 bits at least.
    optimizer : "muon" updates the matrices of attention and of linear layers, each on one rank, its owner, and AdamW
        all other parameters.   muon_steps : of Newton and Schulz in an update of Muon.
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
    recompute: Recompute = "none"
    sequence: bool = True
    fused: bool = True
    autograd: bool = False
    dropout: bool = False
    apart: bool = False
    dtype: str = "bfloat16"
    optimizer: Optimizer = "adamw"
    muon_steps: int = 5

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "microbatch", "chunks", "muon_steps"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, 1))
        if self.zero not in range(4):
            raise ArgumentError(f"zero is 0, 1, 2 or 3, got {self.zero!r}")
        kind = pipeline_kind(self.schedule)  # it refuses unknown ones
        if self.chunks > 1 and not kind.chunks:
            raise ArgumentError(
                f"{self.chunks} blocks of layers a stage take an interleaved schedule, got {self.schedule}"
            )
        as_name(self.recompute, "recompute", get_args(Recompute))
        as_name(self.optimizer, "optimizer", get_args(Optimizer))
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
    def wide(self) -> int:
        """The bytes of an element of gradients, and of what the optimizer keeps."""
        return max(4, self.itemsize)

    @property
    def copies(self) -> int:
        """The ranks that have the same parameters, of those that are not experts."""
        return self.dp * self.cp

    def microbatches(self, batch: int) -> int:
        """Return the microbatches of a step of so many samples on each rank; 0 where they are not equally many."""
        whole, rest = divmod(batch, self.dp * self.microbatch)
        return 0 if rest else whole

    def rows(self, sequence: int) -> float:
        """Return the rows between layers of a rank, for samples of so many tokens; `sequence` divides them along tp."""
        return self.microbatch * sequence / self.cp / (self.tp if self.sequence else 1)

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
            try:
                members[name] = _READ.get(types[name], str)(value)
            except (KeyError, ValueError):
                kind = "a whole number" if types[name] == "int" else "yes or no"
                raise ArgumentError(f"{name} of a layout is {kind}, got {value!r}") from None
        if members.get("chunks", 1) != 1:
            members.setdefault("schedule", "interleaved")
        return replace(fixed, **members)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return what differs from the defaults, as `parsed` takes it."""
        values = {x: getattr(self, x.name) for x in fields(self) if x.name in _SHORT}
        shown = [f"{x.name}={value}" for x, value in values.items() if value != x.default]
        return ",".join(shown) or "dp=1"
