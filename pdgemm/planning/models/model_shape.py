"""The sizes of a transformer, and what follows from them alone: its parameters and the flops of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count
from pdgemm.planning.models.model_layers import Layers, ModelLayers, layers_of
from pdgemm.planning.models.training_layout import TrainingLayout

_LLAMA3 = {"vocabulary": 128256, "sequence": 8192, "kv_heads": 8, "gated": True, "tied": False}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt3-175b": {"layers": 96, "hidden": 12288, "heads": 96, "vocabulary": 51200, "sequence": 2048},
    "llama3-8b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, **_LLAMA3},
    "llama3-70b": {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, **_LLAMA3},
    "llama3-405b": {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, **_LLAMA3},
}  # Brown et al. 2020 with the vocabulary of Narayanan et al. 2021; Grattafiori et al. 2024


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

    @property
    def queries(self) -> int:
        """The features of the queries of all heads."""
        return self.heads * self.width

    @property
    def keys(self) -> int:
        """The features of the keys of all heads, and of the values."""
        return self.kv_heads * self.width

    @cached_property
    def _whole(self) -> ModelLayers:
        """The layers on one rank, with one sample."""
        return layers_of(self, TrainingLayout())

    @cached_property
    def parameters(self) -> int:
        """The parameters of the whole model; of the experts all."""
        first, block, last = (sum(x.parameters.values()) for x in self._whole)
        return int(first + self.layers * block + last)

    def flops(self, tokens: int, recompute: str = "none") -> int:
        """Return the flops of all products for so many tokens, forward and backward: 3 times forward.

        72 T l h^2 (1 + s/(6 h) + V/(12 l h)) for ffn = 4 h, with "none"; Korthikanti et al., MLSys 2023, equation 7.
        recompute : "selective" computes attention's core once more, and "full" all layers of blocks.
        """
        first, block, last = self._whole
        again = {"none": (), "selective": (x for x in block.layers if x.core), "full": block.layers}[recompute]
        blocks = self.layers * (3 * block.flops + Layers(again).flops)
        return round(tokens / self.sequence * (3 * (first.flops + last.flops) + blocks))

    def __str__(self) -> str:
        sizes = f"{self.layers} layers of {self.hidden} with {self.heads} heads"
        experts = f", {self.experts} experts" if self.experts else ""
        return (
            f"{sizes}{experts}, vocabulary {self.vocabulary}, sequence {self.sequence}: {self.parameters:,} parameters"
        )
