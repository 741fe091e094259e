"""The layers of a transformer on a rank: what each has, computes, moves and keeps, from which plans are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pdgemm.planning.models.training_layout import TrainingLayout

if TYPE_CHECKING:
    from pdgemm.planning.models.model_shape import ModelShape

BACKWARD = 1.6  # passes through memory backward over those forward
# passes forward of a norm, of a residual and its dropout, of what splits heads, of an activation and its bias, of
# scale, mask, softmax and dropout of the weights of attention, and of scores
_NORM, _RESIDUAL, _HEADS, _ACTIVATION, _WEIGHTS, _SCORES = 3, 2, 2, 4, 7, 7 / (1 + BACKWARD)
_DECIDING = "ep", "tp", "cp", "microbatch", "sequence", "fused", "autograd", "dropout", "dtype", "recompute"
_NONE: Mapping[str, Any] = MappingProxyType({})


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

    parameters: Mapping[str, int] = _NONE
    matrices: tuple[tuple[int, int], ...] = ()
    products: tuple[tuple[float, float, float], ...] = ()
    core: bool = False
    passed: float = 0
    forward: Mapping[str, float] = _NONE
    backward: Mapping[str, float] = _NONE
    behind: Mapping[str, float] = _NONE
    kept: float = 0
    again: bool = False


class Layers:
    """Layers one after the other, and their sums: `parameters`, `flops` forward, words by kind, and bytes kept.

    forward, backward : words, those backward with what is computed again.   words : of both, and those behind products.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = [*layers]
        self.parameters = added(x.parameters for x in self.layers)
        self.flops = sum(2 * m * n * k for x in self.layers for m, n, k in x.products)
        self.matrix_words = sum(m * n for x in self.layers for m, n in x.matrices)
        self.forward = added(x.forward for x in self.layers)
        self.backward = added(words for x in self.layers for words in (x.backward, x.forward if x.again else _NONE))
        self.words = added((self.forward, self.backward, *(x.behind for x in self.layers)))
        self.kept = sum(x.kept for x in self.layers)


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Return the sums of numbers by name."""
    total = dict[str, float]()
    for part in parts:
        for name, number in part.items():
            total[name] = total.get(name, 0) + number
    return total


class ModelLayers(NamedTuple):
    """The layers before the blocks of a model, those of each block, and those behind them; the last one is the loss."""

    first: Layers
    block: Layers
    last: Layers


def layers_of(shape: ModelShape, layout: TrainingLayout) -> ModelLayers:
    """Return the layers of a transformer on a rank.

    They keep the arrays of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys
    2023, table 2 and section 4: with dropout, 16 bits, and as many heads of keys as of queries s b h (34 + 5 a s/h)
    bytes, all of it divided by tp with `sequence`; without, s b h (10 + (24 + 5 a s/h)/t).
    """
    return _layers_of(shape, min(2, layout.pp), *(getattr(layout, name) for name in _DECIDING))


@lru_cache(maxsize=1024)  # layouts differ in more than what decides
def _layers_of(shape: ModelShape, pp: int, *deciding: Any) -> ModelLayers:
    how = TrainingLayout(dp=deciding[0], pp=pp, **dict(zip(_DECIDING, deciding)))
    t, c, e, h, s = how.tp, how.cp, how.itemsize, shape.hidden, shape.sequence
    tokens, rows, biases, gates = how.microbatch * s / c, how.rows(s), not shape.gated, 1 + shape.gated
    row = (t - 1) / t * tokens * h  # words of an all-gather, or a reduce-scatter, of the rows of all ranks along tp
    gather, reduce = (row, row) if how.sequence else (0, 2 * row)
    again = row if how.sequence and not how.autograd else 0
    norm = Layer({"rows": h * (1 + biases)}, passed=_NORM * rows * h, kept=rows * (h + 1) * e)

    def columns(features: int, parameters: Mapping[str, int], number: int = 1, passes: int = 0) -> Layer:
        """Return linear layers of the same inputs, whose outputs are divided along tp."""
        matrices, products = ((h, features),) * number, ((tokens, features / t, h),) * number
        moved = {"tensor": gather}, {"tensor": reduce}, {"tensor": again}
        kept = (tokens if how.autograd else rows) * h * e
        return Layer(parameters, matrices, products, False, passes * tokens * features / t, *moved, kept)

    def summed(features: int) -> Layer:
        """Return a linear layer whose inputs are divided along tp, with the residual and the dropout behind it."""
        parameters, product = {"divided": features * h, "rows": biases * h}, (tokens, h, features / t)
        kept = tokens * features / t * e + how.dropout * rows * h
        moved = {"tensor": reduce}, {"tensor": gather}, _NONE
        return Layer(parameters, ((features, h),), (product,), False, _RESIDUAL * rows * h, *moved, kept)

    def activation(tokens: float) -> Layer:
        elements = tokens * shape.ffn / t
        return Layer(passed=_ACTIVATION * elements, kept=gates * elements * e)

    own, weights = tokens * shape.queries / t, 0 if how.fused else tokens * shape.heads / t * s
    keys = 2 * how.microbatch * s * shape.keys / t  # and values, of all ranks along cp
    regathers = how.fused and not how.autograd  # and a fused kernel computes weights again without being told to
    selective, whole = how.recompute == "selective" and not regathers, weights * (e + how.dropout * (e + 1))
    core = Layer(
        products=((own / shape.width, s, shape.width), (own / shape.width, shape.width, s)),
        core=True,
        passed=_WEIGHTS * weights,
        forward={"context": (c - 1) / c * keys},
        backward={"context": (1 + regathers) * (c - 1) / c * keys},
        kept=(own + (keys / c if regathers or selective else keys)) * e + (0 if selective else whole),
        again=selective,
    )
    heads = shape.queries + 2 * shape.keys
    block = [norm, columns(heads, {"divided": (h + biases) * heads}, 1, _HEADS), core, summed(shape.queries), norm]
    if shape.experts:
        taken, number = tokens * shape.topk, shape.experts
        travels = {"experts": (how.ep - 1) / how.ep * rows * shape.topk * h}
        expert = partial(Layer, forward=travels, backward=travels)
        into = {"rows": h * number, "experts": number * gates * (h + biases) * shape.ffn}  # with the router
        products = (rows, number, h), *((taken, shape.ffn / t, h),) * gates
        block += [expert(into, products=products, kept=(rows + taken / t) * h * e), activation(taken)]
        back, product = {"experts": number * (shape.ffn + biases) * h}, (taken, h, shape.ffn / t)
        kept = taken * (shape.ffn + h) / t * e + how.dropout * rows * h
        block.append(expert(back, products=(product,), passed=_RESIDUAL * rows * h, kept=kept))
    else:
        up = columns(shape.ffn, {"divided": gates * (h + biases) * shape.ffn}, gates)
        block += [up, activation(tokens), summed(shape.ffn)]
    if how.recompute == "full":  # the block keeps its input alone
        block = [x._replace(kept=0, again=not how.autograd or x is not block[-1]) for x in block]
        block[0] = block[0]._replace(kept=rows * h * e)
    table, scores = {"tied" if shape.tied else "divided": shape.vocabulary * h}, tokens * shape.vocabulary / t
    positions = {"rows": biases * s * h}
    embedding = Layer({**table, **positions}, forward={"tensor": reduce}, backward={"tensor": gather})
    head = columns(shape.vocabulary, _NONE if shape.tied and pp == 1 else table)
    loss = Layer(  # 3 words of a token are added along tp, and the loss along cp
        passed=_SCORES * scores,
        forward={"tensor": 2 * (t - 1) / t * 3 * tokens, "context": 2 * (c - 1) / c},
        kept=scores * (e + max(4, e)),
    )
    return ModelLayers(
        Layers([embedding]), Layers(block), Layers([norm._replace(passed=0), head, loss])
    )  # scores are more
