"""The plan of a training step on a machine, what follows for a whole run, and the layouts that are best for a model.

Seconds are a model of rates of products, memory and links, and of what overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import nsmallest
from math import ceil
from operator import attrgetter
from statistics import fmean
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import CUDA, Machine
from pdgemm.planning.models.model_layers import BACKWARD, Layers, Recompute, TrainingLayout
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_step import TrainingStep
from pdgemm.schedules.training.mesh_shape import MeshShape

NODE, NETWORK = "node", "network"
_CORE, _FUSED = 0.5, 0.55  # of the rate of a large product, that of attention's many small ones; of a fused kernel
_COMPUTED = "products", "attention", "elementwise", "softmax"  # the second and the last are of the core of attention
_OF_X, _OF_SQUARES = 5, 7  # passes through memory in a step of Newton and Schulz: of X, and of A and its polynomial
# bytes of a parameter that an update of Adam reads and writes, with the norm of the gradients and their clipping; and
# those that 16 bits add: gradients to 32 bits, their scale, and parameters back (Megatron-LM 2021, optimizer.py)
_UPDATE, _MIXED = 28 + 4 + 8, 6 + 8 + 6


@dataclass(frozen=True)
class ModelPlan(TrainingStep):
    """A training step of a model in a layout on a machine.   No MPI, no arrays."""

    machine: Machine

    @property
    def _memory(self) -> float:
        """Bytes per second that are read or written: a copy does both."""
        return 2 * self.machine.copy_bandwidth

    # ---------------------------------------------------------------- transfers
    @cached_property
    def _lines(self) -> dict[str, tuple[int, int, tuple[str, ...]]]:
        """By kind, the distance of neighbours, the length of lines, and `machine.KINDS`, which move equally much."""
        layout, data = self.layout, self.layout.tp * self.layout.cp
        reduced = ("reduce",) if layout.zero else ("reduce", "ring")  # an all-reduce
        return {
            "tensor": (1, layout.tp, ("ring", "reduce")),
            "context": (layout.tp, layout.cp, ("ring",)),
            "gradients": (layout.tp, layout.copies, reduced),
            "parameters": (layout.tp, layout.copies, ("ring",)),
            "experts": (data, layout.ep, ("exchange",)),
            "router": (1, data * layout.dp, ("ring",)),
            "owners": (1, layout.tp, ("exchange",)),
            "pipeline": (data * layout.dp, layout.pp, ("shift",)),
        }

    def link(self, kind: str) -> str:
        """Return whether the words of a kind stay inside a node, or are sent over the network."""
        return NETWORK if self.machine.away(*self._lines[kind][:2], self.layout.ranks) else NODE

    def transfer(self, kind: str, nbytes: float) -> float:
        """Return the seconds in which each rank of a line receives so many bytes from its neighbour.

        Rings that leave a node share its cards: one for each rank that lies between two neighbours, and as many more
        where a group of rings ends on the node of the next one.  In an exchange all ranks of a node receive at once.
        """
        stride, length, kinds = self._lines[kind]
        if length == 1:
            return 0.0
        away, group = self.machine.away(stride, length, self.layout.ranks), stride * length
        links = self.machine.inter if away else self.machine.intra
        node = self.machine.ranks_per_node or 1
        rings = stride * (1 + (group < self.layout.ranks and group % node > 0))
        cards = node * away if kinds == ("exchange",) else min(node, rings)
        return nbytes * (cards if away else 1) * fmean(links[x].beta for x in kinds)

    # ---------------------------------------------------------------- seconds
    def _sent(self, words: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of the transfers of layers that nothing hides, by kind."""
        seconds = dict[str, float]()
        for kind, number in words.items():
            # slices of a product are too small for a network; tokens of experts, and their numbers, are waited for
            waited = kind in ("experts", "router") or (kind == "tensor" and self.link(kind) == NETWORK)
            exposed = 1 if waited else 1 - self.machine.overlap
            itemsize = 8 if kind == "router" else self.layout.itemsize
            seconds[kind] = exposed * self.transfer(kind, number * itemsize)
        return seconds

    @cached_property
    def of_block(self) -> dict[str, dict[str, float]]:
        """The seconds of a block for a microbatch, forward and backward, by part; backward with what is computed again.

        What layers receive behind a product takes no time.
        """
        block = self.layers.block
        forward, backward = _computed(block, self.machine, self.layout.element, self.layout.fused)
        return {"forward": forward | self._sent(block.forward), "backward": backward | self._sent(block.backward)}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The seconds of a step by part, on a stage with the most layers, the scores and most transfers."""
        layout, m, size, wide = self.layout, self.microbatches, self.layout.itemsize, self.layout.wide
        blocks = layout.chunks * ceil(self.shape.layers / (layout.pp * layout.chunks))
        forward, backward = self.of_block.values()
        parts = {part: m * blocks * (time + backward.get(part, 0)) for part, time in forward.items()}
        state = self.state_of(0)
        moved = size + 2 * wide if layout.apart else 0  # a gradient, and the sum that it is added to
        parts["sums"] = (m - 1) * sum(x.words for x in state) * moved / self._memory
        stage = sum(parts.values())
        ends = _computed(self.layers.last, self.machine, layout.element, layout.fused)
        parts["scores"] = m * sum(sum(x.values()) for x in ends)
        tokens = layout.microbatch * self.shape.sequence / layout.cp / layout.tp  # equal rows are sent in parts
        parts["pipeline"] = m * self.transfer("pipeline", 2 * layout.chunks * tokens * self.shape.hidden * size)
        parts["bubble"] = float(self.bubble) * stage + (layout.pp - 1) * parts["pipeline"] / m / layout.chunks
        for kind, itemsize in (("gradients", wide), ("parameters", size)):
            parts[kind] = (1 - self.machine.overlap) * self.transfer(kind, self.words.get(kind, 0) * itemsize)
        parts["gradients"] = max(0.0, parts["gradients"] - self._behind)
        updated = sum(x.words / (x.ranks if x.zero else 1) for x in state)
        passes = _UPDATE + (_MIXED if size < 4 else 0)
        parts["optimizer"] = updated * passes / self._memory * wide / 4
        parts["owners"] = self.transfer("owners", self.words.get("owners", 0) * wide)
        parts["newton_schulz"] = self._newton_schulz if layout.optimizer == "muon" else 0
        return {part: time for part, time in parts.items() if time}

    @cached_property
    def _newton_schulz(self) -> float:
        """The seconds of Muon's matrices on a rank, where the ranks that divide them have equally much work.

        A matrix (m, n), m <= n, takes (4 n m^2 + 2 m^3) flops in each of `muon_steps`, in the type of gradients.  That
        of its elements, the momentum and the step, is as an update of AdamW.
        """
        kind, layout, seconds = np.dtype(f"f{self.layout.wide}"), self.layout, list[float]()
        for m, n in (sorted(x) for layer in self.layers.block.layers for x in layer.matrices):
            passed = (_OF_X * m * n + _OF_SQUARES * m * m) * self.layout.wide / self._memory
            work = ((m, m, n), (m, m, m), (m, n, m))
            seconds.append(layout.muon_steps * (passed + sum(_product(self.machine, kind, *x) for x in work)))
        owners = layout.tp * (layout.copies if layout.zero else 1)
        return max(*seconds, self.blocks_of(0) * sum(seconds) / owners)

    @cached_property
    def _behind(self) -> float:
        """The seconds of a step in which GPUs compute while their gradients are reduced.

        With one pipeline stage a bucket is reduced as soon as it is ready, behind the layers before it (Li et al., VLDB
        13(12), 2020); that of the first layer is ready at the end.  With several, gradients are reduced after the last
        backward pass, as Megatron-LM does: its `training.py` refuses PyTorch's overlap for pipelines, and SC 2021's
        `run_table_1.sh` asks for it with one stage alone.  On hosts, ranks move messages with the cores that compute.
        """
        if self.layout.pp > 1 or self.machine.device != CUDA:
            return 0.0
        passes = self.microbatches if self.layout.zero > 1 else 1
        return passes * (self.shape.layers - 1) * sum(self.of_block["backward"].values())

    # ---------------------------------------------------------------- figures
    @cached_property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @cached_property
    def step_tokens(self) -> int:
        return self.batch * self.shape.sequence

    def _share(self, flops: float) -> float:
        gamma = self.machine.gamma
        peak = self.machine.peak or max(gamma.get(self.layout.dtype, gamma["float32"]).values())
        return flops / (self.step_seconds * self.layout.ranks * peak)

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own flops take."""
        return self._share(self.shape.flops(self.step_tokens))

    @property
    def hfu(self) -> float:
        """The share of the peak that all flops take, also those that are computed again."""
        return self._share(self.shape.flops(self.step_tokens, self.layout.recompute))

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds

    @cached_property
    def refused(self) -> str:
        """Why this layout cannot be run, and by how much; "" where it can."""
        if why := self.lies():
            return why
        if self.machine.memory and self.all_bytes > self.machine.memory:
            over = self.all_bytes / self.machine.memory - 1
            return f"{self.all_bytes / 1e9:.1f} GB, {100 * over:.2g}% too much"
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
            "links": {kind: self.link(kind) for kind in self.words}, "bubble": float(self.bubble),
            "seconds": self.seconds, "mfu": self.mfu, "hfu": self.hfu, "tokens_per_second": self.tokens_per_second,
        }  # fmt: skip


@lru_cache(maxsize=1024)  # of layouts with the same layers
def _computed(layers: Layers, machine: Machine, dtype: np.dtype, fused: bool) -> tuple[dict[str, float], ...]:
    """Return the seconds of products and passes forward, and backward with what is computed again."""
    forward, backward = (dict.fromkeys(_COMPUTED, 0.0) for _ in range(2))
    rate = machine.rate(str(dtype), 1 << 16) * (2 * _FUSED if fused else _CORE)  # fused: it skips half of the pairs
    for layer in layers.layers:
        if layer.core:
            multiplied = sum(2 * m * n * k / rate for m, n, k in layer.products)
        else:
            multiplied = sum(_product(machine, dtype, *x) for x in layer.products)
        both = multiplied, layer.passed * dtype.itemsize / 2 / machine.copy_bandwidth
        for part, seconds, times in zip(_COMPUTED[layer.core :: 2], both, (2, BACKWARD)):
            forward[part] += seconds
            backward[part] += (times + layer.again) * seconds
    return forward, backward


def _product(machine: Machine, dtype: np.dtype, *work: float) -> float:
    m, n, k = map(ceil, work)
    return machine.multiply(dtype, (m, n, k), (m, n, k))


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
