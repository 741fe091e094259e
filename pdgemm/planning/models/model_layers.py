"""The kinds of layers of a transformer, and how they are divided: what each has, computes, moves and keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

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


BACKWARD = 1.6  # passes through memory backward over those forward
# passes forward of a norm, of a residual and its dropout, of what splits heads, of an activation and its bias, of
# scale, mask, softmax and dropout of the weights of attention, and of scores
_NORM, _RESIDUAL, HEADS, _ACTIVATION, _WEIGHTS, _SCORES = 3, 2, 2, 4, 7, 7 / (1 + BACKWARD)
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Layer(NamedTuple):
    """A layer on a rank, with one microbatch.

    parameters : elements on all ranks, by placement: "divided" along tp; "rows", whole on each rank, which has the
        gradient of its own rows; "experts", divided along ep; "tied", divided along tp, and used by two layers.
    matrices : the shapes of those that Muon updates.
    products : (m, n, k) of each product forward; backward there are two for each.
    core     : it is the core of attention, which "selective" computes again.
    passed   : elements that are read or written in memory forward.
    forward, backward : words received, by kind of traffic.   behind : words received behind a product backward.
    kept     : bytes for the backward pass.   again : the backward pass computes it again.
    """

    parameters: Mapping[str, int] = NOTHING
    matrices: tuple[tuple[int, int], ...] = ()
    products: tuple[tuple[float, float, float], ...] = ()
    core: bool = False
    passed: float = 0
    forward: Mapping[str, float] = NOTHING
    backward: Mapping[str, float] = NOTHING
    behind: Mapping[str, float] = NOTHING
    kept: float = 0
    again: bool = False


class Layers:
    """Layers one after the other, and their sums: `parameters`, `flops` forward, words by kind, and bytes kept.

    forward, backward : words, those backward with what is computed again.   words : of both, and those behind products.
    delayed : elements of the inputs of linear layers and of gradients of their outputs, for gradients of weights.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = [*layers]
        self.parameters = sums_by_name(x.parameters for x in self.layers)
        self.flops = sum(2 * m * n * k for x in self.layers for m, n, k in x.products)
        self.matrix_words = sum(m * n for x in self.layers for m, n in x.matrices)
        self.forward = sums_by_name(x.forward for x in self.layers)
        self.backward = sums_by_name(
            words for x in self.layers for words in (x.backward, x.forward if x.again else NOTHING)
        )
        self.words = sums_by_name((self.forward, self.backward, *(x.behind for x in self.layers)))
        self.kept = sum(x.kept for x in self.layers)
        linear = (x for x in self.layers if not x.core and "experts" not in x.parameters)
        self.delayed = sum(m * (n + k) for x in linear for m, n, k in x.products)


def sums_by_name(parts: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Return the sums of numbers by name."""
    total = dict[str, float]()
    for part in parts:
        for name, number in part.items():
            total[name] = total.get(name, 0) + number
    return total


class LayerKinds:
    """The kinds of layers on a rank, for `hidden` features of a token between layers and samples of `sequence` tokens.

    Layers keep the arrays of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys
    2023, table 2 and section 4: with dropout, 16 bits, and as many heads of keys as of queries s b h (34 + 5 a s/h)
    bytes, all of it divided by tp with `sequence`; without, s b h (10 + (24 + 5 a s/h)/t).  With `autograd` they keep
    the floating-point arrays that torch keeps on the host.
    """

    def __init__(self, how: TrainingLayout, hidden: int, sequence: int, biases: bool) -> None:
        self.how, self.h, self.s, self.biases, self.t, self.e = how, hidden, sequence, biases, how.tp, how.itemsize
        self.tokens, self.rows = how.microbatch * sequence / how.cp, how.rows(sequence)
        row = (how.tp - 1) / how.tp * self.tokens * hidden  # words of an all-gather or a reduce-scatter of rows
        self.gather, self.reduce = ({"tensor": row}, {"tensor": row}) if how.sequence else ({}, {"tensor": 2 * row})
        self.mask = how.dropout * self.rows * hidden

    def norm(self) -> Layer:
        words, elements, kept = self.h * (1 + self.biases), self.rows * self.h, (self.h + 1) * self.rows
        if self.how.autograd:  # the mean of a row beside its scale, or the scaled row before the gain
            kept += self.rows if self.biases else elements
        return Layer({"rows": words}, passed=_NORM * elements, kept=kept * self.e)

    def columns(self, features: int, own: Mapping[str, int] | None = None, number: int = 1, passes: int = 0) -> Layer:
        """Return linear layers of the same inputs, whose outputs are divided along tp."""
        own = {"divided": number * (self.h + self.biases) * features} if own is None else own
        matrices, products = ((self.h, features),) * number, ((self.tokens, features / self.t, self.h),) * number
        behind = NOTHING if self.how.autograd else self.gather
        kept = (self.tokens if self.how.autograd else self.rows) * self.h * self.e
        passed = passes * self.tokens * features / self.t
        return Layer(own, matrices, products, False, passed, self.gather, self.reduce, behind, kept)

    def summed(self, features: int) -> Layer:
        """Return a linear layer whose inputs are divided along tp, with the residual and the dropout behind it."""
        parameters = {"divided": features * self.h, "rows": self.biases * self.h}
        product, passed = (self.tokens, self.h, features / self.t), _RESIDUAL * self.rows * self.h
        moved, kept = (self.reduce, self.gather, NOTHING), self.tokens * features / self.t * self.e + self.mask
        return Layer(parameters, ((features, self.h),), (product,), False, passed, *moved, kept)

    def activation(self, features: int, gates: int, topk: int = 1) -> Layer:
        elements = self.tokens * topk * features / self.t
        arrays = 2 * gates - 1 if self.how.autograd else gates  # torch's product of two gates keeps both factors
        return Layer(passed=_ACTIVATION * elements, kept=arrays * elements * self.e)

    def attention(self, heads: int, kv_heads: int, width: int) -> Layer:
        """Return the core of attention."""
        how, c, rows = self.how, self.how.cp, self.tokens * heads / self.t
        keys = 2 * how.microbatch * self.s * kv_heads * width / self.t  # and values, of all ranks along cp
        regathers, weights = how.fused and not how.autograd, 0 if how.fused else rows * self.s
        again = how.recompute == "selective" and not regathers  # a fused kernel computes weights again anyway
        kept = rows * width + (keys / c if regathers or again else keys)
        if how.autograd and how.fused and not again:  # a sum of each row; along cp a mask, and GPT's joined own keys
            kept += rows * how.wide / self.e + (c > 1) * (self.s**2 + self.biases * keys) / c
        return Layer(
            products=((rows, self.s, width), (rows, width, self.s)),
            core=True,
            passed=_WEIGHTS * weights,
            forward={"context": (c - 1) / c * keys},
            backward={"context": (1 + regathers) * (c - 1) / c * keys},
            kept=kept * self.e + (0 if again else weights * (self.e + how.dropout * (self.e + 1))),
            again=again,
        )

    def experts(self, number: int, topk: int, ffn: int, gates: int) -> list[Layer]:
        """Return a router and linear layers of experts, to which tokens are sent along ep, and which send them back."""
        t, h, e, rows, ep, taken = self.t, self.h, self.e, self.rows, self.how.ep, self.tokens * topk
        travels = {"experts": (ep - 1) / ep * rows * topk * h}
        to = {"rows": h * number, "experts": number * gates * (h + self.biases) * ffn}
        back, passed = {"experts": number * (ffn + self.biases) * h}, _RESIDUAL * rows * h
        products, product = ((rows, number, h), *((taken, ffn / t, h),) * gates), (taken, h, ffn / t)
        kept = (rows + taken / t) * h * e, taken * (ffn + h) / t * e + self.mask
        if self.how.autograd:  # probabilities; and gates, before and after they are divided by their sums
            kept = kept[0] + rows * (number + (2 * topk + 1 if topk > 1 else 1)) * self.how.wide, kept[1]
        loads = {"router": 2 * number * (self.how.dp * self.how.cp * t - 1)}  # and sums of probabilities, of all ranks
        return [
            Layer(to, (), products, False, 0, travels | loads, travels, NOTHING, kept[0]),
            self.activation(ffn, gates, topk),
            Layer(back, (), (product,), False, passed, travels, travels, NOTHING, kept[1]),
        ]

    def embedding(self, parameters: Mapping[str, int]) -> Layer:
        return Layer(parameters, forward=self.reduce, backward=self.gather)

    def loss(self, vocabulary: int) -> Layer:
        """Return the cross-entropy: 3 words of a token are added along tp, and the loss along cp."""
        t, c, scores = self.t, self.how.cp, self.tokens * vocabulary / self.t
        words = {"tensor": 2 * (t - 1) / t * 3 * self.tokens, "context": 2 * (c - 1) / c}
        kept = self.e + self.how.wide
        if self.how.autograd:  # probabilities, of divided scores in 32 bits at least
            kept = self.how.wide if t * c > 1 else self.e
        return Layer(passed=_SCORES * scores, forward=words, kept=scores * kept)
