"""The sizes of a transformer, and what follows from them: its parameters and the flops of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count
from pdgemm.planning.models.model_layers import HEADS, NOTHING, LayerKinds, Layers, TrainingLayout

_LLAMA3 = {"vocabulary": 128256, "sequence": 8192, "kv_heads": 8, "gated": True, "tied": False}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt3-175b": {"layers": 96, "hidden": 12288, "heads": 96, "vocabulary": 51200, "sequence": 2048},
    "llama3-8b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, **_LLAMA3},
    "llama3-70b": {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, **_LLAMA3},
    "llama3-405b": {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, **_LLAMA3},
}  # Brown et al. 2020 with the vocabulary of Narayanan et al. 2021; Grattafiori et al. 2024

_DECIDING = "ep", "tp", "cp", "microbatch", "sequence", "fused", "autograd", "dropout", "dtype", "recompute"


class ModelLayers(NamedTuple):
    """The layers before the blocks of a model, those of each block, and those behind them; the last one is the loss."""

    first: Layers
    block: Layers
    last: Layers


@dataclass(frozen=True)
class ModelShape:
    """A transformer that predicts the next token: layers of attention and of two (or, gated, three) linear layers.

    layers, hidden, heads : hidden features of a token.   width : features of a head; 0: hidden/heads.
    kv_heads : of keys and values, each for heads/kv_heads neighbouring heads; 0: as many as heads.
    ffn      : features between the linear layers; 0: 4 hidden.
    vocabulary, sequence : tokens that there are, and tokens of a sample.
    experts, topk : experts of each layer in place of its linear layers, and how many of them a token takes; 0: none.
    tied     : the scores are products with the embedding's table.
    gated    : as Llama: silu(x W1) * (x W3) W2, norms without mean, no biases, and no table of positions.

    ::

        parameters of a layer   4 hidden^2 + 2 hidden ffn + 9 hidden + ffn, with kv_heads = heads
        of the whole            layers x that + (vocabulary + sequence + 2) hidden

    Raises ArgumentError where a size is not positive, heads do not divide hidden, or kv_heads heads.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    ffn: int = 0
    experts: int = 0
    topk: int = 2
    tied: bool = True
    gated: bool = False
    width: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence", "topk"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, 1))
        for name, default in (("kv_heads", self.heads), ("ffn", 4 * self.hidden), ("experts", 0)):
            object.__setattr__(self, name, as_count(getattr(self, name), name, 0) or default)
        if self.heads % self.kv_heads:
            raise ArgumentError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if not self.width and self.hidden % self.heads:
            raise ArgumentError(f"heads {self.heads} does not divide hidden {self.hidden}")
        object.__setattr__(self, "width", as_count(self.width, "width", 0) or self.hidden // self.heads)
        if self.experts and self.topk > self.experts:
            raise ArgumentError(f"a token takes {self.topk} experts of {self.experts}: topk is at most experts")

    def layers_in(self, layout: TrainingLayout) -> ModelLayers:
        """Return the layers of a rank."""
        replicas = layout.dp if self.experts else layout.ep  # whose routers exchange loads
        return _layers_in(self, replicas, min(2, layout.pp), *(getattr(layout, name) for name in _DECIDING))

    @cached_property
    def parameters(self) -> int:
        """The parameters of the whole model; of the experts all."""
        first, block, last = (sum(x.parameters.values()) for x in self.layers_in(TrainingLayout()))
        return int(first + self.layers * block + last)

    def flops(self, tokens: int, recompute: str = "none") -> int:
        """Return the flops of all products for so many tokens, forward and backward: 3 times forward.

        72 T l h^2 (1 + s/(6 h) + V/(12 l h)) for ffn = 4 h, with "none"; Korthikanti et al., MLSys 2023, equation 7.
        recompute : "selective" computes attention's core once more, and "full" all layers of blocks.
        """
        first, block, last = self.layers_in(TrainingLayout())
        again = {"none": (), "selective": (x for x in block.layers if x.core), "full": block.layers}[recompute]
        blocks = self.layers * (3 * block.flops + Layers(again).flops)
        return round(tokens / self.sequence * (3 * (first.flops + last.flops) + blocks))

    def __str__(self) -> str:
        sizes = f"{self.layers} layers of {self.hidden} with {self.heads} heads"
        experts = f", {self.experts} experts" if self.experts else ""
        return (
            f"{sizes}{experts}, vocabulary {self.vocabulary}, sequence {self.sequence}: {self.parameters:,} parameters"
        )


@lru_cache(maxsize=1024)  # layouts differ in more than what decides
def _layers_in(shape: ModelShape, dp: int, pp: int, *deciding: Any) -> ModelLayers:
    """Return the layers of a rank of a model that has one stage, or several."""
    how = TrainingLayout(dp=dp, pp=pp, **dict(zip(_DECIDING, deciding)))
    kinds, gates = LayerKinds(how, shape.hidden, shape.sequence, not shape.gated), 1 + shape.gated
    core = kinds.attention(shape.heads, shape.kv_heads, shape.width)
    heads = kinds.columns((shape.heads + 2 * shape.kv_heads) * shape.width, passes=HEADS)
    block = [kinds.norm(), heads, core, kinds.summed(shape.heads * shape.width)]
    if shape.experts:
        block += [kinds.norm(), *kinds.experts(shape.experts, shape.topk, shape.ffn, gates)]
    else:
        up = kinds.columns(shape.ffn, None, gates)
        block += [kinds.norm(), up, kinds.activation(shape.ffn, gates), kinds.summed(shape.ffn)]
    if how.recompute == "full":  # the block keeps its input alone; what experts send back is multiplied by gates
        block = [x._replace(kept=0, again=not how.autograd or x is not block[-1] or shape.experts > 0) for x in block]
        block[0] = block[0]._replace(kept=how.rows(shape.sequence) * shape.hidden * how.itemsize)
    table = {"tied" if shape.tied else "divided": shape.vocabulary * shape.hidden}
    first = kinds.embedding({**table, "rows": 0 if shape.gated else shape.sequence * shape.hidden})
    head = kinds.columns(shape.vocabulary, NOTHING if shape.tied and pp == 1 else table)
    last = [kinds.norm()._replace(passed=0), head, kinds.loss(shape.vocabulary)]  # scores pass far more
    return ModelLayers(Layers([first]), Layers(block), Layers(last))
