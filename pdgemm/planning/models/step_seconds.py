"""The seconds of a training step by a model of the machine: rates of products, memory, links, and what overlaps."""

from __future__ import annotations

from functools import cached_property
from math import ceil
from statistics import fmean

from pdgemm.planning.machines.machine import CUDA, HOST, Call, Function, Machine
from pdgemm.planning.models.stage_state import state_of_stage
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.planning.models.training_step import TrainingStep

NODE, NETWORK = "node", "network"
# passes through memory forward: of two norms; of residuals and dropouts; of what splits heads; of an activation and its
# bias; and of scale, mask, softmax and dropout of the weights of attention
_NORM, _ROWS, _HEADS, _INNER, _WEIGHTS = 3, 4, 2, 4, 7
_BACKWARD = 1.6  # passes backward over those forward
_SCORES = 7  # passes over the scores of the vocabulary, forward and backward
_CORE, _FUSED = 0.5, 0.55  # of the rate of a large product, that of attention's many small ones; of a fused kernel
_KINDS = {
    "tensor": ("ring", "reduce"),  # all-gather, reduce-scatter
    "context": ("ring",),
    "gradients": ("reduce",),
    "parameters": ("ring",),
    "experts": ("exchange",),
    "homes": ("exchange",),
    "pipeline": ("shift",),
}  # of `machine.KINDS`, those of a collective, of which each moves as many bytes
_SENT = "tensor", "context", "experts"  # the parts of a layer that are transfers
# passes through memory at a home: of a matrix that comes, is packed twice and goes back; and in a step of Newton and
# Schulz of X, and of A and its polynomial
_WHOLE, _OF_X, _OF_SQUARES = 12, 5, 7
_EXPOSED = 3  # copies of own rows on a host: of a gather to its result and for other ranks, and of sums from there
# bytes of a parameter that an update of Adam reads and writes, with the norm of the gradients and their clipping; and
# those that 16 bits add: gradients to 32 bits, their scale, and parameters back (Megatron-LM 2021, optimizer.py)
_UPDATE, _MIXED = 28 + 4 + 8, 6 + 8 + 6


class StepSeconds:
    """The seconds of a step on a machine."""

    def __init__(self, step: TrainingStep, machine: Machine) -> None:
        self.step, self.shape, self.layout, self.machine = step, step.shape, step.layout, machine
        self._memory = 2 * self.machine.copy_bandwidth  # a copy reads and writes
        self._exposed, self._size = 1 - self.machine.overlap, self.layout.itemsize
        self._lines = _lines(self.layout)

    # ---------------------------------------------------------------- parts
    def link(self, kind: str) -> str:
        """Return whether the words of a kind stay inside a node, or travel over the network."""
        return NETWORK if self.machine.away(*self._lines[kind], self.layout.ranks) else NODE

    def transfer(self, kind: str, nbytes: float) -> float:
        """Return the seconds in which each rank of a line receives so many bytes from its neighbour.

        Rings that leave a node share its cards: one for each rank that lies between two neighbours, and as many more
        where a group of rings ends on the node of the next one.  In an exchange all ranks of a node receive at once.
        """
        stride, length = self._lines[kind]
        if length == 1:
            return 0.0
        away, group = self.machine.away(stride, length, self.layout.ranks), stride * length
        links = self.machine.inter if away else self.machine.intra
        kinds = ("reduce", "ring") if kind == "gradients" and not self.layout.zero else _KINDS[kind]  # an all-reduce
        node = self.machine.ranks_per_node or 1
        rings = stride * (1 + (group < self.layout.ranks and group % node > 0))
        cards = node * away if _KINDS[kind] == ("exchange",) else min(node, rings)
        return nbytes * (cards if away else 1) * fmean(links[x].beta for x in kinds)

    def _product(self, m: float, n: float, k: float) -> float:
        work = ceil(m), ceil(n), ceil(k)
        return self.machine.multiply(self.layout.element, work, work)

    def _passes(self, elements: float, passes: float) -> float:
        return elements * passes * self._size / self._memory

    def _linear(self, m: float, n: float, k: float) -> float:
        return self.machine.of_layer(self.layout.element, ceil(m), ceil(n), ceil(k))

    def _both(self, name: Function, elements: float, passes: float) -> float:
        """Return the seconds of a function forward and backward: those measured, or of its passes through memory."""
        measured = self.machine.functions.get(name)
        return self._passes(elements, passes) if measured is None else elements * measured * self._size / 4

    def _function(self, name: Function, elements: float, passes: float) -> float:
        """Return the seconds of a function forward, of so many passes, which backward are more."""
        return self._both(name, elements, passes * (1 + _BACKWARD)) / (1 + _BACKWARD)

    def _call(self, name: Call, shared: bool) -> float:
        """Return the seconds of the calls of a part of a step, with the latencies of messages where ranks share it."""
        return (self.machine.line_calls if shared else self.machine.calls).get(name, 0.0)

    # ---------------------------------------------------------------- a layer
    @cached_property
    def forward(self) -> dict[str, float]:
        """Seconds of a layer forward for a microbatch, by part."""
        shape, layout, step, tokens = self.shape, self.layout, self.step, self.step.tokens
        t, h, fused, machine = layout.tp, shape.hidden, layout.fused, self.machine
        inner = tokens * (shape.topk if shape.experts else 1)
        heads = (shape.queries + 2 * shape.keys) / t
        products = self._linear(tokens, heads, h) + self._linear(tokens, h, shape.queries / t)
        products += self._linear(inner, shape.ffn / t, h) * (2 if shape.gated else 1)
        products += self._linear(inner, h, shape.ffn / t)
        rate = machine.rate(layout.dtype, 1 << 16) * (2 * _FUSED if fused else _CORE)  # it skips half of the pairs
        elementwise = 2 * self._function("normalization", step.rows * h, _NORM)
        elementwise += self._function("activation", inner * shape.ffn / t, _INNER)
        elementwise += self._passes(step.rows * h, _ROWS) + self._passes(tokens * heads, _HEADS)
        weights = 0.0 if fused else tokens * shape.heads / t * shape.sequence
        row = (t - 1) / t * tokens * h
        pairs = 1 if shape.experts else 2  # of linear layers, the first of which gathers rows
        exposed = self._exposed if self.link("tensor") == NODE else 1  # slices of a product are too small for a network
        copied = 0.0
        if t > 1 and machine.device == HOST:
            copied = pairs * _EXPOSED * tokens * h / t * self._size / machine.copy_bandwidth
        travels = 2 * (layout.ep - 1) / layout.ep * step.rows * shape.topk * h if shape.experts else 0
        return {
            "products": products,
            "attention": tokens * shape.core_flops / t / rate,
            "elementwise": elementwise,
            "softmax": self._function("softmax", weights, _WEIGHTS),
            "calls": self._call("layer", t > 1) / 3,
            "tensor": exposed * self.transfer("tensor", 2 * pairs * row * self._size) + copied,
            "context": self._exposed * self.transfer("context", step.context_words * self._size),
            "experts": self.transfer("experts", travels * self._size),
        }

    @cached_property
    def backward(self) -> dict[str, float]:
        """Seconds of a layer backward for a microbatch, with what is computed again."""
        forward, layout = self.forward, self.layout
        factors = {"products": 2, "attention": 2, "calls": 2, "elementwise": _BACKWARD, "softmax": _BACKWARD}
        seconds = {part: time * factors.get(part, 1) for part, time in forward.items()}
        seconds["context"] *= 1 + layout.fused
        again = {"none": (), "selective": () if layout.fused else ("attention", "softmax"), "full": (*forward,)}
        for part in again[layout.recompute]:
            seconds[part] += forward[part]
        return seconds

    # ---------------------------------------------------------------- a step
    def of_step(self) -> dict[str, float]:
        """Return the seconds of a step by part, on a stage with the most layers, the scores and most transfers."""
        step, layout, size, m = self.step, self.layout, self._size, self.step.microbatches
        layers = layout.chunks * ceil(self.shape.layers / (layout.pp * layout.chunks))
        parts = {part: m * layers * (time + self.backward[part]) for part, time in self.forward.items()}
        state = state_of_stage(self.shape, layout, 0)
        moved = size + 2 * max(4, size) if layout.apart else 0  # a gradient, and the sum that it is added to
        parts["sums"] = (m - 1) * sum(x.words for x in state) * moved / self._memory
        stage = sum(parts.values())
        scores = step.tokens * self.shape.vocabulary / layout.tp
        product = self._linear(step.tokens, self.shape.vocabulary / layout.tp, self.shape.hidden)
        rows = step.rows * self.shape.hidden
        ends = self._both("softmax", scores, _SCORES) + self._both("normalization", rows, 0)
        parts["scores"] = m * (3 * product + ends + self._call("ends", layout.tp > 1))
        parts["embedding"] = m * 2 * self._both("embedding", rows, 0) * (layout.pp == 1)  # no stage has both ends
        sent = 2 * layout.chunks * step.tokens * self.shape.hidden / layout.tp if layout.pp > 1 else 0
        parts["pipeline"] = m * self.transfer("pipeline", sent * size)
        parts["bubble"] = float(step.bubble) * stage + (layout.pp - 1) * parts["pipeline"] / m / layout.chunks
        for kind, itemsize in (("gradients", max(4, size)), ("parameters", size)):
            parts[kind] = self._exposed * self.transfer(kind, step.words.get(kind, 0) * itemsize)
        parts["gradients"] = max(0.0, parts["gradients"] - self._behind)
        updated = sum(x.words / (x.ranks if x.zero else 1) for x in state)
        passes = _UPDATE + (_MIXED if size < 4 else 0)
        element = self.machine.functions.get("update", passes / self._memory)  # memory bounds it: float64 takes twice
        parts["optimizer"] = updated * element * max(4, size) / 4 + self._call("update", layout.ranks > 1)
        parts |= self.at_homes
        return {part: time for part, time in parts.items() if time}

    @cached_property
    def at_homes(self) -> dict[str, float]:
        """Seconds of matrices of Muon, which nothing hides: words there and back, and the work of the fullest home.

        A matrix (m, n), m <= n, takes (4 n m^2 + 2 m^3) flops in each of `muon_steps`, in the type of gradients.  That
        of its elements, the momentum and the step, is as an update of AdamW.
        """
        if not (loads := self.step.homes(0)):
            return {}
        steps = self.layout.muon_steps

        def seconds(m: int, n: int) -> float:
            products = ((m, m, n), (m, m, m), (m, n, m))
            passes = _WHOLE * m * n + steps * (_OF_X * m * n + _OF_SQUARES * m * m)
            return passes * loads.dtype.itemsize / self._memory + steps * sum(
                self.machine.multiply(loads.dtype, x, x) for x in products
            )

        of_shapes = {x: seconds(min(x), max(x)) for x in {*loads.shapes}}
        at_homes = loads.of_homes([of_shapes[x] for x in loads.shapes])
        return {
            "homes": self.transfer("homes", self.step.words.get("homes", 0) * loads.dtype.itemsize),
            "newton_schulz": float(at_homes.max()),
        }

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
        passes = self.step.microbatches if self.layout.reduce_each else 1
        return passes * (self.shape.layers - 1) * sum(self.backward.values())

    def of_phases(self) -> dict[str, float]:
        """Return the seconds of a step by the phases of a `StepReport`."""
        others = "scores", "embedding", "pipeline", "bubble", "gradients", "sums", "parameters", "optimizer"
        parts = dict.fromkeys(others, 0.0) | self.of_step()
        forward, backward = sum(self.forward.values()), sum(self.backward.values())
        layers = sum(time for part, time in parts.items() if part in self.forward) / (forward + backward)
        return {
            "forward": layers * forward + (parts["scores"] + parts["embedding"]) / 3,
            "backward": layers * backward + (parts["scores"] + parts["embedding"]) * 2 / 3 + parts["sums"],
            "pipeline": parts["pipeline"] + parts["bubble"],
            "reduce": parts["gradients"],
            "optimizer": sum(parts.get(part, 0.0) for part in ("parameters", "homes", "newton_schulz", "optimizer")),
        }

    def of_parts(self) -> dict[str, float]:
        """Return the seconds of a step by what ranks do; together they are those of `of_step`.

        forward, backward : what the passes compute.   transfers : what is not hidden of those of layers and gradients.
        wait : for other stages of the pipeline.   update : the optimizer, and parameters that it sends.
        """
        passes, phases = {"forward": self.forward, "backward": self.backward}, self.of_phases()
        whole = sum(sum(layer.values()) for layer in passes.values())
        layers = sum(time for part, time in self.of_step().items() if part in self.forward) / whole
        sent = {name: layers * sum(layer[part] for part in _SENT) for name, layer in passes.items()}
        return {
            **{name: phases[name] - seconds for name, seconds in sent.items()},
            "transfers": sum(sent.values()) + phases["reduce"],
            "wait": phases["pipeline"],
            "update": phases["optimizer"],
        }


def _lines(layout: TrainingLayout) -> dict[str, tuple[int, int]]:
    """Return the distance of neighbours, and the length, of each kind's lines."""
    data = layout.tp * layout.cp
    return {
        "tensor": (1, layout.tp),
        "context": (layout.tp, layout.cp),
        "gradients": (layout.tp, layout.copies),
        "parameters": (layout.tp, layout.copies),
        "experts": (data, layout.ep),
        "homes": (1, data * layout.dp),
        "pipeline": (data * layout.dp, layout.pp),
    }
