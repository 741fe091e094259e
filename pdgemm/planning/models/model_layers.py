"""The kinds of layers of a transformer: what each has, computes, moves and keeps, from which plans are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pdgemm.planning.models.training_layout import TrainingLayout

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
