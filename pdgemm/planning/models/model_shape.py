"""The sizes of a transformer, and what follows from them alone: its parameters and the flops of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count

_LLAMA3 = {"vocabulary": 128256, "sequence": 8192, "kv_heads": 8, "gated": True, "tied": False}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt3-175b": {"layers": 96, "hidden": 12288, "heads": 96, "vocabulary": 51200, "sequence": 2048},
    "llama3-8b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, **_LLAMA3},
    "llama3-70b": {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, **_LLAMA3},
    "llama3-405b": {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, **_LLAMA3},
}  # Brown et al. 2020 with the vocabulary of Narayanan et al. 2021; Grattafiori et al. 2024


class Weights(NamedTuple):
    """The parameters of a layer by how ranks along tp have them.

    divided : each a part.   whole : each all, with the whole gradient: biases that are added to sums.
    addends : each all, with the gradient of its own rows: norms and routers.   experts : divided along ep.
    """

    divided: int
    whole: int
    addends: int
    experts: int = 0

    @property
    def total(self) -> int:
        return sum(self)


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

    # ---------------------------------------------------------------- parameters
    @cached_property
    def layer(self) -> Weights:
        """The parameters of a layer."""
        h, biases = self.hidden, not self.gated
        attention = h * (self.queries + 2 * self.keys) + self.queries * h
        inner = (3 if self.gated else 2) * h * self.ffn
        norms = 2 * h * (1 + biases)
        divided = attention + biases * (self.queries + 2 * self.keys)
        if self.experts:
            own = self.experts * (inner + biases * (self.ffn + h))
            return Weights(divided, biases * h, norms + h * self.experts, own)
        return Weights(divided + inner + biases * self.ffn, 2 * biases * h, norms)

    @cached_property
    def table(self) -> int:
        """The elements of the embedding, and as many of the scores where these are not tied."""
        return self.vocabulary * self.hidden

    @cached_property
    def positions(self) -> int:
        """The elements of the table of positions."""
        return 0 if self.gated else self.sequence * self.hidden

    @cached_property
    def norm(self) -> int:
        """The elements of the last norm."""
        return self.hidden * (1 if self.gated else 2)

    @cached_property
    def parameters(self) -> int:
        """The parameters of the whole model; of the experts all."""
        return self.layers * self.layer.total + self.table * (1 if self.tied else 2) + self.positions + self.norm

    # ---------------------------------------------------------------- flops
    @cached_property
    def core_flops(self) -> int:
        """The flops of attention's core forward for a token of a layer, all pairs of positions counted."""
        return 4 * self.sequence * self.queries

    @cached_property
    def layer_flops(self) -> int:
        """The flops of a layer forward for a token: 2 for each weight that it meets, and `core_flops`."""
        h, matrices = self.hidden, 3 if self.gated else 2
        inner = 2 * matrices * h * self.ffn * (self.topk if self.experts else 1) + 2 * h * self.experts
        return 2 * h * (2 * self.queries + 2 * self.keys) + inner + self.core_flops

    def flops(self, tokens: int) -> int:
        """Return the flops of the model's products for so many tokens, forward and backward: 3 times forward.

        72 T l h^2 (1 + s/(6 h) + V/(12 l h)) for ffn = 4 h.  Korthikanti et al., MLSys 2023, equation 7.
        """
        return 3 * tokens * (self.layers * self.layer_flops + 2 * self.table)

    def hardware_flops(self, tokens: int, recompute: str) -> int:
        """Return `flops` with those that `recompute` adds: those of attention's core, or of all layers."""
        again = {"none": 0, "selective": self.core_flops, "full": self.layer_flops}[recompute]
        return self.flops(tokens) + tokens * self.layers * again

    def __str__(self) -> str:
        sizes = f"{self.layers} layers of {self.hidden} with {self.heads} heads"
        experts = f", {self.experts} experts" if self.experts else ""
        return (
            f"{sizes}{experts}, vocabulary {self.vocabulary}, sequence {self.sequence}: {self.parameters:,} parameters"
        )
