"""The plan of a training step: bytes, words and seconds by formulas of the sizes, the layout and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Any

from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.kept_arrays import activation_bytes, score_bytes
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout

NODE, NETWORK = "node", "network"
# the passes over memory of a layer's elementwise functions, forward: norms, residuals and dropouts; the activation and
# its bias; what splits heads; and scale, mask, softmax and dropout of the weights of attention
_ROWS, _INNER, _HEADS, _WEIGHTS = 10, 4, 2, 7
_BACKWARD = 1.6  # passes backward over those forward
_SCORES = 7  # passes over the scores of the vocabulary, forward and backward
_CORE, _FUSED = 0.5, 0.55  # of the rate of a large product, that of attention's many small ones; of a fused kernel
_UPDATE = 28  # bytes of a parameter that an update of Adam reads and writes


def state_bytes(words: float, sizes: Mapping[str, int], copies: int, zero: int) -> dict[str, float]:
    """Return the bytes of a rank that so many parameters take, of which `copies` ranks have the same ones.

    sizes : bytes of a "parameters", "gradients" and "optimizer" element.   zero : the stage of ZeRO, which divides the
        last one from 1, the last two from 2, and all from 3.
    Rajbhandari et al., ZeRO, SC 2020, section 5.
    """
    divided = {"optimizer": 1, "gradients": 2, "parameters": 3}
    return {kind: size * words / (copies if zero >= divided[kind] else 1) for kind, size in sizes.items()}


@dataclass(frozen=True)
class ModelPlan:
    """A training step of a model in a layout on a machine.

    batch : samples of a step.   Sizes are of the fullest pipeline stage and its fullest rank.  No MPI, no arrays.
    """

    shape: ModelShape
    layout: TrainingLayout
    batch: int
    machine: Machine

    # ---------------------------------------------------------------- sizes
    @cached_property
    def microbatches(self) -> int:
        """Of each rank in a step."""
        return self.layout.microbatches(self.batch)

    @cached_property
    def tokens(self) -> float:
        """Of a microbatch on a rank: microbatch x sequence / cp."""
        return self.layout.microbatch * self.shape.sequence / self.layout.cp

    @cached_property
    def rows(self) -> float:
        """Rows between layers, which are divided along tp with `sequence`."""
        return self.tokens / (self.layout.tp if self.layout.sequence else 1)

    @cached_property
    def layers(self) -> int:
        """Layers of the fullest stage."""
        return self.layout.chunks * ceil(self.shape.layers / (self.layout.pp * self.layout.chunks))

    @cached_property
    def dense(self) -> float:
        """Parameters of a rank that are not experts'."""
        shape, t = self.shape, self.layout.tp
        tables = shape.table / t * (1 if shape.tied or self.layout.pp > 1 else 2)
        positions = shape.positions * (shape.layers > 0)
        return self.layers * (shape.layer.divided / t + shape.layer.copied) + tables + positions

    @cached_property
    def expert(self) -> float:
        """Parameters of a rank that are experts'."""
        return self.layers * self.shape.layer.experts / self.layout.ep

    # ---------------------------------------------------------------- pipeline
    @cached_property
    def bubble(self) -> Fraction:
        """The time in which stages wait over the time in which they work, for stages of equal length."""
        p, m = self.layout.pp, self.microbatches
        work = {"interleaved": self.layout.chunks * m, "zero_bubble": 3 * m}.get(self.layout.schedule, m)
        return Fraction(p - 1, work)

    @cached_property
    def in_flight(self) -> int:
        """Blocks of layers of the first stage whose activations are kept at one time; each has `layers / chunks`."""
        p, m, v = self.layout.pp, self.microbatches, self.layout.chunks
        if self.layout.schedule == "gpipe":
            return m
        return min(v * m, (v + 1) * p - 1) if v > 1 else min(m, p)

    # ---------------------------------------------------------------- bytes
    @cached_property
    def bytes(self) -> dict[str, float]:
        """Bytes of a rank by kind: with ZeRO, those of parts of parameters along dp x cp, of experts along dp x cp/ep.

        Gradients of several microbatches are added first, whole, and divided when they are reduced.  Of the pipeline's
        stages those of the first one, and what the last one has more.
        """
        layout, wide = self.layout, max(4, self.layout.itemsize)
        sizes = {
            "parameters": layout.itemsize,
            "gradients": layout.gradients,
            "optimizer": 2 * wide + (wide if layout.itemsize < wide else 0),  # two moments of Adam, and master weights
        }
        of_dense, of_experts = (
            state_bytes(words, sizes, copies, layout.zero)
            for words, copies in ((self.dense, layout.copies), (self.expert, layout.copies // layout.ep))
        )
        total = {kind: of_dense[kind] + of_experts[kind] for kind in sizes}
        if self.microbatches > 1 and not layout.reduce_each:
            total["gradients"] = sizes["gradients"] * (self.dense + self.expert)
        kept = self.layers / layout.chunks * activation_bytes(self.shape, layout)
        scores = score_bytes(self.shape, layout)
        if layout.pp > 1:  # the first stage has the most in flight, and the last one the scores
            scores = max(0.0, scores - (self.in_flight - layout.chunks) * kept)
        return {**total, "activations": self.in_flight * kept, "scores": scores}

    @property
    def all_bytes(self) -> float:
        return sum(self.bytes.values())

    # ---------------------------------------------------------------- words
    @cached_property
    def _context(self) -> float:
        """The words of keys and values that a layer receives for a microbatch."""
        layout, shape = self.layout, self.shape
        return (layout.cp - 1) / layout.cp * layout.microbatch * shape.sequence * 2 * shape.keys / layout.tp

    @cached_property
    def words(self) -> dict[str, float]:
        """Words that a rank receives in a step, by kind, where all sizes divide; a middle stage of the pipeline."""
        shape, layout, m = self.shape, self.layout, self.microbatches
        t, again = layout.tp, 2 if layout.recompute == "full" else 1
        row = (t - 1) / t * self.tokens * shape.hidden  # of one all-gather or reduce-scatter
        pairs = 1 if shape.experts else 2  # of linear layers
        tensor = self.layers * pairs * row * (2 * again + 2 + layout.sequence)
        ends = (3 if layout.sequence else 2) * row + 2 * (t - 1) / t * 3 * self.tokens  # scores and their cross-entropy
        ends += (2 if layout.sequence else 1) * row * (1 if layout.sequence else 2)
        context = self.layers * (again + 1 + layout.fused) * self._context
        pipeline = 2 * layout.chunks * self.rows * shape.hidden if layout.pp > 1 else 0
        travels = (layout.ep - 1) / layout.ep * self.rows * shape.topk * shape.hidden if shape.experts else 0
        copies = layout.copies
        reduced = sum((d - 1) / d * n for n, d in ((self.dense, copies), (self.expert, copies // layout.ep)) if n)
        reductions = 2 if not layout.zero else m if layout.reduce_each else 1  # an all-reduce gathers, too
        gathers = 0 if not layout.zero else 2 * m if layout.zero == 3 else 1
        words = {
            "tensor": m * (tensor + (ends if layout.pp == 1 else 0)),
            "pipeline": m * pipeline,
            "gradients": reductions * reduced,
            "parameters": gathers * reduced,
            "context": m * context,
            "experts": m * self.layers * 2 * (again + 1) * travels,
        }
        return {kind: number for kind, number in words.items() if number}

    @cached_property
    def links(self) -> dict[str, str]:
        """Where the words of each kind travel: over links inside a node, or its network cards."""
        return {kind: self._link(*self._lines()[kind]) for kind in self.words}

    def _lines(self) -> dict[str, tuple[int, int]]:
        """Return the distance of neighbours, and the length, of each kind's lines."""
        layout = self.layout
        context, data = layout.tp, layout.tp * layout.cp
        return {
            "tensor": (1, layout.tp),
            "context": (context, layout.cp),
            "gradients": (context, layout.copies),
            "parameters": (context, layout.copies),
            "experts": (data, layout.ep),
            "pipeline": (data * layout.dp, layout.pp),
        }

    def _link(self, stride: int, length: int) -> str:
        node = self.machine.ranks_per_node
        return NODE if node is None or stride * length <= node else NETWORK

    # ---------------------------------------------------------------- seconds
    def transfer(self, kind: str, nbytes: float) -> float:
        """Return the seconds in which each rank of a line receives so many bytes from its neighbour in a ring.

        Rings that leave a node share its cards: one for each rank that lies between two neighbours.
        """
        stride, length = self._lines()[kind]
        if length == 1:
            return 0.0
        if self._link(stride, length) == NODE:
            return nbytes * self.machine.intra["ring"].beta
        assert self.machine.ranks_per_node
        return nbytes * self.machine.inter["ring"].beta * min(self.machine.ranks_per_node, stride)

    def _product(self, m: float, n: float, k: float) -> float:
        return 2 * m * n * k / self.machine.rate(self.layout.dtype, *(ceil(x) for x in (m, n, k)))

    @cached_property
    def _memory(self) -> float:
        return 2 * self.machine.copy_bandwidth

    @cached_property
    def forward(self) -> dict[str, float]:
        """Seconds of a layer forward for a microbatch, by part."""
        shape, layout, tokens = self.shape, self.layout, self.tokens
        t, h, size = layout.tp, shape.hidden, layout.itemsize
        inner = tokens * (shape.topk if shape.experts else 1)
        products = self._product(tokens, (h + 2 * shape.keys) / t, h) + self._product(tokens, h, h / t)
        products += self._product(inner, shape.ffn / t, h) * (2 if shape.gated else 1)
        products += self._product(inner, h, shape.ffn / t)
        rate = self.machine.rate(layout.dtype, 1 << 16)
        core = tokens * shape.core_flops / t / rate / (_FUSED if layout.fused else _CORE) / (2 if layout.fused else 1)
        weights = tokens * shape.heads / t * shape.sequence
        softmax = 0.0 if layout.fused else _WEIGHTS * weights * size / self._memory
        passes = _ROWS * self.rows * h + _INNER * inner * shape.ffn / t + _HEADS * tokens * (h + 2 * shape.keys) / t
        exposed = 1 - self.machine.overlap
        words = 2 * 2 * (t - 1) / t * tokens * h
        experts = self.words.get("experts", 0) / max(1, self.microbatches * self.layers) / 2
        return {
            "products": products,
            "attention": core,
            "elementwise": passes * size / self._memory,
            "softmax": softmax,
            "tensor": exposed * self.transfer("tensor", words * size),
            "context": exposed * self.transfer("context", self._context * size),
            "experts": self.transfer("experts", experts * size),
        }

    @cached_property
    def backward(self) -> dict[str, float]:
        """Seconds of a layer backward for a microbatch, with what is computed again."""
        forward, recompute = self.forward, self.layout.recompute
        twice, passes = ("products", "attention"), ("elementwise", "softmax")
        seconds = {
            part: time * (2 if part in twice else _BACKWARD if part in passes else 1) for part, time in forward.items()
        }
        seconds["context"] *= 1 + self.layout.fused
        again = {"none": (), "selective": () if self.layout.fused else ("attention", "softmax"), "full": (*forward,)}
        for part in again[recompute]:
            seconds[part] += forward[part]
        return seconds

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by part, on the slowest stage."""
        layout, m, size, exposed = self.layout, self.microbatches, self.layout.itemsize, 1 - self.machine.overlap
        parts = {part: m * self.layers * (time + self.backward[part]) for part, time in self.forward.items()}
        scores = self.tokens * self.shape.vocabulary / layout.tp
        parts["scores"] = m * (
            3 * self._product(self.tokens, self.shape.vocabulary / layout.tp, self.shape.hidden)
            + _SCORES * scores * size / self._memory
        )
        sent = 2 * layout.chunks * self.tokens * self.shape.hidden / layout.tp if layout.pp > 1 else 0
        parts["pipeline"] = m * self.transfer("pipeline", sent * size)
        stage = self.layers * sum(self.forward.values()) + self.layers * sum(self.backward.values())
        parts["bubble"] = float(self.bubble) * m * stage + (layout.pp - 1) * parts["pipeline"] / m / layout.chunks
        for kind, itemsize in (("gradients", layout.gradients), ("parameters", size)):
            parts[kind] = exposed * self.transfer(kind, self.words.get(kind, 0) * itemsize)
        divided = layout.copies if layout.zero else 1
        parts["optimizer"] = (self.dense + self.expert) * _UPDATE / divided / self._memory
        return {part: time for part, time in parts.items() if time}

    @cached_property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    # ---------------------------------------------------------------- figures
    @cached_property
    def step_tokens(self) -> int:
        return self.batch * self.shape.sequence

    def _share(self, flops: float) -> float:
        peak = self.machine.peak or max(
            self.machine.gamma.get(self.layout.dtype, self.machine.gamma["float32"]).values()
        )
        return flops / (self.step_seconds * self.layout.ranks * peak)

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own flops take."""
        return self._share(self.shape.flops(self.step_tokens))

    @property
    def hfu(self) -> float:
        """The share of the peak that all flops take, also those that are computed again."""
        return self._share(self.shape.hardware_flops(self.step_tokens, self.layout.recompute))

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds

    @cached_property
    def refused(self) -> str:
        """Why this layout cannot be run, and by how much; "" where it can."""
        if why := self.layout.lies(self.shape, self.batch):
            return why
        if self.machine.memory and self.all_bytes > self.machine.memory:
            return f"{self.all_bytes / 1e9:.1f} GB, {self.all_bytes / self.machine.memory:.2f} of a rank's memory"
        return ""

    def run(self, tokens: int | None, price: float | None) -> dict[str, float]:
        """Return the days and rank-hours of a run of so many tokens, and what a million of them cost.

        price : of a rank for an hour.
        """
        figures, hours = dict[str, float](), self.layout.ranks / 3600 / self.tokens_per_second
        if tokens:
            figures |= {"days": tokens / self.tokens_per_second / 86400, "rank_hours": tokens * hours}
        if price is not None:
            figures["cost_of_a_million_tokens"] = price * 1e6 * hours
        return figures

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        return {
            "layout": str(self.layout), "refused": self.refused, "bytes": self.bytes, "words": self.words,
            "links": self.links, "bubble": float(self.bubble), "seconds": self.seconds, "mfu": self.mfu,
            "hfu": self.hfu, "tokens_per_second": self.tokens_per_second,
        }  # fmt: skip
